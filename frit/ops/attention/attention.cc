#include "frit/ops/attention/attention.h"

#include "frit/ops/attention/cpu.h"
#include "frit/ops/attention/gpu.h"

#include <algorithm>
#include <bit>

namespace frit {
namespace {

void check_offsets(const Context& context, const Tensor& offsets, int64_t tokens, const char* name) {
  FRIT_CHECK(offsets.dtype() == DType::kI32 && offsets.rank() == 1 && offsets.dim(0) >= 1 && offsets.contiguous(),
             "[attention] {} is {}, expected i32 [sequences + 1]", name, offsets.to_string());
  if (context.planning() || context.on_gpu()) return;  // a GPU's numbers cannot be read here
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
  FRIT_CHECK(q.dtype() == DType::kF32 || is_16bit_float(q.dtype()), "[attention] q is {}, expected f32, bf16 or f16",
             q.to_string());
  FRIT_CHECK(q.dtype() != DType::kF16 || context.on_gpu(), "[attention] f16 needs a GPU");
  FRIT_CHECK(args.max_q >= 0 && args.max_k >= 0, "[attention] max_q is {}, max_k {}, expected 0 or more", args.max_q,
             args.max_k);
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

// Why an implementation does not take a call; empty if it does.
struct Refusal {
  const char* reason = "";  // the same for all calls that are refused for it
  std::string text;         // with the call's numbers
};

// One way to compute attention. The first of kImplementations that is of the context's device and does not refuse runs.
struct Implementation {
  const char* name;
  bool cpu, gpu;
  Refusal (*refuses)(const Context& context, const AttentionArgs& args);
  void (*forward)(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse);
  void (*backward)(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse,
                   const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv);
};

Refusal accepts_all(const Context&, const AttentionArgs&) {
  return {};
}
Refusal short_refuses(const Context&, const AttentionArgs& args) {
  const int64_t d = args.q.dim(2), max_q = attention_longest(args.max_q, args.q),
                max_k = attention_longest(args.max_k, args.k);
  const auto too_long = [](const char* what, int64_t longest, int64_t given) -> Refusal {
    return {given == 0 ? "short: longest not given" : "short: too long",
            fmt::format("short: {} {}{}, at most {}", longest, what,
                        given == 0 ? " (the number of tokens, as the longest sequence is not given)" : "",
                        kAttentionShortLongest)};
  };
  if (!attention_short_takes(d))
    return {"short: width", fmt::format("short: head width {}, expected 32, 64 or 128", d)};
  if (max_q > kAttentionShortLongest) return too_long("queries", max_q, args.max_q);
  if (max_k > kAttentionShortLongest) return too_long("keys", max_k, args.max_k);
  return {};
}

Refusal cudnn_refuses(const Context& context, const AttentionArgs& args) {
  const int64_t d = args.q.dim(2);
  if (!is_16bit_float(args.q.dtype())) return {"cudnn: dtype", "cudnn: f32, expected bf16 or f16"};
  if (d % 8 != 0 || d > 256) return {"cudnn: width", fmt::format("cudnn: head width {}, expected 8, 16, ... 256", d)};
  // It counts keys from the first on, we from the last: the same only in self-attention.
  if (args.causal && args.q_offsets.raw() != args.k_offsets.raw())
    return {"cudnn: causal", "cudnn: causal with other keys than queries"};
  for (const Tensor* t : {&args.q, &args.k, &args.v})
    if (t->row_stride() % 8 != 0 || reinterpret_cast<uintptr_t>(t->raw()) % 16 != 0)
      return {"cudnn: alignment", fmt::format("cudnn: {} with rows {} elements apart, expected whole 16 bytes",
                                              t->to_string(), t->row_stride())};
  if (const std::string why = attention_library_refuses(context, args); !why.empty())
    return {"cudnn: library", "cudnn: " + why};
  return {};
}

constexpr Implementation kImplementations[] = {
    {"short", false, true, short_refuses, attention_short_forward_gpu, attention_short_backward_gpu},
    {"cudnn", false, true, cudnn_refuses, attention_library_forward_gpu, attention_library_backward_gpu},
    {"flash", true, false, accepts_all, attention_flash_forward_cpu, attention_flash_backward_cpu},
    {"materialised", true, false, accepts_all, attention_materialised_forward,
     [](Context& context, const AttentionArgs& args, const Tensor&, const Tensor& lse, const Tensor& dout,
        const Tensor& dq, const Tensor& dk,
        const Tensor& dv) { attention_materialised_backward(context, args, lse, dout, dq, dk, dv); }},
    {"materialised", false, true, accepts_all,
     [](Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse) {
       attention_materialised_forward_gpu(context, args, out, lse);
     },
     [](Context& context, const AttentionArgs& args, const Tensor&, const Tensor& lse, const Tensor& dout,
        const Tensor& dq, const Tensor& dk,
        const Tensor& dv) { attention_materialised_backward_gpu(context, args, lse, dout, dq, dk, dv); }},
};

// Which implementation runs: what timing found, or the first that takes it. One that comes first but refuses is told of
// once, with its reason. Errors: std::invalid_argument if the forced one does not exist on this device or refuses, or
// if all refuse.
const Implementation& choose(Context& context, const AttentionArgs& args) {
  const std::string_view forced = context.forced("attention");
  if (const Tuning* tuning = context.tuning(); tuning && forced.empty()) {
    const std::string_view fastest = tuning->find(kAttentionTuning, attention_key(args));
    for (const Implementation& implementation : kImplementations)
      if (fastest == implementation.name && (context.on_gpu() ? implementation.gpu : implementation.cpu) &&
          implementation.refuses(context, args).text.empty()) {
        context.note_used("attention", implementation.name);
        return implementation;
      }
  }
  std::string names, texts, reasons;
  for (const Implementation& implementation : kImplementations) {
    if (context.on_gpu() ? !implementation.gpu : !implementation.cpu) continue;
    names += (names.empty() ? "" : ", ") + std::string(implementation.name);
    if (!forced.empty() && forced != implementation.name) continue;
    const Refusal refusal = implementation.refuses(context, args);
    if (refusal.text.empty()) {
      if (!texts.empty())
        context.notice_once(fmt::format("attention: {}, {}", implementation.name, reasons),
                            fmt::format("attention: {} runs, since {}", implementation.name, texts));
      context.note_used("attention", implementation.name);
      return implementation;
    }
    reasons += refusal.reason;
    texts += (texts.empty() ? "" : "; ") + refusal.text;
  }
  FRIT_CHECK(!texts.empty(), "[attention] there is no implementation \"{}\", expected one of {}", forced, names);
  fail_argument("[attention] q {}, k {}: {}", args.q.to_string(), args.k.to_string(), texts);
}

}  // namespace

std::vector<AttentionCandidate> attention_candidates(const Context& context, const AttentionArgs& args) {
  std::vector<AttentionCandidate> candidates;
  for (const Implementation& implementation : kImplementations)
    if (context.on_gpu() ? implementation.gpu : implementation.cpu)
      candidates.push_back({implementation.name, implementation.refuses(context, args).text});
  return candidates;
}

std::string attention_key(const AttentionArgs& args) {
  const auto power = [](int64_t x, uint64_t least) { return std::bit_ceil(std::max(static_cast<uint64_t>(x), least)); };
  const int64_t tokens = std::max(args.q.dim(0), args.k.dim(0)),
                longest = std::max(attention_longest(args.max_q, args.q), attention_longest(args.max_k, args.k));
  return fmt::format("{} {}x{} {} tokens up to {}{}{}", name_of(args.q.dtype()), args.q.dim(1), args.q.dim(2),
                     power(tokens, 256), power(longest, kAttentionLengthStep), args.causal ? " causal" : "",
                     args.dropout.active() ? " dropout" : "");
}

int64_t attention_longest(int64_t given, const Tensor& t) {
  return given > 0 ? std::min(given, t.dim(0)) : t.dim(0);
}

void attention_forward(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse) {
  check(context, args, out, lse);
  choose(context, args).forward(context, args, out, lse);
}

void attention_backward(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse,
                        const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  check(context, args, out, lse);
  check_like(dout, args.q, "dout", "q");
  check_like(dq, args.q, "dq", "q");
  check_like(dk, args.k, "dk", "k");
  check_like(dv, args.k, "dv", "k");
  choose(context, args).backward(context, args, out, lse, dout, dq, dk, dv);
}

}  // namespace frit
