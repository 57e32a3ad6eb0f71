// layer_norm's forward for many 16-bit rows of any width and alignment. Rows stay where they lie: a lane takes whole
// vectors of 16 bytes in memory, and the columns before the first of these and behind the last but one are one column
// more in lanes 0 to 6 and 8 to 22. What is shifted is gamma and beta, of which a lane reads two vectors for one of its
// own: the last vector of a row is none, so that the second always lies inside.
//
// A warp owns a row, or up to 8 share one, V vectors a lane. A block's rows are done when it ends: while one waits for
// memory others compute. The sums' order depends on where a row lies.
#include "frit/ops/layer_norm/held.h"
#include "frit/simt/launch.h"
#include "frit/simt/ragged.h"

namespace frit::layer_norm {

using namespace simt;

namespace {

constexpr int kRowsOfBlock = 2;  // where a warp holds one

// Beside pointers: strides in elements, and how rows are shared out.
struct PlacedRows {
  int64_t x_stride = 0, y_stride = 0;
  int rows = 0, cols = 0;
  int warps = 1;  // that share a row
  float eps = 0, by_cols = 0;
};

// Cost: 10 shuffles a row of one warp; 1 barrier and 6 shuffles more where several share it.
template <typename T, int V>
FRIT_KERNEL(256, 3)
layer_norm_forward_in_place_kernel(PlacedRows s, Global<const T> x, Global<const T> gamma, Global<const T> beta,
                                   Global<T> y, Global<float> mean, Global<float> rstd) {
  wait_for_previous();
  constexpr int N = 8, kStep = 32 * N;
  const bool alone = s.warps == 1;
  const int block = static_cast<int>(block_index()), row = alone ? block * kRowsOfBlock + warp() : block;
  if (row >= s.rows) return;  // alone: no barrier follows
  const int part = alone ? 0 : warp();

  // The row's whole vectors begin at column `head`; `tail` columns lie behind those that are taken as such.
  const Global<const T> row_x = x + row * s.x_stride;
  const int head = -row_shift(row_x) & (N - 1);
  const int vectors = (s.cols - head) / N - 1, tail = s.cols - head - vectors * N;
  const bool is_last = part == s.warps - 1;
  const int mine = part * V * 32 + lane();  // the lane's first vector
  const auto inside = [&](int k) { return k + 2 < V || mine + k * 32 < vectors; };
  const Global<const T> from = row_x + (head + mine * N);
  Vec<T, N> v[V];
  FRIT_UNROLL
  for (int k = 0; k < V; ++k) {
    if (k + 2 >= V) v[k] = Vec<T, N>{};
    if (inside(k)) v[k] = load_vec<N, Cache::kStream>(from, k * kStep);
  }
  int one = -1;  // the lane's single column
  if (part == 0 && lane() < head) one = lane();
  if (is_last && lane() >= N && lane() < N + tail) one = s.cols - tail + (lane() - N);
  const bool has_one = one >= 0;
  T value_one = T(), gamma_one = T(), beta_one = T();
  if (has_one) {
    value_one = load<Cache::kStream>(row_x, one);
    gamma_one = load<Cache::kReadOnly>(gamma, one), beta_one = load<Cache::kReadOnly>(beta, one);
  }
  const int of_vectors = is_last ? (vectors - part * V * 32) * N : V * kStep;
  const float count = static_cast<float>(alone ? s.cols : of_vectors + (part == 0 ? head : 0) + (is_last ? tail : 0));
  const float by_count = alone ? s.by_cols : reciprocal_fast(count);

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
    sum = k == 0 ? step : sum + step;
  }
  float d_one = widen(value_one);
  sum = warp_sum(sum + d_one);
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
    const Shared<float> places = shared_array<float>(0);
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
  const Global<T> row_y = y + row * s.y_stride;
  const Global<T> to = row_y + (head + mine * N);
  const Global<const T> gammas = gamma + mine * N, betas = beta + mine * N;
  const auto write = [&](auto past) {
    FRIT_UNROLL
    for (int k = 0; k < V; ++k) {
      if (!inside(k)) continue;
      Vec<T, N> g[2], b[2];
      g[0] = load_vec<N, Cache::kReadOnly>(gammas, k * kStep), b[0] = load_vec<N, Cache::kReadOnly>(betas, k * kStep);
      if constexpr (past > 0) {
        g[1] = load_vec<N, Cache::kReadOnly>(gammas, k * kStep + N);
        b[1] = load_vec<N, Cache::kReadOnly>(betas, k * kStep + N);
      }
      Vec<float, N> out;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        const int at = past + i;
        out[i] =
            normalised(d[k][i], widen(static_cast<T>(g[at / N][at % N])), widen(static_cast<T>(b[at / N][at % N])));
      }
      store_vec<N, Cache::kStream>(to, k * kStep, from_float<T>(out));
    }
  };
  if (has_one) store<Cache::kStream>(row_y, one, convert<T>(normalised(d_one, widen(gamma_one), widen(beta_one))));
  if (head == 0)
    write(std::integral_constant<int, 0>());
  else
    simt::detail::with_shift(head, write);
}

}  // namespace

void start_forward_in_place(Context& context, const ForwardShape& shape, const Tensor& x, const Tensor& gamma,
                            const Tensor& beta, float eps, const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  PlacedRows s;
  s.x_stride = x.row_stride(), s.y_stride = y.row_stride();
  s.rows = static_cast<int>(shape.rows), s.cols = static_cast<int>(shape.cols), s.warps = shape.warps_of(kInPlace);
  s.eps = eps, s.by_cols = 1.0f / static_cast<float>(s.cols);
  const int vectors = shape.held_vectors();
  const bool alone = s.warps == 1;
  const Launch grid = {alone ? (shape.rows + kRowsOfBlock - 1) / kRowsOfBlock : shape.rows,
                       (alone ? kRowsOfBlock : s.warps) * 32, alone ? 0 : int64_t{16} * s.warps};
  const auto start = [&](auto t) {
    using T = decltype(t);
    const auto start_kernel = [&](auto kernel) {
      launch(context, "layer_norm_forward_in_place_kernel", kernel, grid, s, global<const T>(x), global<const T>(gamma),
             global<const T>(beta), global<T>(y), global<float>(mean), global<float>(rstd));
    };
    if (vectors == 2) return start_kernel(layer_norm_forward_in_place_kernel<T, 2>);
    if (vectors == 3) return start_kernel(layer_norm_forward_in_place_kernel<T, 3>);
    start_kernel(layer_norm_forward_in_place_kernel<T, 4>);
  };
  if (x.dtype() == DType::kBF16) return start(bfloat16());
  start(float16());
}

}  // namespace frit::layer_norm
