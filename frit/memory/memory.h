// Temporary tensors of a step: one interface to run unplanned, to record lifetimes, and to run from a plan.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "frit/core/tensor.h"
#include "frit/memory/block.h"

namespace frit {

// Every temporary starts at a multiple of this many bytes.
constexpr size_t kAlignment = 256;
constexpr size_t align_up(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// One temporary of a recorded step. Times count allocations and releases; alive in [birth, death).
struct Lifetime {
  std::string name;
  size_t bytes = 0;
  int64_t birth = 0;
  int64_t death = 0;  // past the last event if it was never released
};

// Where each recorded temporary lies in the arena: offsets[i] for the i-th allocation of the step.
struct Plan {
  std::vector<size_t> offsets;
  std::vector<size_t> bytes;            // as recorded; a replayed allocation may be smaller, never larger
  std::vector<int64_t> births, deaths;  // as recorded; a replay must keep to them
  size_t peak = 0;                      // bytes of arena the plan needs
  size_t lower_bound = 0;               // the largest sum of sizes alive at one time
  size_t total = 0;                     // sum of all sizes: what it takes without sharing
  int64_t blocks = 0;                   // distinct shared blocks, if the plan is one of blocks (else 0)
};

class Memory;

// Owns one temporary until it goes out of scope; its Memory must live longer. Move-only; converts to the Tensor that
// views it. Belongs to the mode it was allocated in, whenever it is released.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { *this = static_cast<Buffer&&>(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer() { release(); }
  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }
  const Tensor* operator->() const { return &tensor_; }
  bool defined() const { return tensor_.defined(); }
  // Gives the memory back now: the death that planning records.
  void release();

 private:
  friend class Memory;
  Tensor tensor_;
  Memory* memory_ = nullptr;
  int64_t id_ = -1;      // which allocation of the recording or replay; -1: heap
  int64_t session_ = 0;  // which recording or replay
};

// Hands out temporaries. One thread at a time (the one that drives the step).
//  - heap (the initial mode): each temporary is its own allocation;
//  - record: nothing is allocated, tensors have null data, births and deaths are written down;
//  - replay: the i-th allocation gets the plan's i-th offset in the arena and no allocation happens. The step must allocate
//    and release in the recorded order: a tensor that lived longer than planned would share its memory.
class Memory {
 public:
  enum class Mode { kHeap, kRecord, kReplay };
  // On the host, or on a device, which must outlive this.
  explicit Memory(DeviceMemory* device = nullptr) : device_(device) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Mode mode() const { return mode_; }
  // Errors: in replay, std::logic_error naming the tensor if the step asks for more, or larger, tensors than were
  // planned, or if one was not released when the plan says.
  Buffer allocate(Shape shape, DType dtype, std::string_view name);

  void begin_recording();
  // Ends recording and returns to heap mode. Buffers still alive count as alive to the end.
  std::vector<Lifetime> end_recording();

  // Runs from `plan`, which must stay alive until end_replay(). Grows the arena if it is smaller than plan.peak:
  // reserve() the largest plan first, so that no step allocates.
  void begin_replay(const Plan& plan);
  // A step may stop early. Errors: std::logic_error if a tensor was released later than planned.
  void end_replay();
  // Makes the arena at least this large. Errors: std::logic_error during replay.
  void reserve(size_t arena_bytes);
  size_t arena_bytes() const { return arena_bytes_; }
  // Fills each temporary with NaN patterns when it is allocated, so that a read of unwritten memory shows (tests).
  void set_poison(bool poison) { poison_ = poison; }

 private:
  friend class Buffer;
  void release(const Buffer& buffer);
  DeviceMemory* device_ = nullptr;
  Mode mode_ = Mode::kHeap;
  std::vector<Lifetime> lifetimes_;
  int64_t clock_ = 0;    // allocations and releases of this recording or replay
  int64_t session_ = 0;  // recordings and replays begun
  const Plan* plan_ = nullptr;
  int64_t next_ = 0;
  int64_t late_ = -1;  // the first temporary that outlived its plan
  Block arena_;
  size_t arena_bytes_ = 0;
  bool poison_ = false;
};

}  // namespace frit
