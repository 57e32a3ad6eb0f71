#include "frit/train/averaging.h"

#include <gtest/gtest.h>

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
}

}  // namespace
}  // namespace frit
