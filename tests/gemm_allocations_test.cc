// Products from planned memory take nothing from the heap: malloc and its kin are replaced and counted, in every thread
// and every library of this program.
#include <gtest/gtest.h>

#include <vector>

#include "frit/memory/planner.h"
#include "frit/ops/gemm/gemm.h"
#include "tests/count_allocations.h"

namespace frit {
namespace {

// Calls of malloc in one run from planned memory, after a first one that may set things up.
template <typename F>
int64_t allocations_of(Memory& memory, F&& product) {
  memory.begin_recording();
  product();
  const Plan plan = plan_memory(memory.end_recording());
  memory.reserve(plan.peak);
  int64_t before = 0;
  for (int i = 0; i < 2; ++i) {
    before = g_allocations;
    memory.begin_replay(plan);
    product();
    memory.end_replay();
  }
  return g_allocations - before;
}

TEST(GemmAllocations, TheCounterCounts) {
  const int64_t before = g_allocations;
  std::vector<float> v(1000);
  EXPECT_NE(v.data(), nullptr);
  EXPECT_GT(g_allocations, before);
}

TEST(GemmAllocations, PackedTakesNothing) {
  ThreadPool pool(2);
  Memory memory;
  Context context(pool, memory);
  std::vector<float> a(700 * 300, 1.0f), b(700 * 300, 1.0f), c(300 * 300), bias(300);
  std::vector<bfloat16> ha(700 * 300), hb(700 * 300), hbias(300);
  for (const int64_t m : {1, 4, 16, 97, 300})
    for (const bool transposed : {false, true})
      for (const bool half : {false, true}) {
        const Shape shape = transposed ? Shape{700, m} : Shape{m, 700};
        const GemmArgs args{
            .a = half ? Tensor(ha.data(), DType::kBF16, shape) : Tensor(a.data(), DType::kF32, shape),
            .b = half ? Tensor(hb.data(), DType::kBF16, {300, 700}) : Tensor(b.data(), DType::kF32, {300, 700}),
            .c = Tensor(c.data(), DType::kF32, {m, 300}),
            .transpose_a = transposed,
            .transpose_b = true,
            .accumulate = true,
            .bias = half ? Tensor(hbias.data(), DType::kBF16, {300}) : Tensor(bias.data(), DType::kF32, {300})};
        EXPECT_EQ(allocations_of(memory, [&] { gemm(context, args); }), 0) << m << transposed << half;
        EXPECT_EQ(context.used("gemm"), "packed");
      }
  const GemmArgs batch{.a = Tensor(a.data(), DType::kF32, {20, 30, 32}),
                       .b = Tensor(b.data(), DType::kF32, {20, 32, 31}),
                       .c = Tensor(c.data(), DType::kF32, {20, 30, 31}),
                       .transpose_a = false,
                       .transpose_b = false,
                       .accumulate = false,
                       .bias = {}};
  EXPECT_EQ(allocations_of(memory, [&] { gemm(context, batch); }), 0);
  const PackedWeight packed(context, Tensor(b.data(), DType::kF32, {300, 700}));
  EXPECT_EQ(allocations_of(memory,
                           [&] {
                             linear_packed(context, Tensor(a.data(), DType::kF32, {16, 700}), packed, {},
                                           Tensor(c.data(), DType::kF32, {16, 300}));
                           }),
            0);
}

}  // namespace
}  // namespace frit
