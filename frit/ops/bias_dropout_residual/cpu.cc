#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "frit/ops/bias_dropout_residual/cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>

#include "frit/backend/cpu/simd-inl.h"
#include "frit/ops/bias_dropout_residual/cpu.h"
#include "frit/ops/column_sum/cpu.h"

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {
namespace {

// Columns whose dropout factors are made at a time: they stay in the first cache.
constexpr size_t kTile = 512;

template <typename T>
void forward_rows_of(const Tensor& x, const Tensor& bias, const Tensor& residual, const Dropout& dropout,
                     const Tensor& y, int64_t begin, int64_t end) {
  const size_t cols = static_cast<size_t>(x.dim(1));
  const bool active = dropout.active();
  HWY_ALIGN float factors[kTile];
  for (int64_t r = begin; r < end; ++r)
    for (size_t c = 0; c < cols; c += kTile) {
      const size_t width = std::min(kTile, cols - c);
      if (active) dropout_factors(dropout, r, 0, width, factors, c);
      const T* from = x.data<T>() + r * x.row_stride() + c;
      const T* add = bias.defined() ? bias.data<T>() + c : nullptr;
      const T* rest = residual.defined() ? residual.data<T>() + r * residual.row_stride() + c : nullptr;
      T* to = y.data<T>() + r * y.row_stride() + c;
      for_columns(width, [&](size_t i, size_t n) {
        VF v = load_any(from + i, n);
        if (add) v = hn::Add(v, load_any(add + i, n));
        if (active) v = hn::Mul(v, hn::Load(DF(), factors + i));
        if (rest) v = hn::Add(v, load_any(rest + i, n));
        store_any(v, to + i, n);
      });
    }
}
void forward_rows(const Tensor& x, const Tensor& bias, const Tensor& residual, const Dropout& dropout, const Tensor& y,
                  int64_t begin, int64_t end) {
  if (x.dtype() == DType::kF32)
    forward_rows_of<float>(x, bias, residual, dropout, y, begin, end);
  else
    forward_rows_of<bfloat16>(x, bias, residual, dropout, y, begin, end);
}

// sum: this piece's column sums of dx, or null.
template <typename T>
void backward_rows_of(const Tensor& dy, const Dropout& dropout, const Tensor& dx, int64_t begin, int64_t end,
                      float* sum) {
  const size_t cols = static_cast<size_t>(dy.dim(1));
  const bool active = dropout.active();
  const bool copy = active || dx.raw() != dy.raw();
  HWY_ALIGN float factors[kTile];
  if (sum) std::fill(sum, sum + cols, 0.0f);
  for (int64_t r = begin; r < end; ++r)
    for (size_t c = 0; c < cols; c += kTile) {
      const size_t width = std::min(kTile, cols - c);
      if (active) dropout_factors(dropout, r, 0, width, factors, c);
      const T* from = dy.data<T>() + r * dy.row_stride() + c;
      T* to = dx.data<T>() + r * dx.row_stride() + c;
      for_columns(width, [&](size_t i, size_t n) {
        VF v = load_any(from + i, n);
        if (active) v = hn::Mul(v, hn::Load(DF(), factors + i));
        if (sum) store_any(hn::Add(load_any(sum + c + i, n), v), sum + c + i, n);
        if (copy) store_any(v, to + i, n);
      });
    }
}
void backward_rows(const Tensor& dy, const Dropout& dropout, const Tensor& dx, int64_t begin, int64_t end, float* sum) {
  if (dy.dtype() == DType::kF32)
    backward_rows_of<float>(dy, dropout, dx, begin, end, sum);
  else
    backward_rows_of<bfloat16>(dy, dropout, dx, begin, end, sum);
}

}  // namespace
}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace frit {
HWY_EXPORT(forward_rows);
HWY_EXPORT(backward_rows);

namespace {
// Elements a task should have at least.
constexpr int64_t kGrain = 16384;
}  // namespace

void bias_dropout_residual_forward_cpu(Context& context, const Tensor& x, const Tensor& bias, const Tensor& residual,
                                       const Dropout& dropout, const Tensor& y) {
  if (context.planning() || x.numel() == 0) return;
  context.pool().parallel_for(x.dim(0), kGrain / x.dim(1), [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(forward_rows)(x, bias, residual, dropout, y, begin, end);
  });
}

void bias_dropout_residual_backward_cpu(Context& context, const Tensor& dy, const Dropout& dropout, bool accumulate,
                                        const Tensor& dx, const Tensor& dbias) {
  const int64_t rows = dy.dim(0), cols = dy.dim(1), pieces = partial_sum_pieces(rows);
  Buffer partials;
  if (dbias.defined()) partials = context.allocate({pieces, cols}, DType::kF32, "bias_dropout_residual.partials");
  if (context.planning() || cols == 0) return;
  if (!dbias.defined()) {
    context.pool().parallel_for(rows, kGrain / cols, [&](int64_t begin, int64_t end, int) {
      HWY_DYNAMIC_DISPATCH(backward_rows)(dy, dropout, dx, begin, end, nullptr);
    });
    return;
  }
  context.pool().run(pieces, [&](int64_t p, int) {
    HWY_DYNAMIC_DISPATCH(backward_rows)
    (dy, dropout, dx, rows * p / pieces, rows * (p + 1) / pieces, partials->data<float>() + p * cols);
  });
  add_partial_sums(context, partials, accumulate, dbias);
}

}  // namespace frit
#endif
