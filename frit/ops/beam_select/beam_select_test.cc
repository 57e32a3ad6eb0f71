// beam_select against a full sort over thousands of rows, and its errors.
#include "frit/ops/beam_select/beam_select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace frit {
namespace {

struct Bench {
  ThreadPool pool{3};
  Memory memory;
  Context context{pool, memory};
};

uint64_t next(uint64_t& state) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return state >> 33;
}

TEST(BeamSelect, EqualsFullSortOverThousandsOfRows) {
  Bench b;
  uint64_t state = 42;
  int64_t rows_seen = 0, collected = 0, wanted = 0;
  for (int round = 0; round < 60; ++round) {
    const int64_t rows = 64, vocabulary = 1 + static_cast<int64_t>(next(state) % 3000);
    const int64_t count =
        1 + static_cast<int64_t>(next(state) % static_cast<uint64_t>(std::min<int64_t>(vocabulary, 40)));
    // From many ties (few levels) to none; every third round has forbidden tokens.
    const uint64_t levels = uint64_t{2} << (next(state) % 24);
    std::vector<float> x(rows * vocabulary);
    for (float& v : x) {
      v = static_cast<float>(next(state) % levels) / static_cast<float>(levels) * 20 - 10;
      if (round % 3 == 0 && next(state) % 2) v = -std::numeric_limits<float>::infinity();
    }
    std::vector<float> values(rows * count), lse(rows);
    std::vector<int32_t> columns(rows * count), survivors(rows);
    beam_select(b.context, Tensor(x.data(), DType::kF32, {rows, vocabulary}), count,
                Tensor(values.data(), DType::kF32, {rows, count}), Tensor(columns.data(), DType::kI32, {rows, count}),
                Tensor(lse.data(), DType::kF32, {rows}), Tensor(survivors.data(), DType::kI32, {rows}));
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = x.data() + r * vocabulary;
      std::vector<int32_t> order(vocabulary);
      std::iota(order.begin(), order.end(), 0);
      std::sort(order.begin(), order.end(),
                [&](int32_t i, int32_t j) { return row[i] != row[j] ? row[i] > row[j] : i < j; });
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(columns[r * count + i], order[i])
            << "row " << r << " of [" << rows << ", " << vocabulary << "], rank " << i;
        ASSERT_EQ(values[r * count + i], row[order[i]]);
      }
      double sum = 0;
      for (int64_t i = 0; i < vocabulary; ++i) sum += std::exp(static_cast<double>(row[i]));
      if (sum > 0) {
        ASSERT_NEAR(lse[r], std::log(sum), 4e-6);
      } else {
        ASSERT_EQ(lse[r], -std::numeric_limits<float>::infinity());
      }
      ASSERT_GE(survivors[r], count);
      ++rows_seen;
      if (levels > 100000 && round % 3 != 0) collected += survivors[r], wanted += count;
    }
  }
  EXPECT_EQ(rows_seen, 3840);
  // Without ties few more are collected than asked for: what the method is for.
  ASSERT_GT(wanted, 0);
  EXPECT_LT(static_cast<double>(collected), 1.5 * static_cast<double>(wanted));
}

TEST(BeamSelect, InfinityAndZeroSigns) {
  Bench b;
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> x{0.0f, -0.0f, infinity, -1.0f, -0.0f, 0.0f};
  std::vector<float> values(5), lse(1);
  std::vector<int32_t> columns(5);
  beam_select(b.context, Tensor(x.data(), DType::kF32, {1, 6}), 5, Tensor(values.data(), DType::kF32, {1, 5}),
              Tensor(columns.data(), DType::kI32, {1, 5}), Tensor(lse.data(), DType::kF32, {1}), Tensor());
  EXPECT_EQ(columns, (std::vector<int32_t>{2, 0, 1, 4, 5}));  // +0 and -0 are equal: the smaller column first
  EXPECT_EQ(lse[0], infinity);
}

TEST(BeamSelect, Errors) {
  Bench b;
  std::vector<float> x(2 * 700, 1.0f), values(2 * 3);
  std::vector<int32_t> columns(2 * 3);
  const Tensor logits(x.data(), DType::kF32, {2, 700}), v(values.data(), DType::kF32, {2, 3}),
      c(columns.data(), DType::kI32, {2, 3});
  for (size_t at : {size_t{0}, size_t{699}, size_t{700 + 63}, size_t{1399}}) {
    x[at] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_THROW(beam_select(b.context, logits, 3, v, c, Tensor(), Tensor()), Error) << at;
    x[at] = 1.0f;
  }
  EXPECT_NO_THROW(beam_select(b.context, logits, 3, v, c, Tensor(), Tensor()));
  EXPECT_THROW(beam_select(b.context, logits, 0, v, c, Tensor(), Tensor()), std::invalid_argument);
  EXPECT_THROW(beam_select(b.context, logits, 701, v, c, Tensor(), Tensor()), std::invalid_argument);
  EXPECT_THROW(beam_select(b.context, logits, 2, v, c, Tensor(), Tensor()), std::invalid_argument);
}

}  // namespace
}  // namespace frit
