// Large aligned blocks of host memory: the arena and the workspace.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <memory>

namespace frit {

struct FreeBlock {
  void operator()(char* p) const { std::free(p); }
};
using Block = std::unique_ptr<char, FreeBlock>;

// At least `bytes` (never null, 0 included), a multiple of kAlignment in address and length, not cleared. From two
// megabytes on it asks the kernel for huge pages, which a walk from end to end profits from.
// Errors: std::bad_alloc.
Block allocate_block(size_t bytes);

}  // namespace frit
