#include "frit/train/schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "frit/core/error.h"
#include "frit/train/names.h"

namespace frit {
namespace {
constexpr std::array<std::string_view, 4> kNames = {"constant", "linear", "cosine", "inverse-sqrt"};  // by ScheduleKind
}

ScheduleKind parse_schedule(std::string_view name) {
  std::string wanted(name);
  std::replace(wanted.begin(), wanted.end(), '_', '-');
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (wanted == kNames[i]) return static_cast<ScheduleKind>(i);
  }
  fail_argument("[schedule] unknown schedule '{}', did you mean '{}'? (constant, linear, cosine, inverse-sqrt)", name,
                nearest_name(name, kNames));
}

std::string_view schedule_name(ScheduleKind kind) {
  return kNames[static_cast<size_t>(kind)];
}

void check_schedule(const Schedule& s) {
  FRIT_CHECK(std::isfinite(s.peak) && s.peak >= 0, "[schedule] peak is {}, expected a finite number of 0 or more",
             s.peak);
  FRIT_CHECK(s.floor >= 0 && s.floor <= s.peak, "[schedule] floor is {}, expected 0 to the peak {}", s.floor, s.peak);
  FRIT_CHECK(s.warmup_steps >= 0, "[schedule] warmup_steps is {}, expected 0 or more", s.warmup_steps);
  if (s.kind == ScheduleKind::kLinear || s.kind == ScheduleKind::kCosine) {
    FRIT_CHECK(s.total_steps > s.warmup_steps, "[schedule] {} has total_steps {}, expected more than warmup_steps {}",
               schedule_name(s.kind), s.total_steps, s.warmup_steps);
  }
}

double learning_rate(const Schedule& s, int64_t step) {
  FRIT_CHECK(step >= 1, "[schedule] step is {}, expected 1 or more", step);
  const double t = static_cast<double>(step), w = static_cast<double>(s.warmup_steps);
  if (step <= s.warmup_steps) return s.peak * t / w;
  const double r = std::clamp((t - w) / (static_cast<double>(s.total_steps) - w), 0.0, 1.0);
  switch (s.kind) {
    case ScheduleKind::kConstant:
      return s.peak;
    case ScheduleKind::kLinear:
      return s.peak + (s.floor - s.peak) * r;
    case ScheduleKind::kCosine:
      return s.floor + (s.peak - s.floor) * (1 + std::cos(std::numbers::pi * r)) / 2;
    case ScheduleKind::kInverseSqrt:
      return std::max(s.floor, s.peak * std::sqrt(std::max(w, 1.0) / t));
  }
  return s.peak;
}

}  // namespace frit
