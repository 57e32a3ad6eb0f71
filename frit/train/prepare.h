// What comes before the first step: the run directory, the tokenizer, token files, batches, the model's sizes.
#pragma once
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "frit/data/batcher.h"
#include "frit/data/token_file.h"
#include "frit/data/tokenizer.h"
#include "frit/models/transformer/transformer.h"
#include "frit/train/config.h"
#include "frit/train/schedule.h"
#include "frit/train/step.h"

namespace frit {

// Holds RUN/lock, so that two trainers never write to one directory; the system lets go of it if the process dies.
class RunLock {
 public:
  // Makes the directory. Errors: frit::Error if another process holds the lock.
  explicit RunLock(const std::filesystem::path& directory);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int fd_ = -1;
};

using Say = std::function<void(std::string_view)>;
using StopRequested = std::function<bool()>;

// Finds settings that do not go together: sizes of the model, a schedule that ends before its warm-up. Reads no file
// but model.init_from's. Errors: frit::Error that names the key.
void check_settings(const TrainConfig& config);

// Finds what is wrong with a configuration and its files before minutes go into a tokenizer: files that cannot be read,
// and what check_settings finds. Errors: frit::Error that names the key.
void check_before_preparing(const TrainConfig& config);

// Loads RUN/tokenizer if it was made from the same text and settings, or if the run has a checkpoint (resuming); else
// takes the configured one, or that of model.init_from, or trains one, and saves it there. SentencePiece's training
// cannot be interrupted: if stop_requested (asked from another thread, a few times a second) is true meanwhile, say
// hears that stopping has to wait.
Tokenizer prepare_tokenizer(const TrainConfig& config, const std::filesystem::path& run, bool resuming, const Say& say,
                            const StopRequested& stop_requested);

// Opens RUN/data/NAME.tokens, built if need be. Errors: BuildStopped if stop_requested was true while it was built.
TokenFile prepare_tokens(const TrainConfig& config, const std::filesystem::path& run, const char* name,
                         const std::string& source, const std::string& target, const Tokenizer& tokenizer,
                         ThreadPool& pool, const Say& say, const StopRequested& stop_requested);

BatcherOptions train_batches(const TrainConfig& config, const TokenFile& file, const Tokenizer& tokenizer);
// Every sentence that the model has positions for, in the corpus's order.
BatcherOptions valid_batches(const TrainConfig& config, const TransformerConfig& model, const TokenFile& file);

// The GPU that run.device names; nullptr: the CPU. Errors: frit::Error if there is none, or this build has no CUDA.
std::unique_ptr<Gpu> training_gpu(const TrainConfig& config);
// The size of a batch of so many tokens on either side (0: training.batch_tokens), all of the longest sentences let in.
BatchSize full_batch(const TrainConfig& config, int64_t tokens = 0);
StepSettings step_settings(const TrainConfig& config, const Workspace& workspace);
Transformer::Options training_options(const TrainConfig& config, Gpu* gpu = nullptr);

// Warm-up and end of the schedule in updates; the batcher is asked for the batches of an epoch if a period is not in
// updates.
Schedule make_schedule(const TrainConfig& config, const Batcher& batcher);

}  // namespace frit
