#include "frit/ops/optimizer/gpu.h"
#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
// A warp updates kWarpElements neighbours. A lane has kGroups groups of four of them, a warp's width apart: every
// access of a warp is then one piece of memory without a gap, in 16-bit and in fp32 blocks alike.
constexpr int kGroup = 4, kGroups = 2, kWarpElements = kWarpSize * kGroup * kGroups;
static_assert(kWarpElements % 16 == 0, "neighbouring lanes share blocks of random numbers");

using Four = Vec<float, kGroup>;

// The random numbers of a lane's elements: Philox makes them for eight neighbours, which two neighbouring lanes have
// between them, so the even lane makes the first group's and the odd lane the second's. All lanes of the warp call it.
FRIT_DEVICE void rounding_bits(PhiloxKey key, int64_t first, uint32_t (&random)[kGroups][kGroup]) {
  const bool odd = lane() & 1;
  const int64_t eight = (first + (odd ? kWarpSize * kGroup : 0)) / 8;
  const PhiloxBlock block =
      philox(key, static_cast<uint32_t>(eight), static_cast<uint32_t>(eight >> 32), 0, kRoundingSite);
  const uint32_t got0 = shuffle_xor(odd ? block.v[0] : block.v[2], 1);
  const uint32_t got1 = shuffle_xor(odd ? block.v[1] : block.v[3], 1);
  const uint32_t words[kGroups][2] = {{odd ? got0 : block.v[0], odd ? got1 : block.v[1]},
                                      {odd ? block.v[2] : got0, odd ? block.v[3] : got1}};
  FRIT_UNROLL
  for (int k = 0; k < kGroups; ++k) {
    FRIT_UNROLL
    for (int i = 0; i < kGroup; ++i) random[k][i] = words[k][i / 2] >> (16 * (i % 2)) & 0xffffu;
  }
}

// One NaN for all: adding to the bits of some would run over into the sign and make a number of them.
FRIT_DEVICE uint32_t bits_of(float x) {
  return x != x ? 0x7fc00000u : std::bit_cast<uint32_t>(x);
}
// Rounds away from zero with the probability (distance from below) / spacing; random in [0, 65536).
FRIT_DEVICE bfloat16 round_stochastic(bfloat16, float x, uint32_t random) {
  return bfloat16::from_bits(static_cast<uint16_t>((bits_of(x) + random) >> 16));
}
FRIT_DEVICE float16 round_stochastic(float16, float x, uint32_t random) {
  const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u)
    half = 0x7e00u;  // NaN
  else if (magnitude >= 0x477ff000u)
    half = 0x7c00u;  // 65520 and more: infinity to nearest as well
  else if (magnitude >= 0x38800000u)
    half = (magnitude - 0x38000000u + (random >> 3)) >> 13;  // fp32 has 13 bits more
  else  // below 2^-14 the spacing is 2^-24: in steps of 2^-40, and the last of these is the random number's
    half = (static_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p40f) + random) >> 16;
  if (magnitude < 0x477ff000u && half > 0x7bffu) half = 0x7bffu;
  return float16::from_bits(static_cast<uint16_t>(sign | half));
}

// Loads (stores) the four elements from `column` on of a block that has `count`, which need not hold all of them.
template <typename T>
FRIT_DEVICE Vec<std::remove_const_t<T>, kGroup> load_four(const Global<T>& block, int64_t column, int64_t count,
                                                          bool inside) {
  if (inside) return load_vec<kGroup, Cache::kStream>(block + column, 0);
  return load_span<kGroup, Cache::kStream>(block, column, count, std::remove_const_t<T>());
}
template <typename T>
FRIT_DEVICE void store_four(const Global<T>& block, int64_t column, int64_t count, bool inside,
                            const Vec<T, kGroup>& v) {
  if (inside) return store_vec<kGroup, Cache::kStream>(block + column, 0, v);
  store_span<kGroup, Cache::kStream>(block, column, count, v);
}

FRIT_DEVICE OptimizerConstants load_constants(const Global<const float>& prepared) {
  struct Words {
    Four v[kOptimizerConstants / kGroup];
  } words;
  FRIT_UNROLL
  for (int i = 0; i < static_cast<int>(kOptimizerConstants) / kGroup; ++i)
    words.v[i] = load_vec<kGroup>(prepared, i * kGroup);
  return std::bit_cast<OptimizerConstants>(words);
}

// Operation by operation as on the CPU.
template <bool kAdam>
FRIT_DEVICE void update(const OptimizerConstants& c, bool decays, bool has_m, float& p, float g, float& m, float& v) {
  g = mul_rn(c.gradient_scale, g);
  g = add_rn(g, mul_rn(decays ? c.weight_decay_l2 : 0.0f, p));
  if constexpr (kAdam) {
    p = mul_rn(p, decays ? c.weight_keep : 1.0f);
    const float difference = sub_rn(g, m);
    m = c.lerp_from_gradient ? sub_rn(g, mul_rn(c.beta1, difference))
                             : add_rn(m, mul_rn(c.one_minus_beta1, difference));
    v = add_rn(mul_rn(v, c.beta2), mul_rn(mul_rn(c.one_minus_beta2, g), g));
    const float denominator = add_rn(div_rn(sqrt_rn(v), c.bias2_sqrt), c.eps);
    p = add_rn(p, div_rn(mul_rn(c.minus_step_size, m), denominator));
  } else {
    m = has_m ? add_rn(mul_rn(m, c.momentum), g) : g;
    p = add_rn(p, mul_rn(c.minus_step_size, m));
  }
}

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
  uint32_t random[kGroups][kGroup];
  if constexpr (kStochastic) rounding_bits({b.seed, c.step}, first, random);

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
    } else if constexpr (kStochastic) {
      FRIT_UNROLL
      for (int i = 0; i < kGroup; ++i) narrow[k][i] = round_stochastic(P(), p[k][i], random[k][i]);
    } else {
      narrow[k] = from_float<P>(p[k]);
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

}  // namespace frit
