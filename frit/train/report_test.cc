#include "frit/train/report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "frit/core/error.h"
#include "frit/core/file.h"

namespace frit {
namespace {

namespace fs = std::filesystem;

MetricsEntry entry(MetricsKind kind, int64_t step) {
  MetricsEntry e;
  e.kind = kind;
  e.step = step;
  e.epoch = static_cast<double>(step) / 100;
  e.time_s = static_cast<double>(step);
  return e;
}

std::string page(const std::vector<MetricsEntry>& entries, std::string_view configuration = "",
                 std::string_view note = "") {
  return report_html({.title = "run", .entries = entries, .configuration = configuration, .note = note});
}

size_t count(std::string_view text, std::string_view what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != std::string_view::npos; at = text.find(what, at + what.size())) ++n;
  return n;
}

// The points a chart holds for the hover script: [step, value, epoch, time] of each series.
nlohmann::json chart_data(const std::string& html, std::string_view title) {
  const size_t at = html.find("<h3>" + std::string(title) + "</h3>");
  EXPECT_NE(at, std::string::npos) << title;
  const std::string mark = "<script type=\"application/json\">";
  const size_t begin = html.find(mark, at) + mark.size();
  return nlohmann::json::parse(html.substr(begin, html.find("</script>", begin) - begin));
}

std::vector<MetricsEntry> full_run() {
  std::vector<MetricsEntry> entries;
  for (int64_t step = 10; step <= 1000; step += 10) {
    MetricsEntry e = entry(MetricsKind::kTrain, step);
    e.loss = 8 - std::log(static_cast<double>(step));
    e.lr = 1e-4;
    e.tokens_per_s = 5000;
    e.grad_norm = 1.5;
    e.target_tokens = step * 100;
    entries.push_back(e);
    if (step % 200 == 0) {
      MetricsEntry v = entry(MetricsKind::kValid, step);
      v.loss = 7 - std::log(static_cast<double>(step)) + (step == 1000 ? 1 : 0);
      v.ppl = std::exp(*v.loss);
      v.bleu = static_cast<double>(step) / 50;
      entries.push_back(v);
      MetricsEntry s = entry(MetricsKind::kSample, step);
      s.source = "Ein <b>Satz</b>";
      s.reference = "A \"sentence\" & more";
      s.hypothesis = "hypothesis " + std::to_string(step);
      entries.push_back(s);
    }
  }
  MetricsEntry e = entry(MetricsKind::kEvent, 500);
  e.message = "loss was not finite: step skipped";
  entries.push_back(e);
  return entries;
}

TEST(Report, HoldsAllParts) {
  const std::string html = page(full_run(), "[train]\n# note\nseed = 1\n", "Test BLEU is flattered.");
  for (const char* title : {"Loss", "BLEU", "Perplexity", "Learning rate", "Gradient norm", "Speed"})
    EXPECT_EQ(count(html, std::string("<h3>") + title + "</h3>"), 1u) << title;
  EXPECT_EQ(count(html, "<svg"), 6u);
  EXPECT_NE(html.find("<b>20.00</b><small>best, at step 1,000</small>"), std::string::npos);              // best BLEU
  EXPECT_NE(html.find("<b>0.3154</b><small>best, at step 800, last 1.0922</small>"), std::string::npos);  // best loss
  EXPECT_NE(html.find("<b>100k</b><small>seen in training</small>"), std::string::npos);
  EXPECT_NE(html.find("<b>5,000</b><small>tokens/s, median</small>"), std::string::npos);
  EXPECT_NE(html.find("Test BLEU is flattered."), std::string::npos);
  EXPECT_NE(html.find("hypothesis 200"), std::string::npos);
  EXPECT_NE(html.find("hypothesis 1000"), std::string::npos);
  EXPECT_NE(html.find("loss was not finite: step skipped"), std::string::npos);
  EXPECT_NE(html.find("<span class=\"s\">[train]</span>"), std::string::npos);
  EXPECT_NE(html.find("<span class=\"k\">seed </span>= 1"), std::string::npos);
  EXPECT_NE(html.find("prefers-color-scheme:dark"), std::string::npos);
  const auto loss = chart_data(html, "Loss");
  ASSERT_EQ(loss.size(), 2u);
  EXPECT_EQ(loss[0]["points"].size(), 100u);
  EXPECT_EQ(loss[1]["points"].size(), 5u);
  EXPECT_EQ(loss[1]["points"][0][0], 200);
}

TEST(Report, NeedsNoNetwork) {
  const std::string html = page(full_run(), "a = 1\n");
  for (const char* what : {"http:", "https:", "//cdn", "src=", "href=", "@import", "url(", "fetch(", "XMLHttp"})
    EXPECT_EQ(html.find(what), std::string::npos) << what;
}

TEST(Report, EscapesWhatItShows) {
  const std::string html = page(full_run(), "x = \"</pre><script>alert(1)</script>\"");
  EXPECT_EQ(html.find("<b>Satz"), std::string::npos);
  EXPECT_NE(html.find("Ein &lt;b&gt;Satz&lt;/b&gt;"), std::string::npos);
  EXPECT_NE(html.find("A &quot;sentence&quot; &amp; more"), std::string::npos);
  EXPECT_EQ(html.find("<script>alert"), std::string::npos);
}

TEST(Report, MissingSeriesLeaveTheirChartsOut) {
  EXPECT_NE(page({}).find("no metrics yet"), std::string::npos);
  std::vector<MetricsEntry> entries = {entry(MetricsKind::kEvent, 1)};
  EXPECT_NE(page(entries).find("nothing to draw"), std::string::npos);
  entries = {entry(MetricsKind::kTrain, 5)};
  entries[0].loss = 3;
  const std::string html = page(entries);
  EXPECT_EQ(count(html, "<svg"), 1u);
  EXPECT_NE(html.find("<circle class=\"dot a\""), std::string::npos);  // one point is a dot, not an empty path
  EXPECT_EQ(html.find("Samples"), std::string::npos);
  EXPECT_EQ(html.find(">Configuration<"), std::string::npos);
}

// No coordinate may be NaN or infinite, whatever the values.
TEST(Report, AwkwardValuesDraw) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const auto& values : std::vector<std::vector<double>>{{0},
                                                             {0, 0},
                                                             {5, 5, 5},
                                                             {-3, -3},
                                                             {1e-30, 1e30},
                                                             {-1e9, 1e9},
                                                             {1, NAN, 2},
                                                             {NAN},
                                                             {inf, 1},
                                                             {1e-300},
                                                             {0, 1e-12}}) {
    std::vector<MetricsEntry> entries;
    for (size_t i = 0; i < values.size(); ++i) {
      MetricsEntry e = entry(MetricsKind::kTrain, static_cast<int64_t>(i));
      e.loss = e.grad_norm = e.lr = values[i];
      entries.push_back(e);
    }
    const std::string html = page(entries);
    EXPECT_EQ(html.find("nan"), html.find("nan", html.find("'use strict'"))) << values[0];
    EXPECT_EQ(count(html, "\"inf") + count(html, ",inf") + count(html, " inf") + count(html, "-inf"), 0u) << values[0];
    if (std::any_of(values.begin(), values.end(), [](double v) { return !std::isfinite(v); }) && values.size() > 1) {
      EXPECT_NE(html.find("1 value is not finite"), std::string::npos);
    }
    EXPECT_LT(html.size(), 100000u);
  }
}

TEST(Report, DownsamplingKeepsEveryExtreme) {
  std::vector<MetricsEntry> entries;
  std::mt19937 random(3);
  for (int64_t step = 1; step <= 100000; ++step) {
    MetricsEntry e = entry(MetricsKind::kTrain, step);
    e.loss = 3 + static_cast<double>(random() % 1000) / 1000;
    e.lr = 1e-3 / static_cast<double>(step);
    e.grad_norm = e.tokens_per_s = 1000 + static_cast<double>(random() % 100);
    if (step == 54321) e.loss = 50;
    if (step == 77777) e.loss = -1;
    entries.push_back(e);
  }
  const std::string html = page(entries);
  EXPECT_LT(html.size(), 1500000u);
  const auto data = chart_data(html, "Loss");
  ASSERT_EQ(data.size(), 2u);  // raw and mean
  const auto& points = data[0]["points"];
  EXPECT_LE(points.size(), static_cast<size_t>(kReportPoints));
  EXPECT_GE(points.size(), static_cast<size_t>(kReportPoints) / 2);
  EXPECT_EQ(points.front()[0], 1);
  EXPECT_EQ(points.back()[0], 100000);
  const auto has = [&](double step, double value) {
    return std::any_of(points.begin(), points.end(), [&](const auto& p) { return p[0] == step && p[1] == value; });
  };
  EXPECT_TRUE(has(54321, 50));
  EXPECT_TRUE(has(77777, -1));
  // Each slice's extremes, against a plain search.
  const double width = 99999.0 / (kReportPoints / 4);
  for (int slice = 0; slice < kReportPoints / 4; slice += 50) {
    double greatest = -1e9;
    int64_t at = 0;
    for (const auto& e : entries) {
      if (std::min<int64_t>(kReportPoints / 4 - 1, static_cast<int64_t>(static_cast<double>(e.step - 1) / width)) ==
              slice &&
          *e.loss > greatest) {
        greatest = *e.loss;
        at = e.step;
      }
    }
    EXPECT_TRUE(has(static_cast<double>(at), greatest)) << slice;
  }
  for (size_t i = 1; i < points.size(); ++i) ASSERT_LT(points[i - 1][0], points[i][0]);
}

TEST(Report, WritesIntoTheRunDirectory) {
  const fs::path run = fs::path(testing::TempDir()) / ("frit_report_" + std::to_string(::getpid())) / "my-run";
  fs::remove_all(run);
  fs::create_directories(run);
  EXPECT_THROW(write_report(run), Error);
  {
    MetricsWriter writer = MetricsWriter::create(run / "metrics.jsonl");
    for (const auto& e : full_run()) writer.append(e);
  }
  std::ofstream(run / "metrics.jsonl", std::ios::app) << "{\"step\":1";
  std::ofstream(run / "config.toml") << "seed = 7\n";
  EXPECT_EQ(write_report(run.string() + "/"), run / "report.html");
  const std::string html = read_file(run / "report.html");
  EXPECT_NE(html.find("<h1>my-run</h1>"), std::string::npos);
  EXPECT_NE(html.find("seed "), std::string::npos);
  EXPECT_NE(html.find("1 damaged lines"), std::string::npos);
  write_report(run, run / "other.html");
  EXPECT_TRUE(fs::exists(run / "other.html"));
  fs::remove_all(run.parent_path());
}

}  // namespace
}  // namespace frit
