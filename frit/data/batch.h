// One training or inference batch of sentence pairs, packed: tokens of all sentences one behind the other, no padding.
#pragma once
#include <cstdint>
#include <vector>

namespace frit {

// Sentence i has source tokens [source_offsets[i], source_offsets[i+1]) (EOS included) and target positions
// [target_offsets[i], target_offsets[i+1]): target_ids is what the decoder reads (start token, then the sentence), labels what
// it must predict (the sentence, then EOS). target_ids and labels have the same length.
struct Batch {
  std::vector<int32_t> source_ids, source_offsets;
  std::vector<int32_t> target_ids, labels, target_offsets;
  std::vector<int64_t> sentence_index;  // position of each sentence in its corpus

  int64_t sentences() const { return source_offsets.empty() ? 0 : static_cast<int64_t>(source_offsets.size()) - 1; }
  int64_t source_tokens() const { return static_cast<int64_t>(source_ids.size()); }
  int64_t target_tokens() const { return static_cast<int64_t>(labels.size()); }
};

}  // namespace frit
