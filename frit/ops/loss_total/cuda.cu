#include "frit/ops/loss_total/cpu.h"
#include "frit/ops/loss_total/gpu.h"
#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kTotals = 3;
static_assert(kLossSums == kWarpSize * kWarpSize, "a thread a partial sum, a warp a group of them");

FRIT_DEVICE double warp_sum_double(double x) {
  FRIT_UNROLL
  for (int bits = kWarpSize / 2; bits > 0; bits /= 2) x += shuffle_xor(x, bits);
  return x;
}

FRIT_KERNEL(kLossSums, 1)
loss_total_kernel(Global<const float> loss, Global<const float> nll, Global<const int32_t> labels, int64_t tokens,
                  bool accumulate, Global<double> totals) {
  wait_for_previous();
  double sums[kTotals] = {};
  for (int64_t at = thread_index() * kLossVector; at < tokens; at += kLossSums * kLossVector) {
    const Vec<float, kLossVector> l = load_span<kLossVector>(loss, at, tokens, 0.0f),
                                  n = load_span<kLossVector>(nll, at, tokens, 0.0f);
    const Vec<int32_t, kLossVector> y = load_span<kLossVector>(labels, at, tokens, -1);
    FRIT_UNROLL
    for (int i = 0; i < kLossVector; ++i) {
      sums[0] += static_cast<double>(l[i]);
      sums[1] += static_cast<double>(n[i]);
      sums[2] += y[i] >= 0 ? 1.0 : 0.0;
    }
  }
  const Shared<double> scratch = shared_array<double>(0);
  FRIT_UNROLL
  for (int k = 0; k < kTotals; ++k) {
    sums[k] = warp_sum_double(sums[k]);
    if (lane() == 0) store(scratch, k * kWarpSize + warp(), sums[k]);
  }
  barrier();
  if (warp() != 0) return;
  FRIT_UNROLL
  for (int k = 0; k < kTotals; ++k) {
    const double total = warp_sum_double(load(scratch, k * kWarpSize + lane()));
    if (lane() == 0) store(totals, k, accumulate ? load(totals, k) + total : total);
  }
}

}  // namespace

void loss_total_gpu(Context& context, const Tensor& loss, const Tensor& nll, const Tensor& labels, bool accumulate,
                    const Tensor& totals) {
  launch(context, "loss_total_kernel", loss_total_kernel,
         {1, kLossSums, kTotals * kWarpSize * static_cast<int64_t>(sizeof(double))}, global<const float>(loss),
         global<const float>(nll), global<const int32_t>(labels), labels.numel(), accumulate, global<double>(totals));
}

}  // namespace frit
