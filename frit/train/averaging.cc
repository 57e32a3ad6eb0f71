#include "frit/train/averaging.h"

#include <cmath>

#include "frit/core/error.h"

namespace frit {

void WeightAverage::add(std::span<const float> values) {
  if (count_ == 0) sum_.assign(values.size(), 0.0);
  FRIT_CHECK(values.size() == sum_.size(), "[weight_average] array {} has {} elements, the first has {}", count_ + 1,
             values.size(), sum_.size());
  for (size_t i = 0; i < values.size(); ++i) sum_[i] += values[i];
  ++count_;
}

void WeightAverage::mean(std::span<float> out) const {
  FRIT_CHECK(count_ > 0, "[weight_average] nothing was added");
  FRIT_CHECK(out.size() == sum_.size(), "[weight_average] output has {} elements, the sum has {}", out.size(),
             sum_.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(sum_[i] / static_cast<double>(count_));
}

double ema_decay(double decay, int64_t t) {
  FRIT_CHECK(decay >= 0 && decay < 1, "[ema] decay is {}, expected 0 <= decay < 1", decay);
  FRIT_CHECK(t >= 1, "[ema] update is {}, expected 1 or more", t);
  if (decay == 0 || t == 1) return 0;
  const double log_decay = std::log(decay);
  // expm1 keeps the quotient exact for decays near 1, where 1 - d^t loses its digits.
  return decay * std::expm1(static_cast<double>(t - 1) * log_decay) / std::expm1(static_cast<double>(t) * log_decay);
}

void ema_update(std::span<float> ema, std::span<const float> p, double decay) {
  FRIT_CHECK(ema.size() == p.size(), "[ema] average has {} elements, weights have {}", ema.size(), p.size());
  FRIT_CHECK(decay >= 0 && decay <= 1, "[ema] decay is {}, expected 0 to 1", decay);
  const double step = 1 - decay;
  for (size_t i = 0; i < ema.size(); ++i) {
    const double e = ema[i];
    ema[i] = static_cast<float>(e + step * (static_cast<double>(p[i]) - e));
  }
}

}  // namespace frit
