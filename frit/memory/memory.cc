#include "frit/memory/memory.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace frit {
namespace {

void* allocate_aligned(size_t bytes) {
  void* p = std::aligned_alloc(kAlignment, align_up(bytes ? bytes : 1));
  if (!p) throw std::bad_alloc();
  return p;
}

}  // namespace

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    release();
    tensor_ = std::exchange(other.tensor_, Tensor());
    memory_ = std::exchange(other.memory_, nullptr);
    id_ = other.id_;
  }
  return *this;
}

void Buffer::release() {
  if (memory_) std::exchange(memory_, nullptr)->release(id_, tensor_.raw());
  tensor_ = Tensor();
}

Memory::~Memory() { std::free(arena_); }

Buffer Memory::allocate(Shape shape, DType dtype, std::string_view name) {
  Buffer buffer;
  const size_t bytes = static_cast<size_t>(shape.numel() * size_of(dtype));
  void* data = nullptr;
  switch (mode_) {
    case Mode::kHeap:
      data = allocate_aligned(bytes);
      break;
    case Mode::kRecord:
      buffer.id_ = static_cast<int64_t>(lifetimes_.size());
      lifetimes_.push_back({std::string(name), bytes, clock_++, -1});
      break;
    case Mode::kReplay:
      if (next_ >= static_cast<int64_t>(plan_->offsets.size()))
        throw std::logic_error(fmt::format("[memory] temporary {} ({}) is not in the plan of {} temporaries", name,
                                           shape.to_string(), plan_->offsets.size()));
      if (bytes > plan_->bytes[next_])
        throw std::logic_error(fmt::format("[memory] temporary {} ({}) takes {} bytes, planned were {}", name,
                                           shape.to_string(), bytes, plan_->bytes[next_]));
      data = arena_ + plan_->offsets[next_++];
      break;
  }
  buffer.tensor_ = Tensor(data, dtype, shape);
  buffer.memory_ = this;
  return buffer;
}

void Memory::release(int64_t id, void* data) {
  if (mode_ == Mode::kRecord) {
    if (id < static_cast<int64_t>(lifetimes_.size()) && !data) lifetimes_[id].death = clock_++;
  } else if (mode_ == Mode::kHeap) {
    std::free(data);
  }
}

void Memory::begin_recording() {
  if (mode_ != Mode::kHeap) throw std::logic_error("[memory] recording begun inside recording or replay");
  mode_ = Mode::kRecord;
  lifetimes_.clear();
  clock_ = 0;
}

std::vector<Lifetime> Memory::end_recording() {
  if (mode_ != Mode::kRecord) throw std::logic_error("[memory] end_recording without begin_recording");
  mode_ = Mode::kHeap;
  for (Lifetime& t : lifetimes_)
    if (t.death < 0) t.death = clock_;
  return std::exchange(lifetimes_, {});
}

void Memory::reserve(size_t arena_bytes) {
  if (mode_ == Mode::kReplay) throw std::logic_error("[memory] the arena cannot grow during a replay");
  if (arena_bytes <= arena_bytes_) return;
  std::free(arena_);
  arena_bytes_ = align_up(arena_bytes);
  arena_ = static_cast<char*>(allocate_aligned(arena_bytes_));
}

void Memory::begin_replay(const Plan& plan) {
  if (mode_ != Mode::kHeap) throw std::logic_error("[memory] replay begun inside recording or replay");
  reserve(plan.peak);
  if (poison_) std::memset(arena_, 0xff, plan.peak);
  plan_ = &plan;
  next_ = 0;
  mode_ = Mode::kReplay;
}

void Memory::end_replay() {
  if (mode_ != Mode::kReplay) throw std::logic_error("[memory] end_replay without begin_replay");
  mode_ = Mode::kHeap;
  plan_ = nullptr;
}

}  // namespace frit
