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

// Where x's rows are cut as the product cuts them, lane t of a quad having N elements from 4 N s + N t on of a piece, a
// row's moments have the same bits whoever takes them. Each is about the row's first element, so that a mean far from 0
// costs nothing; products that meet sums are written as fmaf, so that no compiler fuses them here and not there.

// Sum of the first `count` elements of v, each less `from`.
template <int N, typename T>
FRIT_DEVICE float sum_about(const Vec<T, N>& v, float from, int count) {
  float d[N];
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) d[i] = i < count ? widen(v[i]) - from : 0.0f;
  FRIT_UNROLL
  for (int width = N / 2; width > 0; width /= 2) {
    FRIT_UNROLL
    for (int i = 0; i < width; ++i) d[i] += d[i + width];
  }
  return d[0];
}
// Sum of the squares of the same, each less `from` and then `mean`.
template <int N, typename T>
FRIT_DEVICE float squares_about(const Vec<T, N>& v, float from, float mean, int count) {
  float d[N], sum[N / 2];
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) d[i] = i < count ? widen(v[i]) - from - mean : 0.0f;
  FRIT_UNROLL
  for (int i = 0; i < N / 2; ++i) sum[i] = fmaf(d[i + N / 2], d[i + N / 2], d[i] * d[i]);
  FRIT_UNROLL
  for (int width = N / 4; width > 0; width /= 2) {
    FRIT_UNROLL
    for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
  }
  return sum[0];
}
// Columns in piece p of k.
FRIT_DEVICE int columns_in(int k, int piece, int p) {
  const int left = k - p * piece;
  return left < 0 ? 0 : least(left, piece);
}
FRIT_DEVICE float inverse_of(int count) {
  return 1.0f / static_cast<float>(count > 0 ? count : 1);
}
// What makes LN(x) of x: ((x - centre) * rstd + rest) * gamma + beta.
struct Scaling {
  float centre = 0, rstd = 0, rest = 0;
};
// From a row's pieces: lane t of a quad gives counts of pieces 2 t and 2 t + 1, and their means and squares in turn.
// Source: Chan, Golub, LeVeque 1979, for all pieces at once.
FRIT_DEVICE Scaling merge_pieces(float from, const float (&counts)[2], const Vec<float, 4>& pieces, float inverse_k,
                                 float epsilon) {
  const float sum = fmaf(counts[1], pieces[2], mul_rn(counts[0], pieces[0]));
  const float mean = mul_rn(warp_sum<4>(sum), inverse_k);
  float squares = add_rn(pieces[1], pieces[3]);
  FRIT_UNROLL
  for (int i = 0; i < 2; ++i) {
    const float d = sub_rn(pieces[2 * i], mean);
    squares = fmaf(mul_rn(counts[i], d), d, squares);
  }
  Scaling s;
  s.rstd = rsqrt(fmaf(warp_sum<4>(squares), inverse_k, epsilon));
  s.centre = add_rn(from, mean);
  s.rest = mul_rn(sub_rn(sub_rn(s.centre, from), mean), s.rstd);
  return s;
}
template <typename T, int N>
FRIT_DEVICE Vec<T, N> normalised(const Vec<T, N>& x, const Vec<T, N>& gamma, const Vec<T, N>& beta, const Scaling& s) {
  Vec<float, N> y;
  FRIT_UNROLL
  for (int i = 0; i < N; ++i)
    y[i] = fmaf(fmaf(widen(x[i]) - s.centre, s.rstd, s.rest), widen(gamma[i]), widen(beta[i]));
  return from_float<T>(y);
}

// A launch of its own: a warp a row, a quad a piece.
template <typename T, bool aligned>
FRIT_KERNEL(kThreads, 2)
linear_rows_norm_kernel(Operands<T> o) {
  constexpr int N = kVecOf<T>, kKept = 4;  // vectors a lane keeps of its piece; the others it reads again
  let_next_start();
  const int row = static_cast<int>(block_index()) * kWarps + warp();
  const int begin = lane() / 4 * o.piece + lane() % 4 * N, count = columns_in(o.k, o.piece, lane() / 4);
  const int end = begin + (count - lane() % 4 * N);
  const float inverse = inverse_of(count), inverse_k = inverse_of(o.k);
  const int steps = o.piece / (4 * N);
  Vec<T, N> gamma[kKept], beta[kKept], kept[kKept];
  FRIT_UNROLL
  for (int s = 0; s < kKept; ++s) {
    gamma[s] = load_constant_row<aligned, N>(o.gamma, begin + 4 * N * s, s < steps ? end : 0);
    beta[s] = load_constant_row<aligned, N>(o.beta, begin + 4 * N * s, s < steps ? end : 0);
  }
  wait_for_previous();
  if (row >= o.rows) return;
  const Global<const T> x = o.x + row * o.x_stride;
  FRIT_UNROLL
  for (int s = 0; s < kKept; ++s) kept[s] = load_row<aligned, N>(x, begin + 4 * N * s, s < steps ? end : 0);
  const float from = widen(load(x, 0));
  const auto has = [&](int at) { return aligned ? N : least(N, end - at); };

  float sum = 0, squares = 0;
  FRIT_UNROLL
  for (int s = 0; s < kKept; ++s) {
    const int at = begin + 4 * N * s;
    if (s < steps && at < end) sum += sum_about(kept[s], from, has(at));
  }
  FRIT_UNROLL_BY(2)
  for (int s = kKept; s < steps; ++s) {
    const int at = begin + 4 * N * s;
    if (at < end) sum += sum_about(load_row<aligned, N>(x, at, end), from, has(at));
  }
  const float mean = mul_rn(warp_sum<4>(sum), inverse);
  FRIT_UNROLL
  for (int s = 0; s < kKept; ++s) {
    const int at = begin + 4 * N * s;
    if (s < steps && at < end) squares += squares_about(kept[s], from, mean, has(at));
  }
  FRIT_UNROLL_BY(2)
  for (int s = kKept; s < steps; ++s) {
    const int at = begin + 4 * N * s;
    if (at < end) squares += squares_about(load_row<aligned, N>(x, at, end), from, mean, has(at));
  }
  squares = warp_sum<4>(squares);
  const int own = lane() % 4 * 2;
  const float counts[2] = {static_cast<float>(columns_in(o.k, o.piece, own)),
                           static_cast<float>(columns_in(o.k, o.piece, own + 1))};
  const Vec<float, 4> pieces = {shuffle(mean, 4 * own), shuffle(squares, 4 * own), shuffle(mean, 4 * own + 4),
                                shuffle(squares, 4 * own + 4)};
  const Scaling scaling = merge_pieces(from, counts, pieces, inverse_k, o.epsilon);

  const Global<T> y = o.normed + row * o.normed_stride;
  const auto write = [&](int at, const Vec<T, N>& v) {
    if constexpr (aligned)
      store_vec<N>(y, at, v);
    else
      store_span<N>(y, at, o.k, v);
  };
  FRIT_UNROLL
  for (int s = 0; s < kKept; ++s) {
    const int at = begin + 4 * N * s;
    if (s < steps && at < end) write(at, normalised(kept[s], gamma[s], beta[s], scaling));
  }
  FRIT_UNROLL_BY(1)
  for (int s = kKept; s < steps; ++s) {
    const int at = begin + 4 * N * s;
    if (at < end)
      write(at, normalised(load_row<aligned, N>(x, at, end), load_constant_row<aligned, N>(o.gamma, at, end),
                           load_constant_row<aligned, N>(o.beta, at, end), scaling));
  }
}

// ---- Shared memory ----

// Each warp has a region of its own, in which first its piece of w lies (16 bytes a thread and load: the thread that
// copies them reads them, so no barrier is needed), then its sums.

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

// Launches LN(x), into `normed` or scratch, and returns the call that is left.
template <typename T>
LinearRowsArgs launch_norm(Context& context, const LinearRowsArgs& args, const Tensor& y, bool aligned,
                           Buffer& scratch) {
  LinearRowsArgs norm = args, product = args;
  if (!args.normed.defined()) {
    scratch = context.allocate({args.x.dim(0), args.x.dim(1)}, args.x.dtype(), "linear_rows.normed");
    norm.normed = scratch;
  }
  const Operands<T> o = operands<T, 16, 8, 4 * kVecOf<T>>(norm, y, aligned);
  launch(context, "linear_rows_norm_kernel",
         aligned ? linear_rows_norm_kernel<T, true> : linear_rows_norm_kernel<T, false>,
         {(y.dim(0) + kWarps - 1) / kWarps, kThreads, 0}, o);
  product.x = norm.normed, product.gamma = product.beta = product.normed = Tensor();
  return product;
}

// ---- What comes behind ----

// The choice stands outside of the elements: a form that does not run is then no code to jump over at each.
template <int N>
FRIT_DEVICE void activate(int activation, float (&x)[N]) {
  const auto all = [&](auto&& f) {
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) x[i] = f(x[i]);
  };
  switch (activation) {
    case static_cast<int>(Activation::kRelu):
      return all([](float v) { return v > 0 ? v : 0.0f; });
    case static_cast<int>(Activation::kGelu):
      return all([](float v) { return 0.5f * v * erfcf(-v * 0.70710678f); });
    case static_cast<int>(Activation::kGeluTanh):
      return all([](float v) {
        const float u = 0.79788456f * v * (1 + 0.044715f * v * v);
        return v * reciprocal_fast(1 + exp_fast(-2 * u));
      });
    case static_cast<int>(Activation::kSilu):
      return all([](float v) { return v * reciprocal_fast(1 + exp_fast(-v)); });
    default:
      return;
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
    float x[2 * kEach];
    FRIT_UNROLL
    for (int i = 0; i < kEach; ++i) {
      x[2 * i] = x[2 * i + 1] = 0;
      if (!inside(o, i, first_row, first_column)) continue;
      FRIT_UNROLL
      for (int w = 0; w < kWarps; ++w) {
        const Vec<float, 2> part = load_vec<2>(sums_of<tile_columns>(w, row(i), o.region), column(i));
        x[2 * i] += part[0], x[2 * i + 1] += part[1];
      }
      x[2 * i] += widen(static_cast<T>(bias[i][0])), x[2 * i + 1] += widen(static_cast<T>(bias[i][1]));
    }
    activate(o.activation, x);
    FRIT_UNROLL
    for (int i = 0; i < kEach; ++i) {
      if (!inside(o, i, first_row, first_column)) continue;
      const Vec<float, 2> y = {x[2 * i] + widen(static_cast<T>(residual[i][0])),
                               x[2 * i + 1] + widen(static_cast<T>(residual[i][1]))};
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
