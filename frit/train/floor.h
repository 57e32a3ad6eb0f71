// The floor of a training step on a GPU: its products and its attention alone, each as fast as it was measured, and the
// bytes of the update at the speed of a plain copy. No step is faster unless it does less.
#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace frit {

struct StepFloor {
  double products_ms = 0, attention_ms = 0, update_ms = 0;
  double ms() const { return products_ms + attention_ms + update_ms; }
};

// Bytes of an update by parameter: a 16-bit parameter and its gradient, and fp32 moments; 2 + 2 + 8 read, 2 + 8
// written.
constexpr int64_t kFloorUpdateBytes = 22;

// parts: microseconds of kinds of work, as TrainingStep::time_parts names them. copy_bytes_per_s: of a plain copy, read
// and write together.
StepFloor step_floor(const std::map<std::string, double>& parts, int64_t parameters, double copy_bytes_per_s);

}  // namespace frit
