// Raw text files, read line by line in bounded memory; whatever is left out is counted.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace frit {

// Byte position of the first byte that is not part of valid UTF-8 (RFC 3629: no overlong form, no surrogate, nothing
// above U+10FFFF), or -1 if all of text is valid.
int64_t first_invalid_utf8(std::string_view text);

// What to do with a line that is not valid UTF-8.
enum class InvalidUtf8 : uint8_t { kError, kSkip };

struct TextOptions {
  InvalidUtf8 invalid_utf8 = InvalidUtf8::kError;
  int64_t max_line_bytes = 1 << 20;  // longer lines are left out and counted; bounds the memory of a reader
};

enum class LineState : uint8_t { kOk, kInvalidUtf8, kTooLong };

// Reads one file. A line ends at '\n' or at the end of the file; one '\r' before it and a UTF-8 BOM at the start of the
// file are taken off. NUL bytes are text. Lines that are no text are returned too, with their state, so that order is
// kept.
class LineReader {
 public:
  // path "-" reads standard input, as it arrives. Errors: frit::Error if the file cannot be opened.
  explicit LineReader(std::string path, int64_t max_line_bytes = TextOptions{}.max_line_bytes);
  ~LineReader();
  LineReader(LineReader&&) noexcept;
  LineReader& operator=(LineReader&&) noexcept;

  // The next line, valid until the next call; empty unless *state is kOk. false at the end of the file.
  // Errors: frit::Error if reading fails.
  bool next(std::string_view* line, LineState* state);

  const std::string& path() const { return path_; }
  int64_t number() const { return number_; }          // of the last line returned, from 1
  int64_t bytes_read() const { return bytes_read_; }  // of the file so far
  int64_t crlf_lines() const { return crlf_lines_; }  // lines whose '\r' was taken off
  bool had_bom() const { return had_bom_; }
  // One line for humans about the last line returned: "a.en:7: invalid UTF-8 at byte 12 (0xff)".
  std::string complaint() const;

 private:
  bool fill();
  std::string path_;
  int fd_ = -1;
  bool owns_fd_ = false, end_ = false, had_bom_ = false;
  std::unique_ptr<char[]> buffer_;
  int64_t capacity_ = 0, begin_ = 0, filled_ = 0, max_line_bytes_ = 0;
  int64_t number_ = 0, bytes_read_ = 0, crlf_lines_ = 0, bad_byte_ = -1;
  LineState state_ = LineState::kOk;
  int bad_value_ = 0;
};

// What happened to the lines of a pair of files: lines = kept + empty + too_long + invalid_utf8.
struct TextCounts {
  int64_t lines = 0;         // pairs read
  int64_t kept = 0;          // pairs handed on
  int64_t empty = 0;         // pairs left out because a side was empty or only white space
  int64_t too_long = 0;      // pairs left out because a side was longer than max_line_bytes
  int64_t invalid_utf8 = 0;  // pairs left out because a side was not valid UTF-8
  int64_t crlf = 0;          // lines (of either file) whose '\r' was taken off
  int64_t bom = 0;           // files whose BOM was taken off

  // "200,789 line pairs: 200,700 kept; left out: 80 empty, 9 too long, 0 not valid UTF-8; CR taken off 12 lines".
  std::string to_string() const;
};

// Reads two files in step: line i of one is the translation of line i of the other.
class ParallelReader {
 public:
  ParallelReader(std::string source_path, std::string target_path, TextOptions options = {});

  // The next pair in which both sides are text; valid until the next call. false at the end.
  // Errors: frit::Error if the files have different numbers of lines (found at the end; both numbers are given), or for
  // invalid UTF-8 under InvalidUtf8::kError (file, line and byte are given).
  bool next(std::string_view* source, std::string_view* target);

  const TextCounts& counts() const { return counts_; }
  int64_t bytes_read() const { return source_.bytes_read() + target_.bytes_read(); }

 private:
  LineReader source_, target_;
  TextOptions options_;
  TextCounts counts_;
};

// "1234567" as "1,234,567".
std::string with_commas(int64_t number);

}  // namespace frit
