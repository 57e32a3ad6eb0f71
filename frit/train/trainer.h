// The trainer: from a configuration to a trained model directory, resumable at any moment.
#pragma once
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "frit/models/transformer/config.h"
#include "frit/train/config.h"

namespace frit {

struct AttentionShape;
class Tokenizer;
class Workspace;

// Where a trainer writes for people, and how it is asked to stop.
struct TrainerOutput {
  std::ostream* log = nullptr;  // progress and notices; nullptr: silent
  bool bar = false;             // a progress bar (terminals); else plain lines
  bool colour = false;
  int columns = 80;                      // of the terminal
  std::function<bool()> stop_requested;  // asked after every batch; true: save a checkpoint and end
};

// Places where tests reach in.
struct TrainerHooks {
  // Before each update, with the number of updates tried before it: may write into the gradients.
  std::function<void(int64_t attempt, Workspace& workspace)> before_update;
  std::function<void(int64_t updates)> after_update;
  // Before each change of the disk by a checkpoint, see CheckpointOptions::before_operation.
  std::function<void(std::string_view operation)> checkpoint_operation;
  // In the place of timing attention by a GPU's clock, which the simulator has not: see choose_attention.
  std::function<double(const AttentionShape& shape, std::string_view implementation)> attention_timer;
};

enum class TrainEnd : uint8_t {
  kFinished,      // stop_after or stop_after_seconds was reached
  kEarlyStopped,  // no improvement for `patience` validations
  kInterrupted,   // stop was requested; run again to go on
};

// What is known at the end.
struct TrainResult {
  TrainEnd end = TrainEnd::kFinished;
  int64_t updates = 0, skipped = 0, target_tokens = 0;
  double epochs = 0, seconds = 0;
  std::optional<double> loss, bleu;  // of the last validation
  std::string model_directory;       // empty if interrupted
};

// A run directory holds: config.toml (as last run), lock, tokenizer/, data/*.tokens, checkpoints/ (periodic and best),
// interrupted/ (what stopping saved), metrics.jsonl, tensorboard/, and at the end model/, in Hugging Face's layout.
// If it has a checkpoint, training goes on from the newest, with the same bits as if it had never stopped; the
// configuration may then differ only in keys that say when to log, validate, save and stop (see changed_keys).
class Trainer {
 public:
  // Errors: frit::Error if the configuration cannot work.
  Trainer(TrainConfig config, TrainerOutput output = {}, TrainerHooks hooks = {});
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Prepares, trains, and writes RUN/model. Errors: frit::Error for bad files, a directory another trainer uses, a
  // configuration that does not fit the run's checkpoint, or max_not_finite bad updates in a row.
  TrainResult run();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The model's configuration: preset, single keys and the tokenizer's vocabularies. Errors: frit::Error naming the key.
TransformerConfig model_config(const TrainConfig& config, const Tokenizer& tokenizer);
// The same for a vocabulary of the configured size, before there is a tokenizer.
TransformerConfig model_config(const TrainConfig& config);

// The keys in which two configurations of one run differ though they may not: one line a key, with both values.
// Empty: a run of `before` may go on as `now`.
std::string changed_keys(const TrainConfig& before, const TrainConfig& now);

}  // namespace frit
