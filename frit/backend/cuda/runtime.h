// The NVIDIA GPU behind frit/backend/gpu.h, and what launch() and the library wrappers of this folder see of it.
#pragma once
#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "frit/backend/gpu.h"

namespace frit::cuda {

// Errors: frit::Error naming what was done and the GPU.
void check(cudaError_t error, const char* what, const std::string& gpu);

// What the Gpu does with the calls it gets.
enum class Mode : uint8_t {
  kRun,       // puts them on the stream
  kRecord,    // captures them, and writes them down
  kRerecord,  // compares them with what was written down, and changes a recorded graph's arguments
};

// One call as it was recorded: a kernel with its node, or a library's call, which `identity` tells from others.
struct Recorded {
  cudaGraphNode_t node = nullptr;  // of a kernel
  const void* kernel = nullptr;
  int64_t blocks = 0;
  int threads = 0;
  int64_t shared_bytes = 0;
  std::vector<char> arguments;  // one behind the other
  uint64_t identity = 0;        // of a library's call or a copy; 0: a kernel
};

// FNV-1a over anything without padding: a library call's identity.
uint64_t identity_of(const void* bytes, size_t count, uint64_t hash = 14695981039346656037u);

class Products;   // cuBLASLt, in products.cc
class Attention;  // cuDNN, in attention_cudnn.cc

class CudaGpu : public Gpu {
 public:
  explicit CudaGpu(int index);
  ~CudaGpu() override;

  Device device() const override { return Device::kCuda; }
  std::string name() const override { return name_; }
  int multiprocessors() const override { return properties_.multiProcessorCount; }
  int64_t shared_bytes_limit() const override { return static_cast<int64_t>(properties_.sharedMemPerBlockOptin); }
  void* stream() const override { return stream_; }
  void synchronize() override;
  std::vector<double> time_graph(const std::function<void()>& work, int replays) override;

  void* allocate(size_t bytes) override;
  void release(void* p) noexcept override;
  void upload(void* device, const void* host, size_t bytes) override;
  void download(void* host, const void* device, size_t bytes) override;
  void fill(void* device, unsigned char byte, size_t bytes) override;

  void upload_async(void* device, const void* pinned, size_t bytes) override;
  void download_async(void* pinned, const void* device, size_t bytes) override;
  void fill_async(void* device, unsigned char byte, size_t bytes) override;
  std::unique_ptr<GpuEvent> make_event() override;
  std::unique_ptr<GpuGraph> record(const std::function<void()>& work) override;
  bool rerecord(GpuGraph& graph, const std::function<void()>& work) override;

  void product(const GpuProduct& product) override;
  bool sums_bias_gradient(const GpuProduct& product) override;
  void note_product(const GpuProduct& product) override;
  int tune_products(Tuning& tuning) override;
  void set_filter(std::function<bool(std::string_view)> runs) override { filter_ = std::move(runs); }
  void begin_range(const char* name) override;
  void end_range() override;
  std::string attention_refuses(const GpuAttention& attention) override;
  size_t attention_scratch(const GpuAttention& attention, bool backward) override;
  void attention(const GpuAttention& attention, bool backward, void* scratch) override;
  size_t library_bytes() const override;
  size_t bytes_free() const override;

  // One kernel launch as the run time takes it: pointers to `count` arguments and their sizes.
  struct Kernel {
    const char* name;
    const void* function;
    int64_t blocks;
    int threads;
    int64_t shared_bytes;
    void** arguments;
    const size_t* sizes;
    int count;
  };
  // Its start may overlap the end of the kernel before it (programmatic dependent launch). Errors: frit::Error naming
  // the kernel, its grid and the GPU.
  void launch(const Kernel& kernel);

  // False if the filter leaves out what has this name. Every library call asks this first of all.
  bool runs(std::string_view name) const { return !filter_ || filter_(name); }
  // True if a library's call (or a copy) with this identity is to be put on the stream now; false while rerecording,
  // where it must be the one that was recorded. Every library call asks first.
  bool begin_call(uint64_t identity);
  Mode mode() const { return mode_; }
  cudaStream_t cuda_stream() const { return stream_; }

 protected:
  void* allocate_host(size_t bytes) override;
  void release_host(void* p) noexcept override;

 private:
  struct Graph;
  int index_;
  cudaDeviceProp properties_ = {};
  std::string name_;
  cudaStream_t stream_ = nullptr;
  Mode mode_ = Mode::kRun;
  Graph* graph_ = nullptr;  // being recorded
  size_t next_ = 0;         // the call that rerecording expects
  bool same_ = true;
  std::unique_ptr<Products> products_;
  std::function<bool(std::string_view)> filter_;
  std::unique_ptr<Attention> attention_;
};

}  // namespace frit::cuda
