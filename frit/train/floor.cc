#include "frit/train/floor.h"

#include "frit/core/error.h"

namespace frit {

StepFloor step_floor(const std::map<std::string, double>& parts, int64_t parameters, double copy_bytes_per_s) {
  FRIT_CHECK(copy_bytes_per_s > 0, "[floor] a copy of {} bytes a second", copy_bytes_per_s);
  const auto ms_of = [&](const char* part) {
    const auto found = parts.find(part);
    return found == parts.end() ? 0.0 : found->second / 1e3;
  };
  return {ms_of("product"), ms_of("attention"),
          1e3 * static_cast<double>(kFloorUpdateBytes * parameters) / copy_bytes_per_s};
}

}  // namespace frit
