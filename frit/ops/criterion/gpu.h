// The GPU form of criterion. Arguments are checked already.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Column numbers and those of the vectors behind a row's end stay below 2^31.
constexpr int64_t kLargestGpuVocabulary = int64_t{1} << 30;

// How a block that holds its row in shared memory is shaped; decided by the row's length alone.
struct CriterionBlock {
  int threads = 0;
  int64_t shared_bytes = 0;
  // Blocks of a launch over `rows` rows: what fits on the GPU at once, each walks its share of the rows.
  static CriterionBlock of(int64_t vocabulary, DType dtype);
  int64_t blocks(int64_t rows, const Gpu& gpu) const;
};

// Instances of criterion_forward: "warp" (a warp a row, in registers), "shared" (a block a row, in shared memory; reads
// each logit once) and "two_pass" (a block a row; reads each logit twice: the usual form, and the one for rows that fit
// nowhere). In the first two a row's bits depend on nothing but its values; in the last one neither, where it lies in
// memory included.
void criterion_forward_backward_gpu(Context& context, const Tensor& logits, const Tensor& bias, const Tensor& labels,
                                    float smoothing, const Tensor& scale, const Tensor& loss, const Tensor& nll);

}  // namespace frit
