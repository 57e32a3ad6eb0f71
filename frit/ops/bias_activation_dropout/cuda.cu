#include "frit/ops/bias_activation_dropout/gpu.h"
#include "frit/ops/column_sum/gpu.h"
#include "frit/ops/column_sum/walk.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = 256, kUnroll = 2;

FRIT_DEVICE float sigmoid(float x) {
  return reciprocal_fast(1 + exp_fast(-x));
}
constexpr float kRootHalf = 0.70710678f, kRootTwoOverPi = 0.79788456f, kCube = 0.044715f;

// GELU where 16 bits are stored, without an exponential: Phi is 1.5e-7 off at most, and 5e-7 with fp32's rounding.
// Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.28, about |x| (coefficients times powers of
// sqrt(1/2)).
FRIT_DEVICE float gelu_16(float x) {
  const float a = fabsf(x);
  float p = 1 + a * (4.98673470e-2f +
                     a * (2.11410062e-2f +
                          a * (3.27762637e-3f + a * (3.80035750e-5f + a * (4.88906365e-5f + a * 5.38297500e-6f)))));
  p *= p, p *= p, p *= p, p *= p;
  return 0.5f * x + 0.5f * a * (1 - reciprocal_fast(p));
}
// Its slope Phi + x phi, which shares the bell with Phi; 1e-7 off, so that column sums are as good as fp32's.
// Source: the same, 26.2.17.
FRIT_DEVICE float gelu_slope_16(float x) {
  const float a = fabsf(x), t = reciprocal_fast(1 + 0.2316419f * a);
  const float phi = exp2_fast(x * x * -0.72134752f - 1.32574806f);
  const float upper =
      phi *
      (t * (0.319381530f + t * (-0.356563782f + t * (1.781477937f + t * (-1.821255978f + t * 1.330274429f)))) - a);
  return x < 0 ? upper : 1 - upper;
}
// tanh of gelu_new's argument; hardware's own, good to 5e-4, where bf16 is stored.
template <typename T>
FRIT_DEVICE float gelu_tanh(float x) {
  const float u = kRootTwoOverPi * x * (1 + kCube * x * x);
  if constexpr (std::is_same_v<T, bfloat16>)
    return tanh_fast(u);
  else
    return 2 * sigmoid(2 * u) - 1;
}

// The activation is a kernel argument, the same for all threads: a branch that never diverges, once a vector, instead
// of four kernels. Calls f with it as a constant.
template <typename F>
FRIT_DEVICE void with_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kRelu:
      return f(std::integral_constant<Activation, Activation::kRelu>());
    case Activation::kGelu:
      return f(std::integral_constant<Activation, Activation::kGelu>());
    case Activation::kGeluTanh:
      return f(std::integral_constant<Activation, Activation::kGeluTanh>());
    case Activation::kSilu:
      return f(std::integral_constant<Activation, Activation::kSilu>());
  }
}
template <typename T, Activation activation>
FRIT_DEVICE float activate(float x) {
  switch (activation) {
    case Activation::kRelu:
      return x > 0 ? x : 0.0f;
    case Activation::kGelu:
      if constexpr (sizeof(T) == 2) return gelu_16(x);
      return 0.5f * x * erfcf(-x * kRootHalf);
    case Activation::kGeluTanh:
      return 0.5f * x + 0.5f * x * gelu_tanh<T>(x);
    case Activation::kSilu:
      return x * sigmoid(x);
  }
  return 0;
}
template <typename T, Activation activation>
FRIT_DEVICE float slope(float x) {
  switch (activation) {
    case Activation::kRelu:
      return x > 0 ? 1.0f : 0.0f;
    case Activation::kGelu:
      if constexpr (sizeof(T) == 2) return gelu_slope_16(x);
      return 0.5f * erfcf(-x * kRootHalf) + x * 0.39894228f * exp_fast(-0.5f * x * x);
    case Activation::kGeluTanh: {
      const float t = gelu_tanh<T>(x);
      return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * kRootTwoOverPi * (1 + 3 * kCube * x * x);
    }
    case Activation::kSilu: {
      const float s = sigmoid(x);
      return s * (1 + x * (1 - s));
    }
  }
  return 0;
}

template <typename T>
FRIT_KERNEL(kThreads, 2)
bias_activation_dropout_forward_columns_kernel(ColumnWalk walk, bool vectors, Global<const T> x, Global<const T> bias,
                                               Activation activation, DropoutTable dropout, Global<T> y,
                                               int64_t y_stride) {
  constexpr int N = kVecOf<T>;
  wait_for_previous();
  const ColumnPlace at = column_place(walk, x);
  const float scale = dropout.scale;
  const bool drop = dropout.active;
  const Vec<T, N> b = load_of_columns<N>(walk, at, bias);
  for_rows<kUnroll, N>(walk, at, vectors, [&](auto whole, auto unroll, int k, int step, int end) {
    Vec<T, N> v[unroll];
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u)
      if (k + u * step < end)
        v[u] = load_columns<whole, Cache::kStream>(x + walk.row(k + u * step, at.row_class) * walk.row_stride,
                                                   at.column, at.limit);
    const uint32_t keeps = drop ? keep_rows<whole, N, unroll>(walk, at, dropout, k, step) : 0;
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      const uint32_t keep = keeps >> (u * N);
      Vec<float, N> a;
      with_activation(activation, [&](auto form) {
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) a[i] = activate<T, form.value>(widen(v[u][i]) + widen(b[i]));
      });
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        if (drop) a[i] = (keep >> i & 1 ? a[i] : 0.0f) * scale;
      }
      store_columns<whole, Cache::kStream>(y + walk.row(k + u * step, at.row_class) * y_stride, at.column, at.limit,
                                           from_float<T>(a));
    }
  });
}

template <typename T, bool sums>
FRIT_KERNEL(sums ? kSumThreads : kThreads, sums ? 1 : 2)
bias_activation_dropout_backward_columns_kernel(ColumnWalk walk, bool vectors, Global<const T> dy, int64_t dy_stride,
                                                Global<const T> x, Global<const T> bias, Activation activation,
                                                DropoutTable dropout, Global<T> dx, int64_t dx_stride,
                                                Global<float> partial) {
  constexpr int N = kVecOf<T>;
  wait_for_previous();
  const ColumnPlace at = column_place(walk, x);
  const float scale = dropout.scale;
  const bool drop = dropout.active;
  float sum[N] = {};
  const Vec<T, N> b = load_of_columns<N>(walk, at, bias);
  for_rows<kUnroll, N>(walk, at, vectors, [&](auto whole, auto unroll, int k, int step, int end) {
    Vec<T, N> v[unroll], g[unroll];
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      const int64_t row = walk.row(k + u * step, at.row_class);
      v[u] = load_columns<whole, Cache::kStream>(x + row * walk.row_stride, at.column, at.limit);
      g[u] = load_columns<whole, Cache::kStream>(dy + row * dy_stride, at.column, at.limit);
    }
    const uint32_t keeps = drop ? keep_rows<whole, N, unroll>(walk, at, dropout, k, step) : 0;
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      const uint32_t keep = keeps >> (u * N);
      Vec<float, N> d;
      with_activation(activation, [&](auto form) {
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) d[i] = widen(g[u][i]) * slope<T, form.value>(widen(v[u][i]) + widen(b[i]));
      });
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        d[i] = (!drop || (keep >> i & 1) ? d[i] : 0.0f) * scale;
        if (sums) sum[i] += d[i];
      }
      store_columns<whole, Cache::kStream>(dx + walk.row(k + u * step, at.row_class) * dx_stride, at.column, at.limit,
                                           from_float<T>(d));
    }
  });
  if constexpr (sums) store_column_sums(walk, at, sum, shared_array<float>(0), partial, walk.columns, 0);
}

}  // namespace

void bias_activation_dropout_forward_gpu(Context& context, const Tensor& x, const Tensor& bias, Activation activation,
                                         const Dropout& dropout, const Tensor& y) {
  const bool vectors = lies_like(y, x), packed = lies_packed(x) && lies_packed(y);
  const ColumnWalk walk =
      make_column_walk(x, kThreads, usual_rows_a_thread(x.dim(0), x.dim(1), x.dtype()), 0, packed, vectors);
  dispatch_float(x.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(context, "bias_activation_dropout_forward_columns_kernel", bias_activation_dropout_forward_columns_kernel<T>,
           {walk.blocks(), walk.threads()}, walk, vectors, global<const T>(x), global<const T>(bias), activation,
           DropoutTable(dropout), global<T>(y), walk.stride_of(y));
  });
}

void bias_activation_dropout_backward_gpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias,
                                          const ActivationBackward& form, bool accumulate, const Tensor& dx,
                                          const Tensor& dbias) {
  DropoutTable dropout(form.dropout);
  dropout.scale = form.scale;
  const bool sums = dbias.defined();
  const bool vectors = lies_like(dy, x) && lies_like(dx, x);
  const bool packed = lies_packed(x) && lies_packed(dy) && lies_packed(dx);
  const ColumnWalk walk =
      sums ? make_sum_walk(x, 8, packed, vectors) : make_column_walk(x, kThreads, 8, 0, packed, vectors);
  Buffer partial;
  if (sums) partial = context.allocate({walk.partial_rows(), x.dim(1)}, DType::kF32, "bias_activation_dropout.partial");
  dispatch_float(x.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto kernel, int64_t shared_bytes) {
      launch(context, "bias_activation_dropout_backward_columns_kernel", kernel,
             {walk.blocks(), walk.threads(), shared_bytes}, walk, vectors, global<const T>(dy), walk.stride_of(dy),
             global<const T>(x), global<const T>(bias), form.activation, dropout, global<T>(dx), walk.stride_of(dx),
             global<float>(partial.tensor()));
    };
    if (sums)
      run(bias_activation_dropout_backward_columns_kernel<T, true>, column_sums_shared_bytes(walk, kVecOf<T>));
    else
      run(bias_activation_dropout_backward_columns_kernel<T, false>, 0);
  });
  if (sums) add_partial_sums_gpu(context, std::move(partial), accumulate, dbias);
}

}  // namespace frit
