#include "frit/train/period.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "frit/core/error.h"

namespace frit {
namespace {

double amount(PeriodUnit unit, const TrainingPosition& position) {
  switch (unit) {
    case PeriodUnit::kUpdates:
      return static_cast<double>(position.updates);
    case PeriodUnit::kEpochs:
      return position.epochs;
    case PeriodUnit::kTargetTokens:
      return static_cast<double>(position.target_tokens);
  }
  return 0;
}

// Whole periods in an amount. Fractions of epochs are sums of rounded numbers: what lies within 1e-9 of a multiple is
// one.
double multiples(double amount, double period) {
  return std::floor(amount / period + 1e-9);
}

}  // namespace

Period parse_period(std::string_view text) {
  Period period;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, period.count, std::chars_format::fixed);
  const auto bad = [&](std::string_view why) {
    fail_argument(
        "[period] {}, got '{}', expected <number>[k|M|G][u|e|t], e.g. 500u (updates), 2e (epochs), 100Kt "
        "(target tokens)",
        why, text);
  };
  if (error != std::errc()) bad("no number");
  std::string_view suffix(rest, static_cast<size_t>(end - rest));
  if (!suffix.empty()) {
    const char scale = suffix[0];
    const double factor = scale == 'k' || scale == 'K' ? 1e3 : scale == 'M' ? 1e6 : scale == 'G' ? 1e9 : 1;
    period.count *= factor;
    if (factor != 1) suffix.remove_prefix(1);
  }
  if (suffix == "e") {
    period.unit = PeriodUnit::kEpochs;
  } else if (suffix == "t") {
    period.unit = PeriodUnit::kTargetTokens;
  } else if (!suffix.empty() && suffix != "u") {
    bad(fmt::format("unknown unit '{}'", suffix));
  }
  if (!std::isfinite(period.count)) bad("not a finite number");
  if (std::signbit(period.count)) bad("negative");
  if (period.unit != PeriodUnit::kEpochs && period.count != std::floor(period.count))
    bad("a fraction of an update or token");
  return period;
}

std::string format_period(const Period& period) {
  const char* unit = period.unit == PeriodUnit::kUpdates ? "u" : period.unit == PeriodUnit::kEpochs ? "e" : "t";
  if (period.unit == PeriodUnit::kEpochs) {
    // Enough digits to read the same number back, and never an exponent ('e' is the unit).
    for (int digits = 0; digits <= 20; ++digits) {
      const std::string text = fmt::format("{:.{}f}e", period.count, digits);
      if (parse_period(text) == period) return text;
    }
    return fmt::format("{:.30f}e", period.count);
  }
  for (auto [scale, letter] : {std::pair(1e9, "G"), std::pair(1e6, "M"), std::pair(1e3, "K")}) {
    if (period.count >= scale && std::fmod(period.count, scale) == 0)
      return fmt::format("{:.0f}{}{}", period.count / scale, letter, unit);
  }
  return fmt::format("{:.0f}{}", period.count, unit);
}

bool period_passed(const Period& period, const TrainingPosition& before, const TrainingPosition& now) {
  if (period.never()) return false;
  return multiples(amount(period.unit, now), period.count) > multiples(amount(period.unit, before), period.count);
}

bool period_reached(const Period& period, const TrainingPosition& now) {
  return !period.never() && multiples(amount(period.unit, now), period.count) >= 1;
}

double period_fraction(const Period& period, const TrainingPosition& now) {
  return period.never() ? 0 : std::clamp(amount(period.unit, now) / period.count, 0.0, 1.0);
}

}  // namespace frit
