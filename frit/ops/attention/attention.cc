#include "frit/ops/attention/attention.h"

#include "frit/ops/attention/cpu.h"

namespace frit {
namespace {

void check_offsets(const Context& context, const Tensor& offsets, int64_t tokens, const char* name) {
  FRIT_CHECK(offsets.dtype() == DType::kI32 && offsets.rank() == 1 && offsets.dim(0) >= 1 && offsets.contiguous(),
             "[attention] {} is {}, expected i32 [sequences + 1]", name, offsets.to_string());
  if (context.planning()) return;
  const int32_t* at = offsets.data<int32_t>();
  const int64_t sequences = offsets.dim(0) - 1;
  FRIT_CHECK(at[0] == 0 && at[sequences] == tokens, "[attention] {} go from {} to {}, expected 0 to {}", name, at[0],
             at[sequences], tokens);
  for (int64_t s = 0; s < sequences; ++s)
    FRIT_CHECK(at[s] <= at[s + 1], "[attention] {}[{}] is {}, and the next one is {}: expected rising offsets", name, s,
               at[s], at[s + 1]);
}

void check_like(const Tensor& t, const Tensor& model, const char* name, const char* model_name) {
  FRIT_CHECK(t.rank() == 3 && t.shape() == model.shape() && t.dtype() == model.dtype(),
             "[attention] {} is {}, {} is {}", name, t.to_string(), model_name, model.to_string());
}

void check(const Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse) {
  const Tensor& q = args.q;
  FRIT_CHECK(q.rank() == 3 && q.dim(2) >= 1, "[attention] q is {}, expected [tokens, N, D] with D >= 1", q.to_string());
  FRIT_CHECK(q.dtype() == DType::kF32 || q.dtype() == DType::kBF16, "[attention] q is {}, expected f32 or bf16",
             q.to_string());
  FRIT_CHECK(
      args.k.rank() == 3 && args.k.dim(1) == q.dim(1) && args.k.dim(2) == q.dim(2) && args.k.dtype() == q.dtype(),
      "[attention] k is {}, q is {}", args.k.to_string(), q.to_string());
  check_like(args.v, args.k, "v", "k");
  check_like(out, q, "out", "q");
  FRIT_CHECK(lse.dtype() == DType::kF32 && lse.shape() == Shape({q.dim(0), q.dim(1)}) && lse.contiguous(),
             "[attention] lse is {}, expected contiguous f32[{}, {}]", lse.to_string(), q.dim(0), q.dim(1));
  check_offsets(context, args.q_offsets, q.dim(0), "q_offsets");
  check_offsets(context, args.k_offsets, args.k.dim(0), "k_offsets");
  FRIT_CHECK(args.q_offsets.dim(0) == args.k_offsets.dim(0), "[attention] q_offsets is {}, k_offsets is {}",
             args.q_offsets.to_string(), args.k_offsets.to_string());
}

// Which implementation runs: the forced one, or "flash". Errors: std::invalid_argument for a name that does not exist.
bool choose_flash(const Context& context) {
  const std::string_view forced = context.forced("attention");
  FRIT_CHECK(forced.empty() || forced == "flash" || forced == "materialised",
             "[attention] there is no implementation \"{}\", expected flash or materialised", forced);
  return forced != "materialised";
}

}  // namespace

void attention_forward(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse) {
  check(context, args, out, lse);
  if (choose_flash(context)) {
    context.note_used("attention", "flash");
    attention_flash_forward_cpu(context, args, out, lse);
  } else {
    context.note_used("attention", "materialised");
    attention_materialised_forward(context, args, out, lse);
  }
}

void attention_backward(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse,
                        const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  check(context, args, out, lse);
  check_like(dout, args.q, "dout", "q");
  check_like(dq, args.q, "dq", "q");
  check_like(dk, args.k, "dk", "k");
  check_like(dv, args.k, "dv", "k");
  if (choose_flash(context)) {
    context.note_used("attention", "flash");
    attention_flash_backward_cpu(context, args, out, lse, dout, dq, dk, dv);
  } else {
    context.note_used("attention", "materialised");
    attention_materialised_backward(context, args, lse, dout, dq, dk, dv);
  }
}

}  // namespace frit
