#include "frit/simt/copy.h"

#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = 256, kUnroll = 4;

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
  launch(context, "copy_kernel", copy_kernel, {(vectors + kThreads * kUnroll - 1) / (kThreads * kUnroll), kThreads},
         global<const uint8_t>(from), global<uint8_t>(to), vectors);
}

}  // namespace frit
