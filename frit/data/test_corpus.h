// Small made-up parallel texts for the tests of this folder.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "frit/data/random.h"

namespace frit {

// A directory of its own for each test, removed at the end.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "frit-test-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = pattern;
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(*this / name, std::ios::binary) << bytes;
    return *this / name;
  }
  const std::string& path() const { return path_; }
  // Names of the files in it, for tests that nothing is left behind.
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  std::string path_;
};

// n lines of 1 to 20 words each.
inline std::vector<std::string> made_up_lines(bool german, int n, uint64_t seed = 7) {
  static const std::vector<std::string> kEnglish = {"the",   "green",   "house", "stands", "near",  "a",    "river",
                                                    "and",   "old",     "tree",  "where",  "birds", "sing", "in",
                                                    "May",   "while",   "we",    "walk",   "home",  "slow", "slower",
                                                    "quick", "quickly", "that",  "café",   "€ 5,",  "don't"};
  static const std::vector<std::string> kGerman = {
      "das",  "grüne",   "Haus",      "steht",   "nahe",   "einem", "Fluß",    "und",  "alter",
      "Baum", "wo",      "Vögel",     "singen",  "im",     "Mai",   "während", "wir",  "gehen",
      "heim", "langsam", "langsamer", "schnell", "Straße", "daß",   "Café",    "5 €,", "hörten"};
  static const std::vector<std::string> kEndings = {"",     "",    "",     "",       "",    "er", "en",
                                                    "isch", "ing", "ness", "keiten", "los", "ly"};
  const auto& words = german ? kGerman : kEnglish;
  std::vector<std::string> lines;
  for (int i = 0; i < n; ++i) {
    RandomStream random(seed, RandomUse::kLineSample, 0, i);  // the same length on both sides
    std::string line;
    const uint64_t count = 1 + random.below(20);
    for (uint64_t w = 0; w < count; ++w)
      line += (w > 0 ? " " : "") + words[random.below(words.size())] + kEndings[random.below(kEndings.size())];
    lines.push_back(line + (random.below(2) == 0 ? "." : "!"));
  }
  return lines;
}

inline std::string join_lines(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text.append(line).append("\n");
  return text;
}

template <typename F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace frit
