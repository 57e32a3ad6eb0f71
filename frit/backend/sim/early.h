// What the simulator offers the words of frit/simt/early.h.
#pragma once
#include "frit/backend/sim/machine.h"

namespace frit::sim {

// touch_global() of a read that may come before wait_for_previous().
void touch_constant(const void* p, int bytes, Region*& region);
// copy_async() that may begin before wait_for_previous().
void copy_constant_async(int64_t shared_offset, const void* from, int bytes, int bytes_valid, Region*& region);

}  // namespace frit::sim
