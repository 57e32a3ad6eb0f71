// Batches of sentence pairs under a token budget, in an order that (seed, epoch) decides.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "frit/data/batch.h"
#include "frit/data/token_file.h"
#include "frit/data/tokenizer.h"

namespace frit {

struct BatcherOptions {
  int64_t max_tokens = 4096;  // of a batch: bounds its source tokens and its target tokens, both without padding
  int64_t max_sentences = 0;  // of a batch; 0: any number
  int64_t max_length = 0;  // tokens of a sentence, </s> included, either side; longer pairs are left out. 0: max_tokens
  int64_t window = 32768;  // sentence pairs sorted by length together
  bool shuffle = true;     // false: windows in the corpus's order, shortest batches first (for validation)
  uint64_t seed = 1;
  int32_t decoder_start_id = 0;   // what the decoder reads first: Marian's is the pad id
  SubwordSampling sampling = {};  // needs the tokenizer
};

// Where the next batch stands: all that has to be saved to go on with exactly the same batches.
struct BatchPosition {
  int64_t epoch = 0;  // from 0
  int64_t index = 0;  // of the next batch in its epoch
  bool operator==(const BatchPosition&) const = default;
};

// The size of a batch.
struct BatchSize {
  int64_t source_tokens = 0, target_tokens = 0, sentences = 0;
  int64_t longest_source = 0, longest_target = 0;
  bool operator==(const BatchSize&) const = default;
};

// What is left out of every epoch, and what remains.
struct BatcherCounts {
  int64_t sentences = 0;    // in the token file
  int64_t over_length = 0;  // left out: a side is longer than max_length
  int64_t over_budget = 0;  // left out: not longer than max_length, but than max_tokens
  int64_t used() const { return sentences - over_length - over_budget; }
  // "200,700 sentence pairs: 200,650 used; left out: 50 longer than 128 tokens, 0 larger than the batch".
  std::string to_string(const BatcherOptions& options) const;
};

// Each epoch every usable sentence pair comes exactly once. Sentences are shuffled, cut into windows, sorted by length
// within a window, cut greedily into batches, and these are shuffled within the window. Corpora above 16.7 M pairs are
// shuffled in blocks of neighbours, so that the order takes at most 64 MiB. With subword sampling, lengths change from
// epoch to epoch: a pair that a sampling makes too long keeps its stored ids. Cost: no allocation a batch once a window
// is planned; planning one sorts `window` pairs.
class Batcher {
 public:
  // The token file, and the tokenizer if there is one, must outlive the batcher; the tokenizer is needed for sampling
  // alone. Errors: std::invalid_argument for options; frit::Error if no pair fits or the tokenizer did not make the
  // file.
  Batcher(const TokenFile& file, BatcherOptions options, const Tokenizer* tokenizer = nullptr);

  // Fills batch with the next one, going on to the next epoch after the last.
  void next(Batch* batch);
  BatchPosition position() const { return position_; }
  // Goes to a saved position. Cost: plans the windows before it. Errors: std::invalid_argument beyond the epoch's last
  // batch.
  void seek(BatchPosition position);

  // The sizes of all batches of an epoch, in order, without building them.
  std::vector<BatchSize> sizes(int64_t epoch) const;
  int64_t batches(int64_t epoch) const { return static_cast<int64_t>(sizes(epoch).size()); }
  const BatcherCounts& counts() const { return counts_; }
  const BatcherOptions& options() const { return options_; }
  // Gives the batch's vectors the capacity of the largest batch, so that next() never allocates.
  void reserve(Batch* batch) const;

 private:
  struct Item {
    uint64_t key;  // longer side, then target length
    int64_t sentence;
    int32_t source_length, target_length;
    int64_t sampled = -1;  // where its ids begin in Plan::sampled_ids, or -1: as stored
  };
  struct Plan {
    std::vector<Item> items;
    std::vector<int64_t> begins;  // of each batch in items, and the end
    std::vector<int64_t> order;   // of the batches
    std::vector<int32_t> sampled_ids, scratch;
  };
  void order_sentences(int64_t epoch, std::vector<uint32_t>* blocks) const;
  void plan_window(int64_t epoch, int64_t window, const std::vector<uint32_t>& blocks, Plan* plan) const;
  bool fits(int64_t source_length, int64_t target_length) const;
  int64_t windows() const;
  void settle();

  const TokenFile& file_;
  const Tokenizer* tokenizer_;
  BatcherOptions options_;
  BatcherCounts counts_;
  bool sampling_ = false;
  int64_t block_ = 1;  // neighbouring sentences that stay together
  BatchPosition position_;
  std::vector<uint32_t> blocks_;        // this epoch's order of blocks
  Plan plan_;                           // this window's batches
  int64_t window_ = 0, in_window_ = 0;  // the next batch: in which window, the how manieth
};

// Groups sentences of given lengths (tokens) into batches for inference: longest first, each batch at most max_tokens
// (a longer sentence gets a batch of its own) and max_sentences (0: any number). Returns indices into lengths; each
// comes once.
std::vector<std::vector<int64_t>> plan_inference_batches(std::span<const int64_t> lengths, int64_t max_tokens,
                                                         int64_t max_sentences = 0);

// A batch of sources alone: sentences[i] for the i of group, ids with </s>; sentence_index tells where each belongs.
void fill_source_batch(std::span<const std::vector<int32_t>> sentences, std::span<const int64_t> group, Batch* batch);

}  // namespace frit
