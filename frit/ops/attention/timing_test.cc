#include "frit/ops/attention/timing.h"

#include <gtest/gtest.h>

#include "frit/core/error.h"

namespace frit {
namespace {

class ChooseAttention : public testing::Test {
 protected:
  std::vector<AttentionChoice> choose(double seconds, bool again, const AttentionTimer& timer) {
    return choose_attention(context_, shapes_, tuning_, seconds, again, timer);
  }
  std::unique_ptr<Gpu> gpu_ = make_gpu();
  ThreadPool pool_{1};
  Memory memory_{gpu_.get()};
  Context context_{pool_, memory_, gpu_.get()};
  Tuning tuning_;
  // fp32, which cuDNN refuses: "short" and "materialised" take it. The second is too long for "short".
  std::vector<AttentionShape> shapes_ = {{DType::kF32, 2, 32, 500, 10, 60, false, 0.1f},
                                         {DType::kF32, 2, 32, 500, 1, 500, false, 0.1f}};
};

TEST_F(ChooseAttention, AnotherOneMustBeClearlyFaster) {
  for (const double materialised : {30.0, 19.5, 18.0}) {
    tuning_ = {};
    const auto choices = choose(
        60, false, [&](const AttentionShape&, std::string_view name) { return name == "short" ? 20 : materialised; });
    ASSERT_EQ(choices.size(), 2u);
    EXPECT_EQ(choices[0].key, "f32 2x32 512 tokens up to 64 dropout");
    EXPECT_EQ(choices[0].chosen, materialised < 19 ? "materialised" : "short") << materialised;
    EXPECT_EQ(choices[0].us, (std::map<std::string, double>{{"short", 20}, {"materialised", materialised}}));
    EXPECT_EQ(choices[1].key, "f32 2x32 512 tokens up to 512 dropout");
    EXPECT_EQ(choices[1].chosen, "materialised");
    EXPECT_EQ(choices[1].us.count("short"), 0u);
  }
}

TEST_F(ChooseAttention, WhatIsKnownIsNotTimed) {
  int asked = 0;
  const AttentionTimer timer = [&](const AttentionShape&, std::string_view) { return ++asked; };
  shapes_.push_back(shapes_[0]);  // the same key
  EXPECT_EQ(choose(60, false, timer).size(), 2u);
  EXPECT_EQ(asked, 3);
  EXPECT_TRUE(choose(60, true, timer).empty());
  EXPECT_EQ(asked, 3);
}

TEST_F(ChooseAttention, WithoutTimeTheOrderDecidesUntilAnotherRun) {
  const AttentionTimer timer = [](const AttentionShape&, std::string_view) { return 5.0; };
  for (const AttentionChoice& c : choose(0, false, timer)) EXPECT_EQ(c.chosen, kAttentionByOrder);
  EXPECT_TRUE(choose(60, false, timer).empty());  // a run that goes on
  const auto choices = choose(60, true, timer);
  ASSERT_EQ(choices.size(), 2u);
  EXPECT_EQ(choices[0].chosen, "short");
}

TEST_F(ChooseAttention, OneThatFailsIsToldOf) {
  const auto choices = choose(60, false, [](const AttentionShape&, std::string_view name) -> double {
    if (name == "short") fail("no luck");
    return 7;
  });
  EXPECT_EQ(choices[0].failures, "short: no luck");
  EXPECT_EQ(choices[0].chosen, "materialised");
}

// What timing chose runs, forward and backward; what it chose but refuses does not.
TEST_F(ChooseAttention, TheOperatorGoesByIt) {
  AttentionArgs args = attention_args(shapes_[0]);
  context_.set_tuning(&tuning_);
  const Tensor out(nullptr, DType::kF32, {500, 2, 32}), lse(nullptr, DType::kF32, {500, 2});
  for (const char* chosen : {"materialised", "short", "cudnn", "nobody", kAttentionByOrder}) {
    tuning_.set(kAttentionTuning, attention_key(args), chosen);
    memory_.begin_recording();
    attention_forward(context_, args, out, lse);
    const size_t scratch = memory_.end_recording().size();
    const bool materialised = std::string_view(chosen) == "materialised";
    EXPECT_EQ(context_.used("attention"), materialised ? "materialised" : "short") << chosen;
    EXPECT_EQ(scratch > 0, materialised);
  }
}

// A real clock where there is one; the simulator, which ran it and checked every access, says that it has none.
TEST_F(ChooseAttention, TimesForwardAndBackward) {
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const bool causal : {false, true})
      for (const char* name : {"short", "materialised"}) {
        const AttentionShape shape{dtype, 2, 32, 100, 3, 40, causal, 0.1f};
        const int64_t before = gpu_->launches();
        if (built_with_cuda()) {
          EXPECT_GT(time_attention(*gpu_, pool_, shape, name), 0);
          continue;
        }
        try {
          time_attention(*gpu_, pool_, shape, name);
          ADD_FAILURE() << "there is a clock";
        } catch (const Error& e) {
          EXPECT_NE(std::string(e.what()).find("no clock"), std::string::npos) << e.what();
        }
        EXPECT_GE(gpu_->launches() - before, 2);
      }
}

}  // namespace
}  // namespace frit
