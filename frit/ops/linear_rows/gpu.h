// The GPU form of linear_rows. Arguments are checked already.
#pragma once
#include "frit/ops/linear_rows/linear_rows.h"

namespace frit {

constexpr int kLinearRowsThreads = 256;
// Pieces that k is cut into, one a warp of a block, and the length of one: whole multiples of 32.
constexpr int64_t kLinearRowsPieces = 8;
constexpr int64_t linear_rows_piece(int64_t k) {
  return ((k + kLinearRowsPieces - 1) / kLinearRowsPieces + 31) / 32 * 32;
}

// Rows and columns of a block's tile.
struct LinearRowsTile {
  int rows = 16, columns = 8;
};
// Instances of linear_rows_forward, in the order of the names. All give the same bits. The last one takes what does not
// begin at multiples of 16 bytes, or whose rows do not; the one before it is for hundreds of rows of 16-bit types.
constexpr LinearRowsTile kLinearRowsTiles[] = {{16, 8},  {16, 16}, {16, 32}, {32, 8},    {32, 16},
                                               {32, 32}, {32, 64}, {64, 32}, {128, 128}, {32, 8}};
constexpr const char* kLinearRowsNames[] = {"16x8",  "16x16", "16x32", "32x8",    "32x16",
                                            "32x32", "32x64", "64x32", "128x128", "32x8_any"};
constexpr int kLinearRowsMany = 8, kLinearRowsAny = 9;

// Whether instance i can run a call with aligned operands.
constexpr bool linear_rows_takes(int i, DType dtype, bool norm) {
  if (i == kLinearRowsAny) return true;
  if (i == kLinearRowsMany) return dtype != DType::kF32;
  const LinearRowsTile tile = kLinearRowsTiles[i];
  return tile.rows * tile.columns <= (dtype == DType::kF32 ? 256 : norm ? 1024 : 2048);
}
// Loads of w a thread, 16 bytes each, that shared memory holds at a time: 64 KB a block.
constexpr int kLinearRowsHeld = 16;
// What runs by default: "128x128" from 48 blocks of it on; else as few rows as hold them (32 for more), then the widest
// columns that still make 96 blocks.
int linear_rows_choice(int64_t rows, int64_t n, DType dtype, bool norm);

// A block of 8 warps makes a tile of y: each warp sums one piece of k; no element of x or w is needed twice in a block,
// so each thread loads, in 16 bytes, just what it multiplies. w's tile (up to 64 KB; of the rest memory is told) is
// under way to shared memory before the kernels before this one have ended. The pieces' sums meet in shared memory.
// Cost: 1 launch; 1 barrier, 2 with a norm.
// "128x128": tiles of x and w go through shared memory, 32 of k at a time, four of them under way; a warp sums 64 rows
// and 32 columns, piece after piece. A norm is a launch of its own before it, through `normed` or scratch.
void linear_rows_gpu(Context& context, const LinearRowsArgs& args, const Tensor& y);
// Its parts: instance i runs.
void linear_rows_bf16_gpu(Context& context, const LinearRowsArgs& args, const Tensor& y, int i);
void linear_rows_f16_gpu(Context& context, const LinearRowsArgs& args, const Tensor& y, int i);
void linear_rows_f32_gpu(Context& context, const LinearRowsArgs& args, const Tensor& y, int i);

}  // namespace frit
