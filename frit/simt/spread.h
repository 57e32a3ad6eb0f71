// One more word for kernels, for masks of pairs of 16-bit elements.
//   spread_signs<byte>(low, high)  all of the lower 16 bits are the top bit of that byte of `low`, all of the upper
//   ones
//                                  that of the same byte of `high`. One instruction (prmt)
#pragma once
#include "frit/simt/simt.h"

namespace frit::simt {

template <int byte>
FRIT_DEVICE uint32_t spread_signs(uint32_t low, uint32_t high) {
#ifdef __CUDACC__
  uint32_t pair;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(pair) : "r"(low), "r"(high), "n"((12 | byte) * 0x1100 + (8 | byte) * 0x11));
  return pair;
#else
  return (low >> (8 * byte + 7) & 1u) * 0xffffu | (high >> (8 * byte + 7) & 1u) * 0xffff0000u;
#endif
}

}  // namespace frit::simt
