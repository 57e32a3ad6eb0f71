#include "frit/data/token_file.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>

#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/core/thread_pool.h"
#include "frit/data/hash.h"
#include "frit/data/test_corpus.h"

namespace frit {
namespace {

class TokenFileTest : public testing::Test {
 protected:
  void SetUp() override {
    english_ = made_up_lines(false, 1000), german_ = made_up_lines(true, 1000);
    english_[10] = "", german_[20] = "  ";
    write_texts();
  }
  void write_texts() {
    dir_.write("en", join_lines(english_));
    dir_.write("de", join_lines(german_));
  }
  static const Tokenizer& tokenizer() {
    static const Tokenizer t = [] {
      TemporaryDirectory dir;
      return Tokenizer::train(dir.write("en", join_lines(made_up_lines(false, 300))),
                              dir.write("de", join_lines(made_up_lines(true, 300))), {.vocabulary = 400});
    }();
    return t;
  }
  TokenFile open_or_build(bool* built, const Tokenizer& t, const TokenFileOptions& options = {}) {
    return TokenFile::open_or_build(dir_ / "tokens", dir_ / "en", dir_ / "de", t, pool_, options, built);
  }

  TemporaryDirectory dir_;
  ThreadPool pool_{2};
  std::vector<std::string> english_, german_;
};

TEST_F(TokenFileTest, HoldsEveryPairInOrder) {
  const TokenFile file = TokenFile::build(dir_ / "tokens", dir_ / "en", dir_ / "de", tokenizer(), pool_);
  EXPECT_EQ(dir_.files(), (std::vector<std::string>{"de", "en", "tokens"}));
  ASSERT_EQ(file.sentences(), 998);
  EXPECT_EQ(file.id_bytes(), 2);
  EXPECT_EQ(file.vocabulary_size(Side::kSource), 400);
  EXPECT_EQ(file.counts().to_string(), "1,000 line pairs: 998 kept; left out: 2 empty, 0 too long, 0 not valid UTF-8");
  EXPECT_EQ(file.tokenizer_hash(), tokenizer().hash());
  int64_t sentence = 0, source_tokens = 0, target_tokens = 0;
  for (size_t i = 0; i < english_.size(); ++i) {
    if (i == 10 || i == 20) continue;
    std::vector<int32_t> source(static_cast<size_t>(file.source_length(sentence))),
        target(static_cast<size_t>(file.target_length(sentence)));
    file.read_source(sentence, source.data()), file.read_target(sentence, target.data());
    auto expected = tokenizer().encode(Side::kSource, english_[i]);
    expected.push_back(0);
    ASSERT_EQ(source, expected);
    EXPECT_EQ(tokenizer().decode(target), german_[i]);
    EXPECT_EQ(target.back(), 0);
    source_tokens += file.source_length(sentence), target_tokens += file.target_length(sentence);
    ++sentence;
  }
  EXPECT_EQ(file.source_tokens(), source_tokens);
  EXPECT_EQ(file.target_tokens(), target_tokens);
}

TEST_F(TokenFileTest, BytesDoNotDependOnThreadsOrReader) {
  // More than one chunk, so that their joints are seen.
  english_ = made_up_lines(false, 9000), german_ = made_up_lines(true, 9000);
  write_texts();
  ThreadPool one(1), five(5);
  TokenFile::build(dir_ / "a", dir_ / "en", dir_ / "de", tokenizer(), one);
  int64_t last_done = 0, total = 0;
  TokenFileOptions options;
  options.progress = [&](int64_t done, int64_t all) {
    EXPECT_GE(done, last_done);
    last_done = done, total = all;
  };
  const TokenFile b = TokenFile::build(dir_ / "b", dir_ / "en", dir_ / "de", tokenizer(), five, options);
  EXPECT_EQ(read_file(dir_ / "a"), read_file(dir_ / "b"));
  EXPECT_EQ(last_done, total);
  EXPECT_EQ(total, static_cast<int64_t>(join_lines(english_).size() + join_lines(german_).size()));
  EXPECT_EQ(b.sentences(), 9000);
  for (int64_t i : {0, 127, 128, 8191, 8192, 8999}) {
    std::vector<int32_t> ids(static_cast<size_t>(b.target_length(i)));
    b.read_target(i, ids.data());
    EXPECT_EQ(tokenizer().decode(ids), german_[static_cast<size_t>(i)]);
  }
}

TEST_F(TokenFileTest, IsReusedUntilTextTokenizerOrOptionsChange) {
  bool built = false;
  open_or_build(&built, tokenizer());
  EXPECT_TRUE(built);
  const auto time = std::filesystem::last_write_time(dir_ / "tokens");
  EXPECT_EQ(open_or_build(&built, tokenizer()).counts().empty, 2);
  EXPECT_FALSE(built);
  EXPECT_EQ(std::filesystem::last_write_time(dir_ / "tokens"), time);

  TokenFileOptions options;
  options.text.max_line_bytes = 100;
  EXPECT_GT(open_or_build(&built, tokenizer(), options).counts().too_long, 0);
  EXPECT_TRUE(built);

  std::filesystem::last_write_time(dir_ / "de", time + std::chrono::seconds(5));
  open_or_build(&built, tokenizer());
  EXPECT_TRUE(built);
  german_[3] += " und mehr";
  write_texts();
  open_or_build(&built, tokenizer());
  EXPECT_TRUE(built);

  const Tokenizer other = Tokenizer::train(dir_ / "en", dir_ / "de", {.vocabulary = 380});
  const TokenFile file = open_or_build(&built, other);
  EXPECT_TRUE(built);
  file.require_tokenizer(other);
  EXPECT_NE(error_of([&] { file.require_tokenizer(tokenizer()); }).find("made with another tokenizer"),
            std::string::npos);
}

TEST_F(TokenFileTest, WideVocabulariesTake32Bits) {
  // A vocabulary above 65536, by way of a vocab.json with a gap before <pad>.
  tokenizer().save(dir_ / "t");
  std::string json = read_file(dir_ / "t/vocab.json");
  const std::string pad = "\"<pad>\": 399", house = "\"▁house\": ";
  json.replace(json.find(pad), pad.size(), "\"<pad>\": 70000");
  const size_t at = json.find(house) + house.size();
  json.replace(at, json.find_first_of(",\n", at) - at, "69999");
  dir_.write("t/vocab.json", json);
  const Tokenizer wide = Tokenizer::load(dir_ / "t");
  const TokenFile file = TokenFile::build(dir_ / "tokens", dir_ / "en", dir_ / "de", wide, pool_);
  EXPECT_EQ(file.id_bytes(), 4);
  EXPECT_EQ(file.vocabulary_size(Side::kTarget), 70001);
  bool seen = false;
  for (int64_t i = 0; i < file.sentences(); ++i) {
    std::vector<int32_t> ids(static_cast<size_t>(file.source_length(i)));
    file.read_source(i, ids.data());
    seen |= std::count(ids.begin(), ids.end(), 69999) > 0;
  }
  EXPECT_TRUE(seen);
}

TEST_F(TokenFileTest, DamageIsFoundWhereverItIs) {
  // Few pairs, so that every byte can be tried.
  dir_.write("en", "a house\nold tree\n"), dir_.write("de", "ein Haus\nalter Baum\n");
  TokenFile::build(dir_ / "tokens", dir_ / "en", dir_ / "de", tokenizer(), pool_);
  const std::string good = read_file(dir_ / "tokens");
  auto error = [&](const std::string& bytes) { return error_of([&] { TokenFile::open(dir_.write("bad", bytes)); }); };
  EXPECT_EQ(error(good), "no error");
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] ^= 0x10;
    ASSERT_NE(error(bad), "no error") << i;
    ASSERT_NE(error(good.substr(0, i)), "no error") << i;
  }
  EXPECT_NE(error(good + "x").find("cut short or changed"), std::string::npos);
  EXPECT_NE(error(good.substr(0, good.size() - 8)).find("cut short or changed"), std::string::npos);
  EXPECT_NE(error("").find("fewer than a header"), std::string::npos);
  EXPECT_NE(error(std::string(1000, 'x')).find("is no token file"), std::string::npos);
  EXPECT_NE(error_of([&] { TokenFile::open(dir_ / "none"); }).find("cannot open"), std::string::npos);
  EXPECT_NE(error_of([&] { TokenFile::open(dir_.path()); }).find("is not a file"), std::string::npos);
  std::string version = good;
  version[8] = 9;
  EXPECT_NE(error(version).find("has version 9, expected 1: build it again"), std::string::npos);

  // Without the checksum over all bytes (as for files too large to read through), reads still never leave the file.
  for (size_t i = 136; i < good.size(); ++i)
    for (int value : {0xff, 0x80, 0x00}) {
      std::string bad = good;
      bad[i] = static_cast<char>(value);
      dir_.write("bad", bad);
      const TokenFile file = TokenFile::open(dir_ / "bad", 0);
      for (int64_t s = 0; s < 2; ++s) {
        std::vector<int32_t> ids(1000);
        try {
          file.read_source(s, ids.data());
          file.read_target(s, ids.data());
        } catch (const Error&) {
        }
        for (int32_t id : ids) ASSERT_TRUE(id >= 0 && id < 65536);
      }
    }
  // A damaged file is only a cache: it is built again.
  std::string bad = good;
  bad[150] ^= 1;
  dir_.write("tokens", bad);
  bool built = false;
  open_or_build(&built, tokenizer());
  EXPECT_TRUE(built);
  EXPECT_EQ(read_file(dir_ / "tokens"), good);
}

TEST_F(TokenFileTest, FailedBuildsLeaveNothingBehind) {
  auto build = [&] { TokenFile::build(dir_ / "tokens", dir_ / "en", dir_ / "de", tokenizer(), pool_); };
  german_.push_back("zu viel");
  write_texts();
  EXPECT_NE(error_of(build).find("has 1,000 lines"), std::string::npos);
  german_.pop_back();
  german_[500] += "\xff";
  write_texts();
  EXPECT_NE(error_of(build).find("de:501: invalid UTF-8"), std::string::npos);
  dir_.write("en", "\n\n"), dir_.write("de", "a\nb\n");
  EXPECT_NE(error_of(build).find("hold no sentence pair: 2 line pairs: 0 kept"), std::string::npos);
  EXPECT_EQ(dir_.files(), (std::vector<std::string>{"de", "en"}));
  EXPECT_NE(error_of([&] {
              TokenFile::build(dir_ / "no/such/tokens", dir_ / "en", dir_ / "de", tokenizer(), pool_);
            }).find("cannot write"),
            std::string::npos);
}

TEST_F(TokenFileTest, StopsBetweenChunksAndLeavesNothingBehind) {
  const std::vector<std::string> english = english_, german = german_;
  for (int i = 1; i < 9; ++i) {  // more than a chunk holds
    english_.insert(english_.end(), english.begin(), english.end());
    german_.insert(german_.end(), german.begin(), german.end());
  }
  write_texts();
  int asked = 0;
  TokenFileOptions options;
  options.stop_requested = [&] { return ++asked == 2; };
  int chunks = 0;
  options.progress = [&](int64_t, int64_t) { ++chunks; };
  bool built;
  EXPECT_THROW(open_or_build(&built, tokenizer(), options), BuildStopped);
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(chunks, 1);
  EXPECT_EQ(dir_.files(), (std::vector<std::string>{"de", "en"}));
  EXPECT_EQ(open_or_build(&built, tokenizer(), options).sentences(), 9 * 998);
  EXPECT_GE(asked, 4);
}

TEST_F(TokenFileTest, InvalidLinesAreCountedWhenSkipped) {
  german_[500] += "\xff";
  write_texts();
  TokenFileOptions options;
  options.text.invalid_utf8 = InvalidUtf8::kSkip;
  bool built;
  EXPECT_EQ(open_or_build(&built, tokenizer(), options).counts().invalid_utf8, 1);
  EXPECT_EQ(open_or_build(&built, tokenizer(), options).counts().invalid_utf8, 1);  // read from the file
  EXPECT_FALSE(built);
}

}  // namespace
}  // namespace frit
