// Translates token ids with an encoder-decoder Transformer on the CPU: greedy, beam search, sampling.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "frit/backend/context.h"
#include "frit/infer/options.h"
#include "frit/models/transformer/transformer.h"

namespace frit {

// One sentence to translate.
struct GenerateInput {
  std::span<const int32_t> source;  // ids, EOS at the end
  std::span<const int32_t> prefix;  // tokens that every output begins with
  // Which sentence it is: with sampling, the random numbers depend on (seed, index, sample, position) alone.
  uint64_t index = 0;
};

struct Hypothesis {
  std::vector<int32_t> tokens;      // behind the start token; prefix and EOS included
  float score = 0;                  // sum of the generated tokens' log-probabilities / GenerateOptions::normaliser
  std::vector<float> token_scores;  // one a generated token, if asked for; processors included
};

// Decodes with one model. Computes in fp32 from the model's parameters in their dtype; weights are laid out once.
// What a sentence gets has the same bits whatever other sentences are in the call, and for any number of threads.
// Equal to transformers' generate() of the same settings but for rounding. One call at a time.
// Cost: beside the packed weights, keys and values of the tokens decoded so far, grown in steps of 32 positions and
// kept for the next call; a decoding step copies none of them.
class Generator {
 public:
  // context's pool runs the work; its memory and random key are not used. Both, and the model, must outlive this.
  Generator(Context& context, const Transformer& model);
  ~Generator();
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  // Reads the model's parameters again after they changed.
  void refresh();

  // Hypotheses of each input, best first: nbest of them, or fewer where fewer could finish. All inputs are one batch.
  // Errors: std::invalid_argument for options that make no sense, ids outside the vocabulary, an empty source, a source
  // longer than the model's positions, a prefix that leaves no room.
  std::vector<std::vector<Hypothesis>> generate(std::span<const GenerateInput> inputs, const GenerateOptions& options);

  const TransformerConfig& config() const { return model_.config(); }

 private:
  struct Impl;
  const Transformer& model_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace frit
