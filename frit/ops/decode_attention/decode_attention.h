// Attention of one decoding step: one query a hypothesis, over the keys and values of the positions before it or of its
// source sentence.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Which hypotheses a step's rows are. Everything in the tensors is device data: a recorded step reads it when it runs.
// Row r is hypothesis r % width of sentence live_sentence[r / width] if r / width < live[0]; its slot is
// sentence * width + hypothesis. Other rows are padding of a bucket: their results are 0, whatever they are, and
// nothing is written for them. A sentence outside of [0, sentences) makes its rows padding too.
struct DecodeRows {
  Tensor live;           // i32 [1]: sentences that are still decoded
  Tensor live_sentence;  // i32 [sentences]: which they are; only the first live[0] are read
  int64_t width = 1;     // hypotheses a sentence
};

struct DecodeSelfAttentionArgs {
  Tensor qkv;       // [rows, 3 * H], any row stride: this step's queries, keys and values, biases added; rows <= slots
  Tensor cache;     // [positions, slots, 2, H] of one layer, k then v; slots = sentences * width
  Tensor origin;    // i32 [2, slots, places], places >= positions: at which slot a hypothesis finds its k and v of a
                    // past position; a step at position p reads side p & 1, and of a row the places before p only
  Tensor position;  // i32 [1]: where this step stands; the same for all rows
  DecodeRows rows;
  int64_t heads = 1;  // H = heads * D
  float scale = 1;    // usually 1/sqrt(D)
};

// Writes each row's k and v to cache[position][slot], then attends over positions 0..position: the past ones as
// `origin` has them, its own from qkv.
// Math: out[r] = sum_j softmax_j(scale * q[r] . k_j) v_j for each head, fp32 inside.
// Shapes: out [rows, H], qkv's dtype, any row stride. dtypes: f32, bf16, on a GPU also f16; cache as qkv.
// A row's bits depend on its own q, keys and values alone: not on the number of rows, its place among them, or slots.
// Device data out of range: a position outside of the cache writes nothing and makes out 0; an origin outside of the
// slots is taken for the nearest slot (on the CPU both are errors).
// Cost: 1 launch, each key and value read once. Any head width; 32, 64 and 128 of 16-byte aligned tensors are fast.
// Errors: std::invalid_argument if shapes or dtypes do not fit.
void decode_self_attention(Context& context, const DecodeSelfAttentionArgs& args, const Tensor& out);

struct DecodeCrossAttentionArgs {
  Tensor q;               // [rows, H], any row stride, biases added; rows <= sentences * width
  Tensor keys, values;    // [tokens, H], the same row stride: two slices of columns of what cross_keys_values_forward
                          // wrote, for instance
  Tensor source_offsets;  // i32 [sentences + 1]: sentence s has tokens [source_offsets[s], source_offsets[s + 1])
  DecodeRows rows;
  int64_t heads = 1;
  float scale = 1;
};

// Attends over the tokens of each row's source sentence. A sentence without tokens gives 0.
// Math, dtypes, bits and errors: as decode_self_attention. Offsets outside of the tokens are taken for the nearest end
// (on the CPU: an error).
// Cost: 1 launch; keys and values are read from memory once for the `width` rows of a sentence (for every 8 of them).
void decode_cross_attention(Context& context, const DecodeCrossAttentionArgs& args, const Tensor& out);

}  // namespace frit
