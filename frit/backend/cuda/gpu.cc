// The NVIDIA GPU behind frit/backend/gpu.h: device, stream, memory.
#include <cuda_runtime_api.h>

#include "frit/backend/gpu.h"

namespace frit {
namespace {

void check(cudaError_t error, const char* what, const std::string& gpu) {
  if (error != cudaSuccess) fail("[cuda] {} failed on {}: {}", what, gpu, cudaGetErrorString(error));
}

class CudaGpu : public Gpu {
 public:
  explicit CudaGpu(int index) : index_(index) {
    int count = 0;
    const cudaError_t found = cudaGetDeviceCount(&count);
    if (found != cudaSuccess) fail("[cuda] no GPU can be used: {}", cudaGetErrorString(found));
    if (index < 0 || index >= count) fail("[cuda] there is no GPU {}, the machine has {}", index, count);
    check(cudaSetDevice(index), "cudaSetDevice", fmt::format("GPU {}", index));
    check(cudaGetDeviceProperties(&properties_, index), "cudaGetDeviceProperties", fmt::format("GPU {}", index));
    name_ = properties_.name;
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate", name_);
  }
  ~CudaGpu() override { cudaStreamDestroy(stream_); }

  Device device() const override { return Device::kCuda; }
  std::string name() const override { return name_; }
  int multiprocessors() const override { return properties_.multiProcessorCount; }
  int64_t shared_bytes_limit() const override { return static_cast<int64_t>(properties_.sharedMemPerBlockOptin); }
  void* stream() const override { return stream_; }
  void synchronize() override { check(cudaStreamSynchronize(stream_), "waiting", name_); }

  void* allocate(size_t bytes) override {
    void* p = nullptr;
    if (cudaMalloc(&p, bytes) != cudaSuccess) {
      cudaGetLastError();  // it is reported here, and must not show up at the next call
      size_t free_bytes = 0, total = 0;
      cudaMemGetInfo(&free_bytes, &total);
      fail("[cuda] {} has no room for {} bytes ({} of {} are free)", name_, bytes, free_bytes, total);
    }
    return p;
  }
  void release(void* p) noexcept override { cudaFree(p); }
  void upload(void* device, const void* host, size_t bytes) override {
    check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_), "copying to the GPU", name_);
    synchronize();
  }
  void download(void* host, const void* device, size_t bytes) override {
    check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_), "copying from the GPU", name_);
    synchronize();
  }
  void fill(void* device, unsigned char byte, size_t bytes) override {
    check(cudaMemsetAsync(device, byte, bytes, stream_), "filling", name_);
    synchronize();
  }

  std::vector<double> time_graph(const std::function<void()>& work, int replays) override {
    work();  // loads modules, sets attributes
    synchronize();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "beginning to capture", name_);
    try {
      work();
    } catch (...) {
      cudaStreamEndCapture(stream_, &graph);
      if (graph) cudaGraphDestroy(graph);
      throw;
    }
    check(cudaStreamEndCapture(stream_, &graph), "capturing", name_);
    const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "instantiating a graph", name_);
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "creating an event", name_);
    check(cudaEventCreate(&end), "creating an event", name_);
    std::vector<double> times;
    for (int i = 0; i < replays + 2; ++i) {  // the first two warm up
      check(cudaEventRecord(begin, stream_), "recording an event", name_);
      check(cudaGraphLaunch(executable, stream_), "launching a graph", name_);
      check(cudaEventRecord(end, stream_), "recording an event", name_);
      synchronize();
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "reading an event", name_);
      if (i >= 2) times.push_back(1e3 * ms);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(executable);
    return times;
  }

 private:
  int index_;
  cudaDeviceProp properties_ = {};
  std::string name_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

std::unique_ptr<Gpu> make_gpu(int index) {
  return std::make_unique<CudaGpu>(index);
}
bool built_with_cuda() {
  return true;
}

}  // namespace frit
