// What kernels for 16-bit tensors share whose rows are whole aligned vectors: a thread's place in a ColumnWalk without
// classes, folds or cut vectors, and dropout's random words as they come. Instructions are what they save.
#pragma once
#include "frit/simt/columns.h"

namespace frit {

// True if the walk over x meets nothing but whole aligned vectors of 16-bit elements. `vectors`: the launch's other
// tensors lie like x.
inline bool walks_whole(const ColumnWalk& walk, const Tensor& x, bool vectors) {
  return vectors && size_of(x.dtype()) == 2 && walk.fold == 1 && walk.period == 1 && walk.rows > 0 &&
         walk.columns > 0 && walk.columns % 8 == 0 && reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
}
inline bool begins_whole(const Tensor& x) {
  return !x.defined() || reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
}

namespace simt {

// column_place where walks_whole.
FRIT_DEVICE ColumnPlace whole_place(const ColumnWalk& walk) {
  ColumnPlace at;
  const uint32_t block = static_cast<uint32_t>(block_index()), piece = walk.by_tiles(block);
  const int tile = static_cast<int>(block - piece * static_cast<uint32_t>(walk.tiles));
  at.piece = piece;
  at.lane = static_cast<int>(walk.by_width(static_cast<uint32_t>(thread_index())));
  at.slot = thread_index() - at.lane * walk.width;
  const int chunk = tile * walk.width + at.slot;
  at.column = chunk * 8;
  at.active = at.lane < walk.lanes && chunk < walk.chunks;
  at.whole = true, at.limit = walk.columns;
  return at;
}

// The random words of M groups of 8 columns, drawn side by side: the groups share the loads of the rounds' keys and
// hide each other's latency. Without dropout all ones.
template <int M>
struct DropoutWords {
  uint32_t v[M][4];

  // Is element k of group j kept? threshold: dropout_threshold.
  FRIT_DEVICE bool kept(int j, int k, uint32_t threshold) const {
    return (k % 2 ? v[j][k / 2] : v[j][k / 2] << 16) >= threshold;
  }
};
// A word's upper 16 bits are kept if the word is not below this; 0 without dropout.
FRIT_DEVICE uint32_t dropout_threshold(const DropoutTable& d) {
  return d.below + 1;
}
// Cost: 36 instructions a group and 10 to 20 more; a branch without dropout.
template <int M>
FRIT_DEVICE DropoutWords<M> dropout_words(const DropoutTable& d, const uint32_t (&rows)[M], const uint32_t (&groups)[M],
                                          uint32_t head = 0) {
  DropoutWords<M> c;
  FRIT_UNROLL
  for (int j = 0; j < M; ++j) {
    FRIT_UNROLL
    for (int k = 0; k < 4; ++k) c.v[j][k] = 0;
  }
  if (!d.active) return c;
  FRIT_UNROLL
  for (int j = 0; j < M; ++j)
    c.v[j][0] = groups[j], c.v[j][1] = rows[j], c.v[j][2] = head | d.lane_word, c.v[j][3] = d.site;
  FRIT_UNROLL
  for (int r = 0; r < 10; ++r) {
    FRIT_UNROLL
    for (int j = 0; j < M; ++j) {
      uint32_t(&v)[4] = c.v[j];
      const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * v[0], p1 = static_cast<uint64_t>(kPhiloxM1) * v[2];
      v[0] = static_cast<uint32_t>(p1 >> 32) ^ v[1] ^ d.keys[2 * r];
      v[2] = static_cast<uint32_t>(p0 >> 32) ^ v[3] ^ d.keys[2 * r + 1];
      v[1] = static_cast<uint32_t>(p1), v[3] = static_cast<uint32_t>(p0);
    }
  }
  return c;
}

}  // namespace simt
}  // namespace frit
