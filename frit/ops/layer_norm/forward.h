// The instances of layer_norm's forward kernels, and which one runs a shape. Shared with the operator that makes the
// norm's input in the same launch.
#pragma once
#include <cstdint>

#include "frit/backend/context.h"

namespace frit::layer_norm {

// See gpu.h. `vectors` of 16 bytes a thread holds of a row, which up to `most_warps` warps share.
enum ForwardInstance {
  kOneSync1,
  kOneSync2,
  kOneSync4,
  kOneSyncWide,
  kLooped,
  kSpans2,
  kSpans4,
  kSpans5,
  kHeld,
  kTwoSync,
  kMoments,
  kInPlace,
};
constexpr const char* kForwardInstances[] = {"one_sync_1", "one_sync_2", "one_sync_4", "one_sync_wide",
                                             "looped",     "spans_2",    "spans_4",    "spans_5",
                                             "held",       "two_sync",   "moments",    "in_place"};

// How a launch shares out rows of one shape and row stride.
struct ForwardShape {
  explicit ForwardShape(const Tensor& x);
  static constexpr int kVectors[] = {1, 2, 4, 4, 4, 2, 4, 5, 4, 1, 1, 4};      // a thread holds of a row, at most
  static constexpr int kMostWarps[] = {8, 8, 8, 16, 16, 8, 8, 8, 8, 8, 8, 8};  // that share a row
  static bool is_spans(int i) { return i >= kSpans2 && i <= kSpans5; }

  int64_t rows, cols, n;  // n: elements of a vector
  int64_t vectors;        // of a row that begins at one
  int64_t period;         // of the rows that begin equally far past a multiple of 16 bytes
  int64_t chunks;         // vectors that cover a row wherever it begins

  int warps_of(int i) const;  // that share a row
  int held_vectors() const;   // that a thread of `held` or `in_place` has of a row; 0: too wide
  bool fits(int i) const;
  // What runs if nothing is forced and nothing is known from timing. A function of the shape.
  int rule() const;
};

// Does every row of y begin as far past a multiple of 16 bytes as x's? 16-bit elements.
inline bool rows_alike(const Tensor& x, const Tensor& y) {
  const auto place = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.raw()) % 16; };
  return place(x) == place(y) && (x.row_stride() - y.row_stride()) % 8 == 0;
}

// Are t's rows whole vectors of 16 bytes that begin at multiples of them? True of no tensor, and of any address while
// planning.
inline bool whole_vectors(const Tensor& t) {
  if (!t.defined() || t.rank() < 1) return true;
  const int64_t n = 16 / size_of(t.dtype());
  return t.dim(t.rank() - 1) % n == 0 && (t.rank() == 1 || t.row_stride() % n == 0) &&
         reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0;
}

// The instance that layer_norm_forward runs on x: forced, timed, or by the rule.
int choose_forward(Context& context, const Tensor& x);

}  // namespace frit::layer_norm
