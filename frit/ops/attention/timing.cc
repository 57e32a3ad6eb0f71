#include "frit/ops/attention/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "frit/core/error.h"
#include "frit/memory/planner.h"

namespace frit {
namespace {

// Columns `part` of a joined [tokens, 3 * heads * width].
Tensor part_of(const Tensor& joined, int64_t part, const AttentionShape& s) {
  const int64_t H = s.heads * s.width;
  return joined.columns(part * H, (part + 1) * H).split_columns({s.heads, s.width});
}

}  // namespace

AttentionArgs attention_args(const AttentionShape& s) {
  const Tensor joined(nullptr, s.dtype, {s.tokens, 3 * s.heads * s.width});
  AttentionArgs args;
  args.q = part_of(joined, 0, s), args.k = part_of(joined, 1, s), args.v = part_of(joined, 2, s);
  args.q_offsets = args.k_offsets = Tensor(nullptr, DType::kI32, {s.sequences + 1});
  args.max_q = args.max_k = s.longest;
  args.causal = s.causal;
  args.scale = 1.0f / std::sqrt(static_cast<float>(s.width));
  args.dropout = {s.p_drop, dropout_site("attention.timing"), 0, {1, 0}};
  return args;
}

double time_attention(Gpu& gpu, ThreadPool& pool, const AttentionShape& s, std::string_view implementation) {
  Memory memory(&gpu);
  Context context(pool, memory, &gpu);
  context.force("attention", implementation);
  const int64_t H = s.heads * s.width;
  // Small numbers: what they are does not change how long it takes.
  const auto filled = [&](Shape shape, DType dtype, const char* name) {
    Buffer buffer = context.allocate(shape, dtype, name);
    gpu.fill(buffer->raw(), 0x3c, static_cast<size_t>(buffer->bytes()));
    return buffer;
  };
  const Buffer qkv = filled({s.tokens, 3 * H}, s.dtype, "qkv"), dqkv = filled({s.tokens, 3 * H}, s.dtype, "dqkv"),
               out = filled({s.tokens, s.heads, s.width}, s.dtype, "out"),
               dout = filled({s.tokens, s.heads, s.width}, s.dtype, "dout"),
               lse = filled({s.tokens, s.heads}, DType::kF32, "lse"),
               offsets = context.allocate({s.sequences + 1}, DType::kI32, "offsets");
  std::vector<int32_t> begins;
  for (int64_t i = 0; i <= s.sequences; ++i) begins.push_back(static_cast<int32_t>(s.tokens * i / s.sequences));
  gpu.upload(offsets->raw(), begins.data(), begins.size() * sizeof(int32_t));
  AttentionArgs args = attention_args(s);
  args.q = part_of(qkv, 0, s), args.k = part_of(qkv, 1, s), args.v = part_of(qkv, 2, s);
  args.q_offsets = args.k_offsets = offsets;
  const auto both = [&] {
    attention_forward(context, args, out, lse);
    attention_backward(context, args, out, lse, dout, part_of(dqkv, 0, s), part_of(dqkv, 1, s), part_of(dqkv, 2, s));
  };
  memory.begin_recording();
  both();
  const Plan plan = plan_memory(memory.end_recording());
  memory.reserve(plan.peak);
  const auto work = [&] {
    memory.begin_replay(plan);
    both();
    memory.end_replay();
  };
  work();  // anything that is wrong shows here, not while a graph is recorded
  std::vector<double> times = gpu.time_graph(work, 9);
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

std::vector<AttentionChoice> choose_attention(Context& context, const std::vector<AttentionShape>& shapes,
                                              Tuning& tuning, double seconds, bool again, const AttentionTimer& timer) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  std::vector<AttentionChoice> choices;
  for (const AttentionShape& shape : shapes) {
    const AttentionArgs args = attention_args(shape);
    AttentionChoice choice;
    choice.key = attention_key(args);
    const std::string_view known = tuning.find(kAttentionTuning, choice.key);
    const bool chosen_here =
        std::any_of(choices.begin(), choices.end(), [&](const AttentionChoice& c) { return c.key == choice.key; });
    if (chosen_here || (!known.empty() && !(again && known == kAttentionByOrder))) continue;
    choice.chosen = kAttentionByOrder;
    if (std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
      double first = 0, best = 0;
      for (const AttentionCandidate& candidate : attention_candidates(context, args)) {
        if (!candidate.refusal.empty()) continue;
        double us = 0;
        try {
          us = timer(shape, candidate.name);
        } catch (const Error& e) {
          choice.failures += fmt::format("{}{}: {}", choice.failures.empty() ? "" : "; ", candidate.name, e.what());
          continue;
        }
        if (choice.us.empty()) first = best = us, choice.chosen = candidate.name;
        choice.us[candidate.name] = us;
        if (us < best && us < (1 - kAttentionGain) * first) best = us, choice.chosen = candidate.name;
      }
    }
    tuning.set(kAttentionTuning, choice.key, choice.chosen);
    choices.push_back(std::move(choice));
  }
  return choices;
}

}  // namespace frit
