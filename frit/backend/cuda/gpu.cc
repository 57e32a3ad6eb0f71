// Device, stream, memory, launches and graphs of an NVIDIA GPU.
#include <nvtx3/nvToolsExt.h>

#include <cstring>
#include <limits>

#include "frit/backend/cuda/attention.h"
#include "frit/backend/cuda/products.h"
#include "frit/backend/cuda/runtime.h"
#include "frit/backend/queue.h"

namespace frit {
namespace cuda {

void check(cudaError_t error, const char* what, const std::string& gpu) {
  if (error != cudaSuccess) fail("[cuda] {} failed on {}: {}", what, gpu, cudaGetErrorString(error));
}

uint64_t identity_of(const void* bytes, size_t count, uint64_t hash) {
  for (size_t i = 0; i < count; ++i) hash = (hash ^ static_cast<const unsigned char*>(bytes)[i]) * 1099511628211u;
  return hash | 1;  // never 0, which says "a kernel"
}

namespace {

class Event : public GpuEvent {
 public:
  Event(cudaStream_t stream, const std::string& gpu) : stream_(stream), gpu_(gpu) {
    check(cudaEventCreate(&event_), "creating an event", gpu_);
  }
  ~Event() override { cudaEventDestroy(event_); }
  void record() override { check(cudaEventRecord(event_, stream_), "recording an event", gpu_); }
  bool done() override {
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) return false;
    check(error, "the work on the stream", gpu_);
    return true;
  }
  double milliseconds_since(const GpuEvent& earlier) const override {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, static_cast<const Event&>(earlier).event_, event_), "reading an event", gpu_);
    return ms;
  }

 private:
  cudaStream_t stream_;
  const std::string gpu_;
  cudaEvent_t event_ = nullptr;
};

// What tells one copy or fill from another.
struct CopyIdentity {
  uint64_t kind;
  const void *to, *from;
  uint64_t bytes;
};

}  // namespace

struct CudaGpu::Graph : GpuGraph {
  explicit Graph(CudaGpu& owner) : gpu(owner) {}
  ~Graph() override {
    if (executable) cudaGraphExecDestroy(executable);
    if (graph) cudaGraphDestroy(graph);
  }
  void launch() override { check(cudaGraphLaunch(executable, gpu.stream_), "launching a graph", gpu.name_); }

  CudaGpu& gpu;
  cudaGraph_t graph = nullptr;  // its nodes name those of the executable
  cudaGraphExec_t executable = nullptr;
  std::vector<Recorded> calls;
};

CudaGpu::CudaGpu(int index) : index_(index) {
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (found != cudaSuccess) {
    int driver = 0;  // its version; 0: there is none, which the library calls too old
    const bool none = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    fail("[cuda] no GPU can be used: {}", none ? "no NVIDIA driver is installed" : cudaGetErrorString(found));
  }
  if (index < 0 || index >= count) fail("[cuda] there is no GPU {}, the machine has {}", index, count);
  check(cudaSetDevice(index), "cudaSetDevice", fmt::format("GPU {}", index));
  check(cudaGetDeviceProperties(&properties_, index), "cudaGetDeviceProperties", fmt::format("GPU {}", index));
  name_ = properties_.name;
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate", name_);
  products_ = std::make_unique<Products>(*this);
  attention_ = std::make_unique<Attention>(*this);
}
CudaGpu::~CudaGpu() {
  attention_.reset();
  products_.reset();
  cudaStreamDestroy(stream_);
}

void CudaGpu::synchronize() {
  check(cudaStreamSynchronize(stream_), "waiting", name_);
}

void* CudaGpu::allocate(size_t bytes) {
  void* p = nullptr;
  if (cudaMalloc(&p, bytes) != cudaSuccess) {
    cudaGetLastError();  // it is reported here, and must not show up at the next call
    size_t free_bytes = 0, total = 0;
    cudaMemGetInfo(&free_bytes, &total);
    fail("[cuda] {} has no room for {} bytes ({} of {} are free)", name_, bytes, free_bytes, total);
  }
  return p;
}
void CudaGpu::release(void* p) noexcept {
  cudaFree(p);
}
void* CudaGpu::allocate_host(size_t bytes) {
  void* p = nullptr;
  check(cudaHostAlloc(&p, std::max<size_t>(bytes, 1), cudaHostAllocDefault), "allocating pinned memory", name_);
  return p;
}
void CudaGpu::release_host(void* p) noexcept {
  cudaFreeHost(p);
}
size_t CudaGpu::bytes_free() const {
  size_t free_bytes = 0, total = 0;
  check(cudaMemGetInfo(&free_bytes, &total), "asking for free memory", name_);
  return free_bytes;
}

void CudaGpu::upload(void* device, const void* host, size_t bytes) {
  check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_), "copying to the GPU", name_);
  synchronize();
}
void CudaGpu::download(void* host, const void* device, size_t bytes) {
  check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_), "copying from the GPU", name_);
  synchronize();
}
void CudaGpu::fill(void* device, unsigned char byte, size_t bytes) {
  check(cudaMemsetAsync(device, byte, bytes, stream_), "filling", name_);
  synchronize();
}

bool CudaGpu::begin_call(uint64_t identity) {
  if (mode_ == Mode::kRun) return true;
  if (mode_ == Mode::kRecord) {
    graph_->calls.emplace_back().identity = identity;
    return true;
  }
  same_ = same_ && next_ < graph_->calls.size() && graph_->calls[next_].identity == identity;
  ++next_;
  return false;
}

void CudaGpu::upload_async(void* device, const void* pinned, size_t bytes) {
  if (!runs("copy")) return;
  const CopyIdentity copy{1, device, pinned, bytes};
  if (!begin_call(identity_of(&copy, sizeof(copy)))) return;
  check(cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyHostToDevice, stream_), "copying to the GPU", name_);
}
void CudaGpu::download_async(void* pinned, const void* device, size_t bytes) {
  if (!runs("copy")) return;
  const CopyIdentity copy{2, pinned, device, bytes};
  if (!begin_call(identity_of(&copy, sizeof(copy)))) return;
  check(cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, stream_), "copying from the GPU", name_);
}
void CudaGpu::fill_async(void* device, unsigned char byte, size_t bytes) {
  if (!runs("fill")) return;
  const CopyIdentity copy{uint64_t{3} << 8 | byte, device, nullptr, bytes};
  if (!begin_call(identity_of(&copy, sizeof(copy)))) return;
  check(cudaMemsetAsync(device, byte, bytes, stream_), "filling", name_);
}
std::unique_ptr<GpuEvent> CudaGpu::make_event() {
  return std::make_unique<Event>(stream_, name_);
}

void CudaGpu::launch(const Kernel& k) {
  if (!runs(k.name)) return;
  const auto checked = [&](cudaError_t error) {
    if (error != cudaSuccess)
      fail("[{}] cannot launch {} blocks of {} threads with {} bytes of shared memory on {}: {}", k.name, k.blocks,
           k.threads, k.shared_bytes, name_, cudaGetErrorString(error));
  };
  if (k.blocks > std::numeric_limits<int>::max()) checked(cudaErrorInvalidConfiguration);
  if (k.shared_bytes > 48 * 1024) {
    // As much as there is, whatever this launch takes: the attribute is the function's, and another thread that
    // launches it with less must not take from this one.
    cudaFuncAttributes attributes;
    checked(cudaFuncGetAttributes(&attributes, k.function));
    checked(
        cudaFuncSetAttribute(k.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes_limit()) - static_cast<int>(attributes.sharedSizeBytes)));
  }
  if (mode_ != Mode::kRerecord) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(k.blocks));
    config.blockDim = dim3(static_cast<unsigned>(k.threads));
    config.dynamicSmemBytes = static_cast<size_t>(k.shared_bytes);
    config.stream = stream_;
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &overlap;
    config.numAttrs = 1;
    checked(cudaLaunchKernelExC(&config, k.function, k.arguments));
  }
  if (mode_ == Mode::kRun) return;

  std::vector<char> arguments;
  for (int i = 0; i < k.count; ++i) {
    const char* from = static_cast<const char*>(k.arguments[i]);
    arguments.insert(arguments.end(), from, from + k.sizes[i]);
  }
  if (mode_ == Mode::kRecord) {
    cudaStreamCaptureStatus status;
    const cudaGraphNode_t* last = nullptr;
    size_t count = 0;
    checked(cudaStreamGetCaptureInfo(stream_, &status, nullptr, nullptr, &last, nullptr, &count));
    if (count != 1) fail("[{}] a recorded kernel leaves {} ends on the stream, expected 1", k.name, count);
    graph_->calls.push_back({last[0], k.function, k.blocks, k.threads, k.shared_bytes, std::move(arguments), 0});
    return;
  }
  Recorded* was = next_ < graph_->calls.size() ? &graph_->calls[next_] : nullptr;
  ++next_;
  same_ = same_ && was && was->identity == 0;
  if (!same_) return;
  if (was->kernel == k.function && was->blocks == k.blocks && was->threads == k.threads &&
      was->shared_bytes == k.shared_bytes && was->arguments == arguments)
    return;
  cudaKernelNodeParams parameters = {};
  parameters.func = const_cast<void*>(k.function);
  parameters.gridDim = dim3(static_cast<unsigned>(k.blocks));
  parameters.blockDim = dim3(static_cast<unsigned>(k.threads));
  parameters.sharedMemBytes = static_cast<unsigned>(k.shared_bytes);
  parameters.kernelParams = k.arguments;
  if (cudaGraphExecKernelNodeSetParams(graph_->executable, was->node, &parameters) != cudaSuccess) {
    cudaGetLastError();  // the graph cannot be changed like this: it is recorded anew
    same_ = false;
    return;
  }
  was->kernel = k.function, was->blocks = k.blocks, was->threads = k.threads, was->shared_bytes = k.shared_bytes;
  was->arguments = std::move(arguments);
}

std::unique_ptr<GpuGraph> CudaGpu::record(const std::function<void()>& work) {
  if (mode_ != Mode::kRun) fail("[cuda] a graph is being recorded on {} already", name_);
  auto made = std::make_unique<Graph>(*this);
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "beginning to capture", name_);
  mode_ = Mode::kRecord, graph_ = made.get();
  try {
    work();
  } catch (...) {
    mode_ = Mode::kRun, graph_ = nullptr;
    cudaStreamEndCapture(stream_, &made->graph);
    throw;
  }
  mode_ = Mode::kRun, graph_ = nullptr;
  check(cudaStreamEndCapture(stream_, &made->graph), "capturing", name_);
  check(cudaGraphInstantiate(&made->executable, made->graph, 0), "instantiating a graph", name_);
  check(cudaGraphUpload(made->executable, stream_), "uploading a graph", name_);
  return made;
}

bool CudaGpu::rerecord(GpuGraph& graph, const std::function<void()>& work) {
  if (mode_ != Mode::kRun) fail("[cuda] a graph is being recorded on {} already", name_);
  mode_ = Mode::kRerecord, graph_ = &static_cast<Graph&>(graph), next_ = 0, same_ = true;
  const auto end = [&] {
    same_ = same_ && next_ == graph_->calls.size();
    mode_ = Mode::kRun, graph_ = nullptr;
  };
  try {
    work();
  } catch (...) {
    end();
    throw;
  }
  end();
  return same_;
}

std::vector<double> CudaGpu::time_graph(const std::function<void()>& work, int replays) {
  work();  // loads modules, sets attributes
  synchronize();
  const std::unique_ptr<GpuGraph> graph = record(work);
  Event begin(stream_, name_), end(stream_, name_);
  std::vector<double> times;
  for (int i = 0; i < replays + 2; ++i) {  // the first two warm up
    begin.record();
    graph->launch();
    end.record();
    synchronize();
    if (i >= 2) times.push_back(1e3 * end.milliseconds_since(begin));
  }
  return times;
}

void CudaGpu::product(const GpuProduct& product) {
  if (runs("product")) products_->run(product);
}
bool CudaGpu::sums_bias_gradient(const GpuProduct& product) {
  return products_->sums_bias_gradient(product);
}
void CudaGpu::note_product(const GpuProduct& product) {
  products_->note(product);
}
int CudaGpu::tune_products(Tuning& tuning) {
  return products_->tune(tuning);
}
void CudaGpu::begin_range(const char* name) {
  nvtxRangePushA(name);
}
void CudaGpu::end_range() {
  nvtxRangePop();
}
std::string CudaGpu::attention_refuses(const GpuAttention& attention) {
  return attention_->refuses(attention);
}
size_t CudaGpu::attention_scratch(const GpuAttention& attention, bool backward) {
  return attention_->scratch_bytes(attention, backward);
}
void CudaGpu::attention(const GpuAttention& attention, bool backward, void* scratch) {
  if (runs("attention_cudnn")) attention_->run(attention, backward, scratch);
}
size_t CudaGpu::library_bytes() const {
  return products_->scratch_bytes();
}

}  // namespace cuda

std::unique_ptr<Gpu> make_gpu(int index) {
  return std::make_unique<cuda::CudaGpu>(index);
}
namespace {
int index_of(const Gpu& gpu) {
  int index = 0;
  cuda::check(cudaStreamGetDevice(static_cast<cudaStream_t>(gpu.stream()), &index), "asking for a stream's device",
              gpu.name());
  return index;
}
}  // namespace

std::unique_ptr<Gpu> make_queue(Gpu& gpu) {
  return make_gpu(index_of(gpu));
}
bool same_device(const Gpu& a, const Gpu& b) {
  return &a == &b || index_of(a) == index_of(b);
}

bool built_with_cuda() {
  return true;
}

}  // namespace frit
