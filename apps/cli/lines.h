// Lines of a file or of standard input, as they arrive.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace frit::cli {

class LineSource {
 public:
  // path "" or "-" reads standard input. Errors: frit::Error if the file cannot be opened.
  explicit LineSource(const std::string& path);
  ~LineSource();
  LineSource(const LineSource&) = delete;
  LineSource& operator=(const LineSource&) = delete;

  // The next line without its end ("\n" or "\r\n") and without a byte order mark at the start; waits for it. false at
  // the end. Errors: frit::Error if reading fails.
  bool next(std::string* line);
  // True if next() would return at once, or within the milliseconds.
  bool ready(int milliseconds);
  bool is_terminal() const;
  int64_t number() const { return number_; }  // of the last line, from 1
  const std::string& name() const { return name_; }

 private:
  bool has_line() const { return end_ || buffer_.find('\n', begin_) != std::string::npos; }
  void fill();
  int fd_ = 0;
  std::string name_, buffer_;
  size_t begin_ = 0;
  bool end_ = false;
  int64_t number_ = 0;
};

// All lines of a file. Errors: frit::Error if it cannot be read or a line is not UTF-8.
std::vector<std::string> read_lines(const std::string& path);

}  // namespace frit::cli
