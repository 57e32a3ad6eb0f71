// softmax's kernels for 16-bit rows without lengths or mask, as whole aligned vectors: no vector is cut, so that
// neither tails nor shifted dropout bits cost instructions. Rows of any width or alignment: ragged.cu.
//
// G threads work on a row; vector i of thread t is the row's (i * G + t)-th. All V vectors of a thread are in
// registers.
#pragma once
#include "frit/ops/softmax/rows.h"
#include "frit/simt/warp_max.h"
#include "frit/simt/whole_columns.h"

namespace frit {

// What the kernels take beside pointers. Strides in elements.
struct SoftmaxWhole {
  uint32_t x_stride = 0, y_stride = 0, dy_stride = 0;
  int rows = 0, chunks = 0;  // whole vectors of a row
  int cols = 0;
  uint32_t first_row = 0;
  Divider by_head;  // of rows
  float scale = 1;
  simt::DropoutTable dropout;
  uint32_t nothing = 0;  // softmax_behind
};

// Vectors a thread holds in the kernel for whole rows, or for ragged ones, that stands for an instance; 0: there is
// none.
inline int softmax_whole_vectors(int instance, int64_t cols, bool ragged) {
  const int64_t chunks = cols / 8;
  if (instance == kRowPer8Lanes && chunks <= 16 && !ragged) return 2;
  if (instance == kRowPerWarp && chunks > 64) return 0;
  if ((instance == kRowPerWarp || instance == kLongRowPerWarp) && chunks <= 256)
    return chunks <= 32 && ragged ? 1 : chunks <= 64 ? 2 : chunks <= 128 ? 4 : 8;
  return 0;
}
// True if all rows of x, y (dx) and dy are whole aligned vectors of 16-bit elements.
inline bool softmax_rows_whole(const Tensor& x, const Tensor& y, const Tensor& dy) {
  const auto whole = [](const Tensor& t) {
    return !t.defined() || (t.row_stride() % 8 == 0 && reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0);
  };
  return x.dim(1) % 8 == 0 && whole(x) && whole(y) && whole(dy);
}
// Of rows that are alike but not whole, an instance with softmax_whole_vectors > 0.
void softmax_forward_ragged_gpu(Context& context, int instance, const SoftmaxShape& shape, const Tensor& x,
                                const Tensor& y, const Tensor& lse);
void softmax_backward_ragged_gpu(Context& context, int instance, const SoftmaxShape& shape, const Tensor& dy,
                                 const Tensor& x, const Tensor& lse, const Tensor& dx);
inline SoftmaxWhole softmax_whole(const SoftmaxShape& shape) {
  SoftmaxWhole s;
  s.x_stride = static_cast<uint32_t>(shape.x_stride), s.y_stride = static_cast<uint32_t>(shape.y_stride);
  s.dy_stride = static_cast<uint32_t>(shape.dy_stride);
  s.rows = static_cast<int>(shape.rows), s.chunks = shape.cols / 8, s.cols = shape.cols;
  s.first_row = shape.first_row;
  // A divisor of 2^31 or more leaves no quotient but 0.
  s.by_head = Divider(std::min<int64_t>(shape.rows_per_head, int64_t{1} << 31));
  s.scale = shape.scale;
  s.dropout = simt::DropoutTable(shape.dropout);
  return s;
}

namespace simt {

// Blocks a multiprocessor should hold at least, which bounds registers.
constexpr int softmax_whole_blocks(int vectors, bool backward) {
  return vectors == 2 ? (backward ? 9 : 10) : vectors == 4 ? (backward ? 6 : 8) : backward ? 4 : 5;
}

// Where a row begins; one multiplication where 64-bit strides would take three.
FRIT_DEVICE int64_t softmax_row(uint32_t row, uint32_t stride) {
  return static_cast<int64_t>(uint64_t{row} * stride);
}

// Where a thread stands.
struct SoftmaxWholePlace {
  int lane = 0;
  uint32_t row = 0;
  bool active = false;
  int chunks = 0;                              // the row's vectors; 0 past the last row
  uint32_t dropout_row = 0, dropout_head = 0;  // counters of Philox
};
template <int G>
FRIT_DEVICE SoftmaxWholePlace softmax_whole_place(const SoftmaxWhole& s) {
  SoftmaxWholePlace at;
  const uint32_t thread = static_cast<uint32_t>(thread_index());
  const uint32_t row = static_cast<uint32_t>(block_index()) * (kSoftmaxThreads / G) + thread / G;
  at.lane = static_cast<int>(thread % G);
  at.active = row < static_cast<uint32_t>(s.rows);
  at.row = at.active ? row : 0;
  at.chunks = at.active ? s.chunks : 0;
  const uint32_t head = s.by_head(row);
  at.dropout_row = s.first_row + row - head * s.by_head.divisor, at.dropout_head = head;
  return at;
}

// Random words of M groups, each of its own row and head, drawn side by side. No branch asks for dropout: with one,
// ptxas waits for the loads that the drawing is to hide. Cost: 36 instructions a group.
template <int M>
FRIT_DEVICE DropoutWords<M> softmax_draw(const DropoutTable& d, const uint32_t (&rows)[M], const uint32_t (&groups)[M],
                                         const uint32_t (&heads)[M]) {
  DropoutWords<M> c;
  FRIT_UNROLL
  for (int j = 0; j < M; ++j) {
    c.v[j][0] = groups[j], c.v[j][1] = rows[j], c.v[j][2] = heads[j] | d.lane_word, c.v[j][3] = d.site;
  }
  FRIT_UNROLL
  for (int r = 0; r < 10; ++r) {
    FRIT_UNROLL
    for (int j = 0; j < M; ++j) {
      uint32_t(&v)[4] = c.v[j];
      const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * v[0], p1 = static_cast<uint64_t>(kPhiloxM1) * v[2];
      v[0] = static_cast<uint32_t>(p1 >> 32) ^ v[1] ^ d.keys[2 * r];
      v[2] = static_cast<uint32_t>(p0 >> 32) ^ v[3] ^ d.keys[2 * r + 1];
      v[1] = static_cast<uint32_t>(p1), v[3] = static_cast<uint32_t>(p0);
    }
  }
  return c;
}

// 0, but not before the words are drawn: what is made with it waits for them. Else ptxas puts what waits for a row in
// memory before the drawing that is to hide the wait. nothing: 0, of which the compiler knows nothing.
template <int M>
FRIT_DEVICE uint32_t softmax_behind(const DropoutWords<M>& words, uint32_t nothing) {
  uint32_t all = 0;
  FRIT_UNROLL
  for (int j = 0; j < M; ++j) all ^= words.v[j][0];
  return all & nothing;
}

// The random words of two vectors.
FRIT_DEVICE DropoutWords<2> softmax_words(const SoftmaxWhole& s, const SoftmaxWholePlace& at, int chunk, int other) {
  return dropout_words<2>(s.dropout, {at.dropout_row, at.dropout_row},
                          {static_cast<uint32_t>(chunk), static_cast<uint32_t>(other)}, at.dropout_head);
}

template <typename T>
FRIT_DEVICE float softmax_larger(uint32_t pair) {
  return fmaxf(widen(T::from_bits(static_cast<uint16_t>(pair))),
               widen(T::from_bits(static_cast<uint16_t>(pair >> 16))));
}
// The largest of the pairs of G neighbouring lanes; a NaN gives way to other elements of its lane. Cost: 9 instructions
// in a warp; log2(G) shuffles, 2 instructions each, in less.
template <int G, typename T>
FRIT_DEVICE float softmax_pair_max(T type, uint32_t pair) {
  if constexpr (G == 32) {
    return warp_max_float(softmax_larger<T>(pair));
  } else {
    FRIT_UNROLL
    for (int bits = G / 2; bits > 0; bits /= 2) pair = max2(type, pair, shuffle_xor(pair, bits));
    return softmax_larger<T>(pair);
  }
}

// The exponentials of a lane's part of a row, and their sum, from the largest elements of all G lanes' parts, in pairs:
// the scores' largest, which is taken off first, becomes `shift`. c: of a score in units of log 2.
template <int G, typename T, int V>
FRIT_DEVICE float softmax_exponentials(const Vec<T, 8> (&v)[V], uint32_t tops, float c, float (&e)[V][8],
                                       float& shift) {
  const float top = softmax_pair_max<G>(T(), tops);
  // Nothing but -inf: exponentials are 0 then, and NaN where x is NaN, which the maximum passes over.
  shift = top == -INFINITY ? 0.0f : top * c;
  float sum = 0;
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    float part = 0;
    FRIT_UNROLL
    for (int k = 0; k < 8; ++k) {
      e[i][k] = exp2_fast(fmaf(widen(v[i][k]), c, -shift));
      part = k == 0 ? e[i][k] : part + e[i][k];
    }
    sum = i == 0 ? part : sum + part;
  }
  return sum;
}

template <typename T, int G, int V>
FRIT_KERNEL(kSoftmaxThreads, softmax_whole_blocks(V, false))
softmax_forward_whole_kernel(SoftmaxWhole s, Global<const T> x, Global<T> y, Global<float> lse) {
  constexpr int N = 8;
  constexpr bool early = V == 2;  // random words fit beside the loads that they hide
  wait_for_previous();
  const SoftmaxWholePlace at = softmax_whole_place<G>(s);
  const uint32_t threshold = dropout_threshold(s.dropout);
  const float c = s.scale * kLog2E;
  const uint32_t lowest = pack2(T(), -INFINITY, -INFINITY);

  Vec<T, N> v[V];
  const Global<const T> from = x + (softmax_row(at.row, s.x_stride) + at.lane * N);
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    FRIT_UNROLL
    for (int k = 0; k < N / 2; ++k) v[i].pairs[k] = lowest;
    if (i * G + at.lane < at.chunks) v[i] = load_vec<N, Cache::kStream>(from, i * G * N);
  }
  DropoutWords<2> words;
  if constexpr (early) words = softmax_words(s, at, at.lane, G + at.lane);
  uint32_t tops = early ? lowest | softmax_behind(words, s.nothing) : lowest;
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    FRIT_UNROLL
    for (int k = 0; k < N / 2; ++k) tops = max2(T(), tops, v[i].pairs[k]);
  }
  float e[V][N], shift;
  float sum = softmax_exponentials<G>(v, tops, c, e, shift);
  sum = warp_sum<G>(sum);
  if (lse && at.active && at.lane == 0) store(lse, at.row, sum == 0 ? -INFINITY : (shift + log2_fast(sum)) * kLn2);
  const float kept = sum == 0 ? 0.0f : reciprocal_fast(sum) * s.dropout.scale;

  const Global<T> to = y + (softmax_row(at.row, s.y_stride) + at.lane * N);
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    if (!early && i % 2 == 0) words = softmax_words(s, at, i * G + at.lane, (i + 1) * G + at.lane);
    if (i * G + at.lane >= at.chunks) continue;
    Vec<float, N> out;
    FRIT_UNROLL
    for (int k = 0; k < N; ++k) out[k] = e[i][k] * (words.kept(i % 2, k, threshold) ? kept : 0.0f);
    v[i] = from_float<T>(out);
    store_vec<N, Cache::kStream>(to, i * G * N, v[i]);
  }
}

template <typename T, int G, int V>
FRIT_KERNEL(kSoftmaxThreads, softmax_whole_blocks(V, true))
softmax_backward_whole_kernel(SoftmaxWhole s, Global<const T> dy, Global<const T> x, Global<const float> lse,
                              Global<T> dx) {
  constexpr int N = 8;
  wait_for_previous();
  const SoftmaxWholePlace at = softmax_whole_place<G>(s);
  Vec<T, N> v[V], g[V];
  const Global<const T> x_from = x + (softmax_row(at.row, s.x_stride) + at.lane * N);
  const Global<const T> dy_from = dy + (softmax_row(at.row, s.dy_stride) + at.lane * N);
  FRIT_UNROLL
  for (int i = 0; i < V; ++i)
    if (i * G + at.lane < at.chunks) {
      v[i] = load_vec<N, Cache::kStream>(x_from, i * G * N);
      g[i] = load_vec<N, Cache::kStream>(dy_from, i * G * N);
    }
  const float log_sum = at.active ? load(lse, at.row) : -INFINITY;
  const uint32_t threshold = dropout_threshold(s.dropout);
  const float c = s.scale * kLog2E, shift = log_sum * kLog2E;
  DropoutWords<2> words;
  float p[V][N], sum = 0;
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    if (i % 2 == 0) words = softmax_words(s, at, i * G + at.lane, (i + 1) * G + at.lane);
    if (i * G + at.lane >= at.chunks) continue;
    // What dropout zeroed has a zero gradient from here on.
    FRIT_UNROLL
    for (int k = 0; k < N / 2; ++k) {
      if (!words.kept(i % 2, 2 * k, threshold)) g[i].pairs[k] &= 0xffff0000u;
      if (!words.kept(i % 2, 2 * k + 1, threshold)) g[i].pairs[k] &= 0xffffu;
    }
    float part = 0;
    FRIT_UNROLL
    for (int k = 0; k < N; ++k) {
      p[i][k] = exp2_fast(fmaf(widen(static_cast<T>(v[i][k])), c, -shift));
      part = fmaf(p[i][k], widen(static_cast<T>(g[i][k])), part);
    }
    sum += part;
  }
  const float factor = s.scale * s.dropout.scale;
  const float mean = warp_sum<G>(sum) * factor;
  // A row of -inf alone has no gradient, whatever dy is.
  const bool none = log_sum == -INFINITY;
  const Global<T> to = dx + (softmax_row(at.row, s.y_stride) + at.lane * N);
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    if (i * G + at.lane >= at.chunks) continue;
    Vec<float, N> out;
    FRIT_UNROLL
    for (int k = 0; k < N; ++k) out[k] = p[i][k] * fmaf(widen(static_cast<T>(g[i][k])), factor, -mean);
    g[i] = none ? Vec<T, N>{} : from_float<T>(out);
    store_vec<N, Cache::kStream>(to, i * G * N, g[i]);
  }
}

// Calls f with G and V of the instance's kernel for whole rows, as constants.
template <typename F>
void for_softmax_whole(int instance, int vectors, F&& f) {
  if (instance == kRowPer8Lanes) return f(softmax_constant<8>(), softmax_constant<2>());
  if (vectors == 2) return f(softmax_constant<32>(), softmax_constant<2>());
  if (vectors == 4) return f(softmax_constant<32>(), softmax_constant<4>());
  return f(softmax_constant<32>(), softmax_constant<8>());
}

}  // namespace simt
}  // namespace frit
