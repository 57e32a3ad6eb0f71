// What the case table cannot say of attention: independence of the neighbours, errors, NaN, every SIMD target.
#include "frit/ops/attention/attention.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "frit/ops/attention/gpu.h"
#include "frit/ops/case.h"

namespace frit {
namespace {

// A batch of sequences with random joined q, k, v; the same sequence (by seed) has the same values in every batch.
struct Packed {
  int64_t n, d;
  std::vector<int32_t> offsets{0};
  std::vector<float> qkv, out, lse, dout, dqkv;

  Packed(int64_t n, int64_t d, const std::vector<std::pair<int, int64_t>>& seeds_and_lengths) : n(n), d(d) {
    for (auto [seed, length] : seeds_and_lengths) {
      CaseRandom random{static_cast<uint64_t>(seed)};
      for (int64_t i = 0; i < length * 3 * n * d; ++i) qkv.push_back(static_cast<float>(random.normal()));
      for (int64_t i = 0; i < length * n * d; ++i) dout.push_back(static_cast<float>(random.normal()));
      offsets.push_back(offsets.back() + static_cast<int32_t>(length));
    }
    out.resize(dout.size()), dqkv.resize(qkv.size()), lse.resize(tokens() * n);
  }
  int64_t tokens() const { return offsets.back(); }
  Tensor part(std::vector<float>& v, int64_t i) {
    return Tensor(v.data(), DType::kF32, {tokens(), 3 * n * d})
        .columns(i * n * d, (i + 1) * n * d)
        .split_columns({n, d});
  }
  AttentionArgs args(bool causal) {
    const Tensor o(offsets.data(), DType::kI32, {static_cast<int64_t>(offsets.size())});
    AttentionArgs a;
    a.q = part(qkv, 0), a.k = part(qkv, 1), a.v = part(qkv, 2), a.q_offsets = o, a.k_offsets = o;
    a.causal = causal, a.scale = 1 / std::sqrt(static_cast<float>(d));
    return a;
  }
  Tensor out_tensor() { return {out.data(), DType::kF32, {tokens(), n, d}}; }
  Tensor lse_tensor() { return {lse.data(), DType::kF32, {tokens(), n}}; }
  void run(Context& context, bool causal) {
    attention_forward(context, args(causal), out_tensor(), lse_tensor());
    attention_backward(context, args(causal), out_tensor(), lse_tensor(),
                       Tensor(dout.data(), DType::kF32, {tokens(), n, d}), part(dqkv, 0), part(dqkv, 1), part(dqkv, 2));
  }
};

TEST(Attention, SameBitsWhateverIsPackedWithASentence) {
  ThreadPool pool(2);
  Memory memory;
  for (const char* variant : {"flash", "materialised"})
    for (bool causal : {false, true})
      for (int64_t length : {1, 33, 130}) {
        Context context(pool, memory);
        context.force("attention", variant);
        Packed alone(3, 24, {{7, length}});
        alone.run(context, causal);
        for (int64_t before : {70})
          for (int copies : {1, 32}) {  // 40: another cut into tasks
            std::vector<std::pair<int, int64_t>> batch{{1, before}};
            batch.insert(batch.end(), copies, {7, length});
            batch.push_back({2, 9});
            Packed together(3, 24, batch);
            together.run(context, causal);
            const auto same = [&](const std::vector<float>& a, const std::vector<float>& b, int64_t width) {
              for (int c = 0; c < copies; ++c)
                if (std::memcmp(a.data(), b.data() + (before + c * length) * width, length * width * 4) != 0)
                  return false;
              return true;
            };
            EXPECT_TRUE(same(alone.out, together.out, 3 * 24)) << variant << causal << length;
            EXPECT_TRUE(same(alone.lse, together.lse, 3)) << variant << causal << length;
            EXPECT_TRUE(same(alone.dqkv, together.dqkv, 3 * 3 * 24)) << variant << causal << length;
          }
      }
}

TEST(Attention, ANaNStaysInItsSentenceAndIsNotHidden) {
  ThreadPool pool(1);
  Memory memory;
  for (const char* variant : {"flash", "materialised"}) {
    Context context(pool, memory);
    context.force("attention", variant);
    Packed p(1, 8, {{1, 4}, {2, 4}});
    p.qkv[3 * 8 * 1 + 8] = std::numeric_limits<float>::quiet_NaN();  // k of token 1
    p.run(context, false);
    for (int64_t t = 0; t < 4; ++t) {
      EXPECT_TRUE(std::isnan(p.out[t * 8])) << variant;
      EXPECT_TRUE(std::isnan(p.lse[t])) << variant;
      EXPECT_TRUE(std::isnan(p.dqkv[t * 24])) << variant;
    }
    for (int64_t i = 4 * 24; i < 8 * 24; ++i) EXPECT_TRUE(std::isfinite(p.dqkv[i])) << variant;
    for (int64_t i = 4 * 8; i < 8 * 8; ++i) EXPECT_TRUE(std::isfinite(p.out[i])) << variant;
  }
}

TEST(Attention, LargeScoresDoNotOverflow) {
  ThreadPool pool(1);
  Memory memory;
  for (const char* variant : {"flash", "materialised"}) {
    Context context(pool, memory);
    context.force("attention", variant);
    Packed p(1, 8, {{1, 100}});
    for (float& x : p.qkv) x *= 300;
    p.run(context, true);
    for (float x : p.out) EXPECT_TRUE(std::isfinite(x));
    for (float x : p.lse) EXPECT_TRUE(std::isfinite(x));
    for (float x : p.dqkv) EXPECT_TRUE(std::isfinite(x));
  }
}

TEST(Attention, RefusesWhatDoesNotFit) {
  ThreadPool pool(1);
  Memory memory;
  Context context(pool, memory);
  Packed p(2, 4, {{1, 3}, {2, 2}});
  const auto refuses = [&](auto&& change) {
    AttentionArgs a = p.args(false);
    Tensor out = p.out_tensor(), lse = p.lse_tensor();
    change(a, out, lse);
    EXPECT_THROW(attention_forward(context, a, out, lse), std::invalid_argument);
  };
  refuses([](AttentionArgs&, Tensor& out, Tensor&) { out = out.rows(0, 4); });
  refuses([](AttentionArgs&, Tensor&, Tensor& lse) { lse = lse.reshape({2, 5}); });
  refuses([](AttentionArgs& a, Tensor&, Tensor&) { a.k = a.k.rows(0, 4); });
  refuses([](AttentionArgs& a, Tensor&, Tensor&) { a.q_offsets = a.q_offsets.rows(0, 2); });
  refuses([](AttentionArgs& a, Tensor&, Tensor&) { a.q = Tensor(a.q.raw(), DType::kI32, {5, 2, 4}); });
  std::vector<int32_t> falling{0, 6, 5};
  refuses([&](AttentionArgs& a, Tensor&, Tensor&) { a.k_offsets = Tensor(falling.data(), DType::kI32, {3}); });
  context.force("attention", "flsh");
  refuses([](AttentionArgs&, Tensor&, Tensor&) {});
}

// What implementations refuse on a GPU (or in the simulator), and say. Nothing runs: the context plans.
struct OnGpu {
  std::unique_ptr<Gpu> gpu = make_gpu();
  ThreadPool pool{1};
  Memory memory{gpu.get()};
  Context context{pool, memory, gpu.get()};
  std::vector<std::string> notices;
  OnGpu() {
    context.on_notice = [this](std::string_view text) { notices.emplace_back(text); };
  }

  // The message of attention_forward for sequences of `length` in `tokens` tokens; "" if it accepts.
  std::string forward(int64_t tokens, int64_t d, int64_t length, DType dtype = DType::kBF16) {
    const auto tensor = [&](DType type, Shape shape) { return Tensor(nullptr, type, shape, gpu->device()); };
    AttentionArgs a;
    a.q = a.k = a.v = tensor(dtype, {tokens, 2, d});
    a.q_offsets = a.k_offsets = tensor(DType::kI32, {5});
    a.max_q = a.max_k = length;
    std::string message;
    memory.begin_recording();
    try {
      attention_forward(context, a, tensor(dtype, {tokens, 2, d}), tensor(DType::kF32, {tokens, 2}));
    } catch (const std::invalid_argument& error) {
      message = error.what();
    }
    memory.end_recording();
    return message;
  }
};

TEST(AttentionGpu, ShortIsTheDefaultAndSaysWhatItRefuses) {
  OnGpu on;
  on.context.force("attention", "short");
  EXPECT_EQ(on.forward(1000, 64, 256), "");
  EXPECT_EQ(on.context.used("attention"), "short");
  EXPECT_EQ(on.forward(1000, 32, 1, DType::kF16), "");
  EXPECT_EQ(on.forward(200, 128, 0), "");  // no sequence is longer than all tokens
  EXPECT_NE(on.forward(1000, 64, 300).find("short: 300 queries, at most 256"), std::string::npos);
  EXPECT_NE(on.forward(1000, 64, 0).find("short: 1000 queries (the number of tokens"), std::string::npos);
  EXPECT_NE(on.forward(10, 40, 5).find("short: head width 40, expected 32, 64 or 128"), std::string::npos);
  EXPECT_NE(on.forward(10, 64, -1).find("max_q is -1"), std::string::npos);
  on.context.force("attention", "");
  EXPECT_EQ(on.forward(1000, 64, 256), "");
  EXPECT_EQ(on.context.used("attention"), "short");
  EXPECT_TRUE(on.notices.empty());
}

TEST(AttentionGpu, WhatShortRefusesGoesToTheNextWithOneNoticeAReason) {
  OnGpu on;
  EXPECT_EQ(on.forward(1000, 64, 300), "");
  EXPECT_NE(on.context.used("attention"), "short");
  ASSERT_EQ(on.notices.size(), 1u);
  EXPECT_NE(on.notices[0].find(" runs, since short: 300 queries, at most 256"), std::string::npos) << on.notices[0];
  EXPECT_EQ(on.forward(1000, 64, 301), "");  // the same reason
  EXPECT_EQ(on.forward(2000, 64, 300), "");
  EXPECT_EQ(on.notices.size(), 1u);
  EXPECT_EQ(on.forward(100, 7, 30), "");  // no library takes this width
  EXPECT_EQ(on.context.used("attention"), "materialised");
  ASSERT_EQ(on.notices.size(), 2u);
  EXPECT_NE(on.notices[1].find("materialised runs, since short: head width 7"), std::string::npos) << on.notices[1];
}

TEST(AttentionGpu, CandidatesInTheirOrderWithWhatTheyRefuse) {
  OnGpu on;
  AttentionArgs args;
  args.q = args.k = args.v = Tensor(nullptr, DType::kF32, {1000, 2, 64}, on.gpu->device());
  args.q_offsets = args.k_offsets = Tensor(nullptr, DType::kI32, {4}, on.gpu->device());
  args.max_q = args.max_k = 400;
  const std::vector<AttentionCandidate> found = attention_candidates(on.context, args);
  ASSERT_EQ(found.size(), 3u);
  EXPECT_STREQ(found[0].name, "short");
  EXPECT_EQ(found[0].refusal, "short: 400 queries, at most 256");
  EXPECT_STREQ(found[1].name, "cudnn");
  EXPECT_EQ(found[1].refusal, "cudnn: f32, expected bf16 or f16");
  EXPECT_STREQ(found[2].name, "materialised");
  EXPECT_EQ(found[2].refusal, "");
}

// Pairs of sequence and head go chunk by chunk; where the cuts lie makes no difference.
TEST(AttentionGpu, MaterialisedInChunks) {
  OnGpu on;
  const Packed p(2, 5, {{1, 5}, {2, 40}, {3, 17}});
  const int64_t tokens = p.tokens();
  const auto buffer = [&](DType dtype, Shape shape, const void* values) {
    Buffer b = on.context.allocate(shape, dtype, "test");
    on.gpu->upload(b->raw(), values, static_cast<size_t>(b->bytes()));
    return b;
  };
  const Buffer qkv = buffer(DType::kF32, {tokens, 30}, p.qkv.data()),
               dout = buffer(DType::kF32, {tokens, 2, 5}, p.dout.data()),
               offsets = buffer(DType::kI32, {4}, p.offsets.data());
  const auto part = [](const Buffer& b, int64_t i) { return b->columns(i * 10, (i + 1) * 10).split_columns({2, 5}); };
  AttentionArgs args;
  args.q = part(qkv, 0), args.k = part(qkv, 1), args.v = part(qkv, 2);
  args.q_offsets = args.k_offsets = offsets;
  args.causal = true, args.max_q = args.max_k = 40;
  args.dropout = on.context.dropout(0.2f, 7);
  const auto run = [&](int64_t most_scores) {
    const Buffer out = on.context.allocate({tokens, 2, 5}, DType::kF32, "out"),
                 lse = on.context.allocate({tokens, 2}, DType::kF32, "lse"),
                 dqkv = on.context.allocate({tokens, 30}, DType::kF32, "dqkv");
    attention_materialised_forward_gpu(on.context, args, out, lse, most_scores);
    attention_materialised_backward_gpu(on.context, args, lse, dout, part(dqkv, 0), part(dqkv, 1), part(dqkv, 2),
                                        most_scores);
    on.gpu->synchronize();
    std::vector<float> values(static_cast<size_t>(tokens * 42));
    on.gpu->download(values.data(), out->raw(), static_cast<size_t>(out->bytes()));
    on.gpu->download(values.data() + tokens * 10, lse->raw(), static_cast<size_t>(lse->bytes()));
    on.gpu->download(values.data() + tokens * 12, dqkv->raw(), static_cast<size_t>(dqkv->bytes()));
    return values;
  };
  const std::vector<float> whole = run(kMaterialisedScores);
  for (const auto& [most_scores, chunks] : {std::pair<int64_t, int64_t>{1, 6}, {2 * 48 * 48, 3}, {4 * 48 * 48, 2}}) {
    const int64_t before = on.gpu->launches();
    const std::vector<float> cut = run(most_scores);
    EXPECT_GE(on.gpu->launches() - before, 13 * chunks + 2);
    for (size_t i = 0; i < whole.size(); ++i) ASSERT_NEAR(cut[i], whole[i], 1e-4) << most_scores << " " << i;
  }
}

// What a library is told of the sequences: those past the last are empty.
TEST(AttentionGpu, TablesOfBeginsAndLengths) {
  OnGpu on;
  const auto buffer = [&](DType dtype, Shape shape) { return on.context.allocate(shape, dtype, "test"); };
  const std::vector<int32_t> q_offsets = {0, 3, 3, 10}, k_offsets = {0, 300, 304, 305};
  const Buffer qs = buffer(DType::kI32, {4}), ks = buffer(DType::kI32, {4}), lengths = buffer(DType::kI32, {10}),
               begins = buffer(DType::kI64, {3 * 6 + 2});
  on.gpu->upload(qs->raw(), q_offsets.data(), 16);
  on.gpu->upload(ks->raw(), k_offsets.data(), 16);
  AttentionArgs args;
  args.q = Tensor(nullptr, DType::kBF16, {12, 2, 8}, on.gpu->device());
  args.k = args.v = Tensor(nullptr, DType::kBF16, {310, 2, 8}, on.gpu->device());
  args.q_offsets = qs, args.k_offsets = ks;
  args.max_q = 7, args.max_k = 256;
  AttentionTables tables;
  tables.sequences = 5, tables.count = 3, tables.keys = 0b010;
  tables.strides[0] = 16, tables.strides[1] = 48, tables.strides[2] = 2;
  attention_tables_gpu(on.context, args, tables, 77, lengths, begins);
  on.gpu->synchronize();
  std::vector<int32_t> found_lengths(10);
  std::vector<int64_t> found_begins(20);
  on.gpu->download(found_lengths.data(), lengths->raw(), 40);
  on.gpu->download(found_begins.data(), begins->raw(), 160);
  EXPECT_EQ(found_lengths, (std::vector<int32_t>{3, 0, 7, 0, 0, 256, 4, 1, 0, 0}));              // at most max_k
  EXPECT_EQ(found_begins, (std::vector<int64_t>{0, 48,    48,    160,   160,   160,              // 16 a query
                                                0, 14400, 14592, 14640, 14640, 14640,            // 48 a key
                                                0, 6,     6,     20,    20,    20,    77, 0}));  // 2 a query; seed
}

TEST(AttentionGpu, AForcedNameIsOfThisDeviceOrThrows) {
  OnGpu on;
  on.context.force("attention", "short");
  EXPECT_EQ(on.forward(100, 64, 30), "");
  const std::string refusal = on.forward(1000, 64, 257);
  EXPECT_NE(refusal.find("short: 257 queries"), std::string::npos);
  EXPECT_EQ(refusal.find("materialised"), std::string::npos);
  on.context.force("attention", "materialised");
  EXPECT_EQ(on.forward(100, 64, 30), "");
  EXPECT_EQ(on.context.used("attention"), "materialised");
  on.context.force("attention", "cudnn");
  EXPECT_NE(on.forward(100, 64, 30, DType::kF32).find("cudnn: f32, expected bf16 or f16"), std::string::npos);
  EXPECT_NE(on.forward(100, 60, 30).find("cudnn: head width 60"), std::string::npos);
  if (!built_with_cudnn()) {
    EXPECT_NE(on.forward(100, 64, 30).find("no cuDNN"), std::string::npos);
  }
  on.context.force("attention", "flash");
  EXPECT_NE(on.forward(100, 64, 30).find("no implementation \"flash\", expected one of short, "), std::string::npos);
}

TEST(Attention, ShortNeedsAGpuAndSoDoesF16) {
  ThreadPool pool(1);
  Memory memory;
  Context context(pool, memory);
  Packed p(2, 4, {{1, 3}, {2, 2}});
  context.force("attention", "short");
  EXPECT_THROW(attention_forward(context, p.args(false), p.out_tensor(), p.lse_tensor()), std::invalid_argument);
  context.force("attention", "");
  const auto half = [](const Tensor& t) { return Tensor(t.raw(), DType::kF16, t.shape()); };
  AttentionArgs a = p.args(false);
  a.q = half(a.q), a.k = half(a.k), a.v = half(a.v);
  EXPECT_THROW(attention_forward(context, a, half(p.out_tensor()), p.lse_tensor()), std::invalid_argument);
}

// Offsets that lie: nothing outside of the tensors and of what the bounds promise is touched (the simulator would fault
// on it), and what is written is finite.
TEST(AttentionGpu, WrongOffsetsTouchNoForeignMemory) {
  OnGpu on;
  constexpr int64_t kTokens = 40, kWidth = 32;
  const auto buffer = [&](DType dtype, Shape shape) {
    Buffer b = on.context.allocate(shape, dtype, "test");
    const std::vector<char> zeros(b->bytes());
    on.gpu->upload(b->raw(), zeros.data(), zeros.size());
    return b;
  };
  for (const auto& [dtype, variant] :
       {std::pair{DType::kF32, "short"}, {DType::kBF16, "short"}, {DType::kF32, "materialised"}}) {
    on.context.force("attention", variant);
    Buffer q = buffer(dtype, {kTokens, 1, kWidth}), out = buffer(dtype, {kTokens, 1, kWidth}),
           dq = buffer(dtype, {kTokens, 1, kWidth}), dk = buffer(dtype, {kTokens, 1, kWidth}),
           dv = buffer(dtype, {kTokens, 1, kWidth}), lse = buffer(DType::kF32, {kTokens, 1}),
           offsets = buffer(DType::kI32, {5});
    AttentionArgs a;
    a.q = a.k = a.v = q;
    a.q_offsets = a.k_offsets = offsets;
    a.max_q = a.max_k = 16;
    for (const std::vector<int32_t>& wrong :
         {std::vector<int32_t>{0, 100, 200, 300, 400}, {-5, 3, 3, 50, 60}, {0, 40, 39, 39, 38}, {39, 40, 41, -1, 40}}) {
      on.gpu->upload(offsets->raw(), wrong.data(), wrong.size() * 4);
      attention_forward(on.context, a, out, lse);
      attention_backward(on.context, a, out, lse, q, dq, dk, dv);
      on.gpu->synchronize();
      std::vector<char> bytes(out->bytes());
      on.gpu->download(bytes.data(), out->raw(), bytes.size());
      for (char byte : bytes) ASSERT_EQ(byte, 0);  // averages of zeros
    }
  }
}

// The case table runs on the widest target of this machine; the narrower ones have other tails.
TEST(Attention, EverySimdTargetPasses) {
  const int64_t supported = hwy::SupportedTargets();
  int targets = 0;
  for (int64_t rest = supported; rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    if (target == HWY_SCALAR || target == HWY_EMU128) continue;
    hwy::SetSupportedTargetsForTest(target);
    for (const OpTable& table : op_tables()) {
      if (table.op != "attention" && table.op != "softmax" && table.op != "heads") continue;
      for (size_t i = 0; i < table.cases.size(); i += 5)
        if (table.cases[i].test && table.cases[i].where != Where::kGpu && table.cases[i].inputs[0].row_stride < 1000)
          for (const std::string& failure : check_case(table.cases[i]))
            ADD_FAILURE() << hwy::TargetName(target) << " " << table.op << " " << table.cases[i].name << ": "
                          << failure;
    }
    ++targets;
  }
  hwy::SetSupportedTargetsForTest(0);
  EXPECT_GE(targets, 1);
}

}  // namespace
}  // namespace frit
