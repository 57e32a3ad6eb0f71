#include "frit/memory/memory.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <optional>

#include "frit/memory/planner.h"

namespace frit {
namespace {

// a b, free a, c, free b, free c.
void small_step(Memory& memory, const std::function<void(const Tensor&, const Tensor&, const Tensor&)>& look) {
  Buffer a = memory.allocate({100}, DType::kF32, "a");
  Buffer b = memory.allocate({64}, DType::kF32, "b");
  const Tensor a_view = a;
  a.release();
  Buffer c = memory.allocate({10, 10}, DType::kF32, "c");
  look(a_view, b, c);
  b.release();
}

std::vector<Lifetime> record(Memory& memory) {
  memory.begin_recording();
  small_step(memory, [](const Tensor&, const Tensor& b, const Tensor& c) {
    EXPECT_EQ(b.raw(), nullptr);
    EXPECT_TRUE(b.defined());
    EXPECT_EQ(c.shape(), (Shape{10, 10}));
  });
  return memory.end_recording();
}

TEST(Memory, RecordsBirthsAndDeaths) {
  Memory memory;
  EXPECT_EQ(memory.mode(), Memory::Mode::kHeap);
  const std::vector<Lifetime> t = record(memory);
  ASSERT_EQ(t.size(), 3u);
  EXPECT_EQ(t[0].name, "a");
  EXPECT_EQ(t[0].bytes, 400u);
  const auto expect_times = [&](int i, int64_t birth, int64_t death) {
    EXPECT_EQ(t[i].birth, birth);
    EXPECT_EQ(t[i].death, death);
  };
  expect_times(0, 0, 2);
  expect_times(1, 1, 4);
  expect_times(2, 3, 5);
  EXPECT_EQ(memory.mode(), Memory::Mode::kHeap);
}

TEST(Memory, WhatIsAliveAtTheEndDiesAfterTheLastEvent) {
  Memory memory;
  memory.begin_recording();
  Buffer kept = memory.allocate({4}, DType::kF32, "kept");
  memory.allocate({4}, DType::kF32, "gone");  // dies at once: nobody takes it
  const auto t = memory.end_recording();
  EXPECT_EQ(t[0].death, 3);
  EXPECT_EQ(t[1].death, 2);
}

TEST(Memory, ReplayUsesThePlanAndAllocatesNothing) {
  Memory memory;
  const Plan plan = plan_memory(record(memory));
  EXPECT_EQ(plan.peak, 512u + 256u);
  memory.reserve(plan.peak);
  const char* base = nullptr;
  for (int step = 0; step < 3; ++step) {
    memory.begin_replay(plan);
    small_step(memory, [&](const Tensor& a, const Tensor& b, const Tensor& c) {
      EXPECT_EQ(a.raw(), c.raw());  // shared address
      const char* first = std::min(static_cast<char*>(b.raw()), static_cast<char*>(c.raw()));
      if (step == 0) base = first;
      EXPECT_EQ(first, base);  // the arena does not move
      EXPECT_EQ(reinterpret_cast<uintptr_t>(b.raw()) % kAlignment, 0u);
      std::memset(b.raw(), 1, b.bytes());
      std::memset(c.raw(), 2, c.bytes());
      EXPECT_EQ(static_cast<const char*>(b.raw())[b.bytes() - 1], 1);
    });
    memory.end_replay();
  }
  EXPECT_EQ(memory.arena_bytes(), plan.peak);
}

TEST(Memory, ReserveGrowsOnlyAndReplayGrowsWhenItMust) {
  Memory memory;
  memory.reserve(1000);
  EXPECT_EQ(memory.arena_bytes(), 1024u);
  memory.reserve(10);
  EXPECT_EQ(memory.arena_bytes(), 1024u);
  Plan plan;
  plan.peak = 4096;
  memory.begin_replay(plan);
  EXPECT_EQ(memory.arena_bytes(), 4096u);
  EXPECT_THROW(memory.reserve(8192), std::logic_error);
  memory.end_replay();
}

TEST(Memory, ReplayErrors) {
  Memory memory;
  const Plan plan = plan_memory(record(memory));
  const auto message_of = [&](const std::function<void()>& step) -> std::string {
    memory.begin_replay(plan);
    std::string message;
    try {
      step();
    } catch (const std::logic_error& e) {
      message = e.what();
    }
    try {
      memory.end_replay();
    } catch (const std::logic_error& e) {
      message += message.empty() ? std::string("at the end: ") + e.what() : "";
    }
    return message;
  };
  const auto contains = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_EQ(message_of([&] { small_step(memory, [](auto&&...) {}); }), "");
  EXPECT_EQ(message_of([&] { memory.allocate({7}, DType::kF32, "a"); }), "");  // smaller, and a step that stops early
  EXPECT_PRED2(contains, message_of([&] { memory.allocate({101}, DType::kF32, "larger"); }),
               "larger ([101]) takes 404");
  EXPECT_PRED2(contains, message_of([&] {
                 small_step(memory, [](auto&&...) {});
                 memory.allocate({1}, DType::kF32, "fourth");
               }),
               "fourth ([1]) is not in the plan of 3");
  EXPECT_PRED2(contains, message_of([&] {  // a is not released: c would lie on it
                 Buffer a = memory.allocate({100}, DType::kF32, "a"), b = memory.allocate({64}, DType::kF32, "b");
                 memory.allocate({10, 10}, DType::kF32, "c");
               }),
               "c ([10, 10]), number 2, would share memory");
  EXPECT_PRED2(contains, message_of([&] {  // b instead of a: the count is right, the tensor is not
                 Buffer a = memory.allocate({100}, DType::kF32, "a"), b = memory.allocate({64}, DType::kF32, "b");
                 b.release();
                 Buffer c = memory.allocate({10, 10}, DType::kF32, "c");
                 a.release();
               }),
               "number 0 was released later than planned");
}

TEST(Memory, ModesExclude) {
  Memory memory;
  EXPECT_THROW(memory.end_recording(), std::logic_error);
  EXPECT_THROW(memory.end_replay(), std::logic_error);
  Plan plan;
  memory.begin_recording();
  EXPECT_THROW(memory.begin_recording(), std::logic_error);
  EXPECT_THROW(memory.begin_replay(plan), std::logic_error);
  memory.end_recording();
  memory.begin_replay(plan);
  EXPECT_THROW(memory.begin_recording(), std::logic_error);
  EXPECT_THROW(memory.begin_replay(plan), std::logic_error);
  memory.end_replay();
  Plan broken;
  broken.offsets = {0};
  EXPECT_THROW(memory.begin_replay(broken), std::invalid_argument);
}

TEST(Memory, BuffersMove) {
  Memory memory;
  Buffer a = memory.allocate({3}, DType::kI64, "a");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a->raw()) % kAlignment, 0u);
  void* data = a->raw();
  Buffer b = std::move(a);
  EXPECT_FALSE(a.defined());  // NOLINT: a moved-from Buffer is undefined, and that is promised
  EXPECT_EQ(b->raw(), data);
  Buffer& same = b;
  b = std::move(same);
  EXPECT_EQ(b->raw(), data);
  b = memory.allocate({5}, DType::kF32, "c");  // the first is freed (asan sees it if not)
  EXPECT_EQ(b->shape(), (Shape{5}));
  b.release();
  b.release();
  EXPECT_FALSE(b.defined());
  Buffer empty = memory.allocate({0, 4}, DType::kF32, "empty");
  EXPECT_TRUE(empty.defined());
  EXPECT_EQ(empty->numel(), 0);
}

TEST(Memory, BuffersBelongToTheModeTheyCameFrom) {
  Memory memory;
  Buffer heap = memory.allocate({100}, DType::kF32, "heap"), other = memory.allocate({100}, DType::kF32, "heap");
  memory.begin_recording();
  heap.release();  // freed, and no event of the recording (leak and time are checked)
  Buffer recorded = memory.allocate({100}, DType::kF32, "recorded");
  Buffer second = memory.allocate({100}, DType::kF32, "second");
  second.release();
  const auto first_lifetimes = memory.end_recording();
  EXPECT_EQ(first_lifetimes[0].birth, 0);
  EXPECT_EQ(first_lifetimes[1].death, 2);
  memory.begin_recording();
  Buffer again = memory.allocate({100}, DType::kF32, "again");
  recorded.release();  // of the last recording: not again's death
  const auto lifetimes = memory.end_recording();
  EXPECT_EQ(lifetimes[0].death, 1);
  const Plan plan = plan_memory(lifetimes);
  Buffer late;
  memory.begin_replay(plan);
  late = memory.allocate({100}, DType::kF32, "again");
  other.release();  // heap memory freed during a replay
  memory.end_replay();
  late.release();  // arena memory released after it: must not be freed
  again.release();
}

TEST(Memory, PoisonFillsWhatIsHandedOut) {
  Memory memory;
  const Plan plan = plan_memory(record(memory));
  memory.set_poison(true);
  for (int step = 0; step < 2; ++step) {
    memory.begin_replay(plan);
    small_step(memory, [](const Tensor&, const Tensor& b, const Tensor& c) {
      for (int i = 0; i < 64; ++i) EXPECT_TRUE(std::isnan(b.data<float>()[i]));
      for (int i = 0; i < 100; ++i) EXPECT_TRUE(std::isnan(c.data<float>()[i]));
      std::memset(c.raw(), 0, c.bytes());
    });
    memory.end_replay();
  }
  const Buffer heap = memory.allocate({5}, DType::kBF16, "heap");
  EXPECT_TRUE(std::isnan(static_cast<float>(heap->data<bfloat16>()[4])));
}

}  // namespace
}  // namespace frit
