#include "frit/ops/optimizer/update-inl.h"

namespace frit {
namespace {

using namespace optimizer_kernels;

// Everything that a launch needs but the constants. Pointers stand at element `begin` of their blocks.
template <typename P, typename G>
struct Blocks {
  Global<P> p;
  Global<const G> g;
  Global<float> m, v, master;
  Global<bfloat16> residual;
  uint32_t seed;
  int64_t begin, end, decay_end;
};

template <bool kAdam, Precision kPrecision, typename P, typename G>
FRIT_KERNEL(kThreads, 3)
optimizer_step_kernel(OptimizerConstants given, Global<const float> prepared, Blocks<P, G> b) {
  wait_for_previous();
  constexpr bool kMaster = keeps_master(kPrecision), kResidual = kPrecision == Precision::kBF16Residual;
  constexpr bool kStochastic = kPrecision == Precision::kBF16Stochastic || kPrecision == Precision::kF16Stochastic;
  // Tiles lie where they would for the whole block, so that vectors are aligned wherever the range begins.
  const int64_t tile = b.begin / kWarpElements * kWarpElements + (block_index() * kWarps + warp()) * kWarpElements;
  if (tile >= b.end) return;
  const bool inside = tile >= b.begin && tile + kWarpElements <= b.end;
  const int64_t first = tile + lane() * kGroup, column = first - b.begin, count = b.end - b.begin;
  const bool has_m = static_cast<bool>(b.m);

  Vec<P, kGroup> narrow[kGroups] = {};
  Vec<bfloat16, kGroup> low[kGroups] = {};
  Vec<G, kGroup> g[kGroups];
  Four p[kGroups], m[kGroups], v[kGroups];
  FRIT_UNROLL
  for (int k = 0; k < kGroups; ++k) {
    const int64_t at = column + k * (kWarpSize * kGroup);
    if constexpr (kMaster)
      p[k] = load_four(b.master, at, count, inside);
    else
      narrow[k] = load_four(b.p, at, count, inside);
    if constexpr (kResidual) low[k] = load_four(b.residual, at, count, inside);
    g[k] = load_four(b.g, at, count, inside);
    m[k] = has_m ? load_four(b.m, at, count, inside) : Four{};
    if constexpr (kAdam) v[k] = load_four(b.v, at, count, inside);
  }
  // Behind the loads, so that it waits with them.
  const OptimizerConstants c = prepared ? load_constants(prepared) : given;
  if (!c.update) return;
  uint32_t random[kGroups][kGroup] = {};
  if constexpr (kStochastic) {
    if (!c.nearest) rounding_bits({b.seed, c.step}, first, random);
  }

  FRIT_UNROLL
  for (int k = 0; k < kGroups; ++k) {
    const int64_t offset = k * (kWarpSize * kGroup), at = column + offset;
    const Four gradient = to_float(g[k]);
    if constexpr (kResidual) {
      const Vec<P, kGroup>& high_half = narrow[k];
      const Vec<bfloat16, kGroup>& low_half = low[k];
      FRIT_UNROLL
      for (int i = 0; i < kGroup; ++i) p[k][i] = join_float({high_half[i].bits, low_half[i].bits});
    } else if constexpr (!kMaster) {
      p[k] = to_float(narrow[k]);
    }
    FRIT_UNROLL
    for (int i = 0; i < kGroup; ++i)
      update<kAdam>(c, first + offset + i < b.decay_end, has_m, p[k][i], gradient[i], m[k][i], v[k][i]);
    if (has_m) store_four(b.m, at, count, inside, m[k]);
    if constexpr (kAdam) store_four(b.v, at, count, inside, v[k]);
    if constexpr (kMaster) store_four(b.master, at, count, inside, p[k]);
    if constexpr (kResidual) {
      FRIT_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        const SplitFloat split = split_float(std::bit_cast<float>(bits_of(p[k][i])));
        narrow[k][i] = P::from_bits(split.high), low[k][i] = bfloat16::from_bits(split.low);
      }
      store_four(b.residual, at, count, inside, low[k]);
    } else {
      bool nearest = true;
      if constexpr (kStochastic) nearest = c.nearest;
      if (nearest) {
        narrow[k] = from_float<P>(p[k]);
      } else if constexpr (kStochastic) {
        FRIT_UNROLL
        for (int i = 0; i < kGroup; ++i) narrow[k][i] = round_stochastic(P(), p[k][i], random[k][i]);
      }
    }
    store_four(b.p, at, count, inside, narrow[k]);
  }
}

template <bool kAdam, Precision kPrecision, typename P, typename G>
void run(Context& context, const OptimizerArgs& args, const OptimizerConstants& constants, const Tensor& prepared,
         const OptimizerBlocks& t, int64_t begin, int64_t end) {
  Blocks<P, G> b{global<P>(t.parameters) + begin,
                 global<const G>(t.gradients) + begin,
                 {},
                 {},
                 {},
                 {},
                 args.seed,
                 begin,
                 end,
                 args.decay_end};
  if (kAdam || args.momentum != 0) b.m = global<float>(t.moment1) + begin;
  if (kAdam) b.v = global<float>(t.moment2) + begin;
  if (keeps_master(kPrecision)) b.master = global<float>(t.master) + begin;
  if (kPrecision == Precision::kBF16Residual) b.residual = global<bfloat16>(t.residual) + begin;
  const int64_t tiles = (end - begin / kWarpElements * kWarpElements + kWarpElements - 1) / kWarpElements;
  launch(context, "optimizer_step_kernel", optimizer_step_kernel<kAdam, kPrecision, P, G>,
         {begin < end ? (tiles + kWarps - 1) / kWarps : 0, kThreads}, constants, global<const float>(prepared), b);
}

template <bool kAdam>
void run_kind(Context& context, const OptimizerArgs& args, const OptimizerConstants& constants, const Tensor& prepared,
              const OptimizerBlocks& t, int64_t begin, int64_t end) {
  const auto narrow = [&]<Precision kPrecision, typename P>() {
    if (t.gradients.dtype() == DType::kF32)
      run<kAdam, kPrecision, P, float>(context, args, constants, prepared, t, begin, end);
    else
      run<kAdam, kPrecision, P, P>(context, args, constants, prepared, t, begin, end);
  };
  switch (t.precision) {
    case Precision::kF32:
      return run<kAdam, Precision::kF32, float, float>(context, args, constants, prepared, t, begin, end);
    case Precision::kBF16Master:
      return narrow.template operator()<Precision::kBF16Master, bfloat16>();
    case Precision::kBF16Stochastic:
      return narrow.template operator()<Precision::kBF16Stochastic, bfloat16>();
    case Precision::kBF16Residual:
      return narrow.template operator()<Precision::kBF16Residual, bfloat16>();
    case Precision::kF16Master:
      return narrow.template operator()<Precision::kF16Master, float16>();
    case Precision::kF16Stochastic:
      return narrow.template operator()<Precision::kF16Stochastic, float16>();
  }
}

// One thread does it all: eight numbers.
FRIT_KERNEL(32, 1)
optimizer_prepare_kernel(OptimizerArgs args, PrepareArgs prepare, Global<const double> sum_of_squares,
                         Global<const int32_t> not_finite, Global<double> numbers, Global<float> loss_scale,
                         Global<float> prepared) {
  wait_for_previous();
  if (thread_index() != 0) return;
  PreparedUpdate u;
  for (int i = 0; i < kOptimizerNumbers; ++i) u.numbers[i] = load(numbers, i);
  u.loss_scale = loss_scale ? load(loss_scale, 0) : 1.0f;
  prepare_update(args, prepare, sum_of_squares ? load(sum_of_squares, 0) : 0.0, !not_finite || load(not_finite, 0) == 0,
                 u);
  for (int i = 0; i < kOptimizerNumbers; ++i) store(numbers, i, u.numbers[i]);
  if (loss_scale) store(loss_scale, 0, u.loss_scale);
  struct Words {
    float v[kOptimizerConstants];
  };
  const Words words = std::bit_cast<Words>(u.constants);
  for (int i = 0; i < static_cast<int>(kOptimizerConstants); ++i) store(prepared, i, words.v[i]);
}

// One thread: what it reads and writes is less than a cache line.
FRIT_KERNEL(32, 1)
optimizer_begin_kernel(Global<const double> rates, int64_t count, Global<const double> first,
                       Global<const float> inverse_tokens, Global<const float> loss_scale, Global<double> numbers,
                       Global<float> scale) {
  wait_for_previous();
  if (thread_index() != 0) return;
  store(numbers, kLearningRate, load(rates, rate_index(load(numbers, kUpdates), load(first, 0), count)));
  store(scale, 0, mul_rn(load(inverse_tokens, 0), loss_scale ? load(loss_scale, 0) : 1.0f));
}

}  // namespace

void optimizer_step_gpu(Context& context, const OptimizerArgs& args, const OptimizerConstants& constants,
                        const Tensor& prepared, const OptimizerBlocks& blocks, int64_t begin, int64_t end) {
  if (args.kind == OptimizerKind::kSgd)
    run_kind<false>(context, args, constants, prepared, blocks, begin, end);
  else
    run_kind<true>(context, args, constants, prepared, blocks, begin, end);
}

void optimizer_prepare_gpu(Context& context, const OptimizerArgs& args, const PrepareArgs& prepare,
                           const Tensor& sum_of_squares, const Tensor& not_finite, const OptimizerState& state) {
  launch(context, "optimizer_prepare_kernel", optimizer_prepare_kernel, {1, kWarpSize}, args, prepare,
         global<const double>(sum_of_squares), global<const int32_t>(not_finite), global<double>(state.numbers),
         global<float>(state.loss_scale), global<float>(state.prepared));
}

void optimizer_begin_gpu(Context& context, const Tensor& rates, const Tensor& first, const Tensor& inverse_tokens,
                         const OptimizerState& state, const Tensor& scale) {
  launch(context, "optimizer_begin_kernel", optimizer_begin_kernel, {1, kWarpSize}, global<const double>(rates),
         rates.numel(), global<const double>(first), global<const float>(inverse_tokens),
         global<const float>(state.loss_scale), global<double>(state.numbers), global<float>(scale));
}

}  // namespace frit
