// One word more: funnel_right(low, high, bits), the 32 bits of high:low from `bits` on, bits in [0, 32). One
// instruction, also for bits that only the run knows.
#pragma once
#include "frit/simt/simt.h"

namespace frit::simt {

#ifdef __CUDACC__
FRIT_DEVICE uint32_t funnel_right(uint32_t low, uint32_t high, int bits) {
  return __funnelshift_r(low, high, static_cast<uint32_t>(bits));
}
#else
FRIT_DEVICE uint32_t funnel_right(uint32_t low, uint32_t high, int bits) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> bits);
}
#endif

}  // namespace frit::simt
