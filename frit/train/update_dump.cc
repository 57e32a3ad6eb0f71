#include "frit/train/update_dump.h"

#include <fmt/ranges.h>

#include <utility>

#include "frit/core/error.h"

namespace frit {

UpdateDump::UpdateDump(const std::filesystem::path& run, int64_t updates)
    : path_(run / "batches.jsonl"), updates_(updates) {
  std::filesystem::remove(path_);
}

void UpdateDump::add(const Batch& batch, int64_t update, double rate) {
  if (update > updates_) return;
  noted_ += fmt::format("{{\"step\": {}, \"lr\": {}", update, rate);
  for (const auto& [name, values] : {std::pair{"source_ids", &batch.source_ids},
                                     {"source_offsets", &batch.source_offsets},
                                     {"target_ids", &batch.target_ids},
                                     {"labels", &batch.labels},
                                     {"target_offsets", &batch.target_offsets}})
    noted_ += fmt::format(", \"{}\": [{}]", name, fmt::join(*values, ", "));
  noted_ += "}\n";
}

void UpdateDump::write() {
  if (noted_.empty()) return;
  if (!file_.is_open()) file_.open(path_, std::ios::trunc);
  file_ << std::exchange(noted_, {}) << std::flush;
  if (!file_) fail("[train] cannot write {}", path_.string());
}

}  // namespace frit
