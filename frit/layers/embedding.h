// Token and position embedding as a layer.
#pragma once
#include "frit/layers/layer.h"

namespace frit {

struct Embedding {
  Tensor table;      // [V, H]
  Tensor positions;  // [P, H], learned or sinusoidal
  Place place;
};

// Math: y = dropout(scale * table[id] + positions[index within the sequence]).
// Shapes: ids i32 [tokens]; offsets i32 [sequences + 1]; y [tokens, H].
Buffer embed_forward(Context& context, const LayerOptions& options, const Embedding& w, float scale, const Tensor& ids,
                     const Tensor& offsets);

// dw.table gets the gradient (added to if accumulate_table), but for row pad_id; dw.positions, if defined, too.
void embed_backward(Context& context, const LayerOptions& options, const Embedding& w, float scale, const Tensor& ids,
                    const Tensor& offsets, Buffer dy, int64_t pad_id, bool accumulate_table, bool accumulate_positions,
                    const Embedding& dw);

}  // namespace frit
