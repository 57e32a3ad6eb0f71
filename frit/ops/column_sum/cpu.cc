#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "frit/ops/column_sum/cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>

#include "frit/backend/cpu/simd-inl.h"
#include "frit/ops/column_sum/cpu.h"

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {

// sum[c] = sum over rows [begin, end) of x[r][c].
template <typename T>
void sum_rows(const T* x, int64_t stride, int64_t begin, int64_t end, size_t cols, float* sum) {
  for_columns(cols, [&](size_t c, size_t n) {
    VF total = hn::Zero(DF());
    for (int64_t r = begin; r < end; ++r) total = hn::Add(total, load_any(x + r * stride + c, n));
    store_any(total, sum + c, n);
  });
}
void sum_rows_f32(const float* x, int64_t stride, int64_t begin, int64_t end, size_t cols, float* sum) {
  sum_rows(x, stride, begin, end, cols, sum);
}
void sum_rows_bf16(const bfloat16* x, int64_t stride, int64_t begin, int64_t end, size_t cols, float* sum) {
  sum_rows(x, stride, begin, end, cols, sum);
}

// y[c] (+)= sum of partials over columns [from, to).
template <typename T>
void add_partials(const float* partials, int64_t pieces, int64_t cols, int64_t from, int64_t to, bool accumulate,
                  T* y) {
  for_columns(static_cast<size_t>(to - from), [&](size_t i, size_t n) {
    const int64_t c = from + static_cast<int64_t>(i);
    VF total = hn::Zero(DF());
    for (int64_t p = 0; p < pieces; ++p) total = hn::Add(total, load_any(partials + p * cols + c, n));
    if (accumulate) total = hn::Add(total, load_any(y + c, n));
    store_any(total, y + c, n);
  });
}
void add_partials_f32(const float* partials, int64_t pieces, int64_t cols, int64_t from, int64_t to, bool accumulate,
                      float* y) {
  add_partials(partials, pieces, cols, from, to, accumulate, y);
}
void add_partials_bf16(const float* partials, int64_t pieces, int64_t cols, int64_t from, int64_t to, bool accumulate,
                       bfloat16* y) {
  add_partials(partials, pieces, cols, from, to, accumulate, y);
}

}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace frit {
HWY_EXPORT(sum_rows_f32);
HWY_EXPORT(sum_rows_bf16);
HWY_EXPORT(add_partials_f32);
HWY_EXPORT(add_partials_bf16);

// Enough rows a piece that a piece's own sums are small work beside reading its rows.
int64_t partial_sum_pieces(int64_t rows) {
  return std::clamp<int64_t>(rows / 32, 1, 32);
}

void add_partial_sums(Context& context, const Tensor& partials, bool accumulate, const Tensor& y) {
  add_partial_sums(context, partials, accumulate, y, Tensor());
}

void add_partial_sums(Context& context, const Tensor& partials, bool accumulate, const Tensor& y, const Tensor& z) {
  if (context.planning()) return;
  const int64_t pieces = partials.dim(0), stride = partials.dim(1), cols = y.numel();
  // Pieces of whole vectors of any target, so that a column's place in a vector never changes its sum.
  context.pool().parallel_for(cols, 1024, [&](int64_t from, int64_t to, int) {
    for (int i = 0; i < (z.defined() ? 2 : 1); ++i) {
      const Tensor& out = i == 0 ? y : z;
      const float* sums = partials.data<float>() + i * cols;
      if (out.dtype() == DType::kF32)
        HWY_DYNAMIC_DISPATCH(add_partials_f32)(sums, pieces, stride, from, to, accumulate, out.data<float>());
      else
        HWY_DYNAMIC_DISPATCH(add_partials_bf16)(sums, pieces, stride, from, to, accumulate, out.data<bfloat16>());
    }
  });
}

void column_sum_cpu(Context& context, const Tensor& x, bool accumulate, const Tensor& y) {
  const int64_t rows = x.dim(0), cols = x.dim(1), pieces = partial_sum_pieces(rows);
  Buffer partials = context.allocate({pieces, cols}, DType::kF32, "column_sum.partials");
  if (context.planning()) return;
  if (cols == 0) return;
  context.pool().run(pieces, [&](int64_t p, int) {
    const int64_t begin = rows * p / pieces, end = rows * (p + 1) / pieces;
    float* sum = partials->data<float>() + p * cols;
    if (x.dtype() == DType::kF32)
      HWY_DYNAMIC_DISPATCH(sum_rows_f32)(x.data<float>(), x.row_stride(), begin, end, cols, sum);
    else
      HWY_DYNAMIC_DISPATCH(sum_rows_bf16)(x.data<bfloat16>(), x.row_stride(), begin, end, cols, sum);
  });
  add_partial_sums(context, partials, accumulate, y);
}

}  // namespace frit
#endif
