#include "frit/ops/column_sum/gpu.h"
#include "frit/ops/layer_norm/backward.h"
#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace simt;

// What the column kernels read.
template <typename T>
struct Operands {
  Global<const T> dy, x;
  Global<const float> mean, rstd;
  int64_t dy_stride, x_stride, rows, cols;
};
struct Terms {
  float gamma, beta;
};
// What element (row, column) adds to dgamma and dbeta.
template <typename T>
FRIT_DEVICE Terms terms(const Operands<T>& o, int64_t row, int64_t column) {
  const float d = widen(load(o.dy, row * o.dy_stride + column)), v = widen(load(o.x, row * o.x_stride + column));
  return {d * ((v - load(o.mean, row)) * load(o.rstd, row)), d};
}

constexpr int kThreads = 128;

// A thread takes a column of a piece of the rows, one after the other.
template <typename T>
FRIT_KERNEL(kThreads, 8)
layer_norm_backward_column_serial_kernel(Operands<T> o, Global<float> partials, int64_t pieces) {
  wait_for_previous();
  const int64_t piece = block_index() % pieces, column = block_index() / pieces * kThreads + thread_index();
  if (column >= o.cols) return;
  float gamma = 0, beta = 0;
  for (int64_t r = o.rows * piece / pieces; r < o.rows * (piece + 1) / pieces; ++r) {
    const Terms t = terms(o, r, column);
    gamma += t.gamma, beta += t.beta;
  }
  store(partials, piece * 2 * o.cols + column, gamma);
  store(partials, (piece * 2 + 1) * o.cols + column, beta);
}

template <typename T>
FRIT_KERNEL(kThreads, 8)
layer_norm_backward_zero_kernel(Global<T> partials, int64_t n) {
  wait_for_previous();
  const int64_t i = block_index() * kThreads + thread_index();
  if (i < n) store(partials, i, T());
}

// A thread an element: `rows` additions at each address, in no fixed order.
template <typename T>
FRIT_KERNEL(kThreads, 8)
layer_norm_backward_atomic_kernel(Operands<T> o, Global<float> partials) {
  wait_for_previous();
  const int64_t row = block_index() % o.rows, column = block_index() / o.rows * kThreads + thread_index();
  if (column >= o.cols) return;
  const Terms t = terms(o, row, column);
  atomic_add(partials, column, t.gamma);
  atomic_add(partials, o.cols + column, t.beta);
}

// A block of 32 x 32 threads takes 32 columns: thread (y, x) the rows y, y + 32, ... of column x. Its sums go through
// an array [32][pitch], written along rows and read along columns: with pitch 32 that read is a 32-way bank conflict.
template <typename T, int pitch>
FRIT_KERNEL(1024, 1)
layer_norm_backward_tiled_kernel(Operands<T> o, Global<float> partials) {
  wait_for_previous();
  const int x = lane(), y = warp();
  const int64_t column = block_index() * 32 + x, mine = block_index() * 32 + y;
  float gamma = 0, beta = 0;
  if (column < o.cols) {
    for (int64_t r = y; r < o.rows; r += 32) {
      const Terms t = terms(o, r, column);
      gamma += t.gamma, beta += t.beta;
    }
  }
  const Shared<float> gammas = shared_array<float>(0), betas = shared_array<float>(32 * pitch * 4);
  store(gammas, y * pitch + x, gamma);
  store(betas, y * pitch + x, beta);
  barrier();
  gamma = warp_sum(load(gammas, x * pitch + y));
  beta = warp_sum(load(betas, x * pitch + y));
  if (x == 0 && mine < o.cols) {
    store(partials, mine, gamma);
    store(partials, o.cols + mine, beta);
  }
}

constexpr int kAtOnce = 8;  // loads a thread has under way

// Partial rows [pieces, a multiple of cols] whose columns' sums are `cols` of each of `to`; those may be undefined.
template <typename T, int n>
struct Partials {
  Global<const float> rows;
  int64_t step;  // elements from a half's row to its next one
  Global<T> to[n];
};

// A block takes 32 columns of partials, a half of a warp a row's, two columns a lane: half h of a block adds the rows
// h, h + halves, ..., then warp 0 adds what the warps found.
template <typename T, int n>
FRIT_DEVICE void add_partials(const Partials<T, n>& partials, int64_t block, int pieces, int64_t cols,
                              bool accumulate) {
  const int half = thread_index() / 16, halves = thread_count() / 16;
  const int64_t width = n * cols, column = block * 32 + lane() % 16 * 2, mine = block * 32 + lane();
  // What warp 0 writes.
  const Global<T> to = n == 1 || mine < cols ? partials.to[0] : partials.to[n - 1];
  const int64_t c = n == 1 || mine < cols ? mine : mine - cols;
  const bool writes = warp() == 0 && mine < width && to;
  const float before = writes && accumulate ? widen(load(to, c)) : 0.0f;

  Vec<float, 2> sum = {};
  if (column < width) {
    const bool pairs = width % 2 == 0;
    Global<const float> from = partials.rows + (half * width + column);
    FRIT_UNROLL_BY(1)
    for (int p = half; p < pieces; p += kAtOnce * halves) {
      Vec<float, 2> v[kAtOnce];
      FRIT_UNROLL
      for (int u = 0; u < kAtOnce; ++u) {
        v[u] = {};
        if (p + u * halves < pieces) {
          if (pairs)
            v[u] = load_vec<2>(from, 0);
          else
            v[u] = {{load(from, 0), column + 1 < width ? load(from, 1) : 0.0f}};
        }
        from = from + partials.step;
      }
      FRIT_UNROLL
      for (int u = 0; u < kAtOnce; ++u) sum[0] += v[u][0], sum[1] += v[u][1];
    }
  }
  FRIT_UNROLL
  for (int i = 0; i < 2; ++i) sum[i] += shuffle_xor(sum[i], 16);
  const Shared<float> scratch = shared_array<float>(0);
  if (lane() < 16) store_vec<2>(scratch, warp() * 32 + lane() * 2, sum);
  barrier();
  if (!writes) return;
  float total = 0;
  FRIT_UNROLL_BY(1)
  for (int w = 0; w < warp_count(); w += kAtOnce) {
    FRIT_UNROLL
    for (int u = 0; u < kAtOnce; ++u) total += w + u < warp_count() ? load(scratch, (w + u) * 32 + lane()) : 0.0f;
  }
  store(to, c, convert<T>(accumulate ? before + total : total));
}

template <typename T>
FRIT_KERNEL(1024, 1)
layer_norm_backward_add_partials_kernel(Partials<T, 2> partials, int pieces, int64_t cols, bool accumulate) {
  wait_for_previous();
  add_partials(partials, block_index(), pieces, cols, accumulate);
}
// And another tensor's sums, in the blocks behind the first `blocks`.
template <typename T>
FRIT_KERNEL(1024, 1)
layer_norm_backward_add_all_partials_kernel(Partials<T, 2> partials, Partials<T, 1> more, int64_t blocks, int pieces,
                                            int64_t cols, bool accumulate) {
  wait_for_previous();
  if (block_index() < blocks)
    add_partials(partials, block_index(), pieces, cols, accumulate);
  else
    add_partials(more, block_index() - blocks, pieces, cols, accumulate);
}

int64_t over(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
// Of a block that adds partial rows: a warp has 2 * kAtOnce rows under way.
int64_t add_warps(int64_t pieces) {
  return std::clamp<int64_t>(over(pieces, 2 * kAtOnce), 1, 32);
}

}  // namespace

void layer_norm_sum_columns(Context& context, const LayerNormBackward& b, ColumnWay way) {
  const int64_t rows = b.x.dim(0), cols = b.x.dim(1), pieces = b.partials.dim(0), columns = over(cols, kThreads);
  const Global<float> partials = global<float>(b.partials);
  dispatch_float(b.x.dtype(), [&](auto type) {
    using T = decltype(type);
    const Operands<T> o = {global<const T>(b.dy),
                           global<const T>(b.x),
                           global<const float>(b.mean),
                           global<const float>(b.rstd),
                           b.dy.row_stride(),
                           b.x.row_stride(),
                           rows,
                           cols};
    switch (way) {
      case ColumnWay::kSerial:
        return launch(context, "layer_norm_backward_column_serial_kernel", layer_norm_backward_column_serial_kernel<T>,
                      {columns * pieces, kThreads}, o, partials, pieces);
      case ColumnWay::kAtomic:
        launch(context, "layer_norm_backward_zero_kernel", layer_norm_backward_zero_kernel<float>,
               {over(2 * cols, kThreads), kThreads}, partials, 2 * cols);
        return launch(context, "layer_norm_backward_atomic_kernel", layer_norm_backward_atomic_kernel<T>,
                      {rows * columns, kThreads}, o, partials);
      case ColumnWay::kTiled32x32:
        return launch(context, "layer_norm_backward_tiled_32x32_kernel", layer_norm_backward_tiled_kernel<T, 32>,
                      {over(cols, 32), 1024, 2 * 32 * 32 * 4}, o, partials);
      case ColumnWay::kTiled32x33:
        return launch(context, "layer_norm_backward_tiled_32x33_kernel", layer_norm_backward_tiled_kernel<T, 33>,
                      {over(cols, 32), 1024, 2 * 32 * 33 * 4}, o, partials);
    }
  });
}

void layer_norm_add_partials(Context& context, Buffer partials, bool accumulate, const Tensor& dgamma,
                             const Tensor& dbeta) {
  if (dgamma.dtype() == dbeta.dtype() && leave_partial_sums(context, partials, accumulate, dgamma, dbeta)) return;
  const int64_t pieces = partials->dim(0), cols = partials->dim(1) / 2, warps = add_warps(pieces);
  const auto add = [&](const Tensor& gamma, const Tensor& beta) {
    dispatch_float(gamma.defined() ? gamma.dtype() : beta.dtype(), [&](auto type) {
      using T = decltype(type);
      const Partials<T, 2> both = {
          global<const float>(partials), warps * 4 * cols, {global<T>(gamma), global<T>(beta)}};
      launch(context, "layer_norm_backward_add_partials_kernel", layer_norm_backward_add_partials_kernel<T>,
             {over(2 * cols, 32), static_cast<int>(warps * 32), warps * 128}, both, pieces, cols, accumulate);
    });
  };
  if (dgamma.dtype() == dbeta.dtype()) return add(dgamma, dbeta);
  add(dgamma, {});
  add({}, dbeta);
}

void layer_norm_add_all_partials(Context& context, Buffer partials, Buffer more, bool accumulate, const Tensor& dgamma,
                                 const Tensor& dbeta, const Tensor& dmore) {
  if (context.later_sums || dgamma.dtype() != dbeta.dtype() || dgamma.dtype() != dmore.dtype()) {
    layer_norm_add_partials(context, std::move(partials), accumulate, dgamma, dbeta);
    return add_partial_sums_gpu(context, std::move(more), accumulate, dmore);
  }
  const int64_t pieces = partials->dim(0), cols = partials->dim(1) / 2, warps = add_warps(pieces);
  dispatch_float(dgamma.dtype(), [&](auto type) {
    using T = decltype(type);
    const Partials<T, 2> both = {
        global<const float>(partials), warps * 4 * cols, {global<T>(dgamma), global<T>(dbeta)}};
    const Partials<T, 1> one = {global<const float>(more), warps * 2 * cols, {global<T>(dmore)}};
    launch(context, "layer_norm_backward_add_all_partials_kernel", layer_norm_backward_add_all_partials_kernel<T>,
           {over(2 * cols, 32) + over(cols, 32), static_cast<int>(warps * 32), warps * 128}, both, one,
           over(2 * cols, 32), pieces, cols, accumulate);
  });
}

}  // namespace frit
