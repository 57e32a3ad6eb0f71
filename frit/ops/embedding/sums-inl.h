// What the kernels share that sum dy by word, or by position. A first launch gives each block some words: it looks
// through all tokens for theirs, and writes the rows of those with a few tokens, and of those without one. A run, the
// tokens of a word, is long if it has more than kEmbeddingPiece: its tokens are listed in sorted order, which is cut in
// pieces of that many; a warp of the second launch sums what belongs to long runs in a piece, where at most two of them
// meet, one that goes on from the piece before and one that begins. The third launch adds the pieces' sums.
#pragma once
#include "frit/ops/embedding/gpu.h"
#include "frit/simt/early.h"
#include "frit/simt/whole_columns.h"

namespace frit::simt {

// Tokens and what they are grouped by.
struct Keys {
  Global<const int32_t> keys;     // [tokens]; a token with a key outside of [0, count), or `skipped`, counts nothing
  Global<const int32_t> offsets;  // may be missing; tokens from offsets[sequences] on count nothing
  int64_t tokens;
  int32_t sequences, count, skipped;
};

template <typename T, typename O>
struct Sums {
  Keys keys;
  Global<int32_t> order;  // [tokens], in sorted order: the tokens of long runs
  Global<int32_t> runs;  // [pieces, 4]: tokens of the run that goes on, and of the one that begins; its key, its pieces
  Global<const T> dy;
  Global<O> out;
  Global<float> partials;  // [2 * pieces, partials_stride]
  int64_t dy_stride, out_stride, pieces, fetch_bytes;
  int32_t bits, owned, columns, partials_stride;
  float scale;
  bool accumulate;
  DropoutTable dropout;
};

constexpr int kPieceTokens = static_cast<int>(kEmbeddingPiece);
static_assert(kPieceTokens <= kWarpSize, "a warp sees a run's tokens at once");
constexpr int kRowThreads = 128, kRowWarps = kRowThreads / kWarpSize;
constexpr int kListed = 256;     // tokens that a warp notes, 128 at a time
constexpr int kMostGroups = 16;  // of 32 words that a block has

// Of the first launch's 2^bits blocks, block b owns the words whose lowest bits are b: words lie in the order of their
// frequency in many vocabularies, and neighbours with many tokens each would be much work for one block. 256 blocks, as
// many as an H200 holds at once, unless they own fewer than 4 words or more than 256; if `few`, half as many.
inline int32_t word_bits(int64_t count, bool few) {
  const int32_t most = few ? 7 : 8;
  int32_t bits = 0;
  while (bits < most && count >> (bits + 1) >= 4) ++bits;
  while (count > (few ? int64_t{512} : int64_t{256}) << bits) ++bits;
  return bits;
}
inline int64_t words_shared(int64_t owned, int warps) {
  return ((warps + kPieceTokens + 2) * owned + 2 * warps * kListed + warps + 2 * kMostGroups + 1) *
         static_cast<int64_t>(sizeof(int32_t));
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

// Says what long runs the pieces have whose first or last token belongs to the run [start, start + total).
template <typename T, typename O>
FRIT_DEVICE void note_pieces(const Sums<T, O>& a, int32_t start, int32_t total, int32_t key, bool is_long) {
  const int32_t end = start + total;
  FRIT_UNROLL_BY(1)
  for (int32_t p = (start + kPieceTokens - 1) / kPieceTokens + lane(); p * kPieceTokens < end; p += kWarpSize) {
    const int32_t left = end - p * kPieceTokens;
    const bool goes_on = is_long && p * kPieceTokens > start;
    store(a.runs, int64_t{4} * p, !goes_on ? 0 : left < kPieceTokens ? left : kPieceTokens);
  }
  FRIT_UNROLL_BY(1)
  for (int32_t p = start / kPieceTokens + lane(); p * kPieceTokens + kPieceTokens - 1 < end; p += kWarpSize) {
    const bool begins = is_long && p == start / kPieceTokens;
    store(a.runs, int64_t{4} * p + 1, begins ? (p + 1) * kPieceTokens - start : 0);
    store(a.runs, int64_t{4} * p + 2, begins ? key : -1);
    store(a.runs, int64_t{4} * p + 3, begins ? (end - 1) / kPieceTokens - p + 1 : 0);
  }
}

// A warp looks through its own stretch of the tokens, notes those of owned
// words in shared memory, and counts them by word; when the counts before it are known, it puts them in their places,
// looking through its stretch again if there were too many to note. No block waits for another. Then the warps take
// words one after the other. Tells the cache to fetch `fetch_bytes` of dy meanwhile.
// Rows: how rows are written (its T and O: dy's and the gradient's type).
template <typename Rows>
FRIT_KERNEL(Rows::kWordThreads, Rows::kWordBlocks)
embedding_backward_words_kernel(Sums<typename Rows::In, typename Rows::Out> a) {
  let_next_start();
  wait_for_previous();
  constexpr int kWordThreads = Rows::kWordThreads, kWordWarps = kWordThreads / kWarpSize;
  constexpr int kWordGroups = kWordWarps < kMostGroups ? 8 : kMostGroups;  // a thread a word
  const auto counts = shared_array<int32_t>(0);        // [warp][owned word], then tokens before the warp's
  const auto slots = counts + kWordWarps * a.owned;    // [owned word][token] of runs that are not long
  const auto totals = slots + kPieceTokens * a.owned;  // by owned word
  const auto through = totals + a.owned;               // tokens of it and those before it of its 32
  const auto below = through + a.owned;                // by warp: tokens of lower words
  const auto sums = below + kWordWarps;                // by 32 owned words: their tokens
  const auto starts = sums + kWordGroups;              // and the sorted place of the first of them
  const auto next = starts + kWordGroups;              // the next word to write
  const auto noted = next + 1 + warp() * 2 * kListed, noted_words = noted + kListed;
  const uint32_t block = static_cast<uint32_t>(block_index());
  // An id of the block has these bits as the block's number has them; a negative one has not.
  const uint32_t mask = ((1u << a.bits) - 1) | 0x80000000u;
  const int32_t here = static_cast<int32_t>((static_cast<uint32_t>(a.keys.count) - block - 1) >> a.bits) + 1;
  const int32_t all = static_cast<int32_t>(a.keys.tokens);
  FRIT_UNROLL_BY(1)
  for (int i = lane(); i < a.owned; i += kWarpSize) store(counts, warp() * a.owned + i, 0);
  if (thread_index() == 0) store(next, 0, 0);
  warp_barrier();

  const uint32_t before_lane = (1u << lane()) - 1;
  int listed = 0;
  // Counts the noted tokens, or puts them in their places. Lanes of one word are found bit by bit.
  const auto put = [&](int32_t token, int32_t word, int32_t place) {
    const int32_t total = load(totals, word);
    if (total <= kPieceTokens)
      store(slots, word * kPieceTokens + place, token);
    else
      store(a.order, load(starts, word / kWarpSize) + load(through, word) - total + place, token);
  };
  const auto use_noted = [&](bool placing) {
    warp_barrier();
    if (listed == 0) return;
    const int32_t some = load(noted_words, 0);
    bool other = false;
    FRIT_UNROLL_BY(1)
    for (int i = lane(); i < listed; i += kWarpSize) other = other || load(noted_words, i) != some;
    if (ballot(other) == 0) {
      const int cell = warp() * a.owned + some;
      const int32_t before = load(counts, cell);
      warp_barrier();
      if (lane() == 0) store(counts, cell, before + listed);
      if (placing) {
        FRIT_UNROLL_BY(1)
        for (int i = lane(); i < listed; i += kWarpSize) put(load(noted, i), some, before + i);
      }
      warp_barrier();
      return;
    }
    FRIT_UNROLL_BY(1)
    for (int first = 0; first < listed; first += kWarpSize) {
      const bool mine = first + lane() < listed;
      const int32_t word = mine ? load(noted_words, first + lane()) : 0;
      uint32_t peers = ballot(mine);
      FRIT_UNROLL_BY(1)
      for (int bit = 0; a.owned >> bit; ++bit) {
        const uint32_t set = ballot(mine && (word >> bit & 1));
        peers &= word >> bit & 1 ? set : ~set;
      }
      const int rank = count_bits(peers & before_lane), cell = warp() * a.owned + word;
      const int32_t before = mine ? load(counts, cell) : 0;
      warp_barrier();
      if (mine && rank == 0) store(counts, cell, before + count_bits(peers));
      if (placing && mine) put(load(noted, first + lane()), word, before + rank);
      warp_barrier();
    }
  };

  // The warp's stretch: whole vectors [begin, end) of the ids; the first warp has the ids before the first whole vector
  // too, the last one those behind the last.
  constexpr int kAhead = kWordThreads < 1024 ? 8 : 4, kMostListed = kListed - 4 * kWarpSize;
  const int32_t shift = row_shift(a.keys.keys), head = shift == 0 ? 0 : all < 4 - shift ? all : 4 - shift;
  const int32_t vectors = (all - head) / 4, stretch = (vectors + kWordThreads - 1) / kWordThreads * kWarpSize;
  const int32_t begin = warp() * stretch, end = begin + stretch < vectors ? begin + stretch : vectors;
  const int32_t behind = head + 4 * vectors;
  int32_t lower = 0;
  bool again = true, asked = false;
  FRIT_UNROLL_BY(1)
  for (int pass = 0; pass < 2; ++pass) {
    bool head_left = again && warp() == 0 && head > 0, tail_left = again && warp() == kWordWarps - 1 && behind < all;
    int32_t first = again ? begin : end;
    if (again) listed = 0;
    again = false;
    FRIT_UNROLL_BY(1)
    while (head_left || first < end || tail_left) {
      Vec<int32_t, 4> keys[kAhead];
      FRIT_UNROLL
      for (int k = 0; k < kAhead; ++k) keys[k] = Vec<int32_t, 4>{-1, -1, -1, -1};
      int32_t token = head + 4 * (first + lane());  // of keys[0][0]
      if (!head_left && first < end) {
        const Global<const int32_t> at = a.keys.keys + token;
        FRIT_UNROLL
        for (int k = 0; k < kAhead; ++k)
          if (first + lane() + k * kWarpSize < end) keys[k] = load_vec<4>(at, 4 * k * kWarpSize);
        first += kAhead * kWarpSize;
      } else {
        token = (head_left ? 0 : behind) + lane();
        if (token < (head_left ? head : all)) keys[0][0] = load(a.keys.keys, token);
        if (head_left)
          head_left = false;
        else
          tail_left = false;
      }
      // Tokens that count; asked for when the ids are on their way.
      const int32_t real = a.keys.offsets ? load(a.keys.offsets, a.keys.sequences) : all;
      bool odd = real < all;
      FRIT_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        FRIT_UNROLL
        for (int c = 0; c < 4; ++c) odd = odd || keys[k][c] >= a.keys.count;
      }
      if (ballot(odd) != 0) {  // rare: some count nothing
        FRIT_UNROLL
        for (int k = 0; k < kAhead; ++k) {
          FRIT_UNROLL
          for (int c = 0; c < 4; ++c)
            if (keys[k][c] >= a.keys.count || token + 4 * k * kWarpSize + c >= real) keys[k][c] = -1;
        }
      }
      uint32_t found = 0;  // bit k: some lane's keys[k] has an owned word
      FRIT_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        bool mine = false;
        FRIT_UNROLL
        for (int c = 0; c < 4; ++c) {
          const uint32_t bits = static_cast<uint32_t>(keys[k][c]) & mask;
          lower += bits < block, mine = mine || bits == block;
        }
        found |= ballot(mine) != 0 ? 1u << k : 0u;
      }
      if (!asked) {  // not before the ids have come
        constexpr int64_t kLine = 128;
        FRIT_UNROLL_BY(1)
        for (int64_t at = (block_index() * kWordThreads + thread_index()) * kLine; at < a.fetch_bytes;
             at += block_count() * kWordThreads * kLine)
          prefetch(Global<const uint8_t>(reinterpret_cast<const uint8_t*>(a.dy.raw())), at);
        asked = true;
      }
      FRIT_UNROLL_BY(1)
      for (; found != 0; found &= found - 1) {
        const int k = find_first_set(found) - 1;
        Vec<int32_t, 4> words = keys[0];
        FRIT_UNROLL
        for (int i = 1; i < kAhead; ++i) {
          FRIT_UNROLL
          for (int c = 0; c < 4; ++c) words[c] = k == i ? keys[i][c] : words[c];
        }
        int place = listed;
        bool mine[4];
        FRIT_UNROLL
        for (int c = 0; c < 4; ++c) {
          mine[c] = (static_cast<uint32_t>(words[c]) & mask) == block, words[c] >>= a.bits;
          const uint32_t votes = ballot(mine[c]);
          place += count_bits(votes & before_lane), listed += count_bits(votes);
        }
        FRIT_UNROLL
        for (int c = 0; c < 4; ++c) {
          if (!mine[c]) continue;
          store(noted, place, token + 4 * k * kWarpSize + c), store(noted_words, place, words[c]);
          ++place;
        }
        if (listed <= kMostListed) continue;
        use_noted(pass > 0);
        listed = 0, again = true;
      }
    }
    use_noted(pass > 0);
    if (pass > 0) break;
    FRIT_UNROLL
    for (int bits = kWarpSize / 2; bits > 0; bits /= 2) lower += shuffle_xor(lower, bits);
    if (lane() == 0) store(below, warp(), lower);
    barrier();
    if (warp() < kWordGroups) {  // a thread a word
      const int word = thread_index();
      int32_t total = 0;
      if (word < a.owned) {
        FRIT_UNROLL
        for (int w = 0; w < kWordWarps; ++w) {
          const int32_t count = load(counts, w * a.owned + word);
          store(counts, w * a.owned + word, total);
          total += count;
        }
      }
      int32_t up_to = total;
      FRIT_UNROLL
      for (int by = 1; by < kWarpSize; by *= 2) {
        const int32_t other = shuffle_up(up_to, by);
        if (lane() >= by) up_to += other;
      }
      if (word < a.owned) store(totals, word, total), store(through, word, up_to);
      if (lane() == kWarpSize - 1) store(sums, warp(), up_to);
    }
    barrier();
    if (warp() == 0) {
      int32_t base = lane() < kWordWarps ? load(below, lane()) : 0;
      FRIT_UNROLL
      for (int bits = kWarpSize / 2; bits > 0; bits /= 2) base += shuffle_xor(base, bits);
      const int32_t own = lane() < kWordGroups ? load(sums, lane()) : 0;
      int32_t before = own;
      FRIT_UNROLL
      for (int by = 1; by < kWordGroups; by *= 2) {
        const int32_t other = shuffle_up(before, by);
        if (lane() >= by) before += other;
      }
      if (lane() < kWordGroups) store(starts, lane(), base + before - own);
    }
    barrier();
  }
  barrier();

  FRIT_UNROLL_BY(1)
  while (true) {
    const int32_t word = shuffle(lane() == 0 ? atomic_add(next, 0, 1) : 0, 0);
    if (word >= here) return;
    const int32_t key = static_cast<int32_t>(static_cast<uint32_t>(word) << a.bits | block), total = load(totals, word);
    const int32_t start = load(starts, word / kWarpSize) + load(through, word) - total;
    const bool skipped = key == a.keys.skipped, is_long = total > kPieceTokens && !skipped;
    if (total > 0) note_pieces(a, start, total, key, is_long);
    if (word == here - 1 && block_index() == block_count() - 1)  // and what no run lies in
      note_pieces(a, start + total, static_cast<int32_t>(a.pieces) * kPieceTokens - start - total, key, false);
    if (is_long) continue;
    if (total == 0 || skipped) {
      if (!a.accumulate) Rows::write_zeros(a, key);
      continue;
    }
    const int32_t tokens = lane() < total ? load(slots, word * kPieceTokens + lane()) : 0;
    Rows::template sum<false>(a, tokens, total, key, Global<float>());
  }
}

template <typename Rows>
FRIT_KERNEL(kRowThreads, Rows::kPieceBlocks)
embedding_backward_pieces_kernel(Sums<typename Rows::In, typename Rows::Out> a) {
  let_next_start();
  wait_for_previous();
  const int64_t item = block_index() * kRowWarps + warp();
  if (item >= a.pieces) return;
  const Vec<int32_t, 4> runs = load_vec<4>(a.runs, 4 * item);
  FRIT_UNROLL_BY(1)
  for (int part = 0; part < 2; ++part) {
    const int count = part == 0 ? runs[0] : runs[1];
    if (count == 0) continue;
    const int64_t start = item * kPieceTokens + (part == 0 ? 0 : kPieceTokens - count);
    const int32_t tokens = lane() < count ? load(a.order, start + lane()) : 0;
    ask_for_rows(a, tokens, count);
    Rows::template sum<true>(a, tokens, count, 0, a.partials + (2 * item + part) * a.partials_stride);
  }
}

// The launches of Rows up to the sums of pieces.
template <typename Rows>
void launch_sums(Context& context, const Sums<typename Rows::In, typename Rows::Out>& a) {
  launch(context, "embedding_backward_words_kernel", embedding_backward_words_kernel<Rows>,
         {int64_t{1} << a.bits, Rows::kWordThreads, words_shared(a.owned, Rows::kWordThreads / kWarpSize)}, a);
  launch(context, "embedding_backward_pieces_kernel", embedding_backward_pieces_kernel<Rows>,
         {(a.pieces + kRowWarps - 1) / kRowWarps, kRowThreads}, a);
}

}  // namespace frit::simt
