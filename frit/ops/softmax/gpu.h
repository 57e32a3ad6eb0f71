// The GPU form of softmax. Arguments are checked already.
#pragma once
#include "frit/ops/softmax/softmax.h"

namespace frit {

// x and y of one dtype, or x f32 and y of 16 bits. Lengths out of [0, cols] count as the nearest end. Cost: 1 launch;
// reads x once and writes y once where a row fits registers (up to 288 vectors of 16 bytes by a warp, with no barrier;
// up to 1024 by a block, with 2); what lies beyond is read 3 times. With a mask or two dtypes a warp keeps 64 vectors.
// The stored form also writes p and keep.
void softmax_forward_gpu(Context& context, const Tensor& x, const SoftmaxArgs& args, const Tensor& y,
                         const Tensor& lse);
// dy and x of one dtype, dx of the same or, if they are f32, of 16 bits. Cost: 1 launch; reads dy and x once and writes
// dx once under the same conditions (1 barrier in a block); what lies beyond is read twice. The stored form reads p and
// keep in the place of x.
void softmax_backward_gpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& lse,
                          const SoftmaxArgs& args, const Tensor& dx);

}  // namespace frit
