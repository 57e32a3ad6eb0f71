#include "frit/ops/bias_dropout_residual/gpu.h"
#include "frit/ops/bias_dropout_residual/sum-inl.h"
#include "frit/ops/column_sum/gpu.h"
#include "frit/simt/early.h"
#include "frit/simt/walk_16.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = 256, kUnroll = 2;
constexpr FoldedBlocks kFolded = {8, kThreads / 32, 24}, kFoldedSums = {4, 12, 24};
constexpr int kSumThreads16 = 1024;  // of a block with column sums where 16-bit rows are whole vectors

// How backward knows what was dropped. kComputed: Philox again. The others are the papers' forms, for comparison.
enum class Keep { kComputed, kBytes, kBits };

// Writes and reads the kept mask of a thread's vector: a byte an element, or a bit.
template <Keep form, int N>
FRIT_DEVICE void store_keep(const Global<uint8_t>& mask, int64_t row, int64_t column, int64_t columns, uint32_t keep) {
  if constexpr (form == Keep::kBytes) {
    Vec<uint8_t, N> bytes;
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) bytes[i] = static_cast<uint8_t>(keep >> i & 1);
    store_vec<N, Cache::kStream>(mask, row * columns + column, bytes);
  } else if constexpr (form == Keep::kBits) {
    store<Cache::kStream>(mask, (row * columns + column) / 8, static_cast<uint8_t>(keep));
  }
}
template <Keep form, int N>
FRIT_DEVICE uint32_t load_keep(const Global<const uint8_t>& mask, int64_t row, int64_t column, int64_t columns) {
  uint32_t keep = 0;
  if constexpr (form == Keep::kBytes) {
    const Vec<uint8_t, N> bytes = load_vec<N, Cache::kStream>(mask, row * columns + column);
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) keep |= static_cast<uint32_t>(bytes[i]) << i;
  } else if constexpr (form == Keep::kBits) {
    keep = load<Cache::kStream>(mask, (row * columns + column) / 8);
  }
  return keep;
}

template <typename T, Keep form>
FRIT_KERNEL(kThreads, 2)
bias_dropout_residual_forward_columns_kernel(ColumnWalk walk, bool vectors, Global<const T> x, Global<const T> bias,
                                             Global<const T> residual, int64_t residual_stride, DropoutTable dropout,
                                             Global<T> y, int64_t y_stride, Global<uint8_t> mask) {
  constexpr int N = kVecOf<T>;
  wait_for_previous();
  let_next_start();
  const ColumnPlace at = column_place(walk, x);
  const float scale = dropout.scale;
  const bool drop = dropout.active;
  const Vec<T, N> b = load_of_columns<N>(walk, at, bias);
  for_rows<kUnroll, N>(walk, at, vectors, [&](auto whole, auto unroll, int k, int step, int end) {
    Vec<T, N> v[unroll], r[unroll];
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      const int64_t row = walk.row(k + u * step, at.row_class);
      v[u] = load_columns<whole, Cache::kStream>(x + row * walk.row_stride, at.column, at.limit);
      if (residual) r[u] = load_columns<whole, Cache::kStream>(residual + row * residual_stride, at.column, at.limit);
    }
    const uint32_t keeps = drop ? keep_rows<whole, N, unroll>(walk, at, dropout, k, step) : 0;
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      const int64_t row = walk.row(k + u * step, at.row_class);
      const uint32_t keep = keeps >> (u * N);
      Vec<float, N> sum;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        float s = widen(v[u][i]);
        if (bias) s += widen(b[i]);
        if (residual)
          s = add_dropped(s, keep >> i & 1, drop, scale, widen(r[u][i]));
        else if (drop)
          s = (keep >> i & 1 ? s : 0.0f) * scale;
        sum[i] = s;
      }
      store_keep<form, N>(mask, row, at.column, walk.columns, keep);
      store_columns<whole, Cache::kStream>(y + row * y_stride, at.column, at.limit, from_float<T>(sum));
    }
  });
}

// One launch writes dx and, with sums, a row of partial column sums a block.
template <typename T, bool sums, Keep form>
FRIT_KERNEL(kThreads, 2)
bias_dropout_residual_backward_columns_kernel(ColumnWalk walk, bool vectors, Global<const T> dy, DropoutTable dropout,
                                              Global<T> dx, int64_t dx_stride, Global<float> partial,
                                              Global<const uint8_t> mask) {
  constexpr int N = kVecOf<T>;
  wait_for_previous();
  let_next_start();
  const ColumnPlace at = column_place(walk, dy);
  const float scale = dropout.scale;
  const bool drop = dropout.active;
  float sum[N] = {};
  for_rows<4, N>(walk, at, vectors, [&](auto whole, auto unroll, int k, int step, int end) {
    Vec<T, N> g[unroll];
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u)
      if (k + u * step < end)
        g[u] = load_columns<whole, Cache::kStream>(dy + walk.row(k + u * step, at.row_class) * walk.row_stride,
                                                   at.column, at.limit);
    uint32_t keeps = 0;
    if constexpr (form == Keep::kComputed) {
      if (drop) keeps = keep_rows<whole, N, unroll>(walk, at, dropout, k, step);
    } else {
      FRIT_UNROLL
      for (int u = 0; u < unroll; ++u)
        if (k + u * step < end)
          keeps |= load_keep<form, N>(mask, walk.row(k + u * step, at.row_class), at.column, walk.columns) << (u * N);
    }
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      if (k + u * step >= end) break;
      const int64_t row = walk.row(k + u * step, at.row_class);
      const uint32_t keep = keeps >> (u * N);
      Vec<float, N> d;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        d[i] = widen(g[u][i]);
        if (drop) d[i] = (keep >> i & 1 ? d[i] : 0.0f) * scale;
        if (sums) sum[i] += d[i];
      }
      store_columns<whole, Cache::kStream>(dx + row * dx_stride, at.column, at.limit, from_float<T>(d));
    }
  });
  if constexpr (sums) store_column_sums(walk, at, sum, shared_array<float>(0), partial, walk.columns, 0);
}

// The same for 16-bit rows of whole aligned vectors with a residual, whose mask is not kept.
template <typename T>
FRIT_KERNEL(kThreads, 4)
bias_dropout_residual_forward_whole_kernel(ColumnWalk walk, Global<const T> x, Global<const T> bias,
                                           Global<const T> residual, int64_t residual_stride, DropoutTable dropout,
                                           Global<T> y, int64_t y_stride) {
  constexpr int N = 8;
  wait_for_previous();
  let_next_start();
  const ColumnPlace at = whole_place(walk);
  if (!at.active) return;
  const int step = static_cast<int>(walk.pieces) * walk.lanes,
            first = static_cast<int>(at.piece) * walk.lanes + at.lane;
  const int end = static_cast<int>(walk.rows);
  const uint32_t threshold = dropout_threshold(dropout), group = static_cast<uint32_t>(at.column / N);
  const int64_t x_step = step * walk.row_stride, residual_step = step * residual_stride, y_step = step * y_stride;
  Global<const T> x_from = x + (first * walk.row_stride + at.column);
  Global<const T> residual_from = residual + (first * residual_stride + at.column);
  Global<T> to = y + (first * y_stride + at.column);
  const Vec<float, N> b = to_float(bias ? load_vec<N>(bias, at.column) : Vec<T, N>{});
  const auto rows = [&](auto both, int k) {
    constexpr int U = both ? 2 : 1;
    Vec<T, N> v[U], r[U];
    FRIT_UNROLL
    for (int u = 0; u < U; ++u) {
      v[u] = load_vec<N, Cache::kStream>(x_from, u * x_step);
      r[u] = load_vec<N, Cache::kStream>(residual_from, u * residual_step);
    }
    const DropoutWords<2> words =
        dropout_words<2>(dropout, {static_cast<uint32_t>(k), static_cast<uint32_t>(k + step)}, {group, group});
    FRIT_UNROLL
    for (int u = 0; u < U; ++u) {
      Vec<float, N> sum;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        const float s = widen(static_cast<T>(v[u][i])) + b[i];
        sum[i] = fmaf(words.kept(u, i, threshold) ? s : 0.0f, dropout.scale, widen(static_cast<T>(r[u][i])));
      }
      store_vec<N, Cache::kStream>(to, u * y_step, from_float<T>(sum));
    }
    x_from = x_from + 2 * x_step, residual_from = residual_from + 2 * residual_step, to = to + 2 * y_step;
  };
  int k = first;
  for (; k + step < end; k += 2 * step) rows(std::true_type(), k);
  if (k < end) rows(std::false_type(), k);
}

// A row's vector is loaded where that of U rows before was, as soon as it is widened: U are on their way.
template <typename T, bool sums, int U, int threads, int blocks>
FRIT_KERNEL(threads, blocks)
bias_dropout_residual_backward_whole_kernel(ColumnWalk walk, Global<const T> dy, DropoutTable dropout, Global<T> dx,
                                            int64_t dx_stride, Global<float> partial) {
  constexpr int N = 8;
  static_assert(U % 2 == 0);
  const ColumnPlace at = whole_place(walk);
  const int step = static_cast<int>(walk.pieces) * walk.lanes,
            first = static_cast<int>(at.piece) * walk.lanes + at.lane;
  const int end = at.active ? static_cast<int>(walk.rows) : 0;
  const uint32_t threshold = dropout_threshold(dropout), group = static_cast<uint32_t>(at.column / N);
  const int64_t dy_step = step * walk.row_stride, dx_step = step * dx_stride;
  Global<const T> from = dy + (first * walk.row_stride + at.column);
  Global<T> to = dx + (first * dx_stride + at.column);
  wait_for_previous();
  let_next_start();
  Vec<T, N> g[U];
  const auto fetch = [&](auto there, int u, int k) {
    if (there || k < end) g[u] = load_vec<N, Cache::kStream>(from, 0);
    from = from + dy_step;
  };
  FRIT_UNROLL
  for (int u = 0; u < U; ++u) fetch(std::false_type(), u, first + u * step);
  float sum[N] = {};
  const auto rows = [&](auto inside, int k) {  // U rows and U behind them are there, or may be missing
    DropoutWords<2> words;
    FRIT_UNROLL
    for (int u = 0; u < U; ++u) {
      const uint32_t row = static_cast<uint32_t>(k + u * step);
      if (!inside && k + u * step >= end) break;
      if (u % 2 == 0) words = dropout_words<2>(dropout, {row, row + static_cast<uint32_t>(step)}, {group, group});
      Vec<float, N> d = to_float(g[u]);
      fetch(inside, u, k + (u + U) * step);
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) {
        d[i] = words.kept(u % 2, i, threshold) ? d[i] * dropout.scale : 0.0f;
        if (sums) sum[i] += d[i];
      }
      store_vec<N, Cache::kStream>(to, 0, from_float<T>(d));
      to = to + dx_step;
    }
  };
  int k = first;
  for (; k + (2 * U - 1) * step < end; k += U * step) rows(std::true_type(), k);
  FRIT_UNROLL_BY(1)
  for (; k < end; k += U * step) rows(std::false_type(), k);
  if constexpr (sums) store_column_sums(walk, at, sum, shared_array<float>(0), partial, walk.columns, 0);
}

// The same for 16-bit rows that fold to whole vectors (frit/simt/folded_columns.h).
template <typename T>
FRIT_KERNEL(kThreads, 3)
bias_dropout_residual_forward_folded_kernel(ColumnWalk walk, Global<const T> x, Global<const T> bias,
                                            Global<const T> residual, DropoutTable dropout, Global<T> y) {
  constexpr int N = 8, U = 2;
  wait_for_previous();
  let_next_start();
  const ColumnPlace at = column_place(walk, x);
  if (!ballot(at.active)) return;
  const FoldedRows rows = folded_rows(walk, at);
  const Vec<float, N> b = to_float(load_of_columns<N>(walk, at, bias));
  const int64_t step = rows.step * walk.row_stride, begin = rows.first * walk.row_stride + at.column;
  Global<const T> x_from = x + begin, residual_from = residual + begin;
  Global<T> to = y + begin;
  Vec<T, N> v[U] = {}, r[U] = {};
  const auto fetch = [&](int u, bool there) {
    if (there) {
      v[u] = load_vec<N, Cache::kStream>(x_from, 0);
      r[u] = load_vec<N, Cache::kStream>(residual_from, 0);
    }
    x_from = x_from + step, residual_from = residual_from + step;
  };
  const auto result = [&](const Vec<float, N>& in, const Vec<float, N>& other, const KeptRows& kept) {
    Vec<float, N> sum;
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) sum[i] = fmaf(kept.kept(i) ? in[i] + b[i] : 0.0f, dropout.scale, other[i]);
    return from_float<T>(sum);
  };
  for_folded_rows<U>(walk, at, rows, dropout, fetch, [&](int u, const KeptRows& kept, bool here, bool more) {
    const Vec<float, N> in = to_float(v[u]), other = to_float(r[u]);
    fetch(u, more);
    const Vec<T, N> out = result(in, other, kept);
    if (here) store_vec<N, Cache::kStream>(to, 0, out);
    to = to + step;
  });
  if (rows.cut) {
    const int64_t row = (walk.rows - 1) * walk.row_stride;
    const Vec<float, N> in = to_float(load_span<N>(x + row, at.column, at.limit, T()));
    const Vec<float, N> other = to_float(load_span<N>(residual + row, at.column, at.limit, T()));
    store_span<N>(y + row, at.column, at.limit, result(in, other, kept_cut(walk, at, dropout)));
  }
}

template <typename T>
FRIT_KERNEL(32 * kFoldedSums.warps, 2)
bias_dropout_residual_backward_folded_kernel(ColumnWalk walk, Global<const T> dy, DropoutTable dropout, Global<T> dx,
                                             Global<float> partial) {
  constexpr int N = 8, U = 4;
  wait_for_previous();
  let_next_start();
  const ColumnPlace at = column_place(walk, dy);
  FoldedRows rows = folded_rows(walk, at);
  if (!ballot(at.active)) rows.end = 0;
  const int64_t step = rows.step * walk.row_stride, begin = rows.first * walk.row_stride + at.column;
  Global<const T> from = dy + begin;
  Global<T> to = dx + begin;
  Vec<T, N> g[U] = {};
  float sum[N] = {};
  const auto fetch = [&](int u, bool there) {
    if (there) g[u] = load_vec<N, Cache::kStream>(from, 0);
    from = from + step;
  };
  const auto result = [&](Vec<float, N> d) {
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) d[i] *= dropout.scale, sum[i] += d[i];
    return from_float<T>(d);
  };
  for_folded_rows<U>(walk, at, rows, dropout, fetch, [&](int u, KeptRows kept, bool here, bool more) {
    if (!here) kept.low = kept.high = 0;  // what an earlier row left there is not added again
    kept.drop(g[u]);
    const Vec<float, N> in = to_float(g[u]);
    fetch(u, more);
    const Vec<T, N> out = result(in);
    if (here) store_vec<N, Cache::kStream>(to, 0, out);
    to = to + step;
  });
  if (rows.cut) {
    const int64_t row = (walk.rows - 1) * walk.row_stride;
    Vec<T, N> g_cut = load_span<N>(dy + row, at.column, at.limit, T());
    kept_cut(walk, at, dropout).drop(g_cut);
    store_span<N>(dx + row, at.column, at.limit, result(to_float(g_cut)));
  }
  store_column_sums(walk, at, sum, shared_array<float>(0), partial, walk.columns, 0);
}

// Calls f with the form that `keep` asks for: none, a byte an element, or a bit.
template <typename T, typename F>
void dispatch_keep(const Tensor& keep, const Tensor& x, F&& f) {
  if (!keep.defined()) return f(std::integral_constant<Keep, Keep::kComputed>());
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (keep.dim(1) == x.dim(1)) return f(std::integral_constant<Keep, Keep::kBytes>());
    return f(std::integral_constant<Keep, Keep::kBits>());
  }
  fail_argument("[bias_dropout_residual] a kept mask is a form of bf16 alone, x is {}", x.to_string());
}

}  // namespace

void bias_dropout_residual_forward_gpu(Context& context, const Tensor& x, const Tensor& bias, const Tensor& residual,
                                       const Dropout& dropout, const Tensor& y, const Tensor& keep) {
  const bool vectors = lies_like(residual, x) && lies_like(y, x);
  const bool packed = lies_packed(x) && lies_packed(residual) && lies_packed(y);
  const ColumnWalk walk =
      make_column_walk(x, kThreads, usual_rows_a_thread(x.dim(0), x.dim(1), x.dtype()), 0, packed, vectors);
  if (walks_whole(walk, x, vectors) && begins_whole(bias) && residual.defined() && !keep.defined())
    return dispatch_16(x.dtype(), [&](auto t) {
      using T = decltype(t);
      launch(context, "bias_dropout_residual_forward_whole_kernel", bias_dropout_residual_forward_whole_kernel<T>,
             {walk.blocks(), walk.threads()}, walk, global<const T>(x), global<const T>(bias),
             global<const T>(residual), residual.row_stride(), DropoutTable(dropout), global<T>(y), y.row_stride());
    });
  if (walks_folded(walk, x) && residual.defined() && !keep.defined()) {
    ColumnWalk folded = walk;
    fill_folded(folded, x, packed, kFolded, 4);
    return dispatch_16(x.dtype(), [&](auto t) {
      using T = decltype(t);
      launch(context, "bias_dropout_residual_forward_folded_kernel", bias_dropout_residual_forward_folded_kernel<T>,
             {folded.blocks(), folded.threads()}, folded, global<const T>(x), global<const T>(bias),
             global<const T>(residual), DropoutTable(dropout), global<T>(y));
    });
  }
  dispatch_float(x.dtype(), [&](auto t) {
    using T = decltype(t);
    dispatch_keep<T>(keep, x, [&](auto form) {
      launch(context, "bias_dropout_residual_forward_columns_kernel",
             bias_dropout_residual_forward_columns_kernel<T, form.value>, {walk.blocks(), walk.threads()}, walk,
             vectors, global<const T>(x), global<const T>(bias), global<const T>(residual), walk.stride_of(residual),
             DropoutTable(dropout), global<T>(y), walk.stride_of(y), global<uint8_t>(keep));
    });
  });
}

void bias_dropout_residual_backward_gpu(Context& context, const Tensor& dy, const Dropout& dropout, bool accumulate,
                                        const Tensor& dx, const Tensor& dbias, const Tensor& keep) {
  const bool sums = dbias.defined();
  const bool vectors = lies_like(dx, dy), packed = lies_packed(dy) && lies_packed(dx);
  ColumnWalk walk = make_column_walk(dy, kThreads, sums ? 8 : 4, sums ? kMostBlocks : 0, packed, vectors);
  const bool whole = walks_whole(walk, dy, vectors) && !keep.defined();
  if (sums && !keep.defined()) {
    fill_whole(walk, dy, whole, kSumThreads16, 4, packed, vectors);
    fill_folded(walk, dy, packed, kFoldedSums, 8);
  }
  Buffer partial;
  if (sums) partial = context.allocate({walk.partial_rows(), dy.dim(1)}, DType::kF32, "bias_dropout_residual.partial");
  if (whole) {
    dispatch_16(dy.dtype(), [&](auto t) {
      using T = decltype(t);
      const auto run = [&](auto kernel, int64_t shared_bytes) {
        launch(context, "bias_dropout_residual_backward_whole_kernel", kernel,
               {walk.blocks(), walk.threads(), shared_bytes}, walk, global<const T>(dy), DropoutTable(dropout),
               global<T>(dx), dx.row_stride(), global<float>(partial.tensor()));
      };
      if (!sums) return run(bias_dropout_residual_backward_whole_kernel<T, false, 4, kThreads, 4>, 0);
      run(bias_dropout_residual_backward_whole_kernel<T, true, 2, kSumThreads16, 1>, column_sums_shared_bytes(walk, 8));
    });
  } else if (sums && walks_folded(walk, dy) && !keep.defined()) {
    dispatch_16(dy.dtype(), [&](auto t) {
      using T = decltype(t);
      launch(context, "bias_dropout_residual_backward_folded_kernel", bias_dropout_residual_backward_folded_kernel<T>,
             {walk.blocks(), walk.threads(), column_sums_shared_bytes(walk, 8)}, walk, global<const T>(dy),
             DropoutTable(dropout), global<T>(dx), global<float>(partial.tensor()));
    });
  } else {
    dispatch_float(dy.dtype(), [&](auto t) {
      using T = decltype(t);
      const auto run = [&](auto kernel, int64_t shared_bytes) {
        launch(context, "bias_dropout_residual_backward_columns_kernel", kernel,
               {walk.blocks(), walk.threads(), shared_bytes}, walk, vectors, global<const T>(dy), DropoutTable(dropout),
               global<T>(dx), walk.stride_of(dx), global<float>(partial.tensor()), global<const uint8_t>(keep));
      };
      dispatch_keep<T>(keep, dy, [&](auto form) {
        if (sums)
          run(bias_dropout_residual_backward_columns_kernel<T, true, form.value>,
              column_sums_shared_bytes(walk, kVecOf<T>));
        else
          run(bias_dropout_residual_backward_columns_kernel<T, false, form.value>, 0);
      });
    });
  }
  if (sums) add_partial_sums_gpu(context, std::move(partial), accumulate, dbias);
}

}  // namespace frit
