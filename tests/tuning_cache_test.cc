#include "frit/train/tuning_cache.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "frit/core/error.h"
#include "tests/training.h"

namespace frit {
namespace {

class TuningCacheTest : public testing::Test {
 protected:
  TuningCacheTest() {
    if (const char* before = std::getenv("XDG_CACHE_HOME")) before_ = before;
    ::setenv("XDG_CACHE_HOME", (folder_.path() / "cache").c_str(), 1);
    for (const char* run : {"a", "b"}) std::filesystem::create_directories(folder_.path() / run);
  }
  ~TuningCacheTest() override {
    if (before_.empty())
      ::unsetenv("XDG_CACHE_HOME");
    else
      ::setenv("XDG_CACHE_HOME", before_.c_str(), 1);
  }
  TuningCache open(const char* run, const char* gpu = "some GPU") {
    return {folder_.path() / run, gpu, [this](std::string_view text) { said_ += std::string(text) + "\n"; }};
  }
  TestFolder folder_{"frit-tuning"};
  std::string before_, said_;
};

TEST_F(TuningCacheTest, ARunKeepsItsOwnAndANewOneBeginsWithTheCommonFile) {
  TuningCache a = open("a");
  EXPECT_TRUE(a.fresh());
  a.tuning().set("product", "x", "1");
  a.save(true);
  TuningCache b = open("b");
  EXPECT_TRUE(b.fresh());
  EXPECT_EQ(b.tuning().find("product", "x"), "1");
  b.tuning().set("product", "x", "2");
  b.save(true);
  TuningCache again = open("a");
  EXPECT_FALSE(again.fresh());
  EXPECT_EQ(again.tuning().find("product", "x"), "1");  // not what the other run found since
  EXPECT_EQ(open("c", "another GPU").tuning().size(), 0u);
  EXPECT_EQ(said_, "");
}

TEST_F(TuningCacheTest, AFileOfOnesOwnIsNotAnotherGpus) {
  const std::string path = folder_.path() / "mine.json";
  EXPECT_EQ(Tuning::load(path, "some GPU", true).size(), 0u);  // not there yet
  Tuning tuning;
  tuning.set("product", "x", "1");
  tuning.save(path, "some GPU");
  EXPECT_EQ(Tuning::load(path, "some GPU", true).size(), 1u);
  EXPECT_EQ(Tuning::load(path, "another GPU").size(), 0u);
  EXPECT_THROW(Tuning::load(path, "another GPU", true), Error);
}

TEST_F(TuningCacheTest, NothingNewLeavesTheCommonFileAlone) {
  TuningCache a = open("a");
  a.tuning().set("product", "x", "1");
  a.save(false);
  EXPECT_EQ(open("b").tuning().size(), 0u);
  EXPECT_FALSE(open("a").fresh());
}

TEST_F(TuningCacheTest, ABrokenCommonFileIsANoticeABrokenOwnOneAnError) {
  std::filesystem::create_directories(folder_.path() / "cache" / "frit");
  std::ofstream(folder_.path() / "cache" / "frit" / "tuning.json") << "{";
  EXPECT_TRUE(open("a").fresh());
  EXPECT_NE(said_.find("tuning.json"), std::string::npos);
  std::ofstream(folder_.path() / "a" / "tuning.json") << "{";
  EXPECT_THROW(open("a"), Error);
}

}  // namespace
}  // namespace frit
