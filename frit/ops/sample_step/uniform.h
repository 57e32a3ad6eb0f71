// The random numbers of sampling, the same on the CPU and a GPU.
#pragma once
#include "frit/core/philox.h"

namespace frit {

// Uniform in [0, 1), of 53 bits, from coordinates alone.
FRIT_HOST_DEVICE inline double sampling_uniform(uint64_t seed, uint64_t sentence, uint32_t sample, uint32_t position) {
  const PhiloxKey key{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32) ^ 0x73616d70u};  // "samp"
  const PhiloxBlock block =
      philox(key, static_cast<uint32_t>(sentence), static_cast<uint32_t>(sentence >> 32), sample, position);
  const uint64_t bits = static_cast<uint64_t>(block.v[0]) << 32 | block.v[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace frit
