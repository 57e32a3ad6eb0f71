// How fast training steps are: the same step the trainer runs, on random tokens with given lengths (`frit bench step`).
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "frit/train/config.h"
#include "frit/train/floor.h"

namespace frit {

// Batches as lists of (source tokens, target tokens) of their sentences.
using BatchLengths = std::vector<std::vector<std::pair<int64_t, int64_t>>>;

// Reads [[[source, target], ...], ...] as bench/peers/make_batches.py writes it. Errors: frit::Error.
BatchLengths parse_batch_lengths(std::string_view json);

struct TrainingMeasurement {
  int64_t steps = 0, parameters = 0;
  int threads = 0;
  std::string precision, device;
  // Tokens count source and target. The median over steps of tokens / seconds; all tokens over all time.
  double tokens_per_s = 0, total_tokens_per_s = 0;
  double step_ms = 0, forward_ms = 0, backward_ms = 0, update_ms = 0;  // medians
  std::vector<double> ms;                                              // of each step
  // From making the model to the end of the first step (weights, planning, tuning), and to the first that is timed.
  double first_step_s = 0, warm_s = 0;
  // On a GPU: what it has free after the first step, and after the last.
  int64_t free_first_bytes = 0, free_last_bytes = 0;
  int64_t products_tuned = 0;  // shapes of products that were timed before
  // Of each kind of attention that was timed (attention_key): what runs, and the microseconds of all that take it.
  std::map<std::string, std::string> attention;
  std::map<std::string, std::map<std::string, double>> attention_us;
  double loss = 0;  // of the last step, nats a target token
  int64_t workspace_bytes = 0, arena_bytes = 0, library_bytes = 0, peak_rss_bytes = 0;
  // model_case: a name for what was measured; may be empty.
  std::map<std::string, double> parts_us;  // TrainingStep::time_parts of the first batch, if asked for
  std::optional<StepFloor> floor;          // with the parts
  double copy_bytes_per_s = 0;             // and what the update's share of it was reckoned with
  std::string to_json(std::string_view model_case = {}) const;
};

// Trains config's model (vocabulary: data.vocabulary) for `warm` steps that are not counted and then `steps` more, one
// batch each, over again from the first when they run out. Nothing is written. Errors: frit::Error for batches without
// tokens or a configuration that cannot work. parts: also times each kind of work apart (GPU). tuning: on a GPU, a file
// with what timing found: it is read if it is there, and written with what was found beside.
TrainingMeasurement measure_training(const TrainConfig& config, const BatchLengths& batches, int64_t steps,
                                     int64_t warm = 3, bool parts = false, const std::string& tuning = {});

}  // namespace frit
