#include "apps/cli/lines.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "frit/core/error.h"
#include "frit/data/text.h"

namespace frit::cli {

LineSource::LineSource(const std::string& path) : name_(path.empty() || path == "-" ? "standard input" : path) {
  if (path.empty() || path == "-") return;
  fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) fail("cannot read {}: {}", path, std::strerror(errno));
}

LineSource::~LineSource() {
  if (fd_ > 0) close(fd_);
}

void LineSource::fill() {
  buffer_.erase(0, begin_);
  begin_ = 0;
  const size_t had = buffer_.size();
  buffer_.resize(had + (size_t{1} << 16));
  ssize_t got;
  do got = read(fd_, buffer_.data() + had, buffer_.size() - had);
  while (got < 0 && errno == EINTR);
  buffer_.resize(had + static_cast<size_t>(got > 0 ? got : 0));
  if (got < 0) fail("cannot read {}: {}", name_, std::strerror(errno));
  if (got == 0) end_ = true;
}

bool LineSource::next(std::string* line) {
  size_t cut;
  while ((cut = buffer_.find('\n', begin_)) == std::string::npos && !end_) fill();
  if (cut == std::string::npos) {
    if (begin_ == buffer_.size()) return false;
    cut = buffer_.size();  // a last line without a newline
  }
  line->assign(buffer_, begin_, cut - begin_);
  begin_ = std::min(cut + 1, buffer_.size());
  if (!line->empty() && line->back() == '\r') line->pop_back();
  if (number_ == 0 && line->starts_with("\xEF\xBB\xBF")) line->erase(0, 3);
  ++number_;
  return true;
}

bool LineSource::ready(int milliseconds) {
  while (!has_line()) {
    pollfd descriptor{fd_, POLLIN, 0};
    if (poll(&descriptor, 1, milliseconds) <= 0) return false;
    fill();
  }
  return true;
}

bool LineSource::is_terminal() const {
  return isatty(fd_) != 0;
}

std::vector<std::string> read_lines(const std::string& path) {
  LineSource source(path);
  std::vector<std::string> lines;
  for (std::string line; source.next(&line);) {
    if (const int64_t bad = first_invalid_utf8(line); bad >= 0)
      fail("{}:{}: invalid UTF-8 at byte {}", source.name(), source.number(), bad + 1);
    lines.push_back(line);
  }
  return lines;
}

}  // namespace frit::cli
