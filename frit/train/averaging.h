// The plain average of checkpoints. (The exponential moving one is the optimizer's: ema_update.)
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace frit {

// Mean of K arrays of one size, added in double in the order given, so that memory is one sum whatever K is.
class WeightAverage {
 public:
  // Errors: std::invalid_argument if the size differs from the first array's.
  void add(std::span<const float> values);
  // Writes the mean. Errors: std::invalid_argument if nothing was added or the size differs.
  void mean(std::span<float> out) const;
  int64_t count() const { return count_; }

 private:
  std::vector<double> sum_;
  int64_t count_ = 0;
};

}  // namespace frit
