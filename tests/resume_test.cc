// Stopping anywhere and going on gives the bits of never having stopped: by kill -9 at random moments and in the middle
// of writing a checkpoint, by SIGTERM and by SIGINT.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <iostream>
#include <random>
#include <thread>

#include "frit/core/file.h"
#include "frit/memory/workspace.h"
#include "frit/train/checkpoint_store.h"
#include "frit/train/metrics.h"
#include "frit/train/run_state.h"
#include "frit/train/trainer.h"
#include "tests/training.h"

namespace frit {
namespace {

namespace fs = std::filesystem;

volatile std::sig_atomic_t stop_signal = 0;

// How a child process is to be interrupted.
struct Interruption {
  int signal = 0;               // 0: not at all
  int64_t updates = 0;          // after this many updates of this process,
  int64_t microseconds = 0;     // and this long after them
  int64_t disk_operation = -1;  // instead: SIGKILL before the n-th change of the disk by a checkpoint
};

// What a child tells: memory that parent and children share, so that it outlives kill -9.
struct Told {
  std::atomic<bool> over;  // training has ended by itself: a signal from now on hits nothing
};
static_assert(std::atomic<bool>::is_always_lock_free);

Told& told() {
  static auto* const memory =
      static_cast<Told*>(mmap(nullptr, sizeof(Told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  return *memory;
}

// Trains in a process of its own. Returns what waitpid says.
int train_in_child(const TrainConfig& config, const Interruption& interruption) {
  told().over = false;
  const pid_t child = fork();
  if (child == 0) {
    stop_signal = 0;
    for (const int s : {SIGINT, SIGTERM}) std::signal(s, [](int number) { stop_signal = number; });
    std::atomic<int64_t> updates{0};
    int64_t operations = 0;
    TrainerHooks hooks;
    hooks.after_update = [&](int64_t) { ++updates; };
    hooks.checkpoint_operation = [&](std::string_view) {
      if (operations++ == interruption.disk_operation) kill(getpid(), SIGKILL);
    };
    if (interruption.signal != 0)
      std::thread([&] {
        while (updates < interruption.updates) std::this_thread::sleep_for(std::chrono::microseconds(100));
        std::this_thread::sleep_for(std::chrono::microseconds(interruption.microseconds));
        kill(getpid(), interruption.signal);
      }).detach();
    int code = 9;
    try {
      Trainer trainer(config, {.stop_requested = [] { return stop_signal != 0; }}, hooks);
      const TrainResult result = trainer.run();
      told().over = true;
      code = result.end == TrainEnd::kInterrupted ? 2 : 0;
    } catch (const std::exception& e) {
      std::cerr << "child: " << e.what() << std::endl;
    }
    _exit(code);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

bool finished(int status) {
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Everything that training left must be the same but for times.
void expect_same_runs(const fs::path& a, const fs::path& b) {
  EXPECT_EQ(read_file(a / "model" / "model.safetensors"), read_file(b / "model" / "model.safetensors"));
  const auto one = CheckpointStore(a / "checkpoints").list(), other = CheckpointStore(b / "checkpoints").list();
  ASSERT_EQ(one.size(), other.size());
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(one[i].step, other[i].step);
    EXPECT_EQ(one[i].metric, other[i].metric);
    ASSERT_EQ(one[i].files.size(), other[i].files.size());
    for (const auto& file : one[i].files) {
      if (file.name == "config.toml" || file.name == "state.json") continue;
      EXPECT_TRUE(read_blob(one[i], file.name) == read_blob(other[i], file.name))
          << file.name << " of step " << one[i].step;
    }
    RunState x = RunState::from_json(read_blob(one[i], "state.json")),
             y = RunState::from_json(read_blob(other[i], "state.json"));
    x.seconds = y.seconds = x.window_seconds = y.window_seconds = 0;
    EXPECT_EQ(x.to_json(), y.to_json());
  }
  const auto lines = [](const fs::path& run) {
    std::vector<std::string> result;
    for (MetricsEntry entry : read_metrics(run / "metrics.jsonl").entries) {
      entry.time_s = 0, entry.tokens_per_s.reset();
      result.push_back(format_metrics(entry));
    }
    return result;
  };
  EXPECT_EQ(lines(a), lines(b));
}

// Interrupts runs at random moments until `hits` interruptions have landed in a training that was going on; each run is
// let finish and compared with one that was left alone.
void interrupt_and_compare(TrainConfig config, int hits, unsigned seed) {
  const fs::path base = config.run.directory;
  config.run.directory = base.string() + "-whole";
  ASSERT_TRUE(finished(train_in_child(config, {})));
  const fs::path whole = config.run.directory;
  std::mt19937 random(seed);
  int killed = 0, killed_while_saving = 0, stopped = 0, missed = 0, runs = 0;
  const auto landed = [&] { return killed + killed_while_saving + stopped; };
  while (landed() < hits) {
    ASSERT_LE(runs, 8) << "too few interruptions land: " << landed() << " of " << landed() + missed;
    config.run.directory = base.string() + "-interrupted-" + std::to_string(runs++);
    bool over = false;
    while (!over && landed() < hits) {
      Interruption interruption;
      const int kind = (landed() + missed) % 5;
      if (kind == 1 || kind == 3) {
        interruption.disk_operation = static_cast<int64_t>(random() % 24);
      } else {
        interruption.signal = kind == 2 ? SIGTERM : kind == 4 ? SIGINT : SIGKILL;
        interruption.updates = static_cast<int64_t>(random() % 4);
        interruption.microseconds = static_cast<int64_t>(random() % 20000);
      }
      const int status = train_in_child(config, interruption);
      if (WIFSIGNALED(status)) {
        ASSERT_EQ(WTERMSIG(status), SIGKILL);
        if (told().over)
          ++missed;  // between the end of training and that of the process
        else
          ++(interruption.disk_operation >= 0 ? killed_while_saving : killed);
      } else {
        ASSERT_TRUE(WIFEXITED(status));
        ASSERT_TRUE(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 2) << "the trainer failed when it went on";
        over = WEXITSTATUS(status) == 0;
        ++(over ? missed : stopped);
      }
    }
    if (!over) {
      ASSERT_TRUE(finished(train_in_child(config, {})));
    }
    expect_same_runs(whole, config.run.directory);
  }
  std::cout << "interruptions that hit a training: " << landed() << " (kill -9: " << killed
            << ", kill -9 while a checkpoint was written: " << killed_while_saving << ", SIGTERM or SIGINT: " << stopped
            << "); missed: " << missed << "; runs: " << runs << std::endl;
  EXPECT_GE(landed(), hits);
  EXPECT_GE(killed, hits / 10);
  EXPECT_GE(killed_while_saving, hits / 5);
  EXPECT_GE(stopped, hits / 5);
}

class ResumeTest : public testing::Test {
 protected:
  void SetUp() override {
    write_corpus(folder_.path(), "train", 120, 1);
    write_corpus(folder_.path(), "valid", 20, 2);
  }
  TestFolder folder_{"frit-resume"};
};

TEST_F(ResumeTest, TwentyRandomMomentsWithEverythingOn) {
  TrainConfig config = tiny_config(folder_.path(), "all");
  config.training.precision = "bf16-residual";
  config.training.accumulate = 2;
  config.training.ema_decay = 0.9;
  config.training.stop_after = "70u";
  config.data.subword_alpha = 0.1;
  interrupt_and_compare(config, 20, 1);
}

TEST_F(ResumeTest, EveryPrecision) {
  unsigned seed = 10;
  for (const char* precision : {"fp32", "bf16-master", "bf16-stochastic", "bf16-residual"}) {
    SCOPED_TRACE(precision);
    TrainConfig config = tiny_config(folder_.path(), precision);
    config.training.precision = precision;
    config.training.stop_after = "40u";
    config.training.optimizer = precision == std::string("bf16-master") ? "sgd" : "adamw";
    interrupt_and_compare(config, 5, ++seed);
  }
}

// Its temporaries depend on every sentence's length: no plan, the heap.
TEST_F(ResumeTest, MaterialisedAttention) {
  TrainConfig config = tiny_config(folder_.path(), "materialised");
  config.run.attention = "materialised";
  config.training.accumulate = 2;
  interrupt_and_compare(config, 3, 20);
}

TEST_F(ResumeTest, SkippedUpdatesAreRememberedAndChangeNothing) {
  TrainConfig config = tiny_config(folder_.path(), "skips");
  config.training.max_not_finite = 3;
  // Spoils the gradients of some attempts. Attempt 5 is the 6th; what follows it gets other batches and masks.
  const auto spoil = [](int64_t attempt, Workspace& w) {
    if (attempt == 5 || attempt == 6 || attempt == 17) w.gradients().data<float>()[3] = NAN;
  };
  const auto train = [&](const std::string& run, int64_t stop_at) {
    config.run.directory = (folder_.path() / run).string();
    int64_t attempts = 0;
    TrainerHooks hooks;
    hooks.before_update = [&](int64_t attempt, Workspace& w) {
      attempts = attempt + 1;
      spoil(attempt, w);
    };
    Trainer trainer(config, {.stop_requested = [&] { return attempts == stop_at; }}, hooks);
    return trainer.run();
  };
  const TrainResult whole = train("skips-whole", -1);
  EXPECT_EQ(whole.updates, 30);
  EXPECT_EQ(whole.skipped, 3);
  for (const int64_t stop : {6, 7, 20}) EXPECT_EQ(train("skips-parts", stop).end, TrainEnd::kInterrupted);
  const TrainResult parts = train("skips-parts", -1);
  EXPECT_EQ(parts.skipped, 3);
  expect_same_runs(folder_.path() / "skips-whole", folder_.path() / "skips-parts");
}

}  // namespace
}  // namespace frit
