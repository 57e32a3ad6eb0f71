// SimGpu: recorded work, events, asynchronous copies. Everything asynchronous happens at once.
#include <cstdlib>
#include <cstring>

#include "frit/backend/sim/internal.h"
#include "frit/backend/sim/machine.h"
#include "frit/core/error.h"

namespace frit::sim {
namespace {

struct Event : GpuEvent {
  void record() override {}
  bool done() override { return true; }
  double milliseconds_since(const GpuEvent&) const override { return 0; }
};

}  // namespace

struct SimGpu::Graph : GpuGraph {
  explicit Graph(SimGpu& owner) : gpu(owner) {}
  void launch() override {
    if (gpu.graph_) fail("[simulator] a graph is launched while one is being recorded");
    for (const auto& [what, call] : calls) call();
  }
  SimGpu& gpu;
  std::vector<std::pair<const char*, std::function<void()>>> calls;
};

void SimGpu::note(const char* what, std::function<void()> call) {
  graph_->calls.emplace_back(what, std::move(call));
}
void SimGpu::forbid_recording(const char* what) const {
  if (graph_) fail("[simulator] {} waits for the GPU, which cannot be recorded", what);
}

std::unique_ptr<GpuGraph> SimGpu::record(const std::function<void()>& work) {
  if (graph_) fail("[simulator] a graph is being recorded already");
  auto made = std::make_unique<Graph>(*this);
  graph_ = made.get();
  struct Stop {
    Graph*& graph;
    ~Stop() { graph = nullptr; }
  } stop{graph_};
  work();
  return made;
}

bool SimGpu::rerecord(GpuGraph& graph, const std::function<void()>& work) {
  auto& was = static_cast<Graph&>(graph);
  auto now = record(work);
  auto& calls = static_cast<Graph&>(*now).calls;
  bool same = calls.size() == was.calls.size();
  for (size_t i = 0; same && i < calls.size(); ++i) same = std::strcmp(calls[i].first, was.calls[i].first) == 0;
  was.calls = std::move(calls);
  return same;
}

std::unique_ptr<GpuEvent> SimGpu::make_event() {
  return std::make_unique<Event>();
}

void SimGpu::upload_async(void* device, const void* pinned, size_t bytes) {
  if (graph_) return note("upload", [this, device, pinned, bytes] { upload(device, pinned, bytes); });
  upload(device, pinned, bytes);
}
void SimGpu::download_async(void* pinned, const void* device, size_t bytes) {
  if (graph_) return note("download", [this, pinned, device, bytes] { download(pinned, device, bytes); });
  download(pinned, device, bytes);
}
void SimGpu::fill_async(void* device, unsigned char byte, size_t bytes) {
  if (graph_) return note("fill", [this, device, byte, bytes] { fill(device, byte, bytes); });
  fill(device, byte, bytes);
}

void* SimGpu::allocate_host(size_t bytes) {
  void* p = std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
  if (!p) fail("[simulator] no memory for {} bytes", bytes);
  // Kernels may touch it, too. When the host writes to it is not seen: it counts as written.
  const std::lock_guard lock(machine_->mutex);
  born(p, bytes, DType::kU8);
  machine_->mark(p, bytes, true);
  return p;
}
void SimGpu::release_host(void* p) noexcept {
  died(p);
  std::free(p);
}

}  // namespace frit::sim
