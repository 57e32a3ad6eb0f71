#include "frit/ops/bias_activation_dropout/activation-inl.h"
#include "frit/ops/bias_activation_dropout/whole.h"
#include "frit/ops/column_sum/walk.h"
#include "frit/simt/early.h"
#include "frit/simt/held_folded.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kFoldedThreads = 32 * kFoldedSums.warps, kFoldedStages = 2;  // a stage's places, and rows on their way

template <typename T, Activation activation>
FRIT_KERNEL(kActivationThreads, 4)
bias_activation_dropout_forward_folded_kernel(ColumnWalk walk, Global<const T> x, Global<const T> bias,
                                              DropoutTable dropout, Global<T> y) {
  constexpr int N = 8, U = 2;
  wait_for_previous();
  let_next_start();
  const ColumnPlace at = column_place(walk, x);
  if (!ballot(at.active)) return;
  const FoldedRows rows = folded_rows(walk, at);
  const Vec<float, N> b = to_float(load_of_columns<N>(walk, at, bias));
  const int64_t step = rows.step * walk.row_stride, begin = rows.first * walk.row_stride + at.column;
  Global<const T> from = x + begin;
  Global<T> to = y + begin;
  Vec<T, N> v[U] = {};
  const auto fetch = [&](int u, bool there) {
    if (there) v[u] = load_vec<N, Cache::kStream>(from, 0);
    from = from + step;
  };
  const auto result = [&](const Vec<float, N>& in, const KeptRows& kept) {
    Vec<float, N> a;
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) a[i] = activate<T, activation>(in[i] + b[i], dropout.scale);
    Vec<T, N> out = from_float<T>(a);
    kept.drop(out);
    return out;
  };
  for_folded_rows<U>(walk, at, rows, dropout, fetch, [&](int u, const KeptRows& kept, bool here, bool more) {
    const Vec<float, N> in = to_float(v[u]);
    fetch(u, more);
    const Vec<T, N> out = result(in, kept);
    if (here) store_vec<N, Cache::kStream>(to, 0, out);
    to = to + step;
  });
  if (rows.cut) {
    const int64_t row = (walk.rows - 1) * walk.row_stride;
    const Vec<float, N> in = to_float(load_span<N>(x + row, at.column, at.limit, T()));
    store_span<N>(y + row, at.column, at.limit, result(in, kept_cut(walk, at, dropout)));
  }
}

// Rows on their way lie in shared memory (frit/simt/held_folded.h).
template <typename T, Activation activation>
FRIT_KERNEL(32 * kFoldedSums.warps, 2)
bias_activation_dropout_backward_folded_kernel(ColumnWalk walk, Global<const T> dy, Global<const T> x,
                                               Global<const T> bias, DropoutTable dropout, Global<T> dx,
                                               Global<float> partial) {
  constexpr int N = 8, kHalf = kFoldedThreads * N, kStage = 2 * kHalf, S = kFoldedStages;
  wait_for_previous();
  let_next_start();
  const ColumnPlace at = column_place(walk, x);
  FoldedRows rows = folded_rows(walk, at);
  if (!ballot(at.active)) rows.end = 0;
  const int64_t step = rows.step * walk.row_stride, begin = rows.first * walk.row_stride + at.column;
  Global<const T> x_from = x + begin, dy_from = dy + begin;
  Global<T> to = dx + begin;
  const Shared<T> ring = shared_array<T>(thread_index() * (N * 2));
  const auto start = [&](int row, int stage) {
    if (row < rows.whole_end) {
      copy_async16(ring, stage * kStage, x_from, 0);
      copy_async16(ring, stage * kStage + kHalf, dy_from, 0);
    }
    copy_async_commit();
    x_from = x_from + step, dy_from = dy_from + step;
  };
  const Vec<float, N> b = to_float(load_of_columns<N>(walk, at, bias));
  float sum[N] = {};
  const auto result = [&](const Vec<T, N>& in, const Vec<T, N>& incoming) {
    Vec<float, N> d;
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) {
      d[i] = through<T, activation>(widen(static_cast<T>(incoming[i])), widen(static_cast<T>(in[i])) + b[i],
                                    dropout.scale);
      sum[i] += d[i];
    }
    return from_float<T>(d);
  };
  for_held_folded_rows<S>(walk, at, rows, dropout, start, [&](int row, int stage, const KeptRows& kept) {
    copy_async_wait<S - 1>();
    const Vec<T, N> v = load_vec<N>(ring, stage * kStage);
    Vec<T, N> g = load_vec<N>(ring, stage * kStage + kHalf);
    start(row + S * rows.step, stage);
    kept.drop(g);
    store_vec<N, Cache::kStream>(to, 0, result(v, g));
    to = to + step;
  });
  if (rows.cut) {
    const int64_t row = (walk.rows - 1) * walk.row_stride;
    Vec<T, N> incoming = load_span<N>(dy + row, at.column, at.limit, T());
    kept_cut(walk, at, dropout).drop(incoming);
    const Vec<T, N> in = load_span<N>(x + row, at.column, at.limit, T());
    store_span<N>(dx + row, at.column, at.limit, result(in, incoming));
  }
  store_column_sums(walk, at, sum, shared_array<float>(S * kStage * 2), partial, walk.columns, 0);
}

}  // namespace

void start_activation_forward_folded(Context& context, const ColumnWalk& walk, const Tensor& x, const Tensor& bias,
                                     Activation activation, const DropoutTable& dropout, const Tensor& y) {
  dispatch_16(x.dtype(), [&](auto t) {
    using T = decltype(t);
    dispatch_activation(activation, [&](auto form) {
      launch(context, "bias_activation_dropout_forward_folded_kernel",
             bias_activation_dropout_forward_folded_kernel<T, form.value>, {walk.blocks(), walk.threads()}, walk,
             global<const T>(x), global<const T>(bias), dropout, global<T>(y));
    });
  });
}

void start_activation_backward_folded(Context& context, const ColumnWalk& walk, const Tensor& dy, const Tensor& x,
                                      const Tensor& bias, Activation activation, const DropoutTable& dropout,
                                      const Tensor& dx, const Tensor& partial) {
  dispatch_16(x.dtype(), [&](auto t) {
    using T = decltype(t);
    dispatch_activation(activation, [&](auto form) {
      launch(
          context, "bias_activation_dropout_backward_folded_kernel",
          bias_activation_dropout_backward_folded_kernel<T, form.value>,
          {walk.blocks(), walk.threads(), kFoldedStages * 2 * kFoldedThreads * 16 + column_sums_shared_bytes(walk, 8)},
          walk, global<const T>(dy), global<const T>(x), global<const T>(bias), dropout, global<T>(dx),
          global<float>(partial));
    });
  });
}

}  // namespace frit
