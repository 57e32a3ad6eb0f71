// The CPU forms of decode_attention. Shapes are checked already; device data is checked here.
#pragma once
#include "frit/ops/decode_attention/decode_attention.h"

namespace frit {

void decode_self_attention_cpu(Context& context, const DecodeSelfAttentionArgs& args, const Tensor& out);
void decode_cross_attention_cpu(Context& context, const DecodeCrossAttentionArgs& args, const Tensor& out);

}  // namespace frit
