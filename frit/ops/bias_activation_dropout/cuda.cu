#include "frit/ops/bias_activation_dropout/gpu.h"
#include "frit/ops/column_sum/gpu.h"
#include "frit/simt/columns.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = 256, kUnroll = 2;

FRIT_DEVICE float sigmoid(float x) {
  return reciprocal_fast(1 + exp_fast(-x));
}
constexpr float kRootHalf = 0.70710678f, kRootTwoOverPi = 0.79788456f, kCube = 0.044715f;

// Phi(x) and exp(-x^2 / 2). To fp32's precision, or, where 16 bits are stored, by a rational form that is 1.2e-5 off at
// most. Source of the latter: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.25.
template <bool exact>
FRIT_DEVICE float normal_cdf(float x, float& bell) {
  bell = exp_fast(-0.5f * x * x);
  if constexpr (exact) {
    return 0.5f * erfcf(-x * kRootHalf);
  } else {
    const float t = reciprocal_fast(1 + 0.47047f * kRootHalf * fabsf(x));
    const float upper = t * (0.1740121f + t * (-0.0479399f + t * 0.3739278f)) * bell;  // half of erfc(|x| / sqrt 2)
    return x < 0 ? upper : 1 - upper;
  }
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

// The activation is a kernel argument, the same for all threads: a branch that never diverges, instead of four kernels.
template <typename T>
FRIT_DEVICE float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kRelu:
      return x > 0 ? x : 0.0f;
    case Activation::kGelu: {
      float bell;
      return x * normal_cdf<sizeof(T) == 4>(x, bell);
    }
    case Activation::kGeluTanh:
      return 0.5f * x + 0.5f * x * gelu_tanh<T>(x);
    case Activation::kSilu:
      return x * sigmoid(x);
  }
  return 0;
}
template <typename T>
FRIT_DEVICE float slope(Activation activation, float x) {
  switch (activation) {
    case Activation::kRelu:
      return x > 0 ? 1.0f : 0.0f;
    case Activation::kGelu: {
      float bell;
      const float below = normal_cdf<sizeof(T) == 4>(x, bell);
      return below + x * 0.39894228f * bell;
    }
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
FRIT_KERNEL(kThreads, 3)
bias_activation_dropout_forward_columns_kernel(ColumnWalk walk, bool vectors, Global<const T> x, Global<const T> bias,
                                               Activation activation, Dropout dropout, Global<T> y, int64_t y_stride) {
  constexpr int N = kVecOf<T>;
  wait_for_previous();
  const ColumnPlace at = column_place(walk, x);
  const float scale = dropout.scale();
  const bool drop = dropout.active();
  for_rows<kUnroll>(walk, at, vectors, [&](auto whole, auto unroll, int64_t k, int64_t step, int64_t end) {
    Vec<T, N> b{};
    if (bias) b = load_span<N>(bias, at.column, walk.columns, T());
    Vec<T, N> v[unroll];
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u)
      if (k + u * step < end)
        v[u] = load_columns<whole, Cache::kStream>(x + walk.row(k + u * step, at.row_class) * walk.row_stride,
                                                   at.column, walk.columns);
    const uint32_t keeps = drop ? keep_rows<N, unroll>(walk, at, dropout, k, step) : 0;
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      const uint32_t keep = keeps >> (u * N);
      Vec<float, N> a;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        a[i] = activate<T>(activation, widen(v[u][i]) + widen(b[i]));
        if (drop) a[i] = keep >> i & 1 ? a[i] * scale : 0.0f;
      }
      store_columns<whole, Cache::kStream>(y + walk.row(k + u * step, at.row_class) * y_stride, at.column, walk.columns,
                                           from_float<T>(a));
    }
  });
}

template <typename T, bool sums>
FRIT_KERNEL(kThreads, 2)
bias_activation_dropout_backward_columns_kernel(ColumnWalk walk, bool vectors, Global<const T> dy, int64_t dy_stride,
                                                Global<const T> x, Global<const T> bias, Activation activation,
                                                Dropout dropout, Global<T> dx, int64_t dx_stride,
                                                Global<float> partial) {
  constexpr int N = kVecOf<T>;
  wait_for_previous();
  const ColumnPlace at = column_place(walk, x);
  const float scale = dropout.scale();
  const bool drop = dropout.active();
  Vec<T, N> b{};
  if (bias && at.active) b = load_span<N>(bias, at.column, walk.columns, T());
  float sum[N] = {};
  for_rows<kUnroll>(walk, at, vectors, [&](auto whole, auto unroll, int64_t k, int64_t step, int64_t end) {
    Vec<T, N> v[unroll], g[unroll];
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      const int64_t row = walk.row(k + u * step, at.row_class);
      v[u] = load_columns<whole, Cache::kStream>(x + row * walk.row_stride, at.column, walk.columns);
      g[u] = load_columns<whole, Cache::kStream>(dy + row * dy_stride, at.column, walk.columns);
    }
    const uint32_t keeps = drop ? keep_rows<N, unroll>(walk, at, dropout, k, step) : 0;
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      const uint32_t keep = keeps >> (u * N);
      Vec<float, N> d;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        d[i] =
            widen(g[u][i]) * slope<T>(activation, widen(v[u][i]) + widen(b[i]));
        if (drop) d[i] = keep >> i & 1 ? d[i] * scale : 0.0f;
        if (sums) sum[i] += d[i];
      }
      store_columns<whole, Cache::kStream>(dx + walk.row(k + u * step, at.row_class) * dx_stride, at.column,
                                           walk.columns, from_float<T>(d));
    }
  });
  if constexpr (sums) store_column_sums(walk, at, sum, shared_array<float>(0), partial, walk.columns, 0);
}

}  // namespace

void bias_activation_dropout_forward_gpu(Context& context, const Tensor& x, const Tensor& bias, Activation activation,
                                         const Dropout& dropout, const Tensor& y) {
  const ColumnWalk walk = make_column_walk(x, kThreads, kUnroll, 0);
  dispatch_float(x.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(context, "bias_activation_dropout_forward_columns_kernel", bias_activation_dropout_forward_columns_kernel<T>,
           {walk.blocks(), walk.threads()}, walk, lies_like(y, x), global<const T>(x), global<const T>(bias),
           activation, dropout, global<T>(y), y.row_stride());
  });
}

void bias_activation_dropout_backward_gpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias,
                                          Activation activation, const Dropout& dropout, bool accumulate,
                                          const Tensor& dx, const Tensor& dbias) {
  const bool sums = dbias.defined();
  const ColumnWalk walk = make_column_walk(x, kThreads, 8, sums ? kMostBlocks : 0);
  const bool vectors = lies_like(dy, x) && lies_like(dx, x);
  Buffer partial;
  if (sums) partial = context.allocate({walk.partial_rows(), x.dim(1)}, DType::kF32, "bias_activation_dropout.partial");
  dispatch_float(x.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto kernel, int64_t shared_bytes) {
      launch(context, "bias_activation_dropout_backward_columns_kernel", kernel,
             {walk.blocks(), walk.threads(), shared_bytes}, walk, vectors, global<const T>(dy), dy.row_stride(),
             global<const T>(x), global<const T>(bias), activation, dropout, global<T>(dx), dx.row_stride(),
             global<float>(partial.tensor()));
    };
    if (sums)
      run(bias_activation_dropout_backward_columns_kernel<T, true>, column_sums_shared_bytes(walk, kVecOf<T>));
    else
      run(bias_activation_dropout_backward_columns_kernel<T, false>, 0);
  });
  if (sums) add_partial_sums_gpu(context, partial, accumulate, dbias);
}

}  // namespace frit
