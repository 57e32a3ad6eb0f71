#include "frit/backend/sim/early.h"

#include "frit/backend/sim/internal.h"

namespace frit::sim {

void touch_constant(const void* p, int bytes, Region*& region) {
  Thread& t = *running_machine().current;
  const bool waited = t.waited;
  t.waited = true;
  touch_global(p, bytes, Access::kRead, region);  // a Fault ends the launch: nothing to put back
  t.waited = waited;
}

}  // namespace frit::sim
