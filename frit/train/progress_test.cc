#include "frit/train/progress.h"

#include <gtest/gtest.h>

#include <limits>
#include <sstream>

namespace frit {
namespace {

ProgressState at(double time_s, double fraction, int64_t updates) {
  ProgressState s;
  s.time_s = time_s;
  s.fraction = fraction;
  s.updates = updates;
  s.epoch = fraction * 10;
  s.target_tokens = updates * 1000;
  s.loss = 3.5;
  s.learning_rate = 3e-4;
  s.grad_norm = 0.8125;
  return s;
}

TEST(Progress, PlainLinesOnceAnInterval) {
  std::ostringstream out;
  Progress progress(out, {.interval_s = 10});
  for (int i = 0; i <= 25; ++i) progress.update(at(100 + i, i / 100.0, i * 2));
  EXPECT_EQ(
      out.str(),
      "step 20 | epoch 1.00 | loss 3.500 | lr 0.0003 | grad 0.812 | 2,000 tok/s | 10.0% | 10s elapsed | ETA 1m 30s\n"
      "step 40 | epoch 2.00 | loss 3.500 | lr 0.0003 | grad 0.812 | 2,000 tok/s | 20.0% | 20s elapsed | ETA 1m 20s\n");
  out.str("");
  progress.finish();
  EXPECT_EQ(
      out.str(),
      "step 50 | epoch 2.50 | loss 3.500 | lr 0.0003 | grad 0.812 | 2,000 tok/s | 25.0% | 25s elapsed | ETA 1m 15s\n");
  out.str("");
  progress.finish();
  progress.update(at(1000, 1, 100));
  EXPECT_EQ(out.str(), "");
  EXPECT_DOUBLE_EQ(progress.tokens_per_s(), 2000);
}

TEST(Progress, ResumedRunShowsItsOwnSpeed) {
  std::ostringstream out;
  Progress progress(out, {.interval_s = 1});
  progress.update(at(0, 0.5, 10000));  // where an earlier run came to
  progress.update(at(10, 0.6, 10100));
  EXPECT_NE(out.str().find("10,000 tok/s"), std::string::npos) << out.str();
  EXPECT_NE(out.str().find("ETA 40s"), std::string::npos) << out.str();
}

TEST(Progress, LeavesOutWhatIsNotKnown) {
  std::ostringstream out;
  Progress progress(out, {.interval_s = 0});
  ProgressState s;
  progress.update(s);
  s.time_s = 2;
  s.updates = 1;
  progress.update(s);
  EXPECT_EQ(out.str(), "step 1 | epoch 0.00 | 0 tok/s | 2s elapsed\n");
}

int columns(std::string_view text) {
  int n = 0;
  for (char c : text) n += (c & 0xC0) != 0x80;
  return n;
}

TEST(Progress, BarRedrawsInPlaceAndNeverWraps) {
  for (int width : {10, 20, 40, 60, 80, 100, 200}) {
    std::ostringstream out;
    {
      Progress progress(out, {.bar = true, .columns = width, .redraw_s = 0.5});
      for (int i = 0; i <= 100; ++i) progress.update(at(i * 0.1, i / 100.0, i * 123));
    }
    std::string text = out.str();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    EXPECT_EQ(text.back(), '\n');
    text.pop_back();
    int frames = 0;
    for (size_t at = 0; at < text.size();) {
      ASSERT_EQ(text[at], '\r');
      const size_t end = text.find("\x1b[K", at);
      ASSERT_NE(end, std::string::npos);
      EXPECT_LT(columns(std::string_view(text).substr(at + 1, end - at - 1)), width);
      at = end + 3;
      ++frames;
    }
    EXPECT_GE(frames, 15);
    EXPECT_LE(frames, 20);
    if (width >= 80) {
      EXPECT_NE(text.find("100% ▕"), std::string::npos) << text;
      EXPECT_NE(text.find("ETA 0s"), std::string::npos) << text;
    }
  }
}

TEST(Progress, MessagesStandAboveTheBar) {
  std::ostringstream out;
  Progress progress(out, {.bar = true, .redraw_s = 0});
  progress.message("before");
  progress.update(at(0, 0, 0));
  progress.update(at(1, 0.1, 10));
  const std::string bar = out.str().substr(out.str().find('\r') + 1);
  out.str("");
  progress.message("valid loss 3.2");
  EXPECT_EQ(out.str(), "\r\x1b[Kvalid loss 3.2\n" + bar.substr(0, bar.find("\x1b[K")));
  progress.finish();
  out.str("");
  progress.message("after");
  EXPECT_EQ(out.str(), "after\n");
}

TEST(Progress, Durations) {
  EXPECT_EQ(format_duration(0), "0s");
  EXPECT_EQ(format_duration(59.4), "59s");
  EXPECT_EQ(format_duration(59.6), "1m 00s");
  EXPECT_EQ(format_duration(3599), "59m 59s");
  EXPECT_EQ(format_duration(3723), "1h 02m");
  EXPECT_EQ(format_duration(90000), "1d 01h");
  EXPECT_EQ(format_duration(-1), "?");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::infinity()), "?");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::quiet_NaN()), "?");
}

TEST(Progress, Counts) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1,000");
  EXPECT_EQ(format_count(-123), "-123");
  EXPECT_EQ(format_count(-1234567), "-1,234,567");
}

}  // namespace
}  // namespace frit
