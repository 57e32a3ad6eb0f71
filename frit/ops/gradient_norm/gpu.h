// The GPU form of gradient_norm.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Pieces that n elements of `bytes` each are summed in, one a block, and the elements of each but the last: they depend
// on n alone.
struct GradientPieces {
  int64_t count, elements;
};
GradientPieces gradient_pieces_gpu(int64_t n, int64_t bytes);

// Cost: 2 launches, 1 barrier each (the second for 1 when there is one warp's worth of pieces as well); reads the
// gradients once; 8 bytes of scratch a piece, written and read once.
void gradient_norm_gpu(Context& context, const Tensor& gradients, const Tensor& sum_of_squares,
                       const Tensor& not_finite);

}  // namespace frit
