#include "frit/memory/block.h"

#include <new>

#include "frit/memory/memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace frit {

Block allocate_block(size_t bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const size_t alignment = bytes >= 4 * kHugePage ? kHugePage : kAlignment;
  bytes = bytes ? (bytes + alignment - 1) / alignment * alignment : alignment;
  Block block(static_cast<char*>(std::aligned_alloc(alignment, bytes)));
  if (!block) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment == kHugePage) madvise(block.get(), bytes, MADV_HUGEPAGE);  // a hint: refusal changes speed alone
#endif
  return block;
}

}  // namespace frit
