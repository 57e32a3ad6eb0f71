// What the kernels share that sum dy by word, or by position: the first warps take a piece of kEmbeddingPiece tokens
// each, of which they sum what belongs to long runs; the others a token each: that of the first of a run sums the run
// and writes its row, unless it is long. A run is long if it has more tokens than a piece: then at most two of them
// meet in a piece, one that goes on from the piece before and one that begins.
#pragma once
#include "frit/ops/embedding/gpu.h"
#include "frit/simt/whole_columns.h"

namespace frit::simt {

template <typename T, typename O>
struct Sums {
  Global<const int32_t> starts, order, sorted;
  Global<const T> dy;
  Global<O> out;
  Global<float> partials;  // [2 * pieces, partials_stride]
  Global<int32_t> finish;  // [pieces]: the long run that begins in the piece, or -1
  int64_t tokens, dy_stride, out_stride, pieces;
  int32_t count, columns, partials_stride;
  float scale;
  bool accumulate;
  DropoutTable dropout;
};

constexpr int kRowThreads = 128, kRowWarps = kRowThreads / kWarpSize;

// Which of the sorted tokens a piece's warp sums for long runs: [from[0], to[0]) of one that goes on, [from[1], to[1])
// of one that begins. Says the latter's row, or -1, in a.finish.
struct PieceRuns {
  int from[2] = {}, to[2] = {};
};
template <typename T, typename O>
FRIT_DEVICE PieceRuns piece_runs(const Sums<T, O>& a, int64_t item) {
  constexpr int kPiece = static_cast<int>(kEmbeddingPiece);
  PieceRuns runs;
  const int begin = static_cast<int>(item) * kPiece, counted = load(a.starts, a.count);
  const int end = begin + kPiece < counted ? begin + kPiece : counted;
  int32_t finish = -1;
  if (begin < end) {
    const int32_t old_key = load(a.sorted, begin), new_key = load(a.sorted, end - 1);
    const int old_begin = load(a.starts, old_key), old_end = load(a.starts, old_key + 1);
    const int new_begin = load(a.starts, new_key), new_end = load(a.starts, new_key + 1);
    if (old_begin < begin && old_end - old_begin > kPiece)
      runs.from[0] = begin, runs.to[0] = old_end < end ? old_end : end;
    if (new_begin >= begin && new_end - new_begin > kPiece)
      runs.from[1] = new_begin, runs.to[1] = end, finish = new_key;
  }
  if (lane() == 0) store(a.finish, item, finish);
  return runs;
}

// The run that the sorted token `at` begins, its tokens in the first lanes. count is 0 if it begins none, or a long
// one.
struct Run {
  int32_t key, tokens;
  int count;
};
template <typename T, typename O>
FRIT_DEVICE Run run_from(const Sums<T, O>& a, int64_t at) {
  constexpr int kPiece = static_cast<int>(kEmbeddingPiece);
  static_assert(kPiece < kWarpSize - 1, "a warp sees a run's tokens at once, and the one before");
  // Lanes hold the tokens from `at` on and their keys; the last one the key before.
  const int64_t seen = lane() == kWarpSize - 1 ? at - 1 : at + lane();
  const bool exists = seen >= 0 && seen < a.tokens;
  const int32_t their_key = exists ? load(a.sorted, seen) : -1, tokens = exists ? load(a.order, seen) : 0;
  const int32_t key = shuffle(their_key, 0);
  const uint32_t others = ballot(their_key != key);
  if (key < 0 || !(others >> (kWarpSize - 1))) return {key, tokens, 0};  // counts nothing, or not the first of its run
  const int count = find_first_set(others) - 1;
  return {key, tokens, count > kPiece ? 0 : count};
}

// Tells the cache to fetch the rows of dy that belong to the first `count` lanes' tokens.
template <typename T, typename O>
FRIT_DEVICE void ask_for_rows(const Sums<T, O>& a, int32_t tokens, int count) {
  constexpr int kLine = 128 / static_cast<int>(sizeof(T));
  FRIT_UNROLL_BY(1)
  for (int i = 0; i < count; ++i) {
    const Global<const T> row = a.dy + shuffle(tokens, i) * a.dy_stride;
    FRIT_UNROLL_BY(1)
    for (int column = lane() * kLine; column < a.columns; column += kWarpSize * kLine) prefetch(row, column);
  }
}

}  // namespace frit::simt
