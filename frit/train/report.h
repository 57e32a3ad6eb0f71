// `frit report RUN`: one self-contained HTML page about a run, from its metrics and configuration.
#pragma once
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "frit/train/metrics.h"

namespace frit {

struct ReportInput {
  std::string title = {};  // heading; the run's name
  std::span<const MetricsEntry> entries;
  std::string_view configuration;  // shown as it is; may be empty
  std::string_view note;           // one sentence under the heading; may be empty
  int64_t damaged_lines = 0;       // of metrics.jsonl; said on the page when not 0
};

// Points a chart keeps of one series: above it, equal slices of the step axis keep their first, last, least and
// greatest point each, so every peak of the data is on the page.
inline constexpr int64_t kReportPoints = 2000;

// Returns the page: UTF-8 HTML with inline style, script and SVG, no network; light and dark as the reader's system
// asks. Series that are missing leave their chart out; no entries at all give a page that says so.
std::string report_html(const ReportInput& input);

// Writes RUN/report.html (or `output`) from RUN/metrics.jsonl and the first of RUN/config.toml, config.yaml,
// config.json that exists. Returns the path written. Errors: frit::Error if there is no readable metrics.jsonl, naming
// what was sought.
std::filesystem::path write_report(const std::filesystem::path& run, const std::filesystem::path& output = {});

}  // namespace frit
