#include "frit/train/swallowed_report.h"

#include <fstream>

#include "frit/core/error.h"
#include "frit/train/progress.h"

namespace frit {

std::string report_swallowed(const std::filesystem::path& run, int64_t step,
                             const std::vector<TrainingStep::Swallowed>& tensors) {
  int64_t updates = 0, lost = 0;
  std::string line = fmt::format("{{\"step\": {}, \"tensors\": {{", step);
  for (const auto& t : tensors) {
    updates += t.updates, lost += t.lost;
    line += fmt::format("{}\"{}\": [{}, {}]", &t == &tensors.front() ? "" : ", ", t.name, t.updates, t.lost);
  }
  std::ofstream(run / "swallowed.jsonl", std::ios::app) << line << "}}\n";
  return fmt::format("Swallowed: {:.3f} % of {} updates of single parameters since the last line",
                     updates > 0 ? 100.0 * static_cast<double>(lost) / static_cast<double>(updates) : 0.0,
                     format_count(updates));
}

}  // namespace frit
