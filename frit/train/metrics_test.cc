#include "frit/train/metrics.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "frit/core/error.h"
#include "frit/core/file.h"

namespace frit {
namespace {

namespace fs = std::filesystem;

class MetricsFileTest : public testing::Test {
 protected:
  void SetUp() override {
    // In memory where that is possible: a disk would only make the many fsyncs here slow.
    const fs::path base = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : testing::TempDir();
    dir_ = base / ("frit_metrics_" + std::to_string(::getpid()));
    fs::remove_all(dir_);
    fs::create_directories(dir_);
    path_ = dir_ / "metrics.jsonl";
  }
  void TearDown() override { fs::remove_all(dir_); }
  void put(std::string_view text) { std::ofstream(path_, std::ios::binary) << text; }

  fs::path dir_, path_;
};

MetricsEntry train(int64_t step) {
  MetricsEntry e;
  e.step = step;
  e.epoch = 0.25;
  e.time_s = 1.5;
  e.loss = 3.25;
  e.lr = 1e-4;
  e.tokens_per_s = 1234.5;
  e.grad_norm = 0.75;
  e.target_tokens = 4096 * step;
  return e;
}

TEST(Metrics, LinesHaveTheAgreedKeys) {
  EXPECT_EQ(format_metrics(train(7)),
            R"({"step":7,"epoch":0.25,"time_s":1.5,"kind":"train","loss":3.25,"lr":0.0001,"tokens_per_s":1234.5,)"
            R"("grad_norm":0.75,"target_tokens":28672})");
  MetricsEntry sample;
  sample.kind = MetricsKind::kSample;
  sample.source = "a \"b\"\n";
  sample.reference = "ä";
  sample.hypothesis = "\xff";
  EXPECT_EQ(format_metrics(sample),
            "{\"step\":0,\"epoch\":0.0,\"time_s\":0.0,\"kind\":\"sample\",\"source\":\"a \\\"b\\\"\\n\","
            "\"reference\":\"ä\",\"hypothesis\":\"\xEF\xBF\xBD\"}");
}

TEST(Metrics, LinesGoBothWays) {
  MetricsEntry e = train(1000000007);
  e.kind = MetricsKind::kValid;
  e.loss = 0.1 + 0.2;
  e.ppl = std::nan("");
  e.bleu = 27.5;
  e.message = "x";
  const MetricsEntry back = parse_metrics(format_metrics(e));
  EXPECT_EQ(back.kind, MetricsKind::kValid);
  EXPECT_EQ(back.step, e.step);
  EXPECT_EQ(back.loss, e.loss);
  EXPECT_TRUE(back.ppl && std::isnan(*back.ppl));
  EXPECT_EQ(back.bleu, e.bleu);
  EXPECT_EQ(back.target_tokens, e.target_tokens);
  EXPECT_EQ(back.message, "x");
  for (const char* line :
       {"", "{", "[]", "{}", R"({"step":1})", R"({"step":1.5,"kind":"train"})", R"({"step":1,"kind":"x"})"})
    EXPECT_THROW(parse_metrics(line), Error) << line;
  EXPECT_EQ(parse_metrics(R"({"step":1,"kind":"event","future":[1,2]})").step, 1);
}

TEST_F(MetricsFileTest, AppendsWholeLinesAtOnce) {
  MetricsWriter writer = MetricsWriter::create(path_);
  writer.append(train(1));
  EXPECT_EQ(read_file(path_), format_metrics(train(1)) + "\n");
  writer.append(train(2));
  writer.sync();
  EXPECT_EQ(read_metrics(path_).entries.size(), 2u);
  EXPECT_THROW(MetricsWriter::create(path_), Error);  // never over another run's file
}

TEST_F(MetricsFileTest, ResumeDropsLaterSteps) {
  {
    MetricsWriter writer = MetricsWriter::create(path_);
    for (int64_t step : {10, 20, 30, 40}) writer.append(train(step));
  }
  MetricsWriter::Repair repair;
  {
    MetricsWriter writer = MetricsWriter::resume(path_, 20, &repair);
    writer.append(train(25));
  }
  EXPECT_EQ(repair.kept, 2);
  EXPECT_EQ(repair.dropped, 2);
  EXPECT_EQ(repair.damaged, 0);
  EXPECT_EQ(read_file(path_),
            format_metrics(train(10)) + "\n" + format_metrics(train(20)) + "\n" + format_metrics(train(25)) + "\n");
}

TEST_F(MetricsFileTest, LinesBeyondTheGivenNumberAreDropped) {
  {
    MetricsWriter writer = MetricsWriter::create(path_);
    for (int64_t step : {10, 20, 20, 20}) writer.append(train(step));
  }
  MetricsWriter::Repair repair;
  MetricsWriter::resume(path_, 20, &repair, 2);
  EXPECT_EQ(repair.kept, 2);
  EXPECT_EQ(repair.dropped, 2);
  EXPECT_EQ(read_file(path_), format_metrics(train(10)) + "\n" + format_metrics(train(20)) + "\n");
  MetricsWriter::resume(path_, 20, &repair, 5);
  EXPECT_EQ(repair.kept, 2);
}

// Torn at every byte: what was whole stays, what goes on is readable.
TEST_F(MetricsFileTest, TornLastLineIsRepaired) {
  const std::string one = format_metrics(train(1)) + "\n", two = format_metrics(train(2)) + "\n";
  for (size_t cut = 0; cut <= two.size(); ++cut) {
    put(one + two.substr(0, cut));
    EXPECT_EQ(read_metrics(path_).entries.size(), cut + 1 >= two.size() ? 2u : 1u);  // readers take it too
    MetricsWriter::Repair repair;
    MetricsWriter::resume(path_, 5, &repair).append(train(3));
    const MetricsFile file = read_metrics(path_);
    ASSERT_EQ(file.damaged_lines, 0) << cut;
    const bool whole = cut + 1 >= two.size();  // the brace is there; only the newline may be missing
    ASSERT_EQ(file.entries.size(), whole ? 3u : 2u) << cut;
    EXPECT_EQ(file.entries.back().step, 3);
    EXPECT_EQ(repair.damaged, cut == 0 || whole ? 0 : 1) << cut;
  }
}

TEST_F(MetricsFileTest, DamagedLinesAreCounted) {
  put(format_metrics(train(1)) + "\n" + std::string(20, '\0') + "\n" + format_metrics(train(2)) + "\n");
  EXPECT_EQ(read_metrics(path_).damaged_lines, 1);
  EXPECT_EQ(read_metrics(path_).entries.size(), 2u);
  MetricsWriter::Repair repair;
  MetricsWriter::resume(path_, 2, &repair);
  EXPECT_EQ(repair.damaged, 1);
  EXPECT_EQ(read_metrics(path_).damaged_lines, 0);
}

TEST_F(MetricsFileTest, ResumeWithoutAFileStartsOne) {
  MetricsWriter::resume(path_, 5).append(train(6));
  EXPECT_EQ(read_metrics(path_).entries.size(), 1u);
}

TEST_F(MetricsFileTest, UntouchedWhenNothingIsToDrop) {
  MetricsWriter::create(path_).append(train(1));
  const auto before = fs::last_write_time(path_);
  MetricsWriter::resume(path_, 1);
  EXPECT_EQ(fs::last_write_time(path_), before);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_), {}), 1);  // no temporary file left
}

TEST_F(MetricsFileTest, SurvivesKill) {
  for (int round = 0; round < 5; ++round) {
    fs::remove(path_);
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        MetricsWriter writer = MetricsWriter::create(path_);
        for (int64_t step = 1;; ++step) writer.append(train(step));
      } catch (...) {
        ::_exit(2);
      }
    }
    int status = 0;
    while (!fs::exists(path_) || fs::file_size(path_) < 5000) {
      ASSERT_EQ(::waitpid(child, &status, WNOHANG), 0) << "the writer failed by itself";
      ::usleep(100);
    }
    ::usleep(static_cast<useconds_t>(700 * round));
    ::kill(child, SIGKILL);
    ::waitpid(child, &status, 0);
    MetricsWriter::resume(path_, 1 << 30).append(train(1 << 30));
    const MetricsFile file = read_metrics(path_);
    EXPECT_EQ(file.damaged_lines, 0);
    for (size_t i = 0; i + 1 < file.entries.size(); ++i) ASSERT_EQ(file.entries[i].step, static_cast<int64_t>(i) + 1);
  }
}

TEST_F(MetricsFileTest, MissingFolderIsAnError) {
  EXPECT_THROW(MetricsWriter::create(dir_ / "no" / "metrics.jsonl"), Error);
  EXPECT_THROW(read_metrics(path_), Error);
}

}  // namespace
}  // namespace frit
