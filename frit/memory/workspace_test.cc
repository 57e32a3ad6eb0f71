#include "frit/memory/workspace.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "frit/core/nearest.h"
#include "frit/memory/memory.h"

namespace frit {
namespace {

ParameterLayout small_layout() {
  ParameterLayout layout;
  layout.add("norm.gamma", {33});
  layout.add("embedding", {7, 5});
  layout.add_group("qkv.weight", {{"q.weight", {3, 5}}, {"k.weight", {3, 5}}, {"v.weight", {2, 5}}});
  layout.add_group("qkv.bias", {{"q.bias", {3}}, {"k.bias", {3}}, {"v.bias", {2}}});
  layout.add("out.weight", {65, 4});
  layout.finish();
  return layout;
}

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

TEST(ParameterLayout, MatricesFirstAlignedAndGroupsWithoutGaps) {
  const ParameterLayout layout = small_layout();
  EXPECT_EQ(layout.slices().size(), 9u);
  EXPECT_EQ(layout.parameters(), 33 + 35 + 40 + 8 + 260);
  int64_t end = 0;
  for (const auto& s : layout.slices()) {  // block order, no overlap, matrices before decay_end
    EXPECT_GE(s.offset, end) << s.name;
    end = s.offset + s.shape.numel();
    EXPECT_LE(end, layout.elements());
    EXPECT_EQ(s.shape.rank() >= 2, end <= layout.decay_end()) << s.name;
    EXPECT_EQ(s.shape.rank() < 2, s.offset >= layout.decay_end()) << s.name;
  }
  for (const char* name : {"norm.gamma", "embedding", "q.weight", "q.bias", "out.weight"})
    EXPECT_EQ(layout.slice(name).offset * sizeof(float) % kAlignment, 0u) << name;
  EXPECT_EQ(layout.decay_end() % 64, 0);
  EXPECT_EQ(layout.slice("k.weight").offset, layout.slice("q.weight").offset + 15);
  EXPECT_EQ(layout.slice("v.bias").offset, layout.slice("q.bias").offset + 6);
  EXPECT_EQ(layout.group("qkv.weight").shape, (Shape{8, 5}));
  EXPECT_EQ(layout.group("qkv.bias").shape, (Shape{8}));
  EXPECT_EQ(layout.group("qkv.bias").offset, layout.slice("q.bias").offset);
  EXPECT_TRUE(layout.has("k.bias"));
  EXPECT_FALSE(layout.has("qkv.bias"));
}

TEST(ParameterLayout, ErrorsNameTheNearest) {
  ParameterLayout layout = small_layout();
  EXPECT_EQ(message_of([&] { layout.slice("q.wieght"); }),
            "[workspace] no parameter q.wieght; the nearest name is q.weight");
  EXPECT_EQ(message_of([&] { layout.group("qkv.weigth"); }),
            "[workspace] no group qkv.weigth; the nearest name is qkv.weight");
  EXPECT_THROW(layout.add("late", {1}), std::invalid_argument);
  ParameterLayout open;
  open.add("a", {2, 2});
  EXPECT_THROW(open.slice("a"), std::invalid_argument);  // no place before finish()
  EXPECT_THROW(open.add("a", {3}), std::invalid_argument);
  EXPECT_THROW(open.add("empty", {3, 0}), std::invalid_argument);
  EXPECT_THROW(open.add_group("g", {{"b", {1}}, {"b", {1}}}), std::invalid_argument);
  EXPECT_THROW(open.add_group("g", {{"b", {1, 2}}, {"c", {1, 3}}}), std::invalid_argument);
  EXPECT_THROW(open.add_group("g", {{"b", {1, 2}}, {"c", {2}}}), std::invalid_argument);
  EXPECT_FALSE(open.has("b"));  // a refused group leaves nothing behind
  open.finish();
  EXPECT_EQ(open.elements(), 64);
  EXPECT_EQ(message_of([&] { open.group("g"); }), "[workspace] no group g: there are none");
}

TEST(NearestName, EditDistance) {
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("same", "same"), 0u);
  EXPECT_EQ(nearest_name("b", std::vector<std::string>{}), "");
  EXPECT_EQ(nearest_name("learning_rte", std::vector<std::string>{"beam", "learning_rate", "warmup"}), "learning_rate");
}

TEST(Precision, Names) {
  for (Precision p : {Precision::kF32, Precision::kBF16Master, Precision::kBF16Stochastic, Precision::kBF16Residual,
                      Precision::kF16Master, Precision::kF16Stochastic})
    EXPECT_EQ(parse_precision(name_of(p)), p);
  const std::string message = message_of([] { parse_precision("fp16"); });
  for (const char* name :
       {"name fp16,", "fp32", "bf16-master", "bf16-stochastic", "bf16-residual", "fp16-master", "fp16-stochastic"})
    EXPECT_NE(message.find(name), std::string::npos) << message;
}

TEST(SplitFloat, JoinsToTheSameBitsAndRoundsToTheNearest) {
  std::mt19937 random(1);
  for (int i = 0; i < 2'000'000; ++i) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    const SplitFloat split = split_float(value);
    ASSERT_EQ(std::bit_cast<uint32_t>(join_float(split)), std::bit_cast<uint32_t>(value));
    if (!std::isfinite(value)) continue;
    // The high half is nearest: as near as the even rounding.
    const double half_up = std::bit_cast<float>(static_cast<uint32_t>(split.high) << 16);
    const double even = static_cast<float>(bfloat16(value));
    if (std::isfinite(half_up)) {
      ASSERT_EQ(std::abs(half_up - value), std::abs(even - value)) << value;
    }
  }
}

TEST(Workspace, SizesPerPrecision) {
  const ParameterLayout layout = small_layout();
  const int64_t n = layout.elements();
  const auto bytes = [&](Precision p, DType g, int moments = 2) {
    return Workspace(layout, p, true, moments, g).bytes();
  };
  EXPECT_EQ(bytes(Precision::kF32, DType::kF32), 16 * n);
  EXPECT_EQ(bytes(Precision::kBF16Stochastic, DType::kBF16), 12 * n);
  EXPECT_EQ(bytes(Precision::kBF16Residual, DType::kBF16), 14 * n);
  EXPECT_EQ(bytes(Precision::kBF16Master, DType::kBF16), 16 * n);
  EXPECT_EQ(bytes(Precision::kBF16Master, DType::kF32), 18 * n);
  EXPECT_EQ(bytes(Precision::kF16Master, DType::kF16), 16 * n);
  EXPECT_EQ(bytes(Precision::kF16Stochastic, DType::kF16), 12 * n);
  EXPECT_EQ(bytes(Precision::kF32, DType::kF32, 1), 12 * n);
  EXPECT_EQ(Workspace(layout, Precision::kBF16Master, false).bytes(), 2 * n);
  EXPECT_EQ(Workspace(layout, Precision::kF32, false).bytes(), 4 * n);
  EXPECT_THROW(Workspace(layout, Precision::kF32, true, 3), std::invalid_argument);
  EXPECT_THROW(Workspace(layout, Precision::kF32, true, 2, DType::kBF16), std::invalid_argument);
  EXPECT_THROW(Workspace(layout, Precision::kF32, false).gradient("embedding"), std::invalid_argument);
}

TEST(Workspace, SetAndGet) {
  for (Precision p : {Precision::kF32, Precision::kBF16Master, Precision::kBF16Stochastic, Precision::kBF16Residual}) {
    for (bool training : {true, false}) {
      Workspace workspace(small_layout(), p, training);
      std::vector<float> values(15), back(15);
      for (int i = 0; i < 15; ++i) values[i] = 1.0f / static_cast<float>(i + 3);
      workspace.set("k.weight", values.data(), 15);
      workspace.get("k.weight", back.data(), 15);
      const bool exact = p == Precision::kF32 || (training && p != Precision::kBF16Stochastic);
      for (int i = 0; i < 15; ++i) {
        EXPECT_EQ(back[i], exact ? values[i] : static_cast<float>(bfloat16(values[i]))) << name_of(p);
        const Tensor k = workspace.parameter("k.weight"), qkv = workspace.group_parameter("qkv.weight");
        EXPECT_EQ(k.shape(), (Shape{3, 5}));
        const float seen = p == Precision::kF32 ? k.data<float>()[i] : static_cast<float>(k.data<bfloat16>()[i]);
        const float joined =
            p == Precision::kF32 ? qkv.data<float>()[15 + i] : static_cast<float>(qkv.data<bfloat16>()[15 + i]);
        EXPECT_EQ(seen, p == Precision::kF32 ? values[i] : static_cast<float>(bfloat16(values[i])));
        EXPECT_EQ(joined, seen);
      }
      workspace.get("q.weight", back.data(), 15);  // the neighbour is untouched
      EXPECT_EQ(back, std::vector<float>(15, 0.0f));
      EXPECT_THROW(workspace.set("k.weight", values.data(), 14), std::invalid_argument);
      EXPECT_THROW(workspace.get("k.weight", back.data(), 14), std::invalid_argument);
    }
  }
}

TEST(Workspace, SetAndGetFp16) {
  for (Precision p : {Precision::kF16Master, Precision::kF16Stochastic}) {
    for (bool training : {true, false}) {
      Workspace workspace(small_layout(), p, training);
      std::vector<float> values(15), back(15);
      for (int i = 0; i < 15; ++i) values[i] = 1.0f / static_cast<float>(i + 3);
      workspace.set("k.weight", values.data(), 15);
      workspace.get("k.weight", back.data(), 15);
      for (int i = 0; i < 15; ++i) {
        const float16 narrow(values[i]);
        EXPECT_EQ(back[i], training && p == Precision::kF16Master ? values[i] : static_cast<float>(narrow));
        EXPECT_EQ(workspace.parameter("k.weight").data<float16>()[i].bits, narrow.bits);
      }
    }
  }
}

TEST(Workspace, BlocksAreZeroedAlignedAndApart) {
  ParameterLayout layout;
  layout.add("large", {3'000'000});  // above the huge-page threshold
  Workspace workspace(std::move(layout), Precision::kBF16Master, true);
  std::vector<Tensor> blocks = {workspace.parameters(), workspace.gradients(), workspace.moment1(), workspace.moment2(),
                                workspace.master()};
  for (const Tensor& block : blocks) {
    ASSERT_TRUE(block.defined());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block.raw()) % kAlignment, 0u);
    const char* p = static_cast<const char*>(block.raw());
    EXPECT_EQ(p[0], 0);
    EXPECT_EQ(std::memcmp(p, p + 1, block.bytes() - 1), 0);
    std::memset(block.raw(), 0x55, block.bytes());  // asan sees an overlap with the heap
  }
  EXPECT_FALSE(workspace.residual().defined());
  EXPECT_EQ(workspace.gradient("large").raw(), workspace.gradients().raw());
}

}  // namespace
}  // namespace frit
