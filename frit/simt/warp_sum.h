// Two words more: warp_sum_uint(x), the sum of the warp's 32 numbers modulo 2^32; all lanes take part and get it. One
// instruction where five shuffles would take ten, and a third of the wait. warp_sum_whole(x), of 64-bit numbers: three.
#pragma once
#include "frit/simt/simt.h"

namespace frit::simt {

#ifdef __CUDACC__
FRIT_DEVICE uint32_t warp_sum_uint(uint32_t x) {
  return __reduce_add_sync(kFullMask, x);
}
#else
FRIT_DEVICE uint32_t warp_sum_uint(uint32_t x) {
  const sim::Slot* slots = sim::gather(kFullMask, "warp_sum_uint", &x, sizeof(x));
  uint32_t sum = 0;
  for (int lane = 0; lane < kWarpSize; ++lane) sum += detail::slot_value<uint32_t>(slots[lane]);
  return sum;
}
#endif

// The sum of the warp's numbers, none of which is negative and which is below 2^63. Exact, so of no order.
FRIT_DEVICE int64_t warp_sum_whole(int64_t x) {
  constexpr int kPart = 27;  // 32 numbers of so many bits have a sum below 2^32
  const uint64_t bits = static_cast<uint64_t>(x);
  const auto part = [&](int i) {
    return uint64_t{warp_sum_uint(static_cast<uint32_t>(bits >> (i * kPart)) & ((1u << kPart) - 1))} << (i * kPart);
  };
  return static_cast<int64_t>(part(0) + part(1) + part(2));
}

}  // namespace frit::simt
