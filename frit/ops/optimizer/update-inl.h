// One element's update on the GPU, and how a warp walks over the blocks: what the optimizer's kernels share.
#pragma once
#include "frit/ops/optimizer/gpu.h"
#include "frit/simt/launch.h"

namespace frit::optimizer_kernels {

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

// Operation by operation as on the CPU. Returns the step that p took, without AdamW's decay.
template <bool kAdam>
FRIT_DEVICE float update(const OptimizerConstants& c, bool decays, bool has_m, float& p, float g, float& m, float& v) {
  g = mul_rn(c.gradient_scale, g);
  g = add_rn(g, mul_rn(decays ? c.weight_decay_l2 : 0.0f, p));
  if constexpr (kAdam) {
    p = mul_rn(p, decays ? c.weight_keep : 1.0f);
    const float difference = sub_rn(g, m);
    m = c.lerp_from_gradient ? sub_rn(g, mul_rn(c.beta1, difference))
                             : add_rn(m, mul_rn(c.one_minus_beta1, difference));
    v = add_rn(mul_rn(v, c.beta2), mul_rn(mul_rn(c.one_minus_beta2, g), g));
    const float denominator = add_rn(div_rn(sqrt_rn(v), c.bias2_sqrt), c.eps);
    const float step = div_rn(mul_rn(c.minus_step_size, m), denominator);
    p = add_rn(p, step);
    return step;
  } else {
    m = has_m ? add_rn(mul_rn(m, c.momentum), g) : g;
    const float step = mul_rn(c.minus_step_size, m);
    p = add_rn(p, step);
    return step;
  }
}

}  // namespace frit::optimizer_kernels
