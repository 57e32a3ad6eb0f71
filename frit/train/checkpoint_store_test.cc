#include "frit/train/checkpoint_store.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <random>
#include <set>

#include "frit/core/error.h"
#include "frit/core/file.h"

namespace frit {
namespace {

namespace fs = std::filesystem;

class CheckpointStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    // In memory where that is possible: a kill does not lose what the kernel holds, so a disk would only make the
    // hundreds of fsyncs here slow.
    const fs::path base = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : testing::TempDir();
    dir_ = base / ("frit_store_" + std::to_string(::getpid()));
    fs::remove_all(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::set<std::string> names() const {
    std::set<std::string> result;
    for (const auto& entry : fs::directory_iterator(dir_)) result.insert(entry.path().filename().string());
    return result;
  }
  fs::path dir_;
};

// Weights that only step and salt decide, so that a loaded checkpoint can be told right from wrong.
std::vector<float> weights(int64_t step, int salt = 0, size_t n = 3000) {
  std::vector<float> w(n);
  for (size_t i = 0; i < n; ++i)
    w[i] = static_cast<float>(step) + 0.001f * static_cast<float>(i) + static_cast<float>(salt) * 0.5f;
  return w;
}

CheckpointInfo save(CheckpointStore& store, int64_t step, std::optional<double> metric = std::nullopt, int salt = 0) {
  const auto w = weights(step, salt);
  const std::string state = "{\"step\":" + std::to_string(step) + "}";
  CheckpointBlob array = CheckpointBlob::array("weights", std::span(w).first(1000));
  array.pieces.push_back(std::as_bytes(std::span(w).subspan(1000)));
  const CheckpointBlob blobs[] = {array, CheckpointBlob::text("state.json", state), CheckpointBlob::text("empty", "")};
  return store.save(step, blobs, metric);
}

// Loads a checkpoint and checks all of it; the salt must be one of two.
void expect_whole(const CheckpointInfo& info) {
  std::vector<float> w(3000);
  read_blob(info, "weights", std::as_writable_bytes(std::span(w)));
  EXPECT_TRUE(w == weights(info.step, 0) || w == weights(info.step, 1));
  EXPECT_EQ(read_blob(info, "state.json"), "{\"step\":" + std::to_string(info.step) + "}");
  EXPECT_EQ(read_blob(info, "empty"), "");
}

std::vector<int64_t> steps(const CheckpointStore& store) {
  std::vector<int64_t> result;
  for (const auto& info : store.list()) result.push_back(info.step);
  return result;
}

void flip_byte(const fs::path& path, std::streamoff at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const char c = static_cast<char>(file.get());
  file.seekp(at);
  file.put(static_cast<char>(c ^ 1));
}

TEST_F(CheckpointStoreTest, WritesAndReads) {
  CheckpointStore store(dir_);
  EXPECT_FALSE(store.latest());
  EXPECT_FALSE(store.best());
  EXPECT_TRUE(store.recover().empty());
  const CheckpointInfo saved = save(store, 123, 4.5);
  EXPECT_EQ(saved.path, dir_ / "step-000123");
  EXPECT_EQ(names(), (std::set<std::string>{"step-000123"}));
  const auto latest = store.latest();
  ASSERT_TRUE(latest);
  EXPECT_EQ(latest->step, 123);
  EXPECT_EQ(latest->metric, 4.5);
  ASSERT_EQ(latest->files.size(), 3u);
  EXPECT_EQ(latest->files[0].size_bytes, 12000);
  expect_whole(*latest);
  expect_whole(store.at(123));
  EXPECT_THROW(store.at(124), Error);
  EXPECT_THROW(read_blob(*latest, "nothing"), Error);
  std::vector<std::byte> wrong(11999);
  EXPECT_THROW(read_blob(*latest, "weights", wrong), Error);
}

TEST_F(CheckpointStoreTest, NewestIsByNumberNotByName) {
  CheckpointStore store(dir_, {.keep_newest = 10});
  for (int64_t step : {999999, 1000000, 5}) save(store, step);
  EXPECT_EQ(steps(store), (std::vector<int64_t>{5, 999999, 1000000}));
  EXPECT_EQ(store.latest()->step, 1000000);
}

TEST_F(CheckpointStoreTest, KeepsNewestBestAndPeriodic) {
  CheckpointStore store(dir_, {.keep_newest = 2, .keep_best = true, .keep_every = 50});
  const double loss[] = {5, 4, 2, 3, 3, 2, 4, 5, 6, 7, 8};
  for (int i = 0; i <= 10; ++i) save(store, 10 * i, loss[i]);
  EXPECT_EQ(steps(store), (std::vector<int64_t>{0, 20, 50, 90, 100}));
  EXPECT_EQ(store.best()->step, 20);  // the earlier of the equal ones
  EXPECT_EQ(names().size(), 5u);
}

TEST_F(CheckpointStoreTest, BestHasADirection) {
  CheckpointStore store(dir_, {.keep_newest = 1, .higher_is_better = true});
  save(store, 1, 20.5);
  save(store, 2, 30.5);
  save(store, 3);
  save(store, 4, 25);
  EXPECT_EQ(steps(store), (std::vector<int64_t>{2, 4}));
  EXPECT_EQ(store.best()->step, 2);
}

TEST_F(CheckpointStoreTest, BestNotKeptWhenNotAsked) {
  CheckpointStore store(dir_, {.keep_newest = 1, .keep_best = false});
  save(store, 1, 1.0);
  save(store, 2, 2.0);
  EXPECT_EQ(steps(store), (std::vector<int64_t>{2}));
}

TEST_F(CheckpointStoreTest, DamageIsSkippedWithItsReason) {
  CheckpointStore store(dir_, {.keep_newest = 20});
  struct Damage {
    const char* reason;
    std::function<void(const fs::path&)> apply;
  };
  const Damage damages[] = {
      {"weights has a wrong checksum", [](const fs::path& p) { flip_byte(p / "weights", 7777); }},
      {"weights has 11999 bytes", [](const fs::path& p) { fs::resize_file(p / "weights", 11999); }},
      {"weights has 12001 bytes", [](const fs::path& p) { fs::resize_file(p / "weights", 12001); }},
      {"state.json is missing", [](const fs::path& p) { fs::remove(p / "state.json"); }},
      {"no readable manifest.json", [](const fs::path& p) { fs::remove(p / "manifest.json"); }},
      {"manifest.json is cut short", [](const fs::path& p) { fs::resize_file(p / "manifest.json", 100); }},
      {"manifest.json is cut short", [](const fs::path& p) { fs::resize_file(p / "manifest.json", 0); }},
      {"the folder's name says", [](const fs::path& p) { fs::rename(p, p.parent_path() / "step-000777"); }},
  };
  save(store, 100, 9.0);
  for (const Damage& damage : damages) {
    const CheckpointInfo info = save(store, 200, 1.0);
    damage.apply(info.path);
    for (const bool best : {false, true}) {
      std::vector<SkippedCheckpoint> skipped;
      const auto found = best ? store.best(&skipped) : store.latest(&skipped);
      ASSERT_TRUE(found) << damage.reason;
      EXPECT_EQ(found->step, 100);
      expect_whole(*found);
      ASSERT_EQ(skipped.size(), 1u) << damage.reason;
      EXPECT_NE(skipped[0].reason.find(damage.reason), std::string::npos) << skipped[0].reason;
    }
    if (fs::exists(info.path)) {
      EXPECT_THROW(store.at(200), Error);
    }
    fs::remove_all(dir_ / "step-000777");
    fs::remove_all(info.path);
  }
}

TEST_F(CheckpointStoreTest, EveryChangedManifestByteIsSeen) {
  CheckpointStore store(dir_);
  const CheckpointInfo info = save(store, 100, 9.0);
  const auto size = static_cast<std::streamoff>(fs::file_size(info.path / "manifest.json"));
  for (std::streamoff at = 0; at < size; ++at) {
    flip_byte(info.path / "manifest.json", at);
    const auto found = store.latest();
    // A change of white space or to an equal number leaves the content as it was; any other is refused.
    if (found) {
      EXPECT_EQ(found->metric, 9.0);
      EXPECT_EQ(found->step, 100);
      expect_whole(*found);
    }
    flip_byte(info.path / "manifest.json", at);
  }
  EXPECT_TRUE(store.latest());
}

TEST_F(CheckpointStoreTest, OtherFilesAreLeftAlone) {
  CheckpointStore store(dir_, {.keep_newest = 1});
  save(store, 1);
  fs::create_directories(dir_ / "step-abc");
  fs::create_directories(dir_ / "step-");
  fs::create_directories(dir_ / "step-5x");
  std::ofstream(dir_ / "notes.txt") << "mine";
  EXPECT_TRUE(store.recover().empty());
  save(store, 2);
  EXPECT_EQ(names(), (std::set<std::string>{"notes.txt", "step-", "step-000002", "step-5x", "step-abc"}));
}

TEST_F(CheckpointStoreTest, LeftoversAreCleaned) {
  CheckpointStore store(dir_);
  save(store, 1);
  fs::create_directories(dir_ / "tmp-step-000002");
  std::ofstream(dir_ / "tmp-step-000002" / "weights") << "half";
  fs::create_directories(dir_ / "tmp-delete-step-000000");
  EXPECT_EQ(store.latest()->step, 1);
  EXPECT_EQ(store.recover(), (std::vector<std::string>{"tmp-delete-step-000000", "tmp-step-000002"}));
  EXPECT_EQ(names(), (std::set<std::string>{"step-000001"}));
}

TEST_F(CheckpointStoreTest, DropAfterLeavesTheAbandonedLine) {
  CheckpointStore store(dir_, {.keep_newest = 10});
  for (int64_t step : {10, 20, 30, 40}) save(store, step);
  flip_byte(dir_ / "step-000040" / "weights", 5);
  EXPECT_THROW(store.drop_after(15), Error);
  EXPECT_THROW(store.drop_after(40), Error);  // damaged itself
  EXPECT_EQ(steps(store).size(), 4u);
  store.drop_after(20);
  EXPECT_EQ(steps(store), (std::vector<int64_t>{10, 20}));
  store.drop_after(0);
  EXPECT_TRUE(steps(store).empty());
}

// A newer checkpoint that is damaged inside must not make pruning remove the good one just written.
TEST_F(CheckpointStoreTest, PruningKeepsTheGoodOne) {
  CheckpointStore store(dir_, {.keep_newest = 1});
  save(store, 100);
  save(store, 200);
  save(store, 100);  // resumed at 100 ...
  flip_byte(dir_ / "step-000200" / "weights", 5);
  ASSERT_EQ(store.latest()->step, 100);
  save(store, 150);  // ... and went on without drop_after
  EXPECT_EQ(store.latest()->step, 150);
}

TEST_F(CheckpointStoreTest, BadArgumentsAreErrors) {
  EXPECT_THROW(CheckpointStore(dir_, {.keep_newest = 0}), std::invalid_argument);
  EXPECT_THROW(CheckpointStore(dir_, {.keep_every = -1}), std::invalid_argument);
  CheckpointStore store(dir_);
  EXPECT_THROW(save(store, -1), std::invalid_argument);
  EXPECT_THROW(save(store, 1, NAN), std::invalid_argument);
  for (const char* name : {"", "a/b", "..", "manifest.json"}) {
    const CheckpointBlob blob[] = {CheckpointBlob::text(name, "x")};
    EXPECT_THROW(store.save(1, blob), std::invalid_argument) << name;
  }
  const CheckpointBlob twice[] = {CheckpointBlob::text("a", "x"), CheckpointBlob::text("a", "y")};
  EXPECT_THROW(store.save(1, twice), std::invalid_argument);
  EXPECT_FALSE(fs::exists(dir_));
}

TEST_F(CheckpointStoreTest, DiskThatFailsLeavesTheOldOnes) {
  CheckpointStore store(dir_);
  save(store, 1);
  std::ofstream(dir_ / "tmp-step-000002") << "a file where a folder should go is removed first";
  save(store, 2);
  EXPECT_EQ(store.latest()->step, 2);
  EXPECT_THROW(CheckpointStore bad("/dev/null/x"); save(bad, 1), Error);
}

struct Crash {};

// Saves, crashing before each operation in turn, and checks after each crash that a good checkpoint is found: the one
// before or the new one, never less. Covers a new step, replacing a step, and pruning; then recovery itself.
TEST_F(CheckpointStoreTest, CrashBeforeAnyOperationLeavesALoadableLatest) {
  for (const bool replace : {false, true}) {
    int operations = 0;
    for (int crash_at = 1;; ++crash_at) {
      fs::remove_all(dir_);
      CheckpointStore before(dir_, {.keep_newest = 2});
      for (int64_t step : {10, 20, 30}) save(before, step, 1.0 + static_cast<double>(step));
      const int64_t step = replace ? 30 : 40;

      int count = 0;
      CheckpointOptions options{.keep_newest = 2};
      std::string last;
      options.before_operation = [&](std::string_view what) {
        last = what;
        if (++count == crash_at) throw Crash{};
      };
      CheckpointStore store(dir_, options);
      bool crashed = false;
      try {
        save(store, step, 100.0, 1);
      } catch (const Crash&) {
        crashed = true;
      }
      SCOPED_TRACE("crash before: " + last);
      CheckpointStore after(dir_, {.keep_newest = 2});
      const auto found = after.latest();
      ASSERT_TRUE(found);
      EXPECT_GE(found->step, 30);
      expect_whole(*found);
      const auto best = after.best();
      ASSERT_TRUE(best);
      EXPECT_EQ(best->step, 10);  // always kept as best

      // Recovery may crash as well, anywhere, and is simply run again.
      for (int crash_in_recovery = 1;; ++crash_in_recovery) {
        int n = 0;
        CheckpointOptions again{.keep_newest = 2};
        again.before_operation = [&](std::string_view) {
          if (++n == crash_in_recovery) throw Crash{};
        };
        bool recovered = true;
        try {
          CheckpointStore(dir_, again).recover();
        } catch (const Crash&) {
          recovered = false;
        }
        const auto still = after.latest();
        ASSERT_TRUE(still);
        EXPECT_EQ(still->step, found->step);
        expect_whole(*still);
        if (recovered) break;
      }
      for (const auto& name : names()) EXPECT_TRUE(name.starts_with("step-")) << name;
      save(after, 50, 60.0);
      EXPECT_EQ(steps(after).front(), 10);
      EXPECT_EQ(steps(after).back(), 50);
      if (!crashed) break;
      operations = crash_at;
    }
    EXPECT_GE(operations, replace ? 15 : 12);
  }
}

// Without recover() in between (a caller that forgot), saving over a crashed replacement works too.
TEST_F(CheckpointStoreTest, SaveSettlesAnInterruptedReplacement) {
  for (const char* where : {"rename into place", "clear tmp-delete-old-step-000030"}) {
    fs::remove_all(dir_);
    CheckpointStore before(dir_);
    save(before, 30, 1.0);
    CheckpointOptions options;
    options.before_operation = [&](std::string_view what) {
      if (what == where) throw Crash{};
    };
    CheckpointStore crashing(dir_, options);
    EXPECT_THROW(save(crashing, 30, 2.0, 1), Crash) << where;
    ASSERT_TRUE(fs::exists(dir_ / "old-step-000030"));
    EXPECT_EQ(before.latest()->step, 30);
    expect_whole(before.at(30));
    save(before, 30, 3.0);
    EXPECT_EQ(before.latest()->metric, 3.0);
    EXPECT_FALSE(fs::exists(dir_ / "old-step-000030"));
  }
}

TEST_F(CheckpointStoreTest, KilledAtRandomMomentsLeavesALoadableLatest) {
  std::mt19937 random(7);
  int64_t reached = 0;
  int mid_write = 0;
  for (int round = 0; round < 40; ++round) {
    int ready[2];
    ASSERT_EQ(::pipe(ready), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        CheckpointOptions options{.keep_newest = 2, .keep_every = 7};
        // One byte before each operation: the parent counts them, so that the kill lands somewhere in a save however
        // slow the machine is.
        options.before_operation = [&](std::string_view) {
          if (::write(ready[1], "x", 1) != 1) ::_exit(1);
        };
        CheckpointStore store(dir_, options);
        store.recover();
        const auto latest = store.latest();
        int64_t step = latest ? latest->step : 0;
        while (true) {
          if (step > 0 && step % 3 == 0) save(store, step, 1.0, 1);  // also replace what is there
          ++step;
          save(store, step, 1.0 / static_cast<double>(step));
        }
      } catch (...) {
        ::_exit(2);
      }
    }
    char c;
    for (uint32_t left = 1 + random() % 60; left > 0; --left) ASSERT_EQ(::read(ready[0], &c, 1), 1);
    ::usleep(static_cast<useconds_t>(random() % 200));
    ::kill(child, SIGKILL);
    ::close(ready[0]);
    ::close(ready[1]);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the writer failed by itself, exit " << WEXITSTATUS(status);
    for (const auto& name : fs::exists(dir_) ? names() : std::set<std::string>{})
      mid_write += !name.starts_with("step-");
    CheckpointStore store(dir_);
    std::vector<SkippedCheckpoint> skipped;
    const auto latest = store.latest(&skipped);
    EXPECT_TRUE(skipped.empty()) << skipped[0].path << ": " << skipped[0].reason;
    if (reached > 0) {
      ASSERT_TRUE(latest);
    }
    if (latest) {
      EXPECT_GE(latest->step, reached);
      reached = latest->step;
      expect_whole(*latest);
    }
  }
  EXPECT_GT(reached, 5);
  EXPECT_GT(mid_write, 3);  // the kills did hit checkpoints under writing
}

}  // namespace
}  // namespace frit
