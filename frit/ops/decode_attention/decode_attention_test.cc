// A sentence's bits do not depend on the batch; what the CPU throws for.
#include "frit/ops/decode_attention/decode_attention.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace frit {
namespace {

struct GpuBench {
  std::unique_ptr<Gpu> gpu = make_gpu();
  ThreadPool pool{1};
  Memory memory{gpu.get()};
  Context context{pool, memory, gpu.get()};
  std::vector<void*> made;

  ~GpuBench() {
    for (void* p : made) gpu->died(p), gpu->release(p);
  }
  template <typename T>
  Tensor tensor(const std::vector<T>& x, DType dtype, Shape shape) {
    void* p = gpu->allocate(x.size() * sizeof(T));
    made.push_back(p);
    gpu->born(p, x.size() * sizeof(T), dtype);
    gpu->upload(p, x.data(), x.size() * sizeof(T));
    return Tensor(p, dtype, shape, gpu->device());
  }
  Tensor ints(const std::vector<int32_t>& x) { return tensor(x, DType::kI32, {static_cast<int64_t>(x.size())}); }
  std::vector<uint16_t> bits(const Tensor& t) {
    std::vector<uint16_t> x(static_cast<size_t>(t.numel()));
    gpu->download(x.data(), t.raw(), x.size() * 2);
    return x;
  }
};

// Number i of a stream, as bf16 bits.
uint16_t number(uint64_t stream, int64_t i) {
  uint64_t state = (stream << 32) + static_cast<uint64_t>(i);
  state = (state ^ state >> 29) * 0xbf58476d1ce4e5b9ull;
  state = (state ^ state >> 32) * 0x94d049bb133111ebull;
  return bfloat16(static_cast<float>(static_cast<int64_t>(state >> 55) - 256) / 128.0f).bits;
}
std::vector<uint16_t> numbers(uint64_t stream, int64_t count) {
  std::vector<uint16_t> x(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) x[i] = number(stream, i);
  return x;
}

constexpr int64_t kWidth = 3, kHeads = 2, kH = 128;

// One sentence's step, as `sentence` of `sentences` whose others are filled otherwise; `place` among the live ones.
struct Setting {
  int64_t sentences, sentence, live, place, padding;
};
constexpr Setting kSettings[] = {{1, 0, 1, 0, 0}, {5, 3, 4, 0, 2}, {5, 0, 2, 1, 1}, {4, 3, 4, 3, 0}};

std::vector<int32_t> live_sentences(const Setting& s) {
  std::vector<int32_t> live;
  for (int64_t i = 0; static_cast<int64_t>(live.size()) < s.sentences; ++i)
    if (static_cast<int64_t>(live.size()) == s.place)
      live.push_back(static_cast<int32_t>(s.sentence)), --i;
    else if (i != s.sentence)
      live.push_back(static_cast<int32_t>(i));
  return live;
}
std::vector<uint16_t> with_rows_of(const Setting& s, std::vector<uint16_t> x, uint64_t stream, int64_t columns) {
  const std::vector<uint16_t> mine = numbers(stream, kWidth * columns);
  std::copy(mine.begin(), mine.end(), x.begin() + s.place * kWidth * columns);
  return x;
}

TEST(DecodeAttention, ASentenceHasTheSameBitsInEveryBatch) {
  GpuBench b;
  std::vector<uint16_t> self_by_blocks;
  constexpr int64_t positions = 72, source = 45;
  for (const auto& [position, instance] :
       {std::pair(40, "vectors"), {40, "warps"}, {70, "vectors"}, {70, "warps"}, {70, "any"}}) {
    b.context.force("decode_attention_forward", instance);
    std::vector<uint16_t> first_self, first_cross;
    // The rows' number decides between these two in self attention.
    if (instance == std::string("warps")) first_self = self_by_blocks;
    for (const Setting& s : kSettings) {
      const int64_t slots = s.sentences * kWidth, rows = s.live * kWidth + s.padding;
      const DecodeRows table{b.ints({static_cast<int32_t>(s.live)}), b.ints(live_sentences(s)), kWidth};
      const auto mine = [&](const Tensor& out) { return b.bits(out.rows(s.place * kWidth, (s.place + 1) * kWidth)); };
      const Tensor out = b.tensor(numbers(9, rows * kH), DType::kBF16, {rows, kH});

      std::vector<uint16_t> cache = numbers(100 + static_cast<uint64_t>(s.sentences), positions * slots * 2 * kH);
      std::vector<int32_t> origin(static_cast<size_t>(2 * slots * positions), 0);
      for (int64_t p = 0; p < positions; ++p)
        for (int64_t beam = 0; beam < kWidth; ++beam) {
          const int64_t slot = s.sentence * kWidth + beam;
          origin[slot * positions + p] = static_cast<int32_t>(s.sentence * kWidth + (beam + p) % kWidth);
          for (int64_t i = 0; i < 2 * kH; ++i)
            cache[(p * slots + slot) * 2 * kH + i] = number(7, (p * kWidth + beam) * 2 * kH + i);
        }
      decode_self_attention(
          b.context,
          {.qkv = b.tensor(with_rows_of(s, numbers(1, rows * 3 * kH), 2, 3 * kH), DType::kBF16, {rows, 3 * kH}),
           .cache = b.tensor(cache, DType::kBF16, {positions, slots, 2, kH}),
           .origin = b.tensor(origin, DType::kI32, {2, slots, positions}),
           .position = b.ints({position}),
           .rows = table,
           .heads = kHeads,
           .scale = 0.125f},
          out);
      if (first_self.empty()) first_self = mine(out);
      EXPECT_EQ(mine(out), first_self) << instance << ", " << s.sentences << " sentences";
      if (instance == std::string("vectors")) self_by_blocks = first_self;

      std::vector<int32_t> offsets = {0};
      for (int64_t i = 0; i < s.sentences; ++i)
        offsets.push_back(offsets.back() + static_cast<int32_t>(i == s.sentence ? source : 3 + 5 * i));
      const int64_t tokens = offsets.back();
      std::vector<uint16_t> keys_values = numbers(200, tokens * 2 * kH);
      for (int64_t i = 0; i < source * 2 * kH; ++i) keys_values[offsets[s.sentence] * 2 * kH + i] = number(8, i);
      const Tensor kv = b.tensor(keys_values, DType::kBF16, {tokens, 2 * kH});
      decode_cross_attention(b.context,
                             {.q = b.tensor(with_rows_of(s, numbers(3, rows * kH), 4, kH), DType::kBF16, {rows, kH}),
                              .keys = kv.columns(0, kH),
                              .values = kv.columns(kH, 2 * kH),
                              .source_offsets = b.ints(offsets),
                              .rows = table,
                              .heads = kHeads,
                              .scale = 0.125f},
                             out);
      if (first_cross.empty()) first_cross = mine(out);
      EXPECT_EQ(mine(out), first_cross) << instance << ", " << s.sentences << " sentences";
    }
  }
}

TEST(DecodeAttention, TheCpuChecksDeviceData) {
  ThreadPool pool{1};
  Memory memory;
  Context context{pool, memory};
  std::vector<float> v(64);
  int32_t one[1] = {1}, sentence[1] = {0}, position[1] = {1}, origin[4] = {0, 0, 0, 0}, offsets[2] = {0, 2};
  const auto f32 = [&](Shape shape) { return Tensor(v.data(), DType::kF32, shape); };
  const auto i32 = [](int32_t* p, Shape shape) { return Tensor(p, DType::kI32, shape); };
  const DecodeRows rows{i32(one, {1}), i32(sentence, {1}), 1};
  const DecodeSelfAttentionArgs self{.qkv = f32({1, 12}),
                                     .cache = f32({2, 1, 2, 4}),
                                     .origin = i32(origin, {2, 1, 2}),
                                     .position = i32(position, {1}),
                                     .rows = rows,
                                     .heads = 2};
  std::vector<float> out(4);
  const Tensor to(out.data(), DType::kF32, {1, 4});
  decode_self_attention(context, self, to);
  origin[2] = 1;  // side 1, place 0: there is one slot
  EXPECT_THROW(decode_self_attention(context, self, to), std::invalid_argument);
  origin[2] = 0, position[0] = 2;
  EXPECT_THROW(decode_self_attention(context, self, to), std::invalid_argument);

  const DecodeCrossAttentionArgs cross{.q = f32({1, 4}),
                                       .keys = f32({2, 4}),
                                       .values = f32({2, 4}),
                                       .source_offsets = i32(offsets, {2}),
                                       .rows = rows,
                                       .heads = 2};
  decode_cross_attention(context, cross, to);
  offsets[1] = 3;
  EXPECT_THROW(decode_cross_attention(context, cross, to), std::invalid_argument);
  EXPECT_THROW(decode_cross_attention(context, cross, Tensor(out.data(), DType::kF32, {2, 2})), std::invalid_argument);
}

}  // namespace
}  // namespace frit
