// The GPU forms of decode_attention. Arguments are checked already.
#pragma once
#include "frit/ops/decode_attention/decode_attention.h"

namespace frit {

constexpr int kDecodeAttentionThreads = 128;
// Rows of a sentence that one block of cross attention serves: 1, 4 or 8.
constexpr int64_t decode_cross_rows(int64_t width) {
  return width == 1 ? 1 : width <= 4 ? 4 : 8;
}
// The widest head.
constexpr int64_t kDecodeAttentionLargestHead = 4096;

// Instances of decode_attention_forward: "vectors" (head widths 32, 64, 128 where all rows begin at multiples of 16
// bytes) and "any".
// "vectors": a block of 4 warps takes a row (cross: up to 8 rows of a sentence) of one head. D / (elements in 16 bytes)
// neighbouring threads take a key: key j belongs to the j % groups-th of them, so that its share of the work depends on
// j alone. Each keeps a softmax of its own; they are merged in a fixed order behind 1 barrier. 4 keys and values (2 for
// 8 rows) are in flight a thread.
// "any": a block takes one row of one head; a thread takes a key, then columns. 4 barriers for every 128 keys, and 2.
void decode_self_attention_gpu(Context& context, const DecodeSelfAttentionArgs& args, const Tensor& out);
void decode_cross_attention_gpu(Context& context, const DecodeCrossAttentionArgs& args, const Tensor& out);

}  // namespace frit
