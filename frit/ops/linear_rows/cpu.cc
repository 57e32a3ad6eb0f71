#include "frit/ops/linear_rows/cpu.h"

#include <cmath>

#include "frit/ops/gemm/gemm.h"

namespace frit {
namespace {

float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kRelu:
      return x > 0 ? x : 0.0f;
    case Activation::kGelu:
      return 0.5f * x * std::erfc(-x * 0.70710678f);
    case Activation::kGeluTanh:
      return 0.5f * x * (1 + std::tanh(0.79788456f * x * (1 + 0.044715f * x * x)));
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
  }
  return x;
}

template <typename T>
void normalise(const T* x, const T* gamma, const T* beta, int64_t k, float epsilon, T* y) {
  double sum = 0, squares = 0;  // in fp32 a mean far from 0 would cost digits
  for (int64_t i = 0; i < k; ++i) sum += static_cast<float>(x[i]);
  const double mean = sum / static_cast<double>(k);
  for (int64_t i = 0; i < k; ++i) {
    const double d = static_cast<float>(x[i]) - mean;
    squares += d * d;
  }
  const double rstd = 1 / std::sqrt(squares / static_cast<double>(k) + static_cast<double>(epsilon));
  for (int64_t i = 0; i < k; ++i) {
    const auto xhat = static_cast<float>((static_cast<float>(x[i]) - mean) * rstd);
    y[i] = T(xhat * static_cast<float>(gamma[i]) + static_cast<float>(beta[i]));
  }
}

template <typename F>
void for_type(DType dtype, F&& f) {
  if (dtype == DType::kF32)
    f(float());
  else
    f(bfloat16());
}

}  // namespace

void linear_rows_cpu(Context& context, const LinearRowsArgs& args, const Tensor& y) {
  const int64_t rows = y.dim(0), n = y.dim(1), k = args.x.dim(1);
  const bool norm = args.gamma.defined();
  Buffer scratch, sums = context.allocate({rows, n}, DType::kF32, "linear_rows.sums");
  Tensor x = args.x;
  if (norm) {
    x = args.normed;
    if (!x.defined()) scratch = context.allocate({rows, k}, args.x.dtype(), "linear_rows.normed"), x = scratch;
    if (!context.planning())
      for_type(x.dtype(), [&](auto type) {
        using T = decltype(type);
        context.pool().run(rows, [&](int64_t r, int) {
          normalise(args.x.data<T>() + r * args.x.row_stride(), args.gamma.data<T>(), args.beta.data<T>(), k,
                    args.epsilon, x.data<T>() + r * x.row_stride());
        });
      });
  }
  linear(context, x, args.w, args.bias, sums);
  if (context.planning()) return;
  const auto finish = [&](auto residual_type, auto y_type) {
    using R = decltype(residual_type);
    using Y = decltype(y_type);
    context.pool().run(rows, [&](int64_t r, int) {
      const float* from = sums->data<float>() + r * n;
      const R* residual = args.residual.defined() ? args.residual.data<R>() + r * args.residual.row_stride() : nullptr;
      Y* to = y.data<Y>() + r * y.row_stride();
      for (int64_t i = 0; i < n; ++i) {
        const float a = args.activation ? activate(*args.activation, from[i]) : from[i];
        to[i] = Y(residual ? a + static_cast<float>(residual[i]) : a);
      }
    });
  };
  for_type(args.x.dtype(), [&](auto x_type) { for_type(y.dtype(), [&](auto y_type) { finish(x_type, y_type); }); });
}

}  // namespace frit
