// SimGpu: the simulator's memory and its launches.
#include "frit/backend/sim/machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>

#include "frit/backend/sim/internal.h"
#include "frit/core/error.h"

namespace frit {

namespace sim {

namespace {

constexpr size_t kMapBytes = size_t{64} << 20;  // from here on memory is mapped: pages nobody touches cost nothing
constexpr size_t kSharedLimit = 227 * 1024;

void* map_pages(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}
size_t cell_bytes(const Region& region) {
  return region.elements() * sizeof(Cell);
}

}  // namespace

Machine::Machine() : threads(1024), warps(32) {
  for (int t = 0; t < 1024; ++t) {
    Thread& thread = threads[static_cast<size_t>(t)];
    thread.place.thread = t;
    thread.warp = &warps[static_cast<size_t>(t / 32)];
    thread.bit = 1u << (t % 32);
  }
  for (int w = 0; w < 32; ++w) {
    warps[static_cast<size_t>(w)].index = w;
    lane_sets[static_cast<size_t>(w)] = {0xffffffffu, static_cast<uint16_t>(w), 0};
  }
  shared = static_cast<unsigned char*>(std::aligned_alloc(256, kSharedLimit));
  shared_cells = static_cast<Cell*>(std::calloc(kSharedLimit / 2, sizeof(Cell)));
  if (!shared || !shared_cells) fail("[simulator] no memory for a block's shared memory");
}

Machine::~Machine() {
  for (auto& [address, region] : living) drop_cells(*region);
  for (auto& [p, allocation] : allocations) {
    if (allocation.mapped)
      munmap(p, allocation.bytes);
    else
      std::free(p);
  }
  drop_fibers();
  std::free(shared);
  std::free(shared_cells);
}

Region* Machine::find(uintptr_t p) const {
  auto it = living.upper_bound(p);
  if (it == living.begin()) return nullptr;
  Region* region = std::prev(it)->second;
  return p - region->begin < region->bytes ? region : nullptr;
}

void Machine::drop_cells(Region& region) {
  if (region.mapped)
    munmap(region.cells, cell_bytes(region));
  else
    std::free(region.cells);
  region.cells = nullptr;
}
void Machine::clear_cells(Region& region) {
  if (region.mapped)
    madvise(region.cells, cell_bytes(region), MADV_DONTNEED);
  else
    std::memset(region.cells, 0, cell_bytes(region));
}

// What the host wrote or poisoned; it is ordered before all that follows.
void Machine::mark(void* p, size_t bytes, bool written) {
  uintptr_t at = reinterpret_cast<uintptr_t>(p);
  const uintptr_t end = at + bytes;
  while (at < end) {
    Region* region = find(at);
    if (!region) {
      const auto next = living.upper_bound(at);
      if (next == living.end()) return;
      at = next->first;
      continue;
    }
    const uint64_t offset = at - region->begin, last = std::min<uint64_t>(region->bytes, end - region->begin);
    if (offset == 0 && last == region->bytes) {
      clear_cells(*region);
      region->filled = written;
    } else {
      if (region->filled && !written) {
        for (uint64_t i = 0; i < region->elements(); ++i) region->cells[i].writer |= kValid;
        region->filled = false;
      }
      for (uint64_t i = offset >> region->shift; i << region->shift < last; ++i)
        region->cells[i] = {written ? kValid : 0, 0};
    }
    at = region->begin + region->bytes;
  }
}

// Serial numbers begin again: what was recorded becomes "before everything".
void Machine::renumber() {
  serial = 0;
  for (auto& [address, region] : living)
    for (uint64_t i = 0; i < region->elements(); ++i) region->cells[i] = {region->cells[i].writer & kValid, 0};
  std::memset(shared_cells, 0, kSharedLimit / 2 * sizeof(Cell));
}

SimGpu::SimGpu() : SimGpu(std::make_shared<Machine>()) {}
SimGpu::SimGpu(std::shared_ptr<Machine> machine) : machine_(std::move(machine)) {}
SimGpu::~SimGpu() = default;
std::unique_ptr<SimGpu> SimGpu::make_queue() const {
  return std::unique_ptr<SimGpu>(new SimGpu(machine_));
}

void* SimGpu::allocate(size_t bytes) {
  const bool mapped = bytes >= kMapBytes;
  const size_t rounded = (std::max<size_t>(bytes, 1) + 255) / 256 * 256;
  void* p = mapped ? map_pages(rounded) : std::aligned_alloc(256, rounded);
  if (!p) fail("[simulator] no memory for {} bytes", bytes);
  const std::lock_guard lock(machine_->mutex);
  machine_->allocations[p] = {rounded, mapped};
  return p;
}

void SimGpu::release(void* p) noexcept {
  if (!p) return;
  const std::lock_guard lock(machine_->mutex);
  const auto it = machine_->allocations.find(p);
  if (it == machine_->allocations.end()) return;
  if (it->second.mapped)
    munmap(p, it->second.bytes);
  else
    std::free(p);
  machine_->allocations.erase(it);
}

void SimGpu::upload(void* device, const void* host, size_t bytes) {
  forbid_recording("upload");
  if (bytes == 0) return;
  const std::lock_guard lock(machine_->mutex);
  std::memcpy(device, host, bytes);
  machine_->mark(device, bytes, true);
}
void SimGpu::download(void* host, const void* device, size_t bytes) {
  forbid_recording("download");
  const std::lock_guard lock(machine_->mutex);
  if (bytes) std::memcpy(host, device, bytes);
}
void SimGpu::fill(void* device, unsigned char byte, size_t bytes) {
  forbid_recording("fill");
  if (bytes == 0) return;
  const std::lock_guard lock(machine_->mutex);
  const auto it = machine_->allocations.find(device);
  if (byte == 0 && it != machine_->allocations.end() && it->second.mapped &&
      (bytes + 255) / 256 * 256 == it->second.bytes)
    madvise(device, it->second.bytes, MADV_DONTNEED);  // pages of zeros that cost nothing
  else
    std::memset(device, byte, bytes);
  machine_->mark(device, bytes, true);
}

void SimGpu::poison(void* device, size_t bytes) {
  if (bytes == 0) return;
  if (graph_) return note("poison", [this, device, bytes] { poison(device, bytes); });
  const std::lock_guard lock(machine_->mutex);
  std::memset(device, 0xff, bytes);
  machine_->mark(device, bytes, false);
}

void SimGpu::born(void* p, size_t bytes, DType dtype) {
  if (bytes == 0) return;
  if (graph_) return note("born", [this, p, bytes, dtype] { born(p, bytes, dtype); });
  const std::lock_guard lock(machine_->mutex);
  Machine& m = *machine_;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(p);
  const auto after = m.living.lower_bound(begin);
  FRIT_CHECK((after == m.living.end() || after->first >= begin + bytes) && !m.find(begin),
             "[simulator] a tensor of {} bytes is born at {} over one that lives", bytes, p);
  if (m.free_regions.empty()) {
    m.regions.push_back(std::make_unique<Region>());
    m.free_regions.push_back(m.regions.back().get());
  }
  Region& region = *m.free_regions.back();
  region.begin = begin, region.bytes = bytes, region.dtype = dtype, region.filled = false;
  region.shift = std::countr_zero(static_cast<uint64_t>(size_of(dtype)));
  region.mapped = cell_bytes(region) >= kMapBytes;
  region.cells =
      static_cast<Cell*>(region.mapped ? map_pages(cell_bytes(region)) : std::calloc(region.elements(), sizeof(Cell)));
  if (!region.cells) fail("[simulator] no memory for the shadow of a tensor of {} bytes", bytes);
  m.living[begin] = &region;
  m.free_regions.pop_back();
}

void SimGpu::died(void* p) noexcept {
  if (graph_) return note("died", [this, p] { died(p); });
  const std::lock_guard lock(machine_->mutex);
  Machine& m = *machine_;
  const auto it = m.living.find(reinterpret_cast<uintptr_t>(p));
  if (it == m.living.end()) return;
  Region& region = *it->second;
  m.drop_cells(region);
  region.begin = region.bytes = 0;
  m.free_regions.push_back(&region);
  m.living.erase(it);
}

void SimGpu::set_order(Order order) {
  machine_->order = order;
}
void SimGpu::set_detailed_counts(bool on) {
  machine_->detailed = on;
}
const Counts& SimGpu::counts() const {
  return machine_->counts;
}
void SimGpu::reset_counts() {
  machine_->counts = {};
}

void SimGpu::launch(const char* name, int64_t blocks, int threads, int64_t shared_bytes, Body body) {
  FRIT_CHECK(threads >= 1 && threads <= 1024, "[{}] a block has {} threads, a GPU takes 1 to 1024", name, threads);
  FRIT_CHECK(blocks >= 1 && blocks <= 0x7fffffff, "[{}] a grid has {} blocks, a GPU takes 1 to 2147483647", name,
             blocks);
  FRIT_CHECK(shared_bytes >= 0 && shared_bytes <= shared_bytes_limit(),
             "[{}] a block has {} bytes of shared memory, the limit is {}", name, shared_bytes, shared_bytes_limit());
  if (graph_)
    return note(
        name, [this, name, blocks, threads, shared_bytes, body] { launch(name, blocks, threads, shared_bytes, body); });
  const std::lock_guard lock(machine_->mutex);
  Machine& m = *machine_;
  if (m.serial > 0xe0000000u) m.renumber();
  m.kernel = name, m.blocks = blocks, m.thread_total = threads, m.shared_size = shared_bytes, m.body = std::move(body);
  m.launch();
  ++m.counts.launches;
  m.counts.blocks += blocks;
  m.counts.barriers += m.most_barriers;
}

}  // namespace sim

}  // namespace frit
