// layer_norm's backward kernels and how their instances share out rows, for the operators that end with dx (layer_norm)
// and that go on through the dropout below it (bias_dropout_residual_norm). Included by those alone.
#pragma once
#include <algorithm>
#include <numeric>

#include "frit/ops/bias_dropout_residual/sum-inl.h"
#include "frit/ops/layer_norm/backward.h"
#include "frit/ops/layer_norm/row_part.h"
#include "frit/ops/layer_norm/span.h"
#include "frit/simt/launch.h"

namespace frit::layer_norm {

using namespace row_part;

// What a kernel does with dx beside writing it: nothing.
template <bool whole = false>
struct NoneBelow {
  static constexpr bool kDropped = false, kWhole = whole;  // are all rows known to be whole aligned vectors?
  static constexpr const char *kRowsKernel = "layer_norm_backward_xhat_kernel",
                              *kSpansKernel = "layer_norm_backward_spans_kernel",
                              *kHeldKernel = "layer_norm_backward_held_kernel";
};
// dz = mask/keep * dx, of dx as it is rounded, and dz's column sums, a row of partials [blocks, cols] a block. Both are
// optional.
template <typename T>
struct DroppedBelow {
  static constexpr bool kDropped = true, kWhole = true;  // what the spans and held kernels take
  static constexpr const char *kRowsKernel = "bias_dropout_residual_norm_backward_rows_kernel",
                              *kSpansKernel = "bias_dropout_residual_norm_backward_spans_kernel",
                              *kHeldKernel = "bias_dropout_residual_norm_backward_held_kernel";
  DropoutTable dropout;
  Global<T> dz;
  int64_t dz_stride;
  Global<float> partials;
};

// Takes N elements of dx through dropout, and adds them to their columns' sums.
template <typename T, int N>
FRIT_DEVICE Vec<T, N> drop(const DropoutTable& dropout, const Vec<T, N>& dx, uint32_t keep, float (&sum)[N]) {
  Vec<float, N> d;
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) {
    d[i] = widen(dx[i]);
    if (dropout.active) d[i] = (keep >> i & 1 ? d[i] : 0.0f) * dropout.scale;
    sum[i] += d[i];
  }
  return from_float<T>(d);
}

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
template <typename T, int K, Form form, typename Below = NoneBelow<>>
FRIT_KERNEL(K == 4 ? 512 : 256, (K == 4 || kNeedsRoom<T, form>) ? 1 : 2)
layer_norm_backward_rows_kernel(Below below, Global<const T> dy, int64_t dy_stride, Global<const T> x, int64_t x_stride,
                                Global<const T> gamma, Global<const float> mean, Global<const float> rstd,
                                Global<const T> dresidual, int64_t dresidual_stride, Global<T> dx, int64_t dx_stride,
                                Global<float> partials, int64_t rows, int cols, int warps) {
  wait_for_previous();
  static_assert(!Below::kDropped || K < 4, "their sums stay in registers");
  constexpr int N = Part<T, K>::kN, R = kRows<K>, kColumns = Part<T, K>::kColumns;
  constexpr int kEach = (Below::kDropped ? 3 : 2) * N;  // sums of a vector's columns: dgamma's, dbeta's, and dz's
  constexpr bool kAhead = K < 4;                        // loads the next batch before it computes this one
  constexpr bool kEarly = K == 1;                       // loads dresidual before the sums
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
  float sum_gamma[kSums][N] = {}, sum_beta[kSums][N] = {}, sum_dz[kSums][N] = {};
  const Shared<float> scratch = shared_array<float>(0);
  const auto slot = [&](int k, int i) {
    return 8 * R * warp_count() + ((k * kEach + i) / 4 * thread_count() + thread_index()) * 4;
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
      if constexpr (Below::kDropped) {
        if (row + r >= end) continue;
        FRIT_UNROLL
        for (int k = 0; k < K; ++k) {
          const uint32_t keep = below.dropout.active
                                    ? keep_of_columns<N>(below.dropout, begin + row + r, first + (k * 32 + lane()) * N)
                                    : 0;
          x_row[r].v[k] = drop(below.dropout, x_row[r].v[k], keep, sum_dz[k]);
        }
        if (below.dz)
          store_part<Cache::kDefault>(x_row[r], below.dz + (begin + row + r) * below.dz_stride + first, columns);
      }
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
          if constexpr (Below::kDropped) store_vec<4>(scratch, slot(k, 2 * N + i), four(sum_dz[k], i));
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
      if constexpr (Below::kDropped) {
        if (!below.partials) continue;
        Vec<float, 4> z = four(sum_dz[k], i);
        for (int other = 1; other < groups; ++other) {
          const Vec<float, 4> more = load_vec<4>(scratch + other * warps * 32 * 4, slot(k, 2 * N + i));
          FRIT_UNROLL
          for (int j = 0; j < 4; ++j) z[j] += more[j];
        }
        store_span<4>(below.partials + block_index() * cols, c + i, cols, z);
      }
    }
  }
}

// The xhat form by classes of rows (see span.h): block b takes rows of class b % period, batch by batch, each group of
// `warps` warps a row, each warp up to 32 K of its vectors, while the next row is on its way. gamma lies in shared
// memory as fp32. At the end the block's groups are added up in their order.
template <typename T, int K, typename Below = NoneBelow<>>
FRIT_KERNEL(K == 2 ? 512 : 256, 1)
layer_norm_backward_spans_kernel(Below below, Global<const T> dy, int64_t dy_stride, Global<const T> x,
                                 int64_t x_stride, Global<const T> gamma, Global<const float> mean,
                                 Global<const float> rstd, Global<const T> dresidual, int64_t dresidual_stride,
                                 Global<T> dx, int64_t dx_stride, Global<float> partials, int64_t rows, int cols,
                                 int warps, int period) {
  wait_for_previous();
  constexpr int N = kVecOf<T>, kEach = (Below::kDropped ? 3 : 2) * N, kPairs = K * kEach / 4;
  const int groups = warp_count() / warps, group = warp() / warps, part = warp() - group * warps;
  constexpr bool kWhole = Below::kWhole;  // one class, and no ends
  const int row_class = kWhole ? 0 : static_cast<int>(block_index() % period);
  if (kWhole) period = 1;
  // See layer_norm_forward_spans_kernel.
  const int shift = kWhole || period == 1 ? 0 : row_shift(x + row_class * x_stride);
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
    return kWhole || (row_shift(other + row_class * stride) == shift && stride * period % N == 0);
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
    if constexpr (kWhole) {
      row_span::load_whole<Cache::kStream>(span, x + row * x_stride, x_next);
      row_span::load_whole<Cache::kStream>(span, dy + row * dy_stride, dy_next);
    } else {
      if (x_like)
        row_span::start_span<Cache::kStream>(span, ends, x + row * x_stride, x_next, x_one);
      else
        row_span::load_elements<Cache::kStream>(span, x + row * x_stride, x_next);
      if (dy_like)
        row_span::start_span<Cache::kStream>(span, ends, dy + row * dy_stride, dy_next, dy_one);
      else
        row_span::load_elements<Cache::kStream>(span, dy + row * dy_stride, dy_next);
    }
    if (lane() < 2) of_next = load(lane() == 0 ? mean : rstd, row);
  };
  start(begin);
  row_span::spread_vector(gamma, cols, shift, vectors, gammas);
  barrier();

  float sum_gamma[K][N] = {}, sum_beta[K][N] = {}, sum_dz[K][N] = {};
  const float by_cols = 1.0f / static_cast<float>(cols);
  int turn = 0;  // alternates between two halves of scratch, so that one barrier a row is enough
  for (int r = begin, batch = begin - group; batch < all_rows; r += step, batch += step) {
    const bool live = r < all_rows;
    Vec<T, N> xs[K], dys[K];
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) xs[k] = x_next[k], dys[k] = dy_next[k];
    if (!kWhole && x_like) ends.place(x_one, xs);
    if (!kWhole && dy_like) ends.place(dy_one, dys);
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
      if constexpr (kWhole) {
        row_span::load_whole<Cache::kStream>(span, from, more);
      } else if (residual_like) {
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
        if constexpr (!kWhole) ends.take(k, out, one);
      } else {
        store_span<N>(to, span.column(k), cols, out);
      }
      if constexpr (Below::kDropped) {
        const uint32_t keep = below.dropout.active ? keep_of_columns<N>(below.dropout, row, span.column(k)) : 0;
        const Vec<T, N> z = drop(below.dropout, out, keep, sum_dz[k]);
        if (below.dz) row_span::store_whole<Cache::kDefault>(span, below.dz + row * below.dz_stride, k, z);
      }
    }
    if (!kWhole && dx_like && ends.column >= 0) store(to, ends.column, one);
  }

  // Four sums of a thread at [group][pair][thread of the group][4].
  const int in_group = part * 32 + lane(), width = warps * 32;
  const auto slot = [&](int of, int pair) { return ((of * kPairs + pair) * width + in_group) * 4; };
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    FRIT_UNROLL
    for (int i = 0; i < N; i += 4) {
      store_vec<4>(sums_of_groups, slot(group, (k * kEach + i) / 4), four(sum_gamma[k], i));
      store_vec<4>(sums_of_groups, slot(group, (k * kEach + N + i) / 4), four(sum_beta[k], i));
      if constexpr (Below::kDropped)
        store_vec<4>(sums_of_groups, slot(group, (k * kEach + 2 * N + i) / 4), four(sum_dz[k], i));
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
    const int k = pair / (kEach / 4), i = pair % (kEach / 4) * 4;
    if constexpr (Below::kDropped) {
      if (i >= 2 * N) {
        if (below.partials) store_span<4>(below.partials + block_index() * cols, span.column(k) + i % N, cols, total);
        continue;
      }
    }
    store_span<4>(i < N ? to : to + cols, span.column(k) + i % N, cols, total);
  }
}

// Starts `kernel` on b, which writes partial sums if `sums`; `more` are its last arguments.
template <typename T, typename Below, typename Kernel, typename... More>
void launch_on(Context& context, const char* name, Kernel kernel, const BackwardCut& cut, const BackwardShape& shape,
               const LayerNormBackward& b, const Below& below, bool sums, More... more) {
  launch(context, name, kernel, {cut.blocks, cut.threads(), cut.shared_bytes}, below, global<const T>(b.dy),
         b.dy.row_stride(), global<const T>(b.x), b.x.row_stride(), global<const T>(b.gamma),
         global<const float>(b.mean), global<const float>(b.rstd), global<const T>(b.dresidual),
         b.dresidual.row_stride(), global<T>(b.dx), b.dx.row_stride(),
         sums ? global<float>(b.partials) : Global<float>(), shape.rows, static_cast<int>(shape.cols), cut.warps,
         more...);
}

// Starts spans_2, spans_4 or, with nothing below, spans_5.
template <typename T, typename Below>
void launch_spans(Context& context, int i, const BackwardShape& shape, const LayerNormBackward& b, const Below& below) {
  const BackwardCut cut = shape.cut(i, Below::kDropped ? 3 : 2);
  const auto start = [&](auto kernel) {
    launch_on<T>(context, Below::kSpansKernel, kernel, cut, shape, b, below, true, static_cast<int>(shape.period));
  };
  if (i == kSpans2Backward) return start(layer_norm_backward_spans_kernel<T, 2, Below>);
  if constexpr (!Below::kDropped)
    if (i == kSpans5Backward) return start(layer_norm_backward_spans_kernel<T, 5, Below>);
  start(layer_norm_backward_spans_kernel<T, 4, Below>);
}

// Starts xhat_1 or, with nothing below, xhat_2, xhat_4, dependence or slides on b.partials.
template <typename T, typename Below>
void launch_rows(Context& context, int i, const BackwardShape& shape, const LayerNormBackward& b, const Below& below,
                 bool sums = true) {
  const BackwardCut cut = shape.cut(i, Below::kDropped ? 3 : 2);
  const auto start = [&](const char* name, auto kernel) {
    launch_on<T>(context, name, kernel, cut, shape, b, below, sums);
  };
  if (i == kXhat1) return start(Below::kRowsKernel, layer_norm_backward_rows_kernel<T, 1, Form::kXhat, Below>);
  if constexpr (!Below::kDropped) {
    if (i == kXhat2) return start(Below::kRowsKernel, layer_norm_backward_rows_kernel<T, 2, Form::kXhat, Below>);
    if (i == kXhat4) return start(Below::kRowsKernel, layer_norm_backward_rows_kernel<T, 4, Form::kXhat, Below>);
    if (i == kDependence)
      return start("layer_norm_backward_dependence_kernel",
                   layer_norm_backward_rows_kernel<T, 1, Form::kDependence, Below>);
    return start("layer_norm_backward_slides_kernel", layer_norm_backward_rows_kernel<T, 1, Form::kSlides, Below>);
  }
}

}  // namespace frit::layer_norm
