#include "frit/data/sentencepiece_training.h"

#include <sentencepiece_trainer.h>

#include <algorithm>
#include <unordered_map>

#include "frit/core/error.h"

namespace frit {
namespace {

// SentencePiece's BPE trainer ends the process at a word of 65536 characters. A word beyond this many bytes (a table, a
// key, a text without spaces) has nothing to teach, and is cut out; normalisation makes at most 18 characters of 3
// bytes.
constexpr size_t kLongestWord = 4096;

void append_without_long_words(std::string_view line, std::string* kept) {
  for (size_t at = 0; at < line.size();) {
    const size_t end = std::min(line.find(' ', at), line.size());
    if (end - at <= kLongestWord) kept->append(line.substr(at, end - at + 1));
    at = end + 1;
  }
}

class LineIterator : public sentencepiece::SentenceIterator {
 public:
  explicit LineIterator(const std::vector<std::string_view>& lines) : lines_(lines) { Next(); }
  bool done() const override { return at_ > lines_.size(); }
  void Next() override {
    value_.clear();
    if (at_ < lines_.size()) append_without_long_words(lines_[at_], &value_);
    ++at_;
  }
  const std::string& value() const override { return value_; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const std::vector<std::string_view>& lines_;
  std::string value_;
  size_t at_ = 0;  // one past the current line
};

}  // namespace

std::string train_sentencepiece(const std::vector<std::string_view>& lines, const TokenizerTraining& options,
                                int32_t pieces) {
  int64_t total_bytes = 0;
  for (std::string_view line : lines) total_bytes += static_cast<int64_t>(line.size());
  // Unigram's suffix array has 32-bit indices.
  if (total_bytes > INT32_MAX)
    fail("[tokenizer] {} bytes of text are too much to train on, at most {}: lower max_pairs", total_bytes, INT32_MAX);
  const double coverage = options.character_coverage > 0 ? options.character_coverage
                          : options.byte_fallback        ? 0.9995
                                                         : 1.0;
  const std::unordered_map<std::string, std::string> arguments = {
      {"model_type", options.model == SubwordModel::kBpe ? "bpe" : "unigram"},
      {"vocab_size", std::to_string(pieces)},
      {"character_coverage", fmt::format("{}", coverage)},
      {"byte_fallback", options.byte_fallback ? "true" : "false"},
      {"normalization_rule_name", options.normalization},
      {"remove_extra_whitespaces", options.remove_extra_spaces ? "true" : "false"},
      {"num_threads", std::to_string(options.threads)},
      {"eos_id", "0"},
      {"unk_id", "1"},
      {"bos_id", "-1"},
      {"pad_id", "-1"},
      // The lines are chosen and bounded before: SentencePiece's own choice is neither repeatable nor reported.
      {"input_sentence_size", "0"},
      {"shuffle_input_sentence", "false"},
      {"max_sentence_length", "1073741824"},
      {"minloglevel", "3"},  // nothing is printed; what goes wrong comes back as a status
  };
  LineIterator iterator(lines);
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(arguments, &iterator, &model);
  if (!status.ok())
    fail("[tokenizer] cannot train a vocabulary of {} (data.vocabulary; {} pieces and <pad>) on {} lines: {}",
         pieces + 1, pieces, lines.size(), status.message());
  return model;
}

}  // namespace frit
