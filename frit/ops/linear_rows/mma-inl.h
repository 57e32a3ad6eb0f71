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

// Shared memory behind the regions if there is a norm: gamma and beta of each warp's piece; mean and squares of every
// row's pieces, rows kMomentsPitch floats apart.
constexpr int kNormPiece = static_cast<int>(linear_rows_piece(kLinearRowsNormInside));
constexpr int kConstantsBytes = 2 * kNormPiece * 2, kMomentsPitch = 2 * kWarps + 4;
static_assert(2 * kNormPiece == kWarpSize * 8, "a lane copies 16 bytes of gamma or of beta");

template <typename T, int tile_rows, int tile_columns, bool norm, bool aligned>
FRIT_KERNEL(kThreads, ((tile_rows * tile_columns > 512 && norm) || !aligned ? 1
                       : norm && tile_rows == 16                            ? 3
                                                                            : 2))
linear_rows_mma_kernel(Operands<T> o) {
  static_assert(aligned || !norm);
  constexpr int M = tile_rows / 16, C = tile_columns / 8;
  let_next_start();
  const int block = static_cast<int>(block_index()), tile = block / o.row_tiles;
  const int first_row = (block - tile * o.row_tiles) * tile_rows, first_column = tile * tile_columns;
  const int g = lane() / 4, t = lane() % 4;
  const int begin = warp() * o.piece, end = least(o.k, begin + o.piece);
  const Shared<T> region = shared_array<T>(warp() * o.region);
  const Shared<T> constants = shared_array<T>(kWarps * o.region + warp() * kConstantsBytes);

  Epilogue<tile_rows, tile_columns, T> epilogue;
  if constexpr (norm) {
    const int at = begin + lane() % 16 * 8;
    copy_constant_async16(constants, lane() * 8, lane() < 16 ? o.gamma : o.beta, at < end ? at : 0, at < end);
    copy_async_commit();
  }
  if constexpr (aligned) hold<tile_columns>(o, region, first_column, begin, end);
  epilogue.load_bias(o, first_row, first_column);
  if constexpr (!norm)
    if (begin + 32 * o.held < end) prefetch_rest<tile_columns>(o, first_column, begin + 32 * o.held, end);
  float inverse = 0, inverse_k = 0;
  if constexpr (norm) inverse = inverse_of(end - begin), inverse_k = inverse_of(o.k);
  const Global<const T> x = o.x + (static_cast<int64_t>(first_row) + g) * o.x_stride;
  const auto there = [&](int m) { return first_row + 8 * m + g < o.rows; };
  wait_for_previous();

  float sums[M][C][4] = {};
  if constexpr (norm) {
    constexpr int kSteps = kNormPiece / 32;
    Vec<T, 8> rows[kSteps][2 * M];
    T pivots[2 * M];
    FRIT_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      FRIT_UNROLL
      for (int m = 0; m < 2 * M; ++m)
        rows[s][m] = load_row<true, 8>(x + 8 * m * o.x_stride, begin + 32 * s + 8 * t, there(m) ? end : 0);
    }
    FRIT_UNROLL
    for (int m = 0; m < 2 * M; ++m) pivots[m] = there(m) ? load(x + 8 * m * o.x_stride, 0) : convert<T>(0.0f);
    epilogue.load_residual(o, first_row, first_column);

    // LN of the first `groups` eights of rows, in registers.
    const auto normalise = [&](auto groups) {
      constexpr int G = decltype(groups)::value;
      const Shared<float> moments = shared_array<float>(kWarps * (o.region + kConstantsBytes));
      const float counts[2] = {static_cast<float>(columns_in(o.k, o.piece, 2 * t)),
                               static_cast<float>(columns_in(o.k, o.piece, 2 * t + 1))};
      float mean[G], squares[G];
      FRIT_UNROLL
      for (int m = 0; m < G; ++m) mean[m] = squares[m] = 0;
      FRIT_UNROLL
      for (int s = 0; s < kSteps; ++s) {
        if (begin + 32 * s + 8 * t >= end) break;
        FRIT_UNROLL
        for (int m = 0; m < G; ++m) mean[m] += sum_about(rows[s][m], widen(pivots[m]), 8);
      }
      FRIT_UNROLL
      for (int m = 0; m < G; ++m) mean[m] = mul_rn(warp_sum<4>(mean[m]), inverse);
      FRIT_UNROLL
      for (int s = 0; s < kSteps; ++s) {
        if (begin + 32 * s + 8 * t >= end) break;
        FRIT_UNROLL
        for (int m = 0; m < G; ++m) squares[m] += squares_about(rows[s][m], widen(pivots[m]), mean[m], 8);
      }
      FRIT_UNROLL
      for (int m = 0; m < G; ++m) squares[m] = warp_sum<4>(squares[m]);
      FRIT_UNROLL
      for (int m = 0; m < G; ++m)
        if (t == 0) store_vec<2>(moments, (8 * m + g) * kMomentsPitch + 2 * warp(), Vec<float, 2>{mean[m], squares[m]});
      copy_async_wait<1>();  // gamma and beta; w may be under way
      barrier();
      Scaling scalings[G];
      FRIT_UNROLL
      for (int m = 0; m < G; ++m)
        scalings[m] = merge_pieces(widen(pivots[m]), counts, load_vec<4>(moments, (8 * m + g) * kMomentsPitch + 4 * t),
                                   inverse_k, o.epsilon);
      FRIT_UNROLL
      for (int s = 0; s < kSteps; ++s) {
        if (begin + 32 * s >= end) break;
        // Behind the row's end both are 0.
        const Vec<T, 8> gamma = load_vec<8>(constants, 32 * s + 8 * t),
                        beta = load_vec<8>(constants, kNormPiece + 32 * s + 8 * t);
        FRIT_UNROLL
        for (int m = 0; m < G; ++m) rows[s][m] = normalised(rows[s][m], gamma, beta, scalings[m]);
      }
    };
    if (M == 1 && first_row + 8 >= o.rows)
      normalise(std::integral_constant<int, 1>());
    else
      normalise(std::integral_constant<int, 2 * M>());
    copy_async_wait<0>();
    FRIT_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      if (begin + 32 * s >= end) break;
      FRIT_UNROLL
      for (int c = 0; c < C; ++c) {
        const Vec<T, 8> w = load_vec<8>(region, ((s * C + c) * kWarpSize + lane()) * 8);
        FRIT_UNROLL
        for (int m = 0; m < M; ++m) multiply(sums[m][c], rows[s][2 * m], rows[s][2 * m + 1], w);
      }
    }
    if (tile == 0 && o.normed) {
      FRIT_UNROLL
      for (int s = 0; s < kSteps; ++s) {
        const int at = begin + 32 * s + 8 * t;
        FRIT_UNROLL
        for (int m = 0; m < 2 * M; ++m)
          if (at < end && there(m))
            store_vec<8>(o.normed + static_cast<int64_t>(first_row + 8 * m + g) * o.normed_stride, at, rows[s][m]);
      }
    }
  } else {
    // Steps whose x is under way at a time.
    constexpr int kFlying = (M * C > 2 ? 8 : 16) / (2 * M);
    for (int from = begin; from < end; from += 32 * o.held) {
      const int steps = least(o.held, (end - from + 31) / 32);
      for (int first = 0; first < steps; first += kFlying) {
        Vec<T, 8> rows[kFlying][2 * M];
        FRIT_UNROLL
        for (int s = 0; s < kFlying; ++s) {
          if (first + s >= steps) break;
          const int at = from + 32 * (first + s) + 8 * t;
          FRIT_UNROLL
          for (int m = 0; m < 2 * M; ++m)
            rows[s][m] = load_row<aligned, 8>(x + 8 * m * o.x_stride, at, there(m) ? end : 0);
        }
        if (first == 0 && from == begin) epilogue.load_residual(o, first_row, first_column);
        if constexpr (aligned)
          if (first == 0) copy_async_wait<0>();
        FRIT_UNROLL
        for (int s = 0; s < kFlying; ++s) {
          if (first + s >= steps) break;
          const int at = from + 32 * (first + s) + 8 * t;
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
      if constexpr (aligned)
        if (from + 32 * o.held < end) hold<tile_columns>(o, region, first_column, from + 32 * o.held, end);
    }
    if (begin >= end) epilogue.load_residual(o, first_row, first_column);  // a warp without a piece
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
         {blocks, kThreads,
          kWarps * int64_t{o.region + (norm ? kConstantsBytes : 0)} + (norm ? tile.rows * kMomentsPitch * 4 : 0)},
         o);
}

// ---- Hundreds of rows ----

constexpr int kManyRows = kLinearRowsTiles[kLinearRowsMany].rows,
              kManyColumns = kLinearRowsTiles[kLinearRowsMany].columns, kManyThreads = 128;
// A stage is two steps of 32 along k. A step is 32 of k of all rows of the tile, then of all its columns: 64 bytes
// each, one behind the other, so that a warp's 16-byte loads meet no bank twice.
constexpr int kStages = 4, kManyStep = (kManyRows + kManyColumns) * 32, kManyStage = 2 * kManyStep;
// Floats from row to row of the sums, which lie where the stages were.
constexpr int kManyPitch = kManyColumns + 8;

// Two rows of two warps, each of which sums M * 16 rows and C * 8 columns, piece after piece.
template <typename T>
FRIT_KERNEL(kManyThreads, 3)
linear_rows_many_kernel(Operands<T> o) {
  constexpr int M = 2, C = 4;
  static_assert(2 * M * 16 == kManyRows && 2 * C * 8 == kManyColumns);
  let_next_start();
  const int block = static_cast<int>(block_index());
  const int first_row = block % o.row_tiles * kManyRows, first_column = block / o.row_tiles * kManyColumns;
  const int g = lane() / 4, t = lane() % 4;
  const int stages = (o.k + 63) / 64, steps_a_piece = o.piece / 32;

  const auto place = [&](int stage, int half, int row) {
    return shared_array<T>((stage % kStages * kManyStage + half * kManyStep + row * 32) * static_cast<int>(sizeof(T)));
  };
  // A quad copies 64 bytes of a row; a thread's rows are kManyThreads / 4 apart. From where there is nothing, nothing
  // is read.
  const int row = thread_index() / 4, column = thread_index() % 4 * 8;
  const int64_t x_at = (first_row + row) * o.x_stride + column, x_step = kManyThreads / 4 * o.x_stride;
  const int64_t w_at = (first_column + row) * o.w_stride + column, w_step = kManyThreads / 4 * o.w_stride;
  const auto copy = [&](int stage, bool of_w) {
    FRIT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Shared<T> to = place(stage, half, of_w ? kManyRows : 0);
      const int at = stage * 64 + half * 32;
      FRIT_UNROLL
      for (int i = 0; i < kManyRows * 4 / kManyThreads; ++i) {
        const bool inside = at + column < o.k;
        if (of_w)
          copy_constant_async16(to, (thread_index() + i * kManyThreads) * 8, o.w, w_at + i * w_step + at,
                                inside && first_column + row + i * kManyThreads / 4 < o.n);
        else
          copy_async16(to, (thread_index() + i * kManyThreads) * 8, o.x, x_at + i * x_step + at,
                       inside && first_row + row + i * kManyThreads / 4 < o.rows);
      }
    }
  };
  static_assert(kManyRows == kManyColumns);
  for (int s = 0; s < kStages - 1; ++s)
    if (s < stages) copy(s, true);
  const int mine_row = warp() / 2 * M * 16, mine_column = warp() % 2 * C * 8;
  Vec<T, 2> bias[C];
  FRIT_UNROLL
  for (int c = 0; c < C; ++c) {
    bias[c] = zeros<T, 2>();
    FRIT_UNROLL
    for (int e = 0; e < 2; ++e) {
      const int at = first_column + mine_column + 8 * c + 2 * t + e;
      if (o.bias && at < o.n) bias[c][e] = load_constant(o.bias, at);
    }
  }
  wait_for_previous();
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < stages) copy(s, false);
    copy_async_commit();
  }

  float sums[M][C][4] = {}, piece[M][C][4] = {};
  int left = steps_a_piece;
  FRIT_UNROLL_BY(1)
  for (int stage = 0; stage < stages; ++stage) {
    copy_async_wait<kStages - 2>();
    barrier();  // this stage's tiles are there, and the last one's are free
    if (stage + kStages - 1 < stages) copy(stage + kStages - 1, false), copy(stage + kStages - 1, true);
    copy_async_commit();
    FRIT_UNROLL_BY(1)
    for (int half = 0; half < 2; ++half) {
      const Shared<T> x = place(stage, half, mine_row), w = place(stage, half, kManyRows + mine_column);
      Vec<T, 8> columns[C];
      FRIT_UNROLL
      for (int c = 0; c < C; ++c) columns[c] = load_vec<8>(w, (8 * c + g) * 32 + 8 * t);
      FRIT_UNROLL
      for (int m = 0; m < M; ++m) {
        const Vec<T, 8> upper = load_vec<8>(x, (16 * m + g) * 32 + 8 * t),
                        lower = load_vec<8>(x, (16 * m + 8 + g) * 32 + 8 * t);
        FRIT_UNROLL
        for (int c = 0; c < C; ++c) multiply(piece[m][c], upper, lower, columns[c]);
      }
      if (--left > 0 && (stage + 1 < stages || half == 0)) continue;
      left = steps_a_piece;
      FRIT_UNROLL
      for (int m = 0; m < M; ++m) {
        FRIT_UNROLL
        for (int c = 0; c < C; ++c) {
          FRIT_UNROLL
          for (int e = 0; e < 4; ++e) sums[m][c][e] += piece[m][c][e], piece[m][c][e] = 0;
        }
      }
    }
  }

  // What comes behind, in few instructions: code that runs once is waited for.
  constexpr int kEach = kManyRows * kManyColumns / 8 / kManyThreads;  // vectors of 8 columns a thread writes
  const auto row_of = [&](int i) { return (thread_index() + i * kManyThreads) / (kManyColumns / 8); };
  const int own_column = thread_index() % (kManyColumns / 8) * 8;
  Vec<T, 8> residual[kEach];
  FRIT_UNROLL
  for (int i = 0; i < kEach; ++i) {
    residual[i] = zeros<T, 8>();
    const int to = first_row + row_of(i);
    if (o.residual && to < o.rows)
      residual[i] = load_span<8>(o.residual + to * o.residual_stride, first_column + own_column, o.n, convert<T>(0.0f));
  }
  copy_async_wait<0>();
  barrier();  // the stages are free
  const Shared<float> tile = shared_array<float>(0);
  FRIT_UNROLL
  for (int m = 0; m < M; ++m) {
    FRIT_UNROLL
    for (int c = 0; c < C; ++c) {
      FRIT_UNROLL
      for (int h = 0; h < 2; ++h) {
        store_vec<2>(tile, (mine_row + 16 * m + 8 * h + g) * kManyPitch + mine_column + 8 * c + 2 * t,
                     Vec<float, 2>{sums[m][c][2 * h] + widen(static_cast<T>(bias[c][0])),
                                   sums[m][c][2 * h + 1] + widen(static_cast<T>(bias[c][1]))});
      }
    }
  }
  barrier();
  if (o.activation != kNoActivation) {
    FRIT_UNROLL_BY(1)
    for (int i = 0; i < 2 * kEach; ++i) {
      const int at = row_of(i / 2) * kManyPitch + own_column + i % 2 * 4;
      const Vec<float, 4> part = load_vec<4>(tile, at);
      float x[4] = {part[0], part[1], part[2], part[3]};
      activate(o.activation, x);
      store_vec<4>(tile, at, Vec<float, 4>{x[0], x[1], x[2], x[3]});
    }
  }
  FRIT_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int to = first_row + row_of(i);
    if (to >= o.rows) continue;
    Vec<float, 8> y;
    FRIT_UNROLL
    for (int h = 0; h < 2; ++h) {
      const Vec<float, 4> part = load_vec<4>(tile, row_of(i) * kManyPitch + own_column + 4 * h);
      FRIT_UNROLL
      for (int e = 0; e < 4; ++e) y[4 * h + e] = part[e] + widen(static_cast<T>(residual[i][4 * h + e]));
    }
    const int64_t at = to * o.y_stride;
    if (o.wide_y) {
      FRIT_UNROLL
      for (int h = 0; h < 2; ++h)
        store_span<4>(o.wide_y + at, first_column + own_column + 4 * h, o.n,
                      Vec<float, 4>{y[4 * h], y[4 * h + 1], y[4 * h + 2], y[4 * h + 3]});
    } else {
      store_span<8>(o.y + at, first_column + own_column, o.n, from_float<T>(y));
    }
  }
}

template <typename T>
void run_many(Context& context, const LinearRowsArgs& args, const Tensor& y) {
  const Operands<T> o = operands<T, kManyRows, kManyColumns, 32>(args, y, true);
  launch(context, "linear_rows_many_kernel", linear_rows_many_kernel<T>,
         {(y.dim(1) + kManyColumns - 1) / kManyColumns * o.row_tiles, kManyThreads,
          int64_t{kStages} * kManyStage * static_cast<int64_t>(sizeof(T))},
         o);
}

template <typename T, int i = 0>
void run_plain(Context& context, const LinearRowsArgs& args, const Tensor& y, int chosen) {
  if constexpr (i <= kLinearRowsAny) {
    if (i != chosen) return run_plain<T, i + 1>(context, args, y, chosen);
    if constexpr (i == kLinearRowsMany)
      run_many<T>(context, args, y);
    else
      run<T, i, false>(context, args, y);
  }
}
template <typename T, int i = 0>
void run_normed(Context& context, const LinearRowsArgs& args, const Tensor& y, int chosen) {
  if constexpr (i < kLinearRowsMany) {
    if (i != chosen) return run_normed<T, i + 1>(context, args, y, chosen);
    run<T, i, true>(context, args, y);
  }
}
template <typename T>
void run_instance(Context& context, const LinearRowsArgs& args, const Tensor& y, int chosen) {
  if (!args.gamma.defined()) return run_plain<T>(context, args, y, chosen);
  if (linear_rows_norms_inside(chosen, args.x.dtype(), args.x.dim(1))) return run_normed<T>(context, args, y, chosen);
  Buffer scratch;
  run_plain<T>(context, launch_norm<T>(context, args, y, chosen != kLinearRowsAny, scratch), y, chosen);
}

}  // namespace frit::linear_rows_tile
