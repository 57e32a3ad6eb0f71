// The SIMT simulator: runs kernels on the CPU, one fiber a thread, and checks what a GPU would let pass.
// It counts what a kernel requests, and throws sim::Fault, naming kernel, block and thread, on: access outside of a
// tensor or misaligned; a read of memory nothing wrote; a race (two threads touch an element, one writes, and no
// barrier orders them); a barrier or collective that not all of its threads reach, or reach at different places; launch
// limits; a global access before wait_for_previous(). Kernels use it through the words of frit/simt alone.
#pragma once
#include <cstdint>
#include <memory>
#include <source_location>
#include <stdexcept>
#include <string>

#include "frit/backend/gpu.h"

namespace frit::sim {

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What kernels did since reset_counts(). Bytes are those the source requests; sectors are the 32-byte pieces that one
// access of a warp touches (lanes' n-th accesses between two synchronisations belong together: exact for convergent
// code).
struct Counts {
  int64_t launches = 0;
  int64_t blocks = 0;
  int64_t barriers = 0;                       // per launch, the most that one block passed; added over launches
  int64_t collectives = 0;                    // warp collectives completed (shuffles, votes, products)
  int64_t read_bytes = 0, written_bytes = 0;  // global memory, atomics apart
  int64_t read_sectors = 0, written_sectors = 0;
  int64_t atomics = 0;  // by thread
  // Shared memory, by warp: an access of 8 (16) bytes a lane is two (four) accesses, of half (quarter) a warp each.
  // Every one takes as many rounds as there are different words in its busiest bank: rounds above accesses are bank
  // conflicts.
  int64_t shared_accesses = 0, shared_rounds = 0;
};

enum class Order { kForward, kReversed };
enum class Access : uint8_t { kRead, kWrite, kAtomic };

struct Region;  // one live tensor and its shadow
struct Thread;  // one simulated thread
class Machine;

// The simulated GPU. Launch limits are Hopper's (1024 threads, 227 KB shared memory a block); 4 multiprocessors.
// Several queues of one machine may be used from a thread each: they share its memory and its checks, and their calls
// run one after the other, a kernel as a whole. A race between two queues is therefore not found.
class SimGpu : public Gpu {
 public:
  SimGpu();
  ~SimGpu() override;
  Device device() const override { return Device::kSim; }
  std::string name() const override { return "simulator"; }
  int multiprocessors() const override { return 4; }
  int64_t shared_bytes_limit() const override { return 227 * 1024; }
  void* stream() const override { return nullptr; }
  void synchronize() override {}
  std::vector<double> time_graph(const std::function<void()>&, int) override {
    fail("[simulator] has no clock: timing needs a GPU");
  }
  void* allocate(size_t bytes) override;
  void release(void* p) noexcept override;
  void upload(void* device, const void* host, size_t bytes) override;  // marks the bytes written
  // Does not check: outputs start as NaN in tests.
  void download(void* host, const void* device, size_t bytes) override;
  void fill(void* device, unsigned char byte, size_t bytes) override;  // marks the bytes written
  void poison(void* device, size_t bytes) override;                    // NaN patterns; marks the bytes unwritten
  void upload_async(void* device, const void* pinned, size_t bytes) override;
  void download_async(void* pinned, const void* device, size_t bytes) override;
  void fill_async(void* device, unsigned char byte, size_t bytes) override;
  std::unique_ptr<GpuEvent> make_event() override;
  // What a graph holds is everything between: launches, products, copies, births and deaths of tensors. Synchronous
  // copies throw, as they would fail on a GPU.
  std::unique_ptr<GpuGraph> record(const std::function<void()>& work) override;
  bool rerecord(GpuGraph& graph, const std::function<void()>& work) override;
  // Sums in double, rounded once. Checks that every element of a, b, bias (and c, if added to) was written, and that
  // all lie in living tensors. Errors: Fault.
  void product(const GpuProduct& product) override;
  void note_product(const GpuProduct&) override {}
  int tune_products(Tuning&) override { return 0; }
  void set_filter(std::function<bool(std::string_view)>) override {}
  std::string attention_refuses(const GpuAttention&) override { return "the simulator has no cuDNN"; }
  size_t attention_scratch(const GpuAttention&, bool) override { fail("[simulator] has no cuDNN"); }
  void attention(const GpuAttention&, bool, void*) override { fail("[simulator] has no cuDNN"); }
  size_t library_bytes() const override { return 0; }
  size_t bytes_free() const override { return 0; }
  // Kernels may touch only memory between born and died. Nothing of it is written at first. Elements are as large as
  // the dtype says: the shadow has one cell an element.
  void born(void* p, size_t bytes, DType dtype) override;
  void died(void* p) noexcept override;
  std::unique_ptr<SimGpu> make_queue() const;  // another queue of the same machine
  bool on_machine_of(const SimGpu& other) const { return machine_ == other.machine_; }
  // Blocks run in this order from now on. Correct kernels give the same bits in both.
  void set_order(Order order);
  // Whether sectors and shared-memory accesses are counted (they are at first); the rest of Counts always is.
  void set_detailed_counts(bool on);
  const Counts& counts() const;
  void reset_counts();

  // Runs body() once for each thread of a grid. Used by launch(). name must be a literal.
  // Errors: Fault; std::invalid_argument for a grid or block that no GPU accepts.
  struct Body {
    void (*run)(const void* arguments);
    std::shared_ptr<const void> arguments;
  };
  void launch(const char* name, int64_t blocks, int threads, int64_t shared_bytes, Body body);

 protected:
  void* allocate_host(size_t bytes) override;
  void release_host(void* p) noexcept override;

 private:
  explicit SimGpu(std::shared_ptr<Machine> machine);
  struct Graph;
  // Writes a call into the graph that is being recorded; `what` tells calls apart when it is recorded again.
  void note(const char* what, std::function<void()> call);
  void forbid_recording(const char* what) const;
  std::shared_ptr<Machine> machine_;
  Graph* graph_ = nullptr;
};

// ---- What the words of frit/simt call; all of them inside a running kernel. ----
struct Place {
  int thread, threads;  // of the block
  int64_t block, blocks;
};
namespace detail {
extern constinit thread_local const Place* place_of_thread [[gnu::tls_model("initial-exec")]];
}
inline const Place& place() {
  return *detail::place_of_thread;
}
void barrier(const std::source_location& where);
void warp_barrier(uint32_t mask);
void wait_for_previous();
// After this the block is ordered behind all other blocks' accesses that came before their own call (last block done).
void join_after_all_blocks();
// What the block did so far is ordered before a block that calls join_after_all_blocks() behind as many releases.
void release_to_last_block();

// The lanes of `mask` meet: each gives `bytes` (at most kSlotBytes), and gets a pointer to the 32 lanes' slots, valid
// until the lane's next collective. `what` (a literal) names the collective: lanes that meet at different ones throw.
constexpr int kSlotBytes = 64;
struct Slot {
  alignas(16) unsigned char bytes[kSlotBytes];
};
const Slot* gather(uint32_t mask, const char* what, const void* value, int bytes);

// Throws: a shuffle takes the value of a lane that is not in its mask.
[[noreturn]] void source_not_in_mask(int from, uint32_t mask);

// The tensor that lives at p; null if none does.
Region* find_region(const void* p);
// Checks and counts one access to global memory. `region` caches the tensor that p was found in.
void touch_global(const void* p, int bytes, Access access, Region*& region);
// Checks and counts one access to the block's shared memory; returns its address. bytes is 2, 4, 8 or 16.
unsigned char* touch_shared(int64_t offset, int bytes, Access access);
// An asynchronous copy of 4, 8 or 16 bytes: its bytes land when wait_async lets its group through. bytes_valid < bytes
// fills with zeros.
void copy_async(int64_t shared_offset, const void* from, int bytes, int bytes_valid, Region*& region);
void commit_async();
void wait_async(int groups_left);

}  // namespace frit::sim
