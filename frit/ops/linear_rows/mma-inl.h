// The kernel for 16-bit types. Each has a .cu of its own, for the time that compiling takes.
#pragma once
#include "frit/ops/linear_rows/tile-inl.h"

namespace frit::linear_rows_tile {

// A step of 32 along k: lane 4 g + t has k = 8 t .. 8 t + 7 of rows g and g + 8 of each 16 of x, and of row g of each 8
// of w. Two mma take them: the first the lanes' elements 0 to 3, the second 4 to 7. So each takes other k than its
// layout has names for, but x and w agree on which.
template <typename T>
FRIT_DEVICE void multiply(float (&sums)[4], const Vec<T, 8>& upper, const Vec<T, 8>& lower, const Vec<T, 8>& w) {
  FRIT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const uint32_t a[4] = {upper.pairs[2 * half], lower.pairs[2 * half], upper.pairs[2 * half + 1],
                           lower.pairs[2 * half + 1]};
    const uint32_t b[2] = {w.pairs[2 * half], w.pairs[2 * half + 1]};
    mma_m16n8k16<T>(sums, a, b);
  }
}

template <typename T, int tile_rows, int tile_columns, bool norm, bool aligned>
FRIT_KERNEL(kThreads, (tile_rows * tile_columns > 1024 || !aligned ? 1 : 2))
linear_rows_mma_kernel(Operands<T> o) {
  constexpr int M = tile_rows / 16, C = tile_columns / 8;
  // Steps whose x is under way at a time.
  constexpr int kVectors = norm && M * C > 4 ? 4 : M * C > 2 || norm ? 8 : 16, kFlying = kVectors / (2 * M);
  let_next_start();
  const int first_row = static_cast<int>(block_index() % o.row_tiles) * tile_rows;
  const int tile = static_cast<int>(block_index() / o.row_tiles), first_column = tile * tile_columns;
  const int g = lane() / 4, t = lane() % 4;
  const int begin = warp() * o.piece, end = least(o.k, begin + o.piece);
  const Shared<T> region = shared_array<T>(warp() * o.region);

  Epilogue<tile_rows, tile_columns, T> epilogue;
  if constexpr (aligned) hold<tile_columns>(o, region, first_column, begin, end);
  epilogue.load_bias(o, first_row, first_column);
  if (begin + 32 * o.held < end) prefetch_rest<tile_columns>(o, first_column, begin + 32 * o.held, end);
  wait_for_previous();
  epilogue.load_residual(o, first_row, first_column);

  float means[2 * M], rstds[2 * M];
  if constexpr (norm) {
    const Shared<float> stats = shared_array<float>(kWarps * o.region);
    row_stats<aligned, tile_rows>(o, first_row, stats);
    barrier();
    FRIT_UNROLL
    for (int m = 0; m < 2 * M; ++m) {
      const bool there = first_row + 8 * m + g < o.rows;
      means[m] = there ? load(stats, 2 * (8 * m + g)) : 0.0f;
      rstds[m] = there ? load(stats, 2 * (8 * m + g) + 1) : 0.0f;
    }
  }

  float sums[M][C][4] = {};
  const Global<const T> x = o.x + (static_cast<int64_t>(first_row) + g) * o.x_stride;
  for (int from = begin; from < end; from += 32 * o.held) {
    if constexpr (aligned)
      if (from > begin) hold<tile_columns>(o, region, first_column, from, end);
    const int steps = least(o.held, (end - from + 31) / 32);
    for (int first = 0; first < steps; first += kFlying) {
      Vec<T, 8> rows[kFlying][2 * M];
      FRIT_UNROLL
      for (int s = 0; s < kFlying; ++s) {
        const int at = from + 32 * (first + s) + 8 * t;
        FRIT_UNROLL
        for (int m = 0; m < 2 * M; ++m) {
          const bool there = first + s < steps && first_row + 8 * m + g < o.rows;
          rows[s][m] = load_row<aligned, 8>(x + 8 * m * o.x_stride, at, there ? end : 0);
        }
      }
      if constexpr (aligned)
        if (first == 0) copy_async_wait<0>();
      FRIT_UNROLL
      for (int s = 0; s < kFlying; ++s) {
        if (first + s >= steps) break;
        const int at = from + 32 * (first + s) + 8 * t;
        if constexpr (norm) {
          const Vec<T, 8> gamma = load_constant_row<aligned, 8>(o.gamma, at, end),
                          beta = load_constant_row<aligned, 8>(o.beta, at, end);
          FRIT_UNROLL
          for (int m = 0; m < 2 * M; ++m) {
            // Behind the row's end gamma and beta are 0; rows that do not exist are never written.
            rows[s][m] = normalised(rows[s][m], gamma, beta, means[m], rstds[m]);
            const int row = first_row + 8 * m + g;
            if (tile == 0 && o.normed && row < o.rows && at < end)
              store_span<8>(o.normed + static_cast<int64_t>(row) * o.normed_stride, at, o.k, rows[s][m]);
          }
        }
        FRIT_UNROLL
        for (int c = 0; c < C; ++c) {
          Vec<T, 8> w;
          if constexpr (aligned) {
            w = load_vec<8>(region, (((first + s) * C + c) * kWarpSize + lane()) * 8);
          } else {
            const int column = first_column + 8 * c + g;
            w = load_constant_row<false, 8>(o.w + column * o.w_stride, at, column < o.n ? end : 0);
          }
          FRIT_UNROLL
          for (int m = 0; m < M; ++m) multiply(sums[m][c], rows[s][2 * m], rows[s][2 * m + 1], w);
        }
      }
    }
  }

  if constexpr (aligned) copy_async_wait<0>();  // a warp without a piece has zeros under way
  warp_barrier();                               // all lanes are done with w
  FRIT_UNROLL
  for (int m = 0; m < M; ++m) {
    FRIT_UNROLL
    for (int c = 0; c < C; ++c) {
      FRIT_UNROLL
      for (int h = 0; h < 2; ++h)
        store_vec<2>(sums_of<tile_columns>(warp(), 16 * m + 8 * h + g, o.region), 8 * c + 2 * t,
                     Vec<float, 2>{sums[m][c][2 * h], sums[m][c][2 * h + 1]});
    }
  }
  barrier();
  epilogue.finish(o, first_row, first_column);
}

template <typename T, int i, bool norm>
void run(Context& context, const LinearRowsArgs& args, const Tensor& y) {
  constexpr LinearRowsTile tile = kLinearRowsTiles[i];
  constexpr bool aligned = i != kLinearRowsAny;
  const Operands<T> o = operands<T, tile.rows, tile.columns, 32>(args, y, aligned);
  const int64_t blocks = (y.dim(1) + tile.columns - 1) / tile.columns * o.row_tiles;
  launch(context, "linear_rows_mma_kernel", linear_rows_mma_kernel<T, tile.rows, tile.columns, norm, aligned>,
         {blocks, kThreads, kWarps * int64_t{o.region} + (norm ? 8 * tile.rows : 0)}, o);
}
template <typename T, int i = 0>
void run_instance(Context& context, const LinearRowsArgs& args, const Tensor& y, int chosen) {
  if constexpr (i <= kLinearRowsAny) {
    if (i != chosen) return run_instance<T, i + 1>(context, args, y, chosen);
    if constexpr (linear_rows_takes(i, DTypeOf<T>::value, true))
      if (args.gamma.defined()) return run<T, i, true>(context, args, y);
    if (!args.gamma.defined()) run<T, i, false>(context, args, y);
  }
}

}  // namespace frit::linear_rows_tile
