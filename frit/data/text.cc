#include "frit/data/text.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "frit/core/error.h"

namespace frit {
namespace {

bool is_blank(std::string_view line) {
  return line.find_first_not_of(std::string_view(" \t\v\f\r\0", 6)) == std::string_view::npos;
}

}  // namespace

int64_t first_invalid_utf8(std::string_view text) {
  const auto* p = reinterpret_cast<const unsigned char*>(text.data());
  const int64_t n = static_cast<int64_t>(text.size());
  for (int64_t i = 0; i < n;) {
    if (p[i] < 0x80) {
      uint64_t word;
      while (i + 8 <= n && (std::memcpy(&word, p + i, 8), (word & 0x8080808080808080u) == 0)) i += 8;
      while (i < n && p[i] < 0x80) ++i;
      continue;
    }
    const unsigned lead = p[i];
    const int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    if (lead < 0xc2 || lead > 0xf4 || i + more >= n) return i;
    // The second byte's range excludes overlong forms, surrogates and what lies above U+10FFFF.
    const unsigned low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (p[i + 1] < low || p[i + 1] > high) return i;
    for (int k = 2; k <= more; ++k)
      if ((p[i + k] & 0xc0) != 0x80) return i;
    i += more + 1;
  }
  return -1;
}

std::string with_commas(int64_t number) {
  std::string digits = std::to_string(number);
  for (int64_t i = static_cast<int64_t>(digits.size()) - 3; i > (number < 0 ? 1 : 0); i -= 3) digits.insert(static_cast<size_t>(i), 1, ',');
  return digits;
}

LineReader::LineReader(std::string path, int64_t max_line_bytes)
    : path_(std::move(path)), max_line_bytes_(max_line_bytes) {
  FRIT_CHECK(max_line_bytes >= 1, "[text] max_line_bytes is {}, expected at least 1", max_line_bytes);
  if (path_ == "-") {
    fd_ = 0;
  } else {
    fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd_ < 0) fail("[text] cannot open {}: {}", path_, std::strerror(errno));
    owns_fd_ = true;
  }
  // Room for the longest line, its line end and a BOM, so that a line in the buffer is never cut.
  capacity_ = std::max<int64_t>(max_line_bytes_ + 5, 1 << 16);
  buffer_ = std::make_unique<char[]>(static_cast<size_t>(capacity_));
}

LineReader::~LineReader() {
  if (owns_fd_) ::close(fd_);
}

LineReader::LineReader(LineReader&& other) noexcept {
  *this = std::move(other);
}

LineReader& LineReader::operator=(LineReader&& other) noexcept {
  if (this == &other) return *this;
  if (owns_fd_) ::close(fd_);
  path_ = std::move(other.path_);
  fd_ = other.fd_, owns_fd_ = std::exchange(other.owns_fd_, false), end_ = other.end_, had_bom_ = other.had_bom_;
  buffer_ = std::move(other.buffer_);
  capacity_ = other.capacity_, begin_ = other.begin_, filled_ = other.filled_, max_line_bytes_ = other.max_line_bytes_;
  number_ = other.number_, bytes_read_ = other.bytes_read_, crlf_lines_ = other.crlf_lines_;
  bad_byte_ = other.bad_byte_, state_ = other.state_, bad_value_ = other.bad_value_;
  return *this;
}

// Reads more behind what is there; false at the end of the file or when the buffer is full.
bool LineReader::fill() {
  if (begin_ > 0) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, static_cast<size_t>(filled_ - begin_));
    filled_ -= begin_, begin_ = 0;
  }
  if (end_ || filled_ == capacity_) return false;
  ssize_t got;
  do got = ::read(fd_, buffer_.get() + filled_, static_cast<size_t>(capacity_ - filled_));
  while (got < 0 && errno == EINTR);
  if (got < 0) fail("[text] reading {} failed: {}", path_, std::strerror(errno));
  if (got == 0) end_ = true;
  filled_ += got, bytes_read_ += got;
  return got > 0;
}

bool LineReader::next(std::string_view* line, LineState* state) {
  *line = {};
  int64_t seen = 0;  // bytes of this line already searched
  bool too_long = false;
  int64_t length;
  for (;;) {
    const char* from = buffer_.get() + begin_;
    const void* newline = std::memchr(from + seen, '\n', static_cast<size_t>(filled_ - begin_ - seen));
    if (newline != nullptr) {
      length = static_cast<const char*>(newline) - from;
      break;
    }
    seen = filled_ - begin_;
    if (fill()) continue;
    if (end_) {
      if (seen == 0 && !too_long) return false;
      length = seen;
      break;
    }
    too_long = true;  // the buffer is full and holds no line end: skip what is in it
    begin_ = filled_, seen = 0;
  }
  const char* from = buffer_.get() + begin_;
  begin_ = std::min(begin_ + length + 1, filled_);
  ++number_;
  bad_byte_ = -1;
  std::string_view text(from, static_cast<size_t>(length));
  if (number_ == 1 && !too_long && text.substr(0, 3) == "\xef\xbb\xbf") {
    text.remove_prefix(3);
    had_bom_ = true;
  }
  if (!text.empty() && text.back() == '\r') {
    text.remove_suffix(1);
    ++crlf_lines_;
  }
  if (too_long || static_cast<int64_t>(text.size()) > max_line_bytes_) {
    state_ = LineState::kTooLong;
  } else if ((bad_byte_ = first_invalid_utf8(text)) >= 0) {
    state_ = LineState::kInvalidUtf8;
    bad_value_ = static_cast<unsigned char>(text[static_cast<size_t>(bad_byte_)]);
  } else {
    state_ = LineState::kOk;
    *line = text;
  }
  *state = state_;
  return true;
}

std::string LineReader::complaint() const {
  if (state_ == LineState::kTooLong)
    return fmt::format("{}:{}: the line is longer than {} bytes", path_, number_, max_line_bytes_);
  if (state_ == LineState::kInvalidUtf8) {
    // 0xff and 0xfe open a UTF-16 file: the usual cause at the very first byte.
    const char* hint = number_ == 1 && bad_byte_ == 0 && bad_value_ >= 0xfe ? "; the file looks like UTF-16" : "";
    return fmt::format("{}:{}: invalid UTF-8 at byte {} of the line (0x{:02x}){}", path_, number_, bad_byte_ + 1,
                       bad_value_, hint);
  }
  return {};
}

std::string TextCounts::to_string() const {
  std::string out =
      fmt::format("{} line pairs: {} kept; left out: {} empty, {} too long, {} not valid UTF-8", with_commas(lines),
                  with_commas(kept), with_commas(empty), with_commas(too_long), with_commas(invalid_utf8));
  if (crlf > 0) out += fmt::format("; CR taken off {} lines", with_commas(crlf));
  if (bom > 0) out += fmt::format("; BOM taken off {} file{}", bom, bom == 1 ? "" : "s");
  return out;
}

ParallelReader::ParallelReader(std::string source_path, std::string target_path, TextOptions options)
    : source_(std::move(source_path), options.max_line_bytes),
      target_(std::move(target_path), options.max_line_bytes),
      options_(options) {}

bool ParallelReader::next(std::string_view* source, std::string_view* target) {
  LineState source_state, target_state;
  for (;;) {
    const bool more_source = source_.next(source, &source_state), more_target = target_.next(target, &target_state);
    counts_.crlf = source_.crlf_lines() + target_.crlf_lines();
    counts_.bom = source_.had_bom() + target_.had_bom();
    if (more_source != more_target) {
      LineReader& longer = more_source ? source_ : target_;
      std::string_view line;
      LineState state;
      while (longer.next(&line, &state)) {
      }
      fail("[text] {} has {} lines and {} has {}: line i of one must be the translation of line i of the other",
           source_.path(), with_commas(source_.number()), target_.path(), with_commas(target_.number()));
    }
    if (!more_source) return false;
    ++counts_.lines;
    const bool invalid = source_state == LineState::kInvalidUtf8 || target_state == LineState::kInvalidUtf8;
    if (invalid && options_.invalid_utf8 == InvalidUtf8::kError)
      fail("[text] {}", (source_state == LineState::kInvalidUtf8 ? source_ : target_).complaint());
    if (invalid) {
      ++counts_.invalid_utf8;
    } else if (source_state == LineState::kTooLong || target_state == LineState::kTooLong) {
      ++counts_.too_long;
    } else if (is_blank(*source) || is_blank(*target)) {
      ++counts_.empty;
    } else {
      ++counts_.kept;
      return true;
    }
  }
}

}  // namespace frit
