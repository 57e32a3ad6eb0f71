// Segments text anew by chance: BPE-dropout and unigram sampling, reproducible from (seed, epoch, sentence).
// SentencePiece's own sampler draws from a generator that each thread seeds once, so it cannot be resumed.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "frit/data/random.h"

namespace frit {

// The ordinary pieces of one SentencePiece model (no control, unknown or byte piece).
class SubwordTable {
 public:
  struct Piece {
    int32_t id;   // in the vocabulary
    float score;  // BPE: minus the rank of the merge; unigram: log-probability
  };

  void add(std::string piece, int32_t id, float score);
  bool empty() const { return pieces_.empty(); }

  // BPE: merges the pair of neighbours with the best score (the leftmost of equals) until none is left; each merge is
  // left out with chance p_drop. p_drop 0 gives SentencePiece's segmentation. Returns false if a character has no
  // piece. Source: Provilkov, Emelianenko, Voita 2020 (arXiv:1910.13267).
  bool sample_bpe(std::string_view text, float p_drop, RandomStream& random, std::vector<int32_t>* ids) const;

  // Unigram: draws a segmentation with probability proportional to (product of its pieces' probabilities)^alpha, among
  // the nbest best or, for nbest < 0, among all of them (forward filtering, backward sampling). Returns false if there
  // is none. Source: Kudo 2018 (arXiv:1804.10959).
  bool sample_unigram(std::string_view text, float alpha, int nbest, RandomStream& random,
                      std::vector<int32_t>* ids) const;

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  const Piece* find(std::string_view text) const;

  std::unordered_map<std::string, Piece, Hash, std::equal_to<>> pieces_;
  size_t longest_ = 0;  // bytes
};

}  // namespace frit
