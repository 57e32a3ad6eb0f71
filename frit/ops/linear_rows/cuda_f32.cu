#include "frit/ops/linear_rows/tile-inl.h"

namespace frit {
namespace {

using namespace linear_rows_tile;

// A step of 16 along k: lane 4 g + t has k = 4 t .. 4 t + 3 of row g of each 8 of w, and of all rows of x. It sums its
// own k in rising order; the four lanes' sums are added last.
template <int tile_rows, int tile_columns, bool aligned>
FRIT_KERNEL(kThreads, (aligned ? 2 : 1))
linear_rows_fma_kernel(Operands<float> o) {
  constexpr int C = tile_columns / 8, kFlying = 8;  // rows of x under way at a time
  let_next_start();
  const int block = static_cast<int>(block_index());
  const int first_row = block % o.row_tiles * tile_rows, first_column = block / o.row_tiles * tile_columns;
  const int g = lane() / 4, t = lane() % 4;
  const int begin = warp() * o.piece, end = least(o.k, begin + o.piece);
  const Shared<float> region = shared_array<float>(warp() * o.region);

  Epilogue<tile_rows, tile_columns, float> epilogue;
  if constexpr (aligned) hold<tile_columns>(o, region, first_column, begin, end);
  epilogue.load_bias(o, first_row, first_column);
  if (begin + 16 * o.held < end) prefetch_rest<tile_columns>(o, first_column, begin + 16 * o.held, end);
  wait_for_previous();
  epilogue.load_residual(o, first_row, first_column);

  float sums[tile_rows][C] = {};
  const Global<const float> x = o.x + static_cast<int64_t>(first_row) * o.x_stride;
  for (int from = begin; from < end; from += 16 * o.held) {
    if constexpr (aligned) {
      if (from > begin) hold<tile_columns>(o, region, first_column, from, end);
      copy_async_wait<0>();
    }
    const int steps = least(o.held, (end - from + 15) / 16);
    FRIT_UNROLL_BY(1)
    for (int s = 0; s < steps; ++s) {
      const int at = from + 16 * s + 4 * t;
      Vec<float, 4> w[C];
      FRIT_UNROLL
      for (int c = 0; c < C; ++c) {
        if constexpr (aligned) {
          w[c] = load_vec<4>(region, ((s * C + c) * kWarpSize + lane()) * 4);
        } else {
          const int column = first_column + 8 * c + g;
          w[c] = load_constant_row<false, 4>(o.w + column * o.w_stride, at, column < o.n ? end : 0);
        }
      }
      FRIT_UNROLL
      for (int first = 0; first < tile_rows; first += kFlying) {
        if (first_row + first >= o.rows) break;
        Vec<float, 4> rows[kFlying];
        FRIT_UNROLL
        for (int r = 0; r < kFlying; ++r) {
          const bool there = first_row + first + r < o.rows;
          rows[r] = load_row<aligned, 4>(x + (first + r) * o.x_stride, at, there ? end : 0);
        }
        FRIT_UNROLL
        for (int r = 0; r < kFlying; ++r) {
          FRIT_UNROLL
          for (int c = 0; c < C; ++c) {
            FRIT_UNROLL
            for (int e = 0; e < 4; ++e) sums[first + r][c] = fmaf(rows[r][e], w[c][e], sums[first + r][c]);
          }
        }
      }
    }
  }

  if constexpr (aligned) copy_async_wait<0>();  // a warp without a piece has zeros under way
  warp_barrier();                               // all lanes are done with w
  FRIT_UNROLL
  for (int r = 0; r < tile_rows; ++r) {
    FRIT_UNROLL
    for (int c = 0; c < C; ++c) {
      const float sum = warp_sum<4>(sums[r][c]);
      if (r % 4 == t) store(sums_of<tile_columns>(warp(), r, o.region), 8 * c + g, sum);
    }
  }
  barrier();
  epilogue.finish(o, first_row, first_column);
}

template <int i = 0>
void run_instance(Context& context, const LinearRowsArgs& args, const Tensor& y, int chosen) {
  if constexpr (i <= kLinearRowsAny) {
    if (i != chosen) return run_instance<i + 1>(context, args, y, chosen);
    if constexpr (linear_rows_takes(i, DType::kF32)) {
      constexpr LinearRowsTile tile = kLinearRowsTiles[i];
      constexpr bool aligned = i != kLinearRowsAny;
      const Operands<float> o = operands<float, tile.rows, tile.columns, 16>(args, y, aligned);
      const int64_t blocks = (y.dim(1) + tile.columns - 1) / tile.columns * o.row_tiles;
      launch(context, "linear_rows_fma_kernel", linear_rows_fma_kernel<tile.rows, tile.columns, aligned>,
             {blocks, kThreads, kWarps * int64_t{o.region}}, o);
    }
  }
}

}  // namespace

void linear_rows_f32_gpu(Context& context, const LinearRowsArgs& args, const Tensor& y, int i) {
  if (!args.gamma.defined()) return run_instance(context, args, y, i);
  Buffer scratch;
  run_instance(context, launch_norm<float>(context, args, y, i != kLinearRowsAny, scratch), y, i);
}

}  // namespace frit
