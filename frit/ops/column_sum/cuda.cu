#include "frit/ops/column_sum/column_sum.h"
#include "frit/ops/column_sum/gpu.h"
#include "frit/ops/column_sum/walk.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kAddThreads = 1024;

// y (+)= the sum of `rows` partial rows.
template <typename T>
struct PartialSum {
  Global<const float> partials;
  int64_t rows, stride, columns;
  Global<T> y;
  int64_t first_block;  // of its own, 32 columns each
  bool accumulate;
};

// A block takes 32 columns: thread (y, x) adds the rows y, y + 32, ... of column x, then warp w adds the 32 sums of
// column w.
template <typename T>
FRIT_DEVICE void add_partials(const PartialSum<T>& sum, int64_t block) {
  const int x = lane(), first = warp();
  const int64_t column = block * 32 + x;
  float mine = 0;
  if (column < sum.columns) {
    constexpr int kAtOnce = 8;  // loads a thread has under way
    const int rows = static_cast<int>(sum.rows);
    FRIT_UNROLL_BY(1)
    for (int r = first; r < rows; r += 32 * kAtOnce) {
      const Global<const float> from = sum.partials + (column + r * sum.stride);
      float v[kAtOnce];
      FRIT_UNROLL
      for (int u = 0; u < kAtOnce; ++u) v[u] = r + 32 * u < rows ? load(from, 32 * u * sum.stride) : 0.0f;
      FRIT_UNROLL
      for (int u = 0; u < kAtOnce; ++u) mine += v[u];
    }
  }
  const Shared<float> tile = shared_array<float>(0);  // [32][33]: written along rows, read along columns
  store(tile, first * 33 + x, mine);
  barrier();
  const float total = warp_sum(load(tile, x * 33 + first));
  const int64_t to = block * 32 + first;
  if (x == 0 && to < sum.columns)
    store(sum.y, to, convert<T>(sum.accumulate ? static_cast<float>(load(sum.y, to)) + total : total));
}

template <typename T>
FRIT_KERNEL(kAddThreads, 1)
column_sum_add_partials_kernel(PartialSum<T> sum) {
  wait_for_previous();
  add_partials(sum, block_index());
}

// Many of them in one launch. z counts as one of its own.
constexpr int kMostSums = 2 * LaterSums::kMost;
template <typename T>
struct PartialSums {
  int count;
  PartialSum<T> sums[kMostSums];
};
template <typename T>
FRIT_KERNEL(kAddThreads, 1)
column_sum_add_many_partials_kernel(PartialSums<T> table) {
  wait_for_previous();
  int mine = 0;
  while (mine + 1 < table.count && table.sums[mine + 1].first_block <= block_index()) ++mine;
  add_partials(table.sums[mine], block_index() - table.sums[mine].first_block);
}

constexpr int64_t kAddShared = 32 * 33 * 4;

template <typename T>
PartialSum<T> partial_sum(const Tensor& partials, int64_t offset, const Tensor& y, bool accumulate) {
  return {global<const float>(partials) + offset,
          partials.dim(0),
          partials.row_stride(),
          y.numel(),
          global<T>(y),
          0,
          accumulate};
}

constexpr int kUnroll = 8;

template <typename T>
FRIT_KERNEL(kSumThreads, 1)
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

bool leave_partial_sums(Context& context, Buffer& partials, bool accumulate, const Tensor& y, const Tensor& z) {
  if (!context.later_sums) return false;
  std::vector<Context::LaterSum>& left = *context.later_sums;
  if (left.size() == LaterSums::kMost || (!left.empty() && left.front().y.dtype() != y.dtype()))
    add_later_sums_gpu(context);
  left.push_back({std::move(partials), y, z, accumulate});
  return true;
}

void add_later_sums_gpu(Context& context) {
  std::vector<Context::LaterSum>& left = *context.later_sums;
  if (left.empty()) return;
  dispatch_float(left.front().y.dtype(), [&](auto t) {
    using T = decltype(t);
    PartialSums<T> table = {};
    int64_t blocks = 0;
    for (const Context::LaterSum& l : left)
      for (const Tensor* to : {&l.y, &l.z}) {
        if (!to->defined()) continue;
        PartialSum<T>& sum = table.sums[table.count++];
        sum = partial_sum<T>(l.partials, to == &l.y ? 0 : l.y.numel(), *to, l.accumulate);
        sum.first_block = blocks;
        blocks += (to->numel() + 31) / 32;
      }
    launch(context, "column_sum_add_many_partials_kernel", column_sum_add_many_partials_kernel<T>,
           {blocks, kAddThreads, kAddShared}, table);
  });
  left.clear();
}

void add_partial_sums_gpu(Context& context, Buffer partials, bool accumulate, const Tensor& y, const Tensor& z) {
  if (leave_partial_sums(context, partials, accumulate, y, z)) return;
  const auto add = [&](const Tensor& to, int64_t offset) {
    if (!to.defined()) return;
    dispatch_float(to.dtype(), [&](auto t) {
      using T = decltype(t);
      launch(context, "column_sum_add_partials_kernel", column_sum_add_partials_kernel<T>,
             {(to.numel() + 31) / 32, kAddThreads, kAddShared}, partial_sum<T>(partials, offset, to, accumulate));
    });
  };
  add(y, 0);
  add(z, y.numel());
}

void column_sum_gpu(Context& context, const Tensor& x, bool accumulate, const Tensor& y) {
  const ColumnWalk walk = make_sum_walk(x, kUnroll, lies_packed(x), true);
  Buffer partial = context.allocate({walk.partial_rows(), x.dim(1)}, DType::kF32, "column_sum.partial");
  dispatch_float(x.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(context, "column_sum_partials_kernel", column_sum_partials_kernel<T>,
           {walk.blocks(), walk.threads(), column_sums_shared_bytes(walk, kVecOf<T>)}, walk, global<const T>(x),
           global<float>(partial.tensor()));
  });
  add_partial_sums_gpu(context, std::move(partial), accumulate, y);
}

}  // namespace frit
