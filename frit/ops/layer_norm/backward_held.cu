#include "frit/ops/layer_norm/backward.h"
#include "frit/ops/layer_norm/forward.h"
#include "frit/ops/layer_norm/row_part.h"
#include "frit/ops/layer_norm/span.h"
#include "frit/simt/early.h"
#include "frit/simt/launch.h"

namespace frit::layer_norm {
namespace {

using namespace simt;

// Beside pointers: strides in elements, and how rows are shared out.
struct HeldBackwardRows {
  int64_t dy_stride, x_stride, dresidual_stride, dx_stride, rows;
  int cols, warps, period;
  float by_cols;  // 1 / cols
};

// The xhat form for 16-bit rows by classes of rows that begin equally far past a multiple of 16 bytes: block b takes
// rows of class b % period, batch by batch, each group of `warps` warps a row. A lane has V whole aligned vectors of
// its row; the up to 7 columns before the row's first and the up to 7 behind its last one are one more column in lanes
// 0 to 6 and 8 to 14 of the row's last warp. A row's vectors are copied to shared memory while the two rows before it
// are computed, so that registers hold the columns' sums and little else. gamma lies in shared memory as fp32. At the
// end the block's groups are added up in their order.
//
// x of 16 bits differs from the mean by a multiple of 2^-11 |x| or more: x * rstd - mean * rstd, which takes one
// instruction, is as good as (x - mean) * rstd.
//
// full: all rows are whole aligned vectors, 256 V columns a warp. Cost: 13.5 instructions an element and 100 a row.
template <typename T, int V, bool full>
FRIT_KERNEL(32 * held_block_warps(V), 1)
layer_norm_backward_held_kernel(HeldBackwardRows s, Global<const T> dy, Global<const T> x, Global<const T> gamma,
                                Global<const float> mean, Global<const float> rstd, Global<const T> dresidual,
                                Global<T> dx, Global<float> partials) {
  wait_for_previous();
  constexpr int N = 8, kStep = 32 * N, kStages = 2;
  constexpr int kPairs = 2 * V * N / 4;                   // fours of sums: dgamma's of a vector, then dbeta's
  constexpr bool kAgain = V == 4, kPacked = V == 3;       // has the row no room in registers? As fp32?
  static_assert(kStages * 2 * V * N * 2 == kPairs * 16);  // at last the sums lie where the rows lay
  const int warps = s.warps, groups = warp_count() / warps, group = warp() / warps, part = warp() - group * warps;
  const bool alone = warps == 1;
  const int period = full ? 1 : s.period, row_class = full ? 0 : static_cast<int>(block_index() % period);
  const int shift = full ? 0 : row_shift(x + row_class * s.x_stride), head = (N - shift) % N;
  const int count = (s.cols - head) / N, tail = (s.cols - head) % N;  // whole vectors; columns behind them
  const int first = part * V * 32 + lane();                           // the lane's first vector
  const auto has = [&](int k) { return full || first + k * 32 < count; };
  const int begins = head + first * N;  // its column
  int one = -1;                         // the lane's single column
  if (!full && part == warps - 1) {
    if (lane() < head) one = lane();
    if (lane() >= N && lane() < N + tail) one = head + count * N + lane() - N;
  }
  // Row r here is row row_class + r * period.
  const int all_rows = static_cast<int>((s.rows - row_class + period - 1) / period);
  const int step = static_cast<int>(block_count() / period) * groups;
  const int begin = static_cast<int>(block_index() / period) * groups + group;
  const auto row_of = [&](int r) { return row_class + int64_t{r} * period; };
  const auto lies_so = [&](const auto& other, int64_t stride) {
    return full || (row_shift(other + row_class * stride) == shift && (stride * period % N == 0 || all_rows == 1));
  };
  const bool dy_like = lies_so(dy, s.dy_stride), dx_like = lies_so(dx, s.dx_stride);
  const bool residual_like = dresidual && lies_so(dresidual, s.dresidual_stride);

  const int vectors = warps * V * 32;
  const Shared<float> gammas = shared_array<float>(0), scratch = gammas + vectors * N;
  const Shared<float> ones = scratch + 4 * warp_count();
  const int64_t ring_at = int64_t{4} * (vectors * N + 4 * warp_count() + 64 * groups + 32);
  const Shared<T> ring = shared_array<T>(ring_at);
  const auto slot = [&](int stage, int of, int k) {
    return (((warp() * kStages + stage) * 2 + of) * V + k) * kStep + lane() * N;
  };

  const auto start = [&](int r, int stage) {
    if (r < all_rows) {
      const int64_t row = row_of(r);
      const Global<const T> from = x + (row * s.x_stride + begins), gradient = dy + (row * s.dy_stride + begins);
      FRIT_UNROLL
      for (int k = 0; k < V; ++k)
        if (has(k)) copy_async16(ring, slot(stage, 0, k), from, k * kStep);
      if (dy_like) {
        FRIT_UNROLL
        for (int k = 0; k < V; ++k)
          if (has(k)) copy_async16(ring, slot(stage, 1, k), gradient, k * kStep);
      } else {
        FRIT_UNROLL_BY(1)
        for (int i = 0; i < V * N; ++i)
          if (has(i / N))
            store(ring, slot(stage, 1, i / N) + i % N, load<Cache::kStream>(gradient, i / N * kStep + i % N));
      }
    }
    copy_async_commit();
  };
  float of_next = 0;  // lane 0: the row's mean; lane 1: its rstd
  T x_one = T(), dy_one = T();
  const auto start_single = [&](int r) {
    if (r >= all_rows) return;
    const int64_t row = row_of(r);
    if (lane() < 2) of_next = load(lane() == 0 ? mean : rstd, row);
    if (!full && one >= 0) {
      x_one = load<Cache::kStream>(x, row * s.x_stride + one);
      dy_one = load<Cache::kStream>(dy, row * s.dy_stride + one);
    }
  };
  if constexpr (!full) {
    FRIT_UNROLL
    for (int k = 0; k < V; ++k) {
      FRIT_UNROLL
      for (int of = 0; of < 2 * kStages; ++of)
        if (!has(k)) store_vec<N>(ring, slot(of / 2, of % 2, k), Vec<T, N>{});
    }
  }
  start_single(begin);
  FRIT_UNROLL
  for (int i = 0; i < kStages; ++i) start(begin + i * step, i);
  row_span::spread_vector(gamma, head + count * N, -head, vectors, gammas);
  if (!full && group == 0 && part == warps - 1)
    store(ones, 64 * groups + lane(), one >= 0 ? widen(load<Cache::kReadOnly>(gamma, one)) : 0.0f);
  barrier();
  const float w_one = full ? 0.0f : load(ones, 64 * groups + lane());

  float sum_gamma[V][N] = {}, sum_beta[V][N] = {}, gamma_one = 0, beta_one = 0;
  int turn = 0;  // the row's place in the ring; alternates also between two halves of scratch: one barrier a row
  for (int r = begin, batch = begin - group; (alone ? r : batch) < all_rows; r += step, batch += step) {
    const bool live = r < all_rows;
    const float mu = shuffle(of_next, 0), scale = shuffle(of_next, 1), below = -mu * scale;
    const float x1 = widen(x_one), d1 = widen(dy_one);
    start_single(r + step);
    copy_async_wait<kStages - 1>();

    Vec<T, N> xs[V], dys[V];
    float sums[2] = {0, 0};
    if (live) {
      FRIT_UNROLL
      for (int k = 0; k < V; ++k) {
        xs[k] = load_vec<N>(ring, slot(turn, 0, k)), dys[k] = load_vec<N>(ring, slot(turn, 1, k));
        const Vec<float, N> a = to_float(xs[k]), d = to_float(dys[k]);
        const Vec<float, N> w = row_span::spread_at<N>(gammas, vectors, first + k * 32);
        float sum = 0, product = 0;
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) {  // outside of the row dy is 0
          const float hat = fmaf(a[i], scale, below), g = d[i] * w[i];
          sum += g, product = fmaf(g, hat, product);
          sum_gamma[k][i] = fmaf(d[i], hat, sum_gamma[k][i]);
          sum_beta[k][i] += d[i];
        }
        sums[0] += sum, sums[1] += product;
        if constexpr (kAgain) warp_barrier();  // else nvcc loads all vectors at once, and spills
      }
      if constexpr (!full) {
        const float hat = fmaf(x1, scale, below), g = d1 * w_one;
        sums[0] += g, sums[1] = fmaf(g, hat, sums[1]);
        gamma_one = fmaf(d1, hat, gamma_one), beta_one += d1;
      }
      if constexpr (kPacked) row_span::keep_packed(xs), row_span::keep_packed(dys);
    }
    const int stage = turn;
    turn ^= 1;
    if constexpr (!kAgain) start(r + kStages * step, stage);  // where the row lay, which is in registers by now
    row_part::row_sums(sums, scratch + (stage * groups + group) * warps * 2, warps, part);
    if (!live) continue;
    if constexpr (kAgain) warp_barrier();  // else nvcc keeps the row

    const int64_t row = row_of(r);
    Vec<T, N> more[V];
    T more_one = T();
    if (dresidual) {
      const Global<const T> from = dresidual + row * s.dresidual_stride;
      FRIT_UNROLL
      for (int k = 0; k < V; ++k) {
        more[k] = Vec<T, N>{};
        if (!has(k)) continue;
        if (residual_like) {
          more[k] = load_vec<N, Cache::kStream>(from + begins, k * kStep);
        } else {
          FRIT_UNROLL
          for (int i = 0; i < N; ++i) more[k][i] = load<Cache::kStream>(from, begins + k * kStep + i);
        }
      }
      if (one >= 0) more_one = load<Cache::kStream>(from, one);
    }
    const float by_x = -scale * scale * (sums[1] * s.by_cols);
    const float constant = fmaf(-mu, by_x, -scale * (sums[0] * s.by_cols));
    const Global<T> to = dx + row * s.dx_stride, lane_to = to + begins;
    FRIT_UNROLL
    for (int k = 0; k < V; ++k) {
      if constexpr (kAgain) xs[k] = load_vec<N>(ring, slot(stage, 0, k)), dys[k] = load_vec<N>(ring, slot(stage, 1, k));
      const Vec<float, N> a = to_float(xs[k]), d = to_float(dys[k]);
      const Vec<float, N> w = row_span::spread_at<N>(gammas, vectors, first + k * 32);
      Vec<float, N> v;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) v[i] = fmaf(d[i] * w[i], scale, fmaf(a[i], by_x, constant));
      if (dresidual) {
        const Vec<float, N> m = to_float(more[k]);
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) v[i] += m[i];
      }
      if (!has(k)) continue;
      const Vec<T, N> out = from_float<T>(v);
      if (dx_like) {
        store_vec<N>(lane_to, k * kStep, out);
      } else {
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) store(to, begins + k * kStep + i, static_cast<T>(out[i]));
      }
    }
    if (one >= 0) {
      float v = fmaf(d1 * w_one, scale, fmaf(x1, by_x, constant));
      if (dresidual) v += widen(more_one);
      store(to, one, convert<T>(v));
    }
    if constexpr (kAgain) start(r + kStages * step, stage);
  }

  let_next_start();  // there is no room for it before this kernel's blocks end
  copy_async_wait<0>();
  if (alone)
    warp_barrier();
  else
    barrier();  // other warps have read their rows
  // Four sums of a thread at [group][pair][thread of the group][4].
  const Shared<float> handed = shared_array<float>(ring_at);
  const int in_group = part * 32 + lane(), width = warps * 32;
  const auto sums_at = [&](int of, int pair) { return ((of * kPairs + pair) * width + in_group) * 4; };
  FRIT_UNROLL
  for (int k = 0; k < V; ++k) {
    FRIT_UNROLL
    for (int i = 0; i < N; i += 4) {
      const float(&a)[N] = sum_gamma[k], (&b)[N] = sum_beta[k];
      store_vec<4>(handed, sums_at(group, (k * 2 * N + i) / 4), Vec<float, 4>{{a[i], a[i + 1], a[i + 2], a[i + 3]}});
      store_vec<4>(handed, sums_at(group, (k * 2 * N + N + i) / 4),
                   Vec<float, 4>{{b[i], b[i + 1], b[i + 2], b[i + 3]}});
    }
  }
  if (!full && part == warps - 1) store_vec<2>(ones, (group * 32 + lane()) * 2, Vec<float, 2>{{gamma_one, beta_one}});
  if (groups > 1) barrier();
  const Global<float> to = partials + block_index() * 2 * s.cols;
  for (int pair = group; pair < kPairs; pair += groups) {
    const int k = pair / (2 * N / 4), i = pair % (2 * N / 4) * 4;
    if (!has(k)) continue;
    Vec<float, 4> total = load_vec<4>(handed, sums_at(0, pair));
    for (int of = 1; of < groups; ++of) {
      const Vec<float, 4> other = load_vec<4>(handed, sums_at(of, pair));
      FRIT_UNROLL
      for (int j = 0; j < 4; ++j) total[j] += other[j];
    }
    store_span<4>(i < N ? to : to + s.cols, begins + k * kStep + i % N, s.cols, total);
  }
  if (!full && group == 0 && one >= 0) {
    for (int of = 1; of < groups; ++of) {
      const Vec<float, 2> other = load_vec<2>(ones, (of * 32 + lane()) * 2);
      gamma_one += other[0], beta_one += other[1];
    }
    store(to, one, gamma_one), store(to + s.cols, one, beta_one);
  }
}

template <typename T, bool full>
void launch_held_backward(Context& context, const BackwardShape& shape, const LayerNormBackward& b) {
  const BackwardCut cut = shape.cut(kHeldBackward);
  HeldBackwardRows s;
  s.dy_stride = b.dy.row_stride(), s.x_stride = b.x.row_stride();
  s.dresidual_stride = b.dresidual.row_stride(), s.dx_stride = b.dx.row_stride();
  s.rows = shape.rows, s.cols = static_cast<int>(shape.cols);
  s.warps = cut.warps, s.period = static_cast<int>(shape.period);
  s.by_cols = 1.0f / static_cast<float>(shape.cols);
  const auto start = [&](auto kernel) {
    launch(context, "layer_norm_backward_held_kernel", kernel, {cut.blocks, cut.threads(), cut.shared_bytes}, s,
           global<const T>(b.dy), global<const T>(b.x), global<const T>(b.gamma), global<const float>(b.mean),
           global<const float>(b.rstd), global<const T>(b.dresidual), global<T>(b.dx), global<float>(b.partials));
  };
  const int vectors = shape.held_vectors();
  if (vectors == 2) return start(layer_norm_backward_held_kernel<T, 2, full>);
  if (vectors == 3) return start(layer_norm_backward_held_kernel<T, 3, full>);
  start(layer_norm_backward_held_kernel<T, 4, full>);
}

}  // namespace

void start_backward_held(Context& context, const BackwardShape& shape, const LayerNormBackward& b, bool whole) {
  const auto start = [&](auto t) {
    using T = decltype(t);
    if (whole && shape.cols == int64_t{256} * shape.held_vectors() * shape.cut(kHeldBackward).warps)
      return launch_held_backward<T, true>(context, shape, b);
    launch_held_backward<T, false>(context, shape, b);
  };
  if (b.x.dtype() == DType::kBF16) return start(bfloat16());
  start(float16());
}

}  // namespace frit::layer_norm
