// Averages of weights: plain over checkpoints, and exponential moving (EMA) over updates.
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

// Decay to give ema_update() at its update t (the first is 1) so that the average is bias-corrected from the start.
// Math: d_t = d (1 - d^(t-1)) / (1 - d^t): then ema_t = sum_i d^(t-i) p_i / sum_i d^(t-i), weights that sum to 1.
// d_1 = 0 (the average starts as the weights), d_t -> d. Errors: std::invalid_argument unless 0 <= d < 1 and t >= 1.
double ema_decay(double decay, int64_t t);

// ema = decay * ema + (1 - decay) * p, written as ema + (1 - decay) * (p - ema) so that equal weights stay exact.
// Errors: std::invalid_argument if the sizes differ or decay is outside [0, 1].
void ema_update(std::span<float> ema, std::span<const float> p, double decay);

}  // namespace frit
