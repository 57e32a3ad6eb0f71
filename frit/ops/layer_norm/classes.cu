// layer_norm's forward for many 16-bit rows of any width and alignment. Rows stay where they lie: a lane takes whole
// vectors of 16 bytes in memory, and the columns before the first of these and behind the last are one column more in
// lanes 0 to 6 and 8 to 14. What is shifted is gamma and beta: a block's rows begin equally far past a multiple of 16
// bytes (they are a class), so that it can keep both as fp32 in shared memory as its lanes need them.
//
// A warp owns a row, or up to 8 share one, V vectors a lane; blocks stay, and a warp loads its next row while it
// computes one. The sums' order depends on where a row lies.
#include "frit/ops/layer_norm/held.h"
#include "frit/simt/funnel.h"
#include "frit/simt/launch.h"

namespace frit::layer_norm {

using namespace simt;

namespace {

constexpr int kClassWarps = 8;                  // of a block whose warps hold a row each
constexpr int kScratch = 2 * kClassWarps * 16;  // bytes before gamma and beta in shared memory

// Beside pointers: strides in elements, and how rows are shared out.
struct ClassRows {
  int64_t x_stride = 0, y_stride = 0;
  int64_t x_step = 0, y_step = 0;  // from a warp's row to its next
  int rows = 0, cols = 0;
  int warps = 1;                       // that share a row
  int period = 1;                      // classes
  int apart = 1, step = 1, reach = 1;  // ForwardClasses, of all rows
  float eps = 0, by_cols = 0;
};

// The elements [past, past + 8) of the 16 in low and high; past below 8.
template <typename T>
FRIT_DEVICE Vec<T, 8> words_from(const Vec<T, 8>& low, const Vec<T, 8>& high, int past) {
  uint32_t a[8], b[6], c[5];
  FRIT_UNROLL
  for (int i = 0; i < 4; ++i) a[i] = low.pairs[i], a[i + 4] = high.pairs[i];
  FRIT_UNROLL
  for (int i = 0; i < 6; ++i) b[i] = past & 4 ? a[i + 2] : a[i];
  FRIT_UNROLL
  for (int i = 0; i < 5; ++i) c[i] = past & 2 ? b[i + 1] : b[i];
  Vec<T, 8> result;
  FRIT_UNROLL
  for (int i = 0; i < 4; ++i) result.pairs[i] = funnel_right(c[i], c[i + 1], 16 * (past & 1));
  return result;
}

// Cost: 10 shuffles a row of one warp; 1 barrier a block, and 1 a row and 8 shuffles where several share it.
template <typename T, int V>
FRIT_KERNEL(kClassWarps * 32, 3)
layer_norm_forward_classes_kernel(ClassRows s, Global<const T> x, Global<const T> gamma, Global<const T> beta,
                                  Global<T> y, Global<float> mean, Global<float> rstd) {
  wait_for_previous();
  constexpr int N = 8, kStep = 32 * N;
  const bool alone = s.warps == 1;
  const int part = alone ? 0 : warp(), group = alone ? warp() : 0;
  const int piece = static_cast<int>(block_index()) / s.period;
  const int of = static_cast<int>(block_index()) - piece * s.period;  // the class

  // Where the class's columns lie: the row's whole vectors begin at column `head`.
  const int head = -row_shift(x + of * s.x_stride) & (N - 1);
  const int vectors = (s.cols - head) / N, tail = (s.cols - head) % N;
  const bool is_last = part == s.warps - 1;
  const int mine = part * V * 32 + lane();  // the lane's first vector
  const bool inside_last = mine + (V - 1) * 32 < vectors;
  const auto inside = [&](int k) { return k + 1 < V || inside_last; };
  int one = -1;  // the lane's single column
  if (part == 0 && lane() < head) one = lane();
  if (is_last && lane() >= N && lane() < N + tail) one = s.cols - tail + (lane() - N);
  const bool has_one = one >= 0;
  const int of_vectors = is_last ? (vectors - part * V * 32) * N : V * kStep;
  const float count = static_cast<float>(of_vectors + (part == 0 ? head : 0) + (is_last ? tail : 0));
  const float by_count = 1.0f / count;

  const int first = of + piece * s.apart, begin = first + group * s.period;
  const int end = s.reach < s.rows - first ? first + s.reach : s.rows;
  Global<const T> from = x + (begin * s.x_stride + head + mine * N);
  Global<T> to = y + (begin * s.y_stride + head + mine * N);
  const int one_from = one - head - mine * N;
  Vec<T, N> v[V];
  T next_one = T();
  FRIT_UNROLL
  for (int k = 0; k < V; ++k) v[k] = Vec<T, N>{};
  const auto start = [&] {
    FRIT_UNROLL
    for (int k = 0; k < V; ++k)
      if (inside(k)) v[k] = load_vec<N, Cache::kStream>(from, k * kStep);
    if (has_one) next_one = load<Cache::kStream>(from, one_from);
  };
  if (begin < end) start();

  // Floats 0 to 3 and 4 to 7 of 32 vectors of gamma, then of beta: lanes use neighbouring banks. What lies in memory is
  // read as whole aligned vectors, two for each that lies across them.
  constexpr int kPart = 32 * 4, kAll = 4 * kPart;
  const Shared<float> lane_shared = shared_array<float>(kScratch) + (part * V * kAll + lane() * 4);
  const auto keep = [&](auto vectors_at_once, int which, int k) {
    constexpr int M = vectors_at_once;
    const Global<const T> of_columns = which ? beta : gamma;
    const int column = head + (mine + k * 32) * N, past = row_shift(of_columns + head);
    Vec<T, N> low[M], high[M];
    FRIT_UNROLL
    for (int m = 0; m < M; ++m) {
      const int c = column - past + m * kStep;
      low[m] = high[m] = Vec<T, N>{};
      if (c < 0 || c + 2 * N > s.cols) continue;
      low[m] = load_vec<N, Cache::kReadOnly>(of_columns, c);
      if (past > 0) high[m] = load_vec<N, Cache::kReadOnly>(of_columns, c + N);
    }
    FRIT_UNROLL
    for (int m = 0; m < M; ++m) {
      const int c = column + m * kStep;
      Vec<T, N> v = words_from(low[m], high[m], past);
      if (c < past || c - past + 2 * N > s.cols) v = load_span<N, Cache::kReadOnly>(of_columns, c, s.cols - tail, T());
      const Vec<float, N> w = to_float(v);
      FRIT_UNROLL
      for (int i = 0; i < 2; ++i)
        store_vec<4>(lane_shared, (k + m) * kAll + (which * 2 + i) * kPart,
                     Vec<float, 4>{{w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]}});
    }
  };
  if (alone) {  // the block's warps make what all of them use
    for (int i = warp(); i < 2 * V; i += warp_count())
      keep(std::integral_constant<int, 1>(), i >= V ? 1 : 0, i >= V ? i - V : i);
  } else {
    constexpr int kAtOnce = V == 4 ? 2 : V;
    FRIT_UNROLL_BY(1)
    for (int i = 0; i < 2 * V; i += kAtOnce) keep(std::integral_constant<int, kAtOnce>(), i / V, i % V);
  }
  uint32_t of_one = 0;  // gamma's and beta's element there
  if (has_one)
    of_one = load<Cache::kReadOnly>(gamma, one).bits | uint32_t{load<Cache::kReadOnly>(beta, one).bits} << 16;
  barrier();
  int turn = 0;  // alternates between two halves of what warps tell each other through, so that one barrier is enough

  for (int row = begin; row < end; row += s.step) {
    // Of this warp's columns: their mean, what each lies above it by, and the sum of these squared.
    float d[V][N], sum = 0, squares = 0;
    FRIT_UNROLL
    for (int k = 0; k < V; ++k) {
      float step = 0;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        d[k][i] = widen(static_cast<T>(v[k][i]));  // 0 past the row
        step = i == 0 ? d[k][i] : step + d[k][i];
      }
      sum += step;
    }
    float d_one = widen(next_one);
    sum += d_one;
    from = from + s.x_step;
    if (row + s.step < end) start();
    sum = warp_sum(sum);
    float center = sum * by_count;
    center = fmaf(fmaf(-center, count, sum), by_count, center);
    FRIT_UNROLL
    for (int k = 0; k < V; ++k) {
      float step = 0;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        d[k][i] -= center;
        step = i == 0 ? d[k][i] * d[k][i] : fmaf(d[k][i], d[k][i], step);
      }
      squares += inside(k) ? step : 0.0f;
    }
    d_one -= center;
    squares = warp_sum(squares + (has_one ? d_one * d_one : 0.0f));

    float middle = center, left = 0;  // the row's mean, and what the warp's mean lies above it by
    if (!alone) {
      // Chan, Golub, LeVeque 1979, of all parts at once, each in a lane.
      const Shared<float> places = shared_array<float>(turn);
      turn ^= kScratch / 2;
      if (lane() == 0) store_vec<4>(places, part * 4, Vec<float, 4>{{center, squares, count, 0}});
      barrier();
      const int other = lane() & 7;
      const float base = load(places, 0);
      float apart = 0, weight = 0, within = 0;
      if (other < s.warps) {
        const Vec<float, 4> w = load_vec<4>(places, other * 4);
        apart = w[0] - base, within = w[1], weight = w[2];
      }
      const float above = warp_sum<8>(apart * weight) * s.by_cols;
      apart -= above;
      squares = warp_sum<8>(fmaf(apart * apart, weight, within));
      middle = base + above, left = center - base - above;
    }
    const float scale = rsqrt(fmaf(squares, s.by_cols, s.eps));
    left *= scale;
    if (part == 0 && lane() == 0) {
      if (mean) store(mean, row, middle);
      if (rstd) store(rstd, row, scale);
    }
    const auto normalised = [&](float value, float g, float b) { return fmaf(fmaf(value, scale, left), g, b); };
    FRIT_UNROLL
    for (int k = 0; k < V; ++k) {
      if (!inside(k)) continue;
      Vec<float, N> out;
      FRIT_UNROLL
      for (int i = 0; i < N; i += 4) {
        const Vec<float, 4> g = load_vec<4>(lane_shared, k * kAll + i / 4 * kPart);
        const Vec<float, 4> b = load_vec<4>(lane_shared, k * kAll + (2 + i / 4) * kPart);
        FRIT_UNROLL
        for (int e = 0; e < 4; ++e) out[i + e] = normalised(d[k][i + e], g[e], b[e]);
      }
      store_vec<N, Cache::kStream>(to, k * kStep, from_float<T>(out));
    }
    if (has_one) {
      const uint32_t both = opaque(of_one);  // else it is taken apart before the loop, into two registers
      const float g = widen(T::from_bits(static_cast<uint16_t>(both))),
                  b = widen(T::from_bits(static_cast<uint16_t>(both >> 16)));
      store<Cache::kStream>(to, one_from, convert<T>(normalised(d_one, g, b)));
    }
    to = to + s.y_step;
  }
}

}  // namespace

void start_forward_classes(Context& context, int instance, const ForwardShape& shape, const Tensor& x,
                           const Tensor& gamma, const Tensor& beta, float eps, const Tensor& y, const Tensor& mean,
                           const Tensor& rstd) {
  const ForwardClasses cut(shape, instance);
  const int vectors = shape.held_vectors();
  ClassRows s;
  s.x_stride = x.row_stride(), s.y_stride = y.row_stride();
  s.rows = static_cast<int>(shape.rows), s.cols = static_cast<int>(shape.cols), s.warps = shape.warps_of(instance);
  s.period = static_cast<int>(shape.period), s.apart = static_cast<int>(cut.apart * shape.period);
  s.step = static_cast<int>(cut.step * shape.period), s.reach = static_cast<int>(cut.reach * shape.period);
  s.x_step = s.x_stride * s.step, s.y_step = s.y_stride * s.step;
  s.eps = eps, s.by_cols = 1.0f / static_cast<float>(s.cols);
  const Launch grid = {shape.rows == 0 ? 0 : cut.pieces * shape.period, static_cast<int>(cut.groups) * s.warps * 32,
                       kScratch + int64_t{4} * s.warps * vectors * 512};
  const auto start = [&](auto t) {
    using T = decltype(t);
    const auto start_kernel = [&](auto kernel) {
      launch(context, "layer_norm_forward_classes_kernel", kernel, grid, s, global<const T>(x), global<const T>(gamma),
             global<const T>(beta), global<T>(y), global<float>(mean), global<float>(rstd));
    };
    if (vectors == 2) return start_kernel(layer_norm_forward_classes_kernel<T, 2>);
    if (vectors == 3) return start_kernel(layer_norm_forward_classes_kernel<T, 3>);
    start_kernel(layer_norm_forward_classes_kernel<T, 4>);
  };
  if (x.dtype() == DType::kBF16) return start(bfloat16());
  start(float16());
}

}  // namespace frit::layer_norm
