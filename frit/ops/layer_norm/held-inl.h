// layer_norm's forward kernel for 16-bit rows that stay in registers as fp32: what is left of a row after its mean is
// taken off is made once. Included by the operators whose rows are given (layer_norm) and whose rows are sums made in
// the same launch (bias_dropout_residual_norm).
//
// Up to 8 warps share a row, 256 V columns each, the last one what is left, which is more than 256 (V - 1). A block's
// rows are done when it ends: while one waits for memory others compute. The sums' order depends on the width alone,
// wherever the row lies.
#pragma once
#include "frit/ops/bias_dropout_residual/sum-inl.h"
#include "frit/ops/layer_norm/forward.h"
#include "frit/simt/launch.h"
#include "frit/simt/ragged.h"
#include "frit/simt/whole_columns.h"

namespace frit::layer_norm {

using namespace simt;

// Rows of a block whose warps hold one each: a block's place is free for another when its last row is done.
constexpr int kHeldRows = 2;

// Beside pointers: strides in elements, how rows are shared out, and reciprocals.
struct HeldRows {
  int64_t x_stride = 0, y_stride = 0;
  int rows = 0, cols = 0;
  int warps = 1;                                         // that share a row
  float eps = 0, by_cols = 0, by_part = 0, by_last = 0;  // by_: 1 / the row's, a warp's, the last warp's columns
  bool streams = false;                                  // is y too large to stay in the second-level cache?
};

// Where rows come from: they are x, ...
template <typename T>
struct HeldGiven {
  static constexpr bool kSummed = false;
  static constexpr const char* kKernel = "layer_norm_forward_held_kernel";
  Global<const T> x;
};
// ... or residual + dropout(x + bias), rounded to T, which is written to `sum` if there is one. sum and the operator's
// y may be x or residual.
template <typename T>
struct HeldSummed {
  static constexpr bool kSummed = true;
  static constexpr const char* kKernel = "bias_dropout_residual_norm_forward_held_kernel";
  Global<const T> x, bias, residual;
  int64_t residual_stride;
  DropoutTable dropout;
  Global<T> sum;
  int64_t sum_stride;
};

// sum / n, where by is 1 / n: right to the last bit but in rare cases.
FRIT_DEVICE float divided(float sum, float n, float by) {
  const float about = sum * by;
  return fmaf(fmaf(-about, n, sum), by, about);
}

// What is known of the rows of all operands: each warp's are 256 V columns, whole aligned vectors of 16 bytes; whole
// aligned vectors; nothing but that gamma and beta begin at a multiple of 16 bytes; nothing.
enum class Held { kFull, kWhole, kRagged, kAny };

// The kinds give the same bits, by fewer instructions the more is known. A block takes one row, or as many as it has
// warps where one warp holds a row. Cost: 10 shuffles a warp; 1 barrier if several share a row.
template <typename T, int V, Held kind, typename Rows>
FRIT_KERNEL(256, kind >= Held::kRagged || Rows::kSummed ? 3 : 4)
layer_norm_forward_held_kernel(HeldRows s, Rows in, Global<const T> gamma, Global<const T> beta, Global<T> y,
                               Global<float> mean, Global<float> rstd) {
  wait_for_previous();
  constexpr bool ragged = kind >= Held::kRagged;
  static_assert(!(ragged && Rows::kSummed));
  constexpr int N = 8, kColumns = 32 * V * N;
  const bool alone = s.warps == 1;
  const int block = static_cast<int>(block_index()), row = alone ? block * kHeldRows + warp() : block;
  if (row >= s.rows) return;  // alone: no barrier follows
  const int part = alone ? 0 : warp();
  const int first = part * kColumns, columns = part == s.warps - 1 ? s.cols - first : kColumns;
  const int mine = lane() * N;
  Ragged<T, V, true> layout(columns);
  const auto inside = [&](int k) { return kind == Held::kFull || layout.has(k); };

  Vec<T, N> v[V];
  T rest = T();
  const Global<const T> from = in.x + (row * s.x_stride + first);
  if constexpr (ragged) {
    layout.template start<Cache::kStream>(from, T(), v, rest);
    layout.finish(T(), v, rest);
  } else {
    const auto load_row = [&](const Global<const T>& at, Vec<T, N>(&to)[V]) {
      const Global<const T> lane_at = at + mine;
      FRIT_UNROLL
      for (int k = 0; k < V; ++k) {
        if constexpr (kind != Held::kFull) to[k] = Vec<T, N>{};
        if (inside(k)) to[k] = load_vec<N, Cache::kStream>(lane_at, k * 32 * N);
      }
    };
    load_row(from, v);
    if constexpr (Rows::kSummed) {
      Vec<T, N> more[V];
      load_row(in.residual + (row * in.residual_stride + first), more);
      uint32_t rows_of[V], groups_of[V];
      FRIT_UNROLL
      for (int k = 0; k < V; ++k)
        rows_of[k] = static_cast<uint32_t>(row), groups_of[k] = static_cast<uint32_t>((first + mine) / N + k * 32);
      const DropoutWords<V> words = dropout_words<V>(in.dropout, rows_of, groups_of);
      const uint32_t threshold = dropout_threshold(in.dropout);
      const Global<const T> bias = in.bias + (first + mine);
      FRIT_UNROLL
      for (int k = 0; k < V; ++k) {
        if (!inside(k)) continue;
        const Vec<T, N> b = load_vec<N, Cache::kReadOnly>(bias, k * 32 * N);
        Vec<float, N> sum;
        FRIT_UNROLL
        for (int i = 0; i < N; ++i)
          sum[i] =
              add_dropped(widen(static_cast<T>(v[k][i])) + widen(static_cast<T>(b[i])), words.kept(k, i, threshold),
                          in.dropout.active, in.dropout.scale, widen(static_cast<T>(more[k][i])));
        v[k] = from_float<T>(sum);
        if (in.sum) store_vec<N, Cache::kStream>(in.sum + (row * in.sum_stride + first + mine), k * 32 * N, v[k]);
      }
    }
  }

  // Of this warp's columns: their mean, what each lies above it by, and the sum of these squared.
  float d[V][N], sum = 0, squares = 0;
  FRIT_UNROLL
  for (int k = 0; k < V; ++k) {
    float step = 0;
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) {
      d[k][i] = widen(static_cast<T>(v[k][i]));  // 0 past the row
      step += d[k][i];
    }
    sum += step;
  }
  const bool has_rest = ragged && layout.has_rest();
  float d_rest = has_rest ? widen(rest) : 0.0f;
  sum += d_rest;
  const float center = divided(warp_sum(sum), static_cast<float>(columns), part == s.warps - 1 ? s.by_last : s.by_part);
  FRIT_UNROLL
  for (int k = 0; k < V; ++k) {
    float step = 0;
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) d[k][i] -= center;
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) step = fmaf(d[k][i], d[k][i], step);
    squares += inside(k) ? step : 0.0f;
  }
  d_rest = has_rest ? d_rest - center : 0.0f;
  squares = fmaf(d_rest, d_rest, squares);
  squares = warp_sum(squares);

  float middle = center;  // the row's mean
  if (!alone) {
    // Chan, Golub, LeVeque 1979, of all parts at once, in their order.
    const Shared<float> scratch = shared_array<float>(0);
    if (lane() == 0) store_vec<2>(scratch, part * 2, Vec<float, 2>{{center, squares}});
    barrier();
    const float each = static_cast<float>(kColumns), final = static_cast<float>(s.cols - (s.warps - 1) * kColumns);
    float total = 0;
    for (int w = 0; w < s.warps; ++w) total = fmaf(load(scratch, w * 2), w == s.warps - 1 ? final : each, total);
    middle = divided(total, static_cast<float>(s.cols), s.by_cols);
    squares = 0;
    for (int w = 0; w < s.warps; ++w) {
      const Vec<float, 2> other = load_vec<2>(scratch, w * 2);
      const float apart = other[0] - middle;
      squares += fmaf(apart * apart, w == s.warps - 1 ? final : each, other[1]);
    }
  }
  const float scale = rsqrt(squares * s.by_cols + s.eps), left = (center - middle) * scale;
  if (part == 0 && lane() == 0) {
    if (mean) store(mean, row, middle);
    if (rstd) store(rstd, row, scale);
  }
  const auto normalised = [&](float value, float g, float b) { return fmaf(fmaf(value, scale, left), g, b); };

  const Global<const T> gammas = gamma + (first + mine), betas = beta + (first + mine);
  const Global<T> to = y + (row * s.y_stride + first), lane_to = to + mine;
  FRIT_UNROLL
  for (int k = 0; k < V; ++k) {
    constexpr int kStep = 32 * N;
    if (!inside(k)) continue;
    Vec<T, N> g, b;
    if constexpr (kind != Held::kAny) {
      g = load_vec<N, Cache::kReadOnly>(gammas, k * kStep), b = load_vec<N, Cache::kReadOnly>(betas, k * kStep);
    } else {
      FRIT_UNROLL
      for (int i = 0; i < N; ++i)
        g[i] = load<Cache::kReadOnly>(gammas, k * kStep + i), b[i] = load<Cache::kReadOnly>(betas, k * kStep + i);
    }
    Vec<float, N> out;
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) out[i] = normalised(d[k][i], widen(static_cast<T>(g[i])), widen(static_cast<T>(b[i])));
    v[k] = from_float<T>(out);
    if constexpr (!ragged) {
      if (s.streams)
        store_vec<N, Cache::kStream>(lane_to, k * kStep, v[k]);
      else
        store_vec<N>(lane_to, k * kStep, v[k]);
    }
  }
  if constexpr (ragged) {
    if (has_rest) {
      const int c = first + layout.rest_column();
      rest = convert<T>(
          normalised(d_rest, widen(load<Cache::kReadOnly>(gamma, c)), widen(load<Cache::kReadOnly>(beta, c))));
    }
    if (s.streams)
      layout.template write<Cache::kStream>(to, v, rest);
    else
      layout.template write<Cache::kDefault>(to, v, rest);
  }
}

// Starts it on rows of one kind.
template <typename T, Held kind, typename Rows>
void launch_held(Context& context, const ForwardShape& shape, const Rows& in, int64_t x_stride, const Tensor& gamma,
                 const Tensor& beta, float eps, const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  HeldRows s;
  const int vectors = shape.held_vectors(), part = vectors * 256;
  s.x_stride = x_stride, s.y_stride = y.row_stride();
  s.rows = static_cast<int>(shape.rows), s.cols = static_cast<int>(shape.cols), s.warps = shape.warps_of(kHeld);
  s.eps = eps;
  s.by_cols = 1.0f / static_cast<float>(s.cols), s.by_part = 1.0f / static_cast<float>(part);
  s.by_last = 1.0f / static_cast<float>(s.cols - (s.warps - 1) * part);
  // What is read next finds a small y in the cache; a large one that is written to be evicted first costs 5 % less.
  s.streams = y.bytes() > int64_t{16} << 20;
  const bool alone = s.warps == 1;
  const Launch grid = {alone ? (shape.rows + kHeldRows - 1) / kHeldRows : shape.rows,
                       (alone ? kHeldRows : s.warps) * 32, alone ? 0 : int64_t{8} * s.warps};
  const auto start = [&](auto kernel) {
    launch(context, Rows::kKernel, kernel, grid, s, in, global<const T>(gamma), global<const T>(beta), global<T>(y),
           global<float>(mean), global<float>(rstd));
  };
  if (vectors == 2) return start(layer_norm_forward_held_kernel<T, 2, kind, Rows>);
  if (vectors == 3) return start(layer_norm_forward_held_kernel<T, 3, kind, Rows>);
  start(layer_norm_forward_held_kernel<T, 4, kind, Rows>);
}

}  // namespace frit::layer_norm
