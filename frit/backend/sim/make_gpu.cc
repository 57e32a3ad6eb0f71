// The GPU of a build without CUDA: the simulator.
#include "frit/backend/sim/machine.h"

namespace frit {

std::unique_ptr<Gpu> make_gpu(int index) {
  if (index != 0) fail("[simulator] there is no GPU {}: a build without CUDA has the simulator alone, as GPU 0", index);
  return std::make_unique<sim::SimGpu>();
}

bool built_with_cuda() {
  return false;
}
bool built_with_cudnn() {
  return false;
}

}  // namespace frit
