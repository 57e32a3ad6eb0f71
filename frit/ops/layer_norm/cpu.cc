#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "frit/ops/layer_norm/cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>
#include <cmath>

#include "frit/backend/cpu/simd-inl.h"
#include "frit/ops/column_sum/cpu.h"
#include "frit/ops/layer_norm/cpu.h"

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {
namespace {

// Sums over a row of up to two numbers an element: body(i, n, sum0, sum1) adds to its sums, of which there are four of
// each, so that additions do not wait for each other.
struct TwoSums {
  float first, second;
};
template <typename Body>
HWY_INLINE TwoSums sums_over(size_t cols, Body&& body) {
  const DF d;
  const size_t step = lanes();
  VF a0 = hn::Zero(d), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;
  size_t i = 0;
  for (; i + 4 * step <= cols; i += 4 * step) {
    body(i, step, a0, b0);
    body(i + step, step, a1, b1);
    body(i + 2 * step, step, a2, b2);
    body(i + 3 * step, step, a3, b3);
  }
  for (; i + step <= cols; i += step) body(i, step, a0, b0);
  if (i < cols) body(i, cols - i, a1, b1);
  return {sum_of_lanes(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3))),
          sum_of_lanes(hn::Add(hn::Add(b0, b1), hn::Add(b2, b3)))};
}

template <typename T>
void forward_rows_of(const Tensor& x, const Tensor& gamma, const Tensor& beta, float eps, const Tensor& y,
                     const Tensor& mean, const Tensor& rstd, int64_t begin, int64_t end) {
  const size_t cols = static_cast<size_t>(x.dim(1));
  const T *scale = gamma.data<T>(), *shift = beta.data<T>();
  for (int64_t r = begin; r < end; ++r) {
    const T* row = x.data<T>() + r * x.row_stride();
    T* out = y.data<T>() + r * y.row_stride();
    // The row comes from memory once and stays in the cache: first its rough mean, then the sums of (x - rough) and its
    // square. What is left of the mean then corrects both, so that neither suffers from a mean far from 0.
    const float rough =
        sums_over(cols, [&](size_t i, size_t n, VF& a, VF&) { a = hn::Add(a, load_any(row + i, n)); }).first / cols;
    const VF about = hn::Set(DF(), rough);
    const TwoSums sums = sums_over(cols, [&](size_t i, size_t n, VF& a, VF& b) {
      const VF v = hn::Sub(load_any(row + i, n, rough), about);
      a = hn::Add(a, v);
      b = hn::MulAdd(v, v, b);
    });
    const float left = sums.first / cols;
    const float variance = std::max(0.0f, sums.second / cols - left * left);
    // Not std::max above if the row holds a NaN: it must stay one.
    const float r_std = 1.0f / std::sqrt((sums.second == sums.second ? variance : sums.second) + eps);
    if (mean.defined()) mean.data<float>()[r] = rough + left;
    if (rstd.defined()) rstd.data<float>()[r] = r_std;
    const VF rest = hn::Set(DF(), left), factor = hn::Set(DF(), r_std);
    for_columns(cols, [&](size_t i, size_t n) {
      const VF v = hn::Mul(hn::Sub(hn::Sub(load_any(row + i, n), about), rest), factor);
      store_any(hn::MulAdd(v, load_any(scale + i, n), load_any(shift + i, n)), out + i, n);
    });
  }
}
void forward_rows(const Tensor& x, const Tensor& gamma, const Tensor& beta, float eps, const Tensor& y,
                  const Tensor& mean, const Tensor& rstd, int64_t begin, int64_t end) {
  if (x.dtype() == DType::kF32)
    forward_rows_of<float>(x, gamma, beta, eps, y, mean, rstd, begin, end);
  else
    forward_rows_of<bfloat16>(x, gamma, beta, eps, y, mean, rstd, begin, end);
}

// sum: this piece's column sums of dy * xhat, then those of dy.
template <typename T>
void backward_rows_of(const Tensor& dy, const Tensor& x, const Tensor& gamma, const Tensor& mean, const Tensor& rstd,
                      const Tensor& dresidual, const Tensor& dx, int64_t begin, int64_t end, float* sum) {
  const size_t cols = static_cast<size_t>(x.dim(1));
  const T* scale = gamma.data<T>();
  float *sum_gamma = sum, *sum_beta = sum + cols;
  std::fill(sum, sum + 2 * cols, 0.0f);
  for (int64_t r = begin; r < end; ++r) {
    const T* gradient = dy.data<T>() + r * dy.row_stride();
    const T* row = x.data<T>() + r * x.row_stride();
    const T* rest = dresidual.defined() ? dresidual.data<T>() + r * dresidual.row_stride() : nullptr;
    T* out = dx.data<T>() + r * dx.row_stride();
    const float row_mean = mean.data<float>()[r];
    const VF about = hn::Set(DF(), row_mean), factor = hn::Set(DF(), rstd.data<float>()[r]);
    // dy is 0 in missing lanes, so that they add nothing.
    const TwoSums sums = sums_over(cols, [&](size_t i, size_t n, VF& a, VF& b) {
      const VF d = load_any(gradient + i, n);
      const VF hat = hn::Mul(hn::Sub(load_any(row + i, n, row_mean), about), factor);
      const VF g = hn::Mul(d, load_any(scale + i, n));
      a = hn::Add(a, g);
      b = hn::MulAdd(g, hat, b);
      store_any(hn::MulAdd(d, hat, load_any(sum_gamma + i, n)), sum_gamma + i, n);
      store_any(hn::Add(d, load_any(sum_beta + i, n)), sum_beta + i, n);
    });
    const VF mean_g = hn::Set(DF(), sums.first / cols), mean_gx = hn::Set(DF(), sums.second / cols);
    for_columns(cols, [&](size_t i, size_t n) {
      const VF hat = hn::Mul(hn::Sub(load_any(row + i, n), about), factor);
      const VF g = hn::Mul(load_any(gradient + i, n), load_any(scale + i, n));
      VF v = hn::Mul(factor, hn::Sub(g, hn::MulAdd(hat, mean_gx, mean_g)));
      if (rest) v = hn::Add(v, load_any(rest + i, n));
      store_any(v, out + i, n);
    });
  }
}
void backward_rows(const Tensor& dy, const Tensor& x, const Tensor& gamma, const Tensor& mean, const Tensor& rstd,
                   const Tensor& dresidual, const Tensor& dx, int64_t begin, int64_t end, float* sum) {
  if (x.dtype() == DType::kF32)
    backward_rows_of<float>(dy, x, gamma, mean, rstd, dresidual, dx, begin, end, sum);
  else
    backward_rows_of<bfloat16>(dy, x, gamma, mean, rstd, dresidual, dx, begin, end, sum);
}

}  // namespace
}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace frit {
HWY_EXPORT(forward_rows);
HWY_EXPORT(backward_rows);

void layer_norm_forward_cpu(Context& context, const Tensor& x, const Tensor& gamma, const Tensor& beta, float eps,
                            const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  if (context.planning()) return;
  context.pool().parallel_for(x.dim(0), 8192 / x.dim(1), [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(forward_rows)(x, gamma, beta, eps, y, mean, rstd, begin, end);
  });
}

void layer_norm_backward_cpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                             const Tensor& mean, const Tensor& rstd, const Tensor& dresidual, bool accumulate,
                             const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta) {
  const int64_t rows = x.dim(0), cols = x.dim(1), pieces = partial_sum_pieces(rows);
  Buffer partials = context.allocate({pieces, 2 * cols}, DType::kF32, "layer_norm.partials");
  if (context.planning()) return;
  context.pool().run(pieces, [&](int64_t p, int) {
    HWY_DYNAMIC_DISPATCH(backward_rows)
    (dy, x, gamma, mean, rstd, dresidual, dx, rows * p / pieces, rows * (p + 1) / pieces,
     partials->data<float>() + 2 * p * cols);
  });
  add_partial_sums(context, partials, accumulate, dgamma, dbeta);
}

}  // namespace frit
#endif
