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
// ---- Hundreds of rows ----

constexpr int kManyRows = kLinearRowsTiles[kLinearRowsMany].rows,
              kManyColumns = kLinearRowsTiles[kLinearRowsMany].columns;
constexpr int kStages = 4;
// A stage is 32 of k of all rows of the tile, then of all its columns: 64 bytes each, one behind the other, so that a
// warp's 16-byte loads meet no bank twice.
constexpr int kManyStage = (kManyRows + kManyColumns) * 32;

// The lanes of a quad exchange: lane t gives x[c] to lane c, which keeps it as x[t].
FRIT_DEVICE void transpose_quad(uint32_t (&x)[4]) {
  const auto swap = [](uint32_t& a, uint32_t& b, int bit) {
    const bool upper = (lane() & bit) != 0;
    const uint32_t got = shuffle_xor(upper ? a : b, bit);
    a = upper ? got : a;
    b = upper ? b : got;
  };
  swap(x[0], x[1], 1), swap(x[2], x[3], 1);
  swap(x[0], x[2], 2), swap(x[1], x[3], 2);
}

// Two rows of four warps, each of which sums M * 16 rows and C * 8 columns.
template <typename T>
FRIT_KERNEL(kThreads, 1)
linear_rows_many_kernel(Operands<T> o) {
  constexpr int M = 4, C = 4;
  static_assert(2 * M * 16 == kManyRows && 4 * C * 8 == kManyColumns);
  let_next_start();
  const int first_row = static_cast<int>(block_index() % o.row_tiles) * kManyRows;
  const int first_column = static_cast<int>(block_index() / o.row_tiles) * kManyColumns;
  const int g = lane() / 4, t = lane() % 4;
  const int steps = (o.k + 31) / 32, steps_a_piece = o.piece / 32;

  const auto copy_x = [&](int step) {
    const Shared<T> to = shared_array<T>(step % kStages * kManyStage * static_cast<int>(sizeof(T)));
    FRIT_UNROLL
    for (int i = 0; i < kManyRows * 4 / kThreads; ++i) {
      const int at = thread_index() + i * kThreads, row = first_row + at / 4, column = step * 32 + at % 4 * 8;
      const bool there = row < o.rows && column < o.k;
      copy_async16(to, at * 8, o.x, there ? row * o.x_stride + column : 0, there);
    }
  };
  const auto copy_w = [&](int step) {
    const Shared<T> to = shared_array<T>((step % kStages * kManyStage + kManyRows * 32) * static_cast<int>(sizeof(T)));
    FRIT_UNROLL
    for (int i = 0; i < kManyColumns * 4 / kThreads; ++i) {
      const int at = thread_index() + i * kThreads, row = first_column + at / 4, column = step * 32 + at % 4 * 8;
      const bool there = row < o.n && column < o.k;
      copy_constant_async16(to, at * 8, o.w, there ? row * o.w_stride + column : 0, there);
    }
  };
  for (int s = 0; s < kStages - 1; ++s)
    if (s < steps) copy_w(s);
  wait_for_previous();
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) copy_x(s);
    copy_async_commit();
  }

  const int mine_row = warp() / 4 * M * 16, mine_column = warp() % 4 * C * 8;
  float sums[M][C][4] = {}, piece[M][C][4] = {};
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    barrier();  // this step's tiles are there, and the last one's are free
    if (step + kStages - 1 < steps) copy_x(step + kStages - 1), copy_w(step + kStages - 1);
    copy_async_commit();
    const Shared<T> x = shared_array<T>(step % kStages * kManyStage * static_cast<int>(sizeof(T))),
                    w = x + kManyRows * 32;
    Vec<T, 8> columns[C];
    FRIT_UNROLL
    for (int c = 0; c < C; ++c) columns[c] = load_vec<8>(w, (mine_column + 8 * c + g) * 32 + 8 * t);
    FRIT_UNROLL
    for (int m = 0; m < M; ++m) {
      const Vec<T, 8> upper = load_vec<8>(x, (mine_row + 16 * m + g) * 32 + 8 * t),
                      lower = load_vec<8>(x, (mine_row + 16 * m + 8 + g) * 32 + 8 * t);
      FRIT_UNROLL
      for (int c = 0; c < C; ++c) multiply(piece[m][c], upper, lower, columns[c]);
    }
    if ((step + 1) % steps_a_piece != 0 && step + 1 != steps) continue;
    FRIT_UNROLL
    for (int m = 0; m < M; ++m) {
      FRIT_UNROLL
      for (int c = 0; c < C; ++c) {
        FRIT_UNROLL
        for (int e = 0; e < 4; ++e) sums[m][c][e] += piece[m][c][e], piece[m][c][e] = 0;
      }
    }
  }

  float bias[C][2];
  FRIT_UNROLL
  for (int c = 0; c < C; ++c) {
    FRIT_UNROLL
    for (int e = 0; e < 2; ++e) {
      const int column = first_column + mine_column + 8 * c + 2 * t + e;
      bias[c][e] = o.bias && column < o.n ? widen(load_constant(o.bias, column)) : 0.0f;
    }
  }
  FRIT_UNROLL
  for (int m = 0; m < M; ++m) {
    FRIT_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + mine_row + 16 * m + 8 * h + g;
      const bool there = row < o.rows;
      struct Words {
        uint32_t v[4];
      } words;
      FRIT_UNROLL
      for (int c = 0; c < C; ++c) {
        const int column = first_column + mine_column + 8 * c + 2 * t;
        Vec<T, 2> residual = zeros<T, 2>();
        if (o.residual && there)
          residual = load_span<2>(o.residual + row * o.residual_stride, column, o.n, convert<T>(0.0f));
        Vec<float, 2> y;
        FRIT_UNROLL
        for (int e = 0; e < 2; ++e) {
          float v = sums[m][c][2 * h + e] + bias[c][e];
          if (o.activation != kNoActivation) v = activated(o.activation, v);
          y[e] = v + widen(static_cast<T>(residual[e]));
        }
        if (o.wide_y) {
          if (there) store_span<2>(o.wide_y + row * o.y_stride, column, o.n, y);
        } else {
          words.v[c] = pack2(T(), y[0], y[1]);
        }
      }
      if (o.wide_y) continue;
      transpose_quad(words.v);
      if (there)
        store_span<8>(o.y + row * o.y_stride, first_column + mine_column + 8 * t, o.n, std::bit_cast<Vec<T, 8>>(words));
    }
  }
}

// A warp a row.
template <typename T>
FRIT_KERNEL(kThreads, 4)
linear_rows_norm_kernel(Operands<T> o) {
  let_next_start();
  wait_for_previous();
  const int row = static_cast<int>(block_index()) * kWarps + warp();
  if (row >= o.rows) return;
  const Global<const T> x[1] = {o.x + row * o.x_stride};
  float mean[1], rstd[1];
  measure<true>(x, o.k, o.epsilon, mean, rstd);
  FRIT_UNROLL_BY(2)
  for (int at = lane() * 8; at < o.k; at += kWarpSize * 8)
    store_vec<8>(o.normed, row * o.normed_stride + at,
                 normalised(load_vec<8>(x[0], at), load_constant<8>(o.gamma, at), load_constant<8>(o.beta, at), mean[0],
                            rstd[0]));
}

template <typename T>
void run_many(Context& context, const LinearRowsArgs& args, const Tensor& y) {
  LinearRowsArgs product = args;
  Buffer scratch;
  if (args.gamma.defined()) {
    LinearRowsArgs norm = args;
    if (!args.normed.defined()) {
      scratch = context.allocate({args.x.dim(0), args.x.dim(1)}, args.x.dtype(), "linear_rows.normed");
      norm.normed = scratch;
    }
    launch(context, "linear_rows_norm_kernel", linear_rows_norm_kernel<T>,
           {(y.dim(0) + kWarps - 1) / kWarps, kThreads, 0}, operands<T, kManyRows, kManyColumns, 32>(norm, y, true));
    product.x = norm.normed;
  }
  const Operands<T> o = operands<T, kManyRows, kManyColumns, 32>(product, y, true);
  launch(context, "linear_rows_many_kernel", linear_rows_many_kernel<T>,
         {(y.dim(1) + kManyColumns - 1) / kManyColumns * o.row_tiles, kThreads,
          int64_t{kStages} * kManyStage * static_cast<int64_t>(sizeof(T))},
         o);
}

template <typename T, int i = 0>
void run_instance(Context& context, const LinearRowsArgs& args, const Tensor& y, int chosen) {
  if constexpr (i <= kLinearRowsAny) {
    if (i != chosen) return run_instance<T, i + 1>(context, args, y, chosen);
    if constexpr (i == kLinearRowsMany) {
      run_many<T>(context, args, y);
    } else {
      if constexpr (linear_rows_takes(i, DTypeOf<T>::value, true))
        if (args.gamma.defined()) return run<T, i, true>(context, args, y);
      if (!args.gamma.defined()) run<T, i, false>(context, args, y);
    }
  }
}

}  // namespace frit::linear_rows_tile
