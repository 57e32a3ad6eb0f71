#include "frit/simt/copy.h"

#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = 256;

// A thread has kUnroll vectors: 4 for a copy that is too small to fill the machine else, 1 for a large one, which then
// reads and writes in the order of addresses (4 % faster on an H200).
template <int kUnroll>
FRIT_KERNEL(kThreads, 4)
copy_kernel(Global<const uint8_t> from, Global<uint8_t> to, int64_t vectors) {
  wait_for_previous();
  const int64_t first = block_index() * kThreads * kUnroll + thread_index();
  Vec<uint8_t, 16> v[kUnroll];
  FRIT_UNROLL
  for (int u = 0; u < kUnroll; ++u)
    if (first + u * kThreads < vectors) v[u] = load_vec<16, Cache::kStream>(from, (first + u * kThreads) * 16);
  FRIT_UNROLL
  for (int u = 0; u < kUnroll; ++u)
    if (first + u * kThreads < vectors) store_vec<16, Cache::kStream>(to, (first + u * kThreads) * 16, v[u]);
}

}  // namespace

void copy_gpu(Context& context, const Tensor& from, const Tensor& to) {
  FRIT_CHECK(from.bytes() == to.bytes() && from.bytes() % 16 == 0,
             "[copy] from is {}, to is {}, expected the same multiple of 16 bytes", from.to_string(), to.to_string());
  const int64_t vectors = from.bytes() / 16;
  const auto start = [&](auto kernel, int unroll) {
    launch(context, "copy_kernel", kernel, {(vectors + kThreads * unroll - 1) / (kThreads * unroll), kThreads},
           global<const uint8_t>(from), global<uint8_t>(to), vectors);
  };
  if (from.bytes() < int64_t{16} << 20) return start(copy_kernel<4>, 4);
  start(copy_kernel<1>, 1);
}

}  // namespace frit
