#include "frit/memory/block.h"

#include <cstdlib>
#include <new>

#include "frit/memory/memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace frit {

Block allocate_block(size_t bytes, DeviceMemory* device) {
  if (device) return Block(static_cast<char*>(device->allocate(bytes ? align_up(bytes) : kAlignment)), FreeBlock{device});
  constexpr size_t kHugePage = size_t{2} << 20;
  const bool large = bytes >= kHugePage;
  const size_t alignment = large ? kHugePage : kAlignment;
  // Only of what is much larger than a huge page the last one is taken whole.
  const size_t step = bytes >= 4 * kHugePage ? kHugePage : kAlignment;
  bytes = bytes ? (bytes + step - 1) / step * step : step;
  void* address = nullptr;  // posix_memalign: the length need be no multiple of the alignment
  if (posix_memalign(&address, alignment, bytes) != 0) throw std::bad_alloc();
  Block block(static_cast<char*>(address));
#if defined(__linux__)
  if (large) madvise(block.get(), bytes, MADV_HUGEPAGE);  // a hint: refusal changes speed alone
#endif
  return block;
}

}  // namespace frit
