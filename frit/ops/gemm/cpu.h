// The CPU forms of gemm: our own packed product and its kernels, and oneDNN's.
#pragma once
#include "frit/ops/gemm/gemm.h"

namespace frit {

// One two-dimensional operand as a product sees it: element (i, j) of op(t).
struct GemmMatrix {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0;  // elements between stored rows
  bool transposed = false;
};

// One product's sizes and operands, after checks. The batch steps are in elements.
struct GemmProblem {
  int64_t batch = 1, m = 0, n = 0, k = 0;
  GemmMatrix a, b;
  int64_t a_step = 0, b_step = 0, c_step = 0;
  void* c = nullptr;
  DType c_dtype = DType::kF32;
  int64_t c_stride = 0;
  bool accumulate = false;
  Tensor bias;
};

// The register tile of the SIMD target in use: rows, and columns of a panel of packed b.
struct GemmTile {
  int64_t rows, cols;
};
GemmTile gemm_tile();

// A block of rows of op(a) as the kernels read it, in fp32. Rows: each contiguous, `step` apart. Columns: a tile's rows
// lie side by side, their next depth `step` further; the next tile's begin tile_step on.
struct GemmRows {
  const float* data = nullptr;
  int64_t step = 0;
  int64_t tile_step = 0;
  bool columns = false;
};

// Packs columns [n0, n0 + cols) and depths [k0, k0 + depth) of op(b) into panels [k][gemm_tile().cols] of fp32,
// panel_step floats apart, the last one filled up with zeros.
void gemm_pack_columns(const GemmMatrix& b, int64_t k0, int64_t depth, int64_t n0, int64_t cols, float* panels,
                       int64_t panel_step);
// True if rows of op(a) are packed before they are multiplied: bf16, and a transposed a that is too large for a cache.
bool gemm_packs_rows(const GemmMatrix& a, int64_t m, int64_t k);
// Floats that gemm_pack_rows writes (slack included) for that many rows and depths.
int64_t gemm_packed_rows_size(int64_t rows, int64_t depth);
// Rows [i0, i0 + rows) of op(a): packed, or as they lie.
GemmRows gemm_pack_rows(const GemmMatrix& a, bool pack, int64_t i0, int64_t rows, int64_t k0, int64_t depth,
                        float* packed);

// c = rows of a * panels of b, begun from bias and/or c.
struct GemmBlock {
  GemmRows a;
  const float* b = nullptr;  // panels
  int64_t panel_step = 0;    // floats between panels
  int64_t rows = 0, cols = 0, depth = 0;
  void* c = nullptr;  // bf16 only if the block covers the whole depth
  DType c_dtype = DType::kF32;
  int64_t c_stride = 0;
  const float* bias = nullptr;  // of the block's columns; or null
  bool load_c = false;          // begin from c (after bias: from bias + c)
};
// Math: each element of c is one chain of fused multiply-adds over k in rising order, begun from bias + c (what is
// given of them, else 0); so an element's bits depend neither on the kernel or block that computes it nor on how k is
// cut.
void gemm_multiply(const GemmBlock& block);

// "packed". Allocates its scratch from the context and, when planning, nothing else.
void gemm_packed(Context& context, const GemmProblem& p);
// "onednn": dnnl_sgemm, one thread a call. fp32 only. A build without oneDNN has onednn_missing.cc in the place of onednn.cc.
void gemm_onednn(Context& context, const GemmProblem& p);
// Why "onednn" takes no product at all: null, or that it is not in this build.
const char* gemm_onednn_missing();

}  // namespace frit
