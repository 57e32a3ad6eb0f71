#include "frit/train/report.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/train/progress.h"

namespace frit {
namespace {

namespace fs = std::filesystem;

// ---- text ----------------------------------------------------------------------------------------------------------

std::string escape(std::string_view text) {
  std::string result;
  for (char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

// 12300 as "12.3k", 2000000 as "2M": for axes and tiles.
std::string short_count(double value) {
  for (auto [scale, letter] : {std::pair(1e9, "G"), std::pair(1e6, "M"), std::pair(1e3, "k")}) {
    if (std::abs(value) >= scale) return fmt::format("{:.4g}{}", value / scale, letter);
  }
  return fmt::format("{:.4g}", value);
}

std::string axis_number(double value) {
  if (value == 0) return "0";
  return std::abs(value) >= 1000 ? short_count(value) : fmt::format("{:.4g}", value);
}

// ---- series --------------------------------------------------------------------------------------------------------

struct Point {
  double step, value, epoch, time_s;
};

struct Series {
  std::string name, style;  // style: CSS class of line and dots
  std::vector<Point> points;
  int64_t not_finite = 0;
  bool dots = false;
};

Series series_of(std::span<const MetricsEntry> entries, MetricsKind kind, std::optional<double> MetricsEntry::*field,
                 std::string name, std::string style) {
  Series series{.name = std::move(name), .style = std::move(style), .points = {}};
  for (const auto& e : entries) {
    if (e.kind != kind || !(e.*field)) continue;
    if (std::isfinite(*(e.*field))) {
      series.points.push_back({static_cast<double>(e.step), *(e.*field), e.epoch, e.time_s});
    } else {
      ++series.not_finite;
    }
  }
  std::stable_sort(series.points.begin(), series.points.end(),
                   [](const Point& a, const Point& b) { return a.step < b.step; });
  return series;
}

// Keeps each slice's first, last, least and greatest point, in order.
std::vector<Point> downsample(const std::vector<Point>& points) {
  if (static_cast<int64_t>(points.size()) <= kReportPoints) return points;
  const int64_t slices = kReportPoints / 4;
  const double low = points.front().step, width = (points.back().step - low) / static_cast<double>(slices);
  std::vector<Point> kept;
  for (size_t begin = 0; begin < points.size();) {
    const auto slice_of = [&](const Point& p) {
      return width > 0 ? std::min(slices - 1, static_cast<int64_t>((p.step - low) / width)) : 0;
    };
    size_t end = begin, least = begin, greatest = begin;
    for (; end < points.size() && slice_of(points[end]) == slice_of(points[begin]); ++end) {
      if (points[end].value < points[least].value) least = end;
      if (points[end].value > points[greatest].value) greatest = end;
    }
    size_t keep[] = {begin, least, greatest, end - 1};
    std::sort(keep, keep + 4);
    for (size_t* k = keep; k != std::unique(keep, keep + 4); ++k) kept.push_back(points[*k]);
    begin = end;
  }
  return kept;
}

// Centred moving mean over a fiftieth of the points: the trend of a noisy series.
std::vector<Point> smooth(const std::vector<Point>& points) {
  const int64_t n = static_cast<int64_t>(points.size()), half = std::max<int64_t>(1, n / 100);
  std::vector<double> sums(static_cast<size_t>(n) + 1);
  for (int64_t i = 0; i < n; ++i) sums[i + 1] = sums[i] + points[i].value;
  std::vector<Point> result = points;
  for (int64_t i = 0; i < n; ++i) {
    // Towards the ends the window narrows to a third, and then only from the outside, so that the ends are not noise.
    const int64_t reach = std::max(std::min({half, i, n - 1 - i}), half / 3);
    const int64_t begin = std::max<int64_t>(0, i - reach), end = std::min(n, i + reach + 1);
    result[i].value = (sums[end] - sums[begin]) / static_cast<double>(end - begin);
  }
  return result;
}

// ---- charts --------------------------------------------------------------------------------------------------------

constexpr double kWidth = 620, kHeight = 270, kLeft = 54, kRight = 18, kTop = 12, kBottom = 40;

struct Axis {
  double low, high;
  bool log = false;
  std::vector<double> ticks;

  double place(double value) const {  // 0 at low, 1 at high
    return log ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
  }
};

Axis linear_axis(double low, double high, int ticks) {
  if (high <= low) {
    const double pad = low == 0 ? 1 : std::abs(low) * 0.1;
    low = low == 0 ? 0 : low - pad;
    high += pad;
  }
  const double raw = (high - low) / ticks, power = std::pow(10, std::floor(std::log10(raw)));
  double step = 10 * power;
  for (double nice : {1.0, 2.0, 2.5, 5.0}) {
    if (nice * power >= raw * 0.999) {
      step = nice * power;
      break;
    }
  }
  Axis axis{std::floor(low / step + 1e-9) * step, std::ceil(high / step - 1e-9) * step, false, {}};
  for (int64_t i = 0; axis.low + static_cast<double>(i) * step <= axis.high + step * 1e-6; ++i) {
    const double tick = axis.low + static_cast<double>(i) * step;
    axis.ticks.push_back(std::abs(tick) < step * 1e-9 ? 0 : tick);
  }
  return axis;
}

Axis log_axis(double low, double high) {
  Axis axis{low / 1.1, high * 1.1, true, {}};
  // 1, 2 and 5 of each decade, or the decades alone when that is too many.
  const bool dense = std::log10(high / low) <= 2.5;
  for (int decade = static_cast<int>(std::floor(std::log10(axis.low))); std::pow(10, decade) <= axis.high; ++decade) {
    for (double digit : {1.0, 2.0, 5.0}) {
      const double tick = digit * std::pow(10, decade);
      if ((dense || digit == 1) && tick >= axis.low && tick <= axis.high) axis.ticks.push_back(tick);
    }
  }
  return axis;
}

struct Chart {
  std::string title, unit;
  std::vector<Series> series;
  bool from_zero = false;   // the axis starts at 0
  bool may_be_log = false;  // logarithmic when the values span more than a factor of 50
  bool noisy = false;       // draw a smoothed line over each line of many points
};

// One figure: heading, legend (for several series), SVG, and the points for the hover script. Empty without points.
std::string chart_html(Chart chart) {
  std::erase_if(chart.series, [](const Series& s) { return s.points.empty() && s.not_finite == 0; });
  double low_x = 0, high_x = 0, low = std::numeric_limits<double>::infinity(), high = -low;
  int64_t points = 0, not_finite = 0;
  for (const auto& s : chart.series) {
    not_finite += s.not_finite;
    points += static_cast<int64_t>(s.points.size());
    for (const auto& p : s.points) {
      high_x = std::max(high_x, p.step);
      low = std::min(low, p.value);
      high = std::max(high, p.value);
    }
  }
  if (points == 0) return "";
  const bool log = chart.may_be_log && low > 0 && high / low > 50;
  const Axis y = log ? log_axis(low, high) : linear_axis(chart.from_zero ? std::min(0.0, low) : low, high, 5);
  // The step axis ends at the last step: rounding it up would leave blank paper.
  Axis x = linear_axis(low_x, std::max(high_x, 1.0), 6);
  x.high = std::max(high_x, 1.0);
  std::erase_if(x.ticks, [&](double t) { return t > x.high; });
  const auto px = [&](double v) { return kLeft + x.place(v) * (kWidth - kLeft - kRight); };
  const auto py = [&](double v) { return kHeight - kBottom - y.place(v) * (kHeight - kTop - kBottom); };

  std::vector<Series> drawn;
  for (auto& s : chart.series) {
    const bool trend = chart.noisy && !s.dots && s.points.size() > 100;
    if (trend) {
      Series raw = s, mean = s;
      raw.style += " raw";
      mean.points = downsample(smooth(s.points));
      mean.name += " (mean)";
      drawn.push_back(std::move(raw));
      drawn.push_back(std::move(mean));
    } else {
      drawn.push_back(s);
    }
  }

  std::string svg = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{} by step\">", kWidth, kHeight,
                                escape(chart.title));
  for (double t : y.ticks) {
    svg += fmt::format("<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>", kLeft, kWidth - kRight,
                       py(t), py(t));
    svg += fmt::format("<text class=\"tick\" x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>", kLeft - 8, py(t) + 4,
                       axis_number(t));
  }
  svg += fmt::format("<line class=\"axis\" x1=\"{}\" x2=\"{}\" y1=\"{}\" y2=\"{}\"/>", kLeft, kWidth - kRight,
                     kHeight - kBottom, kHeight - kBottom);
  for (double t : x.ticks)
    svg += fmt::format("<text class=\"tick\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>", px(t),
                       kHeight - kBottom + 17, short_count(t));
  svg += fmt::format("<text class=\"tick\" x=\"{}\" y=\"{}\" text-anchor=\"end\">step</text>", kWidth - kRight,
                     kHeight - 6);

  std::string data, legend;
  for (auto& s : drawn) {
    s.points = downsample(s.points);
    std::string path;
    double last_x = -1e9, last_y = -1e9;
    for (const auto& p : s.points) {
      const double at_x = px(p.step), at_y = py(p.value);
      // Points that fall onto the one before (a twentieth of a pixel) draw nothing.
      if (std::abs(at_x - last_x) < 0.05 && std::abs(at_y - last_y) < 0.05) continue;
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", at_x, at_y);
      last_x = at_x;
      last_y = at_y;
    }
    if (s.points.size() > 1) svg += fmt::format("<path class=\"line {}\" d=\"{}\"/>", s.style, path);
    if ((s.dots && s.points.size() <= 60) || s.points.size() == 1) {
      for (const auto& p : s.points)
        svg += fmt::format("<circle class=\"dot {}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"/>", s.style, px(p.step),
                           py(p.value));
    }
    if (!data.empty()) data += ",";
    data += fmt::format("{{\"name\":\"{}\",\"style\":\"{}\",\"points\":[", escape(s.name), escape(s.style));
    for (size_t i = 0; i < s.points.size(); ++i) {
      const auto& p = s.points[i];
      data += fmt::format("{}[{:.0f},{:.6g},{:.4g},{:.0f}]", i ? "," : "", p.step, p.value,
                          std::isfinite(p.epoch) ? p.epoch : 0, std::isfinite(p.time_s) ? p.time_s : 0);
    }
    data += "]}";
    legend += fmt::format("<span class=\"key {}\"><i></i>{}</span>", s.style, escape(s.name));
  }
  svg +=
      fmt::format("<line class=\"cursor\" y1=\"{}\" y2=\"{}\" visibility=\"hidden\"/></svg>", kTop, kHeight - kBottom);

  std::string unit = chart.unit;
  if (log) unit += unit.empty() ? "log scale" : ", log scale";
  std::string note;
  if (not_finite > 0)
    note = fmt::format("<p class=\"note\">{} {} not finite and cannot be drawn.</p>", format_count(not_finite),
                       not_finite == 1 ? "value is" : "values are");
  return fmt::format(
      "<figure class=\"chart\" data-x=\"{},{}\" data-y=\"{},{},{:d}\"><figcaption><h3>{}</h3><small>{}</small><span "
      "class=\"legend\">{}</span></figcaption>"
      "<div class=\"plot\">{}<div class=\"tip\" hidden></div></div>{}<script "
      "type=\"application/json\">[{}]</script></figure>\n",
      x.low, x.high, y.low, y.high, log, escape(chart.title), escape(unit), drawn.size() > 1 ? legend : "", svg, note,
      data);
}

// ---- the page's parts ----------------------------------------------------------------------------------------------

std::string tile(std::string_view label, std::string_view value, std::string_view detail) {
  return fmt::format("<div class=\"tile\"><span>{}</span><b>{}</b><small>{}</small></div>", escape(label),
                     escape(value), escape(detail));
}

const Point* best_point(const Series& series, bool higher) {
  const Point* best = nullptr;
  for (const auto& p : series.points) {
    if (best == nullptr || (higher ? p.value > best->value : p.value < best->value)) best = &p;
  }
  return best;
}

std::string tiles_html(std::span<const MetricsEntry> entries) {
  const auto get = [&](MetricsKind kind, std::optional<double> MetricsEntry::*field) {
    return series_of(entries, kind, field, "", "");
  };
  const auto at_step = [](const Point& p) { return "best, at step " + format_count(static_cast<int64_t>(p.step)); };
  std::string html;
  const Series bleu = get(MetricsKind::kValid, &MetricsEntry::bleu);
  if (const Point* p = best_point(bleu, true)) {
    html +=
        tile("BLEU", fmt::format("{:.2f}", p->value),
             at_step(*p) + (p == &bleu.points.back() ? "" : fmt::format(", last {:.2f}", bleu.points.back().value)));
  }
  const Series valid = get(MetricsKind::kValid, &MetricsEntry::loss);
  if (const Point* p = best_point(valid, false)) {
    html +=
        tile("Validation loss", fmt::format("{:.4f}", p->value),
             at_step(*p) + (p == &valid.points.back() ? "" : fmt::format(", last {:.4f}", valid.points.back().value)));
  }
  const Series ppl = get(MetricsKind::kValid, &MetricsEntry::ppl);
  if (const Point* p = best_point(ppl, false)) html += tile("Perplexity", fmt::format("{:.4g}", p->value), at_step(*p));
  const Series train = get(MetricsKind::kTrain, &MetricsEntry::loss);
  if (!train.points.empty()) {
    const auto mean = smooth(train.points);
    const Point& p =
        train.points.size() > 100 ? mean[mean.size() - 1 - train.points.size() / 100] : train.points.back();
    html += tile("Training loss", fmt::format("{:.4f}", p.value), train.points.size() > 100 ? "recent mean" : "last");
  }
  int64_t step = 0, tokens = 0;
  double epoch = 0, time_s = 0;
  for (const auto& e : entries) {
    step = std::max(step, e.step);
    tokens = std::max(tokens, e.target_tokens.value_or(0));
    epoch = std::max(epoch, e.epoch);
    time_s = std::max(time_s, e.time_s);
  }
  html += tile("Updates", format_count(step), fmt::format("{:.4g} epochs", epoch));
  if (tokens > 0) html += tile("Target tokens", short_count(static_cast<double>(tokens)), "seen in training");
  html += tile("Training time", format_duration(time_s), "over all resumes");
  Series speed = get(MetricsKind::kTrain, &MetricsEntry::tokens_per_s);
  if (!speed.points.empty()) {
    const auto middle = speed.points.begin() + static_cast<std::ptrdiff_t>(speed.points.size() / 2);
    std::nth_element(speed.points.begin(), middle, speed.points.end(),
                     [](const Point& a, const Point& b) { return a.value < b.value; });
    html += tile("Speed", format_count(std::llround(middle->value)), "tokens/s, median");
  }
  return html;
}

// At most `limit` indices of n, evenly spread, the first and last among them.
std::vector<size_t> spread(size_t n, size_t limit) {
  std::vector<size_t> result;
  for (size_t i = 0; i < std::min(n, limit); ++i) result.push_back(n <= limit ? i : i * (n - 1) / (limit - 1));
  return result;
}

std::string samples_html(std::span<const MetricsEntry> entries) {
  std::vector<std::string> order;
  std::map<std::string, std::vector<const MetricsEntry*>> by_source;
  for (const auto& e : entries) {
    if (e.kind != MetricsKind::kSample) continue;
    auto& list = by_source[e.source];
    if (list.empty()) order.push_back(e.source);
    list.push_back(&e);
  }
  std::string html;
  const auto row = [](const MetricsEntry& e) {
    return fmt::format("<tr><td>{}</td><td>{}</td></tr>", format_count(e.step),
                       e.hypothesis.empty() ? "<i>nothing</i>" : escape(e.hypothesis));
  };
  constexpr size_t kSamples = 40, kRows = 6;
  for (size_t i = 0; i < order.size() && i < kSamples; ++i) {
    const auto& list = by_source[order[i]];
    html += fmt::format(
        "<article><dl><dt>Source</dt><dd>{}</dd><dt>Reference</dt><dd>{}</dd></dl><table><thead><tr><th>Step</"
        "th><th>Translation</th></tr></thead><tbody>",
        escape(order[i]), escape(list.back()->reference));
    for (size_t k : spread(list.size(), kRows)) html += row(*list[k]);
    html += "</tbody></table>";
    if (list.size() > kRows) {
      html += fmt::format("<details><summary>all {} translations</summary><table><tbody>", list.size());
      for (const auto* e : list) html += row(*e);
      html += "</tbody></table></details>";
    }
    html += "</article>\n";
  }
  if (order.size() > kSamples)
    html += fmt::format("<p class=\"note\">The first {} of {} sentences are shown.</p>", kSamples, order.size());
  return html;
}

std::string events_html(std::span<const MetricsEntry> entries) {
  std::vector<const MetricsEntry*> events;
  for (const auto& e : entries) {
    if (e.kind == MetricsKind::kEvent) events.push_back(&e);
  }
  if (events.empty()) return "";
  constexpr size_t kHalf = 250;
  std::string html =
      "<div class=\"scroll\"><table><thead><tr><th>Step</th><th>Time</th><th>What happened</th></tr></thead><tbody>";
  for (size_t i = 0; i < events.size(); ++i) {
    if (events.size() > 2 * kHalf && i == kHalf) {
      html += fmt::format("<tr><td></td><td></td><td><i>{} more are left out here</i></td></tr>",
                          format_count(static_cast<int64_t>(events.size() - 2 * kHalf)));
      i = events.size() - kHalf;
    }
    html += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td></tr>", format_count(events[i]->step),
                        format_duration(events[i]->time_s), escape(events[i]->message));
  }
  return html + "</tbody></table></div>";
}

// The configuration with comments, sections and keys marked (TOML and the like; other text passes as it is).
std::string configuration_html(std::string_view text) {
  std::string html;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    const size_t first = line.find_first_not_of(" \t"), equals = line.find('=');
    if (first != std::string_view::npos && line[first] == '#') {
      html += "<span class=\"c\">" + escape(line) + "</span>";
    } else if (first != std::string_view::npos && line[first] == '[') {
      html += "<span class=\"s\">" + escape(line) + "</span>";
    } else if (equals != std::string_view::npos) {
      html += "<span class=\"k\">" + escape(line.substr(0, equals)) + "</span>" + escape(line.substr(equals));
    } else {
      html += escape(line);
    }
    html += "\n";
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return html;
}

constexpr std::string_view kStyle = R"css(
:root{color-scheme:light dark;--page:#f6f6f4;--card:#ffffff;--ink:#111110;--soft:#5c5b57;--faint:#8b8a85;--rule:#e4e3df;--axis:#b9b8b3;--a:#2a78d6;--b:#d9541e;--hover:#f0efec}
@media (prefers-color-scheme:dark){:root{--page:#111110;--card:#1b1b1a;--ink:#f3f2ee;--soft:#b5b4ad;--faint:#8a8983;--rule:#2e2e2c;--axis:#55544f;--a:#4c98ef;--b:#ee7a48;--hover:#262624}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1320px;margin:0 auto;padding:36px 28px 48px}
header{margin-bottom:22px}
h1{font-size:26px;line-height:1.25;margin:0;font-weight:650;letter-spacing:-.01em;overflow-wrap:anywhere}
header p{margin:4px 0 0;color:var(--soft)}
h2{font-size:17px;font-weight:650;margin:34px 0 12px}
h3{font-size:14px;font-weight:600;margin:0}
small{font-size:12px;color:var(--faint)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(138px,1fr));gap:12px;margin-bottom:14px}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 14px;display:flex;flex-direction:column}
.tile span{font-size:12.5px;color:var(--soft)}
.tile b{font-size:24px;font-weight:620;line-height:1.3;letter-spacing:-.01em}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:14px}
.chart{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 14px 6px;min-width:0}
figcaption{display:flex;flex-wrap:wrap;align-items:baseline;gap:4px 8px;margin:0 2px 6px}
.legend{margin-left:auto;display:flex;flex-wrap:wrap;gap:4px 14px}
.key{font-size:12px;color:var(--soft);display:inline-flex;align-items:center;gap:6px}
.key i{width:14px;height:3px;border-radius:2px;background:var(--colour);opacity:var(--strength,1)}
.a{--colour:var(--a)}.b{--colour:var(--b)}.raw{--strength:.35}
.plot{position:relative}
svg{display:block;width:100%;height:auto;touch-action:pan-y}
.grid{stroke:var(--rule)}.axis{stroke:var(--axis)}.grid,.axis,.cursor{vector-effect:non-scaling-stroke;stroke-width:1}
.tick{fill:var(--faint);font-size:12px;font-variant-numeric:tabular-nums}
.line{fill:none;stroke:var(--colour);stroke-width:2;stroke-linejoin:round;stroke-linecap:round;vector-effect:non-scaling-stroke}
.line.raw{stroke-width:1;opacity:.35}
.dot{fill:var(--colour);stroke:var(--card);stroke-width:1.5}
.cursor{stroke:var(--faint)}
.tip{position:absolute;top:6px;pointer-events:none;background:var(--card);border:1px solid var(--axis);border-radius:8px;padding:6px 10px;font-size:12px;line-height:1.55;white-space:nowrap;box-shadow:0 3px 12px rgba(0,0,0,.14);font-variant-numeric:tabular-nums}
.tip div{color:var(--soft)}
.tip .key{display:flex;color:var(--ink)}.tip .key b{margin-left:auto;padding-left:14px;font-weight:600}
.note{font-size:12.5px;color:var(--soft);margin:2px 2px 8px}
article,.panel{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 16px;margin-bottom:12px}
.samples{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:14px;align-items:start}
.samples article{margin:0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 14px;margin:0 0 10px}
dt{color:var(--faint);font-size:12.5px;padding-top:1px}dd{margin:0;overflow-wrap:anywhere;white-space:pre-wrap}
table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;font-weight:500;font-size:12.5px;color:var(--faint);padding:3px 14px 3px 0;white-space:nowrap}
td{border-top:1px solid var(--rule);padding:4px 14px 4px 0;vertical-align:top;overflow-wrap:anywhere}
td:first-child,.scroll td:nth-child(2){color:var(--soft);white-space:nowrap;font-variant-numeric:tabular-nums;width:1%}
.samples tbody tr:last-child td:last-child{font-weight:550}
.samples details tbody tr:last-child td:last-child{font-weight:400}
summary{cursor:pointer;color:var(--soft);font-size:12.5px;margin-top:8px}
.scroll{max-height:340px;overflow:auto}
pre{margin:0;overflow:auto;font:13px/1.55 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;tab-size:2}
pre .c{color:var(--faint)}pre .s{font-weight:700}pre .k{color:var(--a)}
footer{margin-top:30px;color:var(--faint);font-size:12.5px}
@media print{.chart,article,.panel,.tile{break-inside:avoid}}
)css";

// Hover: finds the nearest step under the pointer and shows each series' value there.
constexpr std::string_view kScript = R"js(
'use strict';
const count = n => Math.round(n).toLocaleString('en');
const duration = s => s < 60 ? Math.round(s) + 's' : s < 3600 ? Math.floor(s / 60) + 'm ' + String(Math.round(s % 60)).padStart(2, '0') + 's'
  : Math.floor(s / 3600) + 'h ' + String(Math.floor(s / 60) % 60).padStart(2, '0') + 'm';
const number = v => Math.abs(v) >= 1000 ? count(v) : String(Number(v.toPrecision(5)));
function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (points[middle][0] < step) low = middle + 1; else high = middle; }
  return low > 0 && step - points[low - 1][0] < points[low][0] - step ? points[low - 1] : points[low];
}
for (const figure of document.querySelectorAll('.chart')) {
  const series = JSON.parse(figure.querySelector('script').textContent);
  const svg = figure.querySelector('svg'), tip = figure.querySelector('.tip'), cursor = figure.querySelector('.cursor');
  const [x0, x1] = figure.dataset.x.split(',').map(Number), [y0, y1, log] = figure.dataset.y.split(',').map(Number);
  const box = svg.viewBox.baseVal, left = LEFT, right = box.width - RIGHT, top = TOP, bottom = box.height - BOTTOM;
  const px = v => left + (v - x0) / (x1 - x0) * (right - left);
  const py = v => bottom - (log ? Math.log(v / y0) / Math.log(y1 / y0) : (v - y0) / (y1 - y0)) * (bottom - top);
  const marks = series.map(s => {
    const mark = document.createElementNS(svg.namespaceURI, 'circle');
    mark.setAttribute('class', 'dot ' + s.style); mark.setAttribute('r', 4); mark.setAttribute('visibility', 'hidden');
    return svg.appendChild(mark);
  });
  const hide = () => { tip.hidden = true; for (const m of [cursor, ...marks]) m.setAttribute('visibility', 'hidden'); };
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('pointermove', event => {
    const area = svg.getBoundingClientRect(), at = (event.clientX - area.left) / area.width * box.width;
    const step = x0 + (Math.min(Math.max(at, left), right) - left) / (right - left) * (x1 - x0);
    let main = null;
    for (const s of series) { const p = nearest(s.points, step); if (!main || Math.abs(p[0] - step) < Math.abs(main[0] - step)) main = p; }
    tip.replaceChildren();
    const head = document.createElement('div');
    head.textContent = 'step ' + count(main[0]) + ' · epoch ' + number(main[2]) + ' · ' + duration(main[3]);
    tip.append(head);
    series.forEach((s, i) => {
      const p = nearest(s.points, main[0]);
      // A series that has no point near the shown step says where its value is from.
      const apart = Math.abs(p[0] - main[0]) > (x1 - x0) / 100;
      marks[i].setAttribute('cx', px(p[0])); marks[i].setAttribute('cy', py(p[1])); marks[i].setAttribute('visibility', apart ? 'hidden' : 'visible');
      const key = document.createElement('span'), value = document.createElement('b');
      key.className = 'key ' + s.style;
      value.textContent = number(p[1]);
      key.append(document.createElement('i'), s.name + (apart ? ' (step ' + count(p[0]) + ')' : ''), value);
      tip.append(key);
    });
    cursor.setAttribute('x1', px(main[0])); cursor.setAttribute('x2', px(main[0])); cursor.setAttribute('visibility', 'visible');
    tip.hidden = false;
    const place = px(main[0]) / box.width * area.width, width = tip.offsetWidth;
    tip.style.left = Math.max(0, place + 14 + width < area.width ? place + 14 : place - 14 - width) + 'px';
  });
}
)js";

std::string script_text() {
  std::string text(kScript);
  for (auto [name, value] :
       {std::pair("LEFT", kLeft), std::pair("RIGHT", kRight), std::pair("TOP", kTop), std::pair("BOTTOM", kBottom)})
    text.replace(text.find(name), std::string_view(name).size(), fmt::format("{}", value));
  return text;
}

std::string section(std::string_view heading, std::string_view id, const std::string& content) {
  return content.empty() ? "" : fmt::format("<section id=\"{}\"><h2>{}</h2>{}</section>\n", id, heading, content);
}

}  // namespace

std::string report_html(const ReportInput& input) {
  const auto entries = input.entries;
  using E = MetricsEntry;
  const auto of = [&](MetricsKind kind, std::optional<double> E::*field, const char* name, const char* style) {
    Series s = series_of(entries, kind, field, name, style);
    s.dots = kind == MetricsKind::kValid;
    return s;
  };
  const auto train = MetricsKind::kTrain, valid = MetricsKind::kValid;
  const Chart charts[] = {
      {.title = "Loss",
       .unit = "nats a target token",
       .series = {of(train, &E::loss, "training", "a"), of(valid, &E::loss, "validation", "b")},
       .noisy = true},
      {.title = "BLEU", .unit = "validation, percent", .series = {of(valid, &E::bleu, "BLEU", "b")}, .from_zero = true},
      {.title = "Perplexity",
       .unit = "validation",
       .series = {of(train, &E::ppl, "training", "a"), of(valid, &E::ppl, "validation", "b")},
       .may_be_log = true},
      {.title = "Learning rate", .unit = "", .series = {of(train, &E::lr, "learning rate", "a")}, .from_zero = true},
      {.title = "Gradient norm",
       .unit = "before clipping",
       .series = {of(train, &E::grad_norm, "gradient norm", "a")},
       .from_zero = true,
       .may_be_log = true,
       .noisy = true},
      {.title = "Speed",
       .unit = "target tokens/s",
       .series = {of(train, &E::tokens_per_s, "tokens/s", "a")},
       .from_zero = true,
       .noisy = true},
  };
  std::string drawings;
  for (const auto& chart : charts) drawings += chart_html(chart);

  std::string html = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\">"
      "<title>{} - Frit report</title><style>{}</style></head>\n<body><main>\n<header><h1>{}</h1>{}</header>\n",
      escape(input.title), kStyle, escape(input.title), input.note.empty() ? "" : "<p>" + escape(input.note) + "</p>");
  if (entries.empty()) {
    html += "<p>This run has written no metrics yet.</p>\n";
  } else {
    html += "<div class=\"tiles\">" + tiles_html(entries) + "</div>\n";
    html += drawings.empty() ? "<p>There is nothing to draw: no entry holds a loss, rate or score.</p>\n"
                             : "<div class=\"charts\">" + drawings + "</div>\n";
  }
  const std::string samples = samples_html(entries);
  html += section("Samples", "samples", samples.empty() ? "" : "<div class=\"samples\">" + samples + "</div>");
  const std::string events = events_html(entries);
  html += section("Events", "events", events.empty() ? "" : "<div class=\"panel\">" + events + "</div>");
  html += section("Configuration", "configuration",
                  input.configuration.empty()
                      ? ""
                      : "<div class=\"panel\"><pre>" + configuration_html(input.configuration) + "</pre></div>");
  html += fmt::format(
      "<footer>Made by frit report from {} metrics lines{}. Charts of more than {} points keep the least and greatest "
      "of each stretch.</footer>\n",
      format_count(static_cast<int64_t>(entries.size())),
      input.damaged_lines > 0 ? fmt::format("; {} damaged lines were passed over", format_count(input.damaged_lines))
                              : "",
      format_count(kReportPoints));
  return html + "</main>\n<script>" + script_text() + "</script>\n</body></html>\n";
}

fs::path write_report(const fs::path& run, const fs::path& output) {
  const fs::path metrics = run / "metrics.jsonl";
  if (!fs::exists(metrics)) fail("[report] {} is no run directory: it holds no metrics.jsonl", run.string());
  const MetricsFile file = read_metrics(metrics);
  std::string configuration;
  for (const char* name : {"config.toml", "config.yaml", "config.json"}) {
    if (fs::exists(run / name)) {
      configuration = read_file(run / name);
      break;
    }
  }
  // "runs/a/" and "." have no last part of their own.
  std::string title = fs::weakly_canonical(run).filename().string();
  if (title.empty()) title = run.string();
  const ReportInput input{.title = title,
                          .entries = file.entries,
                          .configuration = configuration,
                          .note = "",
                          .damaged_lines = file.damaged_lines};
  const fs::path path = output.empty() ? run / "report.html" : output;
  write_file_atomically(path, report_html(input));
  return path;
}

}  // namespace frit
