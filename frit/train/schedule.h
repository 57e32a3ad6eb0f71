// Learning-rate schedules with warm-up: pure functions of the step, so that resuming needs no state.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace frit {

enum class ScheduleKind { kConstant, kLinear, kCosine, kInverseSqrt };

// Steps count optimizer updates from 1. All kinds rise linearly to `peak` over warmup_steps, reached at that step.
// Math, for step t > w = warmup_steps, T = total_steps, r = (t - w) / (T - w) held to [0, 1]:
//   constant      peak
//   linear        peak + (floor - peak) * r
//   cosine        floor + (peak - floor) * (1 + cos(pi r)) / 2
//   inverse-sqrt  max(floor, peak * sqrt(max(w, 1) / t))
//   warm-up       peak * t / w, for t <= w
struct Schedule {
  ScheduleKind kind = ScheduleKind::kInverseSqrt;
  double peak = 3e-4;
  double floor = 0;
  int64_t warmup_steps = 4000;
  int64_t total_steps = 0;  // linear and cosine only: the step from which the rate stays at `floor`
};

// Reads "constant", "linear", "cosine" or "inverse-sqrt" ('_' for '-' is fine).
// Errors: std::invalid_argument naming the nearest name.
ScheduleKind parse_schedule(std::string_view name);
std::string_view schedule_name(ScheduleKind kind);

// Errors: std::invalid_argument unless 0 <= floor <= peak, warmup_steps >= 0, and (linear, cosine) total_steps >
// warmup_steps.
void check_schedule(const Schedule& schedule);

// Learning rate of update `step` (the first is 1). Errors: std::invalid_argument if step < 1.
double learning_rate(const Schedule& schedule, int64_t step);

}  // namespace frit
