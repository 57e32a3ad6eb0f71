#include "frit/ops/gradient_norm/gpu.h"
#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = 256, kUnroll = 4, kFinishThreads = 1024;
constexpr int64_t kMostPieces = 8192;

// A magnitude's fp32 bits as the double 2^-896 times as large: exact for every finite number, subnormals and zero
// included, in two integer operations (the instruction that converts runs at a quarter of the rate).
FRIT_DEVICE double shrunk(uint32_t magnitude) {
  return std::bit_cast<double>(static_cast<uint64_t>(magnitude) << 29);
}
template <typename T>
FRIT_DEVICE uint32_t magnitude_of(T g) {
  return std::bit_cast<uint32_t>(static_cast<float>(g)) & 0x7fffffffu;
}

// Sum over the block in fp64, in every thread; `scratch` holds 32. Cost: 1 barrier.
FRIT_DEVICE double warp_sum_double(double x) {
  FRIT_UNROLL
  for (int bits = kWarpSize / 2; bits > 0; bits /= 2) x += shuffle_xor(x, bits);
  return x;
}
FRIT_DEVICE double block_sum_double(double x, const Shared<double>& scratch) {
  x = warp_sum_double(x);
  if (lane() == 0) store(scratch, warp(), x);
  barrier();
  return warp_sum_double(lane() < warp_count() ? load(scratch, lane()) : 0.0);
}

// Block p sums the squares of piece p; infinity if an element is not finite. A piece is whole vectors but for the last.
template <typename T>
FRIT_KERNEL(kThreads, 4)
gradient_norm_pieces_kernel(Global<const T> gradients, int64_t n, int64_t elements, Global<double> partials) {
  wait_for_previous();
  constexpr int kN = kVecOf<T>;
  const int64_t begin = block_index() * elements, end = begin + elements < n ? begin + elements : n;
  double sums[kN] = {};
  uint32_t largest = 0;
  const auto add = [&](int i, T g) {
    const uint32_t magnitude = magnitude_of(g);
    largest = magnitude > largest ? magnitude : largest;
    const double x = shrunk(magnitude) * 0x1p896;
    sums[i] += x * x;  // the square is exact: fused or not, the same bits
  };
  int64_t at = begin + thread_index() * kN;
  constexpr int64_t kStep = kThreads * kN;
  for (; at + (kUnroll - 1) * kStep + kN <= end; at += kUnroll * kStep) {
    Vec<T, kN> g[kUnroll];
    FRIT_UNROLL
    for (int k = 0; k < kUnroll; ++k) g[k] = load_span<kN, Cache::kStream>(gradients, at + k * kStep, n, T());
    FRIT_UNROLL
    for (int k = 0; k < kUnroll; ++k) {
      FRIT_UNROLL
      for (int i = 0; i < kN; ++i) add(i, g[k][i]);
    }
  }
  for (; at < end; at += kStep) {
    const Vec<T, kN> g = load_span<kN, Cache::kStream>(gradients, at, end, T());
    FRIT_UNROLL
    for (int i = 0; i < kN; ++i) add(i, g[i]);
  }
  FRIT_UNROLL
  for (int half = kN / 2; half > 0; half /= 2) {
    FRIT_UNROLL
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  const double mine = largest >= 0x7f800000u ? static_cast<double>(INFINITY) : sums[0];
  const double sum = block_sum_double(mine, shared_array<double>(0));
  if (thread_index() == 0) store(partials, block_index(), sum);
}

// One block adds the pieces' sums: thread t those of t, t + 1024, ... in this order, then the threads' in a tree.
FRIT_KERNEL(kFinishThreads, 1)
gradient_norm_finish_kernel(Global<const double> partials, int64_t pieces, Global<double> sum_of_squares,
                            Global<int32_t> not_finite) {
  wait_for_previous();
  double sum = 0;
  for (int64_t p = thread_index(); p < pieces; p += kFinishThreads) sum += load(partials, p);
  sum = block_sum_double(sum, shared_array<double>(0));
  if (thread_index() != 0) return;
  store(sum_of_squares, 0, sum);
  store(not_finite, 0, static_cast<int32_t>(!(sum < static_cast<double>(INFINITY))));
}

}  // namespace

GradientPieces gradient_pieces_gpu(int64_t n, int64_t bytes) {
  // At least one vector a thread and step, and few enough that one block adds them fast.
  const int64_t step = kThreads * (16 / bytes) * kUnroll;
  const int64_t steps = std::max<int64_t>((n + step * kMostPieces - 1) / (step * kMostPieces), 1);
  return {std::max<int64_t>((n + step * steps - 1) / (step * steps), 1), step * steps};
}

void gradient_norm_gpu(Context& context, const Tensor& gradients, const Tensor& sum_of_squares,
                       const Tensor& not_finite) {
  const int64_t n = gradients.numel();
  const GradientPieces pieces = gradient_pieces_gpu(n, size_of(gradients.dtype()));
  Buffer partials = context.allocate({pieces.count}, DType::kF64, "gradient_norm.partials");
  dispatch_float(gradients.dtype(), [&]<typename T>(T) {
    launch(context, "gradient_norm_pieces_kernel", gradient_norm_pieces_kernel<T>,
           {pieces.count, kThreads, kWarpSize * static_cast<int64_t>(sizeof(double))}, global<const T>(gradients), n,
           pieces.elements, global<double>(partials));
  });
  launch(context, "gradient_norm_finish_kernel", gradient_norm_finish_kernel,
         {1, kFinishThreads, kWarpSize * static_cast<int64_t>(sizeof(double))}, global<const double>(partials),
         pieces.count, global<double>(sum_of_squares), global<int32_t>(not_finite));
}

}  // namespace frit
