// layer_norm's forward for many 16-bit rows of any width and alignment. Rows stay where they lie: a lane takes whole
// vectors of 16 bytes in memory, and the columns before the first of these and behind the last but one are one column
// more in lanes 0 to 6 and 8 to 22. What is shifted is gamma and beta, of which a lane reads two vectors for one of its
// own: the last vector of a row is none, so that the second always lies inside.
//
// A warp owns a row, or up to 8 share one, V vectors a lane. A block's rows are done when it ends: while one waits for
// memory others compute. The sums' order depends on where a row lies.
#include "frit/ops/layer_norm/held.h"
#include "frit/ops/layer_norm/row_part.h"
#include "frit/simt/launch.h"
#include "frit/simt/ragged.h"

namespace frit::layer_norm {

using namespace simt;
using row_part::warp_sums;

namespace {

constexpr int kWarpsOfBlock = 2;  // where each holds rows of its own

// Beside pointers: strides in elements, and how rows are shared out.
struct PlacedRows {
  int64_t x_stride = 0, y_stride = 0;
  int rows = 0, cols = 0;
  int warps = 1;  // that share a row
  float eps = 0, by_cols = 0;
};

// A warp takes R rows at once; of two the second is the eighth behind the first, which begins equally far past a
// multiple of 16 bytes. Cost: 10 shuffles a row of one warp; 1 barrier and 6 shuffles more where several share it.
template <typename T, int V, int R>
FRIT_KERNEL(256, R == 2 && V == 4 ? 2 : 3)
layer_norm_forward_in_place_kernel(PlacedRows s, Global<const T> x, Global<const T> gamma, Global<const T> beta,
                                   Global<T> y, Global<float> mean, Global<float> rstd) {
  wait_for_previous();
  constexpr int N = 8, kStep = 32 * N, kApart = 8;
  const bool alone = s.warps == 1;
  const int block = static_cast<int>(block_index()), taken = alone ? block * kWarpsOfBlock + warp() : block;
  const int row = R == 1 ? taken : taken / kApart * 2 * kApart + taken % kApart;
  if (row >= s.rows) return;  // alone: no barrier follows
  const auto live = [&](int r) { return r == 0 || row + kApart < s.rows; };
  const int part = alone ? 0 : warp();

  // The row's whole vectors begin at column `head`; `tail` columns lie behind those that are taken as such.
  const Global<const T> row_x = x + row * s.x_stride;
  const int head = -row_shift(row_x) & (N - 1);
  const int vectors = (s.cols - head) / N - 1, tail = s.cols - head - vectors * N;
  const bool is_last = part == s.warps - 1;
  const int mine = part * V * 32 + lane();  // the lane's first vector
  const auto inside = [&](int k) { return k + 2 < V || mine + k * 32 < vectors; };
  Vec<T, N> v[R][V];
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    const Global<const T> from = row_x + (r * kApart * s.x_stride + (head + mine * N));
    FRIT_UNROLL
    for (int k = 0; k < V; ++k) {
      if (k + 2 >= V || r > 0) v[r][k] = Vec<T, N>{};
      if (inside(k) && live(r)) v[r][k] = load_vec<N, Cache::kStream>(from, k * kStep);
    }
  }
  int one = -1;  // the lane's single column
  if (part == 0 && lane() < head) one = lane();
  if (is_last && lane() >= N && lane() < N + tail) one = s.cols - tail + (lane() - N);
  const bool has_one = one >= 0;
  T value_one[R], gamma_one = T(), beta_one = T();
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    value_one[r] = T();
    if (has_one && live(r)) value_one[r] = load<Cache::kStream>(row_x + r * kApart * s.x_stride, one);
  }
  if (has_one) gamma_one = load<Cache::kReadOnly>(gamma, one), beta_one = load<Cache::kReadOnly>(beta, one);
  const int of_vectors = is_last ? (vectors - part * V * 32) * N : V * kStep;
  const float count = static_cast<float>(alone ? s.cols : of_vectors + (part == 0 ? head : 0) + (is_last ? tail : 0));
  const float by_count = alone ? s.by_cols : reciprocal_fast(count);

  // Of this warp's columns: their mean, what each lies above it by, and the sum of these squared.
  float d[R][V][N], d_one[R], sum[R], squares[R], center[R];
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    FRIT_UNROLL
    for (int k = 0; k < V; ++k) {
      float step = 0;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        d[r][k][i] = widen(static_cast<T>(v[r][k][i]));  // 0 past the row
        step = i == 0 ? d[r][k][i] : step + d[r][k][i];
      }
      sum[r] = k == 0 ? step : sum[r] + step;
    }
    d_one[r] = widen(value_one[r]);
    sum[r] += d_one[r];
  }
  warp_sums(sum);
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    center[r] = sum[r] * by_count;
    center[r] = fmaf(fmaf(-center[r], count, sum[r]), by_count, center[r]);
    d_one[r] -= center[r];
    squares[r] = has_one ? d_one[r] * d_one[r] : 0.0f;
    FRIT_UNROLL
    for (int k = 0; k < V; ++k) {
      float step = 0;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        d[r][k][i] -= center[r];
        step = i == 0 ? d[r][k][i] * d[r][k][i] : fmaf(d[r][k][i], d[r][k][i], step);
      }
      squares[r] += inside(k) ? step : 0.0f;
    }
  }
  warp_sums(squares);

  float middle[R], left[R];  // the row's mean, and what the warp's mean lies above it by
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) middle[r] = center[r], left[r] = 0;
  if (!alone) {
    // Chan, Golub, LeVeque 1979, of all parts at once, each in a lane.
    const Shared<float> places = shared_array<float>(0);
    if (lane() == 0) {
      FRIT_UNROLL
      for (int r = 0; r < R; ++r)
        store_vec<4>(places, (r * 8 + part) * 4, Vec<float, 4>{{center[r], squares[r], count, 0}});
    }
    barrier();
    const int other = lane() & 7;
    FRIT_UNROLL
    for (int r = 0; r < R; ++r) {
      const float base = load(places, r * 32);
      float apart = 0, weight = 0, within = 0;
      if (other < s.warps) {
        const Vec<float, 4> w = load_vec<4>(places, (r * 8 + other) * 4);
        apart = w[0] - base, within = w[1], weight = w[2];
      }
      const float above = warp_sum<8>(apart * weight) * s.by_cols;
      apart -= above;
      squares[r] = warp_sum<8>(fmaf(apart * apart, weight, within));
      middle[r] = base + above, left[r] = center[r] - base - above;
    }
  }
  float scale[R];
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    scale[r] = rsqrt(fmaf(squares[r], s.by_cols, s.eps));
    left[r] *= scale[r];
    if (part == 0 && lane() == 0 && live(r)) {
      if (mean) store(mean, row + r * kApart, middle[r]);
      if (rstd) store(rstd, row + r * kApart, scale[r]);
    }
  }
  const auto normalised = [&](int r, float value, float g, float b) {
    return fmaf(fmaf(value, scale[r], left[r]), g, b);
  };
  const Global<T> row_y = y + row * s.y_stride;
  FRIT_UNROLL
  for (int r = 0; r < R; ++r)
    if (has_one && live(r))
      store<Cache::kStream>(row_y + r * kApart * s.y_stride, one,
                            convert<T>(normalised(r, d_one[r], widen(gamma_one), widen(beta_one))));
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
      Vec<float, N> out[R];
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        const int at = past + i;
        const float of_g = widen(static_cast<T>(g[at / N][at % N])), of_b = widen(static_cast<T>(b[at / N][at % N]));
        FRIT_UNROLL
        for (int r = 0; r < R; ++r) out[r][i] = normalised(r, d[r][k][i], of_g, of_b);
      }
      FRIT_UNROLL
      for (int r = 0; r < R; ++r)
        if (live(r)) store_vec<N, Cache::kStream>(to + r * kApart * s.y_stride, k * kStep, from_float<T>(out[r]));
    }
  };
  if (head == 0)
    write(std::integral_constant<int, 0>());
  else
    simt::detail::with_shift(head, write);
}

}  // namespace

void start_forward_in_place(Context& context, int instance, const ForwardShape& shape, const Tensor& x,
                            const Tensor& gamma, const Tensor& beta, float eps, const Tensor& y, const Tensor& mean,
                            const Tensor& rstd) {
  PlacedRows s;
  s.x_stride = x.row_stride(), s.y_stride = y.row_stride();
  s.rows = static_cast<int>(shape.rows), s.cols = static_cast<int>(shape.cols), s.warps = shape.warps_of(instance);
  s.eps = eps, s.by_cols = 1.0f / static_cast<float>(s.cols);
  const int vectors = shape.held_vectors(), rows_at_once = instance == kInPlace2 ? 2 : 1;
  const bool alone = s.warps == 1;
  const int64_t taken = rows_at_once == 1 ? shape.rows : (shape.rows + 15) / 16 * 8;
  const Launch grid = {alone ? (taken + kWarpsOfBlock - 1) / kWarpsOfBlock : taken,
                       (alone ? kWarpsOfBlock : s.warps) * 32, alone ? 0 : int64_t{128} * rows_at_once};
  const auto start = [&](auto t) {
    using T = decltype(t);
    const auto start_kernel = [&](auto kernel) {
      launch(context, "layer_norm_forward_in_place_kernel", kernel, grid, s, global<const T>(x), global<const T>(gamma),
             global<const T>(beta), global<T>(y), global<float>(mean), global<float>(rstd));
    };
    const auto start_rows = [&](auto r) {
      if (vectors == 2) return start_kernel(layer_norm_forward_in_place_kernel<T, 2, r>);
      if (vectors == 3) return start_kernel(layer_norm_forward_in_place_kernel<T, 3, r>);
      start_kernel(layer_norm_forward_in_place_kernel<T, 4, r>);
    };
    if (rows_at_once == 1) return start_rows(std::integral_constant<int, 1>());
    start_rows(std::integral_constant<int, 2>());
  };
  if (x.dtype() == DType::kBF16) return start(bfloat16());
  start(float16());
}

}  // namespace frit::layer_norm
