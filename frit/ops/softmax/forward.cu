#include "frit/ops/softmax/forward.h"
#include "frit/ops/softmax/whole.h"

namespace frit {

using namespace simt;

namespace {

constexpr int kFullVectors = 2, kFullRows = 2;  // of a lane in a row, and of a warp
constexpr int kFullThreads = 64, kFullWarps = kFullThreads / 32;

// Whole aligned rows of 512 columns, two to a warp: no vector is missing and nothing is made twice. Rows 2 i and 2 i +
// 1 are of one head. The same bits as softmax_forward_whole_kernel's.
template <typename T>
FRIT_KERNEL(kFullThreads, 18)
softmax_forward_full_kernel(SoftmaxWhole s, Global<const T> x, Global<T> y, Global<float> lse) {
  constexpr int N = 8, V = kFullVectors, R = kFullRows;
  wait_for_previous();
  const uint32_t row = (static_cast<uint32_t>(block_index()) * kFullWarps + static_cast<uint32_t>(warp())) * R;
  if (row >= static_cast<uint32_t>(s.rows)) return;
  const int mine = lane() * N;

  Vec<T, N> v[R][V];
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    const Global<const T> from = x + (softmax_row(row, s.x_stride) + mine) + r * static_cast<int64_t>(s.x_stride);
    FRIT_UNROLL
    for (int i = 0; i < V; ++i) v[r][i] = load_vec<N, Cache::kStream>(from, i * 32 * N);
  }
  const uint32_t head = s.by_head(row), counter = s.first_row + row - head * s.by_head.divisor;
  const uint32_t block = static_cast<uint32_t>(lane());
  static_assert(V == 2 && R == 2);
  const DropoutWords<4> words = softmax_draw<4>(s.dropout, {counter, counter, counter + 1, counter + 1},
                                                {block, block + 32, block, block + 32}, {head, head, head, head});
  // They wait in shared memory: registers are for rows.
  const Shared<uint32_t> kept_words = shared_array<uint32_t>((warp() * R * V * 32 + lane()) * 16);
  FRIT_UNROLL
  for (int j = 0; j < R * V; ++j) {
    const uint32_t(&w)[4] = words.v[j];
    store_vec<4>(kept_words, j * 128, Vec<uint32_t, 4>{{w[0], w[1], w[2], w[3]}});
  }
  warp_barrier();
  const uint32_t threshold = dropout_threshold(s.dropout);
  const float c = s.scale * kLog2E;

  const uint32_t drawn = softmax_behind(words, s.nothing);
  uint32_t tops[R];
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    tops[r] = v[r][0].pairs[0] | drawn;
    FRIT_UNROLL
    for (int k = 1; k < V * N / 2; ++k) tops[r] = max2(T(), tops[r], v[r][k / (N / 2)].pairs[k % (N / 2)]);
  }
  float e[R][V][N], shift[R], sum[R];
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) sum[r] = softmax_exponentials<32>(v[r], tops[r], c, e[r], shift[r]);
  FRIT_UNROLL
  for (int bits = 16; bits > 0; bits /= 2) {
    FRIT_UNROLL
    for (int r = 0; r < R; ++r) sum[r] += shuffle_xor(sum[r], bits);
  }
  if (lse && lane() < R) {
    const float of = lane() == 0 ? sum[0] : sum[1], from = lane() == 0 ? shift[0] : shift[1];
    store(lse, row + lane(), of == 0 ? -INFINITY : (from + log2_fast(of)) * kLn2);
  }
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    const float kept = sum[r] == 0 ? 0.0f : reciprocal_fast(sum[r]) * s.dropout.scale;
    const Global<T> to = y + (softmax_row(row, s.y_stride) + mine) + r * static_cast<int64_t>(s.y_stride);
    FRIT_UNROLL
    for (int i = 0; i < V; ++i) {
      const Vec<uint32_t, 4> w = load_vec<4>(kept_words, (r * V + i) * 128);
      const DropoutWords<1> mine_again{{{w[0], w[1], w[2], w[3]}}};
      Vec<float, N> out;
      FRIT_UNROLL
      for (int k = 0; k < N; ++k) out[k] = e[r][i][k] * (mine_again.kept(0, k, threshold) ? kept : 0.0f);
      store_vec<N, Cache::kStream>(to, i * 32 * N, from_float<T>(out));
    }
  }
}

bool rows_full(const SoftmaxShape& s) {
  return s.dropout.active() && s.cols == 32 * 8 * kFullVectors && s.rows % kFullRows == 0 &&
         s.rows_per_head % kFullRows == 0;
}

}  // namespace

void softmax_forward_gpu(Context& context, const Tensor& x, const SoftmaxArgs& args, const Tensor& y,
                         const Tensor& lse) {
  if (args.p.defined()) return softmax_forward_stored_gpu(context, x, args, y, lse);
  const bool two_dtypes = y.dtype() != x.dtype();
  const bool plain = softmax_plain(x, args, y, Tensor()), ragged = !softmax_rows_whole(x, y, Tensor());
  const int instance = choose_softmax_instance(context, "softmax_forward", x, args, two_dtypes, plain);
  const SoftmaxShape s = softmax_shape(x, args, y);
  if (const int vectors = softmax_whole_vectors(instance, x.dim(1), ragged); vectors > 0 && plain) {
    if (ragged) return softmax_forward_ragged_gpu(context, instance, s, x, y, lse);
    const auto start = [&](auto t) {
      using T = decltype(t);
      if (instance == kRowPerWarp && rows_full(s)) {
        constexpr int kRows = kFullWarps * kFullRows;
        return launch(context, "softmax_forward_full_kernel", softmax_forward_full_kernel<T>,
                      {(s.rows + kRows - 1) / kRows, kFullThreads, kFullThreads * kFullVectors * kFullRows * 16},
                      softmax_whole(s), global<const T>(x), global<T>(y), global<float>(lse));
      }
      for_softmax_whole(instance, vectors, [&](auto g, auto v) {
        launch(context, "softmax_forward_whole_kernel", softmax_forward_whole_kernel<T, g, v>,
               softmax_launch(instance, s.rows), softmax_whole(s), global<const T>(x), global<T>(y),
               global<float>(lse));
      });
    };
    return x.dtype() == DType::kBF16 ? start(bfloat16()) : start(float16());
  }
  const auto run = [&](auto t, auto ty, auto i) {
    using T = decltype(t);
    using TY = decltype(ty);
    launch(context, "softmax_forward_rows_kernel", softmax_forward_rows_kernel<T, TY, i, false>,
           softmax_launch(i, s.rows), s, global<const T>(x), global<const int32_t>(args.lengths),
           global<const float>(args.mask), global<TY>(y), global<float>(lse), Global<TY>(), Global<uint8_t>());
  };
  if (two_dtypes) {
    if (y.dtype() == DType::kBF16) return run(float(), bfloat16(), softmax_constant<kAny>());
    return run(float(), float16(), softmax_constant<kAny>());
  }
  dispatch_float(x.dtype(), [&](auto t) { for_softmax_instance(instance, [&](auto i) { run(t, t, i); }); });
}

}  // namespace frit
