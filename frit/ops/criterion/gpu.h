// The GPU form of criterion. Arguments are checked already.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Column numbers and those of the vectors behind a row's end stay below 2^31.
constexpr int64_t kLargestGpuVocabulary = int64_t{1} << 30;

// Longest row that a warp holds, wherever it begins; threads of a block that reads its row twice.
int64_t criterion_warp_columns(DType dtype);
constexpr int kCriterionTwoPassThreads = 512;

// How a block that holds its row in shared memory is shaped; decided by the row's length and by whether
// there is a bias (which takes more registers, so fewer threads).
struct CriterionBlock {
  int threads = 0;
  int64_t shared_bytes = 0;
  static CriterionBlock of(int64_t vocabulary, DType dtype, bool bias);
  // Blocks of a launch over `rows` rows: what fits at once on `multiprocessors`, where a block may have
  // `shared_bytes_limit`; each walks its share of the rows.
  int64_t blocks(int64_t rows, int64_t shared_bytes_limit, int multiprocessors) const;
};

// Instances of criterion_forward: "warp" (a warp a row, in registers), "shared" (a block a row, in shared memory; reads
// each logit once) and "two_pass" (a block a row; reads each logit twice: the usual form, and the one for rows that fit
// nowhere). In all of them a row's bits depend on nothing but its values, not on where it lies in memory either.
void criterion_forward_backward_gpu(Context& context, const Tensor& logits, const Tensor& bias, const Tensor& labels,
                                    float smoothing, const Tensor& scale, const Tensor& loss, const Tensor& nll);

}  // namespace frit
