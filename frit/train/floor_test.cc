#include "frit/train/floor.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace frit {
namespace {

TEST(StepFloor, IsProductsAttentionAndTheUpdatesBytes) {
  const StepFloor floor =
      step_floor({{"all", 9000}, {"product", 2500}, {"attention", 400}, {"layer_norm", 300}}, 61'000'000, 4e12);
  EXPECT_DOUBLE_EQ(floor.products_ms, 2.5);
  EXPECT_DOUBLE_EQ(floor.attention_ms, 0.4);
  EXPECT_DOUBLE_EQ(floor.update_ms, 22 * 61e6 / 4e12 * 1e3);
  EXPECT_DOUBLE_EQ(floor.ms(), 2.9 + 0.3355);
  EXPECT_DOUBLE_EQ(step_floor({}, 0, 1).ms(), 0);
  EXPECT_THROW(step_floor({}, 1, 0), std::invalid_argument);
}

}  // namespace
}  // namespace frit
