// Context: what an operator runs on. Device, threads, temporary memory, random-number key, and forced choices. No
// globals: two models with a Context each live side by side.
#pragma once
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "frit/backend/gpu.h"
#include "frit/backend/tuning.h"
#include "frit/core/philox.h"
#include "frit/core/tensor.h"
#include "frit/core/thread_pool.h"
#include "frit/memory/memory.h"

namespace frit {

class Context {
 public:
  // All must outlive the context. With a gpu, operators run there and memory is the gpu's.
  Context(ThreadPool& pool, Memory& memory, Gpu* gpu = nullptr) : pool_(pool), memory_(memory), gpu_(gpu) {}
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  Device device() const { return gpu_ ? gpu_->device() : Device::kCpu; }
  bool on_gpu() const { return gpu_ != nullptr; }
  Gpu& gpu() const { return *gpu_; }  // only if on_gpu()
  ThreadPool& pool() const { return pool_; }
  Memory& memory() const { return memory_; }

  // True while lifetimes are recorded: operators check their arguments, ask for their scratch, and compute nothing.
  bool planning() const { return memory_.mode() == Memory::Mode::kRecord; }
  Buffer allocate(Shape shape, DType dtype, std::string_view name) { return memory_.allocate(shape, dtype, name); }

  // Random numbers: the trainer sets seed and step before each step, and the stream before each micro-batch.
  void set_random(uint32_t seed, uint32_t step, uint32_t stream = 0) { key_ = {seed, step}, stream_ = stream; }
  Dropout dropout(float p_drop, uint32_t site) const { return {p_drop, site, stream_, key_}; }

  // Forces an operator's implementation by name ("attention" -> "flash"); the operator throws if it refuses. Empty:
  // free.
  void force(std::string_view op, std::string_view implementation) { forced_[std::string(op)] = implementation; }
  std::string_view forced(std::string_view op) const {
    auto it = forced_.find(op);
    return it == forced_.end() ? std::string_view() : std::string_view(it->second);
  }
  // Operators with several implementations note which one ran, so that a test can see a fallback. `implementation` must
  // be a literal.
  void note_used(const char* op, const char* implementation) { used_[op] = implementation; }
  std::string_view used(std::string_view op) const {
    auto it = used_.find(op);
    return it == used_.end() ? std::string_view() : std::string_view(it->second);
  }
  // What timing found on this GPU; must outlive the context. None: the operators' own rules choose.
  void set_tuning(const Tuning* tuning) { tuning_ = tuning; }
  const Tuning* tuning() const { return tuning_; }

  // For the program that tunes: receives the key under which each operator's choice is looked up.
  void observe_keys(std::map<std::string, std::string>* keys) { keys_ = keys; }
  void note_key(std::string_view op, std::string_view key) {
    if (keys_) (*keys_)[std::string(op)] = key;
  }

  // Sums of partial rows that operators leave for one common launch (frit/ops/column_sum/column_sum.h: LaterSums);
  // nullptr: each makes its own.
  struct LaterSum {
    Buffer partials;  // f32 [pieces, y.numel() + z.numel()]
    Tensor y, z;      // z optional
    bool accumulate = false;
  };
  std::vector<LaterSum>* later_sums = nullptr;

  // Receives one line for everything a user should hear of (a fallback and its reason). Silent by default.
  std::function<void(std::string_view)> on_notice;
  void notice(std::string_view text) const {
    if (on_notice) on_notice(text);
  }
  // The same, but only the first notice of each `reason`, which has no numbers in it: operators run thousands of times.
  void notice_once(std::string_view reason, std::string_view text) {
    if (on_notice && told_.emplace(reason).second) on_notice(text);
  }

 private:
  ThreadPool& pool_;
  Memory& memory_;
  Gpu* gpu_;
  const Tuning* tuning_ = nullptr;
  std::map<std::string, std::string>* keys_ = nullptr;
  PhiloxKey key_;
  uint32_t stream_ = 0;
  std::map<std::string, std::string, std::less<>> forced_;
  std::map<std::string_view, const char*> used_;
  std::set<std::string, std::less<>> told_;
};

// Throws std::invalid_argument unless t is a floating-point tensor that operators of this context compute with: f32 or
// bf16, on a GPU also f16.
inline void check_float(const char* op, const char* name, const Tensor& t, const Context& context) {
  FRIT_CHECK(t.dtype() == DType::kF32 || t.dtype() == DType::kBF16 || (t.dtype() == DType::kF16 && context.on_gpu()),
             "[{}] {} is {}, expected f32 or bf16{}", op, name, t.to_string(),
             context.on_gpu() ? " or f16" : " (f16 needs a GPU)");
}

}  // namespace frit
