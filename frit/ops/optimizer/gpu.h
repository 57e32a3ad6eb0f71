// The GPU form of the optimizer.
#pragma once
#include "frit/ops/optimizer/constants.h"

namespace frit {

// Updates elements [begin, end) with the constants in `prepared` (f32 [kOptimizerConstants] on the device), or, where
// that is undefined, with those given.
// Cost: 1 launch (0 without elements), no barrier; each block read once and all but the gradients written once; the
// constants again in each thread, where they are prepared.
void optimizer_step_gpu(Context& context, const OptimizerArgs& args, const OptimizerConstants& constants,
                        const Tensor& prepared, const OptimizerBlocks& blocks, int64_t begin, int64_t end);
void optimizer_prepare_gpu(Context& context, const OptimizerArgs& args, const PrepareArgs& prepare,
                           const Tensor& sum_of_squares, const Tensor& not_finite, const OptimizerState& state);
void optimizer_begin_gpu(Context& context, const Tensor& rates, const Tensor& first, const Tensor& inverse_tokens,
                         const OptimizerState& state, const Tensor& scale);

// Cost: 1 launch (0 without elements or slices), no barrier; reads what an update reads, and of slice_ends as many
// numbers a thread as it takes to find one of them by halves, and one more wherever a slice ends; 2 atomics for 2048
// elements of one slice, at most 2 an element in the 128 elements around a slice's end.
void optimizer_swallowed_gpu(Context& context, const OptimizerArgs& args, const OptimizerConstants& constants,
                             const Tensor& prepared, const OptimizerBlocks& blocks, const Tensor& slice_ends,
                             const Tensor& counts);

// `step` is 1 - decay, unless numbers is defined. Cost: 1 launch (0 without elements), no barrier.
void ema_update_gpu(Context& context, double step, const OptimizerBlocks& blocks, const Tensor& ema,
                    const Tensor& numbers);
void ema_exchange_gpu(Context& context, bool in, const OptimizerBlocks& blocks, const Tensor& ema, const Tensor& aside);

}  // namespace frit
