#include "frit/ops/bias_activation_dropout/activation-inl.h"
#include "frit/ops/bias_activation_dropout/gpu.h"
#include "frit/ops/bias_activation_dropout/whole.h"
#include "frit/ops/column_sum/gpu.h"
#include "frit/ops/column_sum/walk.h"
#include "frit/simt/early.h"
#include "frit/simt/folded_columns.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = kActivationThreads, kUnroll = 2;

template <typename T>
FRIT_KERNEL(kThreads, 2)
bias_activation_dropout_forward_columns_kernel(ColumnWalk walk, bool vectors, Global<const T> x, Global<const T> bias,
                                               Activation activation, DropoutTable dropout, Global<T> y,
                                               int64_t y_stride) {
  constexpr int N = kVecOf<T>;
  wait_for_previous();
  let_next_start();
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
        for (int i = 0; i < N; ++i) a[i] = activate<T, form.value>(widen(v[u][i]) + widen(b[i]), scale);
      });
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        if (drop) a[i] = keep >> i & 1 ? a[i] : 0.0f;
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
  let_next_start();
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
        for (int i = 0; i < N; ++i) d[i] = through<T, form.value>(widen(g[u][i]), widen(v[u][i]) + widen(b[i]), scale);
      });
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        d[i] = !drop || (keep >> i & 1) ? d[i] : 0.0f;
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
  if (walks_whole(walk, x, vectors) && begins_whole(bias))
    return start_activation_forward_whole(context, walk, x, bias, activation, DropoutTable(dropout), y);
  if (walks_folded(walk, x)) {
    ColumnWalk folded = walk;
    fill_folded(folded, x, packed, kFolded, 4);
    return start_activation_forward_folded(context, folded, x, bias, activation, DropoutTable(dropout), y);
  }
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
  ColumnWalk walk = sums ? make_sum_walk(x, 8, packed, vectors) : make_column_walk(x, kThreads, 8, 0, packed, vectors);
  const bool whole = walks_whole(walk, x, vectors) && begins_whole(bias);
  if (sums) {
    fill_whole(walk, x, whole, kActivationSumThreads, 4, packed, vectors);
    fill_folded(walk, x, packed, kFoldedSums, 4);
  }
  Buffer partial;
  if (sums) partial = context.allocate({walk.partial_rows(), x.dim(1)}, DType::kF32, "bias_activation_dropout.partial");
  if (whole) {
    start_activation_backward_whole(context, walk, dy, x, bias, form.activation, dropout, dx,
                                    sums ? partial.tensor() : Tensor());
  } else if (sums && walks_folded(walk, x)) {
    start_activation_backward_folded(context, walk, dy, x, bias, form.activation, dropout, dx, partial.tensor());
  } else {
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
  }
  if (sums) add_partial_sums_gpu(context, std::move(partial), accumulate, dbias);
}

}  // namespace frit
