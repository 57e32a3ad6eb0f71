// The kernels of "packed": a register tile of c, and the packing of both operands into the order in which it reads
// them. Source: Goto, van de Geijn 2008, "Anatomy of high-performance matrix multiplication"; Van Zee, van de Geijn
// 2015 (BLIS).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "frit/ops/gemm/cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "frit/backend/cpu/simd-inl.h"
#include "frit/ops/gemm/cpu.h"

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {

// Rows of the register tile: with two vectors a row, sums take 24 of 32 or 12 of 16 registers; the rest holds b and one
// element of a.
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3) || HWY_ARCH_ARM_A64
constexpr size_t kRows = 12;
#else
constexpr size_t kRows = 6;
#endif
constexpr size_t kPanelVectors = 2;
// Rows of few-row tiles, and how many panels these take at once: enough sums to hide the latency of an addition.
constexpr size_t panels_at_once(size_t rows) {
  return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

HWY_INLINE size_t panel_cols() {
  return kPanelVectors * lanes();
}

// acc[r][v] += a * b[v] for all v. Constant indices (no loops), so that the sums live in registers.
template <size_t V, size_t... I>
HWY_INLINE void add_products(VF (&acc)[sizeof...(I)], const float* a, size_t row_step, const VF (&b)[V],
                             std::index_sequence<I...>) {
  ((acc[I] = hn::MulAdd(hn::Set(DF(), a[(I / V) * row_step]), b[I % V], acc[I])), ...);
}
template <size_t V, size_t... I>
HWY_INLINE void load_panels(VF (&b)[V], const float* panels, size_t panel_step, std::index_sequence<I...>) {
  ((b[I] = hn::LoadU(DF(), panels + (I / kPanelVectors) * panel_step + (I % kPanelVectors) * lanes())), ...);
}
template <size_t V, size_t... I>
HWY_INLINE void begin_sums(VF (&acc)[sizeof...(I)], const float* c, size_t c_stride, const float* bias, bool load_c,
                           std::index_sequence<I...>) {
  ((acc[I] = hn::Zero(DF())), ...);
  if (bias) {
    ((acc[I] = hn::LoadU(DF(), bias + (I % V) * lanes())), ...);
    if (load_c) ((acc[I] = hn::Add(acc[I], hn::LoadU(DF(), c + (I / V) * c_stride + (I % V) * lanes()))), ...);
  } else if (load_c) {
    ((acc[I] = hn::LoadU(DF(), c + (I / V) * c_stride + (I % V) * lanes())), ...);
  }
}
template <size_t V, size_t... I>
HWY_INLINE void store_sums(const VF (&acc)[sizeof...(I)], float* c, size_t c_stride, std::index_sequence<I...>) {
  (hn::StoreU(acc[I], DF(), c + (I / V) * c_stride + (I % V) * lanes()), ...);
}

// One tile of R rows and P panels, full width, c in fp32.
template <size_t R, size_t P, bool kColumns>
void multiply_tile(const float* a, size_t a_step, const float* b, size_t panel_step, size_t depth, float* c,
                   size_t c_stride, const float* bias, bool load_c) {
  constexpr size_t V = P * kPanelVectors;
  constexpr auto all = std::make_index_sequence<R * V>();
  VF acc[R * V];
  // c's lines arrive while the products run; the stores at the end would wait for them.
  for (size_t r = 0; r < R; ++r)
    for (size_t v = 0; v < V; v += kPanelVectors) __builtin_prefetch(c + r * c_stride + v * lanes(), 1);
  begin_sums<V>(acc, c, c_stride, bias, load_c, all);
  const size_t step = panel_cols();
  const size_t a_row = kColumns ? 1 : a_step, a_depth = kColumns ? a_step : 1;
  for (size_t k = 0; k < depth; ++k) {
    VF bv[V];
    load_panels<V>(bv, b, panel_step, std::make_index_sequence<V>());
    add_products<V>(acc, a, a_row, bv, all);
    a += a_depth;
    b += step;
  }
  store_sums<V>(acc, c, c_stride, all);
}

using TileFunction = void (*)(const float*, size_t, const float*, size_t, size_t, float*, size_t, const float*, bool);
// Tiles of 1 .. kRows rows: [columns?][one panel or panels_at_once(rows)][rows - 1].
template <bool kColumns, bool kWide, size_t... I>
constexpr std::array<TileFunction, kRows> tile_functions(std::index_sequence<I...>) {
  return {TileFunction(&multiply_tile<I + 1, (kWide ? panels_at_once(I + 1) : 1), kColumns>)...};
}

// What a tile needs beside its place in a and b.
struct TileOut {
  void* c;
  DType dtype;
  size_t c_stride;
  const float* bias;
  bool load_c;
};

// A tile that is narrower than its panels, or whose c is bf16: computed in fp32 in a full-width copy.
template <typename T>
HWY_INLINE void multiply_copied(TileFunction tile, const float* a, size_t a_step, const float* b, size_t panel_step,
                                size_t depth, const TileOut& out, size_t rows, size_t cols, size_t width) {
  HWY_ALIGN float copy[kRows * kPanelVectors * (HWY_MAX_BYTES / sizeof(float))];
  T* c = static_cast<T*>(out.c);
  const bool begun = out.bias || out.load_c;
  if (begun) {
    std::fill(copy, copy + rows * width, 0.0f);
    for (size_t r = 0; r < rows; ++r)
      for_columns(cols, [&](size_t i, size_t n) {
        VF v = out.bias ? load_any(out.bias + i, n) : hn::Zero(DF());
        if (out.load_c) {
          const VF old = load_any(c + r * out.c_stride + i, n);
          v = out.bias ? hn::Add(v, old) : old;
        }
        store_any(v, copy + r * width + i, n);
      });
  }
  tile(a, a_step, b, panel_step, depth, copy, width, nullptr, begun);
  for (size_t r = 0; r < rows; ++r)
    for_columns(cols,
                [&](size_t i, size_t n) { store_any(load_any(copy + r * width + i, n), c + r * out.c_stride + i, n); });
}

void multiply(const GemmBlock& block) {
  constexpr auto rows_sequence = std::make_index_sequence<kRows>();
  static constexpr std::array<TileFunction, kRows> functions[2][2] = {
      {tile_functions<false, false>(rows_sequence), tile_functions<false, true>(rows_sequence)},
      {tile_functions<true, false>(rows_sequence), tile_functions<true, true>(rows_sequence)}};
  const size_t rows = static_cast<size_t>(block.rows), cols = static_cast<size_t>(block.cols), nr = panel_cols();
  const size_t depth = static_cast<size_t>(block.depth), a_step = static_cast<size_t>(block.a.step);
  const size_t panel_step = static_cast<size_t>(block.panel_step);
  const bool f32 = block.c_dtype == DType::kF32, columns = block.a.columns;
  // Few rows: several panels at once. More: a panel stays in the first-level cache while the rows pass by it.
  const size_t at_once = rows < kRows ? panels_at_once(rows) : 1;
  for (size_t j = 0; j < cols;) {
    const bool wide = j + at_once * nr <= cols;
    const size_t width = wide ? at_once * nr : nr, valid = std::min(width, cols - j);
    const float* b = block.b + j / nr * panel_step;
    for (size_t i = 0, r; i < rows; i += r) {
      r = std::min(kRows, rows - i);
      // Tiles of one to three rows wait for their own sums: share the last rows out evenly.
      if (!columns && rows - i > kRows && rows - i < kRows + 4) r = (rows - i + 1) / 2;
      const TileFunction tile = functions[columns][wide && at_once > 1][r - 1];
      const float* a = block.a.data + (columns ? i / kRows * static_cast<size_t>(block.a.tile_step) : i * a_step);
      const size_t offset = i * static_cast<size_t>(block.c_stride) + j;
      TileOut out{
          f32 ? static_cast<void*>(static_cast<float*>(block.c) + offset) : static_cast<bfloat16*>(block.c) + offset,
          block.c_dtype, static_cast<size_t>(block.c_stride), block.bias ? block.bias + j : nullptr, block.load_c};
      if (f32 && valid == width)
        tile(a, a_step, b, panel_step, depth, static_cast<float*>(out.c), out.c_stride, out.bias, out.load_c);
      else if (f32)
        multiply_copied<float>(tile, a, a_step, b, panel_step, depth, out, r, valid, width);
      else
        multiply_copied<bfloat16>(tile, a, a_step, b, panel_step, depth, out, r, valid, width);
    }
    j += width;
  }
}

using D4 = hn::FixedTag<float, 4>;
using V4 = hn::Vec<D4>;
HWY_INLINE V4 load4(const float* p) {
  return hn::LoadU(D4(), p);
}
HWY_INLINE V4 load4(const bfloat16* p) {
  const hn::FixedTag<uint16_t, 4> d16;
  const hn::FixedTag<uint32_t, 4> d32;
  return hn::BitCast(D4(), hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)))));
}

// to[k * step + j] = from[j * stride + k] for j < 4, k < depth.
template <typename T>
HWY_INLINE void transpose_4_rows(const T* from, size_t stride, size_t depth, float* to, size_t step) {
  const D4 d;
  const hn::FixedTag<double, 2> dd;
  size_t k = 0;
  for (; k + 4 <= depth; k += 4) {
    const V4 r0 = load4(from + k), r1 = load4(from + stride + k), r2 = load4(from + 2 * stride + k),
             r3 = load4(from + 3 * stride + k);
    const auto low01 = hn::BitCast(dd, hn::InterleaveLower(d, r0, r1)),
               low23 = hn::BitCast(dd, hn::InterleaveLower(d, r2, r3));
    const auto high01 = hn::BitCast(dd, hn::InterleaveUpper(d, r0, r1)),
               high23 = hn::BitCast(dd, hn::InterleaveUpper(d, r2, r3));
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, low01, low23)), d, to + k * step);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, low01, low23)), d, to + (k + 1) * step);
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, high01, high23)), d, to + (k + 2) * step);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, high01, high23)), d, to + (k + 3) * step);
  }
  for (; k < depth; ++k)
    for (size_t j = 0; j < 4; ++j) to[k * step + j] = static_cast<float>(from[j * stride + k]);
}

// b's rows hold one depth of many columns: read along, a depth of all panels after the other.
template <typename T>
HWY_INLINE void pack_columns_along(const T* b, size_t stride, size_t depth, size_t cols, float* panels,
                                   size_t panel_step) {
  const size_t nr = panel_cols();
  for (size_t k = 0; k < depth; ++k, b += stride, panels += nr) {
    float* to = panels;
    size_t j = 0;
    for (; j + nr <= cols; j += nr, to += panel_step)
      for (size_t v = 0; v < nr; v += lanes()) store(load(b + j + v), to + v);
    for (size_t i = 0; j < cols && i < nr; ++i) to[i] = j + i < cols ? static_cast<float>(b[j + i]) : 0.0f;
  }
}
// b's rows hold one column each.
template <typename T>
HWY_INLINE void pack_columns_across(const T* b, size_t stride, size_t depth, size_t cols, float* panels,
                                    size_t panel_step) {
  const size_t nr = panel_cols();
  for (size_t j = 0; j < cols; j += nr, panels += panel_step) {
    const T* from = b + j * stride;
    const size_t n = std::min(nr, cols - j);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) transpose_4_rows(from + i * stride, stride, depth, panels + i, nr);
    for (; i < nr; ++i)
      for (size_t k = 0; k < depth; ++k) panels[k * nr + i] = i < n ? static_cast<float>(from[i * stride + k]) : 0.0f;
  }
}
template <typename T>
HWY_INLINE void pack_columns_of(const T* b, const GemmMatrix& matrix, size_t depth, size_t cols, float* panels,
                                size_t panel_step) {
  if (matrix.transposed)
    pack_columns_across(b, matrix.stride, depth, cols, panels, panel_step);
  else
    pack_columns_along(b, matrix.stride, depth, cols, panels, panel_step);
}
void pack_columns(const GemmMatrix& b, int64_t k0, int64_t depth, int64_t n0, int64_t cols, float* panels,
                  int64_t panel_step) {
  const int64_t offset = b.transposed ? n0 * b.stride + k0 : k0 * b.stride + n0;
  if (b.dtype == DType::kF32)
    pack_columns_of(static_cast<const float*>(b.data) + offset, b, depth, cols, panels, panel_step);
  else
    pack_columns_of(static_cast<const bfloat16*>(b.data) + offset, b, depth, cols, panels, panel_step);
}

// Panels [k][kRows] from a transposed a: a stored row holds one depth of many rows, and is read along. A depth is
// written with whole vectors that reach into the next depth's place, which is written after it. The last depth of a
// panel must not reach into the next panel's first, which is there already: it is written by elements.
template <typename T>
HWY_INLINE void pack_transposed_rows(const T* a, size_t stride, size_t rows, size_t depth, float* packed) {
  constexpr size_t kAhead = 8, kLine = 64 / sizeof(T);
  const size_t reach = (kRows + lanes() - 1) / lanes() * lanes();
  for (size_t k = 0; k < depth; ++k, a += stride, packed += kRows) {
    // Stored rows often lie a page apart, where hardware looks no further: ask for a later one's lines.
    if (k + kAhead < depth)
      for (size_t i = 0; i < rows; i += kLine) __builtin_prefetch(a + kAhead * stride + i);
    float* to = packed;
    for (size_t i = 0; i < rows; i += kRows, to += kRows * depth) {
      if (k + 1 < depth && i + reach <= rows) {
        for (size_t v = 0; v < reach; v += lanes()) store(load(a + i + v), to + v);
      } else {
        for (size_t r = 0, n = std::min(kRows, rows - i); r < n; ++r) to[r] = static_cast<float>(a[i + r]);
      }
    }
  }
}
template <typename T>
HWY_INLINE GemmRows pack_rows_of(const T* a, const GemmMatrix& matrix, size_t rows, size_t depth, float* packed) {
  const int64_t step = static_cast<int64_t>(depth), tile = static_cast<int64_t>(kRows);
  if (matrix.transposed) {
    pack_transposed_rows(a, matrix.stride, rows, depth, packed);
    return {packed, tile, tile * step, true};
  }
  for (size_t i = 0; i < rows; ++i)
    for_columns(depth, [&](size_t k, size_t n) {
      store_any(load_any(a + i * matrix.stride + k, n), packed + i * depth + k, n);
    });
  return {packed, step, 0, false};
}
GemmRows pack_rows(const GemmMatrix& a, bool pack, int64_t i0, int64_t rows, int64_t k0, int64_t depth, float* packed) {
  const int64_t offset = a.transposed ? k0 * a.stride + i0 : i0 * a.stride + k0;
  if (a.dtype == DType::kBF16)
    return pack_rows_of(static_cast<const bfloat16*>(a.data) + offset, a, rows, depth, packed);
  const float* from = static_cast<const float*>(a.data) + offset;
  if (pack) return pack_rows_of(from, a, rows, depth, packed);
  return {from, a.stride, static_cast<int64_t>(kRows), a.transposed};
}

GemmTile tile_size() {
  return {static_cast<int64_t>(kRows), static_cast<int64_t>(panel_cols())};
}

}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace frit {
HWY_EXPORT(multiply);
HWY_EXPORT(pack_columns);
HWY_EXPORT(pack_rows);
HWY_EXPORT(tile_size);

GemmTile gemm_tile() {
  return HWY_DYNAMIC_DISPATCH(tile_size)();
}
void gemm_multiply(const GemmBlock& block) {
  HWY_DYNAMIC_DISPATCH(multiply)(block);
}
void gemm_pack_columns(const GemmMatrix& b, int64_t k0, int64_t depth, int64_t n0, int64_t cols, float* panels,
                       int64_t panel_step) {
  HWY_DYNAMIC_DISPATCH(pack_columns)(b, k0, depth, n0, cols, panels, panel_step);
}
GemmRows gemm_pack_rows(const GemmMatrix& a, bool pack, int64_t i0, int64_t rows, int64_t k0, int64_t depth,
                        float* packed) {
  return HWY_DYNAMIC_DISPATCH(pack_rows)(a, pack, i0, rows, k0, depth, packed);
}
bool gemm_packs_rows(const GemmMatrix& a, int64_t m, int64_t k) {
  // A small transposed a is read as it lies: its columns stay in the second-level cache however far apart they are.
  constexpr int64_t kSmall = int64_t{64} << 10;
  return a.dtype != DType::kF32 || (a.transposed && m * k * static_cast<int64_t>(sizeof(float)) > kSmall);
}
int64_t gemm_packed_rows_size(int64_t rows, int64_t depth) {
  const int64_t mr = gemm_tile().rows;
  return (rows + mr - 1) / mr * mr * depth + 64;
}

}  // namespace frit
#endif
