#include "frit/ops/bias_activation_dropout/activation-inl.h"
#include "frit/ops/bias_activation_dropout/whole.h"
#include "frit/ops/column_sum/walk.h"

namespace frit {
namespace {

using namespace simt;

// A row's vector is loaded where that of two rows before was, as soon as it is widened: two rows are on their way at
// any time.
template <typename T, Activation activation>
FRIT_KERNEL(kActivationThreads, 4)
bias_activation_dropout_forward_whole_kernel(ColumnWalk walk, Global<const T> x, Global<const T> bias,
                                             DropoutTable dropout, Global<T> y, int64_t y_stride) {
  constexpr int N = 8;
  wait_for_previous();
  const ColumnPlace at = whole_place(walk);
  if (!at.active) return;
  const int step = static_cast<int>(walk.pieces) * walk.lanes,
            first = static_cast<int>(at.piece) * walk.lanes + at.lane;
  const int end = static_cast<int>(walk.rows);
  const uint32_t threshold = dropout_threshold(dropout), group = static_cast<uint32_t>(at.column / N);
  const int64_t x_step = step * walk.row_stride, y_step = step * y_stride;
  Global<const T> from = x + (first * walk.row_stride + at.column);
  Global<T> to = y + (first * y_stride + at.column);
  const Vec<float, N> b = to_float(bias ? load_vec<N>(bias, at.column) : Vec<T, N>{});
  Vec<T, N> v[2];
  const auto fetch = [&](auto there, int u, int k) {
    if (there || k < end) v[u] = load_vec<N, Cache::kStream>(from, 0);
    from = from + x_step;
  };
  fetch(std::false_type(), 0, first), fetch(std::false_type(), 1, first + step);
  const auto rows = [&](auto inside, int k) {  // two rows and two behind them are there, or may be missing
    const DropoutWords<2> words =
        dropout_words<2>(dropout, {static_cast<uint32_t>(k), static_cast<uint32_t>(k + step)}, {group, group});
    FRIT_UNROLL
    for (int u = 0; u < 2; ++u) {
      if (!inside && u == 1 && k + step >= end) break;
      Vec<float, N> a;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) a[i] = widen(static_cast<T>(v[u][i])) + b[i];
      fetch(inside, u, k + (u + 2) * step);
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        const float value = activate_scaled<T, activation>(a[i], dropout.scale);
        a[i] = words.kept(u, i, threshold) ? value : 0.0f;
      }
      store_vec<N, Cache::kStream>(to, 0, from_float<T>(a));
      to = to + y_step;
    }
  };
  int k = first;
  for (; k + 3 * step < end; k += 2 * step) rows(std::true_type(), k);
  FRIT_UNROLL_BY(1)
  for (; k < end; k += 2 * step) rows(std::false_type(), k);
}

// A row's vectors are loaded where those of two rows before were, as soon as they are widened: two rows are on their
// way at any time.
template <typename T, Activation activation, bool sums>
FRIT_KERNEL(sums ? kSumThreads : kActivationThreads, sums ? 1 : 3)
bias_activation_dropout_backward_whole_kernel(ColumnWalk walk, Global<const T> dy, int64_t dy_stride, Global<const T> x,
                                              Global<const T> bias, DropoutTable dropout, Global<T> dx,
                                              int64_t dx_stride, Global<float> partial) {
  constexpr int N = 8;
  wait_for_previous();
  const ColumnPlace at = whole_place(walk);
  const int step = static_cast<int>(walk.pieces) * walk.lanes,
            first = static_cast<int>(at.piece) * walk.lanes + at.lane;
  const int end = at.active ? static_cast<int>(walk.rows) : 0;
  const uint32_t threshold = dropout_threshold(dropout), group = static_cast<uint32_t>(at.column / N);
  const int64_t x_step = step * walk.row_stride, dy_step = step * dy_stride, dx_step = step * dx_stride;
  Global<const T> x_from = x + (first * walk.row_stride + at.column), dy_from = dy + (first * dy_stride + at.column);
  Global<T> to = dx + (first * dx_stride + at.column);
  const Vec<float, N> b = to_float(bias && at.active ? load_vec<N>(bias, at.column) : Vec<T, N>{});
  Vec<T, N> v[2], g[2];
  const auto fetch = [&](auto there, int u, int k) {
    if (there || k < end) v[u] = load_vec<N, Cache::kStream>(x_from, 0), g[u] = load_vec<N, Cache::kStream>(dy_from, 0);
    x_from = x_from + x_step, dy_from = dy_from + dy_step;
  };
  fetch(std::false_type(), 0, first), fetch(std::false_type(), 1, first + step);
  float sum[N] = {};
  const auto rows = [&](auto inside, int k) {  // two rows and two behind them are there, or may be missing
    const DropoutWords<2> words =
        dropout_words<2>(dropout, {static_cast<uint32_t>(k), static_cast<uint32_t>(k + step)}, {group, group});
    FRIT_UNROLL
    for (int u = 0; u < 2; ++u) {
      if (!inside && u == 1 && k + step >= end) break;
      Vec<float, N> a, d;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i)
        a[i] = widen(static_cast<T>(v[u][i])) + b[i], d[i] = widen(static_cast<T>(g[u][i])) * dropout.scale;
      fetch(inside, u, k + (u + 2) * step);
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) d[i] *= slope<T, activation>(a[i]);
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        d[i] = words.kept(u, i, threshold) ? d[i] : 0.0f;
        if (sums) sum[i] += d[i];
      }
      store_vec<N, Cache::kStream>(to, 0, from_float<T>(d));
      to = to + dx_step;
    }
  };
  int k = first;
  for (; k + 3 * step < end; k += 2 * step) rows(std::true_type(), k);
  FRIT_UNROLL_BY(1)
  for (; k < end; k += 2 * step) rows(std::false_type(), k);
  if constexpr (sums) store_column_sums(walk, at, sum, shared_array<float>(0), partial, walk.columns, 0);
}

}  // namespace

void start_activation_forward_whole(Context& context, const ColumnWalk& walk, const Tensor& x, const Tensor& bias,
                                    Activation activation, const DropoutTable& dropout, const Tensor& y) {
  dispatch_16(x.dtype(), [&](auto t) {
    using T = decltype(t);
    dispatch_activation(activation, [&](auto form) {
      launch(context, "bias_activation_dropout_forward_whole_kernel",
             bias_activation_dropout_forward_whole_kernel<T, form.value>, {walk.blocks(), walk.threads()}, walk,
             global<const T>(x), global<const T>(bias), dropout, global<T>(y), y.row_stride());
    });
  });
}

void start_activation_backward_whole(Context& context, const ColumnWalk& walk, const Tensor& dy, const Tensor& x,
                                     const Tensor& bias, Activation activation, const DropoutTable& dropout,
                                     const Tensor& dx, const Tensor& partial) {
  dispatch_16(x.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto kernel, int64_t shared_bytes) {
      launch(context, "bias_activation_dropout_backward_whole_kernel", kernel,
             {walk.blocks(), walk.threads(), shared_bytes}, walk, global<const T>(dy), dy.row_stride(),
             global<const T>(x), global<const T>(bias), dropout, global<T>(dx), dx.row_stride(),
             global<float>(partial));
    };
    dispatch_activation(activation, [&](auto form) {
      if (partial.defined())
        run(bias_activation_dropout_backward_whole_kernel<T, form.value, true>, column_sums_shared_bytes(walk, 8));
      else
        run(bias_activation_dropout_backward_whole_kernel<T, form.value, false>, 0);
    });
  });
}

}  // namespace frit
