#include "frit/train/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace frit {
namespace {

std::string error_of(auto&& call) {
  try {
    call();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

TEST(Schedule, WarmUpIsLinearAndEndsAtThePeak) {
  for (auto kind :
       {ScheduleKind::kConstant, ScheduleKind::kLinear, ScheduleKind::kCosine, ScheduleKind::kInverseSqrt}) {
    const Schedule s{.kind = kind, .peak = 2e-3, .warmup_steps = 100, .total_steps = 1000};
    check_schedule(s);
    EXPECT_DOUBLE_EQ(learning_rate(s, 1), 2e-5);
    EXPECT_DOUBLE_EQ(learning_rate(s, 50), 1e-3);
    EXPECT_DOUBLE_EQ(learning_rate(s, 100), 2e-3);
    EXPECT_LE(learning_rate(s, 101), 2e-3);
    EXPECT_NEAR(learning_rate(s, 101), 2e-3, 2e-5);
  }
}

TEST(Schedule, Constant) {
  const Schedule s{.kind = ScheduleKind::kConstant, .peak = 0.1, .warmup_steps = 0};
  EXPECT_EQ(learning_rate(s, 1), 0.1);
  EXPECT_EQ(learning_rate(s, 1000000), 0.1);
}

TEST(Schedule, LinearFallsToTheFloorAndStays) {
  const Schedule s{.kind = ScheduleKind::kLinear, .peak = 1, .floor = 0.2, .warmup_steps = 10, .total_steps = 110};
  EXPECT_DOUBLE_EQ(learning_rate(s, 60), 0.6);
  EXPECT_DOUBLE_EQ(learning_rate(s, 85), 0.4);
  EXPECT_DOUBLE_EQ(learning_rate(s, 110), 0.2);
  EXPECT_DOUBLE_EQ(learning_rate(s, 100000), 0.2);
}

TEST(Schedule, CosineIsHalfWayInTheMiddle) {
  const Schedule s{.kind = ScheduleKind::kCosine, .peak = 1, .floor = 0.1, .warmup_steps = 100, .total_steps = 300};
  EXPECT_NEAR(learning_rate(s, 200), 0.55, 1e-12);
  EXPECT_NEAR(learning_rate(s, 150), 0.1 + 0.9 * (1 + std::sqrt(0.5)) / 2, 1e-12);
  EXPECT_NEAR(learning_rate(s, 300), 0.1, 1e-12);
  EXPECT_NEAR(learning_rate(s, 400), 0.1, 1e-12);
}

TEST(Schedule, InverseSqrtHalvesWhenStepsQuadruple) {
  Schedule s{.kind = ScheduleKind::kInverseSqrt, .peak = 1, .warmup_steps = 400};
  EXPECT_DOUBLE_EQ(learning_rate(s, 1600), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(s, 6400), 0.25);
  s.floor = 0.3;
  EXPECT_DOUBLE_EQ(learning_rate(s, 6400), 0.3);
  s.warmup_steps = 0;
  EXPECT_DOUBLE_EQ(learning_rate(s, 1), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(s, 4), 0.5);
}

TEST(Schedule, NamesGoBothWays) {
  for (std::string_view name : {"constant", "linear", "cosine", "inverse-sqrt"})
    EXPECT_EQ(schedule_name(parse_schedule(name)), name);
  EXPECT_EQ(parse_schedule("inverse_sqrt"), ScheduleKind::kInverseSqrt);
}

TEST(Schedule, UnknownNameNamesTheNearest) {
  EXPECT_NE(error_of([] { parse_schedule("cosin"); }).find("did you mean 'cosine'"), std::string::npos);
  EXPECT_NE(error_of([] { parse_schedule("Inverse_Sqr"); }).find("did you mean 'inverse-sqrt'"), std::string::npos);
  EXPECT_NE(error_of([] { parse_schedule("lienar"); }).find("did you mean 'linear'"), std::string::npos);
}

TEST(Schedule, BadValuesAreErrors) {
  EXPECT_NE(error_of([] { learning_rate({}, 0); }), "");
  EXPECT_NE(error_of([] { check_schedule({.peak = -1}); }), "");
  EXPECT_NE(error_of([] { check_schedule({.peak = NAN}); }), "");
  EXPECT_NE(error_of([] { check_schedule({.peak = 1, .floor = 2}); }), "");
  EXPECT_NE(error_of([] { check_schedule({.warmup_steps = -1}); }), "");
  EXPECT_NE(error_of([] { check_schedule({.kind = ScheduleKind::kCosine, .warmup_steps = 10, .total_steps = 10}); }),
            "");
}

}  // namespace
}  // namespace frit
