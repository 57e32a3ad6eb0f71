#include "frit/ops/embedding/shifted.h"
#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;

// A row of a matrix for reading. Its first and last vectors may hold elements of the rows beside it: [low, high) is
// what may be touched, counted from the row's begin.
template <typename T>
struct ReadRow {
  Global<const T> at;
  int low, high, past;  // past: of the vector from `shift` columns before the row on, beyond a multiple of 16 bytes
};
template <typename T>
FRIT_DEVICE ReadRow<T> read_row(const Global<const T>& matrix, int64_t row, int64_t rows, int64_t stride, int columns,
                                int shift) {
  constexpr int kN = kVecOf<T>;
  const Global<const T> at = matrix + row * stride;
  int before = 0, behind = 0;
  if (stride == columns) {  // no gaps
    const int64_t left = row * stride, right = (rows - 1 - row) * stride;
    before = left < kN ? static_cast<int>(left) : kN, behind = right < 2 * kN ? static_cast<int>(right) : 2 * kN;
  }
  return {at, -before, columns + behind, (row_shift(at) + kN - shift) % kN};
}
// The 16 bytes from `column` on (a multiple of kN, less the shift that the row was made for): one access if they are
// aligned, else the two aligned vectors that they lie in, joined; element by element where those leave the matrix. What
// lies outside of the row is anything.
template <typename T, Cache cache>
FRIT_DEVICE Vec<T, kVecOf<T>> read_vec(const ReadRow<T>& row, int column) {
  constexpr int kN = kVecOf<T>;
  struct Words {
    uint32_t w[4];
  };
  const int begin = column - row.past, end = begin + (row.past ? 2 * kN : kN);
  if (begin < row.low || end > row.high) {  // rare: a loop that takes few registers, each element pushing the others up
    uint32_t w0 = 0, w1 = 0, w2 = 0, w3 = 0;
    FRIT_UNROLL_BY(1)
    for (int i = kN - 1; i >= 0; --i) {
      const bool inside = column + i >= row.low && column + i < row.high;
      const T x = inside ? load<cache>(row.at, column + i) : T();
      if constexpr (sizeof(T) == 2) {
        w3 = w3 << 16 | w2 >> 16, w2 = w2 << 16 | w1 >> 16, w1 = w1 << 16 | w0 >> 16;
        w0 = w0 << 16 | std::bit_cast<uint16_t>(x);
      } else {
        w3 = w2, w2 = w1, w1 = w0, w0 = std::bit_cast<uint32_t>(x);
      }
    }
    return std::bit_cast<Vec<T, kN>>(Words{{w0, w1, w2, w3}});
  }
  const Vec<T, kN> a = load_vec<kN, cache>(row.at + begin, 0);
  if (row.past == 0) return a;
  const Words low = std::bit_cast<Words>(a), high = std::bit_cast<Words>(load_vec<kN, cache>(row.at + begin, kN));
  uint32_t w[8] = {low.w[0], low.w[1], low.w[2], low.w[3], high.w[0], high.w[1], high.w[2], high.w[3]};
  const int bytes = row.past * static_cast<int>(sizeof(T));
  FRIT_UNROLL
  for (int i = 0; i < 6; ++i) w[i] = bytes & 8 ? w[i + 2] : w[i];
  FRIT_UNROLL
  for (int i = 0; i < 5; ++i) w[i] = bytes & 4 ? w[i + 1] : w[i];
  Words joined;
  FRIT_UNROLL
  for (int i = 0; i < 4; ++i)
    joined.w[i] = static_cast<uint32_t>((static_cast<uint64_t>(w[i + 1]) << 32 | w[i]) >> ((bytes & 2) * 8));
  return std::bit_cast<Vec<T, kN>>(joined);
}

// Byte k: which of the kN columns of the lane's vector first + k * 32 + lane are kept, the row's vectors beginning
// `shift` columns before it. All lanes of the warp call it. Cost with kN = 8: a Philox block a vector; if shifted a
// shuffle, and a block more behind the first vectors of the row.
template <int kN, int kVectors>
FRIT_DEVICE uint32_t kept(const DropoutTable& dropout, int64_t token, int first, int vectors, int shift) {
  uint32_t bits = 0;
  if constexpr (kN < 8) {
    FRIT_UNROLL
    for (int k = 0; k < kVectors; ++k)
      if (first + k * kWarpSize < vectors)
        bits |= dropout_keep<kN>(dropout, token, (first + k * kWarpSize + lane()) * kN - shift) << 8 * k;
    return bits;
  } else {
    const auto group = [&](int j) { return dropout_keep<8>(dropout, token, int64_t{8} * static_cast<uint32_t>(j)); };
    FRIT_UNROLL
    for (int k = 0; k < kVectors; ++k)
      if (first + k * kWarpSize < vectors) bits |= group(first + k * kWarpSize + lane()) << 8 * k;
    if (shift == 0) return bits;
    uint32_t left = shuffle(bits, (lane() + kWarpSize - 1) % kWarpSize);  // the 8 columns before
    const uint32_t before = first > 0 ? group(first - 1) : 0;
    if (lane() == 0) left = left << 8 | before;
    uint32_t shifted = 0;
    FRIT_UNROLL
    for (int k = 0; k < kVectors; ++k) {
      const uint32_t both = (left >> 8 * k & 0xffu) | (bits >> 8 * k & 0xffu) << 8;
      shifted |= (both >> (8 - shift) & 0xffu) << 8 * k;
    }
    return shifted;
  }
}

// A warp takes kTokens neighbouring tokens: it finds their rows at once, a token a lane, then writes one row after the
// other; a lane has kVectors vectors of it at a time. kAligned: all rows are whole aligned vectors.
template <typename T, int kVectors, bool kAligned>
FRIT_KERNEL(kThreads, kAligned                          ? (kVectors <= 2    ? 4
                                                           : sizeof(T) == 2 ? 2
                                                                            : 3)
                      : kVectors <= 2 && sizeof(T) == 2 ? 3
                                                        : 2)
embedding_forward_rows_per_warp_kernel(Lookup<T> a) {
  let_next_start();
  wait_for_previous();
  constexpr int kN = kVecOf<T>, kTokens = static_cast<int>(kEmbeddingTokens);
  const int64_t begin = (block_index() * kWarps + warp()) * kTokens;
  if (begin >= a.tokens) return;
  const FoundTokens found = find_tokens<kTokens>(a, begin);
  const int32_t id = found.id, place = found.place;
  if constexpr (kAligned && kN == 8) {
    // The next vectors are loaded as soon as these are widened.
    const int vectors = a.columns / kN,
              left = static_cast<int>(a.tokens - begin < kTokens ? a.tokens - begin : kTokens);
    const uint32_t threshold = dropout_threshold(a.dropout);
    Vec<T, kN> w[kVectors], p[kVectors];
    const auto fetch = [&](int i, int first) {
      const int32_t word_id = shuffle(id, i), place_id = shuffle(place, i);
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        const int j = first + k * kWarpSize + lane();
        w[k] = p[k] = Vec<T, kN>{};
        if (word_id < 0 || j >= vectors) continue;
        w[k] = load_vec<kN>(a.table + word_id * a.table_stride, j * kN);
        if (a.positions) p[k] = load_vec<kN>(a.positions + place_id * a.positions_stride, j * kN);
      }
    };
    fetch(0, 0);
    int i = 0, first = 0;
    while (i < left) {
      Vec<float, kN> sum[kVectors];
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        FRIT_UNROLL
        for (int c = 0; c < kN; ++c)
          sum[k][c] = fmaf(widen(static_cast<T>(w[k][c])), a.scale, widen(static_cast<T>(p[k][c]))) * a.dropout.scale;
      }
      const int64_t t = begin + i;
      const int at = first + lane();
      first += kWarpSize * kVectors;
      if (first >= vectors) first = 0, ++i;
      if (i < left) fetch(i, first);
      uint32_t rows[kVectors], groups[kVectors];
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k)
        rows[k] = static_cast<uint32_t>(t), groups[k] = static_cast<uint32_t>(at + k * kWarpSize);
      const DropoutWords<kVectors> words = dropout_words<kVectors>(a.dropout, rows, groups);
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        const int j = at + k * kWarpSize;
        if (j >= vectors) continue;
        FRIT_UNROLL
        for (int c = 0; c < kN; ++c) sum[k][c] = words.kept(k, c, threshold) ? sum[k][c] : 0.0f;
        if (a.streams)
          store_vec<kN, Cache::kStream>(a.y + t * a.y_stride, j * kN, from_float<T>(sum[k]));
        else
          store_vec<kN>(a.y + t * a.y_stride, j * kN, from_float<T>(sum[k]));
      }
    }
    return;
  }
  for (int i = 0; i < kTokens && begin + i < a.tokens; ++i) {
    const int64_t t = begin + i;
    const int32_t word_id = shuffle(id, i), place_id = shuffle(place, i);
    const Global<T> y = a.y + t * a.y_stride;
    const int shift = kAligned ? 0 : row_shift(y), vectors = (a.columns + shift + kN - 1) / kN;
    const auto write = [&](int column, const Vec<T, kN>& v) {
      if constexpr (kAligned)
        store_vec<kN>(y, column, v);
      else
        store_span<kN>(y, column, a.columns, v);
    };
    if (word_id < 0) {
      for (int j = lane(); j < vectors; j += kWarpSize) write(j * kN - shift, Vec<T, kN>{});
      continue;
    }
    const bool placed = static_cast<bool>(a.positions);
    const auto words = read_row<T>(a.table, word_id, a.vocabulary, a.table_stride, a.columns, shift);
    const auto places = read_row<T>(a.positions, placed ? place_id : 0, a.places, a.positions_stride, a.columns, shift);
    const auto read = [&](const ReadRow<T>& row, int column) {
      if constexpr (kAligned)
        return load_vec<kN>(row.at, column);
      else
        return read_vec<T, Cache::kDefault>(row, column);
    };
    for (int first = 0; first < vectors; first += kWarpSize * kVectors) {
      Vec<T, kN> w[kVectors], p[kVectors];
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        const int j = first + k * kWarpSize + lane();
        w[k] = j < vectors ? read(words, j * kN - shift) : Vec<T, kN>{};
        p[k] = placed && j < vectors ? read(places, j * kN - shift) : Vec<T, kN>{};
      }
      const bool drops = a.dropout.active;
      const uint32_t keep = drops ? kept<kN, kVectors>(a.dropout, t, first, vectors, shift) : ~0u;
      const float factor = drops ? a.dropout.scale : 1.0f;
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        const int j = first + k * kWarpSize + lane();
        if (j >= vectors) continue;
        const Vec<float, kN> word = to_float(w[k]), position = to_float(p[k]);
        Vec<float, kN> sum;
        FRIT_UNROLL
        for (int c = 0; c < kN; ++c)
          sum[c] = keep >> (8 * k + c) & 1 ? (word[c] * a.scale + position[c]) * factor : 0.0f;
        write(j * kN - shift, from_float<T>(sum));
      }
    }
  }
}

// ---- Backward ----

// keys[t] = position of token t in its sequence, plus position_offset; -1 for tokens behind the last sequence.
FRIT_KERNEL(kThreads, 4)
embedding_backward_positions_kernel(Global<const int32_t> offsets, int sequences, int64_t tokens,
                                    int64_t position_offset, Global<int32_t> keys) {
  wait_for_previous();
  const int64_t t = block_index() * kThreads + thread_index();
  if (t >= tokens) return;
  int low = 0, high = sequences + 1;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (load(offsets, middle) <= t)
      low = middle;
    else
      high = middle;
  }
  store(keys, t, low == sequences ? -1 : static_cast<int32_t>(t - load(offsets, low) + position_offset));
}

// sum[k] = sum over the tokens that the first `count` lanes hold of mask/keep * dy, at the lane's vectors from `first`
// on of rows whose vectors begin `shift` columns before them. All lanes of the warp call it.
template <typename T, typename O, int kVectors, bool kAligned>
FRIT_DEVICE void sum_run(const Sums<T, O>& a, int32_t tokens, int count, int first, int shift,
                         Vec<float, kVecOf<T>> (&sum)[kVectors]) {
  constexpr int kN = kVecOf<T>;
  const int vectors = (a.columns + shift + kN - 1) / kN;
  const float factor = a.dropout.active ? a.dropout.scale : 1.0f;
  FRIT_UNROLL_BY(1)
  for (int i = 0; i < count; ++i) {
    const int32_t t = shuffle(tokens, i);
    const auto row = read_row<T>(a.dy, t, a.keys.tokens, a.dy_stride, a.columns, shift);
    Vec<T, kN> v[kVectors];
    FRIT_UNROLL
    for (int k = 0; k < kVectors; ++k) {
      const int j = first + k * kWarpSize + lane();
      v[k] = Vec<T, kN>{};
      if (j >= vectors) continue;
      if constexpr (kAligned)
        v[k] = load_vec<kN, Cache::kStream>(row.at, j * kN);
      else
        v[k] = read_vec<T, Cache::kStream>(row, j * kN - shift);
    }
    const uint32_t keep = a.dropout.active ? kept<kN, kVectors>(a.dropout, t, first, vectors, shift) : ~0u;
    FRIT_UNROLL
    for (int k = 0; k < kVectors; ++k) {
      const Vec<float, kN> x = to_float(v[k]);
      FRIT_UNROLL
      for (int c = 0; c < kN; ++c) sum[k][c] += keep >> (8 * k + c) & 1 ? x[c] * factor : 0.0f;
    }
  }
}

// Rows of any type, width and alignment; kAligned: all are whole aligned vectors.
template <typename T, typename O, bool kAligned>
struct AnyRows {
  using In = T;
  using Out = O;
  static constexpr int kWordThreads = 512, kWordBlocks = 1, kPieceBlocks = 5;

  FRIT_DEVICE static void write_zeros(const Sums<T, O>& a, int32_t key) {
    constexpr int kN = kVecOf<O>;
    const Global<O> row = a.out + key * a.out_stride;
    for (int column = lane() * kN - row_shift(row); column < a.columns; column += kWarpSize * kN)
      store_span<kN, Cache::kStream>(row, column, a.columns, Vec<O, kN>{});
  }
  template <bool kPiece>
  FRIT_DEVICE static void sum(const Sums<T, O>& a, int32_t tokens, int count, int32_t key,
                              const Global<float>& partial) {
    constexpr int kN = kVecOf<T>, kOut = kVecOf<O>, kVectors = 2;
    const Global<O> out = a.out + key * a.out_stride;
    const int shift = kAligned || kPiece ? 0 : row_shift(out) % kN;
    FRIT_UNROLL_BY(1)
    for (int first = 0; first * kN - shift < a.columns; first += kWarpSize * kVectors) {
      Vec<float, kN> sum[kVectors] = {};
      sum_run<T, O, kVectors, kAligned>(a, tokens, count, first, shift, sum);
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        const int column = (first + k * kWarpSize + lane()) * kN - shift;
        if constexpr (kPiece) {
          FRIT_UNROLL
          for (int i = 0; i < kN; i += 4)
            if (column + i < a.columns)
              store_vec<4, Cache::kStream>(partial, column + i,
                                           Vec<float, 4>{sum[k][i], sum[k][i + 1], sum[k][i + 2], sum[k][i + 3]});
        } else {
          FRIT_UNROLL
          for (int i = 0; i < kN; i += kOut) {
            if (column + i >= a.columns) continue;
            Vec<float, kOut> x;
            FRIT_UNROLL
            for (int j = 0; j < kOut; ++j) x[j] = sum[k][i + j] * a.scale;
            if (a.accumulate) {
              const Vec<float, kOut> before = to_float(kAligned ? load_vec<kOut>(out, column + i)
                                                                : load_span<kOut>(out, column + i, a.columns, O()));
              FRIT_UNROLL
              for (int j = 0; j < kOut; ++j) x[j] += before[j];
            }
            if constexpr (kAligned)
              store_vec<kOut, Cache::kStream>(out, column + i, from_float<O>(x));
            else
              store_span<kOut, Cache::kStream>(out, column + i, a.columns, from_float<O>(x));
          }
        }
      }
    }
  }
};

// Rows of dy of 16-bit elements that are whole aligned vectors, as the gradient's are.
template <typename T, typename O, int kBlocks>
struct WholeRows {
  using In = T;
  using Out = O;
  static constexpr int kWordThreads = 1024 / kBlocks, kWordBlocks = kBlocks, kPieceBlocks = 5, kVectors = 2;

  FRIT_DEVICE static void write_zeros(const Sums<T, O>& a, int32_t key) {
    constexpr int kN = kVecOf<O>;
    const Global<O> row = a.out + key * a.out_stride;
    FRIT_UNROLL_BY(4)
    for (int column = lane() * kN; column < a.columns; column += kWarpSize * kN)
      store_vec<kN, Cache::kStream>(row, column, Vec<O, kN>{});
  }
  template <bool kPiece>
  FRIT_DEVICE static void sum(const Sums<T, O>& a, int32_t tokens, int count, int32_t key,
                              const Global<float>& partial) {
    const int vectors = a.columns / 8;
    if constexpr (kPiece) return sum_piece(a, tokens, count, partial);
    const uint32_t threshold = dropout_threshold(a.dropout);
    const float factor = a.dropout.scale * a.scale;
    if (count == 1) return write_one(a, shuffle(tokens, 0), key, threshold, factor);
    int first = lane(), i = 0;
    Vec<T, 8> v[kVectors];
    const auto fetch = [&] {
      const Global<const T> row = a.dy + shuffle(tokens, i) * a.dy_stride;
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        v[k] = Vec<T, 8>{};
        if (first + k * kWarpSize < vectors) v[k] = load_vec<8, Cache::kStream>(row, (first + k * kWarpSize) * 8);
      }
    };
    fetch();
    Vec<float, 8> sum[kVectors] = {};
    FRIT_UNROLL_BY(1)
    while (first - lane() < vectors) {
      // The next vectors are on their way while these are added.
      const Vec<T, 8> x[kVectors] = {v[0], v[1]};
      const uint32_t t = static_cast<uint32_t>(shuffle(tokens, i)), group = static_cast<uint32_t>(first);
      const int at = first;
      const bool last = ++i == count;
      if (last) i = 0, first += kWarpSize * kVectors;
      if (first - lane() < vectors) fetch();
      const DropoutWords<2> words = dropout_words<2>(a.dropout, {t, t}, {group, group + kWarpSize});
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        FRIT_UNROLL
        for (int c = 0; c < 8; ++c)
          if (words.kept(k, c, threshold)) sum[k][c] += widen(static_cast<T>(x[k][c]));
      }
      if (!last) continue;
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        const int column = (at + k * kWarpSize) * 8;
        if (column >= a.columns) continue;
        FRIT_UNROLL
        for (int c = 0; c < 8; ++c) sum[k][c] *= factor;
        const Global<O> out = a.out + key * a.out_stride;
        if (a.accumulate) {
          constexpr int kOut = kVecOf<O>;
          FRIT_UNROLL
          for (int c = 0; c < 8; c += kOut) {
            const Vec<O, kOut> before = load_vec<kOut>(out, column + c);
            FRIT_UNROLL
            for (int j = 0; j < kOut; ++j) sum[k][c + j] += widen(static_cast<O>(before[j]));
          }
        }
        write(out, column, sum[k]);
      }
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) sum[k] = Vec<float, 8>{};
    }
  }

 private:
  // The row of a word with one token: nothing is summed, and half of registers are free for more vectors.
  FRIT_DEVICE static void write_one(const Sums<T, O>& a, int32_t token, int32_t key, uint32_t threshold, float factor) {
    constexpr int kOut = kVecOf<O>, kMany = 4, kStep = kWarpSize * 8;
    FRIT_UNROLL_BY(1)
    for (int column = lane() * 8; column - lane() * 8 < a.columns; column += kMany * kStep) {
      const Global<const T> row = a.dy + (token * a.dy_stride + column);
      const Global<O> out = a.out + (key * a.out_stride + column);
      Vec<T, 8> x[kMany] = {};
      FRIT_UNROLL
      for (int k = 0; k < kMany; ++k)
        if (column + k * kStep < a.columns) x[k] = load_vec<8, Cache::kStream>(row, k * kStep);
      const uint32_t t = static_cast<uint32_t>(token);
      FRIT_UNROLL
      for (int k = 0; k < kMany; k += 2) {
        const uint32_t group = opaque(static_cast<uint32_t>(column) / 8 + static_cast<uint32_t>(k * kWarpSize));
        const DropoutWords<2> words = dropout_words<2>(a.dropout, {t, t}, {group, group + kWarpSize});
        FRIT_UNROLL
        for (int j = 0; j < 2; ++j) {
          if (column + (k + j) * kStep >= a.columns) continue;
          Vec<float, 8> y;
          FRIT_UNROLL
          for (int c = 0; c < 8; ++c)
            y[c] = words.kept(j, c, threshold) ? widen(static_cast<T>(x[k + j][c])) * factor : 0.0f;
          if (a.accumulate) {
            FRIT_UNROLL
            for (int c = 0; c < 8; c += kOut) {
              const Vec<O, kOut> before = load_vec<kOut>(out, (k + j) * kStep + c);
              FRIT_UNROLL
              for (int i = 0; i < kOut; ++i) y[c + i] += widen(static_cast<O>(before[i]));
            }
          }
          write(out, (k + j) * kStep, y);
        }
      }
    }
  }
  // The rows of a piece are few and far apart, and there are few pieces: kAhead of them are on their way at a time.
  FRIT_DEVICE static void sum_piece(const Sums<T, O>& a, int32_t tokens, int count, const Global<float>& partial) {
    constexpr int kAhead = 4;
    const int vectors = a.columns / 8;
    const uint32_t threshold = dropout_threshold(a.dropout);
    FRIT_UNROLL_BY(1)
    for (int first = lane(); first - lane() < vectors; first += kWarpSize * kVectors) {
      Vec<float, 8> sum[kVectors] = {};
      const uint32_t group = static_cast<uint32_t>(first);
      FRIT_UNROLL_BY(1)
      for (int i = 0; i < count; i += kAhead) {
        Vec<T, 8> x[kAhead][kVectors];
        FRIT_UNROLL
        for (int j = 0; j < kAhead; ++j) {
          const Global<const T> row = a.dy + shuffle(tokens, i + j < count ? i + j : i) * a.dy_stride;
          FRIT_UNROLL
          for (int k = 0; k < kVectors; ++k) {
            const int at = first + k * kWarpSize;
            x[j][k] = Vec<T, 8>{};
            if (i + j < count && at < vectors) x[j][k] = load_vec<8, Cache::kStream>(row, at * 8);
          }
        }
        FRIT_UNROLL
        for (int j = 0; j < kAhead; ++j) {
          if (i + j >= count) break;
          const uint32_t t = static_cast<uint32_t>(shuffle(tokens, i + j));
          const DropoutWords<2> words = dropout_words<2>(a.dropout, {t, t}, {group, group + kWarpSize});
          FRIT_UNROLL
          for (int k = 0; k < kVectors; ++k) {
            FRIT_UNROLL
            for (int c = 0; c < 8; ++c)
              sum[k][c] += words.kept(k, c, threshold) ? widen(static_cast<T>(x[j][k][c])) : 0.0f;
          }
        }
      }
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        if (first + k * kWarpSize >= vectors) continue;
        FRIT_UNROLL
        for (int c = 0; c < 8; ++c) sum[k][c] *= a.dropout.scale;
        write(partial, (first + k * kWarpSize) * 8, sum[k]);
      }
    }
  }
  template <typename To>
  FRIT_DEVICE static void write(const Global<To>& to, int column, const Vec<float, 8>& x) {
    if constexpr (sizeof(To) == 2) {
      store_vec<8, Cache::kStream>(to, column, from_float<To>(x));
    } else {
      store_vec<4, Cache::kStream>(to, column, Vec<float, 4>{x[0], x[1], x[2], x[3]});
      store_vec<4, Cache::kStream>(to, column + 4, Vec<float, 4>{x[4], x[5], x[6], x[7]});
    }
  }
};

constexpr int kFinishPieces = kWarpSize, kFinishColumns = kWarpSize * 4;

// Adds the partial rows of each long run: a block looks at kFinishPieces pieces and, for every run that begins in one
// of them, adds kFinishColumns columns. A warp adds all of a run of up to 8 partial rows, in order, while others add
// those of other runs; of more, warp w those of w, w + 8, ..., then the warps' sums are added in order.
template <typename T, typename O>
FRIT_KERNEL(kThreads, 4)
embedding_backward_finish_kernel(Sums<T, O> a) {
  let_next_start();
  wait_for_previous();
  constexpr int kAhead = 8;
  const int64_t groups = (a.pieces + kFinishPieces - 1) / kFinishPieces;
  const int64_t first = block_index() % groups * kFinishPieces;
  const int column = static_cast<int>(block_index() / groups) * kFinishColumns + lane() * 4;
  const auto scratch = shared_array<float>(0);  // [warp][column]
  Vec<int32_t, 2> run = {-1, 0};  // key and number of partial rows of the run that begins in the lane's piece
  if (first + lane() < a.pieces) run = load_vec<2>(a.runs, 4 * (first + lane()) + 2);
  const auto sum_of = [&](int64_t piece, int count, int from, int step) {
    Vec<float, 4> sum = {};
    for (int i = from; i < count; i += kAhead * step) {
      Vec<float, 4> part[kAhead];
      FRIT_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const int at = i + k * step;
        const int64_t slot = 2 * (piece + at) + (at == 0);
        part[k] = at < count ? load_vec<4>(a.partials + slot * a.partials_stride, column) : Vec<float, 4>{};
      }
      FRIT_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        FRIT_UNROLL
        for (int j = 0; j < 4; ++j) sum[j] += part[k][j];
      }
    }
    return sum;
  };
  const auto write = [&](int32_t row, Vec<float, 4> sum) {
    const Global<O> out = a.out + row * a.out_stride;
    const Vec<O, 4> before = a.accumulate ? load_span<4>(out, column, a.columns, O()) : Vec<O, 4>{};
    FRIT_UNROLL
    for (int j = 0; j < 4; ++j) sum[j] = sum[j] * a.scale + (a.accumulate ? widen(static_cast<O>(before[j])) : 0.0f);
    store_span<4>(out, column, a.columns, from_float<O>(sum));
  };
  int turn = 0;
  FRIT_UNROLL_BY(1)
  for (uint32_t runs = ballot(run[0] >= 0); runs != 0; runs &= runs - 1) {
    const int which = find_first_set(runs) - 1;
    const int32_t row = shuffle(run[0], which), count = shuffle(run[1], which);
    if (count <= kWarps) {
      if (turn++ % kWarps == warp() && column < a.columns) write(row, sum_of(first + which, count, 0, 1));
      continue;
    }
    Vec<float, 4> sum = {};
    if (column < a.columns) {
      sum = sum_of(first + which, count, warp(), kWarps);
      store_vec<4>(scratch, warp() * kFinishColumns + lane() * 4, sum);
    }
    barrier();
    if (warp() == 0 && column < a.columns) {
      for (int w = 1; w < kWarps; ++w) {
        const Vec<float, 4> other = load_vec<4>(scratch, w * kFinishColumns + lane() * 4);
        FRIT_UNROLL
        for (int j = 0; j < 4; ++j) sum[j] += other[j];
      }
      write(row, sum);
    }
    barrier();  // scratch is free again
  }
}

// Vectors of 16 bytes that a lane of forward takes of a row at a time, by instance; the last one is for rows that are
// no whole vectors.
constexpr int kVectorsOf[] = {2, 4};
constexpr int kShifted = 2;
constexpr const char* kInstances[] = {"2_vectors", "4_vectors", "shifted"};

// Blocks of backward's first launch; 128 have twice the threads.
constexpr const char* kBackwardInstances[] = {"blocks_256", "blocks_128"};

// f(std::integral_constant<int, vectors>()) of instance i.
template <typename F>
void with_vectors(int i, F&& f) {
  if (i == 0)
    f(std::integral_constant<int, kVectorsOf[0]>());
  else
    f(std::integral_constant<int, kVectorsOf[1]>());
}

// Are all rows whole vectors of 16 bytes, aligned?
bool whole_vectors(const Tensor& t) {
  const int64_t size = size_of(t.dtype());
  return reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0 && t.row_stride() * size % 16 == 0 && t.dim(1) * size % 16 == 0;
}

// out[k] (+)= scale * sum over tokens with key k of mask/keep * dy.
void sum_by_key(Context& context, const Keys& keys, const Tensor& dy, const Dropout& dropout, float scale,
                bool accumulate, const Tensor& out, bool few) {
  const int64_t tokens = keys.tokens, columns = dy.dim(1), pieces = (tokens + kEmbeddingPiece - 1) / kEmbeddingPiece;
  const int64_t partials_stride = (columns + 3) / 4 * 4;
  Buffer order = context.allocate({tokens}, DType::kI32, "embedding.order");
  Buffer runs = context.allocate({pieces, 4}, DType::kI32, "embedding.runs");
  Buffer partials = context.allocate({2 * pieces, partials_stride}, DType::kF32, "embedding.partials");
  // As much as looking through the tokens leaves time for.
  const int64_t fetch = dy.contiguous() ? std::min<int64_t>(dy.bytes(), 16 << 20) : 0;
  const int32_t bits = word_bits(keys.count, few);
  const bool aligned = whole_vectors(dy) && whole_vectors(out), shifted = shifts(dy) && shifts(out);
  dispatch_float(dy.dtype(), [&]<typename T>(T) {
    const auto run = [&]<typename O>(O) {
      const Sums<T, O> a{keys,
                         global<int32_t>(order),
                         global<int32_t>(runs),
                         global<const T>(dy),
                         global<O>(out),
                         global<float>(partials),
                         dy.row_stride(),
                         out.row_stride(),
                         pieces,
                         fetch,
                         bits,
                         static_cast<int32_t>((keys.count + (int64_t{1} << bits) - 1) >> bits),
                         static_cast<int32_t>(columns),
                         static_cast<int32_t>(partials_stride),
                         scale,
                         accumulate,
                         DropoutTable(dropout)};
      if constexpr (sizeof(T) == 2) {
        if (aligned && few)
          launch_sums<WholeRows<T, O, 1>>(context, a);
        else if (aligned)
          launch_sums<WholeRows<T, O, 2>>(context, a);
      } else if (aligned) {
        launch_sums<AnyRows<T, O, true>>(context, a);
      }
      if constexpr (std::is_same_v<T, O> && sizeof(T) == 2) {
        if (shifted) start_embedding_backward_shifted(context, a, few);
      }
      if (!aligned && (!shifted || !std::is_same_v<T, O> || sizeof(T) != 2))
        launch_sums<AnyRows<T, O, false>>(context, a);
      launch(context, "embedding_backward_finish_kernel", embedding_backward_finish_kernel<T, O>,
             {(pieces + kFinishPieces - 1) / kFinishPieces * ((columns + kFinishColumns - 1) / kFinishColumns),
              kThreads, kWarps * kFinishColumns * static_cast<int64_t>(sizeof(float))},
             a);
    };
    if (out.dtype() == DType::kF32)
      run(float());
    else if constexpr (sizeof(T) == 2)
      run(T());
  });
}

}  // namespace

void embedding_forward_gpu(Context& context, const EmbeddingArgs& args, const Tensor& y) {
  if (y.numel() == 0) return;
  const bool placed = args.positions.defined();
  const bool shifted = shifts(y) && shifts(args.table) && (!placed || shifts(args.positions));
  const bool aligned = whole_vectors(y) && whole_vectors(args.table) && (!placed || whole_vectors(args.positions));
  const int instance =
      choose_instance(context, "embedding_forward", fmt::format("{}x{}", y.dim(1), size_of(y.dtype())), kInstances,
                      shifted ? kShifted : 0, [&](int i) { return i != kShifted || shifted; });
  dispatch_float(y.dtype(), [&]<typename T>(T) {
    const Lookup<T> a{global<const int32_t>(args.ids),
                      global<const int32_t>(args.offsets),
                      global<const int32_t>(args.position_ids),
                      global<const T>(args.table),
                      global<const T>(args.positions),
                      global<T>(y),
                      y.dim(0),
                      args.table.row_stride(),
                      placed ? args.positions.row_stride() : 0,
                      y.row_stride(),
                      args.position_offset,
                      placed ? args.positions.dim(0) : 0,
                      static_cast<int32_t>(args.table.dim(0)),
                      args.offsets.defined() ? static_cast<int32_t>(args.offsets.dim(0) - 1) : 0,
                      static_cast<int32_t>(y.dim(1)),
                      args.scale,
                      y.numel() * size_of(y.dtype()) > int64_t{16} << 20,
                      DropoutTable(args.dropout)};
    if constexpr (sizeof(T) == 2) {
      if (instance == kShifted) return start_embedding_forward_shifted(context, a);
    }
    constexpr int64_t kBlock = kWarps * kEmbeddingTokens;
    with_vectors(instance, [&](auto vectors) {
      launch(context, "embedding_forward_rows_per_warp_kernel",
             aligned ? embedding_forward_rows_per_warp_kernel<T, vectors.value, true>
                     : embedding_forward_rows_per_warp_kernel<T, vectors.value, false>,
             {(y.dim(0) + kBlock - 1) / kBlock, kThreads}, a);
    });
  });
}

void embedding_backward_gpu(Context& context, const EmbeddingArgs& args, const Tensor& dy, int64_t pad_id,
                            bool accumulate, const Tensor& dtable, const Tensor& dpositions) {
  const int64_t tokens = dy.dim(0);
  if (dy.dim(1) == 0) return;
  const int fallback = shifts(dy) && shifts(dtable) ? 1 : 0;
  const bool few = choose_instance(context, "embedding_backward", fmt::format("{}x{}", dy.dim(1), size_of(dy.dtype())),
                                   kBackwardInstances, fallback, [](int) { return true; }) == 1;
  Keys keys{global<const int32_t>(args.ids),
            global<const int32_t>(args.offsets),
            tokens,
            args.offsets.defined() ? static_cast<int32_t>(args.offsets.dim(0) - 1) : 0,
            static_cast<int32_t>(dtable.dim(0)),
            static_cast<int32_t>(pad_id)};
  sum_by_key(context, keys, dy, args.dropout, args.scale, accumulate, dtable, few);
  if (!dpositions.defined()) return;
  keys.count = static_cast<int32_t>(dpositions.dim(0)), keys.skipped = -1;
  Buffer positions;
  if (args.position_ids.defined()) {
    keys.keys = global<const int32_t>(args.position_ids);
  } else {
    positions = context.allocate({tokens}, DType::kI32, "embedding.positions");
    keys.keys = global<const int32_t>(positions);
    launch(context, "embedding_backward_positions_kernel", embedding_backward_positions_kernel,
           {(tokens + kThreads - 1) / kThreads, kThreads}, global<const int32_t>(args.offsets), keys.sequences, tokens,
           args.position_offset, global<int32_t>(positions));
  }
  sum_by_key(context, keys, dy, args.dropout, 1.0f, accumulate, dpositions, few);
}

}  // namespace frit
