#include "frit/train/averaging.h"

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

}  // namespace frit
