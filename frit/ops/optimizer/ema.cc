// The exponential average of the weights on the CPU.
#include <algorithm>

#include "frit/ops/optimizer/cpu.h"

namespace frit {
namespace {

constexpr int64_t kGrain = 1 << 16;

}  // namespace

void ema_update_cpu(Context& context, double step, const OptimizerBlocks& blocks, const Tensor& ema) {
  float* average = ema.data<float>();
  const auto move = [&](auto value_of) {
    context.pool().parallel_for(ema.numel(), kGrain, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const double e = average[i];
        average[i] = static_cast<float>(e + step * (static_cast<double>(value_of(i)) - e));
      }
    });
  };
  if (blocks.precision == Precision::kBF16Residual) {
    const bfloat16 *high = blocks.parameters.data<bfloat16>(), *low = blocks.residual.data<bfloat16>();
    return move([=](int64_t i) { return join_float({high[i].bits, low[i].bits}); });
  }
  if (blocks.precision == Precision::kBF16Stochastic)
    return move([p = blocks.parameters.data<bfloat16>()](int64_t i) { return static_cast<float>(p[i]); });
  const Tensor& wide = keeps_master(blocks.precision) ? blocks.master : blocks.parameters;
  move([p = wide.data<float>()](int64_t i) { return p[i]; });
}

void ema_exchange_cpu(Context& context, bool in, const OptimizerBlocks& blocks, const Tensor& ema,
                      const Tensor& aside) {
  float* average = ema.data<float>();
  context.pool().parallel_for(ema.numel(), kGrain, [&](int64_t begin, int64_t end, int) {
    if (blocks.parameters.dtype() == DType::kF32) {
      float* p = blocks.parameters.data<float>();
      std::swap_ranges(p + begin, p + end, average + begin);
      return;
    }
    bfloat16 *p = blocks.parameters.data<bfloat16>(), *kept = aside.data<bfloat16>();
    if (!in) {
      std::copy(kept + begin, kept + end, p + begin);
      return;
    }
    std::copy(p + begin, p + end, kept + begin);
    for (int64_t i = begin; i < end; ++i) p[i] = bfloat16(average[i]);
  });
}

}  // namespace frit
