// What the two halves of layer_norm's backward share: the launches that write dx, and those that only sum columns.
#pragma once
#include <cstdint>

#include "frit/backend/context.h"

namespace frit {

// A launch of layer_norm_backward: operands, and where partial sums of dgamma and dbeta go, f32 [pieces, 2 * cols], the
// columns of dgamma first. No partials: dx alone.
struct LayerNormBackward {
  const Tensor &dy, &x, &gamma, &mean, &rstd, &dresidual, &dx;
  Tensor partials;
};

// Ways to sum dgamma and dbeta in launches of their own.
enum class ColumnWay { kSerial, kAtomic, kTiled32x32, kTiled32x33 };

// partials' rows become sums over pieces of the rows, one each (tiled: only one). 1 launch; atomic 2.
void layer_norm_sum_columns(Context& context, const LayerNormBackward& b, ColumnWay way);
// dgamma and dbeta (+)= the sum of partials' rows, in order of a fixed tree. 1 launch, 2 if their types differ.
void layer_norm_add_partials(Context& context, Buffer partials, bool accumulate, const Tensor& dgamma,
                             const Tensor& dbeta);

// The same, and dmore (+)= the sum of the rows of `more`, f32 [pieces, cols]. 1 launch; 2 or 3 if types differ.
void layer_norm_add_all_partials(Context& context, Buffer partials, Buffer more, bool accumulate, const Tensor& dgamma,
                                 const Tensor& dbeta, const Tensor& dmore);

namespace layer_norm {

// See gpu.h.
enum BackwardInstance {
  kXhat1,
  kXhat2,
  kXhat4,
  kLoopedBackward,
  kSpans2Backward,
  kSpans4Backward,
  kSpans5Backward,
  kHeldBackward,
  kDependence,
  kSlides,
  kColumnSerial,
  kAtomic,
  kTiled32,
  kTiled33,
  kApart
};

// Warps of a block of held, at most: as many as have the registers for their columns' sums.
constexpr int held_block_warps(int vectors, int sums) {
  return vectors > 2 && sums == 3 ? 12 : 16;
}
// Rows of a group that it has in shared memory. One that is read there twice makes room only behind its second half; of
// 4 vectors a lane there is room for two alone.
constexpr int held_stages(int vectors) {
  return vectors == 3 ? 3 : 2;
}

// How a launch's blocks share out rows: `groups` of `warps` warps each take rows, a batch of them at a time.
struct BackwardCut {
  int warps = 1, groups = 1;
  int64_t blocks = 0, shared_bytes = 0;
  int threads() const { return warps * groups * 32; }
};

struct BackwardShape {
  explicit BackwardShape(const Tensor& x);
  static bool is_spans(int i) { return i >= kSpans2Backward && i <= kSpans5Backward; }

  int64_t rows, cols, n;  // n: elements of a vector
  int64_t vectors;        // of a row that begins at one
  bool aligned;           // do all rows begin at one?
  int64_t period;         // of the rows that begin equally far past a multiple of 16 bytes
  int64_t chunks;         // vectors that cover a row wherever it begins

  // Of the instances that take a row by vectors in order, the one of the fewest a thread that holds it.
  int widest() const;
  // Can spans i hold a row?
  bool spans_fit(int i) const;
  // Vectors that a thread of `held` has of a row; 0 if it cannot hold it.
  int held_vectors() const;
  // Do a row's whole vectors leave none of its warps' threads without one?
  bool held_full() const { return cols == int64_t{256} * held_vectors() * cut(kHeldBackward).warps; }
  // What runs if nothing is forced and nothing is known from timing, of all instances or of those but held. Functions
  // of the columns and the stride alone.
  int rule() const;
  int rule_but_held() const;
  // sums: how many each column has.
  BackwardCut cut(int i, int sums = 2) const;
};

// Starts layer_norm_backward's spans_2, spans_4 or spans_5. whole: all rows are whole aligned vectors.
void start_backward_spans(Context& context, int i, const BackwardShape& shape, const LayerNormBackward& b, bool whole);
// The same of held.
void start_backward_held(Context& context, const BackwardShape& shape, const LayerNormBackward& b, bool whole);

}  // namespace layer_norm

}  // namespace frit
