// Rows of 16-bit elements at any width and alignment, held by a warp as if they began at a multiple of 16 bytes: lane l
// owns as vector k the columns [(k * 32 + l) * 8, + 8). Memory is read and written in whole aligned vectors all the
// same, and the elements at a row's ends, one a lane, in one access: the vectors are brought to the row's place by
// shifts of words, with a branch over the 8 places that is the same in all lanes. Cost: about 8 instructions a vector
// and 30 a row, each way; nothing but a branch where the row begins at a multiple of 16 bytes.
//
// One column more than the warp's vectors hold, the `rest`, may belong to it: lane 0 has it.
#pragma once
#include "frit/simt/simt.h"

namespace frit::simt {

using RaggedWords = Vec<uint32_t, 4>;

namespace detail {

// Where a row of n columns lies in memory: as vectors of which the first begins `shift` columns before it.
struct RaggedPlace {
  int shift, columns;
  int last, count;   // the vector that holds the row's end, and the elements of the row from its beginning on
  bool head, tail;   // do elements before the first whole vector, behind the last one move one by one?
  int column = -1;   // that this lane moves: lanes 0 to 7 those of the head, 8 to 15 those of the tail; -1: none

  // V: vectors of a lane.
  template <int V, typename T>
  FRIT_DEVICE static RaggedPlace of(const Global<T>& row, int columns) {
    RaggedPlace p;
    p.shift = row_shift(row), p.columns = columns;
    p.last = (columns + p.shift - 1) / 8, p.count = columns + p.shift - p.last * 8;
    p.head = p.shift > 0 && columns > 0;
    p.tail = columns > 0 && (p.count < 8 || p.last == 32 * V) && !(p.head && p.last == 0);
    const int i = lane() & 7;
    if (p.head && lane() < 8 && i >= p.shift && i - p.shift < columns) p.column = i - p.shift;
    if (p.tail && lane() >= 8 && lane() < 16 && i < p.count) p.column = p.last * 8 + i - p.shift;
    return p;
  }
  // First column of the lane's k-th vector in memory, and: do all its columns lie in the row?
  FRIT_DEVICE int first(int k) const { return (k * 32 + lane()) * 8 - shift; }
  FRIT_DEVICE bool whole(int k) const { return (k > 0 || first(0) >= 0) && first(k) + 8 <= columns; }
};

// Calls f with i as a constant, i in [1, 8).
template <typename F>
FRIT_DEVICE void with_shift(int i, F&& f) {
  if (i < 4) {
    if (i == 1)
      f(std::integral_constant<int, 1>());
    else if (i == 2)
      f(std::integral_constant<int, 2>());
    else
      f(std::integral_constant<int, 3>());
  } else if (i < 6) {
    if (i == 4)
      f(std::integral_constant<int, 4>());
    else
      f(std::integral_constant<int, 5>());
  } else {
    if (i == 6)
      f(std::integral_constant<int, 6>());
    else
      f(std::integral_constant<int, 7>());
  }
}

// Elements [from, from + 8) of the 16 in words.
template <int from>
FRIT_DEVICE RaggedWords funnel(const uint32_t (&words)[8]) {
  RaggedWords r;
  FRIT_UNROLL
  for (int w = 0; w < 4; ++w) {
    if constexpr (from % 2 == 0)
      r[w] = words[from / 2 + w];
    else
      r[w] = words[from / 2 + w] >> 16 | words[from / 2 + w + 1] << 16;
  }
  return r;
}

}  // namespace detail

// The first `count` elements of an aligned vector, of which there are no more; 0 behind them. Cost: at most 3 accesses.
template <Cache cache, typename T>
FRIT_DEVICE Vec<T, 8> first_of_vector(const Global<const T>& at, int count) {
  if (count >= 8) return load_vec<8, cache>(at, 0);
  Vec<T, 8> v{};
  if (count <= 0) return v;
  Vec<T, 4> four{};
  uint32_t pair = 0, one = 0;
  if (count & 4) four = load_vec<4, cache>(at, 0);
  if (count & 2) pair = load_vec<2, cache>(at, count & 4).pairs[0];
  if (count & 1) one = load<cache>(at, count & 6).bits;
  const uint32_t low = count & 2 ? pair : one, high = count & 2 ? one : 0;
  v.pairs[0] = count & 4 ? four.pairs[0] : low, v.pairs[1] = count & 4 ? four.pairs[1] : high;
  v.pairs[2] = count & 4 ? low : 0, v.pairs[3] = count & 4 ? high : 0;
  return v;
}

// A warp's row, or its part of one, on its way from memory. start(), then other loads may start, then finish().
template <typename T, int V>
class RaggedLoad {
 public:
  // columns: at most 256 V + 1; none: nothing is read. Cost: every element is read once.
  template <Cache cache>
  FRIT_DEVICE void start(const Global<const T>& row, int columns, T fill, Vec<T, 8> (&v)[V]) {
    at_ = detail::RaggedPlace::template of<V>(row, columns);
    fill_ = static_cast<uint32_t>(fill.bits) * 0x10001u;
    const Global<const T> mine = row + at_.first(0);
    FRIT_UNROLL
    for (int k = 0; k < V; ++k) {
      FRIT_UNROLL
      for (int w = 0; w < 4; ++w) v[k].pairs[w] = fill_;
      if (at_.whole(k)) v[k] = load_vec<8, cache>(mine, k * 256);
    }
    one_ = at_.column >= 0 ? load<cache>(row, at_.column) : fill;
  }
  // Puts all columns in their places, and `fill` where the row has none; column 256 V, or fill, in lane 0's rest. All
  // lanes of the warp take part. Cost: up to 9 shuffles, and 2 a vector on average unless the row is aligned.
  FRIT_DEVICE void finish(Vec<T, 8> (&v)[V], T& rest) const {
    const uint32_t mine = one_.bits, word = mine | shuffle_down(mine, 1) << 16;
    const auto gathered = [&](int from) {
      Vec<T, 8> words;
      FRIT_UNROLL
      for (int w = 0; w < 4; ++w) words.pairs[w] = shuffle(word, from + 2 * w);
      return words;
    };
    Vec<T, 8> behind;  // lane 0's vector V
    FRIT_UNROLL
    for (int w = 0; w < 4; ++w) behind.pairs[w] = fill_;
    if (at_.head) {
      const Vec<T, 8> words = gathered(0);
      if (lane() == 0) v[0] = words;
    }
    if (at_.tail) {
      const Vec<T, 8> words = gathered(8);
      const int slot = at_.last / 32, owner = at_.last % 32;
      FRIT_UNROLL
      for (int k = 0; k < V; ++k)
        if (k == slot && lane() == owner) v[k] = words;
      if (V == slot) behind = words;
    }
    rest = behind[0];
    if (at_.shift == 0) return;
    detail::with_shift(at_.shift, [&](auto shift) {
      // The words of the next vector that are needed come from the next lane, lane 31's from lane 0's next one.
      constexpr int kNeeded = (shift + 1) / 2;
      rest = behind[shift];
      FRIT_UNROLL
      for (int k = 0; k < V; ++k) {
        uint32_t words[8] = {};
        FRIT_UNROLL
        for (int w = 0; w < 4; ++w) words[w] = v[k].pairs[w];
        FRIT_UNROLL
        for (int w = 0; w < kNeeded; ++w) {
          const uint32_t next = k + 1 < V ? v[k + 1 < V ? k + 1 : k].pairs[w] : behind.pairs[w];
          words[4 + w] = shuffle(lane() == 0 ? next : v[k].pairs[w], (lane() + 1) & 31);
        }
        const RaggedWords moved = detail::funnel<shift>(words);
        FRIT_UNROLL
        for (int w = 0; w < 4; ++w) v[k].pairs[w] = moved[w];
      }
    });
  }

 private:
  detail::RaggedPlace at_;
  uint32_t fill_;
  T one_;
};

// Writes a warp's row, or its part of one: the columns a RaggedLoad would put there. All lanes of the warp take part;
// the row may be one that the warp has read. Cost: every element is written once; up to 8 shuffles, and 2.5 a vector on
// average unless the row is aligned.
template <Cache cache, typename T, int V>
FRIT_DEVICE void ragged_store(const Global<T>& row, int columns, Vec<T, 8> (&v)[V], T rest) {
  const auto at = detail::RaggedPlace::template of<V>(row, columns);
  const int slot = at.last / 32, owner = at.last % 32;
  Vec<T, 8> behind;  // lane 0's vector V
  FRIT_UNROLL
  for (int w = 0; w < 4; ++w) behind.pairs[w] = rest.bits;
  warp_barrier();  // other lanes have read what this one writes
  if (at.shift > 0) {
    detail::with_shift(at.shift, [&](auto shift) {
      constexpr int kFrom = 8 - shift, kFirst = kFrom / 2;  // of the vector before
      uint32_t last[4] = {};                                // lane 0: what lane 31's vector before has
      FRIT_UNROLL
      for (int k = 0; k <= V; ++k) {
        if (k == V && slot < V) continue;
        uint32_t words[8] = {};
        FRIT_UNROLL
        for (int w = 0; w < 4; ++w) words[4 + w] = k < V ? v[k < V ? k : 0].pairs[w] : behind.pairs[w];
        FRIT_UNROLL
        for (int w = kFirst; w < 4; ++w) {
          // Lane 0 gets lane 31's word of this vector, which it needs for the next one.
          const uint32_t before = k < V ? shuffle(words[4 + w], (lane() + 31) & 31) : 0u;
          words[w] = lane() == 0 ? last[w] : before;
          last[w] = before;
        }
        const RaggedWords moved = detail::funnel<kFrom>(words);
        FRIT_UNROLL
        for (int w = 0; w < 4; ++w) (k < V ? v[k < V ? k : 0] : behind).pairs[w] = moved[w];
      }
    });
  }
  const Global<T> mine = row + at.first(0);
  FRIT_UNROLL
  for (int k = 0; k < V; ++k)
    if (at.whole(k)) store_vec<8, cache>(mine, k * 256, v[k]);
  if (!at.head && !at.tail) return;
  // A pair of lanes gets each word, and each lane its half.
  const int w = lane() / 2 % 4;
  uint32_t word = 0;
  const auto spread = [&](const Vec<T, 8>& from, int source) {
    uint32_t all[4];
    FRIT_UNROLL
    for (int i = 0; i < 4; ++i) all[i] = shuffle(from.pairs[i], source);
    return w & 2 ? (w & 1 ? all[3] : all[2]) : (w & 1 ? all[1] : all[0]);
  };
  if (at.head) word = spread(v[0], 0);
  if (at.tail) {
    FRIT_UNROLL
    for (int k = 0; k <= V; ++k) {
      if (k != slot) continue;
      const uint32_t words = spread(k < V ? v[k < V ? k : 0] : behind, owner);
      if (lane() >= 8) word = words;
    }
  }
  if (at.column >= 0)
    store<cache>(row, at.column, T::from_bits(static_cast<uint16_t>(lane() & 1 ? word >> 16 : word)));
}

}  // namespace frit::simt
