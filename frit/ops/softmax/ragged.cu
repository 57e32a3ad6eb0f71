// softmax's kernels for 16-bit rows of any width and alignment, without lengths or mask. A warp holds a row, whose
// elements stay where they lie: lane l has as vector k the row's (k * 32 + l)-th whole vector of 16 bytes in memory,
// and the columns before the first of these and behind the last are one more column in lanes 8 to 14 and 16 to 22. What
// is shifted is the random words, which belong to columns.
#include "frit/ops/softmax/whole.h"
#include "frit/simt/funnel.h"

namespace frit {

using namespace simt;

namespace {

// Of short rows, a small block is the sooner replaced.
constexpr int ragged_threads(int vectors) {
  return vectors <= 2 ? 64 : 128;
}
// Blocks a multiprocessor should hold at least, which bounds registers.
constexpr int ragged_blocks(int vectors, bool backward) {
  return vectors <= 2 ? (backward ? 12 : 18) : vectors == 4 ? (backward ? 7 : 8) : backward ? 4 : 5;
}

// Rows that a warp takes at once: short ones leave it little else to do while it waits.
constexpr int ragged_rows(int vectors) {
  return vectors <= 2 ? 2 : 1;
}
// Are all lanes' k-th vectors of V inside? The instances' rows fill half of their vectors or more.
template <int V>
constexpr bool ragged_full(int k) {
  return k < V / 2;
}

// The warp's rows, and where their columns lie.
template <int V>
struct RaggedRows {
  static constexpr int kRows = ragged_rows(V);
  uint32_t first = 0;  // row
  int active = 0;      // rows
  int count[kRows];    // whole vectors; 0 past the last row
  int begins[kRows];   // the column of the lane's first vector
  int half = 0;        // lanes of one row's single columns
  int one = -1;        // the lane's single column, of row first + half; -1: none

  template <typename T>
  FRIT_DEVICE RaggedRows(const SoftmaxWhole& s, const Global<T>& x) {
    constexpr uint32_t kWarps = ragged_threads(V) / 32;
    first = (static_cast<uint32_t>(block_index()) * kWarps + static_cast<uint32_t>(warp())) * kRows;
    active = s.rows - static_cast<int>(first);
    int heads[kRows];  // columns before the first whole vector: -(elements before the row) mod 8
    const uint32_t back = 0u - s.x_stride, from = 0u - static_cast<uint32_t>(x.address() / sizeof(T));
    FRIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int head = static_cast<int>(((first + r) * back + from) & 7);
      heads[r] = V > 1 || head < s.cols ? head : s.cols;
      begins[r] = heads[r] + lane() * 8;
      count[r] = r < active ? (s.cols - heads[r]) >> 3 : 0;
    }
    half = kRows == 1 ? 0 : lane() >> 4;
    const int head = half ? heads[kRows - 1] : heads[0], i = lane() & 7, left = (s.cols - head) & 7;
    if (i < (lane() & 8 ? left : head)) one = lane() & 8 ? s.cols - left + i : i;
    if (kRows == 1 ? lane() >= 16 : half >= active) one = -1;
  }
  // Has the lane an i-th vector of the r-th row?
  FRIT_DEVICE bool has(int r, int i) const {
    return ragged_full<V>(i) ? r == 0 || r < active : i * 32 + lane() < count[r];
  }
  // Which of the two is the lane's own?
  FRIT_DEVICE float own(const float (&of)[kRows]) const { return half ? of[kRows - 1] : of[0]; }
  FRIT_DEVICE bool stands_for_row() const { return (lane() & 15) == 0 && (kRows == 1 ? lane() == 0 : half < active); }
};

// The warp's rows' random words in shared memory, 2 bytes a column: a block of 8 columns is drawn by one lane, and the
// columns of a lane's vector lie in two such.
template <int V>
class RaggedWords {
 public:
  static constexpr int kRows = ragged_rows(V), kRowWords = (32 * V + 1) * 4, kWarpBytes = kRows * kRowWords * 4;

  FRIT_DEVICE RaggedWords() : at_(shared_array<uint32_t>(warp() * kWarpBytes)) {}

  // Draws them all. Returns softmax_behind. All lanes of the warp take part. Cost:
  // 37 instructions for 8 columns.
  FRIT_DEVICE uint32_t draw(const SoftmaxWhole& s, uint32_t first) const {
    constexpr int kVectors = kRows * V, kAtOnce = kVectors < 4 ? kVectors : kRows == 2 ? 4 : 2;
    if (!s.dropout.active) {  // any words will do
      FRIT_UNROLL_BY(1)
      for (int i = lane(); i < kRows * kRowWords / 4; i += 32) put(i * 4, {0, 0, 0, 0});
      warp_barrier();
      return 0;
    }
    uint32_t drawn = 0;
    uint32_t heads[kRows], counters[kRows];
    heads[0] = s.by_head(first);
    const uint32_t in_head = first - heads[0] * s.by_head.divisor;
    counters[0] = s.first_row + in_head;
    if constexpr (kRows == 2) {
      const bool wraps = in_head + 1 == s.by_head.divisor;
      heads[1] = wraps ? heads[0] + 1 : heads[0];
      counters[1] = wraps ? s.first_row : counters[0] + 1;
    }
    FRIT_UNROLL
    for (int from = 0; from < kVectors; from += kAtOnce) {
      uint32_t rows[kAtOnce], groups[kAtOnce], row_heads[kAtOnce];
      FRIT_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        const int r = (from + j) / V, i = (from + j) % V;
        rows[j] = counters[r], row_heads[j] = heads[r], groups[j] = static_cast<uint32_t>(i * 32 + lane());
      }
      const DropoutWords<kAtOnce> words = softmax_draw<kAtOnce>(s.dropout, rows, groups, row_heads);
      drawn = softmax_behind(words, s.nothing);
      FRIT_UNROLL
      for (int j = 0; j < kAtOnce; ++j)
        put((from + j) / V * kRowWords + ((from + j) % V * 32 + lane()) * 4, words.v[j]);
    }
    if (s.cols >= V * 256) {  // the last vector may end in one block more: lane r draws row r's
      const bool second = kRows > 1 && lane() == 1;
      const DropoutWords<1> words = softmax_draw<1>(s.dropout, {second ? counters[kRows - 1] : counters[0]}, {V * 32u},
                                                    {second ? heads[kRows - 1] : heads[0]});
      if (lane() < kRows) put(lane() * kRowWords + V * 128, words.v[0]);
    }
    warp_barrier();
    return drawn;
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
    return load(at_, r * kRowWords + (column >> 1)) << (column & 1 ? 0 : 16);
  }

 private:
  FRIT_DEVICE void put(int word, const uint32_t (&w)[4]) const {
    store_vec<4>(at_, word, Vec<uint32_t, 4>{{w[0], w[1], w[2], w[3]}});
  }
  Shared<uint32_t> at_;
};

template <typename T, int V>
FRIT_KERNEL(ragged_threads(V), ragged_blocks(V, false))
softmax_forward_ragged_kernel(SoftmaxWhole s, Global<const T> x, Global<T> y, Global<float> lse) {
  constexpr int N = 8, kStep = 32 * N, kRows = ragged_rows(V);
  wait_for_previous();
  const RaggedRows<V> rows(s, x);
  if (rows.active <= 0) return;
  const uint32_t threshold = dropout_threshold(s.dropout), lowest = pack2(T(), -INFINITY, -INFINITY);
  const float c = s.scale * kLog2E;

  Vec<T, N> v[kRows][V];
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Global<const T> from = x + (softmax_row(rows.first + r, s.x_stride) + rows.begins[r]);
    FRIT_UNROLL
    for (int i = 0; i < V; ++i) {
      if (r > 0 || !ragged_full<V>(i)) {
        FRIT_UNROLL
        for (int k = 0; k < N / 2; ++k) v[r][i].pairs[k] = lowest;
      }
      if (rows.has(r, i)) v[r][i] = load_vec<N, Cache::kStream>(from, i * kStep);
    }
  }
  uint16_t one = static_cast<uint16_t>(lowest);  // bits
  if (rows.one >= 0) one = load<Cache::kStream>(x + softmax_row(rows.first + rows.half, s.x_stride), rows.one).bits;
  const RaggedWords<V> random;
  const uint32_t drawn = random.draw(s, rows.first);  // while the rows are on their way

  const uint32_t one_pair = one | (lowest & 0xffff0000u) | drawn;
  uint32_t tops[kRows];
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    tops[r] = kRows == 1 || rows.half == r ? one_pair : lowest;
    FRIT_UNROLL
    for (int i = 0; i < V; ++i) {
      FRIT_UNROLL
      for (int k = 0; k < N / 2; ++k) tops[r] = max2(T(), tops[r], v[r][i].pairs[k]);
    }
  }
  float e[kRows][V][N], shift[kRows], sum[kRows];
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) sum[r] = softmax_exponentials<32>(v[r], tops[r], c, e[r], shift[r]);
  const float own_shift = rows.own(shift);
  const float e_one = exp2_fast(fmaf(widen(T::from_bits(one)), c, -own_shift));
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) sum[r] = warp_sum(sum[r] + (kRows == 1 || rows.half == r ? e_one : 0.0f));
  if (lse && rows.stands_for_row()) {
    const float of = rows.own(sum);
    store(lse, rows.first + rows.half, of == 0 ? -INFINITY : (own_shift + log2_fast(of)) * kLn2);
  }

  float kept[kRows];
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) kept[r] = sum[r] == 0 ? 0.0f : reciprocal_fast(sum[r]) * s.dropout.scale;
  if (rows.one >= 0) {
    const bool keep = random.of_column(rows.half, rows.one) >= threshold;
    store<Cache::kStream>(y + softmax_row(rows.first + rows.half, s.y_stride), rows.one,
                          convert<T>(e_one * (keep ? rows.own(kept) : 0.0f)));
  }
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Global<T> to = y + (softmax_row(rows.first + r, s.y_stride) + rows.begins[r]);
    FRIT_UNROLL
    for (int i = 0; i < V; ++i) {
      if (!rows.has(r, i)) continue;
      const DropoutWords<1> words = random.of_vector(r, rows.begins[r], i);
      Vec<float, N> out;
      FRIT_UNROLL
      for (int k = 0; k < N; ++k) out[k] = e[r][i][k] * (words.kept(0, k, threshold) ? kept[r] : 0.0f);
      store_vec<N, Cache::kStream>(to, i * kStep, from_float<T>(out));
    }
  }
}

template <typename T, int V>
FRIT_KERNEL(ragged_threads(V), ragged_blocks(V, true))
softmax_backward_ragged_kernel(SoftmaxWhole s, Global<const T> dy, Global<const T> x, Global<const float> lse,
                               Global<T> dx) {
  constexpr int N = 8, kStep = 32 * N, kRows = ragged_rows(V);
  wait_for_previous();
  const RaggedRows<V> rows(s, x);
  if (rows.active <= 0) return;

  Vec<T, N> v[kRows][V], g[kRows][V];
  float log_sum[kRows];
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Global<const T> x_from = x + (softmax_row(rows.first + r, s.x_stride) + rows.begins[r]);
    const Global<const T> dy_from = dy + (softmax_row(rows.first + r, s.dy_stride) + rows.begins[r]);
    FRIT_UNROLL
    for (int i = 0; i < V; ++i)
      if (rows.has(r, i)) {
        v[r][i] = load_vec<N, Cache::kStream>(x_from, i * kStep);
        g[r][i] = load_vec<N, Cache::kStream>(dy_from, i * kStep);
      }
    log_sum[r] = r == 0 || r < rows.active ? load(lse, rows.first + r) : 0.0f;
  }
  const uint32_t own_row = rows.first + rows.half;
  uint16_t one = 0, dy_one = 0;  // bits
  if (rows.one >= 0) {
    one = load<Cache::kStream>(x + softmax_row(own_row, s.x_stride), rows.one).bits;
    dy_one = load<Cache::kStream>(dy + softmax_row(own_row, s.dy_stride), rows.one).bits;
  }
  const RaggedWords<V> random;
  random.draw(s, rows.first);  // while the rows are on their way

  const uint32_t threshold = dropout_threshold(s.dropout);
  const float c = s.scale * kLog2E, factor = s.scale * s.dropout.scale;
  float p_one = 0, g_one = 0;
  if (rows.one >= 0) {
    p_one = exp2_fast(fmaf(widen(T::from_bits(one)), c, -rows.own(log_sum) * kLog2E));
    g_one = random.of_column(rows.half, rows.one) >= threshold ? widen(T::from_bits(dy_one)) : 0.0f;
  }
  float p[kRows][V][N], sum[kRows];
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float shift = log_sum[r] * kLog2E;
    sum[r] = kRows == 1 || rows.half == r ? p_one * g_one : 0.0f;
    FRIT_UNROLL
    for (int i = 0; i < V; ++i) {
      // A branch at each, even where none is needed: else nvcc begins several vectors at once, and spills.
      if (i * 32 + lane() >= rows.count[r]) continue;
      const DropoutWords<1> words = random.of_vector(r, rows.begins[r], i);
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
  float mean[kRows];
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) mean[r] = warp_sum(sum[r]) * factor;
  // A row of -inf alone has no gradient, whatever dy is.
  if (rows.one >= 0) {
    const bool none = rows.own(log_sum) == -INFINITY;
    store<Cache::kStream>(dx + softmax_row(own_row, s.y_stride), rows.one,
                          none ? T() : convert<T>(p_one * fmaf(g_one, factor, -rows.own(mean))));
  }
  FRIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Global<T> to = dx + (softmax_row(rows.first + r, s.y_stride) + rows.begins[r]);
    const bool none = log_sum[r] == -INFINITY;
    if (none) {
      FRIT_UNROLL
      for (int i = 0; i < V; ++i)
        if (rows.has(r, i)) store_vec<N, Cache::kStream>(to, i * kStep, Vec<T, N>{});
    }
    FRIT_UNROLL
    for (int i = 0; i < V; ++i) {
      if (none || !rows.has(r, i)) continue;
      const Vec<float, N> of_kept = to_float(g[r][i]);
      Vec<float, N> out;
      FRIT_UNROLL
      for (int k = 0; k < N; ++k) out[k] = p[r][i][k] * fmaf(of_kept[k], factor, -mean[r]);
      store_vec<N, Cache::kStream>(to, i * kStep, from_float<T>(out));
    }
  }
}

template <int V>
Launch ragged_launch(int64_t rows) {
  constexpr int kWarps = ragged_threads(V) / 32, kRows = kWarps * ragged_rows(V);
  return {(rows + kRows - 1) / kRows, ragged_threads(V), kWarps * RaggedWords<V>::kWarpBytes};
}
// Calls f with a value of x's type and the vectors a thread holds, as a constant.
template <typename F>
void for_ragged(int instance, const Tensor& x, F&& f) {
  const int vectors = softmax_whole_vectors(instance, x.dim(1), true);
  const auto start = [&](auto t) {
    if (vectors == 1) return f(t, softmax_constant<1>());
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
