#include "frit/train/plan.h"

#include <gtest/gtest.h>

#include "frit/core/error.h"
#include "frit/train/prepare.h"
#include "frit/train/trainer.h"

namespace frit {
namespace {

TrainConfig small_config() {
  TrainConfig config;
  config.model.preset = "transformer-small";
  config.training.batch_tokens = 1024;
  config.run.threads = 2;
  return config;
}

TEST(TrainingPlan, BlocksAddUpAndArenaLiesBetweenItsBounds) {
  TrainConfig config = small_config();
  for (const char* precision : {"fp32", "bf16-master", "bf16-stochastic", "bf16-residual"}) {
    config.training.precision = precision;
    const TrainingPlan plan = plan_training(config);
    const bool f32 = precision == std::string("fp32");
    // 7,577,600 parameters (V 8000), the blocks a little longer by alignment.
    EXPECT_EQ(plan.parameters, 7577600);
    const auto about = [&](int64_t bytes, int64_t each) {
      EXPECT_GE(bytes, plan.parameters * each) << precision;
      EXPECT_LE(bytes, plan.parameters * each * 101 / 100) << precision;
    };
    about(plan.parameter_bytes, f32 ? 4 : 2);
    about(plan.gradient_bytes, f32 ? 4 : 2);
    about(plan.moment_bytes, 8);
    about(plan.master_bytes, precision == std::string("bf16-master")     ? 4
                             : precision == std::string("bf16-residual") ? 2
                                                                         : 0);
    EXPECT_GE(plan.arena_bytes, plan.lower_bound_bytes);
    EXPECT_LT(plan.arena_bytes, plan.unshared_bytes);
  }
}

TEST(TrainingPlan, NamesTensorsLargestFirstAndSaysWhetherItFits) {
  const TrainingPlan plan = plan_training(small_config());
  ASSERT_FALSE(plan.temporaries.empty());
  for (size_t i = 1; i < plan.temporaries.size(); ++i)
    EXPECT_GE(plan.temporaries[i - 1].bytes, plan.temporaries[i].bytes);
  EXPECT_EQ(plan.weights[0].name, "model.shared.weight");
  EXPECT_EQ(plan.weights[0].bytes, 8000 * 256 * 4);
  const std::string text = plan.to_string(5);
  EXPECT_NE(text.find("7,577,600 parameters"), std::string::npos) << text;
  EXPECT_NE(text.find("feed_forward"), std::string::npos) << text;
  EXPECT_NE(text.find("smaller ones"), std::string::npos) << text;
  EXPECT_NE(text.find(plan.fits() ? "it fits" : "DOES NOT FIT"), std::string::npos) << text;
  // Six products' worth of operations a parameter and token, within the share of attention.
  const double rough = 6.0 * 7.5e6 * 1024;
  EXPECT_GT(plan.product_flops, 0.7 * rough);
  EXPECT_LT(plan.product_flops, 1.5 * rough);
}

TEST(TrainingPlan, RecomputeAndFewerRowsTakeLess) {
  TrainConfig config = small_config();
  const int64_t plain = plan_training(config).arena_bytes;
  config.training.recompute = "activations";
  EXPECT_LT(plan_training(config).arena_bytes, plain);
  config.training.recompute = "none";
  config.training.criterion_rows = 256;
  EXPECT_LT(plan_training(config).arena_bytes, plain);
}

TEST(TrainingPlan, OnAGpuUsualBatchesHaveTheirLogitsInTwoPieces) {
  TrainConfig config = small_config();
  const auto rows = [&](const char* device, int64_t batch_tokens, int64_t criterion_rows) {
    config.run.device = device;
    config.training.batch_tokens = batch_tokens, config.training.criterion_rows = criterion_rows;
    const std::unique_ptr<Gpu> gpu = training_gpu(config);
    Transformer::Options options = training_options(config, gpu.get());
    options.planning = true;
    const Transformer model(model_config(config), options);
    return step_settings(config, model.workspace()).criterion.chunk_rows;
  };
  EXPECT_EQ(rows("simulator", 1024, -1), 2048);
  EXPECT_EQ(rows("simulator", 4096, -1), 2048);
  EXPECT_EQ(rows("simulator", 6000, -1), 3000);
  EXPECT_EQ(rows("simulator", 16384, -1), 4096);
  EXPECT_EQ(rows("simulator", 0, -1), 4096);  // the largest batch that fits
  EXPECT_EQ(rows("simulator", 16384, 0), 0);
  EXPECT_EQ(rows("simulator", 16384, 256), 256);
  EXPECT_EQ(rows("cpu", 16384, -1), 512);
}

TEST(TrainingPlan, MeasuredEstimateIsPositive) {
  TrainingPlanOptions options;
  options.measure = true;
  const TrainingPlan plan = plan_training(small_config(), options);
  EXPECT_GT(plan.flops_per_s, 1e8);
  EXPECT_GT(plan.bytes_per_s, 1e7);
  EXPECT_GT(plan.step_s, 0);
  EXPECT_NE(plan.to_string().find("estimated"), std::string::npos);
}

}  // namespace
}  // namespace frit
