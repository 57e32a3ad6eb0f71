#include "frit/train/early_stopping.h"

#include <gtest/gtest.h>

#include <cmath>

#include "frit/core/error.h"

namespace frit {
namespace {

TEST(EarlyStopper, StopsAfterPatienceChecksWithoutImprovement) {
  EarlyStopper stop({.patience = 2});
  EXPECT_TRUE(stop.update(3.0));
  EXPECT_FALSE(stop.update(3.0));  // equal is no improvement
  EXPECT_FALSE(stop.should_stop());
  EXPECT_TRUE(stop.update(2.5));
  EXPECT_FALSE(stop.update(2.6));
  EXPECT_FALSE(stop.should_stop());
  EXPECT_FALSE(stop.update(2.7));
  EXPECT_TRUE(stop.should_stop());
  EXPECT_EQ(stop.best(), 2.5);
  EXPECT_EQ(stop.stalled(), 2);
}

TEST(EarlyStopper, DirectionAndMinDelta) {
  EarlyStopper stop({.patience = 1, .higher_is_better = true, .min_delta = 0.5});
  EXPECT_TRUE(stop.update(10));
  EXPECT_TRUE(stop.update(10.75));
  EXPECT_FALSE(stop.update(11.25));  // exactly min_delta is not larger than it
  EXPECT_TRUE(stop.should_stop());
}

TEST(EarlyStopper, NotFiniteNeverImproves) {
  EarlyStopper stop({.patience = 3});
  EXPECT_FALSE(stop.update(NAN));
  EXPECT_FALSE(stop.update(-INFINITY));
  EXPECT_EQ(stop.best(), std::nullopt);
  EXPECT_TRUE(stop.update(5));
  EXPECT_FALSE(stop.update(NAN));
  EXPECT_EQ(stop.best(), 5);
}

TEST(EarlyStopper, PatienceZeroNeverStops) {
  EarlyStopper stop({});
  for (int i = 0; i < 100; ++i) stop.update(1);
  EXPECT_FALSE(stop.should_stop());
}

TEST(EarlyStopper, GoesOnFromItsState) {
  const EarlyStopperOptions options{.patience = 2};
  EarlyStopper whole(options), first(options);
  for (double metric : {0.1 + 0.2, 5.0}) {
    whole.update(metric);
    first.update(metric);
  }
  EarlyStopper second(options);
  second.restore(first.save());
  EXPECT_EQ(second.best(), whole.best());  // every bit
  EXPECT_EQ(second.update(6), whole.update(6));
  EXPECT_TRUE(second.should_stop());
  EarlyStopper fresh(options);
  fresh.restore(EarlyStopper(options).save());
  EXPECT_EQ(fresh.best(), std::nullopt);
}

TEST(EarlyStopper, BadStateIsAnError) {
  EarlyStopper stop({});
  for (const char* text :
       {"", "{}", "[]", R"({"best":"x","stalled":0})", R"({"best":1,"stalled":-1})", R"({"best":1})"})
    EXPECT_THROW(stop.restore(text), Error) << text;
  EXPECT_THROW(EarlyStopper({.patience = -1}), std::invalid_argument);
  EXPECT_THROW(EarlyStopper({.min_delta = NAN}), std::invalid_argument);
}

}  // namespace
}  // namespace frit
