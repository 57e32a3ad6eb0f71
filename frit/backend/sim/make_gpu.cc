// The GPU of a build without CUDA: the simulator.
#include "frit/backend/queue.h"
#include "frit/backend/sim/machine.h"

namespace frit {

std::unique_ptr<Gpu> make_gpu(int index) {
  if (index != 0) fail("[simulator] there is no GPU {}: a build without CUDA has the simulator alone, as GPU 0", index);
  return std::make_unique<sim::SimGpu>();
}

std::unique_ptr<Gpu> make_queue(Gpu& gpu) {
  return static_cast<sim::SimGpu&>(gpu).make_queue();
}
bool same_device(const Gpu& a, const Gpu& b) {
  return static_cast<const sim::SimGpu&>(a).on_machine_of(static_cast<const sim::SimGpu&>(b));
}

bool built_with_cuda() {
  return false;
}
bool built_with_cudnn() {
  return false;
}

}  // namespace frit
