#include "frit/ops/optimizer/per_tensor.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "frit/memory/memory.h"

namespace frit {
namespace {

constexpr Precision kPrecisions[] = {Precision::kF32, Precision::kBF16Master, Precision::kF16Master};

// Parameters that begin anywhere: members of groups lie one behind the other.
ParameterLayout some_layout() {
  ParameterLayout layout;
  layout.add("matrix", {3, 211});
  layout.add_group("joined", {{"q", {5, 7}}, {"k", {5, 7}}, {"v", {9, 7}}});
  layout.add("one", {1});
  layout.add_group("biases", {{"bq", {13}}, {"bk", {300}}, {"bv", {2}}});
  return layout;
}

// The blocks of a workspace on the host or a GPU, filled from a seed; its gradients anew for every step.
struct Rig {
  Rig(Precision precision, DType gradient_dtype, Gpu* gpu)
      : memory(gpu),
        context(pool, memory, gpu),
        workspace(some_layout(), precision, true, 2, gradient_dtype, true, gpu) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (const auto& slice : workspace.layout().slices()) {
      std::vector<float> values(static_cast<size_t>(slice.shape.numel()));
      for (float& x : values) x = normal(random);
      workspace.set(slice.name, values.data(), slice.shape.numel());
    }
  }
  void set_gradients(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const Tensor block = workspace.gradients();
    const auto count = static_cast<size_t>(block.numel());
    std::vector<float> wide(count);
    std::vector<uint16_t> narrow(count);
    for (size_t i = 0; i < count; ++i) {
      const float value = normal(random);
      wide[i] = static_cast<float>(bfloat16(value));
      narrow[i] = block.dtype() == DType::kF16 ? float16(wide[i]).bits : bfloat16(value).bits;
    }
    workspace.write(block, block.dtype() == DType::kF32 ? static_cast<const void*>(wide.data()) : narrow.data());
  }
  // Of each parameter's value and moments.
  std::vector<std::vector<char>> bits() const {
    std::vector<std::vector<char>> all;
    for (const Tensor& block : {workspace.parameters(), workspace.moment1(), workspace.moment2(), workspace.master()}) {
      if (!block.defined()) continue;
      std::vector<char> bytes(static_cast<size_t>(block.bytes()));
      workspace.read(block, bytes.data());
      for (const auto& slice : workspace.layout().slices()) {
        const int64_t size = size_of(block.dtype());
        const auto from = bytes.begin() + slice.offset * size;
        all.emplace_back(from, from + slice.shape.numel() * size);
      }
    }
    return all;
  }
  ThreadPool pool{2};
  Memory memory;
  Context context;
  Workspace workspace;
};

TEST(PerTensorUpdate, HasTheBitsOfTheWhole) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  for (const Precision precision : kPrecisions) {
    for (const DType gradient_dtype : {compute_dtype(precision), DType::kF32}) {
      for (Gpu* const device : {static_cast<Gpu*>(nullptr), gpu.get()}) {
        if (!device && precision == Precision::kF16Master) continue;  // fp16 needs a GPU
        SCOPED_TRACE(
            fmt::format("{}, gradients {}, {}", name_of(precision), name_of(gradient_dtype), device ? "GPU" : "CPU"));
        Rig whole(precision, gradient_dtype, device), apart(precision, gradient_dtype, device);
        Buffer copy;
        if (optimizer_copies_gradients(apart.workspace))
          copy = apart.context.allocate({apart.workspace.layout().elements()}, DType::kF32, "copy");
        const OptimizerArgs args{
            .kind = OptimizerKind::kAdamW, .weight_decay = 0.01, .decay_end = apart.workspace.layout().decay_end()};
        for (int64_t step = 1; step <= 3; ++step) {
          const OptimizerStep now{.learning_rate = 1e-2, .step = step, .gradient_scale = 0.37f};
          for (Rig* run : {&whole, &apart}) run->set_gradients(static_cast<uint32_t>(step));
          optimizer_step(whole.context, args, now, whole.workspace);
          const int64_t launches = device ? device->launches() : 0;
          optimizer_step_per_tensor(apart.context, args, now, apart.workspace, copy);
          if (!device) continue;
          const int64_t each = precision == Precision::kF32 ? 1 : gradient_dtype == DType::kF32 ? 2 : 3;
          EXPECT_EQ(device->launches() - launches,
                    each * static_cast<int64_t>(apart.workspace.layout().slices().size()));
        }
        EXPECT_EQ(apart.bits(), whole.bits());
      }
    }
  }
}

TEST(PerTensorUpdate, Errors) {
  Rig alone(Precision::kBF16Stochastic, DType::kBF16, nullptr), master(Precision::kBF16Master, DType::kBF16, nullptr);
  const OptimizerStep now{.learning_rate = 1e-2};
  EXPECT_THROW(optimizer_step_per_tensor(alone.context, {}, now, alone.workspace, {}), std::invalid_argument);
  EXPECT_THROW(optimizer_step_per_tensor(master.context, {}, now, master.workspace, {}), std::invalid_argument);
}

}  // namespace
}  // namespace frit
