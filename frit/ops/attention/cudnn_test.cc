// Attention over cuDNN on a GPU: dropout, whose mask is cuDNN's own, and recorded graphs. Everything else is in the
// case table. Built with cuDNN alone.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "frit/memory/planner.h"
#include "frit/ops/attention/attention.h"
#include "frit/ops/case.h"

namespace frit {
namespace {

constexpr int64_t kHeads = 2, kWidth = 64, kTokens = 104;
constexpr float kScale = 0.125f, kDrop = 0.25f;
const std::vector<int32_t> kOffsets = {0, 64, 104};

// Self-attention of two sequences in f16; all on the GPU, all results come back as floats.
struct Rig {
  std::unique_ptr<Gpu> gpu = make_gpu();
  ThreadPool pool{1};
  Memory memory{gpu.get()};
  Context context{pool, memory, gpu.get()};
  Buffer q = buffer(), k = buffer(), v = buffer(), dout = buffer(), out = buffer(), dq = buffer(), dk = buffer(),
         dv = buffer();
  Buffer lse = context.allocate({kTokens, kHeads}, DType::kF32, "lse"),
         offsets = context.allocate({3}, DType::kI32, "offsets");

  Rig() {
    context.force("attention", "cudnn");
    gpu->upload(offsets->raw(), kOffsets.data(), 12);
    set(q, random(1)), set(k, random(2)), set(v, random(3)), set(dout, random(4));
  }
  Buffer buffer() { return context.allocate({kTokens, kHeads, kWidth}, DType::kF16, "test"); }
  static std::vector<float> random(uint64_t seed) {
    CaseRandom r{seed};
    std::vector<float> x(kTokens * kHeads * kWidth);
    for (float& e : x) e = static_cast<float>(float16(static_cast<float>(r.normal())));
    return x;
  }
  void set(const Buffer& to, const std::vector<float>& x) {
    std::vector<float16> bits(x.size());
    for (size_t i = 0; i < x.size(); ++i) bits[i] = float16(x[i]);
    gpu->upload(to->raw(), bits.data(), bits.size() * 2);
  }
  std::vector<float> get(const Buffer& from) {
    std::vector<float16> bits(static_cast<size_t>(from->numel()));
    gpu->synchronize();
    gpu->download(bits.data(), from->raw(), bits.size() * 2);
    std::vector<float> x(bits.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(bits[i]);
    return x;
  }
  AttentionArgs args(float p_drop) {
    AttentionArgs a;
    a.q = q, a.k = k, a.v = v, a.q_offsets = a.k_offsets = offsets;
    a.scale = kScale, a.max_q = a.max_k = 64;
    a.dropout = context.dropout(p_drop, dropout_site("cudnn_test"));
    return a;
  }
  std::vector<float> forward(float p_drop) {
    attention_forward(context, args(p_drop), out, lse);
    return get(out);
  }
  void backward(float p_drop) { attention_backward(context, args(p_drop), out, lse, dout, dq, dk, dv); }
  void both() {
    attention_forward(context, args(kDrop), out, lse);
    backward(kDrop);
  }
};

// Calls f(sequence's first token, its length, head).
template <typename F>
void each_head(F&& f) {
  for (size_t s = 0; s + 1 < kOffsets.size(); ++s)
    for (int64_t h = 0; h < kHeads; ++h) f(kOffsets[s], kOffsets[s + 1] - kOffsets[s], h);
}
int64_t at(int64_t token, int64_t head, int64_t i = 0) {
  return (token * kHeads + head) * kWidth + i;
}

// Values that are rows of the identity give the probabilities themselves, and with dropout its mask; which then tells
// what the gradients must be.
TEST(AttentionCudnn, DropoutKeepsItsShareAndBackwardHasTheSameMask) {
  Rig rig;
  rig.context.set_random(5, 6, 7);
  std::vector<float> identity(kTokens * kHeads * kWidth);
  each_head([&](int64_t first, int64_t length, int64_t h) {
    for (int64_t j = 0; j < length; ++j) identity[at(first + j, h, j)] = 1;
  });
  rig.set(rig.v, identity);
  const std::vector<float> p = rig.forward(0), dropped = rig.forward(kDrop);
  EXPECT_EQ(rig.forward(kDrop), dropped);  // the same again
  std::vector<float> mask(p.size());       // of [query token, head, key]
  int64_t kept = 0, all = 0;
  each_head([&](int64_t first, int64_t length, int64_t h) {
    for (int64_t i = 0; i < length; ++i)
      for (int64_t j = 0; j < length; ++j) {
        const float before = p[at(first + i, h, j)], after = dropped[at(first + i, h, j)];
        if (before < 1e-4f) continue;  // too coarse in f16: taken for dropped, and small in every sum
        ++all;
        if (after == 0) continue;
        ++kept;
        mask[at(first + i, h, j)] = 1 / (1 - kDrop);
        ASSERT_NEAR(after / before, 1 / (1 - kDrop), 0.02) << first + i << " " << h << " " << j;
      }
  });
  const double deviation = std::sqrt(kDrop * (1 - kDrop) / static_cast<double>(all));
  EXPECT_NEAR(static_cast<double>(kept) / static_cast<double>(all), 1 - kDrop, 5 * deviation);

  const std::vector<float> q = Rig::random(1), k = Rig::random(2), v = Rig::random(3), dout = Rig::random(4);
  rig.set(rig.v, v);
  const std::vector<float> out = rig.forward(kDrop);
  rig.backward(kDrop);
  const std::vector<float> dq = rig.get(rig.dq), dk = rig.get(rig.dk), dv = rig.get(rig.dv);
  std::vector<double> expected_out(p.size()), expected_dq(p.size()), expected_dk(p.size()), expected_dv(p.size());
  each_head([&](int64_t first, int64_t length, int64_t h) {
    for (int64_t i = 0; i < length; ++i) {
      std::vector<double> w(static_cast<size_t>(length)), g(w);
      double sum = 0, mean = 0;
      for (int64_t j = 0; j < length; ++j) {
        double score = 0;
        for (int64_t x = 0; x < kWidth; ++x)
          score += static_cast<double>(q[at(first + i, h, x)]) * k[at(first + j, h, x)];
        sum += w[j] = std::exp(kScale * score);
      }
      for (int64_t j = 0; j < length; ++j) {
        w[j] /= sum;
        double product = 0;
        for (int64_t x = 0; x < kWidth; ++x)
          product += static_cast<double>(dout[at(first + i, h, x)]) * v[at(first + j, h, x)];
        g[j] = product * mask[at(first + i, h, j)];
        mean += w[j] * g[j];
      }
      for (int64_t j = 0; j < length; ++j) {
        const double weight = w[j] * mask[at(first + i, h, j)], ds = kScale * w[j] * (g[j] - mean);
        for (int64_t x = 0; x < kWidth; ++x) {
          expected_out[at(first + i, h, x)] += weight * v[at(first + j, h, x)];
          expected_dv[at(first + j, h, x)] += weight * dout[at(first + i, h, x)];
          expected_dq[at(first + i, h, x)] += ds * k[at(first + j, h, x)];
          expected_dk[at(first + j, h, x)] += ds * q[at(first + i, h, x)];
        }
      }
    }
  });
  const auto close = [](const std::vector<float>& found, const std::vector<double>& expected, const char* name) {
    for (size_t i = 0; i < found.size(); ++i)
      ASSERT_NEAR(found[i], expected[i], 0.02 + 0.02 * std::fabs(expected[i])) << name << " " << i;
  };
  close(out, expected_out, "out"), close(dq, expected_dq, "dq"), close(dk, expected_dk, "dk"),
      close(dv, expected_dv, "dv");
}

TEST(AttentionCudnn, StepSiteAndMicroBatchChangeTheMask) {
  Rig rig;
  rig.context.set_random(5, 6, 7);
  const std::vector<float> first = rig.forward(kDrop);
  rig.context.set_random(5, 7, 7);
  EXPECT_NE(rig.forward(kDrop), first);
  rig.context.set_random(5, 6, 8);
  EXPECT_NE(rig.forward(kDrop), first);
  rig.context.set_random(5, 6, 7);
  EXPECT_EQ(rig.forward(kDrop), first);
  AttentionArgs elsewhere = rig.args(kDrop);
  elsewhere.dropout = rig.context.dropout(kDrop, dropout_site("elsewhere"));
  attention_forward(rig.context, elsewhere, rig.out, rig.lse);
  EXPECT_NE(rig.get(rig.out), first);
}

// A recorded graph takes the next step's mask when it is recorded again, and stays the same graph.
TEST(AttentionCudnn, InARecordedGraph) {
  Rig rig;
  rig.context.set_random(1, 1);
  rig.memory.begin_recording();
  rig.both();
  const Plan plan = plan_memory(rig.memory.end_recording());
  rig.memory.reserve(plan.peak);
  const auto step = [&] {
    rig.memory.begin_replay(plan);
    rig.both();
    rig.memory.end_replay();
  };
  const auto results = [&] {
    std::vector<float> all = rig.get(rig.out);
    for (const Buffer* b : {&rig.dq, &rig.dk, &rig.dv}) {
      const std::vector<float> x = rig.get(*b);
      all.insert(all.end(), x.begin(), x.end());
    }
    return all;
  };
  step();
  const std::vector<float> one = results();
  rig.context.set_random(1, 2);
  step();
  const std::vector<float> two = results();
  EXPECT_NE(one, two);
  rig.context.set_random(1, 1);
  const std::unique_ptr<GpuGraph> graph = rig.gpu->record(step);
  graph->launch();
  EXPECT_EQ(results(), one);
  rig.context.set_random(1, 2);
  ASSERT_TRUE(rig.gpu->rerecord(*graph, step));
  graph->launch();
  EXPECT_EQ(results(), two);
}

}  // namespace
}  // namespace frit
