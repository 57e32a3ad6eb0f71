// What the kernels of the embedding's forward share: which rows a token's row is made of.
#pragma once
#include "frit/ops/embedding/gpu.h"
#include "frit/simt/early.h"
#include "frit/simt/whole_columns.h"

namespace frit::simt {

// The sequence that token t lies in: the last one that begins at or before it. All lanes of the warp call it, with one
// t. Cost: a load and a vote for each factor of 32 in the number of sequences.
FRIT_DEVICE int sequence_of(const Global<const int32_t>& offsets, int sequences, int64_t t) {
  int low = 0, high = sequences + 1;
  while (high - low > 1) {
    const int step = (high - low + 30) / 32, probe = low + (lane() + 1) * step;
    const bool before = probe < high && load(offsets, probe) <= t;
    low += count_bits(ballot(before)) * step;
    high = low + step < high ? low + step : high;
  }
  return low;
}

template <typename T>
struct Lookup {
  Global<const int32_t> ids, offsets, position_ids;  // the last two may be missing
  Global<const T> table, positions;
  Global<T> y;
  int64_t tokens, table_stride, positions_stride, y_stride, position_offset, places;
  int32_t vocabulary, sequences, columns;
  float scale;
  bool streams;  // is y too large to stay in the second-level cache?
  DropoutTable dropout;
};

// Lane i < kCount: the row of the table of token begin + i, -1 if it gets zeros, and its row of the positions. All
// lanes of the warp call it.
struct FoundTokens {
  int32_t id, place;
};
template <int kCount, typename T>
FRIT_DEVICE FoundTokens find_tokens(const Lookup<T>& a, int64_t begin) {
  const int64_t mine = begin + lane();
  const bool here = lane() < kCount && mine < a.tokens, by_sequence = a.positions && !a.position_ids;
  int32_t id = here ? load(a.ids, mine) : -1, place = 0;
  const int64_t real = a.offsets ? load(a.offsets, a.sequences) : a.tokens;
  const int s = by_sequence && a.sequences >= kWarpSize ? sequence_of(a.offsets, a.sequences, begin) : 0;
  const int32_t start = by_sequence && s + lane() <= a.sequences ? load(a.offsets, s + lane()) : 0x7fffffff;
  if (id >= a.vocabulary || mine >= real) id = -1;
  if (a.positions) {
    int64_t position = -1;
    if (a.position_ids) {
      if (here) position = load(a.position_ids, mine);
    } else {
      int low = 0;  // the last lane whose sequence begins at or before the token
      FRIT_UNROLL
      for (int step = kWarpSize / 2; step > 0; step /= 2) low = shuffle(start, low + step) <= mine ? low + step : low;
      int32_t from = shuffle(start, low);
      for (uint32_t past = ballot(here && low == kWarpSize - 1); past != 0; past &= past - 1) {  // many empty ones
        const int i = find_first_set(past) - 1, sequence = sequence_of(a.offsets, a.sequences, begin + i);
        if (lane() == i) from = load(a.offsets, sequence);
      }
      position = mine - from + a.position_offset;
    }
    if (position < 0 || position >= a.places) id = -1;
    place = static_cast<int32_t>(position);
  }
  return {id, place};
}

}  // namespace frit::simt
