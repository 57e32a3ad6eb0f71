// Dropout's words for kernels whose threads keep a group of 8 columns: what the group alone decides is worked out once.
#pragma once
#include "frit/simt/whole_columns.h"

namespace frit::simt {

// The Philox blocks of one group of 8 columns in any rows. Of the 20 products of a block 4 depend on no row.
struct RowDraws {
  uint32_t first, second, third[3];  // what the row's words meet in the first three rounds

  FRIT_DEVICE RowDraws(const DropoutTable& d, uint32_t group) {
    const auto product = [](uint32_t m, uint32_t c) { return static_cast<uint64_t>(m) * c; };
    const auto high = [](uint64_t p) { return static_cast<uint32_t>(p >> 32); };
    const uint64_t p0 = product(kPhiloxM0, group), p1 = product(kPhiloxM1, d.lane_word);
    first = high(p1) ^ d.keys[0];
    second = static_cast<uint32_t>(p0) ^ d.keys[3];
    const uint64_t q1 = product(kPhiloxM1, high(p0) ^ d.site ^ d.keys[1]);
    const uint64_t q0 = product(kPhiloxM0, high(q1) ^ static_cast<uint32_t>(p1) ^ d.keys[2]);
    third[0] = static_cast<uint32_t>(q1) ^ d.keys[4];
    third[1] = high(q0) ^ d.keys[5];
    third[2] = static_cast<uint32_t>(q0);
  }
  // The words of rows row, row + step, ... Those without dropout are never below its threshold, which is 0. Cost: 34
  // instructions a row.
  template <int M>
  FRIT_DEVICE DropoutWords<M> rows(const DropoutTable& d, uint32_t row, uint32_t step) const {
    DropoutWords<M> c;
    FRIT_UNROLL
    for (int j = 0; j < M; ++j) {
      const uint64_t p = static_cast<uint64_t>(kPhiloxM0) * (first ^ (row + static_cast<uint32_t>(j) * step));
      const uint64_t q = static_cast<uint64_t>(kPhiloxM1) * (static_cast<uint32_t>(p >> 32) ^ second);
      c.v[j][0] = static_cast<uint32_t>(q >> 32) ^ third[0], c.v[j][1] = static_cast<uint32_t>(q);
      c.v[j][2] = third[1] ^ static_cast<uint32_t>(p), c.v[j][3] = third[2];
    }
    FRIT_UNROLL
    for (int r = 3; r < 10; ++r) {
      FRIT_UNROLL
      for (int j = 0; j < M; ++j) {
        uint32_t(&v)[4] = c.v[j];
        const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * v[0], p1 = static_cast<uint64_t>(kPhiloxM1) * v[2];
        v[0] = static_cast<uint32_t>(p1 >> 32) ^ v[1] ^ d.keys[2 * r];
        v[2] = static_cast<uint32_t>(p0 >> 32) ^ v[3] ^ d.keys[2 * r + 1];
        v[1] = static_cast<uint32_t>(p1), v[3] = static_cast<uint32_t>(p0);
      }
    }
    return c;
  }
};

}  // namespace frit::simt
