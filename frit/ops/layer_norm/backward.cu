#include "frit/ops/layer_norm/backward-inl.h"
#include "frit/ops/layer_norm/forward.h"
#include "frit/ops/layer_norm/gpu.h"

namespace frit {
namespace layer_norm {
namespace {

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

constexpr const char* kInstances[] = {"xhat_1",        "xhat_2",  "xhat_4",      "looped",      "spans_2",
                                      "spans_4",       "spans_5", "held",        "dependence",  "slides",
                                      "column_serial", "atomic",  "tiled_32x32", "tiled_32x33", "two_stage_apart"};
constexpr int kLoopedWarps = 16;

int64_t over(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
// Vectors that a thread of instance i holds of a row.
int held_by(int i) {
  switch (i) {
    case kXhat2:
    case kSpans2Backward:
      return 2;
    case kXhat4:
    case kSpans4Backward:
      return 4;
    case kSpans5Backward:
      return 5;
    default:
      return 1;
  }
}

}  // namespace

BackwardShape::BackwardShape(const Tensor& x) : rows(x.dim(0)), cols(x.dim(1)), n(16 / size_of(x.dtype())) {
  FRIT_CHECK(cols < (int64_t{1} << 30), "[layer_norm] x is {}, expected fewer than 2^30 columns", x.to_string());
  vectors = over(cols, n);
  aligned = x.row_stride() % n == 0;
  period = std::min(n / std::gcd(x.row_stride(), n), std::max<int64_t>(rows, 1));
  chunks = over(cols + (period > 1 ? n - 1 : 0), n);
}

int BackwardShape::widest() const {
  return vectors <= 8 * 32        ? kXhat1
         : vectors <= 8 * 2 * 32  ? kXhat2
         : vectors <= 16 * 4 * 32 ? kXhat4
                                  : kLoopedBackward;
}

bool BackwardShape::spans_fit(int i) const {
  return over(chunks, 32 * held_by(i)) <= 8;
}

int BackwardShape::held_vectors() const {
  // A whole number of warps, each with as many steps of 32 vectors: few, so that rows are computed, and the next ones
  // asked for, sooner.
  const int64_t steps = over(cols / n, 32);
  if (n != 8 || steps == 0) return 0;
  for (int each : {2, 3, 4})
    if (steps % each == 0 && steps / each <= 8) return each;
  return 0;
}

int BackwardShape::rule() const {
  return vectors > 32 && held_vectors() > 0 ? kHeldBackward : rule_but_held();
}

int BackwardShape::rule_but_held() const {
  int choice = widest();
  if (vectors <= 32) return choice;
  // As few vectors as can be; of several such forms the one that leaves the fewest of a block's 8 warps idle, and of
  // those the one of the fewest vectors a thread.
  int64_t least = INT64_MAX, busiest = 0;
  const int64_t most = over(cols + (aligned ? 0 : n - 1), n);  // chunks, if there are rows enough
  for (int i : {kSpans2Backward, kSpans4Backward, kSpans5Backward}) {
    const int64_t warps = over(most, 32 * held_by(i)), held = warps * held_by(i), busy = 8 / warps * warps;
    if (warps <= 8 && (held < least || (held == least && busy > busiest))) least = held, busiest = busy, choice = i;
  }
  return choice;
}

BackwardCut BackwardShape::cut(int i, int sums) const {
  BackwardCut c;
  if (i == kHeldBackward) {
    // A block a multiprocessor; its rows lie in shared memory beside gamma.
    const int v = held_vectors();
    c.warps = static_cast<int>(over(cols / n, 32 * v));
    c.groups = held_block_warps(v, sums) / c.warps;
    // Two rows a group at least: writing and adding partial sums must pay.
    c.blocks = period * std::clamp<int64_t>(over(over(rows, period), 2 * c.groups), 1, 132 / period);
    // The rows' sums; rows of x and of dy, later the columns' sums; what is kept of rows' ends.
    const int stages = held_stages(v);
    c.shared_bytes = 4 * (int64_t{c.warps} * v * 256 + 4 * stages * c.groups * over(c.warps, 2)) +
                     int64_t{c.threads()} * 32 * v * std::max(stages, sums) + int64_t{c.groups} * 512;
    return c;
  }
  const int k = held_by(i);
  if (is_spans(i)) {
    // Where a warp holds a row and none waits for another, one block a multiprocessor has 16 of them: half as many
    // partial sums as two blocks of 8.
    c.warps = static_cast<int>(over(chunks, 32 * k));
    const bool large = k == 2 && c.warps == 1;
    c.groups = (large ? 16 : 8) / c.warps;
    // Two rows a group at least: writing and adding partial sums must pay.
    c.blocks = period *
               std::clamp<int64_t>(over(over(rows, period), 2 * c.groups), 1, (k == 2 && !large ? 264 : 132) / period);
    c.shared_bytes = 4 * (int64_t{c.warps} * k * 32 * n + c.threads() / 8 + int64_t{c.threads()} * k * sums * n);
    return c;
  }
  c.warps = static_cast<int>(over(vectors, 32 * k));
  c.groups = std::max(1, 8 / c.warps);
  // Blocks that fill the chip: 16 warps for each of 132 multiprocessors. A number of the method, not of the device the
  // program runs on: the sums' order depends on it.
  constexpr int64_t kFull = 132 * 16;
  const int64_t most = 132 * std::max<int64_t>(1, kFull / 132 / (c.warps * c.groups));
  const int at_once = k == 1 ? 2 : 1;
  // Two batches a block at least, for the same reason.
  c.blocks = std::clamp<int64_t>(over(rows, 2 * c.groups * at_once), 1, most);
  c.shared_bytes = 4 * (8 * at_once * int64_t{c.threads() / 32} +
                        (c.groups > 1 || k == 4 ? int64_t{c.threads()} * sums * k * n : 0));
  return c;
}

}  // namespace layer_norm

void layer_norm_backward_gpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                             const Tensor& mean, const Tensor& rstd, const Tensor& dresidual, bool accumulate,
                             const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta) {
  using namespace layer_norm;
  const BackwardShape shape(x);
  const int64_t rows = shape.rows, cols = shape.cols;
  const int widest = shape.widest();
  const bool free = context.forced("layer_norm_backward").empty();
  const int instance =
      choose_instance(context, "layer_norm_backward", fmt::format("{}x{}/{}", rows, cols, name_of(x.dtype())),
                      kInstances, shape.rule(), [&](int i) {
                        if (free && i >= kDependence) return false;  // kept to be measured: only if asked for
                        if (i == kDependence || i == kSlides) return widest == kXhat1;
                        if (BackwardShape::is_spans(i)) return shape.spans_fit(i);
                        if (i == kHeldBackward) return shape.held_vectors() > 0;
                        return i >= widest;
                      });
  const bool fused = instance < kLoopedBackward || BackwardShape::is_spans(instance) || instance == kHeldBackward ||
                     instance == kDependence || instance == kSlides;
  const bool apart = instance == kLoopedBackward || instance == kApart;
  // dx by rows, or by the looped kernel where no block holds a row.
  const int by = fused || instance == kLoopedBackward ? instance : widest;
  const int64_t pieces = fused ? shape.cut(instance).blocks : apart ? std::clamp<int64_t>(rows / 64, 1, 64) : 1;
  Buffer partials = context.allocate({pieces, 2 * cols}, DType::kF32, "layer_norm.partials");
  const LayerNormBackward operands = {dy, x, gamma, mean, rstd, dresidual, dx, partials};

  const bool whole = whole_vectors(x) && whole_vectors(dy) && whole_vectors(dresidual) && whole_vectors(dx);
  // Before dx is written, which may be dy.
  if (!fused)
    layer_norm_sum_columns(context, operands,
                           instance == kAtomic    ? ColumnWay::kAtomic
                           : instance == kTiled32 ? ColumnWay::kTiled32x32
                           : instance == kTiled33 ? ColumnWay::kTiled32x33
                                                  : ColumnWay::kSerial);
  if (BackwardShape::is_spans(by) || by == kHeldBackward) {
    if (by == kHeldBackward)
      start_backward_held(context, shape, operands, whole);
    else
      start_backward_spans(context, by, shape, operands, whole);
    return layer_norm_add_partials(context, std::move(partials), accumulate, dgamma, dbeta);
  }
  dispatch_float(x.dtype(), [&](auto type) {
    using T = decltype(type);
    if (by != kLoopedBackward) return launch_rows<T>(context, by, shape, operands, NoneBelow<>(), fused);
    launch(context, "layer_norm_backward_looped_kernel", layer_norm_backward_looped_kernel<T, 2>,
           {rows, kLoopedWarps * 32, kLoopedWarps * 8}, global<const T>(dy), dy.row_stride(), global<const T>(x),
           x.row_stride(), global<const T>(gamma), global<const float>(mean), global<const float>(rstd),
           global<const T>(dresidual), dresidual.row_stride(), global<T>(dx), dx.row_stride(), static_cast<int>(cols));
  });
  layer_norm_add_partials(context, std::move(partials), accumulate, dgamma, dbeta);
}

}  // namespace frit
