// What the kernels of linear_rows share: operands, the norm, sums of the warps' pieces and what comes behind them.
#pragma once
#include "frit/ops/linear_rows/gpu.h"
#include "frit/simt/early.h"
#include "frit/simt/launch.h"

namespace frit::linear_rows_tile {

using namespace simt;

constexpr int kThreads = kLinearRowsThreads, kWarps = kThreads / kWarpSize;
static_assert(kWarps == kLinearRowsPieces);
constexpr int kNoActivation = -1;

template <typename T>
struct Operands {
  Global<const T> x, w, bias, residual, gamma, beta;
  Global<T> y, normed;
  Global<float> wide_y;  // y if it is f32 and T is not
  int64_t x_stride = 0, w_stride = 0, residual_stride = 0, y_stride = 0, normed_stride = 0;
  int rows = 0, n = 0, k = 0, piece = 0, row_tiles = 0;
  int held = 0, region = 0;  // steps of w in shared memory at a time; bytes of a warp's region
  int activation = kNoActivation;
  float epsilon = 0;
};
FRIT_DEVICE int least(int a, int b) {
  return a < b ? a : b;
}
template <typename T, int N>
FRIT_DEVICE Vec<T, N> zeros() {
  Vec<T, N> v;
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) v[i] = convert<T>(0.0f);
  return v;
}
// N elements from column `at` of a row of `end` columns; zeros where there are none.
template <bool aligned, int N, typename T>
FRIT_DEVICE Vec<T, N> load_row(const Global<const T>& row, int at, int end) {
  if constexpr (aligned) {
    Vec<T, N> v = zeros<T, N>();
    if (at < end) v = load_vec<N>(row, at);
    return v;
  } else {
    return load_span<N>(row, at, end, convert<T>(0.0f));
  }
}
// The same of what is constant.
template <bool aligned, int N, typename T>
FRIT_DEVICE Vec<T, N> load_constant_row(const Global<const T>& row, int at, int end) {
  Vec<T, N> v = zeros<T, N>();
  if constexpr (aligned) {
    if (at < end) v = load_constant<N>(row, at);
  } else {
    FRIT_UNROLL
    for (int i = 0; i < N; ++i)
      if (at + i < end) v[i] = load_constant(row, at + i);
  }
  return v;
}

// ---- The norm ----

// Mean of `count` numbers, and the sum of their squared distances from it.
struct Moments {
  float count = 0, mean = 0, squares = 0;
  // Takes in others. Source: Chan, Golub, LeVeque 1979.
  FRIT_DEVICE void merge(float n, float other_mean, float other_squares) {
    const float both = count + n, delta = other_mean - mean;
    const float share = both == 0 ? 0.0f : n / both;
    squares += other_squares + delta * delta * count * share;
    mean += delta * share;
    count = both;
  }
};
template <int N, typename T>
FRIT_DEVICE void add_vector(Moments& m, const Vec<T, N>& v, int count) {
  float sum = 0, squares = 0;
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) sum += i < count ? widen(v[i]) : 0.0f;
  const float n = static_cast<float>(count), mean = count == N ? sum * (1.0f / N) : sum / n;
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) {
    const float d = i < count ? widen(v[i]) - mean : 0.0f;
    squares = fmaf(d, d, squares);
  }
  m.merge(n, mean, squares);
}
// Mean and 1 / deviation of rows of k columns, one warp's work, in all lanes of the warp the same.
template <bool aligned, int count, typename T>
FRIT_DEVICE void measure(const Global<const T> (&rows)[count], int k, float epsilon, float (&mean)[count],
                         float (&rstd)[count]) {
  constexpr int N = kVecOf<T>;
  Moments moments[count];
  FRIT_UNROLL_BY(2)
  for (int at = lane() * N; at < k; at += kWarpSize * N) {
    FRIT_UNROLL
    for (int u = 0; u < count; ++u) add_vector(moments[u], load_row<aligned, N>(rows[u], at, k), least(N, k - at));
  }
  FRIT_UNROLL
  for (int u = 0; u < count; ++u) {
    Moments& m = moments[u];
    FRIT_UNROLL
    for (int bits = 16; bits > 0; bits /= 2) {
      const float n = shuffle_xor(m.count, bits), other = shuffle_xor(m.mean, bits),
                  squares = shuffle_xor(m.squares, bits);
      m.merge(n, other, squares);
    }
    mean[u] = shuffle(m.mean, 0);
    rstd[u] = rsqrt(shuffle(m.squares, 0) / static_cast<float>(k) + epsilon);
  }
}
// Leaves mean and 1 / deviation of the tile's rows in `stats`; a warp takes two rows at a time.
template <bool aligned, int tile_rows, typename T>
FRIT_DEVICE void row_stats(const Operands<T>& o, int first_row, const Shared<float>& stats) {
  constexpr int kAtOnce = 2;
  for (int r = warp() * kAtOnce; r < tile_rows; r += kWarps * kAtOnce) {
    if (first_row + r >= o.rows) return;
    Global<const T> rows[kAtOnce];
    FRIT_UNROLL
    for (int u = 0; u < kAtOnce; ++u)
      rows[u] = o.x + static_cast<int64_t>(least(first_row + r + u, o.rows - 1)) * o.x_stride;
    float mean[kAtOnce], rstd[kAtOnce];
    measure<aligned>(rows, o.k, o.epsilon, mean, rstd);
    FRIT_UNROLL
    for (int u = 0; u < kAtOnce; ++u)
      if (lane() == 0) store(stats, 2 * (r + u), mean[u]), store(stats, 2 * (r + u) + 1, rstd[u]);
  }
}
template <typename T, int N>
FRIT_DEVICE Vec<T, N> normalised(const Vec<T, N>& x, const Vec<T, N>& gamma, const Vec<T, N>& beta, float mean,
                                 float rstd) {
  Vec<float, N> y;
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) y[i] = fmaf((widen(x[i]) - mean) * rstd, widen(gamma[i]), widen(beta[i]));
  return from_float<T>(y);
}

// ---- Shared memory ----

// Each warp has a region of its own, in which first its piece of w lies (16 bytes a thread and load: the thread that
// copies them reads them, so no barrier is needed), then its sums. Behind the regions: means and deviations.

// Floats from row to row of a warp's sums, so that 8-byte stores of a tile's quads meet no bank twice.
template <int tile_columns>
constexpr int kPitch = tile_columns == 8 ? 8 : tile_columns + 8;
template <int tile_rows, int tile_columns>
int64_t region_bytes(int held) {
  const int64_t w = int64_t{held} * tile_columns / 8 * kWarpSize * 16,
                sums = int64_t{tile_rows} * kPitch<tile_columns> * 4;
  return w > sums ? w : sums;
}
template <int tile_columns>
FRIT_DEVICE Shared<float> sums_of(int warp, int row, int region) {
  return shared_array<float>(warp * region) + row * kPitch<tile_columns>;
}

// step: what a warp takes of k at a time.
template <typename T, int tile_rows, int tile_columns, int step>
Operands<T> operands(const LinearRowsArgs& args, const Tensor& y, bool aligned) {
  Operands<T> o;
  o.x = global<const T>(args.x), o.w = global<const T>(args.w), o.bias = global<const T>(args.bias);
  o.residual = global<const T>(args.residual), o.gamma = global<const T>(args.gamma);
  o.beta = global<const T>(args.beta), o.normed = global<T>(args.normed);
  if (y.dtype() == args.x.dtype())
    o.y = global<T>(y);
  else
    o.wide_y = global<float>(y);
  o.x_stride = args.x.row_stride(), o.w_stride = args.w.row_stride(), o.y_stride = y.row_stride();
  if (args.residual.defined()) o.residual_stride = args.residual.row_stride();
  if (args.normed.defined()) o.normed_stride = args.normed.row_stride();
  o.rows = static_cast<int>(y.dim(0)), o.n = static_cast<int>(y.dim(1)), o.k = static_cast<int>(args.x.dim(1));
  o.piece = static_cast<int>(linear_rows_piece(o.k));
  o.row_tiles = (o.rows + tile_rows - 1) / tile_rows;
  constexpr int kMost = kLinearRowsHeld * 8 / tile_columns;
  o.held = o.piece / step < kMost ? o.piece / step : kMost;
  o.region = static_cast<int>(region_bytes<tile_rows, tile_columns>(aligned ? o.held : 0));
  if (args.activation) o.activation = static_cast<int>(*args.activation);
  o.epsilon = args.epsilon;
  return o;
}

// ---- What comes behind ----

FRIT_DEVICE float activated(int activation, float x) {
  switch (activation) {
    case static_cast<int>(Activation::kRelu):
      return x > 0 ? x : 0.0f;
    case static_cast<int>(Activation::kGelu):
      return 0.5f * x * erfcf(-x * 0.70710678f);
    case static_cast<int>(Activation::kGeluTanh): {
      const float u = 0.79788456f * x * (1 + 0.044715f * x * x);
      return x * reciprocal_fast(1 + exp_fast(-2 * u));
    }
    case static_cast<int>(Activation::kSilu):
      return x * reciprocal_fast(1 + exp_fast(-x));
    default:
      return x;
  }
}

// A thread's pairs of neighbouring columns of the tile: what it adds behind the product, and where it writes.
template <int tile_rows, int tile_columns, typename T>
struct Epilogue {
  static constexpr int kHalf = tile_columns / 2, kPairs = tile_rows * kHalf, kEach = (kPairs + kThreads - 1) / kThreads;
  Vec<T, 2> bias[kEach], residual[kEach];

  FRIT_DEVICE static int row(int i) { return (thread_index() + i * kThreads) / kHalf; }
  FRIT_DEVICE static int column(int i) { return (thread_index() + i * kThreads) % kHalf * 2; }
  // Whether pair i lies in y.
  FRIT_DEVICE static bool inside(const Operands<T>& o, int i, int first_row, int first_column) {
    return row(i) < tile_rows && first_row + row(i) < o.rows && first_column + column(i) < o.n;
  }
  // Before the wait.
  FRIT_DEVICE void load_bias(const Operands<T>& o, int first_row, int first_column) {
    FRIT_UNROLL
    for (int i = 0; i < kEach; ++i) {
      bias[i] = zeros<T, 2>();
      const int at = first_column + column(i);
      if (!o.bias || !inside(o, i, first_row, first_column)) continue;
      bias[i][0] = load_constant(o.bias, at);
      if (at + 1 < o.n) bias[i][1] = load_constant(o.bias, at + 1);
    }
  }
  // Behind the wait, as early as may be.
  FRIT_DEVICE void load_residual(const Operands<T>& o, int first_row, int first_column) {
    FRIT_UNROLL
    for (int i = 0; i < kEach; ++i) {
      residual[i] = zeros<T, 2>();
      if (o.residual && inside(o, i, first_row, first_column))
        residual[i] = load_span<2>(o.residual + static_cast<int64_t>(first_row + row(i)) * o.residual_stride,
                                   first_column + column(i), o.n, convert<T>(0.0f));
    }
  }
  // Behind the barrier that follows the warps' parts.
  FRIT_DEVICE void finish(const Operands<T>& o, int first_row, int first_column) const {
    FRIT_UNROLL
    for (int i = 0; i < kEach; ++i) {
      if (!inside(o, i, first_row, first_column)) continue;
      float sum[2] = {0, 0};
      FRIT_UNROLL
      for (int w = 0; w < kWarps; ++w) {
        const Vec<float, 2> part = load_vec<2>(sums_of<tile_columns>(w, row(i), o.region), column(i));
        sum[0] += part[0], sum[1] += part[1];
      }
      Vec<float, 2> y;
      FRIT_UNROLL
      for (int e = 0; e < 2; ++e) {
        float x = sum[e] + widen(static_cast<T>(bias[i][e]));
        if (o.activation != kNoActivation) x = activated(o.activation, x);
        y[e] = x + widen(static_cast<T>(residual[i][e]));
      }
      const int64_t at = static_cast<int64_t>(first_row + row(i)) * o.y_stride;
      if (o.wide_y)
        store_span<2>(o.wide_y + at, first_column + column(i), o.n, y);
      else
        store_span<2>(o.y + at, first_column + column(i), o.n, from_float<T>(y));
    }
  }
};

// Begins to copy `held` steps of w from column `from` on to the warp's region: lane 4 g + t gets N elements from
// 4 N s + N t on of row g of each 8.
template <int tile_columns, typename T>
FRIT_DEVICE void hold(const Operands<T>& o, const Shared<T>& region, int first_column, int from, int end) {
  constexpr int N = kVecOf<T>, C = tile_columns / 8;
  const int g = lane() / 4, t = lane() % 4;
  const Global<const T> w = o.w + (static_cast<int64_t>(first_column) + g) * o.w_stride;
  FRIT_UNROLL_BY(2)
  for (int s = 0; s < o.held; ++s) {
    const int at = from + 4 * N * s + N * t;
    FRIT_UNROLL
    for (int c = 0; c < C; ++c)
      copy_constant_async16(region, ((s * C + c) * kWarpSize + lane()) * N, w + 8 * c * o.w_stride, at,
                            first_column + 8 * c + g < o.n && at < end);
  }
  copy_async_commit();
}
// Asks memory for columns [begin, end) of the tile's rows of w, what the warp's region does not hold at first.
template <int tile_columns, typename T>
FRIT_DEVICE void prefetch_rest(const Operands<T>& o, int first_column, int begin, int end) {
  constexpr int kLine = 128 / sizeof(T);
  const int lines = (end - begin + kLine - 1) / kLine;
  for (int i = lane(); i < tile_columns * lines; i += kWarpSize) {
    const int column = first_column + i / lines;
    if (column < o.n) prefetch(o.w, static_cast<int64_t>(column) * o.w_stride + begin + i % lines * kLine);
  }
}

}  // namespace frit::linear_rows_tile
