// Random numbers for the order of data: a stream of Philox words named by what it is for.
#pragma once
#include <cstdint>
#include <utility>

#include "frit/core/philox.h"

namespace frit {

// What a stream is for, so that two uses of one seed never share numbers.
enum class RandomUse : uint32_t {
  kSentenceOrder = 1,
  kBatchOrder = 2,
  kSourceSubwords = 3,
  kTargetSubwords = 4,
  kLineSample = 5
};

// The same (seed, use, epoch, item) gives the same numbers everywhere and in any order of calls: nothing needs to be
// saved to resume.
class RandomStream {
 public:
  RandomStream(uint64_t seed, RandomUse use, int64_t epoch, int64_t item)
      : key_{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
        epoch_(static_cast<uint32_t>(epoch)),
        item_(static_cast<uint32_t>(item)),
        use_(static_cast<uint32_t>(use) << 24 | (static_cast<uint32_t>(item >> 32) & 0xffffffu)) {}

  uint32_t next() {
    if (used_ == 4) block_ = philox(key_, counter_++, item_, epoch_, use_), used_ = 0;
    return block_.v[used_++];
  }
  // Uniform in [0, 1), 24 bits.
  float uniform() { return static_cast<float>(next() >> 8) * 0x1p-24f; }
  // Uniform in [0, n); the bias is below n / 2^64.
  uint64_t below(uint64_t n) {
    const uint64_t high = next();
    const uint64_t word = high << 32 | next();
    return static_cast<uint64_t>(static_cast<unsigned __int128>(word) * n >> 64);
  }

 private:
  PhiloxKey key_;
  uint32_t epoch_, item_, use_, counter_ = 0;
  PhiloxBlock block_{};
  int used_ = 4;
};

// Fisher and Yates.
template <typename Vector>
void shuffle(Vector& values, RandomStream stream) {
  for (uint64_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[stream.below(i)]);
}

}  // namespace frit
