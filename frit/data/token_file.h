// A tokenised parallel corpus on disk: built once, mapped into memory when read, so that it may be larger than RAM.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "frit/data/text.h"
#include "frit/data/tokenizer.h"

namespace frit {

class ThreadPool;

struct TokenFileOptions {
  TextOptions text;
  // Called now and then while building, with the bytes of text read so far and in all.
  std::function<void(int64_t done, int64_t total)> progress;
  std::function<bool()> stop_requested;  // asked before each few thousand pairs; true: build throws BuildStopped
};

// Thrown where TokenFileOptions::stop_requested ended a build; nothing is left of it.
class BuildStopped : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A file of sentence pairs, ids with </s> at the end of each sentence. Safe to read from several threads.
// Format (little endian): a header of 136 bytes with its own checksum; the ids (16 bits each if both vocabularies have
// at most 65536, else 32), pair after pair, source before target; then 2 * sentences + 1 64-bit offsets, in ids.
class TokenFile {
 public:
  // Maps a file. Errors: frit::Error if it is no token file, of another version, cut short or damaged. The checksum of
  // all ids and offsets is verified for files up to verify_bytes (reading a larger one through would take minutes);
  // offsets and id ranges are checked on every read in any case.
  static TokenFile open(const std::string& path, int64_t verify_bytes = int64_t{1} << 30);

  // Reads a pair of text files, tokenises them in the pool's threads in bounded memory, and writes path (to a temporary
  // name, then renamed). The bytes do not depend on the number of threads. Errors: frit::Error for bad text (see
  // ParallelReader), no sentence at all, or a full disk; BuildStopped. Nothing is left behind.
  static TokenFile build(const std::string& path, const std::string& source_path, const std::string& target_path,
                         const Tokenizer& tokenizer, ThreadPool& pool, const TokenFileOptions& options = {});

  // Opens path if it was built from these text files (by size and time of change) with this tokenizer and these
  // options, and is whole; builds it otherwise. *built, if given, says which.
  static TokenFile open_or_build(const std::string& path, const std::string& source_path,
                                 const std::string& target_path, const Tokenizer& tokenizer, ThreadPool& pool,
                                 const TokenFileOptions& options = {}, bool* built = nullptr);

  TokenFile() = default;
  ~TokenFile();
  TokenFile(TokenFile&& other) noexcept;
  TokenFile& operator=(TokenFile&& other) noexcept;

  int64_t sentences() const { return sentences_; }
  int64_t source_tokens() const { return source_tokens_; }  // </s> included
  int64_t target_tokens() const { return target_tokens_; }
  int64_t source_length(int64_t sentence) const { return length(2 * sentence); }
  int64_t target_length(int64_t sentence) const { return length(2 * sentence + 1); }
  // Writes the sentence's ids to out, which has room for its length. Errors: frit::Error for an id outside the
  // vocabulary.
  void read_source(int64_t sentence, int32_t* out) const { read(2 * sentence, vocabulary_[0], out); }
  void read_target(int64_t sentence, int32_t* out) const { read(2 * sentence + 1, vocabulary_[1], out); }

  int32_t vocabulary_size(Side side) const { return vocabulary_[static_cast<int>(side)]; }
  uint64_t tokenizer_hash() const { return tokenizer_hash_; }
  // Checksum of all ids and offsets: two files of one value train alike, wherever their text came from.
  uint64_t body_hash() const { return body_hash_; }
  int id_bytes() const { return id_bytes_; }
  int64_t file_bytes() const { return mapped_bytes_; }
  // What happened to the lines of text when the file was built.
  const TextCounts& counts() const { return counts_; }
  const std::string& path() const { return path_; }
  // Errors: frit::Error if the file was made with another tokenizer.
  void require_tokenizer(const Tokenizer& tokenizer) const;

 private:
  int64_t length(int64_t piece) const;
  void read(int64_t piece, int32_t vocabulary, int32_t* out) const;

  std::string path_;
  const unsigned char* data_ = nullptr;
  int64_t mapped_bytes_ = 0;
  const unsigned char* ids_ = nullptr;
  const uint64_t* offsets_ = nullptr;
  int64_t sentences_ = 0, source_tokens_ = 0, target_tokens_ = 0;
  int32_t vocabulary_[2] = {0, 0};
  int id_bytes_ = 2;
  uint64_t tokenizer_hash_ = 0, origin_hash_ = 0, body_hash_ = 0;
  TextCounts counts_;
};

}  // namespace frit
