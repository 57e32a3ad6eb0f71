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
constexpr LinearRowsTile kLinearRowsTiles[] = {{16, 8},  {16, 16}, {16, 32}, {32, 8},
                                               {32, 16}, {32, 32}, {64, 64}, {32, 8}};
constexpr const char* kLinearRowsNames[] = {"16x8", "16x16", "16x32", "32x8", "32x16", "32x32", "64x64", "32x8_any"};
constexpr int kLinearRowsMany = 6, kLinearRowsAny = 7;

// Whether instance i can run a call with aligned operands.
constexpr bool linear_rows_takes(int i, DType dtype) {
  if (i == kLinearRowsAny || dtype != DType::kF32) return true;
  return kLinearRowsTiles[i].rows * kLinearRowsTiles[i].columns <= 256;
}
// The longest rows whose norm the kernel of 16-bit types makes itself.
constexpr int64_t kLinearRowsNormInside = 1024;
constexpr bool linear_rows_norms_inside(int i, DType dtype, int64_t k) {
  return i < kLinearRowsMany && dtype != DType::kF32 && k <= kLinearRowsNormInside;
}
// Loads of w a thread, 16 bytes each, that shared memory holds at a time: 64 KB a block.
constexpr int kLinearRowsHeld = 16;
// What runs by default: tiles that keep 132 multiprocessors busy, and as wide as that allows, since each reads all of
// its rows of x and w. normed: with a norm inside the kernel, which every block makes again.
int linear_rows_choice(int64_t rows, int64_t n, DType dtype, bool normed);

// A block of 8 warps makes a tile of y: each warp sums one piece of k; no element of x or w is needed twice in a block,
// so each thread loads, in 16 bytes, just what it multiplies. w's tile (up to 64 KB; of the rest memory is told) is
// under way to shared memory before the kernels before this one have ended, and with a norm gamma and beta. The pieces'
// sums meet in shared memory.
// A norm of rows of up to 1024 of a 16-bit type: x stays in registers; each warp takes mean and squares of its piece of
// a row about the row's first element; the pieces' meet in shared memory, and each warp merges them and normalises what
// it holds. Every block does so again; those of the first tile of columns write `normed`. Other norms are a launch of
// their own, through `normed` or scratch.
// "64x64": tiles of x and w go through shared memory, 64 of k at a time, four of them under way; a warp sums 32 rows
// and 32 columns, piece after piece. A barrier before every 64 of k, and two behind.
// Cost: 1 launch with 1 barrier, with a norm inside 2; a norm apart is one more launch, without a barrier.
void linear_rows_gpu(Context& context, const LinearRowsArgs& args, const Tensor& y);
// Its parts: instance i runs.
void linear_rows_bf16_gpu(Context& context, const LinearRowsArgs& args, const Tensor& y, int i);
void linear_rows_f16_gpu(Context& context, const LinearRowsArgs& args, const Tensor& y, int i);
void linear_rows_f32_gpu(Context& context, const LinearRowsArgs& args, const Tensor& y, int i);

}  // namespace frit
