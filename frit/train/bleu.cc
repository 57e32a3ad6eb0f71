#include "frit/train/bleu.h"

#include <cmath>
#include <unordered_map>
#include <vector>

#include "frit/core/error.h"

namespace frit {
namespace {

// Length in bytes of the whitespace character at the start of `s`, as Python's str.split sees it; 0 if there is none.
size_t space_length(std::string_view s) {
  const auto at = [&](size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : 0u; };
  const unsigned c = at(0);
  if (c == ' ' || (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x1F)) return 1;
  if (c == 0xC2 && (at(1) == 0x85 || at(1) == 0xA0)) return 2;  // next line, no-break space
  if (c == 0xE1 && at(1) == 0x9A && at(2) == 0x80) return 3;    // U+1680
  if (c == 0xE2 && at(1) == 0x80) {                             // U+2000-200A, 2028, 2029, 202F
    const unsigned last = at(2);
    if ((last >= 0x80 && last <= 0x8A) || last == 0xA8 || last == 0xA9 || last == 0xAF) return 3;
  }
  if (c == 0xE2 && at(1) == 0x81 && at(2) == 0x9F) return 3;  // U+205F
  if (c == 0xE3 && at(1) == 0x80 && at(2) == 0x80) return 3;  // ideographic space
  return 0;
}

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> words;
  size_t begin = 0, i = 0;
  while (i < text.size()) {
    const size_t space = space_length(text.substr(i));
    if (space == 0) {
      ++i;
      continue;
    }
    if (i > begin) words.push_back(text.substr(begin, i - begin));
    i += space;
    begin = i;
  }
  if (text.size() > begin) words.push_back(text.substr(begin));
  return words;
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string result;
  size_t at = 0;
  while (true) {
    const size_t found = text.find(from, at);
    if (found == std::string_view::npos) break;
    result.append(text, at, found - at).append(to);
    at = found + from.size();
  }
  return result.append(text, at);
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool is_point(char c) {
  return c == '.' || c == ',';
}

// ASCII punctuation that always stands alone: all but ' - . ,  (the last two depend on their neighbours).
bool stands_alone(char c) {
  return (c >= '{' && c <= '~') || (c >= '[' && c <= '`') || (c >= ' ' && c <= '&') || (c >= '(' && c <= '+') ||
         (c >= ':' && c <= '@') || c == '/';
}

// Each n-gram's tokens joined by spaces (tokens hold none), per n: distinct n-grams stay distinct.
using Counts = std::array<std::unordered_map<std::string, int64_t>, 4>;

Counts count_ngrams(const std::vector<std::string_view>& tokens) {
  Counts counts;
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::string ngram;
    for (size_t n = 0; n < 4 && i + n < tokens.size(); ++n) {
      if (n > 0) ngram += ' ';
      ngram += tokens[i + n];
      ++counts[n][ngram];
    }
  }
  return counts;
}

}  // namespace

// The rules work on bytes: every byte of a longer UTF-8 character is neither digit nor ASCII punctuation, so a rule
// that looks at one neighbour sees the same class in its last or first byte as it would in the whole character.
std::string tokenize_13a(std::string_view line) {
  // sacreBLEU strips trailing whitespace before it looks at the line; that matters only for "-\n" at its very end.
  std::string_view trimmed = line;
  while (!trimmed.empty()) {
    size_t cut = 0;
    for (size_t n = 1; n <= 3 && n <= trimmed.size(); ++n) {
      if (space_length(trimmed.substr(trimmed.size() - n)) == n) cut = n;
    }
    if (cut == 0) break;
    trimmed.remove_suffix(cut);
  }
  std::string text = replace_all(trimmed, "<skipped>", "");
  text = replace_all(text, "-\n", "");
  text = replace_all(text, "\n", " ");
  text = replace_all(text, "&quot;", "\"");
  text = replace_all(text, "&amp;", "&");
  text = replace_all(text, "&lt;", "<");
  text = replace_all(text, "&gt;", ">");
  text = " " + text + " ";

  // Each rule rewrites the whole line before the next looks at it; a match uses its characters up.
  std::string next;
  for (char c : text) {
    if (stands_alone(c)) {
      next.append({' ', c, ' '});
    } else {
      next += c;
    }
  }
  text.swap(next);
  next.clear();
  for (size_t i = 0; i < text.size();) {  // a point that follows no digit
    if (i + 1 < text.size() && !is_digit(text[i]) && is_point(text[i + 1])) {
      next.append({text[i], ' ', text[i + 1], ' '});
      i += 2;
    } else {
      next += text[i++];
    }
  }
  text.swap(next);
  next.clear();
  for (size_t i = 0; i < text.size();) {  // a point before no digit
    if (i + 1 < text.size() && is_point(text[i]) && !is_digit(text[i + 1])) {
      next.append({' ', text[i], ' ', text[i + 1]});
      i += 2;
    } else {
      next += text[i++];
    }
  }
  text.swap(next);
  next.clear();
  for (size_t i = 0; i < text.size();) {  // a dash after a digit
    if (i + 1 < text.size() && is_digit(text[i]) && text[i + 1] == '-') {
      next.append({text[i], ' ', '-', ' '});
      i += 2;
    } else {
      next += text[i++];
    }
  }
  std::string result;
  for (std::string_view word : split(next)) {
    if (!result.empty()) result += ' ';
    result += word;
  }
  return result;
}

std::string BleuScore::format() const {
  const double ratio =
      reference_length ? static_cast<double>(hypothesis_length) / static_cast<double>(reference_length) : 0.0;
  return fmt::format("BLEU = {:.2f} {:.1f}/{:.1f}/{:.1f}/{:.1f} (BP = {:.3f} ratio = {:.3f} hyp_len = {} ref_len = {})",
                     score, precisions[0], precisions[1], precisions[2], precisions[3], brevity_penalty, ratio,
                     hypothesis_length, reference_length);
}

void CorpusBleu::add(std::string_view hypothesis, std::string_view reference) {
  const std::string hypothesis_text = tokenize_13a(hypothesis), reference_text = tokenize_13a(reference);
  const auto hypothesis_tokens = split(hypothesis_text), reference_tokens = split(reference_text);
  const Counts ours = count_ngrams(hypothesis_tokens), theirs = count_ngrams(reference_tokens);
  for (size_t n = 0; n < 4; ++n) {
    for (const auto& [ngram, count] : ours[n]) {
      total_[n] += count;
      const auto found = theirs[n].find(ngram);
      if (found != theirs[n].end()) correct_[n] += std::min(count, found->second);
    }
  }
  hypothesis_length_ += static_cast<int64_t>(hypothesis_tokens.size());
  reference_length_ += static_cast<int64_t>(reference_tokens.size());
  ++sentences_;
}

BleuScore CorpusBleu::score() const {
  BleuScore result;
  result.correct = correct_;
  result.total = total_;
  result.hypothesis_length = hypothesis_length_;
  result.reference_length = reference_length_;
  if (hypothesis_length_ < reference_length_) {
    result.brevity_penalty =
        hypothesis_length_ > 0
            ? std::exp(1 - static_cast<double>(reference_length_) / static_cast<double>(hypothesis_length_))
            : 0.0;
  }
  if (correct_ == std::array<int64_t, 4>{}) return result;
  double smoothing = 1, log_sum = 0;
  bool all_orders = true;
  for (size_t n = 0; n < 4; ++n) {
    if (total_[n] == 0) {  // no hypothesis is long enough: BLEU is 0, the precisions before stay
      all_orders = false;
      break;
    }
    const double total = static_cast<double>(total_[n]);
    if (correct_[n] == 0) smoothing *= 2;
    result.precisions[n] =
        correct_[n] == 0 ? 100 / (smoothing * total) : 100 * static_cast<double>(correct_[n]) / total;
    log_sum += std::log(result.precisions[n]);
  }
  if (all_orders) result.score = result.brevity_penalty * std::exp(log_sum / 4);
  return result;
}

BleuScore corpus_bleu(std::span<const std::string> hypotheses, std::span<const std::string> references) {
  FRIT_CHECK(hypotheses.size() == references.size(), "[corpus_bleu] {} hypotheses, {} references", hypotheses.size(),
             references.size());
  CorpusBleu bleu;
  for (size_t i = 0; i < hypotheses.size(); ++i) bleu.add(hypotheses[i], references[i]);
  return bleu.score();
}

}  // namespace frit
