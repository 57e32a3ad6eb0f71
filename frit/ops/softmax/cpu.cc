#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "frit/ops/softmax/cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>
#include <cmath>
#include <limits>

#include "frit/backend/cpu/simd-inl.h"
#include "frit/ops/softmax/cpu.h"

// What all targets share.
#ifndef FRIT_OPS_SOFTMAX_CPU_CC_
#define FRIT_OPS_SOFTMAX_CPU_CC_
namespace frit {

// Rows up to this long keep their exponentials on the stack between passes; longer ones compute them twice.
constexpr size_t kKeptColumns = 2048;

// One row's operands but for x and y.
struct SoftmaxRow {
  const float* mask;  // null: none
  size_t cols, visible;
  float scale;
  const Dropout* dropout;
  int64_t row;
  uint32_t head;
};

}  // namespace frit
#endif

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {

// Dropout factors of a row, made in pieces as columns are asked for in rising order.
class RowFactors {
 public:
  explicit RowFactors(const SoftmaxRow& row) : row_(row), active_(row.dropout->active()) {}
  // Factors of columns [i, i + lanes()); i is a multiple of lanes().
  HWY_INLINE VF at(size_t i) {
    if (!active_) return hn::Set(DF(), 1.0f);
    if (i >= end_) {
      begin_ = i / kPiece * kPiece, end_ = begin_ + kPiece;
      const size_t cols = std::min(kPiece, row_.visible - begin_);
      dropout_factor_tile(
          *row_.dropout, row_.row, 1, row_.head, begin_ / 8, [=](size_t) { return cols; }, factors_, 0);
    }
    return hn::LoadU(DF(), factors_ + (i - begin_));
  }

 private:
  static constexpr size_t kPiece = 256;
  const SoftmaxRow& row_;
  const bool active_;
  size_t begin_ = 0, end_ = 0;
  float factors_[kPiece];
};

// scale * x + mask at columns [i, i + n).
template <typename T>
HWY_INLINE VF score(const SoftmaxRow& row, const T* x, size_t i, size_t n) {
  const VF s = hn::Mul(load_any(x + i, n), hn::Set(DF(), row.scale));
  return row.mask ? hn::Add(s, load_any(row.mask + i, n)) : s;
}

template <typename T>
HWY_INLINE void zero_columns(T* y, size_t begin, size_t end) {
  std::fill(y + begin, y + end, T(0.0f));
}

// Returns log sum exp.
template <typename TX, typename TY>
float softmax_row_forward(const SoftmaxRow& row, const TX* x, TY* y) {
  const DF d;
  const float infinity = std::numeric_limits<float>::infinity();
  const VF lowest = hn::Set(d, -infinity);
  VF largest = lowest;
  auto has_nan = hn::IsNaN(largest);
  for_columns(row.visible, [&](size_t i, size_t n) {
    const VF s = hn::IfThenElse(hn::FirstN(d, n), score(row, x, i, n), lowest);
    has_nan = hn::Or(has_nan, hn::IsNaN(s));
    largest = hn::Max(s, largest);
  });
  if (!hn::AllFalse(d, has_nan)) {  // a NaN anywhere makes the row NaN, never masked
    std::fill_n(y, row.cols, TY(std::numeric_limits<float>::quiet_NaN()));
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float top = max_of_lanes(largest);
  if (top == -infinity) {
    zero_columns(y, 0, row.cols);
    return -infinity;
  }
  HWY_ALIGN float kept[kKeptColumns + HWY_MAX_BYTES / sizeof(float)];
  const bool keep = row.visible <= kKeptColumns;
  const VF shift = hn::Set(d, top);
  const auto exponential = [&](size_t i, size_t n) {
    return hn::IfThenElseZero(hn::FirstN(d, n), exp_fast(hn::Sub(score(row, x, i, n), shift)));
  };
  VF sum = hn::Zero(d);
  for_columns(row.visible, [&](size_t i, size_t n) {
    const VF e = exponential(i, n);
    sum = hn::Add(sum, e);
    if (keep) hn::StoreU(e, d, kept + i);
  });
  const float total = sum_of_lanes(sum);
  const VF inverse = hn::Set(d, 1 / total);
  RowFactors factors(row);
  for_columns(row.visible, [&](size_t i, size_t n) {
    const VF e = keep ? hn::LoadU(d, kept + i) : exponential(i, n);
    store_any(hn::Mul(hn::Mul(e, inverse), factors.at(i)), y + i, n);
  });
  zero_columns(y, row.visible, row.cols);
  return top + std::log(total);
}

// dy and dx, or x and dx, may be one.
template <typename T, typename TDX>
void softmax_row_backward(const SoftmaxRow& row, const T* dy, const T* x, float lse, TDX* dx) {
  const DF d;
  if (lse == -std::numeric_limits<float>::infinity()) {
    zero_columns(dx, 0, row.cols);
    return;
  }
  HWY_ALIGN float kept_p[kKeptColumns + HWY_MAX_BYTES / sizeof(float)],
      kept_g[kKeptColumns + HWY_MAX_BYTES / sizeof(float)];
  const bool keep = row.visible <= kKeptColumns;
  const VF shift = hn::Set(d, lse), scale = hn::Set(d, row.scale);
  const auto both = [&](RowFactors& factors, size_t i, size_t n, VF& p, VF& g) {
    p = hn::IfThenElseZero(hn::FirstN(d, n), exp_fast(hn::Sub(score(row, x, i, n), shift)));
    g = hn::IfThenElseZero(hn::FirstN(d, n), hn::Mul(load_any(dy + i, n), factors.at(i)));
  };
  VF sums = hn::Zero(d);
  RowFactors factors(row);
  for_columns(row.visible, [&](size_t i, size_t n) {
    VF p, g;
    both(factors, i, n, p, g);
    sums = hn::MulAdd(p, g, sums);
    if (keep) hn::StoreU(p, d, kept_p + i), hn::StoreU(g, d, kept_g + i);
  });
  const VF sum = hn::Set(d, sum_of_lanes(sums));
  RowFactors factors_again(row);
  for_columns(row.visible, [&](size_t i, size_t n) {
    VF p, g;
    if (keep)
      p = hn::LoadU(d, kept_p + i), g = hn::LoadU(d, kept_g + i);
    else
      both(factors_again, i, n, p, g);
    store_any(hn::Mul(hn::Mul(p, scale), hn::Sub(g, sum)), dx + i, n);
  });
  zero_columns(dx, row.visible, row.cols);
}

float row_forward_f32_f32(const SoftmaxRow& row, const float* x, float* y) {
  return softmax_row_forward(row, x, y);
}
float row_forward_f32_bf16(const SoftmaxRow& row, const float* x, bfloat16* y) {
  return softmax_row_forward(row, x, y);
}
float row_forward_bf16_f32(const SoftmaxRow& row, const bfloat16* x, float* y) {
  return softmax_row_forward(row, x, y);
}
float row_forward_bf16_bf16(const SoftmaxRow& row, const bfloat16* x, bfloat16* y) {
  return softmax_row_forward(row, x, y);
}
void row_backward_f32_f32(const SoftmaxRow& row, const float* dy, const float* x, float lse, float* dx) {
  softmax_row_backward(row, dy, x, lse, dx);
}
void row_backward_f32_bf16(const SoftmaxRow& row, const float* dy, const float* x, float lse, bfloat16* dx) {
  softmax_row_backward(row, dy, x, lse, dx);
}
void row_backward_bf16_f32(const SoftmaxRow& row, const bfloat16* dy, const bfloat16* x, float lse, float* dx) {
  softmax_row_backward(row, dy, x, lse, dx);
}
void row_backward_bf16_bf16(const SoftmaxRow& row, const bfloat16* dy, const bfloat16* x, float lse, bfloat16* dx) {
  softmax_row_backward(row, dy, x, lse, dx);
}

}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace frit {
HWY_EXPORT(row_forward_f32_f32);
HWY_EXPORT(row_forward_f32_bf16);
HWY_EXPORT(row_forward_bf16_f32);
HWY_EXPORT(row_forward_bf16_bf16);
HWY_EXPORT(row_backward_f32_f32);
HWY_EXPORT(row_backward_f32_bf16);
HWY_EXPORT(row_backward_bf16_f32);
HWY_EXPORT(row_backward_bf16_bf16);

namespace {

// Calls body(row's operands, r) for all rows, in parallel.
template <typename Body>
void for_rows(Context& context, const Tensor& x, const SoftmaxArgs& args, Body&& body) {
  const int64_t rows = x.dim(0), cols = x.dim(1);
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, cols));
  context.pool().parallel_for(rows, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      SoftmaxRow row{};
      row.mask = args.mask.defined() ? args.mask.data<float>() + r * args.mask.row_stride() : nullptr;
      row.cols = static_cast<size_t>(cols);
      row.visible = static_cast<size_t>(args.lengths.defined() ? args.lengths.data<int32_t>()[r] : cols);
      row.scale = args.scale;
      row.dropout = &args.dropout;
      row.row = args.first_row + (args.rows_per_head ? r % args.rows_per_head : r);
      row.head = static_cast<uint32_t>(args.rows_per_head ? r / args.rows_per_head : 0);
      body(row, r);
    }
  });
}

template <typename T>
T* at(const Tensor& t, int64_t r) {
  return t.data<T>() + r * t.row_stride();
}

}  // namespace

void softmax_forward_cpu(Context& context, const Tensor& x, const SoftmaxArgs& args, const Tensor& y,
                         const Tensor& lse) {
  if (context.planning()) return;
  const bool x32 = x.dtype() == DType::kF32, y32 = y.dtype() == DType::kF32;
  for_rows(context, x, args, [&](const SoftmaxRow& row, int64_t r) {
    float result;
    if (x32 && y32)
      result = HWY_DYNAMIC_DISPATCH(row_forward_f32_f32)(row, at<float>(x, r), at<float>(y, r));
    else if (x32)
      result = HWY_DYNAMIC_DISPATCH(row_forward_f32_bf16)(row, at<float>(x, r), at<bfloat16>(y, r));
    else if (y32)
      result = HWY_DYNAMIC_DISPATCH(row_forward_bf16_f32)(row, at<bfloat16>(x, r), at<float>(y, r));
    else
      result = HWY_DYNAMIC_DISPATCH(row_forward_bf16_bf16)(row, at<bfloat16>(x, r), at<bfloat16>(y, r));
    if (lse.defined()) lse.data<float>()[r] = result;
  });
}

void softmax_backward_cpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& lse,
                          const SoftmaxArgs& args, const Tensor& dx) {
  if (context.planning()) return;
  const bool x32 = x.dtype() == DType::kF32, dx32 = dx.dtype() == DType::kF32;
  for_rows(context, x, args, [&](const SoftmaxRow& row, int64_t r) {
    const float row_lse = lse.data<float>()[r];
    if (x32 && dx32)
      HWY_DYNAMIC_DISPATCH(row_backward_f32_f32)(row, at<float>(dy, r), at<float>(x, r), row_lse, at<float>(dx, r));
    else if (x32)
      HWY_DYNAMIC_DISPATCH(row_backward_f32_bf16)(row, at<float>(dy, r), at<float>(x, r), row_lse, at<bfloat16>(dx, r));
    else if (dx32)
      HWY_DYNAMIC_DISPATCH(row_backward_bf16_f32)
      (row, at<bfloat16>(dy, r), at<bfloat16>(x, r), row_lse, at<float>(dx, r));
    else
      HWY_DYNAMIC_DISPATCH(row_backward_bf16_bf16)
      (row, at<bfloat16>(dy, r), at<bfloat16>(x, r), row_lse, at<bfloat16>(dx, r));
  });
}

}  // namespace frit
#endif
