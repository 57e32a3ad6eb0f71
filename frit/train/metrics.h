// metrics.jsonl of a run: one JSON object a line, appended and flushed, repaired and cut back on resume.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace frit {

enum class MetricsKind { kTrain, kValid, kSample, kEvent };

// One line of metrics.jsonl. Keys are the fields' names; unset fields and empty texts are left out. A number that is
// not finite is written as null and read as NaN.
struct MetricsEntry {
  MetricsKind kind = MetricsKind::kTrain;  // "train", "valid", "sample", "event"
  int64_t step = 0;                        // optimizer updates done
  double epoch = 0;                        // passes over the data, fraction included
  double time_s = 0;                       // training time since the run began, over all resumes
  std::optional<double> loss;              // nats a target token; in training with label smoothing
  std::optional<double> ppl;               // exp of the cross entropy without smoothing
  std::optional<double> lr;
  std::optional<double> tokens_per_s;         // target tokens
  std::optional<double> grad_norm;            // before clipping
  std::optional<int64_t> target_tokens;       // since the run began
  std::optional<double> bleu;                 // percent
  std::string source, reference, hypothesis;  // kSample
  std::string message;                        // kEvent
};

// One line of JSON without the newline. Bytes that are no UTF-8 become U+FFFD.
std::string format_metrics(const MetricsEntry& entry);

// Errors: frit::Error if the line is not such an object. Unknown keys are ignored.
MetricsEntry parse_metrics(std::string_view line);

struct MetricsFile {
  std::vector<MetricsEntry> entries;
  int64_t damaged_lines = 0;  // lines that could not be read, a torn last one included
};

// Reads a metrics file; damaged lines are counted and passed over. Errors: frit::Error if the file cannot be read.
MetricsFile read_metrics(const std::filesystem::path& path);

// Appends to a metrics file. Each line is one write to an O_APPEND descriptor, so a kill loses at most the line in
// hand.
class MetricsWriter {
 public:
  // What opening for resume did to the file.
  struct Repair {
    int64_t kept = 0;     // lines
    int64_t dropped = 0;  // readable lines written after what is resumed
    int64_t damaged = 0;  // torn or unreadable lines, dropped too
  };

  // Starts a new file. Errors: frit::Error if it exists already or cannot be written.
  static MetricsWriter create(const std::filesystem::path& path);

  // Opens a file to go on after `step`: lines of later steps, readable lines beyond the first `most`, and damaged lines
  // are dropped (the file is rewritten to a temporary name and renamed; untouched when nothing is to drop). A missing
  // file is created. Negative `most`: no limit.
  static MetricsWriter resume(const std::filesystem::path& path, int64_t step, Repair* repair = nullptr,
                              int64_t most = -1);

  MetricsWriter(MetricsWriter&&) noexcept;
  MetricsWriter& operator=(MetricsWriter&&) noexcept;
  ~MetricsWriter();

  // Errors: frit::Error if the line cannot be written whole.
  void append(const MetricsEntry& entry);

  // Forces what was appended onto the disk (call before a checkpoint is committed).
  void sync();

 private:
  MetricsWriter(const std::filesystem::path& path, int flags);
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace frit
