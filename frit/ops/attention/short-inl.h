// What the short kernels share: which sequence a block works on, tiles of rows in shared memory, products of tiles.
#pragma once
#include "frit/ops/attention/gpu.h"
#include "frit/simt/early.h"
#include "frit/simt/launch.h"
#include "frit/simt/spread.h"

namespace frit::attention_short {

using namespace simt;

// A tensor [tokens, N, D] of which a block reads or writes rows of one head.
template <typename T>
struct Rows {
  Global<T> first;     // element (0, 0, 0)
  int64_t stride = 0;  // elements from token to token

  FRIT_DEVICE Global<T> at(int64_t token, int head, int d) const {
    return first + (token * stride + static_cast<int64_t>(head) * d);
  }
};
template <typename T>
Rows<T> rows_of(const Tensor& t) {
  return {global<T>(t), t.row_stride()};
}

struct Geometry {
  int64_t q_tokens, k_tokens;
  int sequences, heads;
  int max_q, max_k;  // what shared memory and the grid are sized for
  bool causal;
  float scale;
};
inline Geometry geometry_of(const AttentionArgs& args) {
  return {args.q.dim(0),
          args.k.dim(0),
          static_cast<int>(args.q_offsets.dim(0) - 1),
          static_cast<int>(args.q.dim(1)),
          static_cast<int>(attention_longest(args.max_q, args.q)),
          static_cast<int>(attention_longest(args.max_k, args.k)),
          args.causal,
          args.scale};
}

FRIT_DEVICE int least(int a, int b) {
  return a < b ? a : b;
}
FRIT_HOST_DEVICE constexpr int round_up(int x, int step) {
  return (x + step - 1) / step * step;
}

// One sequence's queries and keys.
struct Sequence {
  int64_t q_first, k_first;  // tokens
  int lq, lk;

  // Key j is visible to query i if j <= i + shift().
  FRIT_DEVICE int shift() const { return lk - lq; }
  // How many keys query i sees.
  FRIT_DEVICE int visible(int i, bool causal) const {
    const int keys = i + shift() + 1;
    return !causal || keys > lk ? lk : keys < 0 ? 0 : keys;
  }
};

FRIT_DEVICE int64_t offset_at(const Global<const int32_t>& offsets, int s, int64_t tokens) {
  const int64_t offset = load<Cache::kReadOnly>(offsets, s);
  return offset < 0 ? 0 : offset > tokens ? tokens : offset;
}
FRIT_DEVICE Sequence sequence_at(const Global<const int32_t>& q_offsets, const Global<const int32_t>& k_offsets,
                                 const Geometry& geometry, int s) {
  Sequence at;
  at.q_first = offset_at(q_offsets, s, geometry.q_tokens);
  at.k_first = offset_at(k_offsets, s, geometry.k_tokens);
  const int64_t lq = offset_at(q_offsets, s + 1, geometry.q_tokens) - at.q_first;
  const int64_t lk = offset_at(k_offsets, s + 1, geometry.k_tokens) - at.k_first;
  at.lq = lq < 0 ? 0 : lq > geometry.max_q ? geometry.max_q : static_cast<int>(lq);
  at.lk = lk < 0 ? 0 : lk > geometry.max_k ? geometry.max_k : static_cast<int>(lk);
  return at;
}

// Block `part` of kAttentionTailBlocks zeroes its share of rows [first, tokens), each of `width` elements.
template <typename T>
FRIT_DEVICE void zero_rows(const Rows<T>& to, int64_t first, int64_t tokens, int width, int part) {
  constexpr int kVec = kVecOf<T>;
  Vec<T, kVec> zeros;
  FRIT_UNROLL
  for (int i = 0; i < kVec; ++i) zeros[i] = convert<T>(0.0f);
  const int vectors = width / kVec;
  for (int64_t i = static_cast<int64_t>(part) * thread_count() + thread_index(); i < (tokens - first) * vectors;
       i += kAttentionTailBlocks * thread_count())
    store_span<kVec>(to.first + (first + i / vectors) * to.stride, i % vectors * kVec, width, zeros);
}
// lse of the rows past the last sequence.
FRIT_DEVICE void minus_infinity_rows(const Global<float>& lse, int64_t first, int64_t tokens, int heads, int part) {
  for (int64_t i = first * heads + static_cast<int64_t>(part) * thread_count() + thread_index(); i < tokens * heads;
       i += kAttentionTailBlocks * thread_count())
    store(lse, i, -INFINITY);
}

// Calls f(std::integral_constant<int, D>()) with the head width.
template <typename F>
void dispatch_width(int64_t d, F&& f) {
  switch (d) {
    case 32:
      return f(std::integral_constant<int, 32>());
    case 64:
      return f(std::integral_constant<int, 64>());
    case 128:
      return f(std::integral_constant<int, 128>());
    default:
      fail_argument("[attention] short: head width {}, expected 32, 64 or 128", d);
  }
}

// ---- Tiles of 16-bit rows in shared memory ----

// Elements from row to row: 16 bytes more than the row, so that ldmatrix meets no bank twice.
template <int D>
constexpr int kRowOf = D + 8;

template <typename T>
FRIT_DEVICE Vec<T, 8> zeros8() {
  Vec<T, 8> v;
  FRIT_UNROLL
  for (int i = 0; i < 8; ++i) v[i] = T::from_bits(0);
  return v;
}

// Can rows `stride` elements apart from `from` on be read and written 16 bytes at a time?
template <typename T>
FRIT_DEVICE bool whole_vectors(const Global<T>& from, int64_t stride) {
  return ((from.address() | static_cast<uint64_t>(stride) * sizeof(T)) & 15u) == 0;
}

// Copies rows [begin, rows) of one head to shared memory, and zeros to the rows from there to `padded`. Behind it:
// commit, wait and a barrier.
template <typename T, int D>
FRIT_DEVICE void load_rows(const Shared<T>& to, const Global<const T>& from, int64_t stride, int rows, int padded,
                           int begin = 0) {
  constexpr int kParts = D / 8;
  const int column = thread_index() % kParts * 8, step = thread_count() / kParts;
  int r = begin + thread_index() / kParts;
  const int end = least(rows, padded);
  if (whole_vectors(from, stride)) {
    Global<const T> at = from + (r * stride + column);
    const int64_t further = step * stride;
    FRIT_UNROLL_BY(4)
    for (; r < end; r += step) {
      copy_async16(to, r * kRowOf<D> + column, at, 0, true);
      at = at + further;
    }
  } else {
    for (; r < end; r += step)
      store_vec<8>(to, r * kRowOf<D> + column, load_span<8>(from + r * stride, column, D, T::from_bits(0)));
  }
  for (; r < padded; r += step) store_vec<8>(to, r * kRowOf<D> + column, zeros8<T>());
}

// Fragments of rows [0, 16) of a tile, columns [16 k, 16 k + 16), as the left operand.
template <int D, typename T>
FRIT_DEVICE void left_fragment(uint32_t (&a)[4], const Shared<T>& rows, int k) {
  ldmatrix_x4(a, rows, lane() % 16 * kRowOf<D> + k * 16 + lane() / 16 * 8);
}

// The product of 16 rows with 8 * N others, as mma leaves it: lane 4 g + c has columns 8 j + 2 c and the next of rows g
// ([j][0], [j][1]) and g + 8 ([j][2], [j][3]).
template <int N>
FRIT_DEVICE void clear(float (&c)[N][4]) {
  FRIT_UNROLL
  for (int j = 0; j < N; ++j) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0;
}
// c += a * b^T of step k of 16 along the width: a 16 rows, b 8 * N rows.
template <typename T, int D, int N>
FRIT_DEVICE void multiply_step(float (&c)[N][4], const uint32_t (&a)[4], const Shared<T>& b, int k) {
  const int at = (lane() % 8 + lane() / 16 * 8) * kRowOf<D> + lane() / 8 % 2 * 8 + k * 16;
  FRIT_UNROLL
  for (int half = 0; half < N / 2; ++half) {
    uint32_t r[4];
    ldmatrix_x4(r, b, at + half * 16 * kRowOf<D>);
    const uint32_t low[2] = {r[0], r[1]}, high[2] = {r[2], r[3]};
    mma_m16n8k16<T>(c[2 * half], a, low);
    mma_m16n8k16<T>(c[2 * half + 1], a, high);
  }
}

// A product's 16 x 8 N result, rounded, as the left operand of the next product.
template <typename T, int N>
FRIT_DEVICE void round_to_left(uint32_t (&a)[N / 2][4], const float (&x)[N][4]) {
  FRIT_UNROLL
  for (int m = 0; m < N / 2; ++m) {
    a[m][0] = pack2(T(), x[2 * m][0], x[2 * m][1]);
    a[m][1] = pack2(T(), x[2 * m][2], x[2 * m][3]);
    a[m][2] = pack2(T(), x[2 * m + 1][0], x[2 * m + 1][1]);
    a[m][3] = pack2(T(), x[2 * m + 1][2], x[2 * m + 1][3]);
  }
}
// c[16][D] += a[16][16 M] * b[16 M][D].
template <typename T, int D, int M>
FRIT_DEVICE void multiply_columns(float (&c)[D / 8][4], const uint32_t (&a)[M][4], const Shared<T>& b) {
  const int at = lane() % 16 * kRowOf<D> + lane() / 16 * 8;
  FRIT_UNROLL
  for (int m = 0; m < M; ++m) {
    FRIT_UNROLL
    for (int n = 0; n < D / 16; ++n) {
      uint32_t r[4];
      ldmatrix_x4_transposed(r, b, at + m * 16 * kRowOf<D> + n * 16);
      const uint32_t low[2] = {r[0], r[1]}, high[2] = {r[2], r[3]};
      mma_m16n8k16<T>(c[2 * n], a[m], low);
      mma_m16n8k16<T>(c[2 * n + 1], a[m], high);
    }
  }
}

// The lanes of a quad exchange: lane c gives x[j] to lane j, which keeps it as x[c].
FRIT_DEVICE void transpose_quad(uint32_t (&x)[4]) {
  const auto swap = [](uint32_t& a, uint32_t& b, int bit) {
    const bool upper = lane() & bit;
    const uint32_t got = shuffle_xor(upper ? a : b, bit);
    a = upper ? got : a;
    b = upper ? b : got;
  };
  swap(x[0], x[1], 1), swap(x[2], x[3], 1);
  swap(x[0], x[2], 2), swap(x[1], x[3], 2);
}

// Writes the first `rows` of a warp's 16 rows, row g times factor[0] and row g + 8 times factor[1] (g = lane / 4).
template <typename T, int D>
FRIT_DEVICE void store_rows(const Global<T>& to, int64_t stride, int rows, const float (&x)[D / 8][4],
                            const float (&factor)[2]) {
  struct Words {
    uint32_t v[4];
  };
  const bool whole = whole_vectors(to, stride);
  FRIT_UNROLL
  for (int h = 0; h < 2; ++h) {
    const int row = lane() / 4 + 8 * h;
    FRIT_UNROLL
    for (int group = 0; group < D / 32; ++group) {
      Words w;
      FRIT_UNROLL
      for (int j = 0; j < 4; ++j)
        w.v[j] = pack2(T(), x[4 * group + j][2 * h] * factor[h], x[4 * group + j][2 * h + 1] * factor[h]);
      transpose_quad(w.v);
      const int column = group * 32 + lane() % 4 * 8;
      if (row >= rows) continue;
      if (whole)
        store_vec<8>(to, row * stride + column, std::bit_cast<Vec<T, 8>>(w));
      else
        store_span<8>(to + row * stride, column, D, std::bit_cast<Vec<T, 8>>(w));
    }
  }
}

// The same by way of 16 rows of shared memory, from byte `at_bytes` on, that only this warp uses: fewer instructions.
template <typename T, int D>
FRIT_DEVICE void store_rows_by(int64_t at_bytes, const Global<T>& to, int64_t stride, int rows,
                               const float (&x)[D / 8][4], const float (&factor)[2]) {
  warp_barrier();  // all have read what is there
  const Shared<T> by = shared_array<T>(at_bytes);
  const Shared<uint32_t> pairs = shared_array<uint32_t>(at_bytes);
  FRIT_UNROLL
  for (int h = 0; h < 2; ++h) {
    FRIT_UNROLL
    for (int j = 0; j < D / 8; ++j)
      store(pairs, (lane() / 4 + 8 * h) * (kRowOf<D> / 2) + 4 * j + lane() % 4,
            pack2(T(), x[j][2 * h] * factor[h], x[j][2 * h + 1] * factor[h]));
  }
  warp_barrier();
  constexpr int kParts = D / 8, kStep = kWarpSize / kParts;
  const int column = lane() % kParts * 8;
  const bool whole = whole_vectors(to, stride);
  FRIT_UNROLL
  for (int i = 0; i < 16 / kStep; ++i) {
    const int row = lane() / kParts + i * kStep;
    if (row >= rows) return;
    const Vec<T, 8> v = load_vec<8>(by, row * kRowOf<D> + column);
    if (whole)
      store_vec<8>(to, row * stride + column, v);
    else
      store_span<8>(to + row * stride, column, D, v);
  }
}

// ---- Dropout bits in shared memory ----

// Words from query to query, enough for the longest row: a constant, so that its multiples need no register, and odd,
// so that neighbouring queries lie in different banks.
constexpr int kMaskRow = kAttentionShortLongest / 32 + 1;
// A warp computes the bits of 16 queries from query `first` of the sequence on: bit j % 32 of word
// mask[r * kMaskRow + j / 32] says whether key j is kept for query first + r. Bits from `keys` on are anything; words
// are written for `written` keys. Computed while copies are under way. Cost: one Philox block for 8 keys.
FRIT_DEVICE void fill_mask(const Shared<uint16_t>& mask, const DropoutTable& dropout, const Sequence& at, int first,
                           int keys, int written, int head) {
  const int r = lane() % 16;
  const uint32_t row = static_cast<uint32_t>(at.q_first) + static_cast<uint32_t>(first + r);
  for (int piece = lane() / 16; piece < (written + 31) / 32 * 2; piece += 2) {
    const uint32_t group = static_cast<uint32_t>(piece) * 2, of = static_cast<uint32_t>(head);
    uint32_t bits = 0;
    if (piece * 16 < keys)
      bits = dropout_keep_group(dropout, row, group, of) | dropout_keep_group(dropout, row, group + 1, of) << 8;
    store(mask, r * kMaskRow * 2 + piece, static_cast<uint16_t>(bits));
  }
}

}  // namespace frit::attention_short
