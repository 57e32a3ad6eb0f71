#include "frit/memory/memory.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace frit {
namespace {

template <typename... Args>
[[noreturn]] void fail_logic(fmt::format_string<Args...> format, Args&&... args) {
  throw std::logic_error(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    release();
    tensor_ = std::exchange(other.tensor_, Tensor());
    memory_ = std::exchange(other.memory_, nullptr);
    id_ = other.id_;
    session_ = other.session_;
  }
  return *this;
}

void Buffer::release() {
  if (memory_) std::exchange(memory_, nullptr)->release(*this);
  tensor_ = Tensor();
}

Buffer Memory::allocate(Shape shape, DType dtype, std::string_view name) {
  Buffer buffer;
  const size_t bytes = static_cast<size_t>(shape.numel() * size_of(dtype));
  char* data = nullptr;
  switch (mode_) {
    case Mode::kHeap:
      data = allocate_block(bytes, device_).release();
      break;
    case Mode::kRecord:
      buffer.id_ = static_cast<int64_t>(lifetimes_.size());
      lifetimes_.push_back({std::string(name), bytes, clock_++, -1});
      break;
    case Mode::kReplay: {
      if (next_ >= static_cast<int64_t>(plan_->offsets.size()))
        fail_logic("[memory] temporary {} ({}) is not in the plan of {} temporaries", name, shape.to_string(),
                   plan_->offsets.size());
      if (bytes > plan_->bytes[next_])
        fail_logic("[memory] temporary {} ({}) takes {} bytes, planned were {}", name, shape.to_string(), bytes,
                   plan_->bytes[next_]);
      if (late_ >= 0 || clock_ < plan_->births[next_])
        fail_logic("[memory] temporary {} ({}), number {}, would share memory with one that is not released as planned",
                   name, shape.to_string(), next_);
      ++clock_;
      data = arena_.get() + plan_->offsets[next_];
      buffer.id_ = next_++;
      break;
    }
  }
  buffer.tensor_ = Tensor(data, dtype, shape, device_ ? device_->device() : Device::kCpu);
  buffer.memory_ = this;
  buffer.session_ = session_;
  if (device_ && data) device_->born(data, bytes, dtype);
  if (poison_ && data) {
    if (device_)
      device_->poison(data, bytes);
    else
      std::memset(data, 0xff, bytes);
  }
  return buffer;
}

void Memory::release(const Buffer& buffer) {
  if (device_ && buffer.tensor_.raw()) device_->died(buffer.tensor_.raw());
  if (buffer.id_ < 0) {
    FreeBlock{device_}(static_cast<char*>(buffer.tensor_.raw()));
  } else if (buffer.session_ == session_ && mode_ == Mode::kRecord) {
    lifetimes_[buffer.id_].death = clock_++;
  } else if (buffer.session_ == session_ && mode_ == Mode::kReplay) {
    // Called from destructors: what is wrong is told by the next allocate() or by end_replay().
    if (clock_++ > plan_->deaths[buffer.id_] && late_ < 0) late_ = buffer.id_;
  }
}

void Memory::begin_recording() {
  if (mode_ != Mode::kHeap) throw std::logic_error("[memory] recording begun inside recording or replay");
  mode_ = Mode::kRecord;
  ++session_;
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
  arena_.reset();  // before the new one is there: the two need not fit together
  arena_bytes_ = 0;
  arena_ = allocate_block(align_up(arena_bytes), device_);
  arena_bytes_ = align_up(arena_bytes);
}

void Memory::begin_replay(const Plan& plan) {
  if (mode_ != Mode::kHeap) throw std::logic_error("[memory] replay begun inside recording or replay");
  const size_t n = plan.offsets.size();
  FRIT_CHECK(plan.bytes.size() == n && plan.births.size() == n && plan.deaths.size() == n,
             "[memory] a plan of {} offsets has {} sizes, {} births and {} deaths", n, plan.bytes.size(),
             plan.births.size(), plan.deaths.size());
  reserve(plan.peak);
  plan_ = &plan;
  next_ = 0;
  clock_ = 0;
  late_ = -1;
  ++session_;
  mode_ = Mode::kReplay;
}

void Memory::end_replay() {
  if (mode_ != Mode::kReplay) throw std::logic_error("[memory] end_replay without begin_replay");
  mode_ = Mode::kHeap;
  plan_ = nullptr;
  if (late_ >= 0) fail_logic("[memory] temporary number {} was released later than planned", late_);
}

}  // namespace frit
