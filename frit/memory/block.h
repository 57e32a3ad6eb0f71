// Large aligned blocks of host or device memory: the arena and the workspace.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <memory>

#include "frit/core/device_memory.h"

namespace frit {

struct FreeBlock {
  DeviceMemory* device = nullptr;  // null: host memory
  void operator()(char* p) const {
    if (device)
      device->release(p);
    else
      std::free(p);
  }
};
using Block = std::unique_ptr<char, FreeBlock>;

// At least `bytes` (never null, 0 included), a multiple of kAlignment in address and length, not cleared. On the host, from two
// megabytes on, it asks the kernel for huge pages, which a walk from end to end profits from.
// Errors: std::bad_alloc; frit::Error from a device that has no room.
Block allocate_block(size_t bytes, DeviceMemory* device = nullptr);

}  // namespace frit
