// One word more: warp_max_int(x), the largest of the warp's 32 integers; all lanes take part and get it. One
// instruction where five shuffles would take ten, and a third of the wait.
#pragma once
#include "frit/simt/simt.h"

namespace frit::simt {

#ifdef __CUDACC__
FRIT_DEVICE int32_t warp_max_int(int32_t x) {
  return __reduce_max_sync(kFullMask, x);
}
#else
FRIT_DEVICE int32_t warp_max_int(int32_t x) {
  const sim::Slot* slots = sim::gather(kFullMask, "warp_max_int", &x, sizeof(x));
  int32_t largest = x;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int32_t other = detail::slot_value<int32_t>(slots[lane]);
    largest = other > largest ? other : largest;
  }
  return largest;
}
#endif

// Orders floats as their bits do, and back.
FRIT_DEVICE int32_t ordered_bits(int32_t bits) {
  return bits ^ (bits >> 31 & 0x7fffffff);
}
// The largest of the warp's numbers, none of which is NaN; all lanes take part and get it.
FRIT_DEVICE float warp_max_float(float x) {
  return std::bit_cast<float>(ordered_bits(warp_max_int(ordered_bits(std::bit_cast<int32_t>(x)))));
}

}  // namespace frit::simt
