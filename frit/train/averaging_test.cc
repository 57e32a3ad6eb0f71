#include "frit/train/averaging.h"

#include <gtest/gtest.h>

#include <cmath>

namespace frit {
namespace {

TEST(Averaging, MeanOfCheckpoints) {
  WeightAverage average;
  const std::vector<float> a = {1, 2, 1e8f}, b = {2, 4, 1}, c = {6, 0, -1e8f};
  average.add(a);
  average.add(b);
  average.add(c);
  std::vector<float> mean(3);
  average.mean(mean);
  EXPECT_EQ(mean, (std::vector<float>{3, 2, 1.0f / 3}));  // the sum is in double: 1 survives beside 1e8
  EXPECT_EQ(average.count(), 3);
}

TEST(Averaging, OneCheckpointIsItself) {
  WeightAverage average;
  const std::vector<float> a = {0.1f, -0.0f, 3e-39f};
  average.add(a);
  std::vector<float> mean(3);
  average.mean(mean);
  EXPECT_EQ(mean, a);
}

TEST(Averaging, WrongSizesAreErrors) {
  WeightAverage average;
  std::vector<float> three(3), two(2);
  EXPECT_THROW(average.mean(three), std::invalid_argument);
  average.add(three);
  EXPECT_THROW(average.add(two), std::invalid_argument);
  EXPECT_THROW(average.mean(two), std::invalid_argument);
  EXPECT_THROW(ema_update(two, three, 0.5), std::invalid_argument);
  EXPECT_THROW(ema_update(two, two, 1.5), std::invalid_argument);
  EXPECT_THROW(ema_decay(1.0, 1), std::invalid_argument);
  EXPECT_THROW(ema_decay(0.9, 0), std::invalid_argument);
}

// Against the definition: ema_t = sum d^(t-i) p_i / sum d^(t-i), whatever the average held before.
TEST(Averaging, EmaIsBiasCorrected) {
  for (double d : {0.0, 0.5, 0.9, 0.999}) {
    std::vector<float> ema = {1e6f};
    double weighted = 0, weights = 0;
    for (int t = 1; t <= 200; ++t) {
      const std::vector<float> p = {static_cast<float>(std::sin(t))};
      weighted = d * weighted + p[0];
      weights = d * weights + 1;
      ema_update(ema, p, ema_decay(d, t));
      ASSERT_NEAR(ema[0], weighted / weights, 2e-6) << "decay " << d << " update " << t;
    }
  }
}

TEST(Averaging, EmaDecayRisesToItsLimit) {
  EXPECT_EQ(ema_decay(0.9999, 1), 0);
  EXPECT_NEAR(ema_decay(0.9999, 2), 0.9999 / 1.9999, 1e-12);
  double before = 0;
  for (int64_t t : {2, 10, 100, 10000, 1000000}) {
    EXPECT_GT(ema_decay(0.9999, t), before);
    before = ema_decay(0.9999, t);
  }
  EXPECT_NEAR(before, 0.9999, 1e-12);
}

TEST(Averaging, EmaOfEqualWeightsStaysExact) {
  std::vector<float> ema = {0.1f, 1.0f / 3, -7e-30f}, p = ema;
  const auto before = ema;
  for (int i = 0; i < 1000; ++i) ema_update(ema, p, 0.9997);
  EXPECT_EQ(ema, before);
}

}  // namespace
}  // namespace frit
