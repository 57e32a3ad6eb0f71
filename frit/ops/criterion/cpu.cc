#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "frit/ops/criterion/cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>
#include <cmath>
#include <limits>

#include "frit/backend/cpu/simd-inl.h"
#include "frit/ops/criterion/cpu.h"

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {
namespace {

// A row is cut into at most kChunks chunks of at least kChunk columns. A chunk is read from memory once: its maximum,
// its sum and its exponentials (against its own maximum, so that nothing has to wait for the row's) come from the first
// cache.
constexpr size_t kChunk = 512, kChunks = 256;

// One row. Logits T; bias B or null. With `scale` not null the row becomes its gradient.
template <typename T, typename B>
void criterion_row(T* row, const B* bias, size_t cols, int32_t label, float smoothing, const float* scale, float& loss,
                   float& nll) {
  const DF d;
  const size_t chunk = std::max(kChunk, (cols + kChunks - 1) / kChunks), chunks = (cols + chunk - 1) / chunk;
  // fp32 logits keep their exponentials in place for the second walk; bf16 would round them, and computes them again.
  constexpr bool kKeeps = sizeof(T) == 4;
  const auto value = [&](size_t i, size_t n, float fill) HWY_ATTR {
    const VF v = load_any(row + i, n, fill);
    return bias ? hn::Add(v, load_any(bias + i, n)) : v;
  };
  const float lowest = -std::numeric_limits<float>::infinity();
  const float label_logit = static_cast<float>(row[label]) + (bias ? static_cast<float>(bias[label]) : 0.0f);
  HWY_ALIGN float tops[kChunks], sums[kChunks];
  double total_logits = 0;
  float top = lowest;
  for (size_t k = 0; k < chunks; ++k) {
    const size_t begin = k * chunk, width = std::min(chunk, cols - begin), step = lanes();
    VF m0 = hn::Set(d, lowest), m1 = m0, s0 = hn::Zero(d), s1 = s0;
    size_t i = 0;
    for (; i + 2 * step <= width; i += 2 * step) {
      const VF a = value(begin + i, step, 0), b = value(begin + i + step, step, 0);
      m0 = hn::Max(m0, a), m1 = hn::Max(m1, b);
      s0 = hn::Add(s0, a), s1 = hn::Add(s1, b);
    }
    for (; i < width; i += step) {
      const size_t n = std::min(step, width - i);
      m0 = hn::Max(m0, value(begin + i, n, lowest));
      s0 = hn::Add(s0, value(begin + i, n, 0));
    }
    total_logits += sum_of_lanes(hn::Add(s0, s1));
    tops[k] = max_of_lanes(hn::Max(m0, m1));
    top = std::max(top, tops[k]);
    // A chunk of -inf alone has no exponential to speak of; against 0 all of them are 0.
    const VF about = hn::Set(d, tops[k] == lowest ? 0.0f : tops[k]);
    VF e0 = hn::Zero(d), e1 = e0;
    i = 0;
    for (; i + 2 * step <= width; i += 2 * step) {
      const VF a = exp_fast(hn::Sub(value(begin + i, step, 0), about)),
               b = exp_fast(hn::Sub(value(begin + i + step, step, 0), about));
      e0 = hn::Add(e0, a), e1 = hn::Add(e1, b);
      if (kKeeps && scale) store(a, row + begin + i), store(b, row + begin + i + step);
    }
    for (; i < width; i += step) {
      const size_t n = std::min(step, width - i);
      const VF a = exp_fast(hn::Sub(value(begin + i, n, lowest), about));
      e0 = hn::Add(e0, a);
      if (kKeeps && scale) store_any(a, row + begin + i, n);
    }
    sums[k] = sum_of_lanes(hn::Add(e0, e1));
  }
  // tops[k] becomes e^(chunk's maximum - row's maximum).
  const VF row_top = hn::Set(d, top);
  for_columns(chunks, [&](size_t i, size_t n)
                          HWY_ATTR { store_any(exp_fast(hn::Sub(load_any(tops + i, n), row_top)), tops + i, n); });
  double total = 0;
  for (size_t k = 0; k < chunks; ++k) total += static_cast<double>(sums[k]) * tops[k];
  const double log_sum = static_cast<double>(top) + std::log(total),
               negative = log_sum - static_cast<double>(label_logit);
  nll = static_cast<float>(negative);
  // Not with a smoothing of 0: a -inf logit would make it NaN.
  loss =
      smoothing == 0
          ? nll
          : static_cast<float>((1.0 - static_cast<double>(smoothing)) * negative +
                               static_cast<double>(smoothing) * (log_sum - total_logits / static_cast<double>(cols)));
  if (!scale) return;
  const float uniform = smoothing / static_cast<float>(cols);
  const VF shift = hn::Set(d, -uniform * *scale);
  if (kKeeps) {
    for (size_t k = 0; k < chunks; ++k) {
      const VF factor = hn::Set(d, static_cast<float>(static_cast<double>(*scale) * tops[k] / total));
      for_columns(std::min(chunk, cols - k * chunk), [&](size_t i, size_t n) HWY_ATTR {
        T* at = row + k * chunk + i;
        store_any(hn::MulAdd(load_any(at, n), factor, shift), at, n);
      });
    }
  } else {
    const VF about = hn::Set(d, static_cast<float>(log_sum)), factor = hn::Set(d, *scale);
    for_columns(cols, [&](size_t i, size_t n) HWY_ATTR {
      store_any(hn::MulAdd(exp_fast(hn::Sub(value(i, n, 0), about)), factor, shift), row + i, n);
    });
  }
  // The label's own: q - p with p = 1 - smoothing + uniform, from the exact q.
  const double p = 1.0 - static_cast<double>(smoothing) + static_cast<double>(uniform);
  row[label] = T(static_cast<float>((std::exp(-negative) - p) * static_cast<double>(*scale)));
}

template <typename T, typename B>
void criterion_rows_of(const Tensor& logits, const Tensor& bias, const Tensor& labels, float smoothing,
                       const Tensor& scale, const Tensor& loss, const Tensor& nll, int64_t begin, int64_t end) {
  const size_t cols = static_cast<size_t>(logits.dim(1));
  for (int64_t r = begin; r < end; ++r) {
    T* row = logits.data<T>() + r * logits.row_stride();
    const int32_t label = labels.data<int32_t>()[r];
    if (label < 0) {
      loss.data<float>()[r] = nll.data<float>()[r] = 0;
      if (scale.defined()) std::fill(row, row + cols, T(0.0f));
      continue;
    }
    criterion_row(row, bias.defined() ? bias.data<B>() : nullptr, cols, label, smoothing,
                  scale.defined() ? scale.data<float>() : nullptr, loss.data<float>()[r], nll.data<float>()[r]);
  }
}
void criterion_rows(const Tensor& logits, const Tensor& bias, const Tensor& labels, float smoothing,
                    const Tensor& scale, const Tensor& loss, const Tensor& nll, int64_t begin, int64_t end) {
  if (logits.dtype() == DType::kF32)
    criterion_rows_of<float, float>(logits, bias, labels, smoothing, scale, loss, nll, begin, end);
  else if (!bias.defined() || bias.dtype() == DType::kF32)
    criterion_rows_of<bfloat16, float>(logits, bias, labels, smoothing, scale, loss, nll, begin, end);
  else
    criterion_rows_of<bfloat16, bfloat16>(logits, bias, labels, smoothing, scale, loss, nll, begin, end);
}

}  // namespace
}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace frit {
HWY_EXPORT(criterion_rows);

void criterion_forward_backward_cpu(Context& context, const Tensor& logits, const Tensor& bias, const Tensor& labels,
                                    float smoothing, const Tensor& scale, const Tensor& loss, const Tensor& nll) {
  if (context.planning()) return;
  context.pool().parallel_for(logits.dim(0), 8192 / logits.dim(1), [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(criterion_rows)(logits, bias, labels, smoothing, scale, loss, nll, begin, end);
  });
}

}  // namespace frit
#endif
