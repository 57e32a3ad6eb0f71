#include "frit/ops/column_sum/gpu.h"
#include "frit/simt/columns.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kAddThreads = 1024;

// A block takes 32 columns: thread (y, x) adds the rows y, y + 32, ... of column x, then warp w adds the 32 sums of
// column w.
template <typename T>
FRIT_KERNEL(kAddThreads, 1)
column_sum_add_partials_kernel(Global<const float> partials, int64_t rows, int64_t stride, int64_t offset,
                               int64_t columns, bool accumulate, Global<T> y) {
  wait_for_previous();
  const int x = lane(), first = warp();
  const int64_t column = block_index() * 32 + x;
  float sum = 0;
  if (column < columns) {
    const Global<const float> from = partials + offset + column;
    FRIT_UNROLL_BY(8)
    for (int64_t r = first; r < rows; r += 32) sum += load(from, r * stride);
  }
  const Shared<float> tile = shared_array<float>(0);  // [32][33]: written along rows, read along columns
  store(tile, first * 33 + x, sum);
  barrier();
  const float total = warp_sum(load(tile, x * 33 + first));
  const int64_t mine = block_index() * 32 + first;
  if (x == 0 && mine < columns)
    store(y, mine, convert<T>(accumulate ? static_cast<float>(load(y, mine)) + total : total));
}

constexpr int kThreads = 256, kUnroll = 8;

template <typename T>
FRIT_KERNEL(kThreads, 2)
column_sum_partials_kernel(ColumnWalk walk, Global<const T> x, Global<float> partial) {
  constexpr int N = kVecOf<T>;
  wait_for_previous();
  const ColumnPlace at = column_place(walk, x);
  float sum[N] = {};
  for_rows<kUnroll, N>(walk, at, true, [&](auto whole, auto unroll, int64_t k, int64_t step, int64_t end) {
    Vec<T, N> v[unroll];
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u)
      if (k + u * step < end)
        v[u] = load_columns<whole, Cache::kStream>(x + walk.row(k + u * step, at.row_class) * walk.row_stride,
                                                   at.column, at.limit);
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) sum[i] += widen(v[u][i]);
    }
  });
  store_column_sums(walk, at, sum, shared_array<float>(0), partial, walk.columns, 0);
}

}  // namespace

void add_partial_sums_gpu(Context& context, const Tensor& partials, bool accumulate, const Tensor& y, const Tensor& z) {
  const auto add = [&](const Tensor& to, int64_t offset) {
    if (!to.defined()) return;
    dispatch_float(to.dtype(), [&](auto t) {
      using T = decltype(t);
      launch(context, "column_sum_add_partials_kernel", column_sum_add_partials_kernel<T>,
             {(to.numel() + 31) / 32, kAddThreads, 32 * 33 * 4}, global<const float>(partials), partials.dim(0),
             partials.row_stride(), offset, to.numel(), accumulate, global<T>(to));
    });
  };
  add(y, 0);
  add(z, y.numel());
}

void column_sum_gpu(Context& context, const Tensor& x, bool accumulate, const Tensor& y) {
  const ColumnWalk walk = make_column_walk(x, kThreads, kUnroll, kMostBlocks, lies_packed(x));
  const Buffer partial = context.allocate({walk.partial_rows(), x.dim(1)}, DType::kF32, "column_sum.partial");
  dispatch_float(x.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(context, "column_sum_partials_kernel", column_sum_partials_kernel<T>,
           {walk.blocks(), walk.threads(), column_sums_shared_bytes(walk, kVecOf<T>)}, walk, global<const T>(x),
           global<float>(partial.tensor()));
  });
  add_partial_sums_gpu(context, partial, accumulate, y);
}

}  // namespace frit
