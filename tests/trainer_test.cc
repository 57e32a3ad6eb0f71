// How a training ends and what it refuses: early stopping, time limits, a directory in use, changed configurations,
// weights to start from, losses and gradients that are not finite, batches larger than planned, forced attention.
#include "frit/train/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "frit/core/error.h"
#include "frit/memory/workspace.h"
#include "frit/train/checkpoint_store.h"
#include "frit/train/metrics.h"
#include "frit/train/prepare.h"
#include "frit/train/step.h"
#include "tests/training.h"

namespace frit {
namespace {

namespace fs = std::filesystem;

// What the error of `action` says; "" if there was none.
template <typename Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

// Messages of a run's events, one a line.
std::string events(const std::string& run) {
  std::string text;
  for (const MetricsEntry& entry : read_metrics(fs::path(run) / "metrics.jsonl").entries)
    if (entry.kind == MetricsKind::kEvent) text += entry.message + "\n";
  return text;
}

// Every number of every checkpoint that a run holds is finite.
void expect_finite_checkpoints(const std::string& run) {
  const auto all = CheckpointStore(fs::path(run) / "checkpoints").list();
  EXPECT_FALSE(all.empty());
  for (const CheckpointInfo& checkpoint : all)
    for (const char* name : {"parameters", "moment1", "moment2"}) {
      const std::string bytes = read_blob(checkpoint, name);
      std::vector<float> values(bytes.size() / sizeof(float));
      std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(values.data()));
      EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); }))
          << name << " of step " << checkpoint.step;
    }
}

class TrainerTest : public testing::Test {
 protected:
  void SetUp() override {
    write_corpus(folder_.path(), "train", 120, 1);
    write_corpus(folder_.path(), "valid", 20, 2);
  }
  TrainConfig config(const std::string& run) const { return tiny_config(folder_.path(), run); }
  TestFolder folder_{"frit-trainer"};
};

TEST_F(TrainerTest, StopsEarlyWithoutImprovement) {
  TrainConfig c = config("early");
  c.training.patience = 2, c.training.min_delta = 0.5;
  c.training.learning_rate = 1e-9;
  c.training.stop_after = "100u";
  const TrainResult result = Trainer(c).run();
  EXPECT_EQ(result.end, TrainEnd::kEarlyStopped);
  EXPECT_EQ(result.updates, 21);  // the first validation is the best, two more bring nothing
  EXPECT_NE(events(c.run.directory).find("Early stopping"), std::string::npos);
  EXPECT_TRUE(fs::exists(fs::path(result.model_directory) / "model.safetensors"));
}

TEST_F(TrainerTest, StopsAfterSeconds) {
  TrainConfig c = config("seconds");
  c.training.stop_after = "1000000u", c.training.stop_after_seconds = 0.5;
  const TrainResult result = Trainer(c).run();
  EXPECT_EQ(result.end, TrainEnd::kFinished);
  EXPECT_GE(result.updates, 1);
  EXPECT_LT(result.updates, 1000000);
  EXPECT_GE(result.seconds, 0.5);
  EXPECT_TRUE(fs::exists(fs::path(result.model_directory) / "model.safetensors"));
}

TEST_F(TrainerTest, ACosineThatSecondsCutOffIsReported) {
  TrainConfig c = config("cosine");
  c.training.schedule = "cosine", c.training.warmup = "1u", c.training.stop_after = "30u";
  const auto log_of = [](const TrainConfig& config) {
    std::ostringstream log;
    TrainerOutput output;
    output.log = &log;
    Trainer(config, output).run();
    return log.str();
  };
  c.training.stop_after_seconds = 1000;
  const std::string whole = log_of(c);
  EXPECT_EQ(whole.find("was cut off"), std::string::npos) << whole;
  c.run.directory += "-cut", c.training.stop_after = "1000000u", c.training.stop_after_seconds = 0.5;
  const std::string cut = log_of(c);
  EXPECT_NE(cut.find("of 1,000,000: the cosine schedule was cut off at a learning rate of 0.003, above its end, 0"),
            std::string::npos)
      << cut;
}

TEST_F(TrainerTest, StopsBetweenChunksOfTokenising) {
  TrainConfig c = config("stopped");
  c.training.stop_after = "3u";
  std::ostringstream log;
  TrainerOutput output;
  output.log = &log;
  // While the tokenizer is trained stopping has to wait, which is said; then it is done.
  output.stop_requested = [] { return true; };
  EXPECT_EQ(Trainer(c, output).run().end, TrainEnd::kInterrupted);
  const std::string waited = log.str();
  const size_t wait = waited.find("Stopping once the tokenizer is trained"),
               done = waited.find("target tokens, trained");
  EXPECT_NE(wait, std::string::npos) << waited;
  EXPECT_NE(done, std::string::npos) << waited;
  EXPECT_LT(wait, done);
  EXPECT_NE(waited.find("Stopped while preparing"), std::string::npos) << waited;
  // The tokenizer stays. Asked once it is ready, then between chunks: the second time in the text.
  int asked = 0;
  output.stop_requested = [&] { return ++asked == 2; };
  EXPECT_EQ(Trainer(c, output).run().end, TrainEnd::kInterrupted);
  EXPECT_EQ(asked, 2);
  EXPECT_TRUE(fs::is_empty(fs::path(c.run.directory) / "data"));
  output.stop_requested = {};
  EXPECT_EQ(Trainer(c, output).run().updates, 3);
}

TEST_F(TrainerTest, SaysBeforeTheFirstStepWhatTransformersCannotLoad) {
  TrainConfig c = config("pre");
  c.training.stop_after = "1u", c.model.norm = "pre";
  std::ostringstream log;
  TrainerOutput output;
  output.log = &log;
  size_t said = std::string::npos;
  TrainerHooks hooks;
  hooks.before_update = [&](int64_t, Workspace&) { said = log.str().find("transformers cannot load this model"); };
  Trainer(c, output, hooks).run();
  EXPECT_NE(said, std::string::npos) << log.str();
}

TEST_F(TrainerTest, RefusesASearchThatTheModelCannotFollowBeforeTraining) {
  TrainConfig first = config("search");
  first.training.stop_after = "1u";
  const std::string model = Trainer(first).run().model_directory;
  TrainConfig c = config("search-beam");
  c.model.init_from = model;  // its vocabulary of 64 shows late
  c.validation.bleu = true, c.validation.beam = 65;
  TrainerHooks hooks;
  hooks.before_update = [](int64_t, Workspace&) { FAIL() << "trained"; };
  const std::string said = error_of([&] { Trainer(c, {}, hooks).run(); });
  EXPECT_NE(said.find("beam is 65, expected 1 to 64"), std::string::npos) << said;
}

TEST_F(TrainerTest, RefusesADirectoryInUse) {
  const TrainConfig c = config("used");
  std::string said;
  TrainerHooks hooks;
  hooks.after_update = [&](int64_t updates) {
    if (updates == 1) said = error_of([&] { Trainer(c).run(); });
  };
  EXPECT_EQ(Trainer(c, {}, hooks).run().updates, 30);
  EXPECT_NE(said.find("another training uses " + c.run.directory), std::string::npos) << said;
}

TEST_F(TrainerTest, RefusesToGoOnWithChangedKeysByName) {
  TrainConfig c = config("changed");
  c.training.stop_after = "6u";
  EXPECT_EQ(Trainer(c).run().updates, 6);
  TrainConfig other = c;
  other.training.learning_rate = 7e-3, other.model.ffn = 48;
  const std::string said = error_of([&] { Trainer(other).run(); });
  EXPECT_NE(said.find("training.learning_rate"), std::string::npos) << said;
  EXPECT_NE(said.find("0.007"), std::string::npos) << said;
  EXPECT_NE(said.find("model.ffn"), std::string::npos) << said;
  // What says when to stop and to save may change.
  c.training.stop_after = "12u", c.training.save_every = "5u", c.training.log_every = "2u";
  EXPECT_EQ(Trainer(c).run().updates, 12);
}

TEST_F(TrainerTest, RefusesToGoOnWithoutItsTokenizer) {
  TrainConfig c = config("bare");
  c.training.stop_after = "2u", c.training.save_every = "2u";
  Trainer(c).run();
  fs::remove_all(fs::path(c.run.directory) / "tokenizer");
  c.training.stop_after = "4u";
  const std::string said = error_of([&] { Trainer(c).run(); });
  EXPECT_NE(said.find("has checkpoints, but no tokenizer in"), std::string::npos) << said;
}

TEST_F(TrainerTest, StartsFromTheWeightsOfAModel) {
  TrainConfig first = config("first");
  first.training.stop_after = "10u";
  const std::string model = Trainer(first).run().model_directory;
  TrainConfig second = config("second");
  second.model.init_from = model;
  second.training.stop_after = "1u";
  const auto saved = Transformer::load(model, {});
  int64_t different = -1;
  TrainerHooks hooks;
  hooks.before_update = [&](int64_t attempt, Workspace& w) {
    if (attempt != 0) return;
    different = 0;
    std::vector<float> ours, theirs;
    for (const auto& slice : w.layout().slices()) {
      const auto count = static_cast<size_t>(slice.shape.numel());
      ours.resize(count), theirs.resize(count);
      w.get(slice.name, ours.data(), slice.shape.numel());
      saved->workspace().get(slice.name, theirs.data(), slice.shape.numel());
      if (ours != theirs) ++different;
    }
  };
  EXPECT_EQ(Trainer(second, {}, hooks).run().updates, 1);
  EXPECT_EQ(different, 0);
  second.run.directory += "-none", second.model.init_from = (folder_.path() / "none").string();
  EXPECT_NE(error_of([&] { Trainer(second).run(); }).find("none"), std::string::npos);
}

TEST_F(TrainerTest, GradientsThatAreNotFiniteAreSkippedAndNeverSaved) {
  TrainConfig c = config("gradients");
  c.training.max_not_finite = 3;
  TrainerHooks hooks;
  hooks.before_update = [](int64_t attempt, Workspace& w) {
    if (attempt == 4) w.gradients().data<float>()[7] = INFINITY;
    if (attempt == 5 || attempt >= 20) w.gradients().data<float>()[0] = NAN;
  };
  const std::string said = error_of([&] { Trainer(c, {}, hooks).run(); });
  EXPECT_NE(said.find("max_not_finite"), std::string::npos) << said;
  expect_finite_checkpoints(c.run.directory);
  EXPECT_NE(events(c.run.directory).find("Update 5 skipped: the gradient is not finite"), std::string::npos);
}

TEST_F(TrainerTest, WeightsThatAreNotFiniteAreNeverSaved) {
  // Not finite only after the update: the next save refuses.
  TrainConfig c = config("weights");
  TrainerHooks hooks;
  hooks.before_update = [](int64_t attempt, Workspace& w) {
    if (attempt == 8) w.parameters().data<float>()[0] = INFINITY;  // update 9 ends in a periodic save
  };
  std::string said = error_of([&] { Trainer(c, {}, hooks).run(); });
  EXPECT_NE(said.find("not finite after update 9: no checkpoint is written"), std::string::npos) << said;
  expect_finite_checkpoints(c.run.directory);
  EXPECT_EQ(CheckpointStore(fs::path(c.run.directory) / "checkpoints").list().back().step, 7);
  // A learning rate beyond all reason: whatever happens, what is saved is finite.
  TrainConfig wild = config("wild");
  wild.training.learning_rate = 1e38, wild.training.warmup = "0u", wild.training.max_not_finite = 3;
  wild.training.optimizer = "sgd", wild.training.clip_norm = 0, wild.training.save_every = "1u";
  said = error_of([&] { Trainer(wild).run(); });
  EXPECT_NE(said.find("finite"), std::string::npos) << said;
  for (const CheckpointInfo& checkpoint : CheckpointStore(fs::path(wild.run.directory) / "checkpoints").list()) {
    const std::string bytes = read_blob(checkpoint, "parameters");
    for (size_t i = 0; i < bytes.size() / sizeof(float); ++i) {
      float value;
      std::copy_n(bytes.data() + i * sizeof(float), sizeof(float), reinterpret_cast<char*>(&value));
      ASSERT_TRUE(std::isfinite(value)) << "element " << i << " of step " << checkpoint.step;
    }
  }
}

TEST_F(TrainerTest, MaterialisedAttentionTrainsUnplannedToTheSameLoss) {
  TrainConfig c = config("flash");
  c.training.stop_after = "7u";
  const TrainResult flash = Trainer(c).run();
  c.run.directory += "-not", c.run.attention = "materialised";
  std::ostringstream log;
  TrainerOutput output;
  output.log = &log;
  const TrainResult materialised = Trainer(c, output).run();
  EXPECT_EQ(materialised.updates, 7);
  EXPECT_NEAR(*materialised.loss, *flash.loss, 1e-3 * *flash.loss);
  EXPECT_NE(log.str().find("temporaries from the heap"), std::string::npos) << log.str();
}

// `sentences` of 10 source and 10 target tokens.
Batch some_batch(int64_t sentences) {
  Batch batch;
  batch.source_offsets = batch.target_offsets = {0};
  for (int64_t s = 0; s < sentences; ++s) {
    for (int32_t i = 0; i < 10; ++i) {
      batch.source_ids.push_back(3 + (i + static_cast<int32_t>(s)) % 20);
      batch.labels.push_back(3 + i);
      batch.target_ids.push_back(i == 0 ? 0 : 2 + i);
    }
    batch.source_offsets.push_back(static_cast<int32_t>(batch.source_ids.size()));
    batch.target_offsets.push_back(static_cast<int32_t>(batch.labels.size()));
    batch.sentence_index.push_back(s);
  }
  return batch;
}

TEST_F(TrainerTest, TheArenaGrowsForABatchLargerThanPlanned) {
  const TrainConfig c = config("grows");
  ThreadPool pool(2);
  Transformer model(model_config(c), training_options(c));
  const auto loss_of = [&](TrainingStep& step, const Batch& batch) {
    model.initialise(1);
    const double rates[] = {1e-3};
    step.begin(0, batch.target_tokens(), rates, 1);
    step.forward_backward(batch, 0);
    step.update();
    return step.result(true)->loss.loss;
  };
  const Batch small = some_batch(10), large = some_batch(90);
  TrainingStep planned(model, pool, step_settings(c, model.workspace()));
  planned.plan(TrainingStep::Kind::kTrain, {900, 900});
  planned.reserve();
  planned.on_grow = [](size_t, size_t) { FAIL() << "it was planned for"; };
  const double expected = loss_of(planned, large);

  TrainingStep step(model, pool, step_settings(c, model.workspace()));
  step.plan(TrainingStep::Kind::kTrain, {100, 100});
  step.reserve();
  int grown = 0;
  step.on_grow = [&](size_t before, size_t after) {
    ++grown;
    EXPECT_GT(after, before);
    EXPECT_EQ(after, planned.arena_bytes());
  };
  loss_of(step, small);
  EXPECT_EQ(grown, 0);
  EXPECT_EQ(loss_of(step, large), expected);
  EXPECT_EQ(loss_of(step, large), expected);
  EXPECT_EQ(grown, 1);
}

}  // namespace
}  // namespace frit
