// Token and position embedding with scale and dropout, in one pass.
#pragma once
#include "frit/backend/context.h"

namespace frit {

struct EmbeddingArgs {
  Tensor ids;                   // i32 [tokens], each in [0, V)
  Tensor offsets;               // i32 [sequences + 1], first 0, last tokens: where each sequence begins
  Tensor position_ids;          // i32 [tokens], optional: given positions instead of the index within the sequence
  int64_t position_offset = 0;  // added to the index within the sequence (decoding); ignored with position_ids
  Tensor table;                 // [V, H], f32, bf16 or f16 (GPU)
  Tensor positions;             // [P, H], the table's dtype, optional (learned or sinusoidal)
  float scale = 1;              // sqrt(H) or 1
  Dropout dropout;              // element (token, column)
};

// Math: y[t] = dropout(scale * table[ids[t]] + positions[position(t)]).
// Shapes: y [tokens, H], the table's dtype.
// Errors: std::invalid_argument if a shape or dtype differs, or (CPU) an id or a position is out of range. A GPU cannot
// look at them beforehand: there such a token's row is zeros, and so is that of a token at or behind the last offset.
void embedding_forward(Context& context, const EmbeddingArgs& args, const Tensor& y);

// Math: dtable[w] (+)= sum over tokens with ids[t] == w of scale * mask/keep * dy[t], in token order, the same bits for
// any number of threads; row pad_id (if >= 0) gets nothing; dpositions[p] (+)= sum over tokens at p of mask/keep *
// dy[t]. Shapes: dy [tokens, H]; dtable [V, H] f32 or dy's dtype; dpositions [P, H], optional. On a GPU, tokens whose
// row is zeros in forward count nothing. accumulate false writes the whole of dtable and dpositions; true adds to them.
void embedding_backward(Context& context, const EmbeddingArgs& args, const Tensor& dy, int64_t pad_id, bool accumulate,
                        const Tensor& dtable, const Tensor& dpositions);

}  // namespace frit
