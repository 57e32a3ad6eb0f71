// What CPU operators share inside a Highway target: loads and stores of fp32 and bf16 as fp32 vectors with safe tails,
// reductions, and dropout masks. Include it inside the foreach_target part of an operator's cpu.cc, after
// hwy/foreach_target.h (per-target include guard below).
#if defined(FRIT_BACKEND_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FRIT_BACKEND_CPU_SIMD_INL_H_
#undef FRIT_BACKEND_CPU_SIMD_INL_H_
#else
#define FRIT_BACKEND_CPU_SIMD_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include "frit/core/philox.h"
#include "frit/core/tensor.h"

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
using DU32 = hn::RebindToUnsigned<DF>;
using DU16Half = hn::Rebind<uint16_t, DF>;

HWY_INLINE size_t lanes() { return hn::Lanes(DF()); }

// Full vectors of lanes() elements.
HWY_INLINE VF load(const float* p) { return hn::LoadU(DF(), p); }
HWY_INLINE VF load(const bfloat16* p) {
  const auto half = hn::LoadU(DU16Half(), reinterpret_cast<const uint16_t*>(p));
  return hn::BitCast(DF(), hn::ShiftLeft<16>(hn::PromoteTo(DU32(), half)));
}
HWY_INLINE void store(VF v, float* p) { hn::StoreU(v, DF(), p); }
// Rounds to nearest even; NaN stays NaN.
HWY_INLINE void store(VF v, bfloat16* p) {
  const DU32 du;
  const auto u = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1u));
  const auto rounded = hn::Add(u, hn::Add(odd, hn::Set(du, 0x7fffu)));
  const auto nan = hn::Or(u, hn::Set(du, 0x400000u));
  const auto bits = hn::ShiftRight<16>(hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), nan, rounded));
  const hn::RebindToSigned<DU32> di;
  hn::StoreU(hn::DemoteTo(DU16Half(), hn::BitCast(di, bits)), DU16Half(), reinterpret_cast<uint16_t*>(p));
}

// The first n < lanes() elements; missing lanes are `fill` (loads) or left alone in memory (stores).
template <typename T> HWY_INLINE VF load_n(const T* p, size_t n, float fill = 0.0f) {
  HWY_ALIGN float lane[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(hn::Set(DF(), fill), DF(), lane);
  for (size_t i = 0; i < n; ++i) lane[i] = static_cast<float>(p[i]);
  return hn::Load(DF(), lane);
}
template <typename T> HWY_INLINE void store_n(VF v, T* p, size_t n) {
  HWY_ALIGN float lane[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(v, DF(), lane);
  for (size_t i = 0; i < n; ++i) p[i] = T(lane[i]);
}

// Calls body(vector_of(i), i, n) over [0, cols) in steps of lanes(): n == lanes() but in the tail. body gets the index and the
// count; use load_any / store_any with them.
template <typename T> HWY_INLINE VF load_any(const T* p, size_t n, float fill = 0.0f) {
  return n == lanes() ? load(p) : load_n(p, n, fill);
}
template <typename T> HWY_INLINE void store_any(VF v, T* p, size_t n) {
  if (n == lanes())
    store(v, p);
  else
    store_n(v, p, n);
}
template <typename Body> HWY_INLINE void for_columns(size_t cols, Body&& body) {
  const size_t step = lanes();
  size_t i = 0;
  for (; i + step <= cols; i += step) body(i, step);
  if (i < cols) body(i, cols - i);
}

HWY_INLINE float sum_of_lanes(VF v) { return hn::GetLane(hn::SumOfLanes(DF(), v)); }
HWY_INLINE float max_of_lanes(VF v) { return hn::GetLane(hn::MaxOfLanes(DF(), v)); }

// e^x within 2e-7 of its size; 1 at 0, 0 below -87.7, infinity above 88.4, NaN of NaN. Less than half the instructions of hn::Exp.
HWY_INLINE VF exp_fast(VF x) {
  const DF d;
  // Order matters: x86 minimum and maximum return the second operand if one is NaN.
  x = hn::Min(hn::Set(d, 89.0f), hn::Max(hn::Set(d, -88.0f), x));
  // Adding 1.5 * 2^23 rounds to a whole number n; the 127 more makes the low bits the exponent field of 2^n.
  const VF magic = hn::Set(d, 12582912.0f + 127.0f);
  const VF shifted = hn::MulAdd(x, hn::Set(d, 1.44269504f), magic);
  const VF n = hn::Sub(shifted, magic);
  VF r = hn::NegMulAdd(n, hn::Set(d, 0.693145751953125f), x);
  r = hn::NegMulAdd(n, hn::Set(d, 1.42860677e-6f), r);
  // Degree 5 for |r| <= ln(2)/2, relative error 9.2e-8 (least maximum with e^0 = 1, by reweighted least squares).
  VF p = hn::MulAdd(hn::Set(d, 0.00829031f), r, hn::Set(d, 0.04189798f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.16667637f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.49999149f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.99999971f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  // A product, not an addition to the exponent: that would turn some NaNs into numbers.
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(DU32(), shifted))));
}
// 1 / (1 + e^-x).
HWY_INLINE VF sigmoid(VF x) {
  const VF one = hn::Set(DF(), 1.0f);
  return hn::Div(one, hn::Add(one, exp_fast(hn::Neg(x))));
}

// Runs kSets independent vectors of Philox blocks side by side (the rounds of one alone would wait for their products),
// a 64-bit lane a block, so that a 32x32 -> 64 product is one instruction. Upper halves of counters are ignored. Writes
// the blocks as 16 bytes each, one behind the other.
template <int kSets>
HWY_INLINE void philox_blocks(PhiloxKey key, const uint64_t* c0_in, const uint64_t* c1_in, uint64_t c2_in,
                              uint64_t c3_in, uint64_t* out) {
  const hn::ScalableTag<uint64_t> du64;
  using V64 = hn::Vec<decltype(du64)>;
  const hn::Repartition<uint32_t, decltype(du64)> du32;
  const size_t blocks = hn::Lanes(du64);
  const V64 m0 = hn::Set(du64, uint64_t{kPhiloxM0}), m1 = hn::Set(du64, uint64_t{kPhiloxM1});
  const auto product = [&](V64 a, V64 b) { return hn::MulEven(hn::BitCast(du32, a), hn::BitCast(du32, b)); };
  V64 c0[kSets], c1[kSets], c2[kSets], c3[kSets];
  HWY_UNROLL(4)
  for (int s = 0; s < kSets; ++s) {
    c0[s] = hn::LoadU(du64, c0_in + s * blocks), c1[s] = hn::LoadU(du64, c1_in + s * blocks);
    c2[s] = hn::Set(du64, c2_in), c3[s] = hn::Set(du64, c3_in);
  }
  uint32_t k0 = key.k0, k1 = key.k1;
  for (int round = 0; round < 10; ++round) {
    const V64 vk0 = hn::Set(du64, uint64_t{k0}), vk1 = hn::Set(du64, uint64_t{k1});
    HWY_UNROLL(4)
    for (int s = 0; s < kSets; ++s) {
      const V64 p0 = product(m0, c0[s]), p1 = product(m1, c2[s]);
      c0[s] = hn::Xor(hn::Xor(hn::ShiftRight<32>(p1), vk0), c1[s]);
      c2[s] = hn::Xor(hn::Xor(hn::ShiftRight<32>(p0), vk1), c3[s]);
      c1[s] = p1, c3[s] = p0;
    }
    k0 += kPhiloxW0, k1 += kPhiloxW1;
  }
  const V64 low = hn::Set(du64, 0xffffffffull);
  HWY_UNROLL(4)
  for (int s = 0; s < kSets; ++s)
    hn::StoreInterleaved2(hn::Or(hn::And(c0[s], low), hn::ShiftLeft<32>(c1[s])),
                          hn::Or(hn::And(c2[s], low), hn::ShiftLeft<32>(c3[s])), du64, out + s * 2 * blocks);
}

// Dropout factors of a tile: 0 or scale for rows [row, row + rows) and, in tile row r, for columns
// [8 * first_block, 8 * first_block + cols(r)) rounded up to whole blocks of eight. factors + r * stride must have room
// for these. The same masks as Dropout::keep.
// Cost: a Philox block for eight columns; blocks of several short rows share a vector.
template <typename Cols>
HWY_INLINE void dropout_factor_tile(const Dropout& dropout, int64_t row, size_t rows, uint32_t head, size_t first_block,
                                    Cols&& cols, float* factors, size_t stride) {
  constexpr size_t kMaxBatch = 2 * HWY_MAX_BYTES / sizeof(uint64_t);
  const hn::CappedTag<float, 8> d;  // a Philox block's eight columns, in one vector or two
  const hn::Rebind<uint16_t, decltype(d)> du16;
  const hn::Rebind<int32_t, decltype(d)> di32;
  HWY_ALIGN uint64_t c0[kMaxBatch] = {}, c1[kMaxBatch] = {};
  HWY_ALIGN uint64_t words[2 * kMaxBatch];
  float* target[kMaxBatch];
  const size_t batch = 2 * hn::Lanes(hn::ScalableTag<uint64_t>());
  const auto below = hn::Set(di32, static_cast<int32_t>(dropout.threshold()) - 1);
  const auto scale = hn::Set(d, dropout.scale());
  const uint64_t c2 = head | dropout.stream << 16, c3 = dropout.site;
  size_t filled = 0;
  const auto flush = [&] {
    philox_blocks<2>(dropout.key, c0, c1, c2, c3, words);
    for (size_t b = 0; b < filled; ++b)
      for (size_t i = 0; i < 8; i += hn::Lanes(d)) {
        const auto bits = hn::PromoteTo(di32, hn::LoadU(du16, reinterpret_cast<const uint16_t*>(words + 2 * b) + i));
        hn::StoreU(hn::IfThenElseZero(hn::RebindMask(d, hn::Gt(bits, below)), scale), d, target[b] + i);
      }
    filled = 0;
  };
  for (size_t r = 0; r < rows; ++r) {
    const size_t blocks = (cols(r) + 7) / 8;
    for (size_t block = 0; block < blocks; ++block) {
      c0[filled] = first_block + block, c1[filled] = static_cast<uint32_t>(row + static_cast<int64_t>(r));
      target[filled] = factors + r * stride + 8 * block;
      if (++filled == batch) flush();
    }
  }
  if (filled) flush();
}

// Dropout factors of one row: writes 0 or scale for columns [begin, begin + cols) of `row` to factors[0..cols); begin is a
// multiple of 8. factors must have room for cols rounded up to kFactorBlock. The same masks as Dropout::keep.
constexpr size_t kFactorBlock = 8 * (HWY_MAX_BYTES / 8);
HWY_INLINE void dropout_factors(const Dropout& dropout, int64_t row, uint32_t head, size_t cols, float* factors,
                                size_t begin = 0) {
  dropout_factor_tile(dropout, row, 1, head, begin / 8, [=](size_t) { return cols; }, factors, 0);
}

}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
