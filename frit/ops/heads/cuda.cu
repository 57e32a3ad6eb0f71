#include "frit/ops/column_sum/gpu.h"
#include "frit/ops/heads/gpu.h"
#include "frit/simt/columns.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = 256, kUnroll = 4;

// The joined side as a matrix [tokens, blocks * d], which the threads of a ColumnWalk share.
Tensor as_matrix(const Tensor& joined, int64_t blocks, int64_t d) {
  Tensor rows(joined.raw(), joined.dtype(), {joined.dim(0), joined.row_stride()}, joined.device());
  return rows.columns(0, blocks * d);
}
// Threads a block such that blocks along a row are full, or nearly.
int balanced_threads(const Tensor& matrix) {
  const int64_t n = 16 / size_of(matrix.dtype()), chunks = (matrix.dim(1) + n - 1) / n;
  if (chunks <= kThreads) return kThreads;
  const int64_t tiles = (chunks + kThreads - 1) / kThreads;
  return static_cast<int>(((chunks + tiles - 1) / tiles + 31) / 32 * 32);
}

// Element i (column `column` of the joined side) of token t in the side that is apart.
struct HeadsPlace {
  int64_t tokens = 0;
  int d = 1;
  FRIT_HOST_DEVICE int64_t of(int64_t column, int64_t t) const {
    const int64_t block = static_cast<uint32_t>(column) / static_cast<uint32_t>(d);
    return (block * tokens + t) * d + (column - block * d);
  }
};

// vectors: d and the addresses are whole vectors, so that a thread's columns lie in one head.
template <typename T>
FRIT_KERNEL(kThreads, 4)
heads_split_columns_kernel(ColumnWalk walk, bool vectors, HeadsPlace heads, Global<const T> joined,
                           Global<const T> bias, Global<const float> bias_f32, Global<T> apart) {
  constexpr int N = kVecOf<T>;
  wait_for_previous();
  const ColumnPlace at = column_place(walk, joined);
  const bool add = bias || bias_f32;
  for_rows<kUnroll, kVecOf<T>>(walk, at, vectors, [&](auto whole, auto unroll, int64_t k, int64_t step, int64_t end) {
    Vec<T, N> v[unroll];
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u)
      if (k + u * step < end)
        v[u] = load_columns<whole, Cache::kStream>(joined + walk.row(k + u * step, at.row_class) * walk.row_stride,
                                                   at.column, walk.columns);
    Vec<float, N> b{};
    if (bias) b = to_float(load_span<N>(bias, at.column, walk.columns, T()));
    if (bias_f32) {
      FRIT_UNROLL
      for (int i = 0; i < N; i += 4) {
        const Vec<float, 4> part = load_span<4>(bias_f32, at.column + i, walk.columns, 0.0f);
        FRIT_UNROLL
        for (int j = 0; j < 4; ++j) b[i + j] = part[j];
      }
    }
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      const int64_t t = walk.row(k + u * step, at.row_class);
      if (add) {
        Vec<float, N> sum = to_float(v[u]);
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) sum[i] += b[i];
        v[u] = from_float<T>(sum);
      }
      if constexpr (whole) {
        store_vec<N, Cache::kStream>(apart, heads.of(at.column, t), v[u]);
      } else {
        FRIT_UNROLL
        for (int i = 0; i < N; ++i)
          if (at.column + i >= 0 && at.column + i < walk.columns)
            store(apart, heads.of(at.column + i, t), static_cast<T>(v[u][i]));
      }
    }
  });
}

// With sums also a row of partial column sums a block: few blocks then, with twice the loads in flight.
template <typename T, bool sums>
FRIT_KERNEL(kThreads, sums ? 2 : 4)
heads_merge_columns_kernel(ColumnWalk walk, bool vectors, HeadsPlace heads, Global<const T> apart, Global<T> joined,
                           Global<float> partial) {
  constexpr int N = kVecOf<T>;
  wait_for_previous();
  const ColumnPlace at = column_place(walk, joined);
  float sum[N] = {};
  constexpr int kLoads = sums ? 2 * kUnroll : kUnroll;
  for_rows<kLoads, kVecOf<T>>(walk, at, vectors, [&](auto whole, auto unroll, int64_t k, int64_t step, int64_t end) {
    Vec<T, N> v[unroll];
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      const int64_t t = walk.row(k + u * step, at.row_class);
      if constexpr (whole) {
        v[u] = load_vec<N, Cache::kStream>(apart, heads.of(at.column, t));
      } else {
        v[u] = Vec<T, N>{};
        FRIT_UNROLL
        for (int i = 0; i < N; ++i)
          if (at.column + i >= 0 && at.column + i < walk.columns) v[u][i] = load(apart, heads.of(at.column + i, t));
      }
    }
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      if constexpr (sums) {
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) sum[i] += widen(static_cast<T>(v[u][i]));
      }
      store_columns<whole, Cache::kStream>(joined + walk.row(k + u * step, at.row_class) * walk.row_stride, at.column,
                                           walk.columns, v[u]);
    }
  });
  if constexpr (sums) store_column_sums(walk, at, sum, shared_array<float>(0), partial, walk.columns, 0);
}

bool moves_as_vectors(const Tensor& matrix, const Tensor& apart, int64_t d) {
  const int64_t n = 16 / size_of(matrix.dtype());
  const auto aligned = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0; };
  return d % n == 0 && matrix.row_stride() % n == 0 && aligned(matrix) && aligned(apart);
}

}  // namespace

void joined_to_heads_gpu(Context& context, const Tensor& joined, const Tensor& bias, const Tensor& apart,
                         int64_t blocks, int64_t d) {
  const Tensor matrix = as_matrix(joined, blocks, d);
  const ColumnWalk walk = make_column_walk(matrix, balanced_threads(matrix), kUnroll, 0);
  const bool bias_is_f32 = bias.defined() && bias.dtype() == DType::kF32;
  dispatch_float(joined.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(context, "heads_split_columns_kernel", heads_split_columns_kernel<T>, {walk.blocks(), walk.threads()}, walk,
           moves_as_vectors(matrix, apart, d), HeadsPlace{joined.dim(0), static_cast<int>(d)}, global<const T>(joined),
           global<const T>(bias_is_f32 ? Tensor() : bias), global<const float>(bias_is_f32 ? bias : Tensor()),
           global<T>(apart));
  });
}

void heads_to_joined_gpu(Context& context, const Tensor& apart, const Tensor& joined, bool accumulate,
                         const Tensor& dbias, int64_t blocks, int64_t d) {
  const bool sums = dbias.defined();
  const Tensor matrix = as_matrix(joined, blocks, d);
  const ColumnWalk walk =
      make_column_walk(matrix, balanced_threads(matrix), sums ? 2 * kUnroll : kUnroll, sums ? kMostBlocks : 0);
  Buffer partial;
  if (sums) partial = context.allocate({walk.partial_rows(), blocks * d}, DType::kF32, "heads.partial");
  dispatch_float(joined.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto kernel, int64_t shared_bytes) {
      launch(context, "heads_merge_columns_kernel", kernel, {walk.blocks(), walk.threads(), shared_bytes}, walk,
             moves_as_vectors(matrix, apart, d), HeadsPlace{joined.dim(0), static_cast<int>(d)}, global<const T>(apart),
             global<T>(joined), global<float>(partial.tensor()));
    };
    if (sums)
      run(heads_merge_columns_kernel<T, true>, column_sums_shared_bytes(walk, kVecOf<T>));
    else
      run(heads_merge_columns_kernel<T, false>, 0);
  });
  if (sums) add_partial_sums_gpu(context, std::move(partial), accumulate, dbias);
}

}  // namespace frit
