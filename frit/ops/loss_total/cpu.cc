#include "frit/ops/loss_total/cpu.h"

#include <cstddef>

namespace frit {
namespace {

constexpr int kGroup = 32;
static_assert(kLossSums == kGroup * kGroup);

double tree(double* x) {
  for (int half = kGroup / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

// value_of(i) of `tokens` tokens.
template <typename F>
double sum(int64_t tokens, F&& value_of) {
  double sums[kLossSums] = {};
  for (int64_t i = 0; i < tokens; ++i) sums[i / kLossVector % kLossSums] += value_of(i);
  double groups[kGroup];
  for (int g = 0; g < kGroup; ++g) groups[g] = tree(sums + static_cast<ptrdiff_t>(g) * kGroup);
  return tree(groups);
}

}  // namespace

void loss_total_cpu(const Tensor& loss, const Tensor& nll, const Tensor& labels, bool accumulate,
                    const Tensor& totals) {
  const int64_t tokens = labels.numel();
  const float *l = loss.data<float>(), *n = nll.data<float>();
  const int32_t* y = labels.data<int32_t>();
  const double sums[] = {sum(tokens, [=](int64_t i) { return static_cast<double>(l[i]); }),
                         sum(tokens, [=](int64_t i) { return static_cast<double>(n[i]); }),
                         sum(tokens, [=](int64_t i) { return y[i] >= 0 ? 1.0 : 0.0; })};
  double* out = totals.data<double>();
  for (int k = 0; k < 3; ++k) out[k] = accumulate ? out[k] + sums[k] : sums[k];
}

}  // namespace frit
