// How "packed" cuts a product into blocks and tasks. Every cut is free: an element's bits do not depend on it (see
// gemm_multiply), so cuts follow the caches and the number of threads.
#include <algorithm>
#include <cstdlib>

#include "frit/ops/gemm/cpu.h"

namespace frit {
namespace {

// Depth of a block: a panel of b (64 bytes a depth on AVX2) takes half of a 32 KB first-level cache.
constexpr int64_t kDepth = 256;
// Rows of a block of a: with kDepth, 192 KB, beside the panels of b in a second-level cache of 512 KB.
constexpr int64_t kBlockRows = 192;
// Packed b that all threads share: a few megabytes lie in the third-level cache.
constexpr int64_t kSharedFloats = int64_t{1} << 20;
constexpr int64_t kSharedCols = 2048;
// Columns of b that one task packs for itself.
constexpr int64_t kOwnCols = 256;
// A product of a batch with fewer multiply-adds than this is one task; a larger one is cut.
constexpr int64_t kOneTaskProducts = int64_t{1} << 24;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}
// Cut i of n things into pieces of nearly the same size.
int64_t cut(int64_t n, int64_t pieces, int64_t i) {
  return n / pieces * i + std::min(i, n % pieces);
}

const void* advance(const void* p, DType dtype, int64_t elements) {
  return static_cast<const char*>(p) + elements * size_of(dtype);
}
void* advance(void* p, DType dtype, int64_t elements) {
  return static_cast<char*>(p) + elements * size_of(dtype);
}

// c in bf16 holds no partial sums: its blocks take the whole depth.
int64_t block_depth(const GemmProblem& p) {
  return p.c_dtype == DType::kF32 ? std::min(p.k, kDepth) : p.k;
}

// Fewer rows a block when blocks are deep, so that the block of a still fits its cache.
int64_t block_rows(int64_t depth, int64_t tile_rows) {
  const int64_t rows = kBlockRows * kDepth / std::max(depth, kDepth);
  return std::max<int64_t>(1, rows / tile_rows) * tile_rows;
}

// One product at an offset into the batch.
struct Product {
  GemmMatrix a, b;
  void* c;
};
Product product_at(const GemmProblem& p, int64_t i) {
  Product product{p.a, p.b, advance(p.c, p.c_dtype, i * p.c_step)};
  product.a.data = advance(p.a.data, p.a.dtype, i * p.a_step);
  product.b.data = advance(p.b.data, p.b.dtype, i * p.b_step);
  return product;
}

GemmBlock block_of(const GemmProblem& p, const Product& product, const float* bias, int64_t i0, int64_t rows,
                   int64_t j0, int64_t cols) {
  GemmBlock block;
  block.rows = rows, block.cols = cols;
  block.c = advance(product.c, p.c_dtype, i0 * p.c_stride + j0);
  block.c_dtype = p.c_dtype;
  block.c_stride = p.c_stride;
  block.bias = bias ? bias + j0 : nullptr;
  return block;
}
// Sets what depends on the depth: only the first depth begins from bias and the old c, later ones go on from c.
void at_depth(GemmBlock& block, const GemmProblem& p, int64_t k0, int64_t depth) {
  block.depth = depth;
  block.load_c = p.accumulate || k0 > 0;
  if (k0 > 0) block.bias = nullptr;
}

// All of it is done by one thread: columns [j0, j1) of one product, packing both operands for itself.
struct OwnScratch {
  int64_t b, a;  // floats
  int64_t total() const { return round_up(a + b, 64); }
};
OwnScratch own_scratch(const GemmProblem& p, int64_t cols, bool pack_rows) {
  const GemmTile tile = gemm_tile();
  const int64_t depth = block_depth(p);
  return {round_up(round_up(std::min(cols, kOwnCols), tile.cols) * depth, 64),
          pack_rows ? gemm_packed_rows_size(std::min(p.m, block_rows(depth, tile.rows)), depth) : 0};
}
void multiply_alone(const GemmProblem& p, const Product& product, const float* bias, int64_t j0, int64_t j1,
                    float* scratch) {
  const GemmTile tile = gemm_tile();
  const int64_t step = std::max<int64_t>(1, block_depth(p));
  const bool pack = gemm_packs_rows(p.a, p.m, p.k);
  float* packed_a = scratch + own_scratch(p, j1 - j0, pack).b;
  // A block of a that is not packed needs no cut by rows: its rows are read as they lie.
  const int64_t rows_step = pack ? block_rows(step, tile.rows) : p.m;
  for (int64_t j = j0; j < j1; j += kOwnCols) {
    const int64_t cols = std::min(kOwnCols, j1 - j);
    for (int64_t k = 0; k == 0 || k < p.k; k += step) {
      const int64_t depth = std::min(step, p.k - k);
      gemm_pack_columns(product.b, k, depth, j, cols, scratch, depth * tile.cols);
      for (int64_t i = 0; i < p.m; i += rows_step) {
        const int64_t rows = std::min(rows_step, p.m - i);
        GemmBlock block = block_of(p, product, bias, i, rows, j, cols);
        at_depth(block, p, k, depth);
        block.a = gemm_pack_rows(product.a, pack, i, rows, k, depth, packed_a);
        block.b = scratch;
        block.panel_step = depth * tile.cols;
        gemm_multiply(block);
      }
    }
  }
}

// Few rows: b is read once anyway, so each task packs its own columns of it and passes all rows by them.
void multiply_by_columns(Context& context, const GemmProblem& p, const float* bias, float* scratch,
                         int64_t scratch_step, int64_t pieces) {
  const GemmTile tile = gemm_tile();
  const int64_t panels = ceil_div(p.n, tile.cols);
  const Product product = product_at(p, 0);
  context.pool().run(pieces, [&](int64_t piece, int worker) {
    const int64_t j0 = cut(panels, pieces, piece) * tile.cols,
                  j1 = std::min(p.n, cut(panels, pieces, piece + 1) * tile.cols);
    multiply_alone(p, product, bias, j0, j1, scratch + worker * scratch_step);
  });
}

// Many rows: b is packed once, by all threads, a slab of columns and depths at a time; tasks are blocks of rows.
struct SharedCuts {
  int64_t cols, depth;  // of a slab
  int64_t rows;         // of a task
  int64_t b_floats, a_floats;
};
SharedCuts shared_cuts(const GemmProblem& p, int threads) {
  const GemmTile tile = gemm_tile();
  SharedCuts cuts;
  const int64_t slabs = ceil_div(p.n, kSharedCols);
  cuts.cols = round_up(ceil_div(p.n, slabs), tile.cols);
  // Long sums of few elements (a weight's gradient) take b one block's depth at a time: it stays in the second-level
  // cache while all rows pass, and c is small. Others take more depths at once, so that c passes less often.
  const bool few = p.m * p.n <= 2 * kSharedFloats && p.k > 4 * kDepth;
  if (p.c_dtype != DType::kF32)
    cuts.depth = p.k;
  else
    cuts.depth = std::min(p.k, few ? kDepth : std::max(kDepth, kSharedFloats / cuts.cols / kDepth * kDepth));
  cuts.rows = block_rows(block_depth(p), tile.rows);
  // At least four tasks a thread, and a whole number of them a thread, unless the rows are too few.
  const int64_t tiles = ceil_div(p.m, tile.rows);
  int64_t tasks = std::max(ceil_div(p.m, cuts.rows), std::min<int64_t>(4 * threads, ceil_div(tiles, 2)));
  tasks = std::min(round_up(tasks, threads), tiles);
  cuts.rows = ceil_div(tiles, tasks) * tile.rows;
  cuts.b_floats = round_up(cuts.cols * cuts.depth, 64);
  cuts.a_floats = gemm_packs_rows(p.a, p.m, p.k)
                      ? round_up(gemm_packed_rows_size(std::min(p.m, cuts.rows), block_depth(p)), 64)
                      : 0;
  return cuts;
}
void multiply_shared(Context& context, const GemmProblem& p, const Product& product, const float* bias,
                     const SharedCuts& cuts, float* scratch) {
  const GemmTile tile = gemm_tile();
  const bool pack = gemm_packs_rows(p.a, p.m, p.k);
  float *packed_b = scratch, *packed_a = scratch + cuts.b_floats;
  const int64_t step = std::max<int64_t>(1, block_depth(p));
  for (int64_t j = 0; j < p.n; j += cuts.cols) {
    const int64_t cols = std::min(cuts.cols, p.n - j), panels = ceil_div(cols, tile.cols);
    for (int64_t k = 0; k == 0 || k < p.k; k += std::max<int64_t>(1, cuts.depth)) {
      const int64_t slab = std::min(cuts.depth, p.k - k);
      // Along b's rows as they lie: a task takes some panels of a transposed b, some depths of another.
      const int64_t length = product.b.transposed ? panels : slab, pieces = std::min<int64_t>(length, 8);
      context.pool().run(pieces, [&](int64_t piece, int) {
        const int64_t from = cut(length, pieces, piece), to = cut(length, pieces, piece + 1);
        if (product.b.transposed)
          gemm_pack_columns(product.b, k, slab, j + from * tile.cols, std::min(to * tile.cols, cols) - from * tile.cols,
                            packed_b + from * tile.cols * slab, slab * tile.cols);
        else
          gemm_pack_columns(product.b, k + from, to - from, j, cols, packed_b + from * tile.cols, slab * tile.cols);
      });
      const int64_t tiles = ceil_div(p.m, tile.rows), tasks = ceil_div(p.m, cuts.rows);
      context.pool().run(tasks, [&](int64_t task, int worker) {
        const int64_t i0 = cut(tiles, tasks, task) * tile.rows,
                      i1 = std::min(p.m, cut(tiles, tasks, task + 1) * tile.rows);
        for (int64_t inner = 0; inner == 0 || inner < slab; inner += step) {
          const int64_t depth = std::min(step, slab - inner);
          GemmBlock block = block_of(p, product, bias, i0, i1 - i0, j, cols);
          at_depth(block, p, k + inner, depth);
          block.a = gemm_pack_rows(product.a, pack, i0, i1 - i0, k + inner, depth, packed_a + worker * cuts.a_floats);
          block.b = packed_b + inner * tile.cols;
          block.panel_step = slab * tile.cols;
          gemm_multiply(block);
        }
      });
    }
  }
}

}  // namespace

void gemm_packed(Context& context, const GemmProblem& p) {
  if (p.batch == 0 || p.m == 0 || p.n == 0) return;
  const int threads = context.pool().threads();
  const GemmTile tile = gemm_tile();
  const bool whole_items = p.batch > 1 && p.m * p.n * p.k < kOneTaskProducts;
  const bool by_columns = !whole_items && p.m <= kBlockRows && !gemm_packs_rows(p.a, p.m, p.k);
  const int64_t bias_floats = p.bias.defined() && p.bias.dtype() != DType::kF32 ? round_up(p.n, 64) : 0;

  // A piece of four panels lets few-row tiles take several at once; eight tasks a thread even out unequal speed.
  const int64_t pieces = std::max<int64_t>(1, std::min<int64_t>(ceil_div(p.n, 4 * tile.cols), 8 * threads));
  SharedCuts cuts{};
  int64_t own = 0, floats = bias_floats;
  if (whole_items) {
    own = own_scratch(p, p.n, gemm_packs_rows(p.a, p.m, p.k)).total();
    floats += own * threads;
  } else if (by_columns) {
    own = own_scratch(p, (ceil_div(ceil_div(p.n, tile.cols), pieces)) * tile.cols, false).total();
    floats += own * threads;
  } else {
    cuts = shared_cuts(p, threads);
    floats += cuts.b_floats + cuts.a_floats * threads;
  }
  if (!whole_items) {
    // What any smaller m and k could need: a plan recorded for the largest batch of a bucket must serve every batch of
    // it, and the cuts above do not grow steadily with the rows.
    const int64_t rows = round_up(std::max(kBlockRows * kDepth, tile.rows * block_depth(p)) + 64, 64);
    const int64_t columns = own_scratch(p, ceil_div(ceil_div(p.n, tile.cols), pieces) * tile.cols, false).total();
    floats = bias_floats +
             std::max({floats - bias_floats, columns * threads, shared_cuts(p, threads).b_floats + rows * threads});
  }
  Buffer scratch = context.allocate({floats}, DType::kF32, "gemm.packed");
  if (context.planning()) return;
  float* work = scratch->data<float>() + bias_floats;
  const float* bias = nullptr;
  if (bias_floats) {
    float* converted = scratch->data<float>();
    for (int64_t i = 0; i < p.n; ++i) converted[i] = static_cast<float>(p.bias.data<bfloat16>()[i]);
    bias = converted;
  } else if (p.bias.defined()) {
    bias = p.bias.data<float>();
  }

  if (whole_items) {
    context.pool().run(p.batch, [&](int64_t i, int worker) {
      multiply_alone(p, product_at(p, i), bias, 0, p.n, work + worker * own);
    });
  } else {
    for (int64_t i = 0; i < p.batch; ++i) {
      if (by_columns) {
        GemmProblem one = p;
        const Product product = product_at(p, i);
        one.a = product.a, one.b = product.b, one.c = product.c;
        multiply_by_columns(context, one, bias, work, own, pieces);
      } else {
        multiply_shared(context, p, product_at(p, i), bias, cuts, work);
      }
    }
  }
}

// --- weights packed once
// -----------------------------------------------------------------------------------------------------

PackedWeight::PackedWeight(Context& context, const Tensor& w) : n_(0), k_(0) {
  FRIT_CHECK(!context.on_gpu(), "[gemm] weights are packed on the CPU alone");
  FRIT_CHECK(w.rank() == 2, "[gemm] a weight to pack is {}, expected [n, k]", w.to_string());
  FRIT_CHECK(w.dtype() == DType::kF32 || w.dtype() == DType::kBF16,
             "[gemm] a weight to pack is {}, expected f32 or bf16", w.to_string());
  n_ = w.dim(0), k_ = w.dim(1);
  const GemmTile tile = gemm_tile();
  const int64_t panels = ceil_div(n_, tile.cols);
  const size_t bytes = static_cast<size_t>(std::max<int64_t>(1, panels * tile.cols * k_)) * sizeof(float);
  data_ = reinterpret_cast<float*>(allocate_block(bytes).release());
  const GemmMatrix b{w.raw(), w.dtype(), w.row_stride(), true};
  context.pool().run(panels, [&](int64_t panel, int) {
    const int64_t from = panel * tile.cols;
    gemm_pack_columns(b, 0, k_, from, std::min(tile.cols, n_ - from), data_ + from * k_, k_ * tile.cols);
  });
}
PackedWeight::PackedWeight(PackedWeight&& other) noexcept {
  *this = static_cast<PackedWeight&&>(other);
}
PackedWeight& PackedWeight::operator=(PackedWeight&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(n_, other.n_);
  std::swap(k_, other.k_);
  return *this;
}
PackedWeight::~PackedWeight() {
  std::free(data_);
}

void linear_packed(Context& context, const Tensor& x, const PackedWeight& w, const Tensor& bias, const Tensor& y) {
  FRIT_CHECK(!context.on_gpu(), "[linear_packed] runs on the CPU alone");
  FRIT_CHECK(w.defined(), "[linear_packed] the weight was never packed");
  FRIT_CHECK(x.rank() == 2 && x.dim(1) == w.cols() && x.dtype() == DType::kF32,
             "[linear_packed] x is {}, expected f32[m, {}]", x.to_string(), w.cols());
  FRIT_CHECK(y.rank() == 2 && y.dim(0) == x.dim(0) && y.dim(1) == w.rows() && y.dtype() == DType::kF32,
             "[linear_packed] y is {}, expected f32[{}, {}]", y.to_string(), x.dim(0), w.rows());
  FRIT_CHECK(!bias.defined() || (bias.rank() == 1 && bias.dim(0) == w.rows() && bias.dtype() == DType::kF32),
             "[linear_packed] bias is {}, expected f32[{}]", bias.to_string(), w.rows());
  if (context.planning()) return;
  const int64_t m = x.dim(0), n = w.rows(), k = w.cols();
  if (m == 0 || n == 0) return;
  const GemmTile tile = gemm_tile();
  const int64_t panels = ceil_div(n, tile.cols), threads = context.pool().threads();
  const int64_t column_pieces = std::max<int64_t>(1, std::min<int64_t>(ceil_div(panels, 4), 8 * threads));
  const int64_t row_pieces = ceil_div(m, kBlockRows), row_tiles = ceil_div(m, tile.rows);
  const float* in = x.data<float>();
  float* out = y.data<float>();
  // Few rows take the whole depth of several panels at once, which streams the weight in long runs; many rows take it
  // in cuts that the first-level cache holds.
  const int64_t step = m < tile.rows ? std::max<int64_t>(1, k) : kDepth;
  context.pool().run(column_pieces * row_pieces, [&](int64_t task, int) {
    const int64_t column = task / row_pieces, row = task % row_pieces;
    const int64_t j0 = cut(panels, column_pieces, column) * tile.cols,
                  j1 = std::min(n, cut(panels, column_pieces, column + 1) * tile.cols);
    const int64_t i0 = cut(row_tiles, row_pieces, row) * tile.rows,
                  i1 = std::min(m, cut(row_tiles, row_pieces, row + 1) * tile.rows);
    for (int64_t from = 0; from == 0 || from < k; from += step) {
      GemmBlock block;
      block.rows = i1 - i0, block.cols = j1 - j0, block.depth = std::min(step, k - from);
      block.a = {in + i0 * x.row_stride() + from, x.row_stride(), 0, false};
      block.b = w.data_ + j0 * k + from * tile.cols;
      block.panel_step = k * tile.cols;
      block.c = out + i0 * y.row_stride() + j0;
      block.c_stride = y.row_stride();
      block.bias = from == 0 && bias.defined() ? bias.data<float>() + j0 : nullptr;
      block.load_c = from > 0;
      gemm_multiply(block);
    }
  });
}

}  // namespace frit
