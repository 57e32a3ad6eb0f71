#include "frit/ops/bias_dropout_residual/gpu.h"
#include "frit/ops/column_sum/gpu.h"
#include "frit/simt/columns.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = 256, kUnroll = 2;

template <typename T>
FRIT_KERNEL(kThreads, 3)
bias_dropout_residual_forward_columns_kernel(ColumnWalk walk, bool vectors, Global<const T> x, Global<const T> bias,
                                             Global<const T> residual, int64_t residual_stride, Dropout dropout,
                                             Global<T> y, int64_t y_stride) {
  constexpr int N = kVecOf<T>;
  wait_for_previous();
  const ColumnPlace at = column_place(walk, x);
  const float scale = dropout.scale();
  const bool drop = dropout.active();
  for_rows<kUnroll>(walk, at, vectors, [&](auto whole, auto unroll, int64_t k, int64_t step, int64_t end) {
    Vec<T, N> b{};
    if (bias) b = load_span<N>(bias, at.column, walk.columns, T());
    Vec<T, N> v[unroll], r[unroll];
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      const int64_t row = walk.row(k + u * step, at.row_class);
      v[u] = load_columns<whole, Cache::kStream>(x + row * walk.row_stride, at.column, walk.columns);
      if (residual)
        r[u] = load_columns<whole, Cache::kStream>(residual + row * residual_stride, at.column, walk.columns);
    }
    const uint32_t keeps = drop ? keep_rows<N, unroll>(walk, at, dropout, k, step) : 0;
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      const int64_t row = walk.row(k + u * step, at.row_class);
      const uint32_t keep = keeps >> (u * N);
      Vec<float, N> sum;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        float s = widen(v[u][i]);
        if (bias) s += widen(b[i]);
        if (drop) s = keep >> i & 1 ? s * scale : 0.0f;
        if (residual) s += widen(r[u][i]);
        sum[i] = s;
      }
      store_columns<whole, Cache::kStream>(y + row * y_stride, at.column, walk.columns, from_float<T>(sum));
    }
  });
}

// One launch writes dx and, with sums, a row of partial column sums a block.
template <typename T, bool sums>
FRIT_KERNEL(kThreads, 2)
bias_dropout_residual_backward_columns_kernel(ColumnWalk walk, bool vectors, Global<const T> dy, Dropout dropout,
                                              Global<T> dx, int64_t dx_stride, Global<float> partial) {
  constexpr int N = kVecOf<T>;
  wait_for_previous();
  const ColumnPlace at = column_place(walk, dy);
  const float scale = dropout.scale();
  const bool drop = dropout.active();
  float sum[N] = {};
  for_rows<4>(walk, at, vectors, [&](auto whole, auto unroll, int64_t k, int64_t step, int64_t end) {
    Vec<T, N> g[unroll];
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u)
      if (k + u * step < end)
        g[u] = load_columns<whole, Cache::kStream>(dy + walk.row(k + u * step, at.row_class) * walk.row_stride,
                                                   at.column, walk.columns);
    const uint32_t keeps = drop ? keep_rows<N, unroll>(walk, at, dropout, k, step) : 0;
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      const int64_t row = walk.row(k + u * step, at.row_class);
      const uint32_t keep = keeps >> (u * N);
      Vec<float, N> d;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        d[i] = widen(g[u][i]);
        if (drop) d[i] = keep >> i & 1 ? d[i] * scale : 0.0f;
        if (sums) sum[i] += d[i];
      }
      store_columns<whole, Cache::kStream>(dx + row * dx_stride, at.column, walk.columns, from_float<T>(d));
    }
  });
  if constexpr (sums) store_column_sums(walk, at, sum, shared_array<float>(0), partial, walk.columns, 0);
}

}  // namespace

void bias_dropout_residual_forward_gpu(Context& context, const Tensor& x, const Tensor& bias, const Tensor& residual,
                                       const Dropout& dropout, const Tensor& y) {
  const ColumnWalk walk = make_column_walk(x, kThreads, kUnroll, 0);
  const bool vectors = lies_like(residual, x) && lies_like(y, x);
  dispatch_float(x.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(context, "bias_dropout_residual_forward_columns_kernel", bias_dropout_residual_forward_columns_kernel<T>,
           {walk.blocks(), walk.threads()}, walk, vectors, global<const T>(x), global<const T>(bias),
           global<const T>(residual), residual.defined() ? residual.row_stride() : 0, dropout, global<T>(y),
           y.row_stride());
  });
}

void bias_dropout_residual_backward_gpu(Context& context, const Tensor& dy, const Dropout& dropout, bool accumulate,
                                        const Tensor& dx, const Tensor& dbias) {
  const bool sums = dbias.defined();
  const ColumnWalk walk = make_column_walk(dy, kThreads, sums ? 8 : 4, sums ? kMostBlocks : 0);
  const bool vectors = lies_like(dx, dy);
  Buffer partial;
  if (sums) partial = context.allocate({walk.partial_rows(), dy.dim(1)}, DType::kF32, "bias_dropout_residual.partial");
  dispatch_float(dy.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto kernel, int64_t shared_bytes) {
      launch(context, "bias_dropout_residual_backward_columns_kernel", kernel,
             {walk.blocks(), walk.threads(), shared_bytes}, walk, vectors, global<const T>(dy), dropout, global<T>(dx),
             dx.row_stride(), global<float>(partial.tensor()));
    };
    if (sums)
      run(bias_dropout_residual_backward_columns_kernel<T, true>, column_sums_shared_bytes(walk, kVecOf<T>));
    else
      run(bias_dropout_residual_backward_columns_kernel<T, false>, 0);
  });
  if (sums) add_partial_sums_gpu(context, partial, accumulate, dbias);
}

}  // namespace frit
