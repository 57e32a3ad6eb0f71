// Rows of 16-bit elements at any width and alignment, held by a warp as if they began at a multiple of 16 bytes: lane l
// owns as vector k the columns [(k * 32 + l) * 8, + 8), as far as there are 8, and up to 7 columns left over lie in
// lanes 8 to 14, one each: the `rest`. Memory is read and written in whole aligned vectors all the same. A row that
// begins `shift` elements past a multiple of 16 bytes has 8 - shift elements before the first of these, and `shift`
// behind the last: 8 in all, which lanes 0 to 7 move in the same access as the rest. The vectors are brought to the
// row's place by shifts of words, with a branch over the 8 places that is the same in all lanes. Cost: 8 instructions a
// vector on average, and 30 a row, each way.
#pragma once
#include "frit/simt/simt.h"

namespace frit::simt {

namespace detail {

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
template <int from, typename T>
FRIT_DEVICE Vec<T, 8> funnel(const uint32_t (&words)[8]) {
  Vec<T, 8> r;
  FRIT_UNROLL
  for (int w = 0; w < 4; ++w) {
    if constexpr (from % 2 == 0)
      r.pairs[w] = words[from / 2 + w];
    else
      r.pairs[w] = words[from / 2 + w] >> 16 | words[from / 2 + w + 1] << 16;
  }
  return r;
}

}  // namespace detail

// A warp's row, or its part of one. V: vectors of a lane. reaches: there are always more than 32 (V - 1) vectors.
template <typename T, int V, bool reaches = false>
class Ragged {
 public:
  // columns: at most 256 V + 7.
  FRIT_DEVICE explicit Ragged(int columns) : vectors_(columns / 8), left_(columns % 8) {}

  // Has the lane a k-th vector? Lanes 8 to 14: a column of the rest?
  FRIT_DEVICE bool has(int k) const { return (reaches && k + 1 < V) || k * 32 + lane() < vectors_; }
  FRIT_DEVICE bool has_rest() const { return lane() >= 8 && lane() < 8 + left_; }
  FRIT_DEVICE int rest_column() const { return vectors_ * 8 + lane() - 8; }

  // Starts to read the row; finish() must follow before v and rest are used, and other loads may start between the two.
  // What the lane has not becomes `fill`. Cost: every element is read once.
  template <Cache cache>
  FRIT_DEVICE void start(const Global<const T>& row, T fill, Vec<T, 8> (&v)[V], T& rest) {
    shift_ = row_shift(row);
    const Global<const T> mine = row + (lane() * 8 - shift_);
    FRIT_UNROLL
    for (int k = 0; k < V; ++k) {
      FRIT_UNROLL
      for (int w = 0; w < 4; ++w) v[k].pairs[w] = filled(fill);
      if (whole(k, shift_)) v[k] = load_vec<8, cache>(mine, k * 256);
    }
    const int column = single(shift_);
    rest = fill;
    if (column >= 0) rest = load<cache>(row, column);
  }
  // All lanes of the warp take part. Cost: 2 shuffles a vector on average and 5 more, none if the row is aligned.
  FRIT_DEVICE void finish(T fill, Vec<T, 8> (&v)[V], T& rest) const {
    if (shift_ == 0 || vectors_ == 0) return;
    // What lies before the first vector in memory and behind the last are parts of one vector that wraps around.
    const uint32_t mine = rest.bits, word = mine | shuffle_down(mine, 1) << 16;
    uint32_t ends[4];
    FRIT_UNROLL
    for (int w = 0; w < 4; ++w) {
      ends[w] = shuffle(word, 2 * w);
      if (lane() == 0) v[0].pairs[w] = ends[w];
    }
    detail::with_shift(shift_, [&](auto shift) {
      // The words of the next vector that are needed come from the next lane, lane 31's from lane 0's next one.
      constexpr int kNeeded = (shift + 1) / 2;
      FRIT_UNROLL
      for (int k = 0; k < V; ++k) {
        const bool last = (!reaches || k + 1 >= V - 1) && k * 32 + lane() + 1 == vectors_;
        uint32_t words[8] = {};
        FRIT_UNROLL
        for (int w = 0; w < 4; ++w) words[w] = v[k].pairs[w];
        FRIT_UNROLL
        for (int w = 0; w < kNeeded; ++w) {
          // What no lane has stays `fill`, which is what lies behind lane 31's last vector unless the row ends there.
          const uint32_t next = k + 1 < V ? v[k + 1 < V ? k + 1 : k].pairs[w] : filled(fill);
          const uint32_t behind = shuffle(lane() == 0 ? next : v[k].pairs[w], (lane() + 1) & 31);
          words[4 + w] = last ? ends[w] : behind;
        }
        v[k] = detail::funnel<shift, T>(words);
      }
    });
  }

  // Writes a row, which may be the one that was read; v is lost. All lanes of the warp take part. Cost: every element
  // is written once; 2.5 shuffles a vector on average and 7 more, none if the row is aligned.
  template <Cache cache>
  FRIT_DEVICE void write(const Global<T>& row, Vec<T, 8> (&v)[V], T rest) const {
    const int to = row_shift(row);
    warp_barrier();  // other lanes have read what this one writes
    if (to > 0 && vectors_ > 0) {
      const int slot = (vectors_ - 1) / 32, owner = (vectors_ - 1) % 32;
      detail::with_shift(to, [&](auto shift) {
        constexpr int kFrom = 8 - shift, kFirst = kFrom / 2;  // of the vector before
        uint32_t before[4] =
            {};  // lane 0: words of lane 31's vector before; at first of the row's last, which wraps around
        const auto wrap = [&](int k) {
          FRIT_UNROLL
          for (int w = kFirst; w < 4; ++w) before[w] = shuffle(v[k].pairs[w], owner);
        };
        if (reaches || slot == V - 1) {
          wrap(V - 1);
        } else {
          FRIT_UNROLL
          for (int k = 0; k + 1 < V; ++k)
            if (k == slot) wrap(k);
        }
        FRIT_UNROLL
        for (int k = 0; k < V; ++k) {
          uint32_t words[8] = {};
          FRIT_UNROLL
          for (int w = 0; w < 4; ++w) words[4 + w] = v[k].pairs[w];
          FRIT_UNROLL
          for (int w = kFirst; w < 4; ++w) {
            const uint32_t lent = shuffle(words[4 + w], (lane() + 31) & 31);
            words[w] = lane() == 0 ? before[w] : lent;
            before[w] = lent;
          }
          v[k] = detail::funnel<kFrom, T>(words);
        }
      });
      // Lane 0's first vector is the one that wraps around.
      uint32_t all[4];
      FRIT_UNROLL
      for (int w = 0; w < 4; ++w) all[w] = shuffle(v[0].pairs[w], 0);
      const uint32_t low = lane() & 2 ? all[1] : all[0], high = lane() & 2 ? all[3] : all[2];
      const uint32_t word = lane() & 4 ? high : low;
      if (lane() < 8) rest = T::from_bits(static_cast<uint16_t>(lane() & 1 ? word >> 16 : word));
    }
    const Global<T> mine = row + (lane() * 8 - to);
    FRIT_UNROLL
    for (int k = 0; k < V; ++k)
      if (whole(k, to)) store_vec<8, cache>(mine, k * 256, v[k]);
    const int column = single(to);
    if (column >= 0) store<cache>(row, column, rest);
  }

 private:
  FRIT_DEVICE static uint32_t filled(T fill) { return static_cast<uint32_t>(fill.bits) * 0x10001u; }
  // Does the lane's k-th vector in memory lie in the row?
  FRIT_DEVICE bool whole(int k, int shift) const { return has(k) && (k > 0 || shift == 0 || lane() > 0); }
  // The column that the lane moves alone; below 0: none.
  FRIT_DEVICE int single(int shift) const {
    if (has_rest()) return rest_column();
    if (lane() >= 8 || shift == 0 || vectors_ == 0) return -1;
    return lane() - shift + (lane() < shift ? vectors_ * 8 : 0);
  }

  int vectors_, left_, shift_ = 0;
};

}  // namespace frit::simt
