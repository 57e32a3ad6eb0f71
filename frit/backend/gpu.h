// Gpu: what a Context needs of a GPU. backend/cuda implements it on NVIDIA's run time, backend/sim on the simulator.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "frit/backend/tuning.h"
#include "frit/core/device_memory.h"

namespace frit {

// One product as the GPU's library takes it, row-major: c = op(a) * op(b) [+ bias] [+ c], summed in fp32.
struct GpuProduct {
  const void *a = nullptr, *b = nullptr;
  void* c = nullptr;
  const void* bias = nullptr;  // [n], optional; of c's type, at a multiple of 16 bytes
  DType dtype = DType::kF32, c_dtype = DType::kF32, bias_dtype = DType::kF32;  // dtype: of a and b
  int64_t m = 0, n = 0, k = 0, batch = 1;
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;  // elements between stored rows
  int64_t a_step = 0, b_step = 0, c_step = 0;        // elements between the matrices of a batch
  bool transpose_a = false, transpose_b = false, accumulate = false;
  // [m] of c's type, optional: overwritten with the sums of the rows of op(a). Only where sums_bias_gradient() says so.
  void* bias_gradient = nullptr;
};

// One attention over packed sequences as the GPU's library takes it; f16 or bf16 alone. What it computes is in
// frit/ops/attention/attention.h, but that dropout has the library's own generator. Query i sees keys j <= i where
// causal.
struct GpuAttention {
  // A [tokens, heads, width], or what has one number in the place of `width` (lse).
  struct Packed {
    void* data = nullptr;
    int64_t stride = 0;               // elements from token to token
    const int64_t* begins = nullptr;  // i64 [sequences + 1] on the device: the first element of each sequence
  };
  DType dtype = DType::kBF16;
  int64_t sequences = 0, heads = 0, width = 0;
  int64_t longest_q = 0, longest_k = 0;
  bool causal = false;
  float scale = 1, p_drop = 0;
  Packed q, k, v, out, lse;            // lse: f32
  Packed dout, dq, dk, dv;             // backward
  const int32_t* q_lengths = nullptr;  // i32 [sequences] on the device
  const int32_t* k_lengths = nullptr;
  const int64_t* random = nullptr;  // i64 [2] on the device, if p_drop > 0: seed, and where its numbers begin
};

// Work that was recorded, to be run again and again without the calls that made it.
class GpuGraph {
 public:
  virtual ~GpuGraph() = default;
  // Puts the work on the stream. Errors: frit::Error.
  virtual void launch() = 0;
};

// A point on the stream.
class GpuEvent {
 public:
  virtual ~GpuEvent() = default;
  virtual void record() = 0;
  // True once all work before the last record() is done (or nothing was recorded). Never waits. Errors: frit::Error if
  // the work failed.
  virtual bool done() = 0;
  // Device time from `earlier` to this; both done. 0 in the simulator, which has no clock.
  virtual double milliseconds_since(const GpuEvent& earlier) const = 0;
};

// Host memory that the GPU copies from and to without a detour: what the asynchronous copies take.
struct FreePinned {
  class Gpu* gpu = nullptr;
  void operator()(char* p) const;
};
using PinnedBlock = std::unique_ptr<char, FreePinned>;

class Gpu : public DeviceMemory {
 public:
  virtual std::string name() const = 0;  // "NVIDIA H200", "simulator"
  virtual int multiprocessors() const = 0;
  // Bytes of shared memory a block may have.
  virtual int64_t shared_bytes_limit() const = 0;
  // The stream that work is put on (a cudaStream_t); null in the simulator.
  virtual void* stream() const = 0;
  // Waits for all work. Errors: frit::Error if the device reports one.
  virtual void synchronize() = 0;
  // Runs work() once, captures it as a graph, replays that `replays` times, and returns the microseconds each replay
  // took by the device's own clock. Errors: frit::Error in the simulator, which has no clock.
  virtual std::vector<double> time_graph(const std::function<void()>& work, int replays) = 0;
  // Kernels launched since the Gpu was made.
  int64_t launches() const { return launches_; }

  // Copies and fills that return at once and take their turn on the stream. The host's side is pinned memory, and stays
  // as it is until an event behind the copy is done.
  virtual void upload_async(void* device, const void* pinned, size_t bytes) = 0;
  virtual void download_async(void* pinned, const void* device, size_t bytes) = 0;
  virtual void fill_async(void* device, unsigned char byte, size_t bytes) = 0;
  // Errors: frit::Error if there is no memory.
  PinnedBlock allocate_pinned(size_t bytes) { return PinnedBlock(static_cast<char*>(allocate_host(bytes)), {this}); }
  virtual std::unique_ptr<GpuEvent> make_event() = 0;

  // Records what work() puts on the stream, instead of running it. Errors: frit::Error; what work() throws.
  virtual std::unique_ptr<GpuGraph> record(const std::function<void()>& work) = 0;
  // Runs work() again to change a recorded graph: kernels and library calls must come in the same order, kernels may
  // have other grids and arguments. What is on the stream already is not touched. False if work() does anything else:
  // the graph is then of no use any more.
  virtual bool rerecord(GpuGraph& graph, const std::function<void()>& work) = 0;

  // Puts one product on the stream, by the algorithm that tune_products() found for its shape, or else by the library's
  // first proposal. `scratch` of the library is the Gpu's own. Deterministic. Errors: frit::Error naming the shape if
  // the library refuses.
  virtual void product(const GpuProduct& product) = 0;
  // True if product() computes this product's bias_gradient along with it: a question of shape, types and alignment.
  virtual bool sums_bias_gradient(const GpuProduct& /*product*/) { return false; }
  // While an operator plans: notes that such a product will come (addresses do not count).
  virtual void note_product(const GpuProduct& product) = 0;
  // Times the library's proposals for every noted product that `tuning` does not know, and adds what it found. Later
  // products use `tuning`, which must outlive the Gpu's use. Returns how many shapes were timed. In the simulator: 0.
  virtual int tune_products(Tuning& tuning) = 0;

  // From now on only the work for which runs(name) is true is put on the stream: kernels by their names, "product",
  // "attention_cudnn", "copy", "fill". To time parts of a step apart; what is computed is then worth nothing. nullptr:
  // all of it. Nothing is left out in the simulator.
  virtual void set_filter(std::function<bool(std::string_view name)> runs) = 0;

  // A named range of the host's work, for profilers (NVTX). Ranges nest.
  virtual void begin_range(const char* /*name*/) {}
  virtual void end_range() {}
  // Why the GPU's library for attention (cuDNN) does not take such a call, forward or backward; "" if it takes both.
  // Addresses do not count. Builds what calls of this shape need and keeps it, which takes up to some seconds:
  // operators ask while they plan.
  virtual std::string attention_refuses(const GpuAttention& attention) = 0;
  // Bytes of scratch on the device that a call takes. Errors: frit::Error if the library refuses it.
  virtual size_t attention_scratch(const GpuAttention& attention, bool backward) = 0;
  // Puts a call on the stream. Deterministic. Errors: frit::Error naming the shape if the library refuses.
  virtual void attention(const GpuAttention& attention, bool backward, void* scratch) = 0;

  // Bytes that the Gpu itself and its libraries hold: scratch of products. bytes_free: of the device now; the simulator
  // has no limit and says 0.
  virtual size_t library_bytes() const = 0;
  virtual size_t bytes_free() const = 0;

 protected:
  friend struct Launcher;
  friend struct FreePinned;
  virtual void* allocate_host(size_t bytes) = 0;
  virtual void release_host(void* p) noexcept = 0;
  int64_t launches_ = 0;
};

inline void FreePinned::operator()(char* p) const {
  gpu->release_host(p);
}

// The GPU of this build: number `index` of the machine's NVIDIA GPUs, or the simulator in a build without CUDA.
// Errors: frit::Error if there is no such GPU.
std::unique_ptr<Gpu> make_gpu(int index = 0);
// True in a build with CUDA: make_gpu() is a real one.
bool built_with_cuda();
// True in a build with CUDA whose Gpu::attention() is cuDNN's.
bool built_with_cudnn();

// A range that ends with it; nothing without a GPU.
class GpuRange {
 public:
  GpuRange(Gpu* gpu, const char* name) : gpu_(gpu) {
    if (gpu_) gpu_->begin_range(name);
  }
  ~GpuRange() {
    if (gpu_) gpu_->end_range();
  }
  GpuRange(const GpuRange&) = delete;
  GpuRange& operator=(const GpuRange&) = delete;

 private:
  Gpu* gpu_;
};

}  // namespace frit
