// Stops training when a metric has not improved for a while.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace frit {

struct EarlyStopperOptions {
  int64_t patience = 0;           // checks without improvement that stop training; 0: never stop
  bool higher_is_better = false;  // true for BLEU, false for a loss
  double min_delta = 0;           // an improvement is larger than this
};

class EarlyStopper {
 public:
  // Errors: std::invalid_argument for a negative patience or a min_delta that is negative or not finite.
  explicit EarlyStopper(const EarlyStopperOptions& options);

  // Takes the metric of a validation; true when it improved on the best so far (the first always does). A metric that
  // is not finite never improves.
  bool update(double metric);

  bool should_stop() const { return options_.patience > 0 && stalled_ >= options_.patience; }
  std::optional<double> best() const { return best_; }
  int64_t stalled() const { return stalled_; }  // checks since the last improvement

  // The state (not the options) as JSON, for a checkpoint. restore() errors: frit::Error if the text is not one.
  std::string save() const;
  void restore(std::string_view json);

 private:
  EarlyStopperOptions options_;
  std::optional<double> best_;
  int64_t stalled_ = 0;
};

}  // namespace frit
