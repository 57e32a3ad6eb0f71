#include "frit/backend/sim/early.h"

#include "frit/backend/sim/internal.h"

namespace frit::sim {

namespace {

// Runs access() as if the thread had waited. A Fault ends the launch: there is nothing to put back then.
template <typename F>
void as_if_waited(F&& access) {
  Thread& t = *running_machine().current;
  const bool waited = t.waited;
  t.waited = true;
  access();
  t.waited = waited;
}

}  // namespace

void touch_constant(const void* p, int bytes, Region*& region) {
  as_if_waited([&] { touch_global(p, bytes, Access::kRead, region); });
}
void copy_constant_async(int64_t shared_offset, const void* from, int bytes, int bytes_valid, Region*& region) {
  as_if_waited([&] { copy_async(shared_offset, from, bytes, bytes_valid, region); });
}

}  // namespace frit::sim
