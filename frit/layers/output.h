// Output projection and criterion, in chunks of rows, so that the logits of a batch are never all held.
#pragma once
#include "frit/layers/layer.h"

namespace frit {

struct Output {
  Tensor weight;  // [V, H]
  Tensor bias;    // [V], added to the logits, not trained; optional
  Place place;
};
struct CriterionOptions {
  float smoothing = 0;
  int64_t chunk_rows = 512;  // rows of logits held at a time; 0: all
};

// Math: logits = x * weight^T + bias; loss and nll as criterion_forward_backward gives them; with scale defined also
// dweight (+)= dlogits^T * x and dx = dlogits * weight, written over x. Chunk by chunk, in order.
// Shapes: x [tokens, H]; labels i32 [tokens]; scale f32 [1], optional; loss, nll f32 [tokens]; dweight [V, H].
// Without scale x stays as it is and dweight is not touched.
void output_criterion(Context& context, const Output& w, const CriterionOptions& options, const Tensor& x,
                      const Tensor& labels, const Tensor& scale, const Tensor& loss, const Tensor& nll, bool accumulate,
                      const Tensor& dweight);

}  // namespace frit
