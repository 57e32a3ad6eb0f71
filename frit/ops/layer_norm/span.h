// The vectors of a row that one warp holds where they lie: whole aligned ones at any width. Included by kernels alone.
#pragma once
#include "frit/simt/simt.h"

namespace frit::row_span {

using namespace simt;

// How a row is shared out: lane l of the row's warp number `part` takes as vector k the row's
// ((part * K + k) * 32 + l)-th vector of 16 bytes, counted from the last multiple of 16 bytes at or before the row's
// beginning. Rows of which every period-th is taken begin equally far (`shift` elements) past such a multiple, so that
// a thread's columns are the same in each of them.
template <typename T, int K>
struct Span {
  static constexpr int kN = kVecOf<T>, kWarp = 32 * kN;
  int first = 0;  // column of the warp's first element; below 0 where it lies before the row
  int cols = 0;

  FRIT_DEVICE Span(int part, int shift, int columns) : first(part * K * kWarp - shift), cols(columns) {}
  FRIT_DEVICE int column(int k) const { return first + k * kWarp + lane() * kN; }
  // Of the warp's vectors k: are there any, and do all of them lie inside? The same in all lanes.
  FRIT_DEVICE bool any(int k) const { return first + k * kWarp < cols; }
  FRIT_DEVICE bool whole(int k) const { return first + k * kWarp >= 0 && first + (k + 1) * kWarp <= cols; }
  // Columns inside among the warp's first `count` vectors a lane.
  FRIT_DEVICE int columns(int count) const {
    const int end = first + count * kWarp < cols ? first + count * kWarp : cols, begin = first > 0 ? first : 0;
    return end > begin ? end - begin : 0;
  }
  // Which of the lane's elements of vector k lie inside, a bit each.
  FRIT_DEVICE uint32_t inside(int k) const {
    const int c = column(k), before = c < 0 ? (-c < kN ? -c : kN) : 0, behind = cols - c < 0 ? 0 : cols - c;
    const uint32_t low = behind >= kN ? (1u << kN) - 1 : (1u << behind) - 1;
    return low & ~((1u << before) - 1);
  }
};

// The elements at a row's ends that fill no vector: those before the first whole one (lanes 0 to N - 1 move one each)
// and those behind the last (lanes N to 2 N - 1).
template <typename T, int K>
struct Ends {
  static constexpr int kN = kVecOf<T>;
  using Words = Vec<uint32_t, 4>;
  bool head, tail;  // has the warp such elements?
  int tail_vector, tail_lane;
  int column = -1;  // of the element that this lane moves; -1: none

  FRIT_DEVICE Ends(const Span<T, K>& span, int part, int shift) {
    const int last = (span.cols + shift) / kN, left = (span.cols + shift) % kN;
    head = part == 0 && shift > 0;
    tail = left > 0 && !(last == 0 && shift > 0) && last / (32 * K) == part;
    tail_vector = last / 32 % K, tail_lane = last % 32;
    const int i = lane() % kN;
    if (head && lane() < kN && i >= shift && i - shift < span.cols) column = i - shift;
    if (tail && lane() >= kN && lane() < 2 * kN && i < left) column = last * kN + i - shift;
  }
  template <Cache cache>
  FRIT_DEVICE T load_one(const Global<const T>& row) const {
    return column >= 0 ? load<cache>(row, column) : T();
  }
  // Puts them in their places. All lanes of the warp take part. Cost: 9 shuffles, 8 with 32-bit elements.
  FRIT_DEVICE void place(T one, Vec<T, kN> (&v)[K]) const {
    if (!head && !tail) return;
    uint32_t word;
    if constexpr (sizeof(T) == 2)
      word = one.bits | shuffle_down(static_cast<uint32_t>(one.bits), 1) << 16;
    else
      word = std::bit_cast<uint32_t>(one);
    const auto words_from = [&](int first) {
      Words w;
      FRIT_UNROLL
      for (int i = 0; i < 4; ++i) w[i] = shuffle(word, first + i * kN / 4);
      return std::bit_cast<Vec<T, kN>>(w);
    };
    if (head) {
      const Vec<T, kN> w = words_from(0);
      if (lane() == 0) v[0] = w;
    }
    if (tail) {
      const Vec<T, kN> w = words_from(kN);
      FRIT_UNROLL
      for (int k = 0; k < K; ++k)
        if (k == tail_vector && lane() == tail_lane) v[k] = w;
    }
  }
  // Takes vector k's part of them out of their places into `one`; all vectors must be shown, in any order.
  FRIT_DEVICE void take(int k, const Vec<T, kN>& v, T& one) const {
    const auto pick = [&](int from) {
      const Words w = std::bit_cast<Words>(v);
      Words all;
      FRIT_UNROLL
      for (int i = 0; i < 4; ++i) all[i] = shuffle(w[i], from);
      const int i = lane() % kN, at = i * 4 / kN;
      const uint32_t word = at & 2 ? (at & 1 ? all[3] : all[2]) : (at & 1 ? all[1] : all[0]);
      if constexpr (sizeof(T) == 2)
        return T::from_bits(static_cast<uint16_t>(word >> (16 * (i % 2))));
      else
        return std::bit_cast<T>(word);
    };
    if (k == 0 && head) {
      const T picked = pick(0);
      if (lane() < kN) one = picked;
    }
    if (k == tail_vector && tail) {
      const T picked = pick(tail_lane);
      if (lane() >= kN) one = picked;
    }
  }
};

// Starts to load the warp's vectors of a row that lies as `span` says; place(one) must follow before they are used.
// What lies outside of the row is 0.
template <Cache cache, typename T, int K, int N>
FRIT_DEVICE void start_span(const Span<T, K>& span, const Ends<T, K>& ends, const Global<const T>& row,
                            Vec<T, N> (&v)[K], T& one) {
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    const int c = span.column(k);
    if (c >= 0 && c + N <= span.cols)
      v[k] = load_vec<N, cache>(row, c);
    else
      v[k] = Vec<T, N>{};
  }
  one = ends.template load_one<cache>(row);
}
// The same of rows that are whole aligned vectors.
template <Cache cache, typename T, int K, int N>
FRIT_DEVICE void load_whole(const Span<T, K>& span, const Global<const T>& row, Vec<T, N> (&v)[K]) {
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    v[k] = Vec<T, N>{};
    if (span.column(k) < span.cols) v[k] = load_vec<N, cache>(row, span.column(k));
  }
}
// The same from rows that may lie otherwise: element by element.
template <Cache cache, typename T, int K, int N>
FRIT_DEVICE void load_elements(const Span<T, K>& span, const Global<const T>& row, Vec<T, N> (&v)[K]) {
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) v[k] = load_span<N, cache>(row, span.column(k), span.cols, T());
}
// Writes the whole vectors; the rest goes through Ends::take and store_one.
template <Cache cache, typename T, int K, int N>
FRIT_DEVICE void store_whole(const Span<T, K>& span, const Global<T>& row, int k, const Vec<T, N>& v) {
  const int c = span.column(k);
  if (c >= 0 && c + N <= span.cols) store_vec<N, cache>(row, c, v);
}

// A block's copy in shared memory, as fp32, of a vector of `cols` columns, for rows that lie `shift` elements past a
// multiple of 16 bytes: floats i, ..., i + 3 of vector j at [i / 4][j][4], so that lanes use neighbouring banks.
// `vectors` is the number of vectors the block's warps hold of a row.
template <typename T>
FRIT_DEVICE void spread_vector(const Global<const T>& from, int cols, int shift, int vectors, const Shared<float>& to) {
  constexpr int N = kVecOf<T>;
  for (int j = thread_index(); j < vectors; j += thread_count()) {
    const Vec<float, N> v = to_float(load_span<N, Cache::kReadOnly>(from, j * N - shift, cols, T()));
    FRIT_UNROLL
    for (int i = 0; i < N; i += 4)
      store_vec<4>(to, (i / 4 * vectors + j) * 4, Vec<float, 4>{{v[i], v[i + 1], v[i + 2], v[i + 3]}});
  }
}
template <int N>
FRIT_DEVICE Vec<float, N> spread_at(const Shared<float>& from, int vectors, int j) {
  Vec<float, N> v;
  FRIT_UNROLL
  for (int i = 0; i < N; i += 4) {
    const Vec<float, 4> part = load_vec<4>(from, (i / 4 * vectors + j) * 4);
    FRIT_UNROLL
    for (int k = 0; k < 4; ++k) v[i + k] = part[k];
  }
  return v;
}

// Keeps of vectors nothing but their elements: what was computed from them is computed again.
template <typename T, int N, int K>
FRIT_DEVICE void keep_packed(Vec<T, N> (&v)[K]) {
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    Vec<uint32_t, 4> words = std::bit_cast<Vec<uint32_t, 4>>(v[k]);
    FRIT_UNROLL
    for (int w = 0; w < 4; ++w) words[w] = opaque(words[w]);
    v[k] = std::bit_cast<Vec<T, N>>(words);
  }
}

}  // namespace frit::row_span
