// layer_norm's forward kernels and how their instances share out rows, for the operators whose rows are given
// (layer_norm) and whose rows are sums made in the same launch (bias_dropout_residual_norm). Included by those alone.
#pragma once
#include <algorithm>
#include <numeric>

#include "frit/ops/bias_dropout_residual/sum-inl.h"
#include "frit/ops/layer_norm/forward.h"
#include "frit/ops/layer_norm/row_part.h"
#include "frit/ops/layer_norm/span.h"
#include "frit/simt/launch.h"

namespace frit::layer_norm {

using namespace row_part;

enum class Form { kOneSync, kTwoSync, kMoments };

// Where a kernel's rows come from: they are x.
template <typename T, bool whole = false>
struct RowsGiven {
  static constexpr bool kSummed = false, kWhole = whole;  // are they known to be whole aligned vectors?
  static constexpr const char *kRowsKernel = "layer_norm_forward_rows_kernel",
                              *kSpansKernel = "layer_norm_forward_spans_kernel";
  Global<const T> x;
  int64_t x_stride;
};
// They are residual + dropout(x + bias), rounded to T, which is written to `sum` if there is one. sum and the
// operator's y may be x or residual.
template <typename T>
struct RowsSummed {
  static constexpr bool kSummed = true, kWhole = true;  // what the spans kernel takes
  static constexpr const char *kRowsKernel = "bias_dropout_residual_norm_forward_rows_kernel",
                              *kSpansKernel = "bias_dropout_residual_norm_forward_spans_kernel";
  Global<const T> x;
  int64_t x_stride;
  Global<const T> bias, residual;
  int64_t residual_stride;
  DropoutTable dropout;
  Global<T> sum;
  int64_t sum_stride;
};

// That of N columns.
template <typename T, int N>
FRIT_DEVICE Vec<T, N> sum_of(const RowsSummed<T>& in, const Vec<T, N>& x, const Vec<float, N>& bias,
                             const Vec<T, N>& residual, uint32_t keep) {
  Vec<float, N> sum;
  FRIT_UNROLL
  for (int i = 0; i < N; ++i)
    sum[i] = add_dropped(widen(x[i]) + bias[i], keep >> i & 1, in.dropout.active, in.dropout.scale, widen(residual[i]));
  return from_float<T>(sum);
}

// Rows a warp holds at once: enough loads in flight where a row has few vectors a thread.
template <int K>
constexpr int kRows = K == 1 ? 2 : 1;

// What `count` elements are: their mean is rough + left, where left is small, and squares is the sum of the squared
// distances from the mean. Subtracting rough from an element near it is exact, so nothing is lost far from 0.
struct Moments {
  float rough, left, squares, count;
};

// Moments of the first `columns` columns of each of R parts; whole: they are whole vectors. Cost: 15 R shuffles; all
// lanes get the result.
template <bool whole = false, typename T, int K, int R>
FRIT_DEVICE void moments_of_parts(Part<T, K> (&x)[R], const int (&columns)[R], Moments (&result)[R]) {
  constexpr int N = Part<T, K>::kN;
  float sum[R], both[2 * R];
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    sum[r] = 0;
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) {
      const Vec<float, N> v = to_float(x[r].v[k]);  // 0 past the row
      float s = v[0];
      FRIT_UNROLL
      for (int i = 1; i < N; ++i) s += v[i];
      sum[r] += s;
    }
  }
  warp_sums(sum);
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    keep_packed(x[r]);
    const float count = static_cast<float>(columns[r] > 0 ? columns[r] : 1), rough = sum[r] / count;
    both[r] = both[R + r] = 0;
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) {
      const int left = columns[r] - (k * 32 + lane()) * N;
      const Vec<float, N> v = to_float(x[r].v[k]);
      float s = 0, q = 0;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        const float d = whole || i < left ? v[i] - rough : 0.0f;
        s += d;
        q = fmaf(d, d, q);
      }
      if (whole && left <= 0) s = q = 0;
      both[r] += s, both[R + r] += q;
    }
    result[r].rough = rough, result[r].count = count;
  }
  warp_sums(both);
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    keep_packed(x[r]);
    result[r].left = both[r] / result[r].count;
    result[r].squares = both[R + r] - both[r] * result[r].left;
  }
}

// Chan, Golub, LeVeque 1979: a becomes the moments of a's and b's elements together. a.rough stays.
FRIT_DEVICE void merge(Moments& a, const Moments& b) {
  const float distance = (b.rough - a.rough) + b.left - a.left, count = a.count + b.count;
  a.left += distance * (b.count / count);
  a.squares += b.squares + distance * distance * (a.count * b.count / count);
  a.count = count;
}

// The moments of R rows, from those of the `warps` warps that share each; a warp without columns has count 0. rough is
// the same in all warps afterwards. scratch: 4 R floats a warp of this row.
// Cost: 1 barrier and 10 R shuffles, or none if warps == 1.
template <int R>
FRIT_DEVICE void merge_warps(Moments (&m)[R], const Shared<float>& scratch, int warps, int part) {
  if (warps == 1) return;
  if (lane() == 0) {
    FRIT_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec<float, 4> v = {{m[r].rough, m[r].left, m[r].squares, m[r].count}};
      store_vec<4>(scratch, (r * warps + part) * 4, v);
    }
  }
  barrier();
  float weighted[R], distance[R], squares[R], counts[R], base[R];
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    Vec<float, 4> v = {};
    if (lane() < warps) v = load_vec<4>(scratch, (r * warps + lane()) * 4);
    base[r] = load(scratch, r * warps * 4);
    distance[r] = v[3] > 0 ? (v[0] - base[r]) + v[1] : 0.0f;
    squares[r] = v[2], counts[r] = v[3];
    weighted[r] = v[3] * distance[r];
  }
  float total[R];
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) total[r] = counts[r];
  warp_sums(total);
  warp_sums(weighted);
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    const float left = weighted[r] / total[r], d = distance[r] - left;
    squares[r] = fmaf(counts[r] * d, d, squares[r]);
    m[r].rough = base[r], m[r].left = left, m[r].count = total[r];
  }
  warp_sums(squares);
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) m[r].squares = squares[r];
}

// 1 / std. A variance below 0 is rounding; NaN stays NaN.
FRIT_DEVICE float rstd_of(float squares, float cols, float eps) {
  const float variance = squares / cols;
  return 1.0f / sqrtf((variance < 0 ? 0.0f : variance) + eps);
}

// Blocks a multiprocessor that leave a thread the registers it needs.
template <typename T, int K, typename Rows, bool whole>
constexpr int kRowsBlocks = K == 4                   ? (Rows::kSummed && !(whole && sizeof(T) == 2) ? 2 : 3)
                            : Rows::kSummed&& K == 1 ? 3
                                                     : 4;
template <typename T, int K, typename Rows>
constexpr int kSpansBlocks = Rows::kSummed && (K == 5 || (K == 4 && sizeof(T) == 4)) ? 1 : 2;

// A group of `warps` warps takes kRows<K> rows, each warp 32 K vectors of every one. whole: all rows, gamma, beta and
// bias are whole aligned vectors; the same bits from a fraction of the code.
template <typename T, int K, Form form, typename Rows, int max_warps = 8, bool whole = false>
FRIT_KERNEL(max_warps * 32, max_warps > 8 ? 1 : (kRowsBlocks<T, K, Rows, whole>))
layer_norm_forward_rows_kernel(Rows in, Global<const T> gamma, Global<const T> beta, float eps, Global<T> y,
                               int64_t y_stride, Global<float> mean, Global<float> rstd, int64_t rows, int cols,
                               int warps) {
  wait_for_previous();
  constexpr int N = Part<T, K>::kN, R = kRows<K>;
  const int group = warp() / warps, part = warp() - group * warps;
  const int64_t row = (block_index() * (warp_count() / warps) + group) * R;
  const int live = static_cast<int>(rows - row < R ? (rows > row ? rows - row : 0) : R);
  const int first = part * Part<T, K>::kColumns;
  const int rest = cols - first, columns = rest < Part<T, K>::kColumns ? rest : Part<T, K>::kColumns;

  const auto begin_load = [](Part<T, K>& to, const Global<const T>& at, int n) {
    if constexpr (whole) {
      FRIT_UNROLL
      for (int k = 0; k < K; ++k) {
        const int c = (k * 32 + lane()) * N;
        to.v[k] = Vec<T, N>{};
        if (c < n) to.v[k] = load_vec<N, Cache::kStream>(at, c);
      }
    } else {
      start_load<Cache::kStream>(to, at, n);
    }
  };
  const auto end_load = [](Part<T, K>& to, const Global<const T>& at, int n) {
    if constexpr (!whole) finish_load<Cache::kStream>(to, at, n);
  };
  const auto put = [](const Part<T, K>& from, const Global<T>& at, int n) {
    if constexpr (whole) {
      FRIT_UNROLL
      for (int k = 0; k < K; ++k) {
        const int c = (k * 32 + lane()) * N;
        if (c < n) store_vec<N, Cache::kStream>(at, c, from.v[k]);
      }
    } else {
      store_part<Cache::kStream>(from, at, n);
    }
  };
  // Of a vector that all rows share; 0 past the row.
  const auto load_shared_row = [&](const Global<const T>& at, int c) {
    if constexpr (whole)
      return to_float(c < cols ? load_vec<N, Cache::kReadOnly>(at, c) : Vec<T, N>{});
    else
      return to_float(load_span<N, Cache::kReadOnly>(at, c, cols, T()));
  };

  Part<T, K> held[R];
  int count[R];
  Global<const T> from[R];
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    count[r] = r < live ? columns : 0;
    from[r] = in.x + (r < live ? (row + r) * in.x_stride + first : 0);
    begin_load(held[r], from[r], count[r]);
  }
  if constexpr (Rows::kSummed) {
    Part<T, K> more[R];
    Global<const T> more_from[R];
    uint32_t keep[R] = {};  // of all the row's vectors that the thread has
    FRIT_UNROLL
    for (int r = 0; r < R; ++r) {
      more_from[r] = in.residual + (r < live ? (row + r) * in.residual_stride + first : 0);
      begin_load(more[r], more_from[r], count[r]);
    }
    if (in.dropout.active) {
      FRIT_UNROLL
      for (int r = 0; r < R; ++r) {
        FRIT_UNROLL
        for (int k = 0; k < K; ++k)
          keep[r] |= keep_of_columns<N>(in.dropout, row + r, first + (k * 32 + lane()) * N) << (k * N);
      }
    }
    FRIT_UNROLL
    for (int r = 0; r < R; ++r) {
      end_load(held[r], from[r], count[r]);
      end_load(more[r], more_from[r], count[r]);
    }
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) {
      if (live == 0) continue;
      const int c = first + (k * 32 + lane()) * N;
      const Vec<float, N> b = load_shared_row(in.bias, c);
      FRIT_UNROLL
      for (int r = 0; r < R; ++r) held[r].v[k] = sum_of(in, held[r].v[k], b, more[r].v[k], keep[r] >> (k * N));
    }
    if (in.sum) {
      FRIT_UNROLL
      for (int r = 0; r < R; ++r)
        if (r < live) put(held[r], in.sum + (row + r) * in.sum_stride + first, columns);
    }
  } else {
    FRIT_UNROLL
    for (int r = 0; r < R; ++r) end_load(held[r], from[r], count[r]);
  }

  Moments m[R];
  const float all = static_cast<float>(cols);
  float rough[R];
  const Shared<float> scratch = shared_array<float>(0) + group * warps * R * 4;
  if constexpr (form == Form::kOneSync) {
    moments_of_parts<whole>(held, count, m);
    FRIT_UNROLL
    for (int r = 0; r < R; ++r) rough[r] = m[r].rough;
    merge_warps(m, scratch, warps, part);
    // What this warp's elements still lie above the mean by, after its own rough mean is taken off.
    FRIT_UNROLL
    for (int r = 0; r < R; ++r) m[r].left = (m[r].rough - rough[r]) + m[r].left;
  } else {
    float sums[2 * R];
    FRIT_UNROLL
    for (int r = 0; r < R; ++r) {
      sums[r] = sums[R + r] = 0;
      FRIT_UNROLL
      for (int k = 0; k < K; ++k) {
        const Vec<float, N> v = to_float(held[r].v[k]);
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) {
          sums[r] += v[i];
          if constexpr (form == Form::kMoments) sums[R + r] = fmaf(v[i], v[i], sums[R + r]);
        }
      }
    }
    if constexpr (form == Form::kMoments) {
      row_sums(sums, scratch, warps, part);
      FRIT_UNROLL
      for (int r = 0; r < R; ++r) {
        rough[r] = sums[r] / all;
        m[r].squares = sums[R + r] - rough[r] * sums[r];
      }
    } else {
      float one[R];
      FRIT_UNROLL
      for (int r = 0; r < R; ++r) one[r] = sums[r];
      row_sums(one, scratch, warps, part);
      FRIT_UNROLL
      for (int r = 0; r < R; ++r) {
        rough[r] = one[r] / all;
        one[r] = 0;
        FRIT_UNROLL
        for (int k = 0; k < K; ++k) {
          const Vec<float, N> v = to_float(held[r].v[k]);
          FRIT_UNROLL
          for (int i = 0; i < N; ++i) {
            const bool inside = (k * 32 + lane()) * N + i < count[r];
            const float d = inside ? v[i] - rough[r] : 0.0f;
            one[r] = fmaf(d, d, one[r]);
          }
        }
      }
      row_sums(one, scratch + warps * R, warps, part);
      FRIT_UNROLL
      for (int r = 0; r < R; ++r) m[r].squares = one[r];
    }
    FRIT_UNROLL
    for (int r = 0; r < R; ++r) m[r].rough = rough[r], m[r].left = 0;
  }

  if (live == 0) return;
  float scale[R], left[R];  // left: what elements still lie above the mean by after rough is taken off, times -scale
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    scale[r] = rstd_of(m[r].squares, all, eps), left[r] = m[r].left * -scale[r];
    if (r < live && part == 0 && lane() == 0) {
      if (mean) store(mean, row + r, rough[r] + m[r].left);
      if (rstd) store(rstd, row + r, scale[r]);
    }
  }
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    const int c = (k * 32 + lane()) * N;
    if (c < columns) {
      const Vec<float, N> g = load_shared_row(gamma, first + c);
      const Vec<float, N> b = load_shared_row(beta, first + c);
      FRIT_UNROLL
      for (int r = 0; r < R; ++r) {
        Vec<float, N> v = to_float(held[r].v[k]);
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) v[i] = fmaf(fmaf(v[i] - rough[r], scale[r], left[r]), g[i], b[i]);
        held[r].v[k] = from_float<T>(v);
      }
    }
  }
  FRIT_UNROLL
  for (int r = 0; r < R; ++r)
    if (r < live) put(held[r], y + (row + r) * y_stride + first, columns);
}

// Block b takes rows of one class, b % period (see span.h), batch by batch: each group of `warps` warps a row, each
// warp up to 32 K of its vectors, while the next row is on its way. gamma and beta lie in shared memory as fp32, as the
// class needs them. The squared distances are taken from the mean of the warp's first vectors: by that no more than a
// factor of K is lost, wherever the row's mean lies.
template <typename T, int K, typename Rows>
FRIT_KERNEL(256, (kSpansBlocks<T, K, Rows>))
layer_norm_forward_spans_kernel(Rows in, Global<const T> gamma, Global<const T> beta, float eps, Global<T> y,
                                int64_t y_stride, Global<float> mean, Global<float> rstd, int64_t rows, int cols,
                                int warps, int period) {
  wait_for_previous();
  Global<const T> x = in.x;
  const int64_t x_stride = in.x_stride;
  using row_span::Span;
  constexpr int N = kVecOf<T>;
  constexpr bool kWhole = Rows::kWhole;  // one class, and no ends
  const int groups = warp_count() / warps, group = warp() / warps, part = warp() - group * warps;
  const int row_class = kWhole ? 0 : static_cast<int>(block_index() % period);
  if (kWhole) period = 1;
  // Rows a multiple of 16 bytes apart are taken as if they began at one: how they are shared out must not depend on the
  // address, which planning does not know.
  const int shift = kWhole || period == 1 ? 0 : row_shift(x + row_class * x_stride);
  const bool x_like = kWhole || row_shift(x + row_class * x_stride) == shift;
  const int vectors = warps * K * 32;
  const Shared<float> gammas = shared_array<float>(0), betas = gammas + vectors * N;
  const Shared<float> biases = betas + vectors * N;  // of rows that are sums
  const Shared<float> scratch = biases + (Rows::kSummed ? vectors * N : 0);
  const Span<T, K> span(part, shift, cols);
  // Row r here is row row_class + r * period. From here on rows are counted from the group's first.
  const int64_t step = block_count() / period * groups, begin = block_index() / period * groups + group;
  const int64_t all_rows = (rows - row_class + period - 1) / period;
  x = x + (row_class + begin * period) * x_stride, y = y + (row_class + begin * period) * y_stride;
  if (mean) mean = mean + (row_class + begin * period);
  if (rstd) rstd = rstd + (row_class + begin * period);
  const int64_t x_step = step * period * x_stride, y_step = step * period * y_stride;

  const row_span::Ends<T, K> ends(span, part, shift);
  const auto fetch = [&](const Global<const T>& row, Vec<T, N>(&v)[K], T& one) {
    if constexpr (kWhole)
      row_span::load_whole<Cache::kStream>(span, row, v);
    else if (x_like)
      row_span::start_span<Cache::kStream>(span, ends, row, v, one);
    else
      row_span::load_elements<Cache::kStream>(span, row, v);
  };
  Global<const T> residual;
  Global<T> sum_row;
  int64_t residual_step = 0, sum_step = 0;
  if constexpr (Rows::kSummed) {
    residual = in.residual + begin * in.residual_stride, residual_step = step * in.residual_stride;
    if (in.sum) sum_row = in.sum + begin * in.sum_stride, sum_step = step * in.sum_stride;
  }
  Vec<T, N> next[K] = {}, next_more[K] = {};
  T next_one = T();
  const auto start = [&] {
    fetch(x, next, next_one);
    if constexpr (Rows::kSummed) fetch(residual, next_more, next_one);
  };
  if (begin < all_rows) start();
  row_span::spread_vector(gamma, cols, shift, vectors, gammas);
  row_span::spread_vector(beta, cols, shift, vectors, betas);
  if constexpr (Rows::kSummed) row_span::spread_vector(in.bias, cols, shift, vectors, biases);
  barrier();

  const int count = span.columns(K), sample = span.columns(1);
  const float by_sample = sample > 0 ? 1.0f / static_cast<float>(sample) : 0.0f;
  const float by_count = count > 0 ? 1.0f / static_cast<float>(count) : 0.0f;
  const float by_cols = 1.0f / static_cast<float>(cols);
  int64_t at = 0;  // of the rows of mean and rstd
  int turn = 0;    // alternates between two halves of scratch, so that one barrier a row is enough
  for (int64_t row = begin, batch = begin - group; batch < all_rows; row += step, batch += step) {
    const bool live = row < all_rows;
    Vec<T, N> v[K];
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) v[k] = next[k];
    if constexpr (Rows::kSummed) {
      FRIT_UNROLL
      for (int k = 0; k < K; ++k) {
        if (!live || !span.any(k)) continue;
        const Vec<float, N> b = row_span::spread_at<N>(biases, vectors, (part * K + k) * 32 + lane());
        const uint32_t keep = in.dropout.active ? keep_of_columns<N>(in.dropout, row, span.column(k)) : 0;
        v[k] = sum_of(in, v[k], b, next_more[k], keep);
        if (sum_row) row_span::store_whole<Cache::kStream>(span, sum_row, k, v[k]);
      }
      residual = residual + residual_step;
      if (sum_row) sum_row = sum_row + sum_step;
    } else if constexpr (!kWhole) {
      if (x_like) ends.place(next_one, v);
    }
    x = x + x_step;
    if (row + step < all_rows) start();

    float sum = 0, both[2] = {0, 0};
    if (live && span.any(0)) {
      const Vec<float, N> a = to_float(v[0]);  // 0 outside
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) sum += a[i];
    }
    const float rough = warp_sum(sum) * by_sample;
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) {
      if (!live || !span.any(k)) continue;
      const Vec<float, N> a = to_float(v[k]);
      float s = 0, q = 0;
      if (span.whole(k)) {
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) {
          const float d = a[i] - rough;
          s += d, q = fmaf(d, d, q);
        }
      } else {
        const uint32_t inside = kWhole ? (span.column(k) < cols ? (1u << N) - 1 : 0) : span.inside(k);
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) {
          const float d = inside >> i & 1 ? a[i] - rough : 0.0f;
          s += d, q = fmaf(d, d, q);
        }
      }
      both[0] += s, both[1] += q;
    }
    warp_sums(both);
    row_span::keep_packed(v);
    Moments m[1];
    m[0].rough = rough, m[0].count = static_cast<float>(count);
    m[0].left = both[0] * by_count, m[0].squares = both[1] - both[0] * m[0].left;
    merge_warps(m, scratch + (turn * groups + group) * warps * 4, warps, part);
    turn ^= 1;
    if (live) {
      const float variance = m[0].squares * by_cols;
      const float scale = rsqrt((variance < 0 ? 0.0f : variance) + eps);
      // What the warp's elements still lie above the mean by after its rough mean is taken off, times -scale.
      const float left = ((m[0].rough - rough) + m[0].left) * -scale;
      if (part == 0 && lane() == 0) {
        if (mean) store(mean, at, m[0].rough + m[0].left);
        if (rstd) store(rstd, at, scale);
      }
      const bool same = row_shift(y) == shift;
      T one = T();
      FRIT_UNROLL
      for (int k = 0; k < K; ++k) {
        if (!span.any(k)) continue;
        const int j = (part * K + k) * 32 + lane();
        Vec<float, N> a = to_float(v[k]);
        const Vec<float, N> g = row_span::spread_at<N>(gammas, vectors, j);
        const Vec<float, N> b = row_span::spread_at<N>(betas, vectors, j);
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) a[i] = fmaf(fmaf(a[i] - rough, scale, left), g[i], b[i]);
        const Vec<T, N> out = from_float<T>(a);
        if (kWhole || same) {
          row_span::store_whole<Cache::kStream>(span, y, k, out);
          if constexpr (!kWhole) ends.take(k, out, one);
        } else {
          store_span<N, Cache::kStream>(y, span.column(k), cols, out);
        }
      }
      if (!kWhole && same && ends.column >= 0) store<Cache::kStream>(y, ends.column, one);
    }
    y = y + y_step, at += step * period;
  }
}

// Starts spans_2, spans_4 or spans_5.
template <typename T, typename Rows>
void launch_spans(Context& context, int i, const ForwardShape& shape, const Rows& in, const Tensor& gamma,
                  const Tensor& beta, float eps, const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  // Blocks: two for each of an H200's multiprocessors.
  constexpr int64_t kBlocks = 2 * 132;
  const int warps = shape.warps_of(i), k = ForwardShape::kVectors[i];
  const int64_t groups = 8 / warps, of_class = (shape.rows + shape.period - 1) / shape.period,
                pieces = std::clamp<int64_t>((of_class + groups - 1) / groups, 1, kBlocks / shape.period);
  const Launch grid = {shape.rows == 0 ? 0 : pieces * shape.period, static_cast<int>(groups * warps * 32),
                       4 * ((Rows::kSummed ? 3 : 2) * int64_t{warps} * k * 32 * shape.n + 8 * groups * warps)};
  const auto start = [&](auto kernel) {
    launch(context, Rows::kSpansKernel, kernel, grid, in, global<const T>(gamma), global<const T>(beta), eps,
           global<T>(y), y.row_stride(), global<float>(mean), global<float>(rstd), shape.rows,
           static_cast<int>(shape.cols), warps, static_cast<int>(shape.period));
  };
  if (i == kSpans2) return start(layer_norm_forward_spans_kernel<T, 2, Rows>);
  if (i == kSpans4) return start(layer_norm_forward_spans_kernel<T, 4, Rows>);
  return start(layer_norm_forward_spans_kernel<T, 5, Rows>);
}

// Starts instance i on RowsGiven or RowsSummed. whole: all operands' rows are whole aligned vectors. The latter have
// neither the looped form nor those that are kept to be measured.
template <typename T, typename Rows>
void launch_forward(Context& context, int i, const ForwardShape& shape, const Rows& in, bool whole, const Tensor& gamma,
                    const Tensor& beta, float eps, const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  if (ForwardShape::is_spans(i)) {
    if constexpr (!Rows::kWhole)
      if (whole)
        return launch_spans<T>(context, i, shape, RowsGiven<T, true>{in.x, in.x_stride}, gamma, beta, eps, y, mean,
                               rstd);
    return launch_spans<T>(context, i, shape, in, gamma, beta, eps, y, mean, rstd);
  }
  const int64_t rows = shape.rows;
  const int cols = static_cast<int>(shape.cols), warps = shape.warps_of(i), k = ForwardShape::kVectors[i];
  const int groups = std::max(1, 8 / warps), at_once = k == 1 ? 2 : 1;
  const Launch grid = {(rows + groups * at_once - 1) / (groups * at_once), groups * warps * 32,
                       warps == 1 ? 0 : int64_t{16} * groups * warps * at_once};
  const auto start = [&](const char* name, auto kernel) {
    launch(context, name, kernel, grid, in, global<const T>(gamma), global<const T>(beta), eps, global<T>(y),
           y.row_stride(), global<float>(mean), global<float>(rstd), rows, cols, warps);
  };
  if constexpr (sizeof(T) == 4) {  // 16-bit rows of whole vectors are `held`'s
    if (whole && i == kOneSync2)
      return start(Rows::kRowsKernel, layer_norm_forward_rows_kernel<T, 2, Form::kOneSync, Rows, 8, true>);
    if (whole && i == kOneSync4)
      return start(Rows::kRowsKernel, layer_norm_forward_rows_kernel<T, 4, Form::kOneSync, Rows, 8, true>);
  }
  if (i == kOneSync1) return start(Rows::kRowsKernel, layer_norm_forward_rows_kernel<T, 1, Form::kOneSync, Rows>);
  if (i == kOneSync2) return start(Rows::kRowsKernel, layer_norm_forward_rows_kernel<T, 2, Form::kOneSync, Rows>);
  if (i == kOneSync4) return start(Rows::kRowsKernel, layer_norm_forward_rows_kernel<T, 4, Form::kOneSync, Rows>);
  if (i == kOneSyncWide)
    return start(Rows::kRowsKernel, layer_norm_forward_rows_kernel<T, 4, Form::kOneSync, Rows, 16>);
  if constexpr (!Rows::kSummed) {
    if (i == kTwoSync)
      return start("layer_norm_forward_two_sync_kernel", layer_norm_forward_rows_kernel<T, 1, Form::kTwoSync, Rows>);
    return start("layer_norm_forward_moments_kernel", layer_norm_forward_rows_kernel<T, 1, Form::kMoments, Rows>);
  }
}

}  // namespace frit::layer_norm
