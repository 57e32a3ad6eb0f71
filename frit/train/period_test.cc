#include "frit/train/period.h"

#include <gtest/gtest.h>

namespace frit {
namespace {

TEST(Period, ReadsMariansUnits) {
  EXPECT_EQ(parse_period("500u"), (Period{500, PeriodUnit::kUpdates}));
  EXPECT_EQ(parse_period("500"), (Period{500, PeriodUnit::kUpdates}));
  EXPECT_EQ(parse_period("10Ku"), (Period{10000, PeriodUnit::kUpdates}));
  EXPECT_EQ(parse_period("2e"), (Period{2, PeriodUnit::kEpochs}));
  EXPECT_EQ(parse_period("0.5e"), (Period{0.5, PeriodUnit::kEpochs}));
  EXPECT_EQ(parse_period("100Kt"), (Period{1e5, PeriodUnit::kTargetTokens}));
  EXPECT_EQ(parse_period("1Mt"), (Period{1e6, PeriodUnit::kTargetTokens}));
  EXPECT_EQ(parse_period("1.5kt"), (Period{1500, PeriodUnit::kTargetTokens}));
  EXPECT_EQ(parse_period("2Gt"), (Period{2e9, PeriodUnit::kTargetTokens}));
  EXPECT_TRUE(parse_period("0e").never());
}

TEST(Period, RefusesTheRest) {
  for (const char* text : {"", "u", "e", "-5u", "-0u", "5x", "5 u", " 5u", "5uu", "5ut", "1.5u", "0.0001Kt", "inf",
                           "nan", "1e5", "5Tt", "K", "5mt"})
    EXPECT_THROW(parse_period(text), std::invalid_argument) << text;
}

TEST(Period, TextGoesBothWays) {
  for (const char* text : {"500u", "10Ku", "2e", "0.5e", "0.125e", "100Kt", "1Mt", "1500t", "2Gt", "0u", "1000001t"})
    EXPECT_EQ(format_period(parse_period(text)), text);
  EXPECT_EQ(parse_period(format_period({1.0 / 3, PeriodUnit::kEpochs})), (Period{1.0 / 3, PeriodUnit::kEpochs}));
}

TEST(Period, PassesOnceAMultiple) {
  int passed = 0;
  const Period every = parse_period("500u");
  for (int64_t u = 1; u <= 2000; ++u) passed += period_passed(every, {.updates = u - 1}, {.updates = u});
  EXPECT_EQ(passed, 4);
  EXPECT_TRUE(period_passed(every, {.updates = 499}, {.updates = 500}));
  EXPECT_FALSE(period_passed(every, {.updates = 500}, {.updates = 501}));
  const Period tokens = parse_period("100Kt");
  EXPECT_TRUE(period_passed(tokens, {.target_tokens = 99000}, {.target_tokens = 101000}));
  EXPECT_FALSE(period_passed(tokens, {.target_tokens = 101000}, {.target_tokens = 199999}));
  EXPECT_FALSE(period_passed(parse_period("0"), {.updates = 0}, {.updates = 1000}));
}

TEST(Period, EpochFractionsDoNotSlip) {
  const Period every = parse_period("0.1e");
  double epochs = 0;
  int passed = 0;
  for (int i = 0; i < 1000; ++i) {  // 1000 steps of 0.01, each rounded
    const double before = epochs;
    epochs += 0.01;
    passed += period_passed(every, {.epochs = before}, {.epochs = epochs});
  }
  EXPECT_EQ(passed, 100);
}

TEST(Period, ReachedAndFraction) {
  EXPECT_FALSE(period_reached(parse_period("10e"), {.epochs = 9.99}));
  EXPECT_TRUE(period_reached(parse_period("10e"), {.epochs = 10}));
  EXPECT_FALSE(period_reached(parse_period("0u"), {.updates = 10}));
  EXPECT_DOUBLE_EQ(period_fraction(parse_period("200u"), {.updates = 50}), 0.25);
  EXPECT_DOUBLE_EQ(period_fraction(parse_period("200u"), {.updates = 500}), 1);
  EXPECT_DOUBLE_EQ(period_fraction(parse_period("0u"), {.updates = 500}), 0);
}

}  // namespace
}  // namespace frit
