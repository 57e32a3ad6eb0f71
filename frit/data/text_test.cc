#include "frit/data/text.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>

#include "frit/core/error.h"
#include "frit/data/hash.h"
#include "frit/data/test_corpus.h"

namespace frit {
namespace {

struct Read {
  std::vector<std::string> lines;
  std::vector<LineState> states;
  std::vector<std::string> complaints;
  int64_t crlf = 0;
  bool bom = false;
};

Read read_lines(const std::string& path, int64_t max_line_bytes = TextOptions{}.max_line_bytes) {
  LineReader reader(path, max_line_bytes);
  Read result;
  std::string_view line;
  LineState state;
  while (reader.next(&line, &state)) {
    result.lines.emplace_back(line);
    result.states.push_back(state);
    result.complaints.push_back(reader.complaint());
    EXPECT_EQ(reader.number(), static_cast<int64_t>(result.lines.size()));
  }
  EXPECT_FALSE(reader.next(&line, &state));
  EXPECT_EQ(reader.bytes_read(), static_cast<int64_t>(std::filesystem::file_size(path)));
  result.crlf = reader.crlf_lines(), result.bom = reader.had_bom();
  return result;
}

TEST(Utf8, AgreesWithTheDefinitionForEveryCodePointAndEveryPairOfBytes) {
  // Every code point in its only form.
  for (uint32_t c = 0; c <= 0x110005; ++c) {
    std::string s;
    if (c < 0x80)
      s = {static_cast<char>(c)};
    else if (c < 0x800)
      s = {static_cast<char>(0xc0 | c >> 6), static_cast<char>(0x80 | (c & 63))};
    else if (c < 0x10000)
      s = {static_cast<char>(0xe0 | c >> 12), static_cast<char>(0x80 | (c >> 6 & 63)),
           static_cast<char>(0x80 | (c & 63))};
    else
      s = {static_cast<char>(0xf0 | c >> 18), static_cast<char>(0x80 | (c >> 12 & 63)),
           static_cast<char>(0x80 | (c >> 6 & 63)), static_cast<char>(0x80 | (c & 63))};
    const bool valid = c <= 0x10ffff && !(c >= 0xd800 && c <= 0xdfff);
    ASSERT_EQ(first_invalid_utf8(s) < 0, valid) << std::hex << c;
    // Cut short it is never valid.
    for (size_t n = 1; n < s.size(); ++n) ASSERT_EQ(first_invalid_utf8(s.substr(0, n)), 0) << std::hex << c;
  }
  for (int a = 0; a < 256; ++a)
    for (int b = 0; b < 256; ++b) {
      const std::string s = {static_cast<char>(a), static_cast<char>(b)};
      const int64_t expected = a < 0x80 ? (b < 0x80 ? -1 : 1) : (a >= 0xc2 && a <= 0xdf && (b & 0xc0) == 0x80 ? -1 : 0);
      ASSERT_EQ(first_invalid_utf8(s), expected) << a << " " << b;
    }
}

TEST(Utf8, FindsTheFirstBadByteAtEveryPosition) {
  const std::string good = "Grüße aus München, 20 € – 🙂 und mehr, langer ASCII-Text zum Schluß.";
  EXPECT_EQ(first_invalid_utf8(good), -1);
  EXPECT_EQ(first_invalid_utf8(""), -1);
  for (const char* bad :
       {"\x80", "\xbf", "\xc0\xaf", "\xc1\xbf", "\xe0\x80\x80", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x80\x80\x80",
        "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xfe", "\xff", "\xe2\x82", "\xf0\x9f\x99"})
    for (size_t at = 0; at <= good.size(); ++at) {
      if (at < good.size() && (good[at] & 0xc0) == 0x80) continue;
      const std::string text = good.substr(0, at) + bad + "z" + good.substr(at);
      ASSERT_EQ(first_invalid_utf8(text), static_cast<int64_t>(at)) << at;
    }
}

TEST(LineReader, TakesOffBomAndCarriageReturns) {
  TemporaryDirectory dir;
  const Read r = read_lines(dir.write("a",
                                      "\xef\xbb\xbf"
                                      "Übung\r\nzwei\n\r\n\xef\xbb\xbfinnen\r\r\nohne Ende\r"));
  EXPECT_EQ(r.lines, (std::vector<std::string>{"Übung", "zwei", "", "\xef\xbb\xbfinnen\r", "ohne Ende"}));
  EXPECT_EQ(r.crlf, 4);
  EXPECT_TRUE(r.bom);
}

TEST(LineReader, CountsLinesAsEditorsDo) {
  TemporaryDirectory dir;
  EXPECT_EQ(read_lines(dir.write("a", "")).lines.size(), 0u);
  EXPECT_EQ(read_lines(dir.write("b", "\n")).lines, (std::vector<std::string>{""}));
  EXPECT_EQ(read_lines(dir.write("c", "a\n\nb")).lines, (std::vector<std::string>{"a", "", "b"}));
  EXPECT_EQ(read_lines(dir.write("d", std::string("a\0b\n\0\n", 6))).lines,
            (std::vector<std::string>{std::string("a\0b", 3), std::string("\0", 1)}));
  EXPECT_EQ(read_lines(dir.write("e", "\xef\xbb\xbf")).lines, (std::vector<std::string>{""}));
}

TEST(LineReader, KeepsTheOrderOfLinesThatAreNoText) {
  TemporaryDirectory dir;
  const Read r = read_lines(
      dir.write("a", "gut\nka\xffputt\n" + std::string(101, 'x') + "\n" + std::string(100, 'y') + "\nEnde"), 100);
  EXPECT_EQ(r.lines, (std::vector<std::string>{"gut", "", "", std::string(100, 'y'), "Ende"}));
  EXPECT_EQ(r.states, (std::vector<LineState>{LineState::kOk, LineState::kInvalidUtf8, LineState::kTooLong,
                                              LineState::kOk, LineState::kOk}));
  EXPECT_EQ(r.complaints[1], dir / "a:2: invalid UTF-8 at byte 3 of the line (0xff)");
  EXPECT_EQ(r.complaints[2], dir / "a:3: the line is longer than 100 bytes");
  EXPECT_EQ(r.complaints[0], "");
}

TEST(LineReader, BuffersNeverCutALine) {
  // Line lengths around the buffer's size, whose line ends fall on every side of its border.
  TemporaryDirectory dir;
  std::vector<std::string> lines;
  for (int64_t n : {65530, 65534, 65535, 65536, 65537, 65538, 65541, 70000, 1, 0, 131072, 200000, 3, 65536})
    lines.push_back(std::string(static_cast<size_t>(n), 'a' + n % 26));
  const std::string path = dir.write("a", join_lines(lines));
  EXPECT_EQ(read_lines(path).lines, lines);
  for (int64_t max : {1, 3, 65536, 70000, 131072}) {
    const Read r = read_lines(path, max);
    ASSERT_EQ(r.lines.size(), lines.size());
    for (size_t i = 0; i < lines.size(); ++i) {
      const bool fits = static_cast<int64_t>(lines[i].size()) <= max;
      EXPECT_EQ(r.states[i], fits ? LineState::kOk : LineState::kTooLong) << max << " " << i;
      EXPECT_EQ(r.lines[i], fits ? lines[i] : "");
    }
  }
}

TEST(LineReader, SaysWhenAFileCannotBeRead) {
  EXPECT_EQ(error_of([] { LineReader r("/nowhere/at-all.en"); }),
            "[text] cannot open /nowhere/at-all.en: No such file or directory");
  TemporaryDirectory dir;
  EXPECT_NE(error_of([&] { read_lines(dir.path()); }).find("Is a directory"), std::string::npos);
}

TEST(ParallelReader, CountsWhateverIsLeftOut) {
  TemporaryDirectory dir;
  const std::string en = dir.write(
      "en", "\xef\xbb\xbfOne.\r\n\nThree.\n  \t \nFive.\nSix " + std::string(200, 'x') + "\nbad \xc3(\nEight.\n");
  const std::string de = dir.write("de", "Eins.\nZwei.\n\nVier.\r\nFünf.\nSechs\nSieben\nAcht.\n");
  ParallelReader reader(en, de, {.invalid_utf8 = InvalidUtf8::kSkip, .max_line_bytes = 100});
  std::vector<std::string> kept;
  std::string_view a, b;
  while (reader.next(&a, &b)) kept.push_back(std::string(a) + "|" + std::string(b));
  EXPECT_EQ(kept, (std::vector<std::string>{"One.|Eins.", "Five.|Fünf.", "Eight.|Acht."}));
  const TextCounts& c = reader.counts();
  EXPECT_EQ(c.lines, c.kept + c.empty + c.too_long + c.invalid_utf8);
  EXPECT_EQ(c.to_string(),
            "8 line pairs: 3 kept; left out: 3 empty, 1 too long, 1 not valid UTF-8; CR taken off 2 lines; BOM taken "
            "off 1 file");
}

TEST(ParallelReader, ErrorsNameFileAndLine) {
  TemporaryDirectory dir;
  auto read_all = [](const std::string& a, const std::string& b) {
    return error_of([&] {
      ParallelReader reader(a, b);
      std::string_view x, y;
      while (reader.next(&x, &y)) {
      }
    });
  };
  const std::string three = dir.write("three", "a\nb\nc\n"), five = dir.write("five", "a\nb\n\nd\ne");
  EXPECT_EQ(read_all(three, five), "[text] " + three + " has 3 lines and " + five +
                                       " has 5: line i of one must be the translation of line i of the other");
  EXPECT_EQ(read_all(five, three), "[text] " + five + " has 5 lines and " + three +
                                       " has 3: line i of one must be the translation of line i of the other");
  EXPECT_EQ(read_all(three, dir.write("bad", "a\nb\x80\nc\n")),
            "[text] " + dir / "bad:2: invalid UTF-8 at byte 2 of the line (0x80)");
  EXPECT_NE(read_all(dir.write("utf16", std::string("\xff\xfe"
                                                    "a\0\n\0",
                                                    6)),
                     three)
                .find("the file looks like UTF-16"),
            std::string::npos);
  EXPECT_EQ(read_all(three, three), "no error");
  EXPECT_EQ(read_all(dir.write("none", ""), dir / "none"), "no error");
}

TEST(ParallelReader, ReadsAMillionLinesInBoundedMemory) {
  TemporaryDirectory dir;
  std::string text;
  for (int i = 0; i < 1000000; ++i) text += "Zeile äöü\n";
  const std::string path = dir.write("a", text);
  ParallelReader reader(path, path);
  std::string_view a, b;
  int64_t equal = 0;
  while (reader.next(&a, &b)) equal += a == b;
  EXPECT_EQ(equal, 1000000);
}

TEST(WithCommas, GroupsDigits) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1000), "1,000");
  EXPECT_EQ(with_commas(-123456), "-123,456");
  EXPECT_EQ(with_commas(1234567), "1,234,567");
}

TEST(Hash64, DependsOnBytesNotOnCuts) {
  std::string bytes;
  for (int i = 0; i < 1000; ++i) bytes += static_cast<char>(i * 31 + i / 7);
  auto hash = [](std::string_view all, size_t step) {
    Hash64 h;
    for (size_t i = 0; i < all.size(); i += step) h.update(all.substr(i, step));
    return h.value();
  };
  const uint64_t whole = hash(bytes, bytes.size());
  for (size_t step : {1, 3, 7, 8, 9, 64, 999}) EXPECT_EQ(hash(bytes, step), whole) << step;
  for (size_t i = 0; i < bytes.size(); ++i) {  // any changed byte, any missing end, shows
    std::string other = bytes;
    other[i] ^= 1;
    EXPECT_NE(hash(other, 8), whole);
    EXPECT_NE(hash(bytes.substr(0, i), 8), whole);
  }
  EXPECT_NE(hash(std::string(8, '\0'), 8), hash(std::string(16, '\0'), 8));
}

}  // namespace
}  // namespace frit
