// Validation: the loss of held-out text and the model's translations of its first sentences.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "frit/data/batcher.h"
#include "frit/data/token_file.h"
#include "frit/data/tokenizer.h"
#include "frit/infer/options.h"
#include "frit/memory/memory.h"
#include "frit/train/config.h"
#include "frit/train/prepare.h"
#include "frit/train/step.h"

namespace frit {

class Generator;

// What one validation found.
struct ValidationResult {
  double loss = 0, perplexity = 0;  // nats a target token, without label smoothing
  std::optional<double> bleu;
  std::vector<std::string> translations;  // of sources(), if validation.bleu
};

// The validation text of a run, and what is needed to translate it. One thread drives it.
class Validation {
 public:
  // Takes the text's token file and batches all of it; with validation.bleu reads the sentences that are translated
  // from the text itself. say hears what does not fit the model. The model is translated with where
  // it lies: on gpu, if there is one. tokenizer, pool and gpu must outlive this. Errors:
  // frit::Error if the text cannot be read or the search's settings do not suit the model.
  Validation(const TrainConfig& config, const TransformerConfig& sizes, const Tokenizer& tokenizer, TokenFile file,
             ThreadPool& pool, Gpu* gpu, const Say& say);
  ~Validation();
  Validation(const Validation&) = delete;
  Validation& operator=(const Validation&) = delete;

  uint64_t body_hash() const { return file_.body_hash(); }
  // Sentences that are translated, and what they should become.
  const std::vector<std::string>& sources() const { return sources_; }
  const std::vector<std::string>& references() const { return references_; }

  // Records the plans of all its batches.
  void plan(TrainingStep& step);
  // Validates the weights that the model holds now. Nothing if stop_requested said so before it was done.
  std::optional<ValidationResult> run(TrainingStep& step, Transformer& model,
                                      const std::function<bool()>& stop_requested);

 private:
  void read_sentences(const TrainConfig& config, const Say& say);
  std::optional<std::vector<std::string>> translate(Transformer& model, const std::function<bool()>& stop_requested);
  int64_t translated_tokens(const Transformer& model) const;

  const TransformerConfig sizes_;
  const Tokenizer& tokenizer_;
  GenerateOptions search_;
  TokenFile file_;
  Batcher batcher_;
  Batch batch_;
  int64_t batches_ = 0;  // of a validation
  // The sentences that are translated.
  std::vector<std::vector<int32_t>> ids_;
  std::vector<std::string> sources_, references_;
  Gpu* gpu_;
  Memory memory_;
  Context context_;
  std::unique_ptr<Generator> generator_;
};

}  // namespace frit
