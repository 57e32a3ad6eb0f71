// softmax's kernels for 16-bit rows of any width and alignment, without lengths or mask. A warp holds a row, whose
// elements stay where they lie: lane l has as vector k the row's (k * 32 + l)-th whole vector of 16 bytes in memory,
// and the columns before the first of these and behind the last are one more column in lanes 8 to 14 and 16 to 22. What
// is shifted is the random words, which belong to columns.
#include "frit/ops/softmax/whole.h"
#include "frit/simt/pairs.h"

namespace frit {

using namespace simt;

namespace {

// Blocks a multiprocessor should hold at least, which bounds registers.
constexpr int ragged_blocks(int vectors, bool backward) {
  return vectors == 2 ? (backward ? 6 : 9) : vectors == 4 ? (backward ? 7 : 8) : backward ? 4 : 5;
}

// Rows that a warp takes at once: short ones leave it little else to do while it waits.
constexpr int ragged_rows(int vectors) {
  return vectors == 2 ? 2 : 1;
}

// A row of the warp, and where its columns lie.
struct RaggedRow {
  uint32_t row = 0;
  int head = 0;    // columns before the first whole vector
  int count = 0;   // whole vectors; 0 past the last row
  int one = -1;    // the lane's single column; -1: none
  int begins = 0;  // the column of the lane's first vector

  FRIT_DEVICE void cut(int shift, int cols) {
    head = (8 - shift) & 7;
    if (head > cols) head = cols;
    const int left = cols - head, i = lane() & 7, of = lane() >> 3;
    count = left >> 3;
    if (of == 1 && i < head) one = i;
    if (of == 2 && i < (left & 7)) one = cols - (left & 7) + i;
    begins = head + lane() * 8;
  }
};
// The warp's rows of x; false if there are none.
template <int V, typename T>
FRIT_DEVICE bool ragged_place(const SoftmaxWhole& s, const Global<T>& x, RaggedRow (&rows)[ragged_rows(V)]) {
  constexpr uint32_t kRows = ragged_rows(V);
  const uint32_t warps = kSoftmaxThreads / 32, all = static_cast<uint32_t>(s.rows);
  const uint32_t begin = (static_cast<uint32_t>(block_index()) * warps + static_cast<uint32_t>(warp())) * kRows;
  if (begin >= all) return false;
  FRIT_UNROLL
  for (uint32_t r = 0; r < kRows; ++r) {
    rows[r].row = begin + r;
    if (r == 0 || begin + r < all) rows[r].cut(row_shift(x + softmax_row(rows[r].row, s.x_stride)), s.cols);
  }
  return true;
}
// Are all lanes' k-th vectors of V inside? The instances' rows fill half of their vectors or more.
template <int V>
constexpr bool ragged_full(int k) {
  return V > 2 && k < V / 2;
}

// The warp's rows' random words in shared memory, 2 bytes a column: a block of 8 columns is drawn by one lane, and the
// columns of a lane's vector lie in two such.
template <int V>
class RaggedWords {
 public:
  static constexpr int kRows = ragged_rows(V), kRowWords = (32 * V + 1) * 4, kWarpBytes = kRows * kRowWords * 4;

  FRIT_DEVICE RaggedWords() : at_(shared_array<uint32_t>(warp() * kWarpBytes)) {}

  // Draws them all. All lanes of the warp take part. Cost: 37 instructions for 8 columns.
  FRIT_DEVICE void draw(const SoftmaxWhole& s, const RaggedRow (&rows)[kRows]) const {
    uint32_t heads[kRows], counters[kRows];
    FRIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      heads[r] = s.by_head(rows[r].row);
      counters[r] = s.first_row + rows[r].row - heads[r] * s.by_head.divisor;
      FRIT_UNROLL
      for (int i = 0; i < V; i += 2) {
        const uint32_t block = static_cast<uint32_t>(i * 32 + lane());
        const DropoutWords<2> words =
            dropout_words<2>(s.dropout, {counters[r], counters[r]}, {block, block + 32}, heads[r]);
        FRIT_UNROLL
        for (int j = 0; j < 2; ++j) put(r * kRowWords + ((i + j) * 32 + lane()) * 4, words.v[j]);
      }
    }
    if (s.cols >= V * 256) {  // the last vector may end in one block more: lane r draws row r's
      const bool second = kRows > 1 && lane() == 1;
      const DropoutWords<1> words = dropout_words<1>(s.dropout, {second ? counters[kRows - 1] : counters[0]}, {V * 32u},
                                                     second ? heads[kRows - 1] : heads[0]);
      if (lane() < kRows) put(lane() * kRowWords + V * 128, words.v[0]);
    }
    warp_barrier();
  }
  // Of the i-th of the lane's vectors in row r, the first of which begins at column `begins`. Cost: 5 loads in 20
  // turns, 4 shifts.
  FRIT_DEVICE DropoutWords<1> of_vector(int r, int begins, int i) const {
    const Shared<uint32_t> from = at_ + (begins >> 1);
    uint32_t words[5];
    FRIT_UNROLL
    for (int w = 0; w < 5; ++w) words[w] = load(from, r * kRowWords + i * 128 + w);
    DropoutWords<1> of;
    FRIT_UNROLL
    for (int w = 0; w < 4; ++w) of.v[0][w] = funnel_right(words[w], words[w + 1], 16 * (begins & 1));
    return of;
  }
  // Of one column, in the upper half.
  FRIT_DEVICE uint32_t of_column(int r, int column) const {
    return load(at_ + (column >> 1), r * kRowWords) << (column & 1 ? 0 : 16);
  }

 private:
  FRIT_DEVICE void put(int word, const uint32_t (&w)[4]) const {
    store_vec<4>(at_, word, Vec<uint32_t, 4>{{w[0], w[1], w[2], w[3]}});
  }
  Shared<uint32_t> at_;
};

template <typename T, int V>
FRIT_KERNEL(kSoftmaxThreads, ragged_blocks(V, false))
softmax_forward_ragged_kernel(SoftmaxWhole s, Global<const T> x, Global<T> y, Global<float> lse) {
  constexpr int N = 8, kStep = 32 * N, kRows = ragged_rows(V);
  wait_for_previous();
  RaggedRow rows[kRows];
  if (!ragged_place<V>(s, x, rows)) return;
  const auto has = [&](int r, int i) { return ragged_full<V>(i) || i * 32 + lane() < rows[r].count; };
  const uint32_t threshold = dropout_threshold(s.dropout), lowest = pack2(T(), -INFINITY, -INFINITY);
  const float c = s.scale * kLog2E;

  Vec<T, N> v[kRows][V];
  uint32_t one[kRows];  // beside -inf
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Global<const T> row = x + softmax_row(rows[r].row, s.x_stride), from = row + rows[r].begins;
    FRIT_UNROLL
    for (int i = 0; i < V; ++i) {
      FRIT_UNROLL
      for (int k = 0; k < N / 2; ++k) v[r][i].pairs[k] = lowest;
      if (has(r, i)) v[r][i] = load_vec<N, Cache::kStream>(from, i * kStep);
    }
    one[r] = lowest;
    if (rows[r].one >= 0) one[r] = load<Cache::kStream>(row, rows[r].one).bits | lowest << 16;
  }
  const RaggedWords<V> random;
  random.draw(s, rows);  // while the rows are on their way

  uint32_t tops[kRows];
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    tops[r] = one[r];
    FRIT_UNROLL
    for (int i = 0; i < V; ++i) {
      FRIT_UNROLL
      for (int k = 0; k < N / 2; ++k) tops[r] = max2(T(), tops[r], v[r][i].pairs[k]);
    }
  }
  float e[kRows][V][N], e_one[kRows], shift[kRows], sum[kRows];
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float top = softmax_pair_max<32>(T(), tops[r]);
    // Nothing but -inf: exponentials are 0 then, and NaN where x is NaN, which the maximum passes over.
    shift[r] = top == -INFINITY ? 0.0f : top * c;
    sum[r] = e_one[r] = exp2_fast(fmaf(widen(T::from_bits(static_cast<uint16_t>(one[r]))), c, -shift[r]));
    FRIT_UNROLL
    for (int i = 0; i < V; ++i) {
      float part = 0;
      FRIT_UNROLL
      for (int k = 0; k < N; ++k) {
        e[r][i][k] = exp2_fast(fmaf(widen(static_cast<T>(v[r][i][k])), c, -shift[r]));
        part = k == 0 ? e[r][i][k] : part + e[r][i][k];
      }
      sum[r] += part;
    }
  }
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) sum[r] = warp_sum(sum[r]);
  if (lse && lane() < kRows) {
    const bool second = kRows > 1 && lane() == 1;
    const uint32_t row = rows[0].row + static_cast<uint32_t>(lane());
    const float of = second ? sum[kRows - 1] : sum[0], from = second ? shift[kRows - 1] : shift[0];
    if (kRows == 1 || row < static_cast<uint32_t>(s.rows))
      store(lse, row, of == 0 ? -INFINITY : (from + log2_fast(of)) * kLn2);
  }

  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float kept = sum[r] == 0 ? 0.0f : reciprocal_fast(sum[r]) * s.dropout.scale;
    const Global<T> to = y + softmax_row(rows[r].row, s.y_stride), lane_to = to + rows[r].begins;
    if (rows[r].one >= 0)
      store<Cache::kStream>(to, rows[r].one,
                            convert<T>(e_one[r] * (random.of_column(r, rows[r].one) >= threshold ? kept : 0.0f)));
    FRIT_UNROLL
    for (int i = 0; i < V; ++i) {
      if (!has(r, i)) continue;
      const DropoutWords<1> words = random.of_vector(r, rows[r].begins, i);
      Vec<float, N> out;
      FRIT_UNROLL
      for (int k = 0; k < N; ++k) out[k] = e[r][i][k] * (words.kept(0, k, threshold) ? kept : 0.0f);
      store_vec<N, Cache::kStream>(lane_to, i * kStep, from_float<T>(out));
    }
  }
}

template <typename T, int V>
FRIT_KERNEL(kSoftmaxThreads, ragged_blocks(V, true))
softmax_backward_ragged_kernel(SoftmaxWhole s, Global<const T> dy, Global<const T> x, Global<const float> lse,
                               Global<T> dx) {
  constexpr int N = 8, kStep = 32 * N, kRows = ragged_rows(V);
  wait_for_previous();
  RaggedRow rows[kRows];
  if (!ragged_place<V>(s, x, rows)) return;
  const auto has = [&](int r, int i) { return ragged_full<V>(i) || i * 32 + lane() < rows[r].count; };

  Vec<T, N> v[kRows][V], g[kRows][V];
  uint16_t one[kRows], dy_one[kRows];  // bits
  float log_sum[kRows];
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Global<const T> row = x + softmax_row(rows[r].row, s.x_stride),
                          dy_row = dy + softmax_row(rows[r].row, s.dy_stride);
    const Global<const T> x_from = row + rows[r].begins, dy_from = dy_row + rows[r].begins;
    FRIT_UNROLL
    for (int i = 0; i < V; ++i)
      if (has(r, i)) {
        v[r][i] = load_vec<N, Cache::kStream>(x_from, i * kStep);
        g[r][i] = load_vec<N, Cache::kStream>(dy_from, i * kStep);
      }
    one[r] = dy_one[r] = 0;
    if (rows[r].one >= 0)
      one[r] = load<Cache::kStream>(row, rows[r].one).bits, dy_one[r] = load<Cache::kStream>(dy_row, rows[r].one).bits;
    const bool active = r == 0 || rows[r].row < static_cast<uint32_t>(s.rows);
    log_sum[r] = active ? load(lse, rows[r].row) : 0.0f;
  }
  const RaggedWords<V> random;
  random.draw(s, rows);  // while the rows are on their way

  const uint32_t threshold = dropout_threshold(s.dropout);
  const float c = s.scale * kLog2E, factor = s.scale * s.dropout.scale;
  float p[kRows][V][N], p_one[kRows], g_one[kRows], sum[kRows];
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float shift = log_sum[r] * kLog2E;
    p_one[r] = g_one[r] = 0;
    if (rows[r].one >= 0) {
      p_one[r] = exp2_fast(fmaf(widen(T::from_bits(one[r])), c, -shift));
      g_one[r] = random.of_column(r, rows[r].one) >= threshold ? widen(T::from_bits(dy_one[r])) : 0.0f;
    }
    sum[r] = p_one[r] * g_one[r];
    FRIT_UNROLL
    for (int i = 0; i < V; ++i) {
      // A branch at each, even where none is needed: else nvcc begins several vectors at once, and spills.
      if (i * 32 + lane() >= rows[r].count) continue;
      const DropoutWords<1> words = random.of_vector(r, rows[r].begins, i);
      float part = 0;
      Vec<float, N> of_kept;  // what dropout zeroed has a zero gradient from here on
      FRIT_UNROLL
      for (int k = 0; k < N; ++k) {
        p[r][i][k] = exp2_fast(fmaf(widen(static_cast<T>(v[r][i][k])), c, -shift));
        of_kept[k] = words.kept(0, k, threshold) ? widen(static_cast<T>(g[r][i][k])) : 0.0f;
        part = fmaf(p[r][i][k], of_kept[k], part);
      }
      sum[r] += part;
      g[r][i] = softmax_forget(from_float<T>(of_kept));  // exact, and half of the registers
    }
  }
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) sum[r] = warp_sum(sum[r]) * factor;
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Global<T> to = dx + softmax_row(rows[r].row, s.y_stride), lane_to = to + rows[r].begins;
    if (log_sum[r] == -INFINITY) {  // a row of -inf alone has no gradient, whatever dy is
      FRIT_UNROLL
      for (int i = 0; i < V; ++i)
        if (has(r, i)) store_vec<N, Cache::kStream>(lane_to, i * kStep, Vec<T, N>{});
      if (rows[r].one >= 0) store<Cache::kStream>(to, rows[r].one, T());
      continue;
    }
    const float mean = sum[r];
    FRIT_UNROLL
    for (int i = 0; i < V; ++i) {
      if (!has(r, i)) continue;
      const Vec<float, N> of_kept = to_float(g[r][i]);
      Vec<float, N> out;
      FRIT_UNROLL
      for (int k = 0; k < N; ++k) out[k] = p[r][i][k] * fmaf(of_kept[k], factor, -mean);
      store_vec<N, Cache::kStream>(lane_to, i * kStep, from_float<T>(out));
    }
    if (rows[r].one >= 0) store<Cache::kStream>(to, rows[r].one, convert<T>(p_one[r] * fmaf(g_one[r], factor, -mean)));
  }
}

template <int V>
Launch ragged_launch(int64_t rows) {
  constexpr int kWarps = kSoftmaxThreads / 32, kRows = kWarps * ragged_rows(V);
  return {(rows + kRows - 1) / kRows, kSoftmaxThreads, kWarps * RaggedWords<V>::kWarpBytes};
}
// Calls f with a value of x's type and the vectors a thread holds, as a constant.
template <typename F>
void for_ragged(int instance, const Tensor& x, F&& f) {
  const int vectors = softmax_whole_vectors(instance, x.dim(1), true);
  const auto start = [&](auto t) {
    if (vectors == 2) return f(t, softmax_constant<2>());
    if (vectors == 4) return f(t, softmax_constant<4>());
    return f(t, softmax_constant<8>());
  };
  return x.dtype() == DType::kBF16 ? start(bfloat16()) : start(float16());
}

}  // namespace

void softmax_forward_ragged_gpu(Context& context, int instance, const SoftmaxShape& shape, const Tensor& x,
                                const Tensor& y, const Tensor& lse) {
  for_ragged(instance, x, [&](auto t, auto v) {
    using T = decltype(t);
    launch(context, "softmax_forward_ragged_kernel", softmax_forward_ragged_kernel<T, v>, ragged_launch<v>(shape.rows),
           softmax_whole(shape), global<const T>(x), global<T>(y), global<float>(lse));
  });
}

void softmax_backward_ragged_gpu(Context& context, int instance, const SoftmaxShape& shape, const Tensor& dy,
                                 const Tensor& x, const Tensor& lse, const Tensor& dx) {
  for_ragged(instance, x, [&](auto t, auto v) {
    using T = decltype(t);
    launch(context, "softmax_backward_ragged_kernel", softmax_backward_ragged_kernel<T, v>,
           ragged_launch<v>(shape.rows), softmax_whole(shape), global<const T>(dy), global<const T>(x),
           global<const float>(lse), global<T>(dx));
  });
}

}  // namespace frit
