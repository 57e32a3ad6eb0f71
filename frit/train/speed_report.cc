#include "frit/train/speed_report.h"

#include <cmath>

#include "frit/core/error.h"
#include "frit/train/floor.h"
#include "frit/train/progress.h"

namespace frit {

std::string speed_report(TrainingStep& step, int64_t parameters, int64_t accumulate, double tokens_per_s,
                         const std::function<const Batch&()>& next_batch) {
  std::string line =
      fmt::format("Speed: {} source and target tokens a second", format_count(std::llround(tokens_per_s)));
  if (!step.context().on_gpu() || !built_with_cuda()) return line;
  try {
    constexpr int kBatches = 3, kReplays = 5;
    const double copy = step.time_copy(kReplays);
    StepFloor sum;
    int64_t tokens = 0;
    for (int i = 0; i < kBatches; ++i) {
      const Batch& batch = next_batch();
      const StepFloor floor = step_floor(step.time_parts(batch, kReplays, {"product", "attention"}), parameters, copy);
      sum.products_ms += floor.products_ms, sum.attention_ms += floor.attention_ms;
      sum.update_ms += floor.update_ms / static_cast<double>(accumulate);
      tokens += batch.source_tokens() + batch.target_tokens();
    }
    line += fmt::format("; {:.1f} % of the floor (a batch: products {:.2f} ms, attention {:.2f}, update {:.2f})",
                        100 * tokens_per_s * sum.ms() / (1e3 * static_cast<double>(tokens)), sum.products_ms / kBatches,
                        sum.attention_ms / kBatches, sum.update_ms / kBatches);
  } catch (const Error& e) {  // the model is saved: this is no reason to fail
    line += fmt::format("; the floor could not be measured: {}", e.what());
  }
  return line;
}

}  // namespace frit
