// One word more: warp_sum_uint(x), the sum of the warp's 32 numbers modulo 2^32; all lanes take part and get it. One
// instruction where five shuffles would take ten, and a third of the wait.
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

}  // namespace frit::simt
