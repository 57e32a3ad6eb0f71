// Periods of training with Marian's units: "500u" updates, "2e" epochs, "100Kt" or "1Mt" target tokens.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace frit {

enum class PeriodUnit { kUpdates, kEpochs, kTargetTokens };

// How far training has come. `epochs` counts whole passes and the fraction of the current one.
struct TrainingPosition {
  int64_t updates = 0;
  double epochs = 0;
  int64_t target_tokens = 0;
};

// An amount of training. A count of 0 means never.
struct Period {
  double count = 0;
  PeriodUnit unit = PeriodUnit::kUpdates;

  bool never() const { return count == 0; }
  bool operator==(const Period&) const = default;
};

// Reads "<number>[k|K|M|G][u|e|t]"; without a unit the number counts updates. Fractions are fine ("0.5e", "1.5Kt").
// Errors: std::invalid_argument naming the text and the form, also for negative numbers and fractions of an update.
Period parse_period(std::string_view text);

// The shortest text that parse_period reads as the same period, e.g. "500u", "2e", "100Kt".
std::string format_period(const Period& period);

// True when a multiple of the period lies in (before, now]: "save every 500u" asks this after each update.
bool period_passed(const Period& period, const TrainingPosition& before, const TrainingPosition& now);

// True when training has reached the period: "stop after 10e". Never for a count of 0.
bool period_reached(const Period& period, const TrainingPosition& now);

// Share of the period that is done, in [0, 1]; 0 for a count of 0.
double period_fraction(const Period& period, const TrainingPosition& now);

}  // namespace frit
