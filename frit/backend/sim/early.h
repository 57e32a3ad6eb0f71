// What the simulator offers the words of frit/simt/early.h.
#pragma once
#include "frit/backend/sim/machine.h"

namespace frit::sim {

// touch_global() of a read that may come before wait_for_previous().
void touch_constant(const void* p, int bytes, Region*& region);

}  // namespace frit::sim
