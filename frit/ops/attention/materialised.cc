// Attention as the papers have it: heads split, and for each sequence a product for the scores, softmax, a product with
// the values. Made of the operators heads, gemm and softmax.
#include <algorithm>
#include <limits>

#include "frit/ops/attention/cpu.h"
#include "frit/ops/gemm/gemm.h"
#include "frit/ops/heads/heads.h"
#include "frit/ops/softmax/softmax.h"

namespace frit {
namespace {

struct Sequence {
  int64_t q, lq, k, lk;  // first query and how many, first key and how many
};

// Sizes and scratch that forward and backward share.
class Materialised {
 public:
  Materialised(Context& context, const AttentionArgs& args, bool keep_scores)
      : context_(context), args_(args), n_(args.q.dim(1)), d_(args.q.dim(2)), sequences_(args.q_offsets.dim(0) - 1) {
    FRIT_CHECK(args.q_offsets.raw() && args.k_offsets.raw(),
               "[attention] materialised reads the offsets while memory is planned, too, and they are not there");
    q_offsets_ = args.q_offsets.data<int32_t>(), k_offsets_ = args.k_offsets.data<int32_t>();
    for (int64_t s = 0; s < sequences_; ++s) {
      const Sequence at = sequence(s);
      most_scores_ = std::max(most_scores_, at.lq * at.lk), longest_ = std::max(longest_, at.lq);
    }
    q_ = split(args.q, "attention.q"), k_ = split(args.k, "attention.k"), v_ = split(args.v, "attention.v");
    scores_ = context.allocate({n_ * most_scores_}, DType::kF32, "attention.scores");
    // Probabilities overwrite the scores where these are not needed again and have the dtype that a product takes.
    if (keep_scores || args.q.dtype() != DType::kF32)
      probabilities_ = context.allocate({n_ * most_scores_}, args.q.dtype(), "attention.probabilities");
    lse_ = context.allocate({n_ * longest_}, DType::kF32, "attention.lse");
    if (args.causal) lengths_ = context.allocate({n_ * longest_}, DType::kI32, "attention.lengths");
  }

  int64_t sequences() const { return sequences_; }
  Sequence sequence(int64_t s) const {
    return {q_offsets_[s], q_offsets_[s + 1] - q_offsets_[s], k_offsets_[s], k_offsets_[s + 1] - k_offsets_[s]};
  }
  // [N, tokens, D] of a [tokens, N, D].
  Buffer split(const Tensor& t, const char* name) {
    Buffer apart = context_.allocate({n_, t.dim(0), d_}, t.dtype(), name);
    merge_heads_backward(context_, t, apart);
    return apart;
  }
  // A sequence's [N, count, D] of a [N, tokens, D].
  Tensor slice(const Tensor& apart, int64_t begin, int64_t count) const {
    return apart.reshape({n_, apart.dim(1) * d_}).columns(begin * d_, (begin + count) * d_).split_columns({count, d_});
  }
  // The front of a scratch tensor as [N, lq, lk].
  Tensor as_scores(const Tensor& t, const Sequence& at) const {
    return t.rows(0, n_ * at.lq * at.lk).reshape({n_, at.lq, at.lk});
  }
  Tensor as_rows(const Tensor& scores) const { return scores.reshape({n_ * scores.dim(1), scores.dim(2)}); }

  Tensor q(const Sequence& at) const { return slice(q_, at.q, at.lq); }
  Tensor k(const Sequence& at) const { return slice(k_, at.k, at.lk); }
  Tensor v(const Sequence& at) const { return slice(v_, at.k, at.lk); }
  // q * k^T of every head, not scaled yet.
  Tensor multiply_scores(const Sequence& at) {
    const Tensor scores = as_scores(scores_, at);
    gemm(context_, {.a = q(at),
                    .b = k(at),
                    .c = scores,
                    .transpose_a = false,
                    .transpose_b = true,
                    .accumulate = false,
                    .bias = {}});
    return scores;
  }
  Tensor probabilities(const Sequence& at) const {
    return as_scores(probabilities_.defined() ? probabilities_ : scores_, at);
  }
  Tensor lse_rows(const Sequence& at) const { return lse_->rows(0, n_ * at.lq); }

  SoftmaxArgs softmax_args(const Sequence& at) {
    SoftmaxArgs args;
    args.scale = args_.scale, args.dropout = args_.dropout;
    args.first_row = at.q, args.rows_per_head = at.lq;
    if (args_.causal) {
      args.lengths = lengths_->rows(0, n_ * at.lq);
      if (!context_.planning())
        for (int64_t r = 0; r < n_ * at.lq; ++r)
          args.lengths.data<int32_t>()[r] =
              static_cast<int32_t>(std::clamp<int64_t>(r % at.lq + at.lk - at.lq + 1, 0, at.lk));
    }
    return args;
  }
  // Between lse [q_tokens, N] and a sequence's rows of scores [N, lq].
  void lse_to(const Tensor& lse, const Sequence& at) { move_lse(lse, at, true); }
  void lse_from(const Tensor& lse, const Sequence& at) { move_lse(lse, at, false); }

 private:
  void move_lse(const Tensor& lse, const Sequence& at, bool out) {
    if (context_.planning()) return;
    float *tokens = lse.data<float>(), *rows = lse_->data<float>();
    for (int64_t h = 0; h < n_; ++h)
      for (int64_t i = 0; i < at.lq; ++i) {
        float &token = tokens[(at.q + i) * n_ + h], &row = rows[h * at.lq + i];
        (out ? token : row) = out ? row : token;
      }
  }

  Context& context_;
  const AttentionArgs& args_;
  const int64_t n_, d_, sequences_;
  const int32_t *q_offsets_ = nullptr, *k_offsets_ = nullptr;
  int64_t most_scores_ = 0, longest_ = 0;
  Buffer q_, k_, v_, scores_, probabilities_, lse_, lengths_;
};

void multiply(Context& context, const Tensor& a, bool transpose_a, const Tensor& b, const Tensor& c) {
  gemm(context,
       {.a = a, .b = b, .c = c, .transpose_a = transpose_a, .transpose_b = false, .accumulate = false, .bias = {}});
}

}  // namespace

void attention_materialised_forward(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse) {
  Materialised m(context, args, false);
  Buffer outs = context.allocate({args.q.dim(1), args.q.dim(0), args.q.dim(2)}, out.dtype(), "attention.out");
  for (int64_t s = 0; s < m.sequences(); ++s) {
    const Sequence at = m.sequence(s);
    if (at.lq == 0) continue;
    const Tensor scores = m.multiply_scores(at), p = m.probabilities(at);
    softmax_forward(context, m.as_rows(scores), m.softmax_args(at), m.as_rows(p), m.lse_rows(at));
    m.lse_to(lse, at);
    multiply(context, p, false, m.v(at), m.slice(outs, at.q, at.lq));
  }
  merge_heads_forward(context, outs, out);
}

void attention_materialised_backward(Context& context, const AttentionArgs& args, const Tensor& lse, const Tensor& dout,
                                     const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  Materialised m(context, args, true);
  const DType dtype = args.q.dtype();
  const int64_t n = args.q.dim(1), d = args.q.dim(2), tq = args.q.dim(0), tk = args.k.dim(0);
  Buffer douts = m.split(dout, "attention.dout");
  Buffer dqs = context.allocate({n, tq, d}, dtype, "attention.dq"),
         dks = context.allocate({n, tk, d}, dtype, "attention.dk"),
         dvs = context.allocate({n, tk, d}, dtype, "attention.dv");
  int64_t most_scores = 0;
  for (int64_t s = 0; s < m.sequences(); ++s) most_scores = std::max(most_scores, m.sequence(s).lq * m.sequence(s).lk);
  Buffer dps = context.allocate({n * most_scores}, DType::kF32, "attention.dp");
  for (int64_t s = 0; s < m.sequences(); ++s) {
    const Sequence at = m.sequence(s);
    if (at.lq == 0 && at.lk == 0) continue;
    const Tensor scores = m.multiply_scores(at), y = m.probabilities(at), dp = m.as_scores(dps, at);
    const Tensor douts_at = m.slice(douts, at.q, at.lq);
    const SoftmaxArgs softmax = m.softmax_args(at);
    softmax_forward(context, m.as_rows(scores), softmax, m.as_rows(y), {});
    multiply(context, y, true, douts_at, m.slice(dvs, at.k, at.lk));
    gemm(context, {.a = douts_at,
                   .b = m.v(at),
                   .c = dp,
                   .transpose_a = false,
                   .transpose_b = true,
                   .accumulate = false,
                   .bias = {}});
    m.lse_from(lse, at);
    // In the place of the dropped probabilities, which have done their work.
    softmax_backward(context, m.as_rows(dp), m.as_rows(scores), m.lse_rows(at), softmax, m.as_rows(y));
    multiply(context, y, false, m.k(at), m.slice(dqs, at.q, at.lq));
    multiply(context, y, true, m.q(at), m.slice(dks, at.k, at.lk));
  }
  merge_heads_forward(context, dqs, dq);
  merge_heads_forward(context, dks, dk);
  merge_heads_forward(context, dvs, dv);
}

}  // namespace frit
