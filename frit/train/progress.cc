#include "frit/train/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ostream>

#include "frit/core/error.h"

namespace frit {
namespace {

// Columns a UTF-8 text takes when every character is one column wide (true of all that is written here).
int columns_of(std::string_view text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

// A bar of `width` columns filled to eighths of a column.
std::string bar_text(double fraction, int width) {
  static constexpr std::string_view kParts[] = {" ", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const int eighths = static_cast<int>(std::lround(std::clamp(fraction, 0.0, 1.0) * width * 8));
  std::string text;
  for (int i = 0; i < eighths / 8; ++i) text += "█";
  if (eighths / 8 < width) text += kParts[eighths % 8];
  for (int i = eighths / 8 + 1; i < width; ++i) text += " ";
  return text;
}

}  // namespace

bool is_terminal(int fd) {
  const char* term = std::getenv("TERM");
  return ::isatty(fd) == 1 && term != nullptr && *term != 0 && std::string_view(term) != "dumb";
}

int terminal_columns(int fd) {
  winsize size{};
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9) return "?";
  const int64_t s = std::llround(seconds);
  if (s < 60) return fmt::format("{}s", s);
  if (s < 3600) return fmt::format("{}m {:02}s", s / 60, s % 60);
  if (s < 86400) return fmt::format("{}h {:02}m", s / 3600, s / 60 % 60);
  return fmt::format("{}d {:02}h", s / 86400, s / 3600 % 24);
}

std::string format_count(int64_t value) {
  const std::string digits = fmt::format("{}", value);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && digits[i - 1] != '-' && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

Progress::Progress(std::ostream& out, const ProgressOptions& options) : out_(out), options_(options) {
  FRIT_CHECK(options.interval_s >= 0 && options.redraw_s >= 0,
             "[progress] intervals are {} s and {} s, expected 0 or more", options.interval_s, options.redraw_s);
}

Progress::~Progress() {
  if (drawn_) out_ << "\n" << std::flush;
}

void Progress::update(const ProgressState& state) {
  if (finished_) return;
  last_ = state;
  fresh_ = true;
  if (!started_) {
    started_ = true;
    first_ = shown_ = state;
    return;
  }
  if (state.time_s - shown_.time_s >= (options_.bar ? options_.redraw_s : options_.interval_s)) show();
}

void Progress::message(std::string_view text) {
  if (drawn_) out_ << "\r\x1b[K";
  out_ << text << "\n";
  if (drawn_) out_ << line();
  out_ << std::flush;
}

void Progress::finish() {
  if (finished_) return;
  if (started_ && fresh_) show();
  if (drawn_) out_ << "\n" << std::flush;
  drawn_ = false;
  finished_ = true;
}

void Progress::show() {
  const double elapsed = last_.time_s - shown_.time_s;
  if (elapsed > 0) {
    const double now = static_cast<double>(last_.target_tokens - shown_.target_tokens) / elapsed;
    // The bar redraws many times a second: smooth its rate with a time constant of 3 s.
    const double weight = options_.bar && rate_ > 0 ? 1 - std::exp(-elapsed / 3) : 1;
    rate_ += weight * (now - rate_);
  }
  shown_ = last_;
  fresh_ = false;
  if (options_.bar) {
    out_ << "\r" << line() << "\x1b[K" << std::flush;
    drawn_ = true;
  } else {
    out_ << line() << "\n" << std::flush;
  }
}

std::string Progress::line() const {
  const ProgressState& s = last_;
  const double elapsed = s.time_s - first_.time_s, done = s.fraction - first_.fraction;
  const double eta = s.fraction >= 1 ? 0 : s.fraction >= 0 && done > 0 ? elapsed * (1 - s.fraction) / done : -1;
  const std::string speed = fmt::format("{} tok/s", format_count(std::llround(rate_)));
  if (!options_.bar) {
    std::string text = fmt::format("step {} | epoch {:.2f}", format_count(s.updates), s.epoch);
    if (s.loss) text += fmt::format(" | loss {:.3f}", *s.loss);
    if (s.learning_rate) text += fmt::format(" | lr {:.3g}", *s.learning_rate);
    if (s.grad_norm) text += fmt::format(" | grad {:.3f}", *s.grad_norm);
    text += " | " + speed;
    if (s.fraction >= 0) text += fmt::format(" | {:.1f}%", 100 * s.fraction);
    text += fmt::format(" | {} elapsed", format_duration(elapsed));
    if (s.fraction >= 0) text += " | ETA " + format_duration(eta);
    return text;
  }
  std::string numbers = fmt::format("step {}  ep {:.1f}", format_count(s.updates), s.epoch);
  if (s.loss) numbers += fmt::format("  loss {:.3f}", *s.loss);
  numbers += "  " + speed;
  if (s.fraction >= 0) numbers += "  ETA " + format_duration(eta);
  // One column stays free: writing into the last one wraps on some terminals.
  const int room = options_.columns - 1;
  std::string front;
  if (s.fraction >= 0) {
    const int width = std::min(30, room - columns_of(numbers) - 9);
    const std::string percent = fmt::format("{:3.0f}% ", std::floor(100 * std::clamp(s.fraction, 0.0, 1.0)));
    front = percent;
    if (width >= 5) {
      const std::string bar = bar_text(s.fraction, width);
      front += options_.colour ? "\x1b[36m▕" + bar + "▏\x1b[0m " : "▕" + bar + "▏ ";
      return front + numbers;
    }
  }
  std::string text = front + numbers;
  if (columns_of(text) > room) text.resize(static_cast<size_t>(std::max(0, room)));  // ASCII only without the bar
  return text;
}

}  // namespace frit
