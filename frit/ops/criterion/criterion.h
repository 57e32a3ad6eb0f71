// Cross entropy with label smoothing: loss and its gradient in one pass over the logits.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Math: p = (1-a) * onehot(label) + a/V; loss[t] = -sum p log q, nll[t] = -log q[label], q = softmax(logits + bias);
// with `scale` defined, logits become dlogits = (q - p) * scale[0], in place; without it they are left as they are.
// Rows with label < 0 count nothing: loss = nll = 0 and dlogits = 0.
// A row's bits depend on nothing but its values and V: calls over slices of the rows, wherever those lie, give the bits
// of one call over all.
// Shapes: logits [tokens, V] f32 or bf16, f16 on a GPU; bias [V] f32 or the logits' dtype, optional (added to the
// logits, no gradient); labels i32 [tokens]; scale f32 [1], optional: loss scale / number of targets, read when it
// runs; loss, nll f32 [tokens]. Cost: 1 launch; reads and writes each logit once; on a GPU 2 barriers a row, 0 when a
// warp owns it (V to about 2000). Errors: std::invalid_argument if a shape or dtype differs, or a label is >= V. A GPU
// cannot throw for data: there such a row has loss = nll = NaN (which every sum of losses shows) and dlogits = 0.
void criterion_forward_backward(Context& context, const Tensor& logits, const Tensor& bias, const Tensor& labels,
                                float smoothing, const Tensor& scale, const Tensor& loss, const Tensor& nll);

}  // namespace frit
