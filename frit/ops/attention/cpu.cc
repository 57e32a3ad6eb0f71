#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "frit/ops/attention/cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>
#include <cmath>
#include <limits>

#include "frit/backend/cpu/simd-inl.h"
#include "frit/ops/attention/cpu.h"

// What all targets share.
#ifndef FRIT_OPS_ATTENTION_CPU_CC_
#define FRIT_OPS_ATTENTION_CPU_CC_
namespace frit {

constexpr int64_t kTileQueries = 64, kTileKeys = 64;
// Queries of one task of forward: keys and values are packed once for them.
constexpr int64_t kGroupQueries = 256;
// Rows of packed heads are this long: whole vectors of any target.
constexpr int64_t padded_width(int64_t d) {
  return (d + 15) / 16 * 16;
}

// Raw operands of one call: element (token, head, i) lies at token * stride + head * d + i.
struct AttentionCall {
  const void *q, *k, *v, *out_in, *dout;
  void *out, *dq, *dk, *dv;
  int64_t q_stride, k_stride, v_stride, out_stride, dout_stride, dq_stride, dk_stride, dv_stride;
  float* lse;
  const int32_t *q_offsets, *k_offsets;
  int64_t heads, d;
  bool causal;
  float scale;
  Dropout dropout;
};

// Scratch of one worker, in floats.
inline int64_t forward_scratch(int64_t d) {
  const int64_t dp = padded_width(d);
  return 2 * kGroupQueries * dp + 3 * kGroupQueries + 2 * kTileKeys * dp + 2 * kTileQueries * kTileKeys;
}
inline int64_t backward_scratch(int64_t d) {
  const int64_t dp = padded_width(d);
  return 2 * kTileQueries * dp + 5 * kTileKeys * dp + 3 * kTileQueries * kTileKeys + 2 * kTileQueries;
}

}  // namespace frit
#endif

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {

HWY_INLINE size_t whole_vectors(size_t n) {
  return (n + lanes() - 1) / lanes() * lanes();
}

// c[kRows][kVectors * lanes()] (+)= sum over depth of a[i * a_row + k * a_k] * b[k][...]: an outer product a step, all
// sums in registers. Every element's sum runs over k in order, so that the size of the tile never changes its bits.
template <int kRows, int kVectors>
HWY_INLINE void product_tile(const float* HWY_RESTRICT a, size_t a_row, size_t a_k, const float* HWY_RESTRICT b,
                             size_t ldb, size_t depth, float* HWY_RESTRICT c, size_t ldc, bool accumulate) {
  const DF d;
  const size_t w = lanes();
  VF sum[kRows][kVectors];
  HWY_UNROLL(16)
  for (int i = 0; i < kRows; ++i) {
    HWY_UNROLL(16)
    for (int j = 0; j < kVectors; ++j) sum[i][j] = accumulate ? hn::LoadU(d, c + i * ldc + j * w) : hn::Zero(d);
  }
  for (size_t k = 0; k < depth; ++k) {
    VF vb[kVectors];
    HWY_UNROLL(16)
    for (int j = 0; j < kVectors; ++j) vb[j] = hn::LoadU(d, b + k * ldb + j * w);
    HWY_UNROLL(16)
    for (int i = 0; i < kRows; ++i) {
      const VF va = hn::Set(d, a[i * a_row + k * a_k]);
      HWY_UNROLL(16)
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(va, vb[j], sum[i][j]);
    }
  }
  HWY_UNROLL(16)
  for (int i = 0; i < kRows; ++i) {
    HWY_UNROLL(16)
    for (int j = 0; j < kVectors; ++j) hn::StoreU(sum[i][j], d, c + i * ldc + j * w);
  }
}

template <int kRows>
HWY_NOINLINE void product_rows(const float* a, size_t a_row, size_t a_k, const float* b, size_t ldb, size_t n,
                               size_t depth, float* c, size_t ldc, bool accumulate) {
  const size_t w = lanes();
  size_t j = 0;
  constexpr int kWide = kRows <= 3 ? 4 : 2;  // enough sums to hide an FMA's latency, few enough for 16 registers
  for (; j + kWide * w <= n; j += kWide * w)
    product_tile<kRows, kWide>(a, a_row, a_k, b + j, ldb, depth, c + j, ldc, accumulate);
  if constexpr (kWide > 2)
    for (; j + 2 * w <= n; j += 2 * w) product_tile<kRows, 2>(a, a_row, a_k, b + j, ldb, depth, c + j, ldc, accumulate);
  for (; j < n; j += w) product_tile<kRows, 1>(a, a_row, a_k, b + j, ldb, depth, c + j, ldc, accumulate);
}

struct ProductRange {
  size_t n;               // columns to compute, whole vectors
  size_t k_begin, k_end;  // the depth
};

// c (+)= a * b for `rows` rows, cut into about equal tiles of at most six; range(first row, end row) says what a tile
// needs.
template <typename Range>
HWY_INLINE void product(size_t rows, const float* a, size_t a_row, size_t a_k, const float* b, size_t ldb, float* c,
                        size_t ldc, bool accumulate, Range&& range) {
  const size_t tiles = (rows + 5) / 6;
  for (size_t t = 0; t < tiles; ++t) {
    const size_t begin = rows * t / tiles, end = rows * (t + 1) / tiles;
    const ProductRange r = range(begin, end);
    const float *at = a + begin * a_row + r.k_begin * a_k, *bt = b + r.k_begin * ldb;
    float* ct = c + begin * ldc;
    const size_t depth = r.k_end > r.k_begin ? r.k_end - r.k_begin : 0;
    switch (end - begin) {
      case 1:
        product_rows<1>(at, a_row, a_k, bt, ldb, r.n, depth, ct, ldc, accumulate);
        break;
      case 2:
        product_rows<2>(at, a_row, a_k, bt, ldb, r.n, depth, ct, ldc, accumulate);
        break;
      case 3:
        product_rows<3>(at, a_row, a_k, bt, ldb, r.n, depth, ct, ldc, accumulate);
        break;
      case 4:
        product_rows<4>(at, a_row, a_k, bt, ldb, r.n, depth, ct, ldc, accumulate);
        break;
      case 5:
        product_rows<5>(at, a_row, a_k, bt, ldb, r.n, depth, ct, ldc, accumulate);
        break;
      default:
        product_rows<6>(at, a_row, a_k, bt, ldb, r.n, depth, ct, ldc, accumulate);
        break;
    }
  }
}

// dst[r][0, d) = scale * src[r], zero up to whole vectors.
template <typename T>
HWY_INLINE void pack_rows(const T* src, int64_t stride, size_t rows, size_t d, float scale, float* dst, size_t ld) {
  const VF factor = hn::Set(DF(), scale);
  for (size_t r = 0; r < rows; ++r)
    for_columns(
        d, [&](size_t i, size_t n) { store(hn::Mul(factor, load_any(src + r * stride + i, n)), dst + r * ld + i); });
}

// Writes src's rows (f32) as T.
template <typename T>
HWY_INLINE void unpack_rows(const float* src, size_t ld, size_t rows, size_t d, float scale, T* dst, int64_t stride) {
  const VF factor = hn::Set(DF(), scale);
  for (size_t r = 0; r < rows; ++r)
    for_columns(
        d, [&](size_t i, size_t n) { store_any(hn::Mul(factor, load(src + r * ld + i)), dst + r * stride + i, n); });
}

using D4 = hn::FixedTag<float, 4>;
HWY_INLINE hn::Vec<D4> load_4(const float* p) {
  return hn::LoadU(D4(), p);
}
HWY_INLINE hn::Vec<D4> load_4(const bfloat16* p) {
  const hn::FixedTag<uint32_t, 4> du32;
  const auto half = hn::LoadU(hn::FixedTag<uint16_t, 4>(), reinterpret_cast<const uint16_t*>(p));
  return hn::BitCast(D4(), hn::ShiftLeft<16>(hn::PromoteTo(du32, half)));
}

// dst[i][r] = src[r][i] for r < rows, i < d; columns from rows to width are zero.
template <typename T>
HWY_INLINE void pack_transposed(const T* src, int64_t stride, size_t rows, size_t d, size_t width, float* dst,
                                size_t ld) {
  const D4 d4;
  size_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const T* s = src + r * stride;
    size_t i = 0;
    for (; i + 4 <= d; i += 4) {
      const auto r0 = load_4(s + i), r1 = load_4(s + stride + i), r2 = load_4(s + 2 * stride + i),
                 r3 = load_4(s + 3 * stride + i);
      const auto low02 = hn::InterleaveLower(d4, r0, r2), low13 = hn::InterleaveLower(d4, r1, r3);
      const auto high02 = hn::InterleaveUpper(d4, r0, r2), high13 = hn::InterleaveUpper(d4, r1, r3);
      hn::StoreU(hn::InterleaveLower(d4, low02, low13), d4, dst + i * ld + r);
      hn::StoreU(hn::InterleaveUpper(d4, low02, low13), d4, dst + (i + 1) * ld + r);
      hn::StoreU(hn::InterleaveLower(d4, high02, high13), d4, dst + (i + 2) * ld + r);
      hn::StoreU(hn::InterleaveUpper(d4, high02, high13), d4, dst + (i + 3) * ld + r);
    }
    for (; i < d; ++i)
      for (size_t x = 0; x < 4; ++x) dst[i * ld + r + x] = static_cast<float>(s[x * stride + i]);
  }
  for (; r < rows; ++r)
    for (size_t i = 0; i < d; ++i) dst[i * ld + r] = static_cast<float>(src[r * stride + i]);
  for (; r < width; ++r)
    for (size_t i = 0; i < d; ++i) dst[i * ld + r] = 0;
}

// Calls body(i, keep) for the vectors that cover [0, visible): keep(v) zeroes the lanes past visible, keep.other(v,
// fill) sets them to fill.
struct KeepAll {
  HWY_INLINE VF operator()(VF v) const { return v; }
  HWY_INLINE VF other(VF v, VF) const { return v; }
};
struct KeepFirst {
  hn::Mask<DF> mask;
  HWY_INLINE VF operator()(VF v) const { return hn::IfThenElseZero(mask, v); }
  HWY_INLINE VF other(VF v, VF fill) const { return hn::IfThenElse(mask, v, fill); }
};
template <typename Body>
HWY_INLINE void for_visible(size_t visible, Body&& body) {
  const size_t w = lanes();
  size_t i = 0;
  for (; i + w <= visible; i += w) body(i, KeepAll());
  if (i < visible) body(i, KeepFirst{hn::FirstN(DF(), visible - i)});
}
// Zeroes a row's vectors from `visible` rounded up to `width`.
HWY_INLINE void zero_invisible(size_t visible, size_t width, float* row) {
  for (size_t i = whole_vectors(visible); i < width; i += lanes()) hn::StoreU(hn::Zero(DF()), DF(), row + i);
}

// Asks for rows that the next head will need: the heads of a token are far from the same head of the next token, and
// the processor's own prefetchers do not see that pattern. Into the second-level cache, where such strides do not
// collide.
template <bool kWrite, typename T>
HWY_INLINE void prefetch_rows(const T* p, int64_t stride, int64_t rows, int64_t d) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < d; i += kLine) __builtin_prefetch(p + r * stride + i, kWrite, 2);
}

template <typename T>
void flash_forward(const AttentionCall& call, int64_t sequence, int64_t head, int64_t group, float* scratch) {
  const DF df;
  const int64_t q_first = call.q_offsets[sequence], k_first = call.k_offsets[sequence];
  const int64_t lq = call.q_offsets[sequence + 1] - q_first, lk = call.k_offsets[sequence + 1] - k_first;
  const int64_t begin = group * kGroupQueries, d = call.d, dp = padded_width(d), shift = lk - lq;
  if (begin >= lq) return;
  const int64_t rows = std::min(kGroupQueries, lq - begin), first_row = q_first + begin;
  const T* q = static_cast<const T*>(call.q) + first_row * call.q_stride + head * d;
  const T* k = static_cast<const T*>(call.k) + k_first * call.k_stride + head * d;
  const T* v = static_cast<const T*>(call.v) + k_first * call.v_stride + head * d;
  T* out = static_cast<T*>(call.out) + first_row * call.out_stride + head * d;
  float *qs = scratch, *o = qs + kGroupQueries * dp, *top = o + kGroupQueries * dp, *total = top + kGroupQueries,
        *lse = total + kGroupQueries, *kt = lse + kGroupQueries, *vs = kt + dp * kTileKeys, *p = vs + kTileKeys * dp,
        *factors = p + kTileQueries * kTileKeys;
  const size_t d_vectors = whole_vectors(d);
  const bool dropping = call.dropout.active();

  pack_rows(q, call.q_stride, rows, d, call.scale, qs, dp);
  std::fill_n(top, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(total, rows, 0.0f);
  const int64_t keys = call.causal ? std::clamp<int64_t>(begin + rows + shift, 0, lk) : lk;
  for (int64_t kb = 0; kb < keys; kb += kTileKeys) {
    const int64_t nk = std::min(kTileKeys, keys - kb);
    const size_t width = whole_vectors(nk);
    pack_transposed(k + kb * call.k_stride, call.k_stride, nk, d, width, kt, kTileKeys);
    pack_rows(v + kb * call.v_stride, call.v_stride, nk, d, 1.0f, vs, dp);
    if (kb == 0 && head + 1 < call.heads) {
      prefetch_rows<false>(q + d, call.q_stride, std::min(rows, kTileQueries), d);
      prefetch_rows<false>(k + d, call.k_stride, nk, d);
      prefetch_rows<false>(v + d, call.v_stride, nk, d);
      prefetch_rows<true>(out + d, call.out_stride, std::min(rows, kTileQueries), d);
    }
    for (int64_t qb = 0; qb < rows; qb += kTileQueries) {
      const int64_t nq = std::min(kTileQueries, rows - qb);
      const auto visible = [&](int64_t r) -> size_t {
        return call.causal ? std::clamp<int64_t>(begin + qb + r + shift + 1 - kb, 0, nk) : nk;
      };
      if (visible(nq - 1) == 0) continue;
      product(nq, qs + qb * dp, dp, 1, kt, kTileKeys, p, kTileKeys, false, [&](size_t, size_t end) {
        return ProductRange{whole_vectors(visible(end - 1)), 0, static_cast<size_t>(d)};
      });
      if (dropping) dropout_factor_tile(call.dropout, first_row + qb, nq, head, kb / 8, visible, factors, kTileKeys);
      for (int64_t r = 0; r < nq; ++r) {
        float* row = p + r * kTileKeys;
        const float* factor = factors + r * kTileKeys;
        const size_t n = visible(r);
        const VF lowest = hn::Set(df, -std::numeric_limits<float>::infinity());
        VF largest = lowest;
        for_visible(
            n, [&](size_t i, auto keep) { largest = hn::Max(largest, keep.other(hn::LoadU(df, row + i), lowest)); });
        const float old = top[qb + r];
        const float now = n == 0 ? old : std::max(old, max_of_lanes(largest));
        const VF shifted = hn::Set(df, now);
        VF sum = hn::Zero(df);
        for_visible(n, [&](size_t i, auto keep) {
          VF e = keep(exp_fast(hn::Sub(hn::LoadU(df, row + i), shifted)));
          sum = hn::Add(sum, e);
          if (dropping) e = keep(hn::Mul(e, hn::LoadU(df, factor + i)));
          hn::StoreU(e, df, row + i);
        });
        zero_invisible(n, width, row);
        if (n == 0) continue;
        if (kb > 0 && now != old) {
          const VF shrink = exp_fast(hn::Set(df, old - now));
          float* acc = o + (qb + r) * dp;
          for (size_t i = 0; i < d_vectors; i += lanes())
            hn::StoreU(hn::Mul(hn::LoadU(df, acc + i), shrink), df, acc + i);
          total[qb + r] *= hn::GetLane(shrink);
        }
        top[qb + r] = now;
        total[qb + r] += sum_of_lanes(sum);
      }
      product(nq, p, kTileKeys, 1, vs, dp, o + qb * dp, dp, kb > 0, [&](size_t, size_t end) {
        return ProductRange{d_vectors, 0, visible(end - 1)};
      });
    }
  }
  for_columns(rows, [&](size_t i, size_t) {  // top and total have room for whole vectors
    store(hn::Add(load(top + i), hn::Log(df, load(total + i))), lse + i);
  });
  for (int64_t r = 0; r < rows; ++r) {
    // hn::Log makes a number of NaN.
    call.lse[(first_row + r) * call.heads + head] = total[r] == 0 ? top[r] : std::isnan(total[r]) ? total[r] : lse[r];
    if (total[r] == 0)
      std::fill_n(out + r * call.out_stride, d, T(0.0f));
    else
      unpack_rows(o + r * dp, dp, 1, d, 1 / total[r], out + r * call.out_stride, call.out_stride);
  }
}

template <typename T>
void flash_backward(const AttentionCall& call, int64_t sequence, int64_t head, float* scratch, float* dq_sums) {
  const DF df;
  const int64_t q_first = call.q_offsets[sequence], k_first = call.k_offsets[sequence];
  const int64_t lq = call.q_offsets[sequence + 1] - q_first, lk = call.k_offsets[sequence + 1] - k_first;
  const int64_t d = call.d, dp = padded_width(d), shift = lk - lq;
  const T* q = static_cast<const T*>(call.q) + q_first * call.q_stride + head * d;
  const T* k = static_cast<const T*>(call.k) + k_first * call.k_stride + head * d;
  const T* v = static_cast<const T*>(call.v) + k_first * call.v_stride + head * d;
  const T* out = static_cast<const T*>(call.out_in) + q_first * call.out_stride + head * d;
  const T* dout = static_cast<const T*>(call.dout) + q_first * call.dout_stride + head * d;
  T* dq = static_cast<T*>(call.dq) + q_first * call.dq_stride + head * d;
  T* dk = static_cast<T*>(call.dk) + k_first * call.dk_stride + head * d;
  T* dv = static_cast<T*>(call.dv) + k_first * call.dv_stride + head * d;
  float *qs = scratch, *douts = qs + kTileQueries * dp, *ks = douts + kTileQueries * dp, *kt = ks + kTileKeys * dp,
        *vt = kt + dp * kTileKeys, *dks = vt + dp * kTileKeys, *dvs = dks + kTileKeys * dp, *p = dvs + kTileKeys * dp,
        *ds = p + kTileQueries * kTileKeys, *factors = ds + kTileQueries * kTileKeys,
        *lse = factors + kTileQueries * kTileKeys, *delta = lse + kTileQueries;
  const size_t d_vectors = whole_vectors(d);
  const bool dropping = call.dropout.active();

  for (int64_t kb = 0; kb < lk; kb += kTileKeys) {
    const int64_t nk = std::min(kTileKeys, lk - kb);
    const size_t width = whole_vectors(nk);
    pack_transposed(k + kb * call.k_stride, call.k_stride, nk, d, width, kt, kTileKeys);
    pack_transposed(v + kb * call.v_stride, call.v_stride, nk, d, width, vt, kTileKeys);
    pack_rows(k + kb * call.k_stride, call.k_stride, nk, d, 1.0f, ks, dp);
    if (kb == 0 && head + 1 < call.heads) {
      const int64_t nq = std::min(lq, kTileQueries);
      prefetch_rows<false>(k + d, call.k_stride, nk, d);
      prefetch_rows<false>(v + d, call.v_stride, nk, d);
      prefetch_rows<false>(q + d, call.q_stride, nq, d);
      prefetch_rows<false>(dout + d, call.dout_stride, nq, d);
      prefetch_rows<false>(out + d, call.out_stride, nq, d);
      prefetch_rows<true>(dk + d, call.dk_stride, nk, d);
      prefetch_rows<true>(dv + d, call.dv_stride, nk, d);
      prefetch_rows<true>(dq + d, call.dq_stride, nq, d);
    }
    bool seen = false;
    for (int64_t qb = 0; qb < lq; qb += kTileQueries) {
      const int64_t nq = std::min(kTileQueries, lq - qb);
      const auto visible = [&](int64_t r) -> size_t {
        return call.causal ? std::clamp<int64_t>(qb + r + shift + 1 - kb, 0, nk) : nk;
      };
      if (visible(nq - 1) == 0) {
        if (kb == 0) std::fill_n(dq_sums + qb * dp, nq * dp, 0.0f);
        continue;
      }
      pack_rows(q + qb * call.q_stride, call.q_stride, nq, d, call.scale, qs, dp);
      pack_rows(dout + qb * call.dout_stride, call.dout_stride, nq, d, 1.0f, douts, dp);
      for (int64_t r = 0; r < nq; ++r) {
        VF sum = hn::Zero(df);
        const T* o = out + (qb + r) * call.out_stride;
        for_columns(d,
                    [&](size_t i, size_t n) { sum = hn::MulAdd(load(douts + r * dp + i), load_any(o + i, n), sum); });
        delta[r] = sum_of_lanes(sum);
        lse[r] = call.lse[(q_first + qb + r) * call.heads + head];
      }
      const auto to_visible = [&](size_t, size_t end) {
        return ProductRange{whole_vectors(visible(end - 1)), 0, static_cast<size_t>(d)};
      };
      product(nq, qs, dp, 1, kt, kTileKeys, p, kTileKeys, false, to_visible);
      product(nq, douts, dp, 1, vt, kTileKeys, ds, kTileKeys, false, to_visible);
      if (dropping) dropout_factor_tile(call.dropout, q_first + qb, nq, head, kb / 8, visible, factors, kTileKeys);
      for (int64_t r = 0; r < nq; ++r) {
        float *prow = p + r * kTileKeys, *dsrow = ds + r * kTileKeys;
        const float* factor = factors + r * kTileKeys;
        const size_t n = visible(r);
        const VF row_lse = hn::Set(df, lse[r]), row_delta = hn::Set(df, delta[r]);
        for_visible(n, [&](size_t i, auto keep) {
          const VF e = exp_fast(hn::Sub(hn::LoadU(df, prow + i), row_lse));
          VF g = hn::LoadU(df, dsrow + i), dropped = e;
          if (dropping) {
            const VF f = hn::LoadU(df, factor + i);
            g = hn::Mul(g, f), dropped = hn::Mul(e, f);
          }
          hn::StoreU(keep(dropped), df, prow + i);
          hn::StoreU(keep(hn::Mul(e, hn::Sub(g, row_delta))), df, dsrow + i);
        });
        zero_invisible(n, width, prow);
        zero_invisible(n, width, dsrow);
      }
      // Key j is seen by queries from j - shift on.
      const auto from_first_seeing = [&](size_t key, size_t) {
        const int64_t first = call.causal ? std::clamp<int64_t>(kb + static_cast<int64_t>(key) - shift - qb, 0, nq) : 0;
        return ProductRange{d_vectors, static_cast<size_t>(first), static_cast<size_t>(nq)};
      };
      product(nk, p, 1, kTileKeys, douts, dp, dvs, dp, seen, from_first_seeing);
      product(nk, ds, 1, kTileKeys, qs, dp, dks, dp, seen, from_first_seeing);
      product(nq, ds, kTileKeys, 1, ks, dp, dq_sums + qb * dp, dp, kb > 0, [&](size_t, size_t end) {
        return ProductRange{d_vectors, 0, visible(end - 1)};
      });
      seen = true;
    }
    if (!seen) {
      std::fill_n(dks, nk * dp, 0.0f);
      std::fill_n(dvs, nk * dp, 0.0f);
    }
    unpack_rows(dks, dp, nk, d, 1.0f, dk + kb * call.dk_stride, call.dk_stride);
    unpack_rows(dvs, dp, nk, d, 1.0f, dv + kb * call.dv_stride, call.dv_stride);
  }
  if (lk == 0) std::fill_n(dq_sums, lq * dp, 0.0f);
  unpack_rows(dq_sums, dp, lq, d, call.scale, dq, call.dq_stride);
}

void flash_forward_f32(const AttentionCall& call, int64_t sequence, int64_t head, int64_t group, float* scratch) {
  flash_forward<float>(call, sequence, head, group, scratch);
}
void flash_forward_bf16(const AttentionCall& call, int64_t sequence, int64_t head, int64_t group, float* scratch) {
  flash_forward<bfloat16>(call, sequence, head, group, scratch);
}
void flash_backward_f32(const AttentionCall& call, int64_t sequence, int64_t head, float* scratch, float* dq_sums) {
  flash_backward<float>(call, sequence, head, scratch, dq_sums);
}
void flash_backward_bf16(const AttentionCall& call, int64_t sequence, int64_t head, float* scratch, float* dq_sums) {
  flash_backward<bfloat16>(call, sequence, head, scratch, dq_sums);
}

}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace frit {
HWY_EXPORT(flash_forward_f32);
HWY_EXPORT(flash_forward_bf16);
HWY_EXPORT(flash_backward_f32);
HWY_EXPORT(flash_backward_bf16);

namespace {

AttentionCall call_of(const AttentionArgs& args, const Tensor& lse) {
  AttentionCall call{};
  call.q = args.q.raw(), call.k = args.k.raw(), call.v = args.v.raw();
  call.q_stride = args.q.row_stride(), call.k_stride = args.k.row_stride(), call.v_stride = args.v.row_stride();
  call.lse = lse.data<float>();
  call.q_offsets = args.q_offsets.data<int32_t>(), call.k_offsets = args.k_offsets.data<int32_t>();
  call.heads = args.q.dim(1), call.d = args.q.dim(2);
  call.causal = args.causal, call.scale = args.scale, call.dropout = args.dropout;
  return call;
}

// One worker takes all heads of a sequence, whose rows lie side by side, unless that leaves too few tasks. No result
// depends on it.
int64_t heads_of_task(int64_t sequences, int64_t heads) {
  return sequences >= 32 ? std::max<int64_t>(1, heads) : 1;
}

}  // namespace

int64_t attention_flash_forward_scratch(int64_t workers, int64_t d) {
  return static_cast<int64_t>(align_up(static_cast<size_t>(workers * forward_scratch(d)) * sizeof(float)));
}
int64_t attention_flash_backward_scratch(int64_t workers, int64_t q_tokens, int64_t n, int64_t d) {
  return static_cast<int64_t>(
      align_up(static_cast<size_t>(workers * backward_scratch(d)) * sizeof(float)) +
      align_up(static_cast<size_t>(std::min(workers, n) * q_tokens * padded_width(d)) * sizeof(float)));
}

void attention_flash_forward_cpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse) {
  const int64_t d = args.q.dim(2);
  Buffer scratch = context.allocate({context.pool().threads(), forward_scratch(d)}, DType::kF32, "attention.tiles");
  if (context.planning()) return;
  AttentionCall call = call_of(args, lse);
  call.out = out.raw(), call.out_stride = out.row_stride();
  const int64_t sequences = args.q_offsets.dim(0) - 1;
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences; ++s)
    longest = std::max<int64_t>(longest, call.q_offsets[s + 1] - call.q_offsets[s]);
  const int64_t groups = (longest + kGroupQueries - 1) / kGroupQueries;
  float* tiles = scratch->data<float>();
  const bool f32 = args.q.dtype() == DType::kF32;
  const int64_t heads = call.heads, heads_a_task = heads_of_task(sequences, heads),
                parts = (heads + heads_a_task - 1) / std::max<int64_t>(1, heads_a_task);
  context.pool().run(sequences * parts * groups, [&](int64_t task, int worker) {
    const int64_t group = task % groups, part = task / groups % parts, sequence = task / groups / parts;
    float* own = tiles + worker * forward_scratch(d);
    for (int64_t head = part * heads_a_task; head < std::min(heads, (part + 1) * heads_a_task); ++head)
      if (f32)
        HWY_DYNAMIC_DISPATCH(flash_forward_f32)(call, sequence, head, group, own);
      else
        HWY_DYNAMIC_DISPATCH(flash_forward_bf16)(call, sequence, head, group, own);
  });
}

void attention_flash_backward_cpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse,
                                  const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  const int64_t d = args.q.dim(2), heads = args.q.dim(1), tokens = args.q.dim(0), workers = context.pool().threads();
  Buffer scratch = context.allocate({workers, backward_scratch(d)}, DType::kF32, "attention.tiles");
  // Sums of dq over blocks of keys. A worker needs one sequence's for one head; with more workers than heads, one row a
  // packed query and head is less.
  Buffer sums = context.allocate({std::min(workers, heads), tokens, padded_width(d)}, DType::kF32, "attention.dq_sums");
  if (context.planning()) return;
  AttentionCall call = call_of(args, lse);
  call.out_in = out.raw(), call.out_stride = out.row_stride();
  call.dout = dout.raw(), call.dout_stride = dout.row_stride();
  call.dq = dq.raw(), call.dk = dk.raw(), call.dv = dv.raw();
  call.dq_stride = dq.row_stride(), call.dk_stride = dk.row_stride(), call.dv_stride = dv.row_stride();
  const int64_t sequences = args.q_offsets.dim(0) - 1;
  const bool f32 = args.q.dtype() == DType::kF32;
  const int64_t heads_a_task = heads_of_task(sequences, heads),
                parts = (heads + heads_a_task - 1) / std::max<int64_t>(1, heads_a_task);
  context.pool().run(sequences * parts, [&](int64_t task, int worker) {
    const int64_t part = task % parts, sequence = task / parts;
    float* tiles = scratch->data<float>() + worker * backward_scratch(d);
    for (int64_t head = part * heads_a_task; head < std::min(heads, (part + 1) * heads_a_task); ++head) {
      float* dq_sums =
          sums->data<float>() +
          (workers <= heads ? worker * tokens : head * tokens + call.q_offsets[sequence]) * padded_width(d);
      if (f32)
        HWY_DYNAMIC_DISPATCH(flash_backward_f32)(call, sequence, head, tiles, dq_sums);
      else
        HWY_DYNAMIC_DISPATCH(flash_backward_bf16)(call, sequence, head, tiles, dq_sums);
    }
  });
}

}  // namespace frit
#endif
