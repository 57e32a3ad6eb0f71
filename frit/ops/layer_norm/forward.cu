#include "frit/ops/layer_norm/forward-inl.h"
#include "frit/ops/layer_norm/gpu.h"
#include "frit/ops/layer_norm/held.h"
#include "frit/simt/whole_columns.h"

namespace frit {
namespace layer_norm {
namespace {

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
    store_part<Cache::kStream>(held, y + (row * y_stride + first), columns);
  }
}

// a / b, rounded up.
int64_t over(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

ForwardShape::ForwardShape(const Tensor& x) : rows(x.dim(0)), cols(x.dim(1)), n(16 / size_of(x.dtype())) {
  FRIT_CHECK(cols < (int64_t{1} << 30), "[layer_norm] x is {}, expected fewer than 2^30 columns", x.to_string());
  vectors = over(cols, n);
  period = std::min(n / std::gcd(x.row_stride(), n), std::max<int64_t>(rows, 1));
  chunks = over(cols + (period > 1 ? n - 1 : 0), n);
}

int ForwardShape::warps_of(int i) const {
  if (i == kHeld || i == kInPlace)
    return held_vectors() > 0 ? static_cast<int>(over(cols / n, 32 * held_vectors())) : 0;
  return static_cast<int>(over(is_spans(i) ? chunks : vectors, 32 * kVectors[i]));
}

// Every warp of a row must reach its last vectors, so their number is what the row's steps of 32 divide into.
int ForwardShape::held_vectors() const {
  const int64_t steps = over(cols / n, 32);
  if (n != 8 || rows >= int64_t{1} << 31) return 0;
  for (int v : {4, 3, 2})
    if (steps % v == 0 && steps / v <= kMostWarps[kHeld]) return steps > 0 ? v : 0;
  return 0;
}

bool ForwardShape::fits(int i) const {
  if (i == kHeld || i == kInPlace) return held_vectors() > 0 && (i == kHeld || rows < int64_t{1} << 30);
  return i == kLooped || warps_of(i) <= kMostWarps[i];
}

int ForwardShape::rule() const {
  // Many rows that are no whole vectors.
  const bool ragged = period > 1 || cols % n != 0;
  if (fits(kHeld)) return ragged && fits(kInPlace) && rows * cols * 16 / n > int64_t{16} << 20 ? kInPlace : kHeld;
  // The share of the threads' vectors that the row fills, times 1024.
  const auto filled = [&](int i) { return vectors * 1024 / (warps_of(i) * 32 * kVectors[i]); };
  // One warp a row while it can hold it: no barrier. Beyond that 4 vectors a thread, unless many would be empty.
  int choice = fits(kOneSyncWide) ? kOneSyncWide : kLooped;
  if (vectors <= 32) {
    choice = kOneSync1;
  } else if (vectors <= 64) {
    choice = kOneSync2;
  } else if (vectors <= 128) {
    choice = kOneSync4;
  } else {
    for (int i : {kOneSync1, kOneSync2, kOneSync4})
      if (fits(i) && (choice >= kOneSyncWide || filled(i) >= std::min<int64_t>(768, filled(choice)))) choice = i;
  }
  // Few rows that a warp holds each: a form that keeps its blocks would spend its time on their beginning. 8192 are two
  // rounds of an H200's warps.
  const bool few = period == 1 && vectors <= 128 && rows <= 8192;
  // Rows of several vectors a thread: as few vectors as can be, and of several such forms that of the fewest warps.
  if (vectors > 32 && !few) {
    int64_t least = INT64_MAX;
    for (int i : {kSpans2, kSpans4, kSpans5})
      if (fits(i) && int64_t{warps_of(i)} * kVectors[i] <= least) least = warps_of(i) * kVectors[i], choice = i;
  }
  return choice;
}

int choose_forward(Context& context, const Tensor& x) {
  const ForwardShape shape(x);
  // Forms that are kept to be measured run only if they are asked for.
  const bool free = context.forced("layer_norm_forward").empty();
  return choose_instance(context, "layer_norm_forward",
                         fmt::format("{}x{}/{}", shape.rows, shape.cols, name_of(x.dtype())), kForwardInstances,
                         shape.rule(),
                         [&](int i) { return shape.fits(i) && !(free && (i == kTwoSync || i == kMoments)); });
}

}  // namespace layer_norm

void layer_norm_forward_gpu(Context& context, const Tensor& x, const Tensor& gamma, const Tensor& beta, float eps,
                            const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  const layer_norm::ForwardShape shape(x);
  const int instance = layer_norm::choose_forward(context, x);
  const bool whole = layer_norm::whole_vectors(x) && layer_norm::whole_vectors(y) && layer_norm::whole_vectors(gamma) &&
                     layer_norm::whole_vectors(beta);
  if (instance == layer_norm::kInPlace && layer_norm::rows_alike(x, y) && begins_whole(gamma) && begins_whole(beta))
    return layer_norm::start_forward_in_place(context, shape, x, gamma, beta, eps, y, mean, rstd);
  if (instance == layer_norm::kHeld || instance == layer_norm::kInPlace)
    return layer_norm::start_forward_held(context, shape, whole, x, gamma, beta, eps, y, mean, rstd);
  dispatch_float(x.dtype(), [&](auto type) {
    using T = decltype(type);
    if (instance == layer_norm::kLooped) {
      constexpr int kWarps = layer_norm::ForwardShape::kMostWarps[layer_norm::kLooped];
      launch(context, "layer_norm_forward_looped_kernel", layer_norm::layer_norm_forward_looped_kernel<T, 4>,
             {shape.rows, kWarps * 32, kWarps * 16}, global<const T>(x), x.row_stride(), global<const T>(gamma),
             global<const T>(beta), eps, global<T>(y), y.row_stride(), global<float>(mean), global<float>(rstd),
             static_cast<int>(shape.cols));
      return;
    }
    const layer_norm::RowsGiven<T> given = {global<const T>(x), x.row_stride()};
    layer_norm::launch_forward<T>(context, instance, shape, given, whole, gamma, beta, eps, y, mean, rstd);
  });
}

}  // namespace frit
