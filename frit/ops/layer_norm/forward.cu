#include <algorithm>
#include <numeric>

#include "frit/ops/layer_norm/gpu.h"
#include "frit/ops/layer_norm/row_part.h"
#include "frit/ops/layer_norm/span.h"
#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace row_part;

enum class Form { kOneSync, kTwoSync, kMoments };

// Rows a warp holds at once: enough loads in flight where a row has few vectors a thread.
template <int K>
constexpr int kRows = K == 1 ? 2 : 1;

// What `count` elements are: their mean is rough + left, where left is small, and squares is the sum of the squared
// distances from the mean. Subtracting rough from an element near it is exact, so nothing is lost far from 0.
struct Moments {
  float rough, left, squares, count;
};

// Moments of the first `columns` columns of each of R parts. Cost: 15 R shuffles; all lanes get the result.
template <typename T, int K, int R>
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
        const float d = i < left ? v[i] - rough : 0.0f;
        s += d;
        q = fmaf(d, d, q);
      }
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

// A group of `warps` warps takes kRows<K> rows, each warp 32 K vectors of every one.
template <typename T, int K, Form form, int max_warps = 8>
FRIT_KERNEL(max_warps * 32, max_warps > 8 ? 1
                            : K == 4      ? 3
                                          : 4)
layer_norm_forward_rows_kernel(Global<const T> x, int64_t x_stride, Global<const T> gamma, Global<const T> beta,
                               float eps, Global<T> y, int64_t y_stride, Global<float> mean, Global<float> rstd,
                               int64_t rows, int cols, int warps) {
  wait_for_previous();
  constexpr int N = Part<T, K>::kN, R = kRows<K>;
  const int group = warp() / warps, part = warp() - group * warps;
  const int64_t row = (block_index() * (warp_count() / warps) + group) * R;
  const int live = static_cast<int>(rows - row < R ? (rows > row ? rows - row : 0) : R);
  const int first = part * Part<T, K>::kColumns;
  const int rest = cols - first, columns = rest < Part<T, K>::kColumns ? rest : Part<T, K>::kColumns;

  Part<T, K> held[R];
  int count[R];
  Global<const T> from[R];
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    count[r] = r < live ? columns : 0;
    from[r] = x + (r < live ? (row + r) * x_stride + first : 0);
    start_load<Cache::kStream>(held[r], from[r], count[r]);
  }
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) finish_load<Cache::kStream>(held[r], from[r], count[r]);

  Moments m[R];
  const float all = static_cast<float>(cols);
  float rough[R];
  const Shared<float> scratch = shared_array<float>(0) + group * warps * R * 4;
  if constexpr (form == Form::kOneSync) {
    moments_of_parts(held, count, m);
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
  float scale[R];
  FRIT_UNROLL
  for (int r = 0; r < R; ++r) {
    scale[r] = rstd_of(m[r].squares, all, eps);
    if (r < live && part == 0 && lane() == 0) {
      if (mean) store(mean, row + r, rough[r] + m[r].left);
      if (rstd) store(rstd, row + r, scale[r]);
    }
  }
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    const int c = (k * 32 + lane()) * N;
    if (c < columns) {
      const Vec<float, N> g = to_float(load_span<N, Cache::kReadOnly>(gamma, first + c, cols, T()));
      const Vec<float, N> b = to_float(load_span<N, Cache::kReadOnly>(beta, first + c, cols, T()));
      FRIT_UNROLL
      for (int r = 0; r < R; ++r) {
        Vec<float, N> v = to_float(held[r].v[k]);
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) v[i] = fmaf((v[i] - rough[r] - m[r].left) * scale[r], g[i], b[i]);
        held[r].v[k] = from_float<T>(v);
      }
    }
  }
  FRIT_UNROLL
  for (int r = 0; r < R; ++r)
    if (r < live) store_part<Cache::kDefault>(held[r], y + (row + r) * y_stride + first, columns);
}

// A block takes a row, piece by piece; its second pass reads x again.
template <typename T, int K>
FRIT_KERNEL(512, 1)
layer_norm_forward_looped_kernel(Global<const T> x, int64_t x_stride, Global<const T> gamma, Global<const T> beta,
                                 float eps, Global<T> y, int64_t y_stride, Global<float> mean, Global<float> rstd,
                                 int cols) {
  wait_for_previous();
  constexpr int N = Part<T, K>::kN, kColumns = Part<T, K>::kColumns;
  const int64_t row = block_index();
  const int step = warp_count() * kColumns;
  const auto columns_from = [&](int first) { return cols - first < kColumns ? cols - first : kColumns; };
  Moments m[1] = {{0, 0, 0, 0}};
  for (int first = warp() * kColumns; first < cols; first += step) {
    Part<T, K> held[1];
    const int columns[1] = {columns_from(first)};
    const Global<const T> from = x + (row * x_stride + first);
    start_load<Cache::kDefault>(held[0], from, columns[0]);
    finish_load<Cache::kDefault>(held[0], from, columns[0]);
    Moments piece[1];
    moments_of_parts(held, columns, piece);
    if (m[0].count == 0)
      m[0] = piece[0];
    else
      merge(m[0], piece[0]);
  }
  merge_warps(m, shared_array<float>(0), warp_count(), warp());
  const float rough = m[0].rough, left = m[0].left;
  const float scale = rstd_of(m[0].squares, static_cast<float>(cols), eps);
  if (thread_index() == 0) {
    if (mean) store(mean, row, rough + left);
    if (rstd) store(rstd, row, scale);
  }
  for (int first = warp() * kColumns; first < cols; first += step) {
    Part<T, K> held;
    const int columns = columns_from(first);
    const Global<const T> from = x + (row * x_stride + first);
    start_load<Cache::kStream>(held, from, columns);
    finish_load<Cache::kStream>(held, from, columns);
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) {
      const int c = (k * 32 + lane()) * N;
      if (c < columns) {
        const Vec<float, N> g = to_float(load_span<N, Cache::kReadOnly>(gamma, first + c, cols, T()));
        const Vec<float, N> b = to_float(load_span<N, Cache::kReadOnly>(beta, first + c, cols, T()));
        Vec<float, N> v = to_float(held.v[k]);
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) v[i] = fmaf((v[i] - rough - left) * scale, g[i], b[i]);
        held.v[k] = from_float<T>(v);
      }
    }
    store_part<Cache::kDefault>(held, y + (row * y_stride + first), columns);
  }
}

// Block b takes rows of one class, b % period (see span.h), batch by batch: each group of `warps` warps a row, each
// warp up to 32 K of its vectors, while the next row is on its way. gamma and beta lie in shared memory as fp32, as the
// class needs them. The squared distances are taken from the mean of the warp's first vectors: by that no more than a
// factor of K is lost, wherever the row's mean lies.
template <typename T, int K>
FRIT_KERNEL(256, 2)
layer_norm_forward_spans_kernel(Global<const T> x, int64_t x_stride, Global<const T> gamma, Global<const T> beta,
                                float eps, Global<T> y, int64_t y_stride, Global<float> mean, Global<float> rstd,
                                int64_t rows, int cols, int warps, int period) {
  wait_for_previous();
  using row_span::Span;
  constexpr int N = kVecOf<T>;
  const int groups = warp_count() / warps, group = warp() / warps, part = warp() - group * warps;
  const int row_class = static_cast<int>(block_index() % period);
  // Rows a multiple of 16 bytes apart are taken as if they began at one: how they are shared out must not depend on the
  // address, which planning does not know.
  const int shift = period == 1 ? 0 : row_shift(x + row_class * x_stride);
  const bool x_like = row_shift(x + row_class * x_stride) == shift;
  const int vectors = warps * K * 32;
  const Shared<float> gammas = shared_array<float>(0), betas = gammas + vectors * N;
  const Shared<float> scratch = betas + vectors * N;
  const Span<T, K> span(part, shift, cols);
  // Row r here is row row_class + r * period. From here on rows are counted from the group's first.
  const int64_t step = block_count() / period * groups, begin = block_index() / period * groups + group;
  const int64_t all_rows = (rows - row_class + period - 1) / period;
  x = x + (row_class + begin * period) * x_stride, y = y + (row_class + begin * period) * y_stride;
  if (mean) mean = mean + (row_class + begin * period);
  if (rstd) rstd = rstd + (row_class + begin * period);
  const int64_t x_step = step * period * x_stride, y_step = step * period * y_stride;

  const row_span::Ends<T, K> ends(span, part, shift);
  Vec<T, N> next[K] = {};
  T next_one = T();
  const auto start = [&] {
    if (x_like)
      row_span::start_span<Cache::kStream>(span, ends, x, next, next_one);
    else
      row_span::load_elements<Cache::kStream>(span, x, next);
  };
  if (begin < all_rows) start();
  row_span::spread_vector(gamma, cols, shift, vectors, gammas);
  row_span::spread_vector(beta, cols, shift, vectors, betas);
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
    if (x_like) ends.place(next_one, v);
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
        const uint32_t inside = span.inside(k);
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
        if (same) {
          row_span::store_whole<Cache::kDefault>(span, y, k, out);
          ends.take(k, out, one);
        } else {
          store_span<N>(y, span.column(k), cols, out);
        }
      }
      if (same && ends.column >= 0) store(y, ends.column, one);
    }
    y = y + y_step, at += step * period;
  }
}

constexpr const char* kInstances[] = {"one_sync_1", "one_sync_2", "one_sync_4", "one_sync_wide", "looped",
                                      "spans_2",    "spans_4",    "spans_5",    "two_sync",      "moments"};
enum { kOneSync1, kOneSync2, kOneSync4, kOneSyncWide, kLooped, kSpans2, kSpans4, kSpans5, kTwoSync, kMoments };
constexpr int kVectors[] = {1, 2, 4, 4, 4, 2, 4, 5, 1, 1};      // a thread holds of a row
constexpr int kMostWarps[] = {8, 8, 8, 16, 16, 8, 8, 8, 8, 8};  // that share a row
// Blocks of the spans kernel: two for each of an H200's multiprocessors.
constexpr int64_t kSpanBlocks = 2 * 132;
bool is_spans(int instance) {
  return instance >= kSpans2 && instance <= kSpans5;
}

// a / b, rounded up.
int64_t over(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

void layer_norm_forward_gpu(Context& context, const Tensor& x, const Tensor& gamma, const Tensor& beta, float eps,
                            const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  const int64_t rows = x.dim(0), cols = x.dim(1);
  FRIT_CHECK(cols < (int64_t{1} << 30), "[layer_norm] x is {}, expected fewer than 2^30 columns", x.to_string());
  const int64_t n = 16 / size_of(x.dtype()), vectors = over(cols, n);
  const auto warps_of = [&](int k) { return static_cast<int>(over(vectors, 32 * k)); };
  // Vectors that cover a row wherever it begins.
  const int64_t period = std::min(n / std::gcd(x.row_stride(), n), std::max<int64_t>(rows, 1));
  const int64_t chunks = over(cols + (period > 1 ? n - 1 : 0), n);
  const auto span_warps = [&](int i) { return static_cast<int>(over(chunks, 32 * kVectors[i])); };
  const auto fits = [&](int i) {
    return i == kLooped || (is_spans(i) ? span_warps(i) : warps_of(kVectors[i])) <= kMostWarps[i];
  };
  // The share of the threads' vectors that the row fills, times 1024.
  const auto filled = [&](int i) { return vectors * 1024 / (warps_of(kVectors[i]) * 32 * kVectors[i]); };
  // One warp a row while it can hold it: no barrier. Beyond that 4 vectors a thread, unless many would be empty.
  int fallback = fits(kOneSyncWide) ? kOneSyncWide : kLooped;
  if (vectors <= 32) {
    fallback = kOneSync1;
  } else if (vectors <= 64) {
    fallback = kOneSync2;
  } else if (vectors <= 128) {
    fallback = kOneSync4;
  } else {
    for (int i : {kOneSync1, kOneSync2, kOneSync4})
      if (fits(i) && (fallback >= kOneSyncWide || filled(i) >= std::min<int64_t>(768, filled(fallback)))) fallback = i;
  }
  // Rows of several vectors a thread: as few vectors as can be, and of several such forms that of the fewest warps.
  if (vectors > 32) {
    int64_t least = INT64_MAX;
    for (int i : {kSpans2, kSpans4, kSpans5})
      if (fits(i) && span_warps(i) * kVectors[i] <= least) least = span_warps(i) * kVectors[i], fallback = i;
  }
  // Forms that are kept to be measured run only if they are asked for.
  const bool free = context.forced("layer_norm_forward").empty();
  const int instance =
      choose_instance(context, "layer_norm_forward", fmt::format("{}x{}/{}", rows, cols, name_of(x.dtype())),
                      kInstances, fallback, [&](int i) { return fits(i) && !(free && i >= kTwoSync); });
  dispatch_float(x.dtype(), [&](auto type) {
    using T = decltype(type);
    if (instance == kLooped) {
      launch(context, "layer_norm_forward_looped_kernel", layer_norm_forward_looped_kernel<T, 4>,
             {rows, kMostWarps[kLooped] * 32, kMostWarps[kLooped] * 16}, global<const T>(x), x.row_stride(),
             global<const T>(gamma), global<const T>(beta), eps, global<T>(y), y.row_stride(), global<float>(mean),
             global<float>(rstd), static_cast<int>(cols));
      return;
    }
    if (is_spans(instance)) {
      const int warps = span_warps(instance), groups = 8 / warps;
      const int64_t most = over(over(rows, period), groups),
                    pieces = std::clamp<int64_t>(most, 1, kSpanBlocks / period);
      const Launch shape = {rows == 0 ? 0 : pieces * period, groups * warps * 32,
                            4 * (2 * int64_t{warps} * kVectors[instance] * 32 * n + 8 * int64_t{groups} * warps)};
      const auto start = [&](auto kernel) {
        launch(context, "layer_norm_forward_spans_kernel", kernel, shape, global<const T>(x), x.row_stride(),
               global<const T>(gamma), global<const T>(beta), eps, global<T>(y), y.row_stride(), global<float>(mean),
               global<float>(rstd), rows, static_cast<int>(cols), warps, static_cast<int>(period));
      };
      if (instance == kSpans2) return start(layer_norm_forward_spans_kernel<T, 2>);
      if (instance == kSpans4) return start(layer_norm_forward_spans_kernel<T, 4>);
      return start(layer_norm_forward_spans_kernel<T, 5>);
    }
    const int k = kVectors[instance], warps = warps_of(k), groups = std::max(1, 8 / warps), at_once = k == 1 ? 2 : 1;
    const Launch shape = {over(rows, groups * at_once), groups * warps * 32,
                          warps == 1 ? 0 : int64_t{16} * groups * warps * at_once};
    const auto start = [&](const char* name, auto kernel) {
      launch(context, name, kernel, shape, global<const T>(x), x.row_stride(), global<const T>(gamma),
             global<const T>(beta), eps, global<T>(y), y.row_stride(), global<float>(mean), global<float>(rstd), rows,
             static_cast<int>(cols), warps);
    };
    switch (instance) {
      case kOneSync1:
        return start("layer_norm_forward_rows_kernel", layer_norm_forward_rows_kernel<T, 1, Form::kOneSync>);
      case kOneSync2:
        return start("layer_norm_forward_rows_kernel", layer_norm_forward_rows_kernel<T, 2, Form::kOneSync>);
      case kOneSync4:
        return start("layer_norm_forward_rows_kernel", layer_norm_forward_rows_kernel<T, 4, Form::kOneSync>);
      case kOneSyncWide:
        return start("layer_norm_forward_rows_kernel", layer_norm_forward_rows_kernel<T, 4, Form::kOneSync, 16>);
      case kTwoSync:
        return start("layer_norm_forward_two_sync_kernel", layer_norm_forward_rows_kernel<T, 1, Form::kTwoSync>);
      default:
        return start("layer_norm_forward_moments_kernel", layer_norm_forward_rows_kernel<T, 1, Form::kMoments>);
    }
  });
}

}  // namespace frit
