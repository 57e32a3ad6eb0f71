// Shows how training goes: a bar with ETA and tokens/s on a terminal, one plain line an interval elsewhere.
#pragma once
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>

namespace frit {

// True when the file descriptor is a terminal that understands carriage returns (TERM is set and not "dumb").
bool is_terminal(int fd);

// Columns of the terminal, 80 when unknown.
int terminal_columns(int fd);

// "1h 02m", "3m 05s", "12s"; "?" for negative or not finite.
std::string format_duration(double seconds);

// "1,234,567".
std::string format_count(int64_t value);

struct ProgressOptions {
  bool bar = false;        // one line redrawn in place; otherwise plain lines
  bool colour = false;     // with bar: ANSI colours
  int columns = 80;        // with bar: the terminal's width; the line never wraps
  double interval_s = 10;  // least time between two plain lines
  double redraw_s = 0.1;   // least time between two redraws of the bar
};

// What is known after an update. Unset values are left out of the line.
struct ProgressState {
  double time_s = 0;     // monotonic clock of the caller, any origin
  double fraction = -1;  // share of the training done, 0 to 1; -1: unknown, then no ETA
  int64_t updates = 0;
  double epoch = 0;           // passes over the data, fraction included
  int64_t target_tokens = 0;  // since training began, over all runs
  std::optional<double> loss, learning_rate, grad_norm;
};

// Writes progress to the stream it was given, and nowhere else. Speed and ETA count from the first update() call, so a
// resumed run shows its own. Not thread-safe.
class Progress {
 public:
  Progress(std::ostream& out, const ProgressOptions& options);
  // Finishes the bar's line, so that what follows starts a new one.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Shows the state when the interval has passed; the first state only sets the starting point of speed and ETA.
  void update(const ProgressState& state);

  // Writes a line of its own (validation results, warnings) above the bar.
  void message(std::string_view text);

  // Shows the last state, whatever the interval, and ends the bar's line. Done once; later calls do nothing.
  void finish();

  // Target tokens a second since the last shown line (plain) or smoothed over a few seconds (bar); 0 before two states.
  double tokens_per_s() const { return rate_; }

 private:
  void show();
  std::string line() const;

  std::ostream& out_;
  ProgressOptions options_;
  ProgressState first_, last_, shown_;
  bool started_ = false, finished_ = false, drawn_ = false, fresh_ = false;
  double rate_ = 0;
};

}  // namespace frit
