#include "frit/ops/column_sum/column_sum.h"
#include "frit/ops/column_sum/gpu.h"
#include "frit/ops/column_sum/walk.h"
#include "frit/simt/early.h"
#include "frit/simt/walk_16.h"

namespace frit {
namespace {

using namespace simt;

// Few threads with few registers: there is room for them beside the blocks that write the partial rows, so that they
// stand ready when those end.
constexpr int kAddThreads = 128, kAddColumns = 8, kAddGroups = kAddThreads / kAddColumns;

// y (+)= the sum of `rows` partial rows.
template <typename T>
struct PartialSum {
  Global<const float> partials;
  int64_t rows, stride, columns;
  Global<T> y;
  int64_t first_block;  // of its own, kAddColumns columns each
  bool accumulate;
};

// A block takes 8 columns, 32 bytes of each partial row: group g of its 16 groups of 8 threads adds rows g, g + 16, ...
// with 9 rows on their way at once, then the groups of a warp are added up, and then the warps.
template <typename T>
FRIT_DEVICE void add_partials(const PartialSum<T>& sum, int64_t block) {
  constexpr int kAtOnce = 9;
  const int x = thread_index() % kAddColumns, group = thread_index() / kAddColumns;
  const int64_t column = block * kAddColumns + x;
  const bool inside = column < sum.columns;
  const int64_t step = kAddGroups * sum.stride;
  Global<const float> from = sum.partials + (group * sum.stride + column);
  wait_for_previous();
  let_next_start();
  float before = 0;  // loaded along with the rest
  if (sum.accumulate && inside && thread_index() < kAddColumns) before = static_cast<float>(load(sum.y, column));
  float mine = 0;
  const int rows = inside ? static_cast<int>(sum.rows) : 0;
  FRIT_UNROLL_BY(1)
  for (int r = group; r < rows; r += kAtOnce * kAddGroups) {
    float v[kAtOnce];
    FRIT_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      v[i] = r + i * kAddGroups < rows ? load(from, 0) : 0.0f;
      from = from + step;
    }
    FRIT_UNROLL
    for (int i = 0; i < kAtOnce; ++i) mine += v[i];
  }
  FRIT_UNROLL
  for (int bits = kAddColumns; bits < kWarpSize; bits *= 2) mine += shuffle_xor(mine, bits);
  const Shared<float> sums = shared_array<float>(0);  // [warps][kAddColumns]
  if (lane() < kAddColumns) store(sums, warp() * kAddColumns + x, mine);
  barrier();
  if (thread_index() >= kAddColumns || !inside) return;
  float total = load(sums, x);
  FRIT_UNROLL
  for (int w = 1; w < kAddThreads / kWarpSize; ++w) total += load(sums, w * kAddColumns + x);
  store(sum.y, column, convert<T>(sum.accumulate ? before + total : total));
}

template <typename T>
FRIT_KERNEL(kAddThreads, 16)
column_sum_add_partials_kernel(PartialSum<T> sum) {
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
FRIT_KERNEL(kAddThreads, 16)
column_sum_add_many_partials_kernel(PartialSums<T> table) {
  int mine = 0;
  while (mine + 1 < table.count && table.sums[mine + 1].first_block <= block_index()) ++mine;
  add_partials(table.sums[mine], block_index() - table.sums[mine].first_block);
}

constexpr int64_t kAddShared = kAddThreads / kWarpSize * kAddColumns * 4;
int64_t add_blocks(const Tensor& y) {
  return (y.numel() + kAddColumns - 1) / kAddColumns;
}

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
constexpr FoldedBlocks kFolded = {4, 15, 15};  // one block a multiprocessor: few partial rows

template <typename T>
FRIT_KERNEL(kSumThreads, 1)
column_sum_partials_kernel(ColumnWalk walk, Global<const T> x, Global<float> partial) {
  constexpr int N = kVecOf<T>;
  const ColumnPlace at = column_place(walk, x);
  wait_for_previous();
  let_next_start();
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
        blocks += add_blocks(*to);
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
             {add_blocks(to), kAddThreads, kAddShared}, partial_sum<T>(partials, offset, to, accumulate));
    });
  };
  add(y, 0);
  add(z, y.numel());
}

void column_sum_gpu(Context& context, const Tensor& x, bool accumulate, const Tensor& y) {
  ColumnWalk walk = make_sum_walk(x, kUnroll, lies_packed(x), true);
  fill_folded(walk, x, lies_packed(x), kFolded, kUnroll);
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
