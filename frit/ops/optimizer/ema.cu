// The exponential average of the weights on the GPU.
#include "frit/ops/optimizer/update-inl.h"

namespace frit {
namespace {

using namespace optimizer_kernels;

// A warp has kSets groups a lane here, walked as an update's: so that as many bytes are under way.
constexpr int kSets = 4, kTile = kWarpSize * kGroup * kSets;

int64_t blocks_of(int64_t count) {
  return (count + kTile * kWarps - 1) / (kTile * kWarps);
}

// p: the parameters, or the fp32 master; residual: their low halves, or nothing.
template <typename P>
FRIT_KERNEL(kThreads, 4)
ema_update_kernel(double given, Global<const double> numbers, Global<const P> p, Global<const bfloat16> residual,
                  Global<float> ema, int64_t count) {
  wait_for_previous();
  const int64_t tile = (block_index() * kWarps + warp()) * kTile, first = tile + lane() * kGroup;
  if (tile >= count) return;
  const bool inside = tile + kTile <= count;
  Vec<P, kGroup> value[kSets];
  Vec<bfloat16, kGroup> low[kSets] = {};
  Four average[kSets];
  FRIT_UNROLL
  for (int k = 0; k < kSets; ++k) {
    const int64_t at = first + k * (kWarpSize * kGroup);
    value[k] = load_four(p, at, count, inside);
    if constexpr (std::is_same_v<P, bfloat16>) {
      if (residual) low[k] = load_four(residual, at, count, inside);
    }
    average[k] = load_four(ema, at, count, inside);
  }
  const double step = numbers ? load(numbers, kEmaStep) : given;
  if (step == 0) return;
  FRIT_UNROLL
  for (int k = 0; k < kSets; ++k) {
    Four wide = to_float(value[k]);
    if constexpr (std::is_same_v<P, bfloat16>) {
      if (residual) {
        const Vec<P, kGroup>& high_half = value[k];
        const Vec<bfloat16, kGroup>& low_half = low[k];
        FRIT_UNROLL
        for (int i = 0; i < kGroup; ++i) wide[i] = join_float({high_half[i].bits, low_half[i].bits});
      }
    }
    FRIT_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      const double e = average[k][i];
      average[k][i] = static_cast<float>(add_rn(e, mul_rn(step, sub_rn(static_cast<double>(wide[i]), e))));
    }
    store_four(ema, first + k * (kWarpSize * kGroup), count, inside, average[k]);
  }
}

template <typename P>
FRIT_KERNEL(kThreads, 4)
ema_exchange_kernel(bool in, Global<P> p, Global<float> ema, Global<P> aside, int64_t count) {
  wait_for_previous();
  const int64_t tile = (block_index() * kWarps + warp()) * kTile, first = tile + lane() * kGroup;
  if (tile >= count) return;
  const bool inside = tile + kTile <= count;
  FRIT_UNROLL
  for (int k = 0; k < kSets; ++k) {
    const int64_t at = first + k * (kWarpSize * kGroup);
    if constexpr (sizeof(P) == sizeof(float)) {
      const Four value = load_four(p, at, count, inside), average = load_four(ema, at, count, inside);
      store_four(p, at, count, inside, average);
      store_four(ema, at, count, inside, value);
    } else if (in) {
      const Vec<P, kGroup> value = load_four(p, at, count, inside);
      const Four average = load_four(ema, at, count, inside);
      store_four(aside, at, count, inside, value);
      store_four(p, at, count, inside, from_float<P>(average));
    } else {
      store_four(p, at, count, inside, load_four(aside, at, count, inside));
    }
  }
}

}  // namespace

void ema_update_gpu(Context& context, double step, const OptimizerBlocks& blocks, const Tensor& ema,
                    const Tensor& numbers) {
  const int64_t count = ema.numel();
  const Tensor& p = keeps_master(blocks.precision) ? blocks.master : blocks.parameters;
  const Tensor residual = blocks.precision == Precision::kBF16Residual ? blocks.residual : Tensor();
  dispatch_float(p.dtype(), [&]<typename P>(P) {
    launch(context, "ema_update_kernel", ema_update_kernel<P>, {blocks_of(count), kThreads}, step,
           global<const double>(numbers), global<const P>(p), global<const bfloat16>(residual), global<float>(ema),
           count);
  });
}

void ema_exchange_gpu(Context& context, bool in, const OptimizerBlocks& blocks, const Tensor& ema,
                      const Tensor& aside) {
  const int64_t count = ema.numel();
  dispatch_float(blocks.parameters.dtype(), [&]<typename P>(P) {
    const Global<P> kept = sizeof(P) == sizeof(float) ? Global<P>() : global<P>(aside);
    launch(context, "ema_exchange_kernel", ema_exchange_kernel<P>, {blocks_of(count), kThreads}, in,
           global<P>(blocks.parameters), global<float>(ema), kept, count);
  });
}

}  // namespace frit
