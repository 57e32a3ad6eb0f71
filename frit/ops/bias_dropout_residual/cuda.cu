#include "frit/ops/bias_dropout_residual/gpu.h"
#include "frit/ops/bias_dropout_residual/sum-inl.h"
#include "frit/ops/column_sum/gpu.h"
#include "frit/simt/columns.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = 256, kUnroll = 2;

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

}  // namespace

namespace {

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
  const ColumnWalk walk = make_column_walk(dy, kThreads, sums ? 8 : 4, sums ? kMostBlocks : 0, packed, vectors);
  Buffer partial;
  if (sums) partial = context.allocate({walk.partial_rows(), dy.dim(1)}, DType::kF32, "bias_dropout_residual.partial");
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
  if (sums) add_partial_sums_gpu(context, std::move(partial), accumulate, dbias);
}

}  // namespace frit
