#include "frit/ops/layer_norm/backward.h"

#include <algorithm>
#include <numeric>

#include "frit/ops/layer_norm/gpu.h"
#include "frit/ops/layer_norm/row_part.h"
#include "frit/ops/layer_norm/span.h"
#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace row_part;

enum class Form { kXhat, kSlides, kDependence };

// Rows a group of warps takes at once.
template <int K>
constexpr int kRows = K == 1 ? 2 : 1;

// Would spill in the 128 registers of two blocks a multiprocessor.
template <typename T, Form form>
constexpr bool kNeedsRoom = form == Form::kDependence&& std::is_same_v<T, float16>;

template <int N>
FRIT_DEVICE Vec<float, 4> four(const float (&x)[N], int i) {
  return {{x[i], x[i + 1], x[i + 2], x[i + 3]}};
}

// With g = gamma * dy and xhat = (x - mean) * rstd:
// xhat: dx = rstd * (g - (sum g + xhat * sum g*xhat) / cols).
// slides: dx = g * rstd + alpha * sum g + beta * sum g*x, alpha = ((x - mean) * mean - std^2) * rstd^3 / cols,
// beta = (mean - x) * rstd^3 / cols.
// dependence: dvar = -rstd^3 / 2 * sum g * (x - mean); then dmean = sum(-g * rstd - 2 dvar (x - mean) / cols); dx =
// g * rstd + (2 dvar (x - mean) + dmean) / cols.
//
// Blocks take equal runs of rows, batch by batch: a group of `warps` warps kRows<K> rows of each batch, each warp
// 32 K vectors of every one. A thread's columns are always the same, so their sums of dy * xhat and dy stay where
// they are; at the end the block's groups are added up, and it writes its row of partials.
template <typename T, int K, Form form>
FRIT_KERNEL(K == 4 ? 512 : 256, (K == 4 || kNeedsRoom<T, form>) ? 1 : 2)
layer_norm_backward_rows_kernel(Global<const T> dy, int64_t dy_stride, Global<const T> x, int64_t x_stride,
                                Global<const T> gamma, Global<const float> mean, Global<const float> rstd,
                                Global<const T> dresidual, int64_t dresidual_stride, Global<T> dx, int64_t dx_stride,
                                Global<float> partials, int64_t rows, int cols, int warps) {
  wait_for_previous();
  constexpr int N = Part<T, K>::kN, R = kRows<K>, kColumns = Part<T, K>::kColumns;
  constexpr bool kAhead = K < 4;   // loads the next batch before it computes this one
  constexpr bool kEarly = K == 1;  // loads dresidual before the sums
  const int groups = warp_count() / warps, group = warp() / warps, part = warp() - group * warps;
  const int first = part * kColumns, columns = cols - first < kColumns ? cols - first : kColumns;
  // From here on rows are counted from the block's first.
  const int64_t begin = rows * block_index() / block_count();
  const int end = static_cast<int>(rows * (block_index() + 1) / block_count() - begin);
  dy = dy + begin * dy_stride, x = x + begin * x_stride, dx = dx + begin * dx_stride;
  mean = mean + begin, rstd = rstd + begin;
  if (dresidual) dresidual = dresidual + begin * dresidual_stride;
  const int step = groups * R;
  const float all = static_cast<float>(cols);
  const auto offset = [&](int row, int64_t stride) { return row < end ? row * stride + first : 0; };
  const auto count = [&](int row) { return row < end ? columns : 0; };

  Vec<T, N> weight[K];
  const auto load_weight = [&](int k) {
    return load_span<N, Cache::kReadOnly>(gamma, first + (k * 32 + lane()) * N, cols, T());
  };
  if constexpr (kAhead) {
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) weight[k] = load_weight(k);
  }
  // With 4 vectors a thread the sums have no room in registers: they lie in shared memory, four of a thread's together,
  // number j of thread t at [j / 4][t][j % 4], and no other thread touches them before the end.
  constexpr int kSums = kAhead ? K : 1;
  float sum_gamma[kSums][N] = {}, sum_beta[kSums][N] = {};
  const Shared<float> scratch = shared_array<float>(0);
  const auto slot = [&](int k, int i) {
    return 8 * R * warp_count() + ((k * 2 * N + i) / 4 * thread_count() + thread_index()) * 4;
  };
  if constexpr (!kAhead) {
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) {
      FRIT_UNROLL
      for (int i = 0; i < 2 * N; i += 4) store_vec<4>(scratch, slot(k, i), Vec<float, 4>{});
    }
  }

  Part<T, K> x_row[R], dy_row[R];
  float of_row;  // lane r < R: row r's mean; lane R + r: its rstd
  const auto start = [&](int row, Part<T, K>(&xs)[R], Part<T, K>(&dys)[R]) {
    FRIT_UNROLL
    for (int r = 0; r < R; ++r) {
      start_load<Cache::kStream>(xs[r], x + offset(row + r, x_stride), count(row + r));
      start_load<Cache::kStream>(dys[r], dy + offset(row + r, dy_stride), count(row + r));
    }
    float value = 0;
    if (lane() < R && row + lane() < end) value = load(mean, row + lane());
    if (lane() >= R && lane() < 2 * R && row + lane() - R < end) value = load(rstd, row + lane() - R);
    return value;
  };
  of_row = start(group * R, x_row, dy_row);

  int turn = 0;  // alternates between two halves of scratch, so that one barrier a sum is enough
  for (int batch = 0; batch < end; batch += step) {
    const int row = batch + group * R;
    Part<T, K> x_next[R], dy_next[R], more[R];
    float of_next = 0;
    if constexpr (kAhead) of_next = start(row + step, x_next, dy_next);
    if (kEarly && dresidual) {
      FRIT_UNROLL
      for (int r = 0; r < R; ++r)
        start_load<Cache::kStream>(more[r], dresidual + offset(row + r, dresidual_stride), count(row + r));
    }
    float mu[R], scale[R], sums[2 * R], second[R];
    FRIT_UNROLL
    for (int r = 0; r < R; ++r) {
      finish_load<Cache::kStream>(x_row[r], x + offset(row + r, x_stride), count(row + r));
      finish_load<Cache::kStream>(dy_row[r], dy + offset(row + r, dy_stride), count(row + r));
      mu[r] = shuffle(of_row, r), scale[r] = shuffle(of_row, R + r);
      sums[r] = sums[R + r] = 0;
      FRIT_UNROLL
      for (int k = 0; k < K; ++k) {
        const Vec<float, N> xv = to_float(x_row[r].v[k]), d = to_float(dy_row[r].v[k]);
        const Vec<float, N> w = to_float(kAhead ? weight[k] : load_weight(k));
        float s = 0, q = 0;
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) {  // past the row dy and gamma are 0
          const float from_mean = xv[i] - mu[r], hat = from_mean * scale[r], g = d[i] * w[i];
          if constexpr (form != Form::kDependence) s += g;
          q = fmaf(g, form == Form::kXhat ? hat : form == Form::kSlides ? xv[i] : from_mean, q);
          if constexpr (kAhead) {
            sum_gamma[k][i] = fmaf(d[i], hat, sum_gamma[k][i]);
            sum_beta[k][i] += d[i];
          }
        }
        sums[r] += s, sums[R + r] += q;
        if constexpr (!kAhead) {
          FRIT_UNROLL
          for (int i = 0; i < N; i += 4) {
            Vec<float, 4> a = load_vec<4>(scratch, slot(k, i)), b = load_vec<4>(scratch, slot(k, N + i));
            FRIT_UNROLL
            for (int j = 0; j < 4; ++j) {
              a[j] = fmaf(d[i + j], (xv[i + j] - mu[r]) * scale[r], a[j]);
              b[j] += d[i + j];
            }
            store_vec<4>(scratch, slot(k, i), a);
            store_vec<4>(scratch, slot(k, N + i), b);
          }
        }
      }
    }
    const Shared<float> mine = scratch + (turn * 2 * warp_count() + group * warps) * 2 * R;
    turn ^= 1;
    if constexpr (form == Form::kDependence) {
      float q[R];
      FRIT_UNROLL
      for (int r = 0; r < R; ++r) q[r] = sums[R + r];
      row_sums(q, mine, warps, part);
      FRIT_UNROLL
      for (int r = 0; r < R; ++r) {
        keep_packed(x_row[r]);
        keep_packed(dy_row[r]);
        sums[R + r] = -0.5f * scale[r] * scale[r] * scale[r] * q[r];  // dvar
        second[r] = 0;
        FRIT_UNROLL
        for (int k = 0; k < K; ++k) {
          const Vec<float, N> xv = to_float(x_row[r].v[k]), d = to_float(dy_row[r].v[k]), w = to_float(weight[k]);
          FRIT_UNROLL
          for (int i = 0; i < N; ++i) {
            const bool inside = (k * 32 + lane()) * N + i < columns;
            const float from_mean = inside ? xv[i] - mu[r] : 0.0f;
            second[r] += -d[i] * w[i] * scale[r] - 2 * sums[R + r] * from_mean / all;
          }
        }
      }
      row_sums(second, mine + 2 * R * warp_count(), warps, part);
    } else {
      row_sums(sums, mine, warps, part);
    }
    if (!kEarly && dresidual) {
      FRIT_UNROLL
      for (int r = 0; r < R; ++r)
        start_load<Cache::kStream>(more[r], dresidual + offset(row + r, dresidual_stride), count(row + r));
    }
    FRIT_UNROLL
    for (int r = 0; r < R; ++r) {
      keep_packed(x_row[r]);
      keep_packed(dy_row[r]);
      if (dresidual)
        finish_load<Cache::kStream>(more[r], dresidual + offset(row + r, dresidual_stride), count(row + r));
      const float mean_g = sums[r] / all, mean_product = sums[R + r] / all;
      FRIT_UNROLL
      for (int k = 0; k < K; ++k) {
        const Vec<float, N> xv = to_float(x_row[r].v[k]), d = to_float(dy_row[r].v[k]);
        const Vec<float, N> w = to_float(kAhead ? weight[k] : load_weight(k));
        Vec<float, N> v;
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) {
          const float from_mean = xv[i] - mu[r], g = d[i] * w[i];
          if constexpr (form == Form::kXhat) {
            v[i] = scale[r] * (g - fmaf(from_mean * scale[r], mean_product, mean_g));
          } else if constexpr (form == Form::kSlides) {
            const float cubed = scale[r] * scale[r] * scale[r] / all;
            const float alpha = (from_mean * mu[r] - 1 / (scale[r] * scale[r])) * cubed;
            v[i] = g * scale[r] + alpha * sums[r] - from_mean * cubed * sums[R + r];
          } else {
            v[i] = g * scale[r] + (2 * sums[R + r] * from_mean + second[r]) / all;
          }
        }
        if (dresidual) {
          const Vec<float, N> m = to_float(more[r].v[k]);
          FRIT_UNROLL
          for (int i = 0; i < N; ++i) v[i] += m[i];
        }
        x_row[r].v[k] = from_float<T>(v);
      }
      if (row + r < end) store_part<Cache::kDefault>(x_row[r], dx + (row + r) * dx_stride + first, columns);
    }
    if constexpr (kAhead) {
      FRIT_UNROLL
      for (int r = 0; r < R; ++r) x_row[r] = x_next[r], dy_row[r] = dy_next[r];
      of_row = of_next;
    } else {
      of_row = start(row + step, x_row, dy_row);
    }
  }

  if (!partials) return;
  // Groups 1, 2, ... hand their sums to group 0.
  if constexpr (kAhead) {
    if (groups > 1 && group > 0) {
      FRIT_UNROLL
      for (int k = 0; k < K; ++k) {
        FRIT_UNROLL
        for (int i = 0; i < N; i += 4) {
          store_vec<4>(scratch, slot(k, i), four(sum_gamma[k], i));
          store_vec<4>(scratch, slot(k, N + i), four(sum_beta[k], i));
        }
      }
    }
  }
  if (groups > 1) barrier();
  if (group > 0) return;
  const Global<float> to = partials + block_index() * 2 * cols;
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    const int64_t c = first + (k * 32 + lane()) * N;
    FRIT_UNROLL
    for (int i = 0; i < N; i += 4) {
      Vec<float, 4> a, b;
      if constexpr (kAhead)
        a = four(sum_gamma[k], i), b = four(sum_beta[k], i);
      else
        a = load_vec<4>(scratch, slot(k, i)), b = load_vec<4>(scratch, slot(k, N + i));
      for (int other = 1; other < groups; ++other) {
        const Shared<float> handed = scratch + other * warps * 32 * 4;
        const Vec<float, 4> more_a = load_vec<4>(handed, slot(k, i)), more_b = load_vec<4>(handed, slot(k, N + i));
        FRIT_UNROLL
        for (int j = 0; j < 4; ++j) a[j] += more_a[j], b[j] += more_b[j];
      }
      store_span<4>(to, c + i, cols, a);
      store_span<4>(to + cols, c + i, cols, b);
    }
  }
}

// The xhat form by classes of rows (see span.h): block b takes rows of class b % period, batch by batch, each group of
// `warps` warps a row, each warp up to 32 K of its vectors, while the next row is on its way. gamma lies in shared
// memory as fp32. At the end the block's groups are added up in their order.
template <typename T, int K>
FRIT_KERNEL(256, K == 2 ? 2 : 1)
layer_norm_backward_spans_kernel(Global<const T> dy, int64_t dy_stride, Global<const T> x, int64_t x_stride,
                                 Global<const T> gamma, Global<const float> mean, Global<const float> rstd,
                                 Global<const T> dresidual, int64_t dresidual_stride, Global<T> dx, int64_t dx_stride,
                                 Global<float> partials, int64_t rows, int cols, int warps, int period) {
  wait_for_previous();
  constexpr int N = kVecOf<T>, kPairs = K * 2 * N / 4;
  const int groups = warp_count() / warps, group = warp() / warps, part = warp() - group * warps;
  const int row_class = static_cast<int>(block_index() % period);
  // See layer_norm_forward_spans_kernel.
  const int shift = period == 1 ? 0 : row_shift(x + row_class * x_stride);
  const int vectors = warps * K * 32;
  const Shared<float> gammas = shared_array<float>(0), scratch = gammas + vectors * N;
  const Shared<float> sums_of_groups = scratch + 4 * warp_count();
  const row_span::Span<T, K> span(part, shift, cols);
  const row_span::Ends<T, K> ends(span, part, shift);
  // Row r here is row row_class + r * period.
  const int all_rows = static_cast<int>((rows - row_class + period - 1) / period);
  const int step = static_cast<int>(block_count() / period) * groups;
  const int begin = static_cast<int>(block_index() / period) * groups + group;
  const auto row_of = [&](int r) { return row_class + int64_t{r} * period; };
  const auto lies_so = [&](const auto& other, int64_t stride) {
    return row_shift(other + row_class * stride) == shift && stride * period % N == 0;
  };
  const bool x_like = lies_so(x, x_stride), dy_like = lies_so(dy, dy_stride), dx_like = lies_so(dx, dx_stride);
  const bool residual_like = dresidual && lies_so(dresidual, dresidual_stride);

  Vec<T, N> x_next[K] = {}, dy_next[K] = {};
  T x_one = T(), dy_one = T();
  float of_next = 0;  // lane 0: the row's mean; lane 1: its rstd
  const auto start = [&](int r) {
    if (r >= all_rows) {
      of_next = 0;
      return;
    }
    const int64_t row = row_of(r);
    if (x_like)
      row_span::start_span<Cache::kStream>(span, ends, x + row * x_stride, x_next, x_one);
    else
      row_span::load_elements<Cache::kStream>(span, x + row * x_stride, x_next);
    if (dy_like)
      row_span::start_span<Cache::kStream>(span, ends, dy + row * dy_stride, dy_next, dy_one);
    else
      row_span::load_elements<Cache::kStream>(span, dy + row * dy_stride, dy_next);
    if (lane() < 2) of_next = load(lane() == 0 ? mean : rstd, row);
  };
  start(begin);
  row_span::spread_vector(gamma, cols, shift, vectors, gammas);
  barrier();

  float sum_gamma[K][N] = {}, sum_beta[K][N] = {};
  const float by_cols = 1.0f / static_cast<float>(cols);
  int turn = 0;  // alternates between two halves of scratch, so that one barrier a row is enough
  for (int r = begin, batch = begin - group; batch < all_rows; r += step, batch += step) {
    const bool live = r < all_rows;
    Vec<T, N> xs[K], dys[K];
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) xs[k] = x_next[k], dys[k] = dy_next[k];
    if (x_like) ends.place(x_one, xs);
    if (dy_like) ends.place(dy_one, dys);
    const float mu = shuffle(of_next, 0), scale = shuffle(of_next, 1);
    start(r + step);

    float sums[2] = {0, 0};
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) {
      if (!live || !span.any(k)) continue;
      const Vec<float, N> a = to_float(xs[k]), d = to_float(dys[k]);
      const Vec<float, N> w = row_span::spread_at<N>(gammas, vectors, (part * K + k) * 32 + lane());
      float s = 0, q = 0;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {  // outside of the row dy and gamma are 0
        const float hat = (a[i] - mu) * scale, g = d[i] * w[i];
        s += g, q = fmaf(g, hat, q);
        sum_gamma[k][i] = fmaf(d[i], hat, sum_gamma[k][i]);
        sum_beta[k][i] += d[i];
      }
      sums[0] += s, sums[1] += q;
    }
    row_sums(sums, scratch + (turn * groups + group) * warps * 2, warps, part);
    turn ^= 1;
    if (!live) continue;
    row_span::keep_packed(xs);
    row_span::keep_packed(dys);
    const int64_t row = row_of(r);
    const Global<T> to = dx + row * dx_stride;
    Vec<T, N> more[K];
    if (dresidual) {
      const Global<const T> from = dresidual + row * dresidual_stride;
      if (residual_like) {
        T more_one;
        row_span::start_span<Cache::kStream>(span, ends, from, more, more_one);
        ends.place(more_one, more);
      } else {
        row_span::load_elements<Cache::kStream>(span, from, more);
      }
    }
    const float by_hat = -scale * scale * (sums[1] * by_cols), constant = -scale * (sums[0] * by_cols);
    T one = T();
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) {
      if (!span.any(k)) continue;
      const Vec<float, N> a = to_float(xs[k]), d = to_float(dys[k]);
      const Vec<float, N> w = row_span::spread_at<N>(gammas, vectors, (part * K + k) * 32 + lane());
      Vec<float, N> v;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) v[i] = fmaf(a[i] - mu, by_hat, fmaf(d[i] * w[i], scale, constant));
      if (dresidual) {
        const Vec<float, N> m = to_float(more[k]);
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) v[i] += m[i];
      }
      const Vec<T, N> out = from_float<T>(v);
      if (dx_like) {
        row_span::store_whole<Cache::kDefault>(span, to, k, out);
        ends.take(k, out, one);
      } else {
        store_span<N>(to, span.column(k), cols, out);
      }
    }
    if (dx_like && ends.column >= 0) store(to, ends.column, one);
  }

  // Four sums of a thread at [group][pair][thread of the group][4].
  const int in_group = part * 32 + lane(), width = warps * 32;
  const auto slot = [&](int of, int pair) { return ((of * kPairs + pair) * width + in_group) * 4; };
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    FRIT_UNROLL
    for (int i = 0; i < N; i += 4) {
      store_vec<4>(sums_of_groups, slot(group, k * 2 * N / 4 + i / 4), four(sum_gamma[k], i));
      store_vec<4>(sums_of_groups, slot(group, k * 2 * N / 4 + (N + i) / 4), four(sum_beta[k], i));
    }
  }
  if (groups > 1) barrier();
  const Global<float> to = partials + block_index() * 2 * cols;
  for (int pair = group; pair < kPairs; pair += groups) {
    Vec<float, 4> total = load_vec<4>(sums_of_groups, slot(0, pair));
    for (int of = 1; of < groups; ++of) {
      const Vec<float, 4> other = load_vec<4>(sums_of_groups, slot(of, pair));
      FRIT_UNROLL
      for (int j = 0; j < 4; ++j) total[j] += other[j];
    }
    const int k = pair / (2 * N / 4), i = pair % (2 * N / 4) * 4;
    store_span<4>(i < N ? to : to + cols, span.column(k) + i % N, cols, total);
  }
}

// dx alone; a block takes a row, piece by piece, and reads dy and x twice.
template <typename T, int K>
FRIT_KERNEL(512, 1)
layer_norm_backward_looped_kernel(Global<const T> dy, int64_t dy_stride, Global<const T> x, int64_t x_stride,
                                  Global<const T> gamma, Global<const float> mean, Global<const float> rstd,
                                  Global<const T> dresidual, int64_t dresidual_stride, Global<T> dx, int64_t dx_stride,
                                  int cols) {
  wait_for_previous();
  constexpr int N = Part<T, K>::kN, kColumns = Part<T, K>::kColumns;
  const int64_t row = block_index();
  const int step = warp_count() * kColumns;
  const float mu = load(mean, row), scale = load(rstd, row), all = static_cast<float>(cols);
  Part<T, K> x_row, dy_row, more;
  const auto start = [&](int first, int columns) {
    const Global<const T> from = x + (row * x_stride + first), gradient = dy + (row * dy_stride + first);
    start_load<Cache::kDefault>(x_row, from, columns);
    start_load<Cache::kDefault>(dy_row, gradient, columns);
    finish_load<Cache::kDefault>(x_row, from, columns);
    finish_load<Cache::kDefault>(dy_row, gradient, columns);
  };
  const auto columns_from = [&](int first) { return cols - first < kColumns ? cols - first : kColumns; };
  const auto load_weight = [&](int first, int k) {
    return to_float(load_span<N, Cache::kReadOnly>(gamma, first + (k * 32 + lane()) * N, cols, T()));
  };
  float sums[2] = {0, 0};
  for (int first = warp() * kColumns; first < cols; first += step) {
    start(first, columns_from(first));
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) {
      const Vec<float, N> xv = to_float(x_row.v[k]), d = to_float(dy_row.v[k]), w = load_weight(first, k);
      float s = 0, q = 0;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        const float g = d[i] * w[i];
        s += g;
        q = fmaf(g, (xv[i] - mu) * scale, q);
      }
      sums[0] += s, sums[1] += q;
    }
  }
  row_sums(sums, shared_array<float>(0), warp_count(), warp());
  const float mean_g = sums[0] / all, mean_product = sums[1] / all;
  for (int first = warp() * kColumns; first < cols; first += step) {
    const int columns = columns_from(first);
    const Global<const T> rest = dresidual + (row * dresidual_stride + first);
    if (dresidual) start_load<Cache::kStream>(more, rest, columns);
    start(first, columns);
    if (dresidual) finish_load<Cache::kStream>(more, rest, columns);
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) {
      const Vec<float, N> xv = to_float(x_row.v[k]), d = to_float(dy_row.v[k]), w = load_weight(first, k);
      Vec<float, N> v;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) v[i] = scale * (d[i] * w[i] - fmaf((xv[i] - mu) * scale, mean_product, mean_g));
      if (dresidual) {
        const Vec<float, N> m = to_float(more.v[k]);
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) v[i] += m[i];
      }
      x_row.v[k] = from_float<T>(v);
    }
    store_part<Cache::kDefault>(x_row, dx + (row * dx_stride + first), columns);
  }
}

constexpr const char* kInstances[] = {"xhat_1",  "xhat_2",      "xhat_4",      "looped",         "spans_2",
                                      "spans_4", "spans_5",     "dependence",  "slides",         "column_serial",
                                      "atomic",  "tiled_32x32", "tiled_32x33", "two_stage_apart"};
enum {
  kXhat1,
  kXhat2,
  kXhat4,
  kLooped,
  kSpans2,
  kSpans4,
  kSpans5,
  kDependence,
  kSlides,
  kColumnSerial,
  kAtomic,
  kTiled32,
  kTiled33,
  kApart
};
constexpr int kLoopedWarps = 16;
// Blocks that fill the chip: 16 warps for each of 132 multiprocessors. A number of the method, not of the device the
// program runs on: the sums' order depends on it.
constexpr int64_t kFull = 132 * 16;

int64_t over(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// How rows are shared out: see layer_norm_backward_rows_kernel.
struct Cut {
  int warps, groups;
  int64_t blocks;
};
Cut cut_rows(int64_t rows, int64_t vectors, int k) {
  Cut c;
  c.warps = static_cast<int>(over(vectors, 32 * k));
  c.groups = std::max(1, 8 / c.warps);
  const int64_t most = 132 * std::max<int64_t>(1, kFull / 132 / (c.warps * c.groups));
  const int at_once = k == 1 ? 2 : 1;
  // Two batches a block at least: writing and adding partial sums must pay.
  c.blocks = std::clamp<int64_t>(over(rows, 2 * c.groups * at_once), 1, most);
  return c;
}

}  // namespace

void layer_norm_backward_gpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                             const Tensor& mean, const Tensor& rstd, const Tensor& dresidual, bool accumulate,
                             const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta) {
  const int64_t rows = x.dim(0), cols = x.dim(1), vectors = over(cols, 16 / size_of(x.dtype()));
  FRIT_CHECK(cols < (int64_t{1} << 30), "[layer_norm] x is {}, expected fewer than 2^30 columns", x.to_string());
  const int widest = vectors <= 8 * 32        ? kXhat1
                     : vectors <= 8 * 2 * 32  ? kXhat2
                     : vectors <= 16 * 4 * 32 ? kXhat4
                                              : kLooped;
  const int64_t n = 16 / size_of(x.dtype());
  const int64_t period = std::min(n / std::gcd(x.row_stride(), n), std::max<int64_t>(rows, 1));
  const int64_t chunks = over(cols + (period > 1 ? n - 1 : 0), n);  // vectors that cover a row wherever it begins
  const auto is_spans = [](int i) { return i >= kSpans2 && i <= kSpans5; };
  const auto span_vectors = [](int i) { return i == kSpans2 ? 2 : i == kSpans4 ? 4 : 5; };
  const auto span_warps = [&](int i) { return static_cast<int>(over(chunks, 32 * span_vectors(i))); };
  // As few vectors as can be, and of several such forms one that needs no barrier, else the one of the most warps.
  int rule = widest;
  if (vectors > 32) {
    int64_t least = INT64_MAX;
    for (int i : {kSpans2, kSpans4, kSpans5}) {
      const int64_t held = int64_t{span_warps(i)} * span_vectors(i);
      if (span_warps(i) <= 8 && (held < least || (held == least && span_warps(i) == 1))) least = held, rule = i;
    }
  }
  const bool free = context.forced("layer_norm_backward").empty();
  const int instance =
      choose_instance(context, "layer_norm_backward", fmt::format("{}x{}/{}", rows, cols, name_of(x.dtype())),
                      kInstances, rule, [&](int i) {
                        if (free && i >= kDependence) return false;  // kept to be measured: only if asked for
                        if (i == kDependence || i == kSlides) return widest == kXhat1;
                        if (is_spans(i)) return span_warps(i) <= 8;
                        return i >= widest;
                      });
  // dx by rows with k vectors a thread, or by the looped kernel where no block holds a row.
  const int by = instance <= kSpans5 ? instance : widest;
  const int k = by == kXhat2 ? 2 : by == kXhat4 ? 4 : 1;
  const Cut cut = cut_rows(rows, vectors, k);
  const bool spans = is_spans(instance);
  const bool fused = instance < kLooped || spans || instance == kDependence || instance == kSlides;
  const int held = spans ? span_vectors(instance) : 1, warps = spans ? span_warps(instance) : 1, groups = 8 / warps;
  // Two rows a group at least: writing and adding partial sums must pay.
  const int64_t span_blocks =
      period * std::clamp<int64_t>(over(over(rows, period), 2 * groups), 1, (held == 2 ? 264 : 132) / period);
  const bool apart = instance == kLooped || instance == kApart;
  const int64_t pieces = spans ? span_blocks : fused ? cut.blocks : apart ? std::clamp<int64_t>(rows / 64, 1, 64) : 1;
  Buffer partials = context.allocate({pieces, 2 * cols}, DType::kF32, "layer_norm.partials");
  const LayerNormBackward operands = {dy, x, gamma, mean, rstd, dresidual, dx, partials};

  // Before dx is written, which may be dy.
  if (!fused)
    layer_norm_sum_columns(context, operands,
                           instance == kAtomic    ? ColumnWay::kAtomic
                           : instance == kTiled32 ? ColumnWay::kTiled32x32
                           : instance == kTiled33 ? ColumnWay::kTiled32x33
                                                  : ColumnWay::kSerial);
  dispatch_float(x.dtype(), [&](auto type) {
    using T = decltype(type);
    if (spans) {
      const int64_t threads = groups * warps * 32;
      const Launch shape = {span_blocks, static_cast<int>(threads),
                            4 * (int64_t{warps} * held * 32 * n + threads / 8 + threads * held * 2 * n)};
      const auto start = [&](auto kernel) {
        launch(context, "layer_norm_backward_spans_kernel", kernel, shape, global<const T>(dy), dy.row_stride(),
               global<const T>(x), x.row_stride(), global<const T>(gamma), global<const float>(mean),
               global<const float>(rstd), global<const T>(dresidual), dresidual.row_stride(), global<T>(dx),
               dx.row_stride(), global<float>(operands.partials), rows, static_cast<int>(cols), warps,
               static_cast<int>(period));
      };
      if (instance == kSpans2) return start(layer_norm_backward_spans_kernel<T, 2>);
      if (instance == kSpans4) return start(layer_norm_backward_spans_kernel<T, 4>);
      return start(layer_norm_backward_spans_kernel<T, 5>);
    }
    if (by == kLooped) {
      launch(context, "layer_norm_backward_looped_kernel", layer_norm_backward_looped_kernel<T, 2>,
             {rows, kLoopedWarps * 32, kLoopedWarps * 8}, global<const T>(dy), dy.row_stride(), global<const T>(x),
             x.row_stride(), global<const T>(gamma), global<const float>(mean), global<const float>(rstd),
             global<const T>(dresidual), dresidual.row_stride(), global<T>(dx), dx.row_stride(),
             static_cast<int>(cols));
      return;
    }
    const int64_t threads = cut.warps * cut.groups * 32, sums = 2 * k * (16 / size_of(x.dtype()));
    const Launch shape = {
        cut.blocks, static_cast<int>(threads),
        4 * (8 * (k == 1 ? 2 : 1) * (threads / 32) + (cut.groups > 1 || k == 4 ? threads * sums : 0))};
    const auto start = [&](const char* name, auto kernel) {
      launch(context, name, kernel, shape, global<const T>(dy), dy.row_stride(), global<const T>(x), x.row_stride(),
             global<const T>(gamma), global<const float>(mean), global<const float>(rstd), global<const T>(dresidual),
             dresidual.row_stride(), global<T>(dx), dx.row_stride(),
             fused ? global<float>(operands.partials) : simt::Global<float>(), rows, static_cast<int>(cols), cut.warps);
    };
    if (instance == kDependence)
      start("layer_norm_backward_dependence_kernel", layer_norm_backward_rows_kernel<T, 1, Form::kDependence>);
    else if (instance == kSlides)
      start("layer_norm_backward_slides_kernel", layer_norm_backward_rows_kernel<T, 1, Form::kSlides>);
    else if (k == 1)
      start("layer_norm_backward_xhat_kernel", layer_norm_backward_rows_kernel<T, 1, Form::kXhat>);
    else if (k == 2)
      start("layer_norm_backward_xhat_kernel", layer_norm_backward_rows_kernel<T, 2, Form::kXhat>);
    else
      start("layer_norm_backward_xhat_kernel", layer_norm_backward_rows_kernel<T, 4, Form::kXhat>);
  });
  layer_norm_add_partials(context, std::move(partials), accumulate, dgamma, dbeta);
}

}  // namespace frit
