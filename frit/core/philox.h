// Philox4x32-10: random numbers from coordinates, for host and device. No state: the same coordinates give the same bits
// on every backend, after a resume, and when a layer is computed again.
// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
#pragma once
#include <cmath>
#include <cstdint>
#include <string_view>

#include "frit/core/float16.h"

namespace frit {

struct PhiloxKey {
  uint32_t k0 = 0, k1 = 0;
};
struct PhiloxBlock {
  uint32_t v[4];
};

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u, kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;

FRIT_HOST_DEVICE inline PhiloxBlock philox(PhiloxKey key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c0, p1 = static_cast<uint64_t>(kPhiloxM1) * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key.k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key.k1;
    c1 = static_cast<uint32_t>(p1), c3 = static_cast<uint32_t>(p0), c0 = n0, c2 = n2;
    key.k0 += kPhiloxW0, key.k1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

// What decides one operator's dropout mask: the run's seed and step (key), the place of use (site), the micro-batch.
// Element (row, column) of head h has the counter (column / 8, row, h | stream << 16, site) and takes the 16 bits of
// index column % 8: v[i / 2] >> (16 * (i % 2)). It is kept if those bits are >= threshold().
struct Dropout {
  float p_drop = 0;     // the chance to zero an element; 0 turns dropout off
  uint32_t site = 0;    // hash of the layer's path and use, see dropout_site
  uint32_t stream = 0;  // micro-batch and data-parallel rank, below 65536
  PhiloxKey key;        // (seed, step)

  FRIT_HOST_DEVICE uint32_t threshold() const { return static_cast<uint32_t>(65536.0f * p_drop + 0.5f); }
  // 1 / (the exact share that is kept), so that the expectation is kept exactly.
  FRIT_HOST_DEVICE float scale() const { return 65536.0f / static_cast<float>(65536u - threshold()); }
  FRIT_HOST_DEVICE bool active() const { return threshold() != 0; }
  FRIT_HOST_DEVICE bool keep(int64_t row, int64_t column, uint32_t head = 0) const {
    const uint32_t i = static_cast<uint32_t>(column % 8);
    const PhiloxBlock block = philox(key, static_cast<uint32_t>(column / 8), static_cast<uint32_t>(row), head | stream << 16, site);
    return (block.v[i / 2] >> (16 * (i % 2)) & 0xffffu) >= threshold();
  }
};

// FNV-1a hash of a path such as "encoder.0.attention.probabilities".
constexpr uint32_t dropout_site(std::string_view path) {
  uint32_t hash = 2166136261u;
  for (char c : path) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

}  // namespace frit
