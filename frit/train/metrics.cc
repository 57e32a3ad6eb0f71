#include "frit/train/metrics.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "frit/core/error.h"
#include "frit/core/file.h"

namespace frit {
namespace {

constexpr std::array<std::string_view, 4> kKinds = {"train", "valid", "sample", "event"};  // by MetricsKind

using Number = std::optional<double> MetricsEntry::*;
constexpr std::pair<const char*, Number> kNumbers[] = {
    {"loss", &MetricsEntry::loss},
    {"ppl", &MetricsEntry::ppl},
    {"lr", &MetricsEntry::lr},
    {"tokens_per_s", &MetricsEntry::tokens_per_s},
    {"grad_norm", &MetricsEntry::grad_norm},
    {"bleu", &MetricsEntry::bleu},
};
using Text = std::string MetricsEntry::*;
constexpr std::pair<const char*, Text> kTexts[] = {
    {"source", &MetricsEntry::source},
    {"reference", &MetricsEntry::reference},
    {"hypothesis", &MetricsEntry::hypothesis},
    {"message", &MetricsEntry::message},
};

// Calls with each line of `text`, without its newline.
template <typename F>
void for_each_line(std::string_view text, F&& f) {
  while (!text.empty()) {
    const size_t end = text.find('\n');
    f(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
}

std::optional<MetricsEntry> try_parse(std::string_view line) {
  const auto json = nlohmann::json::parse(line, nullptr, false);
  if (!json.is_object()) return std::nullopt;
  const auto kind = json.find("kind"), step = json.find("step");
  if (kind == json.end() || !kind->is_string() || step == json.end() || !step->is_number_integer()) return std::nullopt;
  MetricsEntry entry;
  const std::string name = kind->get<std::string>();
  const auto* known = std::find(kKinds.begin(), kKinds.end(), name);
  if (known == kKinds.end()) return std::nullopt;
  entry.kind = static_cast<MetricsKind>(known - kKinds.begin());
  entry.step = step->get<int64_t>();
  const auto number = [&](const char* key) -> std::optional<double> {
    const auto at = json.find(key);
    if (at == json.end()) return std::nullopt;
    if (at->is_number()) return at->get<double>();
    return std::numeric_limits<double>::quiet_NaN();
  };
  entry.epoch = number("epoch").value_or(0);
  entry.time_s = number("time_s").value_or(0);
  for (auto [key, field] : kNumbers) entry.*field = number(key);
  const auto tokens = json.find("target_tokens");
  if (tokens != json.end() && tokens->is_number_integer()) entry.target_tokens = tokens->get<int64_t>();
  for (auto [key, field] : kTexts) {
    const auto at = json.find(key);
    if (at != json.end() && at->is_string()) entry.*field = at->get<std::string>();
  }
  return entry;
}

}  // namespace

std::string format_metrics(const MetricsEntry& entry) {
  nlohmann::ordered_json json;
  const auto number = [](double value) {
    return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
  };
  json["step"] = entry.step;
  json["epoch"] = number(entry.epoch);
  json["time_s"] = number(entry.time_s);
  json["kind"] = kKinds[static_cast<size_t>(entry.kind)];
  for (auto [key, field] : kNumbers) {
    if (entry.*field) json[key] = number(*(entry.*field));
  }
  if (entry.target_tokens) json["target_tokens"] = *entry.target_tokens;
  for (auto [key, field] : kTexts) {
    if (!(entry.*field).empty()) json[key] = entry.*field;
  }
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

MetricsEntry parse_metrics(std::string_view line) {
  auto entry = try_parse(line);
  if (!entry)
    fail("[metrics] not a metrics line (an object with an integer \"step\" and a known \"kind\"): '{}'", line);
  return *std::move(entry);
}

MetricsFile read_metrics(const std::filesystem::path& path) {
  MetricsFile file;
  const std::string text = read_file(path);
  for_each_line(text, [&](std::string_view line) {
    if (auto entry = try_parse(line)) {
      file.entries.push_back(*std::move(entry));
    } else {
      ++file.damaged_lines;
    }
  });
  return file;
}

MetricsWriter::MetricsWriter(const std::filesystem::path& path, int flags)
    : path_(path), fd_(::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | flags, 0644)) {
  if (fd_ < 0) fail("[metrics] cannot open {} for writing: {}", path.string(), std::strerror(errno));
}

MetricsWriter MetricsWriter::create(const std::filesystem::path& path) {
  return MetricsWriter(path, O_EXCL);
}

MetricsWriter MetricsWriter::resume(const std::filesystem::path& path, int64_t step, Repair* repair, int64_t most) {
  Repair done;
  if (std::filesystem::exists(path)) {
    const std::string text = read_file(path);
    std::string kept;
    for_each_line(text, [&](std::string_view line) {
      const auto entry = try_parse(line);
      // A last line without its newline may be torn inside a number and still read as JSON only if it closes its brace,
      // and then it is whole: it gets its newline back.
      if (!entry) {
        ++done.damaged;
      } else if (entry->step > step || (most >= 0 && done.kept == most)) {
        ++done.dropped;
      } else {
        ++done.kept;
        kept.append(line).append("\n");
      }
    });
    if (kept != text) write_file_atomically(path, kept);
  }
  if (repair != nullptr) *repair = done;
  return MetricsWriter(path, 0);
}

MetricsWriter::MetricsWriter(MetricsWriter&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

MetricsWriter& MetricsWriter::operator=(MetricsWriter&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  return *this;
}

MetricsWriter::~MetricsWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void MetricsWriter::append(const MetricsEntry& entry) {
  write_all(fd_, format_metrics(entry) + "\n", path_);
}

void MetricsWriter::sync() {
  if (::fdatasync(fd_) != 0) fail("[metrics] cannot sync {}: {}", path_.string(), std::strerror(errno));
}

}  // namespace frit
