// layer_norm's forward for many 16-bit rows of any width and alignment. Rows stay where they lie: a lane takes whole
// vectors of 16 bytes in memory, and the columns before the first of these and behind the last are one column more in
// lanes 0 to 6 and 8 to 14. What is shifted is gamma and beta: a block's rows begin equally far past a multiple of 16
// bytes (they are a class), so that it can keep both as fp32 in shared memory as its lanes need them.
//
// A warp owns a row, or up to 8 share one, V vectors a lane; blocks stay, and a warp loads its next row while it
// computes one. The sums' order depends on where a row lies.
#include "frit/ops/layer_norm/held.h"
#include "frit/simt/launch.h"

namespace frit::layer_norm {

using namespace simt;

namespace {

constexpr int kClassWarps = 8;  // of a block whose warps hold a row each

// Beside pointers: strides in elements, and how rows are shared out.
struct ClassRows {
  int64_t x_stride = 0, y_stride = 0;
  int rows = 0, cols = 0;
  int warps = 1;                       // that share a row
  int period = 1;                      // classes
  int apart = 1, step = 1, reach = 1;  // ForwardClasses
  float eps = 0, by_cols = 0;
};

// Sums over the 8 lanes that share lane / 8.
FRIT_DEVICE float sum_of_8(float x) {
  return warp_sum<8>(x);
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
  x = x + of * s.x_stride, y = y + of * s.y_stride;

  // Where the class's columns lie: the row's whole vectors begin at column `head`.
  const int head = -row_shift(x) & (N - 1);
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

  // Rows of the class are counted from its first.
  const int first = piece * s.apart, begin = first + group, of_class = (s.rows - of + s.period - 1) / s.period;
  const int end = first + s.reach < of_class ? first + s.reach : of_class;
  const int64_t x_step = s.x_stride * s.period * s.step, y_step = s.y_stride * s.period * s.step;
  Global<const T> from = x + (begin * (s.x_stride * s.period) + head + mine * N);
  Global<T> to = y + (begin * (s.y_stride * s.period) + head + mine * N);
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

  // Floats 0 to 3 and 4 to 7 of 32 vectors of gamma, then of beta: lanes use neighbouring banks.
  constexpr int kPart = 32 * 4, kAll = 4 * kPart;
  const Shared<float> shared = shared_array<float>(0);
  for (int j = thread_index(); j < s.warps * V * 32; j += thread_count()) {
    FRIT_UNROLL
    for (int which = 0; which < 2; ++which) {
      const Vec<float, N> w =
          to_float(load_span<N, Cache::kReadOnly>(which ? beta : gamma, head + j * N, s.cols - tail, T()));
      FRIT_UNROLL
      for (int i = 0; i < 2; ++i)
        store_vec<4>(shared, j / 32 * kAll + (which * 2 + i) * kPart + j % 32 * 4,
                     Vec<float, 4>{{w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]}});
    }
  }
  float gamma_one = 0, beta_one = 0;
  if (has_one)
    gamma_one = widen(load<Cache::kReadOnly>(gamma, one)), beta_one = widen(load<Cache::kReadOnly>(beta, one));
  barrier();
  const Shared<float> lane_shared = shared + (part * V * kAll + lane() * 4);
  Shared<float> scratch = shared + s.warps * V * kAll;  // two turns of 4 floats a warp
  int turn = 0;

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
    from = from + x_step;
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
      const Shared<float> places = scratch + turn * s.warps * 4;
      turn ^= 1;
      if (lane() == 0) store_vec<4>(places, part * 4, Vec<float, 4>{{center, squares, count, 0}});
      barrier();
      const int other = lane() & 7;
      const float base = load(places, 0);
      float apart = 0, weight = 0, within = 0;
      if (other < s.warps) {
        const Vec<float, 4> w = load_vec<4>(places, other * 4);
        apart = w[0] - base, within = w[1], weight = w[2];
      }
      const float above = sum_of_8(apart * weight) * s.by_cols;
      apart -= above;
      squares = sum_of_8(fmaf(apart * apart, weight, within));
      middle = base + above, left = center - base - above;
    }
    const float scale = rsqrt(fmaf(squares, s.by_cols, s.eps));
    left *= scale;
    if (part == 0 && lane() == 0) {
      if (mean) store(mean, of + row * s.period, middle);
      if (rstd) store(rstd, of + row * s.period, scale);
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
    if (has_one) store<Cache::kStream>(to, one_from, convert<T>(normalised(d_one, gamma_one, beta_one)));
    to = to + y_step;
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
  s.period = static_cast<int>(shape.period), s.apart = static_cast<int>(cut.apart);
  s.step = static_cast<int>(cut.step), s.reach = static_cast<int>(cut.reach);
  s.eps = eps, s.by_cols = 1.0f / static_cast<float>(s.cols);
  const Launch grid = {shape.rows == 0 ? 0 : cut.pieces * shape.period, static_cast<int>(cut.groups) * s.warps * 32,
                       int64_t{4} * (s.warps * vectors * 512 + (s.warps == 1 ? 0 : 2 * s.warps * 4))};
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
