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

// Keys that a group of threads takes before more than one warp shares a row's and head's self attention.
constexpr int kDecodeAttentionBrief = 16;
// Rows times heads from which on self attention gives each of them one warp.
constexpr int64_t kDecodeAttentionMany = 1024;

// Instances of decode_attention_forward: "vectors" and "warps" (head widths 32, 64, 128 where all rows begin at
// multiples of 16 bytes) and "any".
// In the first two D / (elements in 16 bytes) neighbouring threads are a group that takes a key at a time: which group
// has key j depends on j and the number of keys alone, each keeps a softmax of its own, and they are merged in a fixed
// order.
// "vectors": self attention: a block of 4 warps takes a row of one head, one warp of it if there are few keys (no
// barrier), else all (1 barrier); 8 keys and values are in flight a thread. Cross attention: a block takes up to 8 rows
// of a sentence, 1 barrier; 4 keys and values are in flight a thread (2 for 8 rows).
// "warps": a warp takes a row of one head, no barrier; in self attention with the bits of "vectors". Cross attention's
// warps that share a sentence each ask for its keys, which all but the first find in the multiprocessor's cache.
// "any": a block takes one row of one head; a thread takes a key, then columns. 4 barriers for every 128 keys, and 2.
void decode_self_attention_gpu(Context& context, const DecodeSelfAttentionArgs& args, const Tensor& out);
void decode_cross_attention_gpu(Context& context, const DecodeCrossAttentionArgs& args, const Tensor& out);

}  // namespace frit
