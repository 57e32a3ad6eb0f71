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
  return vectors == 2 ? (backward ? 8 : 9) : vectors == 4 ? (backward ? 6 : 7) : backward ? 4 : 5;
}

// Where a row's columns lie.
struct RaggedCut {
  int head = 0;   // columns before the first whole vector
  int count = 0;  // whole vectors
  int one = -1;   // the lane's single column; -1: none
};
FRIT_DEVICE RaggedCut ragged_cut(int shift, int cols) {
  RaggedCut cut;
  cut.head = (8 - shift) & 7;
  if (cut.head > cols) cut.head = cols;
  const int left = cols - cut.head, i = lane() & 7, of = lane() >> 3;
  cut.count = left >> 3;
  if (of == 1 && i < cut.head) cut.one = i;
  if (of == 2 && i < (left & 7)) cut.one = cols - (left & 7) + i;
  return cut;
}
// Are all lanes' k-th vectors of V inside? The instances' rows fill half of their vectors or more.
template <int V>
constexpr bool ragged_full(int k) {
  return V > 2 && k < V / 2;
}

// A row's random words in shared memory, 2 bytes a column: a block of 8 columns is drawn by one lane, and the columns
// of a lane's vector lie in two such.
template <int V>
class RaggedWords {
 public:
  static constexpr int kWarpBytes = (32 * V + 1) * 16;

  FRIT_DEVICE RaggedWords() : at_(shared_array<uint32_t>(warp() * kWarpBytes)) {}

  // Draws them all. All lanes of the warp take part. Cost: 37 instructions for 8 columns.
  FRIT_DEVICE void draw(const SoftmaxWhole& s, const SoftmaxWholePlace& at) const {
    const uint32_t row = at.dropout_row;
    FRIT_UNROLL
    for (int i = 0; i < V; i += 2) {
      const uint32_t block = static_cast<uint32_t>(i * 32 + at.lane);
      const DropoutWords<2> words = dropout_words<2>(s.dropout, {row, row}, {block, block + 32}, at.dropout_head);
      FRIT_UNROLL
      for (int j = 0; j < 2; ++j) {
        const uint32_t(&w)[4] = words.v[j];
        store_vec<4>(at_, ((i + j) * 32 + at.lane) * 4, Vec<uint32_t, 4>{{w[0], w[1], w[2], w[3]}});
      }
    }
    if (s.cols > V * 256) {
      const DropoutWords<1> words = dropout_words<1>(s.dropout, {row}, {V * 32u}, at.dropout_head);
      const uint32_t(&w)[4] = words.v[0];
      if (at.lane == 0) store_vec<4>(at_, V * 128, Vec<uint32_t, 4>{{w[0], w[1], w[2], w[3]}});
    }
    warp_barrier();
  }
  // Of the 8 columns from `column` on. Cost: 5 loads in 20 turns, and 4 shifts.
  FRIT_DEVICE DropoutWords<1> of_vector(int column) const {
    const int first = column >> 1, odd = column & 1;
    uint32_t words[5];
    FRIT_UNROLL
    for (int w = 0; w < 4; ++w) words[w] = load(at_, first + w);
    words[4] = load(at_, first + 3 + odd);
    DropoutWords<1> r;
    FRIT_UNROLL
    for (int w = 0; w < 4; ++w) r.v[0][w] = funnel_right(words[w], words[w + 1], 16 * odd);
    return r;
  }
  // Of one column, in the upper half.
  FRIT_DEVICE uint32_t of_column(int column) const { return load(at_, column >> 1) << (column & 1 ? 0 : 16); }

 private:
  Shared<uint32_t> at_;
};

template <typename T, int V>
FRIT_KERNEL(kSoftmaxThreads, ragged_blocks(V, false))
softmax_forward_ragged_kernel(SoftmaxWhole s, Global<const T> x, Global<T> y, Global<float> lse) {
  constexpr int N = 8, kStep = 32 * N;
  wait_for_previous();
  const SoftmaxWholePlace at = softmax_whole_place<32>(s);
  if (!at.active) return;
  const Global<const T> row = x + at.row * s.x_stride;
  const RaggedCut cut = ragged_cut(row_shift(row), s.cols);
  const auto has = [&](int i) { return ragged_full<V>(i) || i * 32 + at.lane < cut.count; };
  const int mine = cut.head + at.lane * N;  // the column of the lane's first vector
  const uint32_t threshold = dropout_threshold(s.dropout), lowest = pack2(T(), -INFINITY, -INFINITY);
  const float c = s.scale * kLog2E;

  Vec<T, N> v[V];
  const Global<const T> from = row + mine;
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    FRIT_UNROLL
    for (int k = 0; k < N / 2; ++k) v[i].pairs[k] = lowest;
    if (has(i)) v[i] = load_vec<N, Cache::kStream>(from, i * kStep);
  }
  T one = T::from_bits(static_cast<uint16_t>(lowest));
  if (cut.one >= 0) one = load<Cache::kStream>(row, cut.one);
  const RaggedWords<V> random;
  random.draw(s, at);  // while the row is on its way

  uint32_t tops = one.bits | lowest << 16;
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    FRIT_UNROLL
    for (int k = 0; k < N / 2; ++k) tops = max2(T(), tops, v[i].pairs[k]);
  }
  const float top = softmax_pair_max<32>(T(), tops);
  // Nothing but -inf: exponentials are 0 then, and NaN where x is NaN, which the maximum passes over.
  const float shift = top == -INFINITY ? 0.0f : top * c;
  const float e_one = exp2_fast(fmaf(widen(one), c, -shift));
  float e[V][N], sum = e_one;
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    float part = 0;
    FRIT_UNROLL
    for (int k = 0; k < N; ++k) {
      e[i][k] = exp2_fast(fmaf(widen(static_cast<T>(v[i][k])), c, -shift));
      part = k == 0 ? e[i][k] : part + e[i][k];
    }
    sum += part;
  }
  sum = warp_sum(sum);
  if (lse && at.lane == 0) store(lse, at.row, sum == 0 ? -INFINITY : (shift + log2_fast(sum)) * kLn2);
  const float kept = sum == 0 ? 0.0f : reciprocal_fast(sum) * s.dropout.scale;

  const Global<T> to = y + at.row * s.y_stride, lane_to = to + mine;
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    if (!has(i)) continue;
    const DropoutWords<1> words = random.of_vector(mine + i * kStep);
    Vec<float, N> out;
    FRIT_UNROLL
    for (int k = 0; k < N; ++k) out[k] = e[i][k] * (words.kept(0, k, threshold) ? kept : 0.0f);
    store_vec<N, Cache::kStream>(lane_to, i * kStep, from_float<T>(out));
  }
  if (cut.one >= 0)
    store<Cache::kStream>(to, cut.one, convert<T>(e_one * (random.of_column(cut.one) >= threshold ? kept : 0.0f)));
}

template <typename T, int V>
FRIT_KERNEL(kSoftmaxThreads, ragged_blocks(V, true))
softmax_backward_ragged_kernel(SoftmaxWhole s, Global<const T> dy, Global<const T> x, Global<const float> lse,
                               Global<T> dx) {
  constexpr int N = 8, kStep = 32 * N;
  wait_for_previous();
  const SoftmaxWholePlace at = softmax_whole_place<32>(s);
  if (!at.active) return;
  const Global<const T> row = x + at.row * s.x_stride, dy_row = dy + at.row * s.dy_stride;
  const RaggedCut cut = ragged_cut(row_shift(row), s.cols);
  const auto has = [&](int i) { return ragged_full<V>(i) || i * 32 + at.lane < cut.count; };
  const int mine = cut.head + at.lane * N;

  Vec<T, N> v[V], g[V];
  const Global<const T> x_from = row + mine, dy_from = dy_row + mine;
  FRIT_UNROLL
  for (int i = 0; i < V; ++i)
    if (has(i)) {
      v[i] = load_vec<N, Cache::kStream>(x_from, i * kStep);
      g[i] = load_vec<N, Cache::kStream>(dy_from, i * kStep);
    }
  T one = T(), dy_one = T();
  if (cut.one >= 0) one = load<Cache::kStream>(row, cut.one), dy_one = load<Cache::kStream>(dy_row, cut.one);
  const float log_sum = load(lse, at.row);
  const uint32_t threshold = dropout_threshold(s.dropout);
  const float c = s.scale * kLog2E, shift = log_sum * kLog2E;
  const RaggedWords<V> random;
  random.draw(s, at);  // while the rows are on their way
  const Global<T> to = dx + at.row * s.y_stride, lane_to = to + mine;
  if (log_sum == -INFINITY) {  // a row of -inf alone has no gradient, whatever dy is
    FRIT_UNROLL
    for (int i = 0; i < V; ++i)
      if (has(i)) store_vec<N, Cache::kStream>(lane_to, i * kStep, Vec<T, N>{});
    if (cut.one >= 0) store<Cache::kStream>(to, cut.one, T());
    return;
  }
  float p_one = 0, g_one = 0;
  if (cut.one >= 0) {
    p_one = exp2_fast(fmaf(widen(one), c, -shift));
    g_one = random.of_column(cut.one) >= threshold ? widen(dy_one) : 0.0f;
  }
  constexpr bool kPacked = V > 2;  // is there no room for dy as fp32?
  std::conditional_t<kPacked, Vec<T, N>, Vec<float, N>> d[V];
  float p[V][N], sum = p_one * g_one;
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    // A branch at each, even where none is needed: else nvcc begins several vectors at once, and spills.
    if (i * 32 + at.lane >= cut.count) continue;
    const DropoutWords<1> words = random.of_vector(mine + i * kStep);
    float part = 0;
    Vec<float, N> of_kept;  // what dropout zeroed has a zero gradient from here on
    FRIT_UNROLL
    for (int k = 0; k < N; ++k) {
      p[i][k] = exp2_fast(fmaf(widen(static_cast<T>(v[i][k])), c, -shift));
      of_kept[k] = words.kept(0, k, threshold) ? widen(static_cast<T>(g[i][k])) : 0.0f;
      part = fmaf(p[i][k], of_kept[k], part);
    }
    sum += part;
    if constexpr (kPacked)
      d[i] = softmax_forget(from_float<T>(of_kept));
    else
      d[i] = of_kept;
  }
  const float factor = s.scale * s.dropout.scale;
  const float mean = warp_sum(sum) * factor;
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    if (!has(i)) continue;
    const Vec<float, N> of_kept = to_float(d[i]);
    Vec<float, N> out;
    FRIT_UNROLL
    for (int k = 0; k < N; ++k) out[k] = p[i][k] * fmaf(of_kept[k], factor, -mean);
    store_vec<N, Cache::kStream>(lane_to, i * kStep, from_float<T>(out));
  }
  if (cut.one >= 0) store<Cache::kStream>(to, cut.one, convert<T>(p_one * fmaf(g_one, factor, -mean)));
}

template <int V>
Launch ragged_launch(int instance, int64_t rows) {
  Launch grid = softmax_launch(instance, rows);
  grid.shared_bytes = grid.threads / 32 * RaggedWords<V>::kWarpBytes;
  return grid;
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
    launch(context, "softmax_forward_ragged_kernel", softmax_forward_ragged_kernel<T, v>,
           ragged_launch<v>(instance, shape.rows), softmax_whole(shape), global<const T>(x), global<T>(y),
           global<float>(lse));
  });
}

void softmax_backward_ragged_gpu(Context& context, int instance, const SoftmaxShape& shape, const Tensor& dy,
                                 const Tensor& x, const Tensor& lse, const Tensor& dx) {
  for_ragged(instance, x, [&](auto t, auto v) {
    using T = decltype(t);
    launch(context, "softmax_backward_ragged_kernel", softmax_backward_ragged_kernel<T, v>,
           ragged_launch<v>(instance, shape.rows), softmax_whole(shape), global<const T>(dy), global<const T>(x),
           global<const float>(lse), global<T>(dx));
  });
}

}  // namespace frit
