// The part of a row that one warp holds in registers, whatever the row's alignment. Included by kernels alone.
#pragma once
#include "frit/simt/simt.h"

namespace frit::row_part {

using namespace simt;

// A warp's part of a row: lane l holds in v[k] the N = kVecOf<T> columns from (32 k + l) N on, counted from the part's
// first column. Which thread owns a column does not depend on where the row lies, so that column sums can stay in
// registers from row to row. Memory is nevertheless read and written in whole aligned vectors: those of a row that lies
// `shift` elements past a multiple of 16 bytes begin `shift` columns early, and neighbouring lanes exchange what the
// other owns.
template <typename T, int K>
struct Part {
  static constexpr int kN = kVecOf<T>;
  static constexpr int kColumns = 32 * K * kN;  // the most that fit
  Vec<T, kN> v[K];
};

using Words = Vec<uint32_t, 4>;

// The first 16 of the 32 bytes of low and high, from byte `bytes` on; bytes even, below 16.
FRIT_DEVICE Words funnel(const Words& low, const Words& high, int bytes) {
  uint32_t a[8], b[6], c[5];
  FRIT_UNROLL
  for (int i = 0; i < 4; ++i) a[i] = low[i], a[i + 4] = high[i];
  const bool two = bytes & 8, one = bytes & 4;
  FRIT_UNROLL
  for (int i = 0; i < 6; ++i) b[i] = two ? a[i + 2] : a[i];
  FRIT_UNROLL
  for (int i = 0; i < 5; ++i) c[i] = one ? b[i + 1] : b[i];
  const int bits = (bytes & 2) * 8;
  Words result;
  FRIT_UNROLL
  for (int i = 0; i < 4; ++i) result[i] = static_cast<uint32_t>((static_cast<uint64_t>(c[i + 1]) << 32 | c[i]) >> bits);
  return result;
}

// Starts to load a part of `columns` columns from `at` on; columns 0 loads nothing. finish_load() must follow before
// v is used; between the two other loads may start. Columns past `columns` become 0.
// Cost: every element is read once.
template <Cache cache, typename T, int K>
FRIT_DEVICE void start_load(Part<T, K>& part, const Global<const T>& at, int columns) {
  constexpr int N = Part<T, K>::kN;
  const int shift = row_shift(at);
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    const int c = (k * 32 + lane()) * N - shift;
    if (c >= 0 && c + N <= columns) {
      part.v[k] = load_vec<N, cache>(at, c);
    } else {
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) part.v[k][i] = T();
      if (c < columns) {
        FRIT_UNROLL
        for (int i = 0; i < N; ++i)
          if (c + i >= 0 && c + i < columns) part.v[k][i] = load<cache>(at, c + i);
      }
    }
  }
}

// Cost: nothing if the row is aligned; else 4 shuffles a vector. All lanes of the warp take part.
template <Cache cache, typename T, int K>
FRIT_DEVICE void finish_load(Part<T, K>& part, const Global<const T>& at, int columns) {
  constexpr int N = Part<T, K>::kN;
  const int shift = row_shift(at);
  if (shift == 0) return;
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    const Words mine = std::bit_cast<Words>(part.v[k]);
    Words lent = mine, high;
    if (k + 1 < K) {  // lane 31 goes on with lane 0's next vector
      const Words next = std::bit_cast<Words>(part.v[k + 1 < K ? k + 1 : k]);
      FRIT_UNROLL
      for (int w = 0; w < 4; ++w) lent[w] = lane() == 0 ? next[w] : mine[w];
    }
    FRIT_UNROLL
    for (int w = 0; w < 4; ++w) high[w] = shuffle(lent[w], (lane() + 1) & 31);
    if (k + 1 == K && lane() == 31) {  // the part's last columns lie in a vector that is the next warp's
      const int c = Part<T, K>::kColumns - shift;
      Vec<T, N> tail;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) tail[i] = i < shift && c + i < columns ? load<cache>(at, c + i) : T();
      high = std::bit_cast<Words>(tail);
    }
    part.v[k] = std::bit_cast<Vec<T, N>>(funnel(mine, high, shift * static_cast<int>(sizeof(T))));
  }
}

// Writes a part; columns past `columns` are not written. All lanes of the warp take part.
// Cost: every element is written once; 4 shuffles a vector unless the row is aligned.
template <Cache cache, typename T, int K>
FRIT_DEVICE void store_part(const Part<T, K>& part, const Global<T>& at, int columns) {
  constexpr int N = Part<T, K>::kN;
  const int shift = row_shift(at);
  if (shift == 0) {
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) {
      const int c = (k * 32 + lane()) * N;
      if (c + N <= columns) {
        store_vec<N, cache>(at, c, part.v[k]);
      } else if (c < columns) {
        FRIT_UNROLL
        for (int i = 0; i < N; ++i)
          if (c + i < columns) store<cache>(at, c + i, part.v[k][i]);
      }
    }
    return;
  }
  warp_barrier();  // where the output is an input too, other lanes have read what this one writes
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    const Words mine = std::bit_cast<Words>(part.v[k]);
    Words lent = mine, low;
    if (k > 0) {  // lane 0 goes on from lane 31's vector before
      const Words before = std::bit_cast<Words>(part.v[k > 0 ? k - 1 : 0]);
      FRIT_UNROLL
      for (int w = 0; w < 4; ++w) lent[w] = lane() == 31 ? before[w] : mine[w];
    }
    FRIT_UNROLL
    for (int w = 0; w < 4; ++w) low[w] = shuffle(lent[w], (lane() + 31) & 31);
    const Vec<T, N> v = std::bit_cast<Vec<T, N>>(funnel(low, mine, (N - shift) * static_cast<int>(sizeof(T))));
    const int c = (k * 32 + lane()) * N - shift;
    if (c >= 0 && c + N <= columns) {
      store_vec<N, cache>(at, c, v);
    } else if (c < columns) {
      FRIT_UNROLL
      for (int i = 0; i < N; ++i)
        if (c + i >= 0 && c + i < columns) store<cache>(at, c + i, v[i]);
    }
  }
  if (lane() == 31) {  // its last columns lie in the vector behind the warp's last
    constexpr int kLast = Part<T, K>::kColumns - N;
    FRIT_UNROLL
    for (int i = 0; i < N; ++i)
      if (i >= N - shift && kLast + i < columns) store<cache>(at, kLast + i, part.v[K - 1][i]);
  }
}

// Keeps of a part nothing but its elements: without it the compiler keeps, and soon spills, all that it computed from
// them, fp32 copies first.
template <typename T, int K>
FRIT_DEVICE void keep_packed(Part<T, K>& part) {
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    Words words = std::bit_cast<Words>(part.v[k]);
    FRIT_UNROLL
    for (int w = 0; w < 4; ++w) words[w] = opaque(words[w]);
    part.v[k] = std::bit_cast<Vec<T, Part<T, K>::kN>>(words);
  }
}

// Sums of n values over the warp, each as warp_sum; their shuffles overlap.
template <int n>
FRIT_DEVICE void warp_sums(float (&x)[n]) {
  FRIT_UNROLL
  for (int bits = 16; bits > 0; bits /= 2) {
    FRIT_UNROLL
    for (int i = 0; i < n; ++i) x[i] += shuffle_xor(x[i], bits);
  }
}

// Sums of n values over the `warps` warps that share a row, of which this is number `part`; every thread gets them, the
// same bits in each. `scratch` holds n floats for each of these warps, aligned to 4 n bytes.
// Cost: 1 barrier of the block, 0 if warps == 1. scratch may be written again only behind a further barrier.
template <int n>
FRIT_DEVICE void row_sums(float (&x)[n], const Shared<float>& scratch, int warps, int part) {
  warp_sums(x);
  if (warps == 1) return;
  constexpr int m = n < 4 ? n : 4;
  if (lane() == 0) {
    FRIT_UNROLL
    for (int i = 0; i < n; ++i) store(scratch, part * n + i, x[i]);
  }
  barrier();
  FRIT_UNROLL
  for (int i = 0; i < n; ++i) x[i] = 0;
  for (int w = 0; w < warps; ++w) {
    FRIT_UNROLL
    for (int j = 0; j < n; j += m) {
      const Vec<float, m> v = load_vec<m>(scratch, w * n + j);
      FRIT_UNROLL
      for (int i = 0; i < m; ++i) x[j + i] += v[i];
    }
  }
}

}  // namespace frit::row_part
