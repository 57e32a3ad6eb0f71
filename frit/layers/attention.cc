#include "frit/layers/attention.h"

#include <utility>

#include "frit/ops/attention/attention.h"
#include "frit/ops/column_sum/column_sum.h"
#include "frit/ops/gemm/gemm.h"

namespace frit {
namespace {

// [tokens, H] as [tokens, N, D].
Tensor heads_of(const Tensor& x, int64_t heads) {
  return x.split_columns({heads, x.dim(1) / heads});
}

// Part i of a joined [tokens, 3H] as [tokens, N, D].
Tensor part(const Tensor& qkv, int i, int64_t heads) {
  const int64_t H = qkv.dim(1) / 3;
  return heads_of(qkv.columns(i * H, (i + 1) * H), heads);
}

float attention_scale(const Tensor& q) {
  return 1.0f / std::sqrt(static_cast<float>(q.dim(2)));
}

AttentionArgs self_args(Context& context, const LayerOptions& o, const Place& place, const Tensor& qkv,
                        const Sequences& sequences, bool causal) {
  AttentionArgs args;
  args.q = part(qkv, 0, o.heads), args.k = part(qkv, 1, o.heads), args.v = part(qkv, 2, o.heads);
  args.q_offsets = args.k_offsets = sequences.offsets;
  args.max_q = args.max_k = sequences.longest;
  args.causal = causal;
  args.scale = attention_scale(args.q);
  args.dropout = context.dropout(o.p_attention, place.probabilities);
  return args;
}

AttentionArgs cross_args(Context& context, const LayerOptions& o, const Place& place, const Tensor& q,
                         const CrossKeysValues& kv) {
  AttentionArgs args;
  args.q = heads_of(q, o.heads), args.k = heads_of(kv.k, o.heads), args.v = heads_of(kv.v, o.heads);
  args.q_offsets = kv.queries.offsets, args.k_offsets = kv.keys.offsets;
  args.max_q = kv.queries.longest, args.max_k = kv.keys.longest;
  args.scale = attention_scale(args.q);
  args.dropout = context.dropout(o.p_attention, place.probabilities);
  return args;
}

}  // namespace

void self_attention_forward(Context& context, const LayerOptions& o, const SelfAttention& w, const Sequences& sequences,
                            bool causal, SelfAttentionSaved& saved, const NormAbove& above) {
  const Tensor n = saved.norm.output();
  const int64_t tokens = n.dim(0), H = n.dim(1);
  saved.qkv = allocate(context, w.place, {tokens, 3 * H}, n.dtype(), "qkv");
  linear(context, n, w.qkv.weight, w.qkv.bias, saved.qkv);
  saved.heads = allocate(context, w.place, {tokens, H}, n.dtype(), "heads");
  saved.lse = allocate(context, w.place, {tokens, o.heads}, DType::kF32, "lse");
  attention_forward(context, self_args(context, o, w.place, saved.qkv, sequences, causal),
                    heads_of(saved.heads, o.heads), saved.lse);
  if (!o.training) saved.qkv.release(), saved.lse.release();
  if (above.saved) {
    Buffer z = allocate(context, w.place, {tokens, H}, n.dtype(), "y");
    linear(context, saved.heads, w.out.weight, {}, z);
    end_sublayer_forward(context, o, w.place, w.out.bias, saved.norm, std::move(z), above);
  }
  norm_drop_output(o, saved.norm);
}

OutputGradient self_attention_backward(Context& context, const LayerOptions& o, const SelfAttention& w,
                                       const Sequences& sequences, bool causal, OutputGradient dy,
                                       SelfAttentionSaved& saved, bool accumulate, const SelfAttention& dw,
                                       const EndBelow& below) {
  const int64_t tokens = dy.dy->dim(0), H = dy.dy->dim(1);
  SublayerBackward back(context, o, w.place, std::move(dy), accumulate, saved.heads, dw.out);
  Buffer dheads = allocate(context, w.place, {tokens, H}, saved.heads->dtype(), "dheads");
  linear_backward_input(context, back.dz(), w.out.weight, false, dheads);
  back.release_dz();
  Buffer dqkv = allocate(context, w.place, {tokens, 3 * H}, saved.qkv->dtype(), "dqkv");
  attention_backward(context, self_args(context, o, w.place, saved.qkv, sequences, causal),
                     heads_of(saved.heads, o.heads), saved.lse, heads_of(dheads, o.heads), part(dqkv, 0, o.heads),
                     part(dqkv, 1, o.heads), part(dqkv, 2, o.heads));
  dheads.release(), saved.heads.release(), saved.lse.release(), saved.qkv.release();
  const Tensor n = norm_output(context, o, w.norm, w.place, saved.norm);
  linear_backward_weight(context, dqkv, n, accumulate, dw.qkv.weight, dw.qkv.bias);
  return back.finish(std::move(dqkv), w.qkv.weight, w.norm, saved.norm, dw.norm, below);
}

void cross_attention_forward(Context& context, const LayerOptions& o, const CrossAttention& w,
                             const CrossKeysValues& kv, CrossAttentionSaved& saved, const NormAbove& above) {
  const Tensor n = saved.norm.output();
  const int64_t tokens = n.dim(0), H = n.dim(1);
  saved.q = allocate(context, w.place, {tokens, H}, n.dtype(), "q");
  linear(context, n, w.q.weight, w.q.bias, saved.q);
  saved.heads = allocate(context, w.place, {tokens, H}, n.dtype(), "heads");
  saved.lse = allocate(context, w.place, {tokens, o.heads}, DType::kF32, "lse");
  attention_forward(context, cross_args(context, o, w.place, saved.q, kv), heads_of(saved.heads, o.heads), saved.lse);
  if (!o.training) saved.q.release(), saved.lse.release();
  if (above.saved) {
    Buffer z = allocate(context, w.place, {tokens, H}, n.dtype(), "y");
    linear(context, saved.heads, w.out.weight, {}, z);
    end_sublayer_forward(context, o, w.place, w.out.bias, saved.norm, std::move(z), above);
  }
  norm_drop_output(o, saved.norm);
}

OutputGradient cross_attention_backward(Context& context, const LayerOptions& o, const CrossAttention& w,
                                        const CrossKeysValues& kv, OutputGradient dy, CrossAttentionSaved& saved,
                                        bool accumulate, const CrossAttention& dw, const Tensor& dk, const Tensor& dv,
                                        const EndBelow& below) {
  const int64_t tokens = dy.dy->dim(0), H = dy.dy->dim(1);
  SublayerBackward back(context, o, w.place, std::move(dy), accumulate, saved.heads, dw.out);
  Buffer dheads = allocate(context, w.place, {tokens, H}, saved.heads->dtype(), "dheads");
  linear_backward_input(context, back.dz(), w.out.weight, false, dheads);
  back.release_dz();
  Buffer dq = allocate(context, w.place, {tokens, H}, saved.q->dtype(), "dq");
  attention_backward(context, cross_args(context, o, w.place, saved.q, kv), heads_of(saved.heads, o.heads), saved.lse,
                     heads_of(dheads, o.heads), heads_of(dq, o.heads), heads_of(dk, o.heads), heads_of(dv, o.heads));
  dheads.release(), saved.heads.release(), saved.lse.release(), saved.q.release();
  const Tensor n = norm_output(context, o, w.norm, w.place, saved.norm);
  linear_backward_weight(context, dq, n, accumulate, dw.q.weight, dw.q.bias);
  return back.finish(std::move(dq), w.q.weight, w.norm, saved.norm, dw.norm, below);
}

}  // namespace frit
