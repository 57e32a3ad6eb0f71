// Corpus BLEU as sacreBLEU computes it: 13a tokens, 1- to 4-grams, exp smoothing, one reference, case kept.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace frit {

// What sacreBLEU prints as its signature for this metric; the version is the release our goldens were made with.
inline constexpr std::string_view kBleuSignature = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0";

// Splits a line as mteval-v13a does: entities decoded, punctuation apart, one space between tokens, none at the ends.
// `line` is UTF-8; bytes that are not stay as they are.
std::string tokenize_13a(std::string_view line);

// BLEU with the counts it came from.
// Math: score = bp * exp(mean over n of log p_n); an n without matches counts 100 / (2^k total_n), k counting such n.
// Units: score and precisions in percent (0 to 100); lengths in 13a tokens.
struct BleuScore {
  double score = 0;
  std::array<int64_t, 4> correct{}, total{};  // matched and all n-grams of the hypotheses, n = 1..4
  std::array<double, 4> precisions{};
  double brevity_penalty = 1;
  int64_t hypothesis_length = 0, reference_length = 0;

  // sacreBLEU's line: "BLEU = 27.12 58.0/33.3/20.1/12.5 (BP = 1.000 ratio = 1.012 hyp_len = 812 ref_len = 802)".
  std::string format() const;
};

// Adds sentence pairs up; score() may be asked at any time.
class CorpusBleu {
 public:
  void add(std::string_view hypothesis, std::string_view reference);
  BleuScore score() const;
  int64_t sentences() const { return sentences_; }

 private:
  std::array<int64_t, 4> correct_{}, total_{};
  int64_t hypothesis_length_ = 0, reference_length_ = 0, sentences_ = 0;
};

// Errors: std::invalid_argument if the counts of hypotheses and references differ. No sentences score 0.
BleuScore corpus_bleu(std::span<const std::string> hypotheses, std::span<const std::string> references);

}  // namespace frit
