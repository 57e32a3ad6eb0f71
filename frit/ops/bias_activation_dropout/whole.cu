#include "frit/ops/bias_activation_dropout/activation-inl.h"
#include "frit/ops/bias_activation_dropout/whole.h"
#include "frit/simt/early.h"
#include "frit/simt/row_draws.h"

namespace frit {
namespace {

using namespace simt;

template <typename T, Activation activation>
FRIT_KERNEL(kActivationThreads, 5)
bias_activation_dropout_forward_whole_kernel(ColumnWalk walk, Global<const T> x, Global<const T> bias,
                                             DropoutTable dropout, Global<T> y, RowSteps x_rows, RowSteps y_rows) {
  constexpr int N = 8;
  wait_for_previous();
  let_next_start();
  const ColumnPlace at = whole_place(walk);
  if (!at.active) return;
  const int step = static_cast<int>(walk.pieces) * walk.lanes,
            first = static_cast<int>(at.piece) * walk.lanes + at.lane;
  const int end = static_cast<int>(walk.rows);
  const uint32_t threshold = dropout_threshold(dropout);
  const RowDraws draws(dropout, static_cast<uint32_t>(at.column / N));
  Global<const T> from = x + (first * x_rows.stride + at.column);
  Global<T> to = y + (first * y_rows.stride + at.column);
  const Vec<float, N> b = to_float(bias ? load_vec<N>(bias, at.column) : Vec<T, N>{});
  const auto rows = [&](auto both, int k) {
    constexpr int U = both ? 2 : 1;
    Vec<T, N> v[U];
    FRIT_UNROLL
    for (int u = 0; u < U; ++u) v[u] = load_vec<N, Cache::kStream>(from, 0), from = from + x_rows.step;
    FRIT_UNROLL
    for (int u = 0; u < U; ++u) {
      const DropoutWords<1> words = draws.rows<1>(dropout, static_cast<uint32_t>(k + u * step), 0);
      Vec<float, N> a;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        a[i] = activate<T, activation>(widen(static_cast<T>(v[u][i])) + b[i], dropout.scale);
        a[i] = words.kept(0, i, threshold) ? a[i] : 0.0f;
      }
      store_vec<N, Cache::kStream>(to, 0, from_float<T>(a));
      to = to + y_rows.step;
    }
  };
  int k = first;
  for (; k + step < end; k += 2 * step) rows(std::true_type(), k);
  if (k < end) rows(std::false_type(), k);
}

template <typename T, Activation activation>
FRIT_KERNEL(kActivationThreads, 4)
bias_activation_dropout_backward_whole_kernel(ColumnWalk walk, Global<const T> dy, Global<const T> x,
                                              Global<const T> bias, DropoutTable dropout, Global<T> dx,
                                              RowSteps dy_rows, RowSteps x_rows, RowSteps dx_rows) {
  constexpr int N = 8;
  wait_for_previous();
  let_next_start();
  const ColumnPlace at = whole_place(walk);
  const int step = static_cast<int>(walk.pieces) * walk.lanes,
            first = static_cast<int>(at.piece) * walk.lanes + at.lane;
  const int end = at.active ? static_cast<int>(walk.rows) : 0;
  const uint32_t threshold = dropout_threshold(dropout);
  const RowDraws draws(dropout, static_cast<uint32_t>(at.column / N));
  Global<const T> x_from = x + (first * x_rows.stride + at.column), dy_from = dy + (first * dy_rows.stride + at.column);
  Global<T> to = dx + (first * dx_rows.stride + at.column);
  const Vec<float, N> b = to_float(bias && at.active ? load_vec<N>(bias, at.column) : Vec<T, N>{});
  const auto rows = [&](auto both, int k) {
    constexpr int U = both ? 2 : 1;
    Vec<T, N> v[U], g[U];
    FRIT_UNROLL
    for (int u = 0; u < U; ++u) {
      v[u] = load_vec<N, Cache::kStream>(x_from, 0), x_from = x_from + x_rows.step;
      g[u] = load_vec<N, Cache::kStream>(dy_from, 0), dy_from = dy_from + dy_rows.step;
    }
    FRIT_UNROLL
    for (int u = 0; u < U; ++u) {
      const DropoutWords<1> words = draws.rows<1>(dropout, static_cast<uint32_t>(k + u * step), 0);
      Vec<float, N> d;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        d[i] = through<T, activation>(widen(static_cast<T>(g[u][i])), widen(static_cast<T>(v[u][i])) + b[i],
                                      dropout.scale);
        d[i] = words.kept(0, i, threshold) ? d[i] : 0.0f;
      }
      store_vec<N, Cache::kStream>(to, 0, from_float<T>(d));
      to = to + dx_rows.step;
    }
  };
  int k = first;
  for (; k + step < end; k += 2 * step) rows(std::true_type(), k);
  if (k < end) rows(std::false_type(), k);
}

// The same with column sums, where a row's vectors are loaded as soon as those of two rows before are widened.
template <typename T, Activation activation>
FRIT_KERNEL(kActivationSumThreads, 1)
bias_activation_dropout_backward_ahead_kernel(ColumnWalk walk, Global<const T> dy, Global<const T> x,
                                              Global<const T> bias, DropoutTable dropout, Global<T> dx,
                                              RowSteps dy_rows, RowSteps x_rows, RowSteps dx_rows,
                                              Global<float> partial) {
  constexpr int N = 8, U = 2;
  const ColumnPlace at = whole_place(walk);
  const int step = static_cast<int>(walk.pieces) * walk.lanes,
            first = static_cast<int>(at.piece) * walk.lanes + at.lane;
  const int end = at.active ? static_cast<int>(walk.rows) : 0;
  Global<const T> x_from = x + (first * x_rows.stride + at.column), dy_from = dy + (first * dy_rows.stride + at.column);
  Global<T> to = dx + (first * dx_rows.stride + at.column);
  wait_for_previous();
  let_next_start();
  Vec<T, N> v[U], g[U];
  const auto fetch = [&](int u, bool there) {
    if (there) v[u] = load_vec<N, Cache::kStream>(x_from, 0), g[u] = load_vec<N, Cache::kStream>(dy_from, 0);
    x_from = x_from + x_rows.step, dy_from = dy_from + dy_rows.step;
  };
  FRIT_UNROLL
  for (int u = 0; u < U; ++u) fetch(u, first + u * step < end);
  const uint32_t threshold = dropout_threshold(dropout);
  const RowDraws draws(dropout, static_cast<uint32_t>(at.column / N));
  const Vec<float, N> b = to_float(bias && at.active ? load_vec<N>(bias, at.column) : Vec<T, N>{});
  float sum[N] = {};
  const auto row = [&](auto behind, int u, int k) {  // is there a row U behind it?
    const DropoutWords<1> words = draws.rows<1>(dropout, static_cast<uint32_t>(k), 0);
    const Vec<T, N> in = v[u], incoming = g[u];
    if constexpr (behind) fetch(u, true);
    Vec<float, N> d;
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) {
      d[i] = through<T, activation>(widen(static_cast<T>(incoming[i])), widen(static_cast<T>(in[i])) + b[i],
                                    dropout.scale);
      d[i] = words.kept(0, i, threshold) ? d[i] : 0.0f;
      sum[i] += d[i];
    }
    store_vec<N, Cache::kStream>(to, 0, from_float<T>(d));
    to = to + dx_rows.step;
  };
  int k = first;
  FRIT_UNROLL_BY(1)
  for (; k + 3 * step < end; k += 2 * step) row(std::true_type(), 0, k), row(std::true_type(), 1, k + step);
  if (k + 2 * step < end) {
    row(std::true_type(), 0, k), row(std::false_type(), 1, k + step), row(std::false_type(), 0, k + 2 * step);
  } else {
    if (k < end) row(std::false_type(), 0, k);
    if (k + step < end) row(std::false_type(), 1, k + step);
  }
  store_column_sums(walk, at, sum, shared_array<float>(0), partial, walk.columns, 0);
}

}  // namespace

void start_activation_forward_whole(Context& context, const ColumnWalk& walk, const Tensor& x, const Tensor& bias,
                                    Activation activation, const DropoutTable& dropout, const Tensor& y) {
  dispatch_16(x.dtype(), [&](auto t) {
    using T = decltype(t);
    dispatch_activation(activation, [&](auto form) {
      launch(context, "bias_activation_dropout_forward_whole_kernel",
             bias_activation_dropout_forward_whole_kernel<T, form.value>, {walk.blocks(), walk.threads()}, walk,
             global<const T>(x), global<const T>(bias), dropout, global<T>(y), RowSteps(walk, x), RowSteps(walk, y));
    });
  });
}

void start_activation_backward_whole(Context& context, const ColumnWalk& walk, const Tensor& dy, const Tensor& x,
                                     const Tensor& bias, Activation activation, const DropoutTable& dropout,
                                     const Tensor& dx, const Tensor& partial) {
  dispatch_16(x.dtype(), [&](auto t) {
    using T = decltype(t);
    dispatch_activation(activation, [&](auto form) {
      if (partial.defined())
        launch(context, "bias_activation_dropout_backward_ahead_kernel",
               bias_activation_dropout_backward_ahead_kernel<T, form.value>,
               {walk.blocks(), walk.threads(), column_sums_shared_bytes(walk, 8)}, walk, global<const T>(dy),
               global<const T>(x), global<const T>(bias), dropout, global<T>(dx), RowSteps(walk, dy), RowSteps(walk, x),
               RowSteps(walk, dx), global<float>(partial));
      else
        launch(context, "bias_activation_dropout_backward_whole_kernel",
               bias_activation_dropout_backward_whole_kernel<T, form.value>, {walk.blocks(), walk.threads()}, walk,
               global<const T>(dy), global<const T>(x), global<const T>(bias), dropout, global<T>(dx),
               RowSteps(walk, dy), RowSteps(walk, x), RowSteps(walk, dx));
    });
  });
}

}  // namespace frit
