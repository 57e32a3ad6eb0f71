#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "frit/infer/kernels.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>
#include <cmath>

#include "frit/backend/cpu/simd-inl.h"
#include "frit/infer/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {

// Sums of two chains: short enough rows that more would not help.
HWY_INLINE float dot(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, size_t n) {
  const size_t w = lanes();
  VF s0 = hn::Zero(DF()), s1 = hn::Zero(DF());
  size_t i = 0;
  for (; i + 2 * w <= n; i += 2 * w) {
    s0 = hn::MulAdd(load(a + i), load(b + i), s0);
    s1 = hn::MulAdd(load(a + i + w), load(b + i + w), s1);
  }
  for (; i < n; i += w) s0 = hn::MulAdd(load_any(a + i, std::min(w, n - i)), load_any(b + i, std::min(w, n - i)), s0);
  return sum_of_lanes(hn::Add(s0, s1));
}

// out[0, kVectors * lanes()) = factor * sum of p[t] * row(t), the sums in registers.
template <int kVectors, typename Row>
HWY_INLINE void weigh(const float* p, size_t count, VF factor, float* out, Row&& row) {
  VF sum[kVectors];
  HWY_UNROLL(8)
  for (int v = 0; v < kVectors; ++v) sum[v] = hn::Zero(DF());
  for (size_t t = 0; t < count; ++t) {
    const VF weight = hn::Set(DF(), p[t]);
    const float* at = row(t);
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) sum[v] = hn::MulAdd(weight, load(at + v * lanes()), sum[v]);
  }
  HWY_UNROLL(8)
  for (int v = 0; v < kVectors; ++v) store(hn::Mul(sum[v], factor), out + v * lanes());
}

template <typename Keys, typename Values>
HWY_INLINE void attend(const AttendOne& a, Keys&& key, Values&& value) {
  const size_t count = static_cast<size_t>(a.count), d = static_cast<size_t>(a.d), w = lanes();
  float* scores = a.scores;
  float top = -HUGE_VALF;
  for (size_t t = 0; t < count; ++t) {
    scores[t] = a.scale * dot(a.q, key(t), d);
    top = std::max(top, scores[t]);
  }
  const VF about = hn::Set(DF(), top);
  VF total = hn::Zero(DF());
  for_columns(count, [&](size_t i, size_t n) {
    const VF e = exp_fast(hn::Sub(load_any(scores + i, n, -HUGE_VALF), about));
    total = hn::Add(total, e);
    store_any(e, scores + i, n);
  });
  const VF factor = hn::Set(DF(), 1.0f / sum_of_lanes(total));
  size_t i = 0;
  for (; i + 8 * w <= d; i += 8 * w) weigh<8>(scores, count, factor, a.out + i, [&](size_t t) { return value(t) + i; });
  for (; i + 4 * w <= d; i += 4 * w) weigh<4>(scores, count, factor, a.out + i, [&](size_t t) { return value(t) + i; });
  for (; i + w <= d; i += w) weigh<1>(scores, count, factor, a.out + i, [&](size_t t) { return value(t) + i; });
  if (i < d) {
    VF sum = hn::Zero(DF());
    for (size_t t = 0; t < count; ++t) sum = hn::MulAdd(hn::Set(DF(), scores[t]), load_n(value(t) + i, d - i), sum);
    store_n(hn::Mul(sum, factor), a.out + i, d - i);
  }
}

void attend_to_history(const AttendOne& a, const float* const* history, int64_t k_offset, int64_t v_offset) {
  attend(
      a, [=](size_t t) { return history[t] + k_offset; }, [=](size_t t) { return history[t] + v_offset; });
}
void attend_to_rows(const AttendOne& a, const float* k, const float* v, int64_t stride) {
  attend(
      a, [=](size_t t) { return k + static_cast<int64_t>(t) * stride; },
      [=](size_t t) { return v + static_cast<int64_t>(t) * stride; });
}

// Two passes for mean and variance: the row lies in the first-level cache.
void add_norm(const AddNormRow& r) {
  const size_t cols = static_cast<size_t>(r.cols);
  VF total = hn::Zero(DF());
  for_columns(cols, [&](size_t i, size_t n) {
    VF s = load_any(r.residual + i, n);
    if (r.y) s = hn::Add(s, load_any(r.y + i, n));
    if (r.sum) store_any(s, r.sum + i, n);
    store_any(s, r.out + i, n);
    total = hn::Add(total, s);
  });
  if (!r.gamma) return;
  const float mean = sum_of_lanes(total) / static_cast<float>(cols);
  const VF middle = hn::Set(DF(), mean);
  VF squares = hn::Zero(DF());
  for_columns(cols, [&](size_t i, size_t n) {
    const VF c = hn::Sub(load_any(r.out + i, n, mean), middle);
    squares = hn::MulAdd(c, c, squares);
  });
  const VF rstd = hn::Set(DF(), 1.0f / std::sqrt(sum_of_lanes(squares) / static_cast<float>(cols) + r.eps));
  for_columns(cols, [&](size_t i, size_t n) {
    const VF c = hn::Mul(hn::Sub(load_any(r.out + i, n), middle), rstd);
    store_any(hn::MulAdd(c, load_any(r.gamma + i, n), load_any(r.beta + i, n)), r.out + i, n);
  });
}

}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace frit {
HWY_EXPORT(attend_to_history);
HWY_EXPORT(attend_to_rows);
HWY_EXPORT(add_norm);

void attend_history(const AttendOne& a, const float* const* history, int64_t k_offset, int64_t v_offset) {
  HWY_DYNAMIC_DISPATCH(attend_to_history)(a, history, k_offset, v_offset);
}
void attend_rows(const AttendOne& a, const float* k, const float* v, int64_t stride) {
  HWY_DYNAMIC_DISPATCH(attend_to_rows)(a, k, v, stride);
}
void add_norm_row(const AddNormRow& row) {
  HWY_DYNAMIC_DISPATCH(add_norm)(row);
}

}  // namespace frit
#endif
