// Several queues of work on one GPU, so that small kernels of one fill what another leaves idle.
#pragma once
#include <memory>

#include "frit/backend/gpu.h"

namespace frit {

// A Gpu on the device of `gpu` with a stream, events, graphs and libraries of its own. What either allocates is valid
// in both; work on one is ordered behind work on the other only if the host waits in between. Each is used from one
// thread at a time, and several at once from a thread each. In the simulator their kernels run one after the other.
// Errors: frit::Error.
std::unique_ptr<Gpu> make_queue(Gpu& gpu);
// Is what one allocates valid in the other?
bool same_device(const Gpu& a, const Gpu& b);

}  // namespace frit
