#include "frit/train/bleu.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "frit/core/file.h"

namespace frit {
namespace {

// Made by tools/goldens/make_bleu.py with sacreBLEU.
const nlohmann::json& goldens() {
  static const auto json = [] {
    const char* root = std::getenv("FRIT_SOURCE_DIR");
    return nlohmann::json::parse(read_file(std::string(root != nullptr ? root : ".") + "/tests/goldens/bleu.json"));
  }();
  return json;
}

TEST(Bleu, TokensEqualSacreBleu) {
  ASSERT_GT(goldens()["tokenize"].size(), 400u);
  for (const auto& g : goldens()["tokenize"])
    EXPECT_EQ(tokenize_13a(g["line"].get<std::string>()), g["tokens"]) << g["line"];
}

TEST(Bleu, ScoresEqualSacreBleu) {
  ASSERT_GT(goldens()["corpora"].size(), 20u);
  for (const auto& g : goldens()["corpora"]) {
    SCOPED_TRACE(g["name"].get<std::string>());
    const auto hypotheses = g["hypotheses"].get<std::vector<std::string>>();
    const auto references = g["references"].get<std::vector<std::string>>();
    const BleuScore score = corpus_bleu(hypotheses, references);
    EXPECT_NEAR(score.score, g["score"].get<double>(), 1e-9);
    EXPECT_EQ(score.correct, (g["correct"].get<std::array<int64_t, 4>>()));
    EXPECT_EQ(score.total, (g["total"].get<std::array<int64_t, 4>>()));
    EXPECT_EQ(score.hypothesis_length, g["hyp_len"]);
    EXPECT_EQ(score.reference_length, g["ref_len"]);
    EXPECT_NEAR(score.brevity_penalty, g["bp"].get<double>(), 1e-12);
    for (size_t n = 0; n < 4; ++n) EXPECT_NEAR(score.precisions[n], g["precisions"][n].get<double>(), 1e-9);
    EXPECT_EQ(score.format(), g["format"]);
  }
}

TEST(Bleu, SignatureIsSacreBleus) {
  EXPECT_EQ(kBleuSignature, goldens()["signature"]);
}

TEST(Bleu, AddsUpInAnyOrder) {
  CorpusBleu a, b;
  a.add("ein Haus am See", "ein Haus am großen See");
  a.add("guten Tag", "guten Abend");
  b.add("guten Tag", "guten Abend");
  b.add("ein Haus am See", "ein Haus am großen See");
  EXPECT_EQ(a.score().score, b.score().score);
  EXPECT_EQ(a.sentences(), 2);
  EXPECT_EQ(CorpusBleu().score().score, 0);
}

TEST(Bleu, KeepsBytesThatAreNoUtf8) {
  EXPECT_EQ(tokenize_13a("\xff.\xc3 x\xe2\x80"), "\xff . \xc3 x\xe2\x80");
}

TEST(Bleu, UnequalCountsAreAnError) {
  const std::vector<std::string> one = {"a"}, two = {"a", "b"};
  EXPECT_THROW(corpus_bleu(one, two), std::invalid_argument);
}

}  // namespace
}  // namespace frit
