// Text to token ids and back, in the format of a Hugging Face Marian directory.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "frit/data/text.h"

namespace frit {

class ThreadPool;

enum class Side : uint8_t { kSource, kTarget };
enum class SubwordModel : uint8_t { kBpe, kUnigram };

// How a SentencePiece model is trained. The same options and lines give the same bytes.
struct TokenizerTraining {
  SubwordModel model = SubwordModel::kBpe;
  int32_t vocabulary = 16000;  // ids in all, </s>, <unk> and <pad> included; with !joint a side
  bool joint = true;           // one model and vocabulary for both languages; else two of each
  // Characters outside the vocabulary become UTF-8 bytes (256 pieces), so that no text is lost as <unk>.
  bool byte_fallback = true;
  // Share of the text's characters that get a piece of their own; 0: 0.9995 with byte fallback (the rest is not lost),
  // else 1.
  double character_coverage = 0;
  // "identity" returns the text as it was written, which a translation's target side should be; "nmt_nfkc"
  // (SentencePiece's default, and OPUS-MT's) unifies look-alike characters: better for input from anywhere, but … comes
  // back as three dots.
  std::string normalization = "identity";
  // Runs of spaces count as one and those at both ends as none: a stray space does not change a translation. With false
  // and "identity" decode(encode(text)) is text, byte for byte.
  bool remove_extra_spaces = true;
  int64_t max_pairs = 1000000;  // line pairs to learn from, chosen evenly when there are more; bounds memory
  uint64_t seed = 1;            // of that choice
  int threads = 2;              // fixed, not the machine's: unigram sums depend on it in the last bits
};

// Segments words anew each time they are read, so that a model sees more than one spelling of them.
struct SubwordSampling {
  // BPE: the chance to leave a merge out (BPE-dropout). Unigram: exponent of a segmentation's probability; smaller is
  // wilder.
  float alpha = 0;
  int nbest = -1;  // unigram: sample among the n best segmentations; -1: among all
  uint64_t seed = 1;
  // BPE with alpha 0, and unigram with nbest 0 or 1, change nothing.
  bool active(SubwordModel model) const {
    return model == SubwordModel::kBpe ? alpha > 0 : alpha > 0 && nbest != 0 && nbest != 1;
  }
};

// Immutable and safe to share between threads; copies share the models.
// Ids come from vocab.json, never from SentencePiece. A text that begins with a code such as >>de<< gets that token
// first if the vocabulary has such codes; any other text, "</s>" included, is plain text.
class Tokenizer {
 public:
  // Trains on a pair of files. counts, if given, gets what happened to the lines.
  // Errors: frit::Error for bad files or a vocabulary that the text cannot fill; std::invalid_argument for bad options.
  static Tokenizer train(const std::string& source_path, const std::string& target_path,
                         const TokenizerTraining& options, const TextOptions& text = {}, TextCounts* counts = nullptr);
  // Reads source.spm, target.spm, vocab.json and, if there, target_vocab.json and tokenizer_config.json. Without
  // vocab.json: fairseq's dictionaries, dict.txt or dict.SOURCE.txt and dict.TARGET.txt (config.json has the
  // languages), with the same models or one for both (sentencepiece.bpe.model, sentencepiece.model, spm.model). Errors:
  // frit::Error if a file is missing, broken, or does not fit the others.
  static Tokenizer load(const std::string& directory);
  // Writes those files and special_tokens_map.json, so that transformers.MarianTokenizer loads the directory. Each file
  // is written to a temporary name and renamed. languages ("en", "de") may be empty.
  void save(const std::string& directory, const std::string& source_language = "",
            const std::string& target_language = "") const;

  // Appends the ids of one line to *ids, without </s>.
  void encode(Side side, std::string_view text, std::vector<int32_t>* ids) const;
  std::vector<int32_t> encode(Side side, std::string_view text) const;
  // The text of ids. </s> and <pad> are left out, an unknown id shows as "⁇" (U+2047) between spaces, bytes that form
  // no character as U+FFFD. Errors: std::invalid_argument for an id outside the vocabulary.
  std::string decode(std::span<const int32_t> ids, Side side = Side::kTarget) const;

  // Appends another segmentation of ids (from encode) to *out: the same for the same (sampling.seed, epoch, sentence,
  // side), whatever was sampled before. Special tokens, bytes and unknowns stay.
  void resample(Side side, std::span<const int32_t> ids, const SubwordSampling& sampling, int64_t epoch,
                int64_t sentence, std::vector<int32_t>* out) const;

  int32_t vocabulary_size(Side side) const;
  int32_t eos_id(Side side = Side::kTarget) const;
  int32_t unk_id(Side side = Side::kTarget) const;
  int32_t pad_id(Side side = Side::kTarget) const;
  bool separate_vocabularies() const;
  SubwordModel model(Side side = Side::kTarget) const;
  // The token of an id, e.g. "▁der". Errors: std::invalid_argument for an id outside the vocabulary.
  const std::string& token(int32_t id, Side side = Side::kTarget) const;
  // The id of a token, or -1.
  int32_t id_of(std::string_view token, Side side = Side::kTarget) const;
  // Checksum of models and vocabularies: files made with another tokenizer are recognised by it.
  uint64_t hash() const;

 private:
  friend class StreamDecoder;
  struct Impl;
  explicit Tokenizer(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

// Decodes ids as they come, e.g. to show a translation while it grows. Half a character is held back until it is whole:
// what push returns is always valid UTF-8, and all of it together equals Tokenizer::decode.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer, Side side = Side::kTarget)
      : tokenizer_(std::move(tokenizer)), side_(side) {}
  std::string push(int32_t id);
  // What is still held back, for the end of the sentence; ready for another sentence afterwards.
  std::string finish();

 private:
  void append(std::string_view text, std::string* out);
  std::string flush();
  Tokenizer tokenizer_;
  Side side_;
  std::string bytes_;  // of an unfinished character
  bool start_ = true;  // spaces at the start belong to the model, not to the text
};

}  // namespace frit
