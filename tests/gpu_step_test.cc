// Training steps on a GPU, or in the simulator where there is none: the losses of the CPU, whatever is replayed from a
// graph; every precision; accumulation; recomputation; the average of weights; loss scaling; resume.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "frit/train/measure.h"
#include "frit/train/prepare.h"
#include "frit/train/step.h"
#include "frit/train/trainer.h"
#include "tests/training.h"

namespace frit {
namespace {

TrainConfig small_config() {
  TrainConfig c;
  c.model.preset = "transformer-tiny";
  c.model.encoder_layers = c.model.decoder_layers = 1;
  c.model.d_model = 64, c.model.heads = 2, c.model.ffn = 96, c.model.max_positions = 64;
  c.model.dropout = c.model.attention_dropout = c.model.activation_dropout = 0.1;
  c.data.vocabulary = 64, c.data.max_length = 60;
  c.training.criterion_rows = 0;
  c.training.clip_norm = 0.5;
  c.run.threads = 2;
  return c;
}

// A batch of `sentences`, of other lengths for every seed; the first source may be given its own.
Batch some_batch(unsigned seed, int sentences, int first_source = 0) {
  std::mt19937 random(seed);
  Batch batch;
  batch.source_offsets = batch.target_offsets = {0};
  for (int s = 0; s < sentences; ++s) {
    int source = 1 + static_cast<int>(random() % 20);
    const int target = 1 + static_cast<int>(random() % 20);
    if (s == 0 && first_source > 0) source = first_source;
    for (int i = 0; i < source; ++i) batch.source_ids.push_back(1 + static_cast<int32_t>(random() % 60));
    for (int i = 0; i < target; ++i) {
      batch.target_ids.push_back(1 + static_cast<int32_t>(random() % 60));
      batch.labels.push_back(1 + static_cast<int32_t>(random() % 60));
    }
    batch.source_offsets.push_back(static_cast<int32_t>(batch.source_ids.size()));
    batch.target_offsets.push_back(static_cast<int32_t>(batch.labels.size()));
    batch.sentence_index.push_back(s);
  }
  return batch;
}

// A model and its steps on one device.
struct Rig {
  Rig(const TrainConfig& config, Gpu* gpu)
      : pool(2),
        model(model_config(config), training_options(config, gpu)),
        step((model.initialise(3), model), pool, step_settings(config, model.workspace()), gpu) {}
  StepResult update(int64_t attempt, const std::vector<Batch>& batches) {
    int64_t tokens = 0;
    for (const Batch& b : batches) tokens += b.target_tokens();
    const double rates[] = {1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 7e-3, 8e-3, 9e-3};
    step.begin(attempt, tokens, rates, 1);
    for (size_t i = 0; i < batches.size(); ++i) step.forward_backward(batches[i], static_cast<int64_t>(i));
    step.update();
    return *step.result(true);
  }
  // How far each parameter's gradient is from another rig's, relative to its length; the largest first.
  std::vector<std::pair<double, std::string>> gradient_differences(Rig& other) {
    std::vector<std::pair<double, std::string>> found;
    for (const auto& slice : model.workspace().layout().slices()) {
      const std::vector<float> a = gradient(slice), b = other.gradient(slice);
      double apart = 0, length = 0;
      for (size_t i = 0; i < a.size(); ++i) apart += std::pow(a[i] - b[i], 2), length += std::pow(a[i], 2);
      found.emplace_back(std::sqrt(apart / std::max(length, 1e-20)), slice.name);
    }
    std::sort(found.rbegin(), found.rend());
    return found;
  }
  std::vector<float> gradient(const ParameterLayout::Slice& slice) {
    const Tensor block = model.workspace().gradients();
    std::vector<float> all(static_cast<size_t>(block.numel()));
    if (block.dtype() == DType::kF32) {
      model.workspace().read(block, all.data());
    } else {
      std::vector<bfloat16> stored(all.size());
      model.workspace().read(block, stored.data());
      std::transform(stored.begin(), stored.end(), all.begin(), [](bfloat16 v) { return static_cast<float>(v); });
    }
    return {all.begin() + slice.offset, all.begin() + slice.offset + slice.shape.numel()};
  }
  std::vector<float> parameters() {
    std::vector<float> all;
    for (const auto& slice : model.workspace().layout().slices()) {
      std::vector<float> values(static_cast<size_t>(slice.shape.numel()));
      model.workspace().get(slice.name, values.data(), slice.shape.numel());
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }
  ThreadPool pool;
  Transformer model;
  TrainingStep step;
};

// Updates over batches of changing lengths, most of one key, so that graphs are recorded and recorded again.
std::vector<StepResult> run(Rig& rig, int updates, int micro = 1) {
  std::vector<StepResult> results;
  for (int i = 0; i < updates; ++i) {
    std::vector<Batch> batches;
    for (int m = 0; m < micro; ++m) batches.push_back(some_batch(static_cast<unsigned>(10 * i + m), 3 + i % 3));
    results.push_back(rig.update(i, batches));
  }
  return results;
}

class GpuStep : public testing::Test {
 protected:
  std::unique_ptr<Gpu> gpu_ = make_gpu();
  TrainConfig config(const std::string& precision = "fp32") const {
    TrainConfig c = small_config();
    c.training.precision = precision;
    return c;
  }
};

TEST_F(GpuStep, HasTheLossesAndWeightsOfTheCpu) {
  const TrainConfig c = config();
  Rig cpu(c, nullptr), gpu(c, gpu_.get());
  EXPECT_EQ(cpu.parameters(), gpu.parameters());
  const auto expected = run(cpu, 6), got = run(gpu, 6);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(got[i].loss.loss, expected[i].loss.loss, 1e-4 * expected[i].loss.loss) << i;
    EXPECT_NEAR(got[i].loss.nll, expected[i].loss.nll, 1e-4 * expected[i].loss.nll) << i;
    EXPECT_EQ(got[i].loss.tokens, expected[i].loss.tokens);
    EXPECT_NEAR(got[i].grad_norm, expected[i].grad_norm, 1e-3 * expected[i].grad_norm) << i;
    EXPECT_EQ(got[i].updates, static_cast<int64_t>(i) + 1);
    EXPECT_TRUE(got[i].finite);
  }
  // Where a gradient is zero but for rounding (biases of keys), Adam takes a full step either way: no element is
  // compared alone.
  const auto start = Rig(c, nullptr).parameters(), a = cpu.parameters(), b = gpu.parameters();
  double apart = 0, moved = 0;
  for (size_t i = 0; i < a.size(); ++i) apart += std::pow(a[i] - b[i], 2), moved += std::pow(a[i] - start[i], 2);
  EXPECT_LT(std::sqrt(apart / moved), 0.02);
}

// Widths that our own kernel does not take, and sentences too long for it among others: each batch gets a plan in which
// its own implementation of attention has its memory.
TEST_F(GpuStep, AttentionOfOtherWidthsAndOfLongSentences) {
  for (const int64_t heads : {4, 2}) {
    SCOPED_TRACE(heads);
    TrainConfig c = config();
    c.model.heads = heads, c.model.max_positions = 300;
    Rig cpu(c, nullptr), gpu(c, gpu_.get());
    for (int i = 0; i < 6; ++i) {
      const std::vector<Batch> batch = {
          some_batch(static_cast<unsigned>(i), 2 + i % 3, heads == 2 && i % 2 == 1 ? 258 + i : 0)};
      const StepResult expected = cpu.update(i, batch), got = gpu.update(i, batch);
      EXPECT_NEAR(got.loss.loss, expected.loss.loss, 1e-4 * expected.loss.loss) << i;
      EXPECT_NEAR(got.grad_norm, expected.grad_norm, 1e-3 * expected.grad_norm) << i;
    }
  }
}

// Where memory depends on lengths there are many sizes: plans and graphs of those that came longest ago go.
TEST_F(GpuStep, ForgetsSizesThatCameLongAgo) {
  TrainConfig c = config();
  c.model.heads = 4, c.model.max_positions = 400, c.data.max_length = 400;  // heads of a width that "short" refuses
  ThreadPool pool(2);
  Transformer model(model_config(c), training_options(c, gpu_.get()));
  model.initialise(3);
  StepSettings settings = step_settings(c, model.workspace());
  settings.most_lengths = 2;
  TrainingStep step(model, pool, settings, gpu_.get());
  Rig cpu(c, nullptr);
  const double rates[] = {1e-3};
  for (int i = 0; i < 6; ++i) {
    // Three sizes: the first one is always in use, the other two push each other out.
    const int size = i % 2 == 0 ? 0 : 1 + i / 2 % 2;
    const std::vector<Batch> batch = {some_batch(static_cast<unsigned>(i), 3 + size)};
    const StepResult expected = cpu.update(i, batch);
    step.begin(i, batch[0].target_tokens(), rates, 1);
    step.forward_backward(batch[0], 0);
    step.update();
    const StepResult got = *step.result(true);
    if (i == 0) {  // later ones have other learning rates
      EXPECT_NEAR(got.loss.loss, expected.loss.loss, 1e-4 * expected.loss.loss);
    }
    EXPECT_TRUE(got.finite);
    EXPECT_LE(step.plans(), 2) << i;
    EXPECT_LE(step.graphs(), 2) << i;
  }
  EXPECT_EQ(step.plans(), 2);
}

// A run of one step has no step before it to be timed from; the time of the whole stands in.
TEST(Measure, OneStepHasATime) {
  TrainConfig c = small_config();
  for (const char* device : {"cpu", built_with_cuda() ? "cuda" : "simulator"}) {
    c.run.device = device;
    const TrainingMeasurement m = measure_training(c, {{{5, 7}, {3, 4}}}, 1, 0);
    EXPECT_EQ(m.ms.size(), 1u) << device;
    EXPECT_GT(m.step_ms, 0) << device;
    EXPECT_GT(m.tokens_per_s, 0) << device;
    EXPECT_FALSE(m.floor) << device;
  }
}

// Attention as a timer chose it: materialised where nothing is causal, short where it is; memory is planned for it, and
// graphs are recorded and recorded again.
TEST_F(GpuStep, AttentionFollowsWhatWasTimed) {
  const TrainConfig c = config();
  Rig cpu(c, nullptr);
  Tuning tuning;
  Rig gpu(c, gpu_.get());
  std::vector<BatchSize> sizes;
  std::vector<Batch> batches;
  for (int i = 0; i < 4; ++i) {
    batches.push_back(some_batch(static_cast<unsigned>(90 + i), 3 + i % 3, i == 3 ? 50 : 0));
    sizes.push_back(TrainingStep::batch_size(batches.back()));
  }
  int asked = 0;
  const auto choices =
      gpu.step.tune_attention(sizes, tuning, 60, true, [&](const AttentionShape& shape, std::string_view name) {
        ++asked;
        return (name == "materialised") != shape.causal ? 10.0 : 20.0;
      });
  ASSERT_EQ(choices.size(), 2u);  // causal or not: all lie in one bucket of tokens and lengths
  EXPECT_GE(asked, 4);
  for (const AttentionChoice& choice : choices) {
    EXPECT_EQ(choice.chosen, choice.key.find("causal") == std::string::npos ? "materialised" : "short") << choice.key;
    EXPECT_EQ(tuning.find(kAttentionTuning, choice.key), choice.chosen);
  }
  for (int i = 0; i < 4; ++i) {
    const std::vector<Batch> batch = {batches[static_cast<size_t>(i)]};
    const StepResult expected = cpu.update(i, batch), got = gpu.update(i, batch);
    EXPECT_NEAR(got.loss.loss, expected.loss.loss, 1e-4 * expected.loss.loss) << i;
    EXPECT_NEAR(got.grad_norm, expected.grad_norm, 1e-3 * expected.grad_norm) << i;
    EXPECT_EQ(gpu.step.context().used("attention"), "materialised");  // the encoder's backward comes last
  }
  // Without dropout there is no choice: the order's first.
  for (Rig* rig : {&cpu, &gpu}) rig->step.evaluate(some_batch(50, 4));
  EXPECT_NEAR(gpu.step.evaluated().nll, cpu.step.evaluated().nll, 1.0);
  EXPECT_EQ(gpu.step.context().used("attention"), "short");
  EXPECT_THROW(gpu.step.tune_attention(sizes, tuning, 60, true), std::invalid_argument);  // plans are made
}

// Every parameter's gradient, with several layers on both sides.
TEST_F(GpuStep, HasTheGradientsOfTheCpu) {
  for (const char* precision : {"fp32", "bf16-master"}) {
    SCOPED_TRACE(precision);
    TrainConfig c = config(precision);
    c.model.encoder_layers = 2, c.model.decoder_layers = 3;
    Rig cpu(c, nullptr), gpu(c, gpu_.get());
    for (int i = 0; i < 3; ++i) {
      const std::vector<Batch> batch = {some_batch(static_cast<unsigned>(70 + i), 5)};
      cpu.update(i, batch), gpu.update(i, batch);
      for (const auto& [difference, name] : cpu.gradient_differences(gpu)) {
        // The gradient of keys' biases is zero but for rounding. In bf16 both sides are rounded, each in its order, and
        // after an update the weights are not the same any more.
        if (name.ends_with("k_proj.bias")) continue;
        EXPECT_LT(difference, std::string_view(precision) == "fp32" ? 1e-3 : 0.4) << name << ", update " << i;
      }
    }
  }
}

TEST_F(GpuStep, GraphsChangeNoBit) {
  TrainConfig with = config("bf16-stochastic"), without = with;
  without.run.graphs = false;
  Rig a(with, gpu_.get()), b(without, gpu_.get());
  const auto x = run(a, 5), y = run(b, 5);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(x[i].loss.loss, y[i].loss.loss) << i;
  EXPECT_EQ(a.parameters(), b.parameters());
}

// Without a plan temporaries come from a caching allocator: the same bits, and memory is held that a plan does without.
TEST_F(GpuStep, UnplannedMemoryChangesNoBit) {
  TrainConfig with = config("bf16-stochastic"), without = with;
  without.run.planned_memory = false;
  Rig a(with, gpu_.get()), b(without, gpu_.get());
  EXPECT_TRUE(a.step.planned());
  EXPECT_FALSE(b.step.planned());
  const auto x = run(a, 2), y = run(b, 2);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(x[i].loss.loss, y[i].loss.loss) << i;
  EXPECT_EQ(a.parameters(), b.parameters());
  EXPECT_GE(b.step.arena_bytes(), size_t{2} << 20);
  for (Rig* rig : {&a, &b}) rig->step.evaluate(some_batch(50, 4));
  EXPECT_EQ(a.step.evaluated().loss, b.step.evaluated().loss);
  Rig cpu(config(), nullptr), cpu_without(
                                  [&] {
                                    TrainConfig c = config();
                                    c.run.planned_memory = false;
                                    return c;
                                  }(),
                                  nullptr);
  run(cpu, 2), run(cpu_without, 2);
  EXPECT_EQ(cpu.parameters(), cpu_without.parameters());
}

// Padding that is really computed: the same losses and gradients, more tokens.
TEST_F(GpuStep, PaddedBatchesHaveTheSameLosses) {
  TrainConfig packed = config();
  packed.model.dropout = packed.model.attention_dropout = packed.model.activation_dropout = 0;
  TrainConfig padded = packed;
  padded.run.packed = false;
  for (Gpu* const device : {gpu_.get(), static_cast<Gpu*>(nullptr)}) {
    SCOPED_TRACE(device ? "GPU" : "CPU");
    Rig a(packed, device), b(padded, device);
    // The second one's padding needs another bucket of tokens.
    for (int i = 0; i < 2; ++i) {
      const std::vector<Batch> batch = {some_batch(static_cast<unsigned>(80 + i), i == 1 ? 15 : 4)};
      const StepResult expected = a.update(i, batch), got = b.update(i, batch);
      EXPECT_NEAR(got.loss.loss, expected.loss.loss, 1e-5 * expected.loss.loss) << i;
      EXPECT_NEAR(got.loss.nll, expected.loss.nll, 1e-5 * expected.loss.nll) << i;
      EXPECT_EQ(got.loss.tokens, expected.loss.tokens);
      EXPECT_NEAR(got.grad_norm, expected.grad_norm, 1e-4 * expected.grad_norm) << i;
      if (i > 0) continue;
      for (const auto& [difference, name] : a.gradient_differences(b)) {
        if (name.ends_with("k_proj.bias")) continue;  // zero but for rounding
        EXPECT_LT(difference, 1e-4) << name;
      }
    }
    for (Rig* rig : {&a, &b}) rig->step.evaluate(some_batch(50, 4));
    const Loss x = a.step.evaluated(), y = b.step.evaluated();
    EXPECT_NEAR(y.nll, x.nll, 1e-3 * x.nll);
    EXPECT_EQ(y.tokens, x.tokens);
  }
}

TEST(PadBatch, FillsEverySentenceUpToTheLongest) {
  Batch batch;
  batch.source_ids = {1, 2, 3, 4}, batch.source_offsets = {0, 1, 4};
  batch.target_ids = {9, 5, 9}, batch.labels = {5, 6, 7}, batch.target_offsets = {0, 2, 3};
  batch.sentence_index = {0, 1};
  Batch padded;
  for (int again = 0; again < 2; ++again) pad_batch(batch, 9, &padded);
  EXPECT_EQ(padded.source_ids, (std::vector<int32_t>{1, 9, 9, 2, 3, 4}));
  EXPECT_EQ(padded.source_offsets, (std::vector<int32_t>{0, 1, 3, 6, 6}));
  EXPECT_EQ(padded.target_ids, (std::vector<int32_t>{9, 5, 9, 9}));
  EXPECT_EQ(padded.labels, (std::vector<int32_t>{5, 6, 7, -1}));
  EXPECT_EQ(padded.target_offsets, (std::vector<int32_t>{0, 2, 2, 3, 4}));
  const BatchSize size = padded_size(TrainingStep::batch_size(batch));
  EXPECT_EQ(size, (BatchSize{6, 4, 4, 3, 2}));
}

// A launch a tensor over fp32 copies: the bits of one pass over everything.
TEST_F(GpuStep, UpdatesTensorByTensor) {
  for (const char* precision : {"fp32", "bf16-master"}) {
    SCOPED_TRACE(precision);
    TrainConfig whole = config(precision), apart = whole;
    apart.training.trainer = "per_tensor";
    apart.training.ema_decay = whole.training.ema_decay = 0.9;
    Rig a(whole, gpu_.get()), b(apart, gpu_.get());
    const auto x = run(a, 2), y = run(b, 2);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(x[i].loss.loss, y[i].loss.loss) << i;
    EXPECT_EQ(a.parameters(), b.parameters());
    const auto elements = static_cast<size_t>(a.model.workspace().layout().elements());
    EXPECT_EQ(b.step.extra_bytes() - a.step.extra_bytes(), std::string_view(precision) == "fp32" ? 0 : 4 * elements);
  }
}

TEST_F(GpuStep, EveryPrecisionLearns) {
  Rig reference(config(), gpu_.get());
  const auto expected = run(reference, 2);
  for (const char* precision : {"bf16-master", "bf16-stochastic", "bf16-residual", "fp16-master", "fp16-stochastic"}) {
    SCOPED_TRACE(precision);
    Rig rig(config(precision), gpu_.get());
    const auto got = run(rig, 2);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(got[i].finite);
      EXPECT_NEAR(got[i].loss.loss, expected[i].loss.loss, 0.02 * expected[i].loss.loss);
      EXPECT_NEAR(got[i].grad_norm, expected[i].grad_norm, 0.1 * expected[i].grad_norm);
    }
  }
}

TEST_F(GpuStep, AccumulatesAsTheCpuDoes) {
  TrainConfig c = config();
  c.training.accumulate = 2, c.training.criterion_rows = 256;
  Rig cpu(c, nullptr), gpu(c, gpu_.get());
  const auto expected = run(cpu, 3, 2), got = run(gpu, 3, 2);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(got[i].loss.loss, expected[i].loss.loss, 1e-4 * expected[i].loss.loss);
    EXPECT_EQ(got[i].loss.tokens, expected[i].loss.tokens);
    EXPECT_NEAR(got[i].grad_norm, expected[i].grad_norm, 1e-3 * expected[i].grad_norm);
  }
}

// A sublayer's end and the norm behind it in one launch or in two: but for the order in which a bias' gradient is
// added, the same.
TEST_F(GpuStep, FusedNormsHaveTheResultsOfTwoLaunches) {
  TrainConfig c = config();
  Rig fused(c, gpu_.get());
  c.run.fused_norm = false;
  Rig apart(c, gpu_.get());
  const auto x = run(fused, 2), y = run(apart, 2);
  EXPECT_EQ(x[0].loss.loss, y[0].loss.loss);
  EXPECT_NEAR(x[1].loss.loss, y[1].loss.loss, 1e-5 * y[1].loss.loss);
  for (const auto& [difference, name] : fused.gradient_differences(apart)) {
    if (!name.ends_with("k_proj.bias")) {
      EXPECT_LT(difference, 1e-3) << name;  // those are zero but for rounding
    }
  }
  EXPECT_EQ(fused.step.context().used("bias_dropout_residual_norm_backward"), "xhat_1");
  EXPECT_EQ(apart.step.context().used("bias_dropout_residual_norm_backward"), "apart");
}

TEST_F(GpuStep, RecomputesTheSameBits) {
  TrainConfig c = config("bf16-master");
  Rig kept(c, gpu_.get());
  run(kept, 2);
  for (const char* level : {"activations", "layer"}) {
    c.training.recompute = level;
    Rig again(c, gpu_.get());
    run(again, 2);
    EXPECT_EQ(again.parameters(), kept.parameters()) << level;
    EXPECT_LT(again.step.arena_bytes(), kept.step.arena_bytes()) << level;
  }
}

TEST_F(GpuStep, LossScaleFallsUntilTheGradientFits) {
  TrainConfig c = config("fp16-master");
  c.training.loss_scale = 16777216;
  Rig rig(c, gpu_.get());
  const auto results = run(rig, 8);
  EXPECT_FALSE(results[0].finite);
  EXPECT_EQ(results[0].loss_scale, 8388608);
  EXPECT_TRUE(results.back().finite);
  EXPECT_GT(results.back().updates, 0);
  EXPECT_LT(results.back().updates, 8);
}

TEST_F(GpuStep, LearningRateFollowsUpdatesNotAttempts) {
  TrainConfig skipping = config("fp16-master"), plain = skipping;
  skipping.training.loss_scale = 16777216;
  Rig a(skipping, gpu_.get()), b(plain, gpu_.get());
  int64_t made = 0;
  for (int64_t i = 0; made < 1; ++i) made = a.update(i, {some_batch(5, 3)}).updates;
  b.update(0, {some_batch(5, 3)});
  // Both made their first update, at the first rate, from the same batch (dropout differs by the attempt).
  const auto before = Rig(plain, gpu_.get()).parameters(), x = a.parameters(), y = b.parameters();
  double moved_a = 0, moved_b = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    moved_a = std::max(moved_a, static_cast<double>(std::abs(x[i] - before[i])));
    moved_b = std::max(moved_b, static_cast<double>(std::abs(y[i] - before[i])));
  }
  EXPECT_NEAR(moved_a, 1e-3, 2e-5);
  EXPECT_NEAR(moved_b, 1e-3, 2e-5);
}

TEST_F(GpuStep, EvaluatesAndAverages) {
  TrainConfig c = config();
  c.training.ema_decay = 0.9;
  Rig cpu(c, nullptr), gpu(c, gpu_.get());
  run(cpu, 3), run(gpu, 3);
  for (const bool average : {false, true}) {
    for (Rig* rig : {&cpu, &gpu}) {
      if (average) rig->step.exchange_ema(true);
      rig->step.evaluate(some_batch(50, 4));
      rig->step.evaluate(some_batch(51, 5));
    }
    const Loss a = cpu.step.evaluated(), b = gpu.step.evaluated();
    EXPECT_NEAR(a.nll, b.nll, 2e-4 * a.nll) << average;
    EXPECT_EQ(a.tokens, b.tokens);
    if (average)
      for (Rig* rig : {&cpu, &gpu}) rig->step.exchange_ema(false);
  }
}

// The whole trainer: the losses of the CPU, and the same bits when it was interrupted.
TEST_F(GpuStep, TrainsAndResumesExactly) {
  const TestFolder folder("frit-gpu-train");
  write_corpus(folder.path(), "train", 60, 1);
  write_corpus(folder.path(), "valid", 8, 2);
  const auto config = [&](const std::string& run, const std::string& device) {
    TrainConfig c = tiny_config(folder.path(), run);
    c.model.d_model = 32, c.model.heads = 1;
    c.training.stop_after = "10u", c.training.valid_every = "5u", c.training.log_every = "5u";
    c.training.save_every = "5u", c.training.batch_tokens = 128, c.training.ema_decay = 0.9;
    c.training.precision = "fp32";  // a GPU's default is another
    c.run.device = device;
    c.validation.bleu = true, c.validation.beam = 2, c.validation.max_sentences = c.validation.samples = 3;
    return c;
  };
  const std::string device = built_with_cuda() ? "cuda" : "simulator";
  const auto translations = [&](const std::string& run) {
    std::vector<std::string> found;
    std::ifstream in(folder.path() / run / "metrics.jsonl");
    for (std::string line; std::getline(in, line);) {
      const auto entry = nlohmann::json::parse(line);
      if (entry.value("kind", "") == "sample") found.push_back(entry["hypothesis"]);
    }
    return found;
  };
  const TrainResult cpu = Trainer(config("cpu", "cpu")).run(), whole = Trainer(config("whole", device)).run();
  ASSERT_TRUE(cpu.loss && whole.loss);
  EXPECT_NEAR(*whole.loss, *cpu.loss, 2e-4 * *cpu.loss);
  EXPECT_EQ(whole.target_tokens, cpu.target_tokens);
  // What is translated at each validation, on the GPU and on the CPU.
  ASSERT_TRUE(cpu.bleu && whole.bleu);
  EXPECT_EQ(*cpu.bleu, *whole.bleu);
  EXPECT_EQ(translations("cpu").size(), 6u);
  EXPECT_EQ(translations("cpu"), translations("whole"));
  int asked = 0;
  TrainerOutput output;
  output.stop_requested = [&] { return ++asked > 12; };
  EXPECT_EQ(Trainer(config("parts", device), output).run().end, TrainEnd::kInterrupted);
  const TrainResult parts = Trainer(config("parts", device)).run();
  EXPECT_EQ(parts.updates, 10);
  EXPECT_EQ(*parts.loss, *whole.loss);
}

// A run that goes on uses the attention it began with, whatever a clock would say now; so does a new run that finds its
// choices in the common file.
TEST_F(GpuStep, ResumesWithTheAttentionItBeganWith) {
  const TestFolder folder("frit-gpu-attention");
  write_corpus(folder.path(), "train", 40, 1);
  const char* before = std::getenv("XDG_CACHE_HOME");
  const std::string kept = before ? before : "";
  ::setenv("XDG_CACHE_HOME", (folder.path() / "cache").c_str(), 1);
  const auto config = [&](const std::string& run, const char* updates) {
    TrainConfig c = tiny_config(folder.path(), run);
    c.model.d_model = 32, c.model.heads = 1;
    c.data.valid_source = c.data.valid_target = "";
    c.training.stop_after = updates, c.training.valid_every = "1e", c.training.save_every = "2u";
    c.run.device = built_with_cuda() ? "cuda" : "simulator";
    return c;
  };
  const auto final_weights = [&](const std::string& run) {
    std::ifstream in(folder.path() / run / "model" / "model.safetensors", std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  int asked = 0;
  TrainerHooks slow_short, fast_short;
  slow_short.attention_timer = [&](const AttentionShape&, std::string_view name) {
    return ++asked, name == "short" ? 20.0 : 10.0;
  };
  fast_short.attention_timer = [&](const AttentionShape&, std::string_view name) {
    return ++asked, name == "short" ? 10.0 : 20.0;
  };
  Trainer(config("parts", "2u"), {}, slow_short).run();
  EXPECT_GE(asked, 2);
  asked = 0;
  Trainer(config("parts", "4u"), {}, fast_short).run();  // goes on
  EXPECT_EQ(asked, 0);
  Trainer(config("whole", "4u"), {}, fast_short).run();  // finds the common file
  // On a GPU, where the library takes a second to be asked, the first run's time was over before the last kinds.
  if (!built_with_cuda()) {
    EXPECT_EQ(asked, 0);
  }
  EXPECT_EQ(final_weights("parts"), final_weights("whole"));
  std::filesystem::remove_all(folder.path() / "cache");
  Trainer(config("other", "4u"), {}, fast_short).run();
  EXPECT_GE(asked, 2);
  EXPECT_NE(final_weights("other"), final_weights("whole"));  // rounding tells the implementations apart
  if (before)
    ::setenv("XDG_CACHE_HOME", kept.c_str(), 1);
  else
    ::unsetenv("XDG_CACHE_HOME");
}

// Checkpoints, validation and the final model in every other precision; the numbers of a run in two parts.
TEST_F(GpuStep, TrainsInEveryPrecision) {
  const TestFolder folder("frit-gpu-precisions");
  write_corpus(folder.path(), "train", 40, 1);
  write_corpus(folder.path(), "valid", 6, 2);
  for (const char* precision : {"bf16-master", "bf16-stochastic", "bf16-residual", "fp16-master", "fp16-stochastic"}) {
    SCOPED_TRACE(precision);
    const auto config = [&](const char* updates) {
      TrainConfig c = tiny_config(folder.path(), precision);
      c.model.d_model = 32, c.model.heads = 1;
      c.training.precision = precision;
      c.training.stop_after = updates, c.training.valid_every = "2u", c.training.save_every = "2u";
      c.run.device = built_with_cuda() ? "cuda" : "simulator";
      return c;
    };
    const TrainResult first = Trainer(config("2u")).run(), second = Trainer(config("4u")).run();
    ASSERT_TRUE(first.loss && second.loss);
    EXPECT_EQ(second.updates, 4);
    EXPECT_LT(*second.loss, *first.loss + 0.5);
    EXPECT_TRUE(std::filesystem::exists(std::filesystem::path(second.model_directory) / "model.safetensors"));
  }
}

}  // namespace
}  // namespace frit
