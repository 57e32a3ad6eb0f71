#include "frit/ops/decode_attention/decode_attention.h"

#include <limits>

#include "frit/ops/decode_attention/cpu.h"
#include "frit/ops/decode_attention/gpu.h"

namespace frit {
namespace {

void check_i32(const char* name, const Tensor& t, int rank) {
  FRIT_CHECK(t.rank() == rank && t.dtype() == DType::kI32 && t.contiguous() && t.numel() > 0,
             "[decode_attention] {} is {}, expected i32 of rank {}, not empty", name, t.to_string(), rank);
}

// The operands that both kinds have.
void check_common(Context& context, const char* name, const Tensor& x, int64_t parts, const DecodeRows& rows,
                  int64_t heads, const Tensor& out) {
  FRIT_CHECK(x.rank() == 2, "[decode_attention] {} is {}, expected rank 2", name, x.to_string());
  check_float("decode_attention", name, x, context);
  check_i32("live", rows.live, 1);
  check_i32("live_sentence", rows.live_sentence, 1);
  FRIT_CHECK(rows.width >= 1 && rows.width < (1 << 20), "[decode_attention] width is {}, expected 1 or more",
             rows.width);
  FRIT_CHECK(heads >= 1 && x.dim(1) > 0 && x.dim(1) % (parts * heads) == 0,
             "[decode_attention] {} is {}, expected {} parts of {} heads", name, x.to_string(), parts, heads);
  FRIT_CHECK(x.dim(1) / (parts * heads) <= kDecodeAttentionLargestHead,
             "[decode_attention] heads have {} columns, expected at most {}", x.dim(1) / (parts * heads),
             kDecodeAttentionLargestHead);
  FRIT_CHECK(out.rank() == 2 && out.dim(0) == x.dim(0) && out.dim(1) == x.dim(1) / parts && out.dtype() == x.dtype(),
             "[decode_attention] out is {}, {} is {}", out.to_string(), name, x.to_string());
  FRIT_CHECK(x.dim(0) <= rows.live_sentence.dim(0) * rows.width,
             "[decode_attention] {} is {}, expected at most {} sentences times {} rows", name, x.to_string(),
             rows.live_sentence.dim(0), rows.width);
}

}  // namespace

void decode_self_attention(Context& context, const DecodeSelfAttentionArgs& args, const Tensor& out) {
  check_common(context, "qkv", args.qkv, 3, args.rows, args.heads, out);
  check_i32("origin", args.origin, 3);
  check_i32("position", args.position, 1);
  const int64_t slots = args.rows.live_sentence.dim(0) * args.rows.width, width = out.dim(1);
  FRIT_CHECK(args.cache.rank() == 4 && args.cache.dim(1) == slots && args.cache.dim(2) == 2 &&
                 args.cache.dim(3) == width && args.cache.dtype() == args.qkv.dtype() && args.cache.contiguous(),
             "[decode_attention] cache is {}, expected {}[positions, {}, 2, {}]", args.cache.to_string(),
             name_of(args.qkv.dtype()), slots, width);
  FRIT_CHECK(args.cache.dim(0) <= std::numeric_limits<int32_t>::max(), "[decode_attention] cache is {}: too long",
             args.cache.to_string());
  FRIT_CHECK(args.origin.dim(0) == 2 && args.origin.dim(1) == slots && args.origin.dim(2) >= args.cache.dim(0),
             "[decode_attention] origin is {}, expected i32[2, {}, {} or more]", args.origin.to_string(), slots,
             args.cache.dim(0));
  if (context.on_gpu()) return decode_self_attention_gpu(context, args, out);
  decode_self_attention_cpu(context, args, out);
}

void decode_cross_attention(Context& context, const DecodeCrossAttentionArgs& args, const Tensor& out) {
  check_common(context, "q", args.q, 1, args.rows, args.heads, out);
  check_i32("source_offsets", args.source_offsets, 1);
  FRIT_CHECK(args.source_offsets.dim(0) == args.rows.live_sentence.dim(0) + 1,
             "[decode_attention] source_offsets is {}, live_sentence is {}", args.source_offsets.to_string(),
             args.rows.live_sentence.to_string());
  for (const Tensor* t : {&args.keys, &args.values})
    FRIT_CHECK(t->rank() == 2 && t->dim(1) == out.dim(1) && t->dtype() == args.q.dtype(),
               "[decode_attention] keys or values are {}, q is {}", t->to_string(), args.q.to_string());
  FRIT_CHECK(args.keys.dim(0) == args.values.dim(0) && args.keys.row_stride() == args.values.row_stride() &&
                 args.keys.dim(0) <= std::numeric_limits<int32_t>::max(),
             "[decode_attention] keys are {}, values are {}, expected the same rows", args.keys.to_string(),
             args.values.to_string());
  if (context.on_gpu()) return decode_cross_attention_gpu(context, args, out);
  decode_cross_attention_cpu(context, args, out);
}

}  // namespace frit
