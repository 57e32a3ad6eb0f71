// Gpu: what a Context needs of a GPU. backend/cuda implements it on NVIDIA's run time, backend/sim on the simulator.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "frit/core/device_memory.h"

namespace frit {

class Gpu : public DeviceMemory {
 public:
  virtual std::string name() const = 0;  // "NVIDIA H200", "simulator"
  virtual int multiprocessors() const = 0;
  // Bytes of shared memory a block may have.
  virtual int64_t shared_bytes_limit() const = 0;
  // The stream that work is put on (a cudaStream_t); null in the simulator.
  virtual void* stream() const = 0;
  // Waits for all work. Errors: frit::Error if the device reports one.
  virtual void synchronize() = 0;
  // Runs work() once, captures it as a graph, replays that `replays` times, and returns the microseconds each replay
  // took by the device's own clock. Errors: frit::Error in the simulator, which has no clock.
  virtual std::vector<double> time_graph(const std::function<void()>& work, int replays) = 0;
  // Kernels launched since the Gpu was made.
  int64_t launches() const { return launches_; }

 protected:
  friend struct Launcher;
  int64_t launches_ = 0;
};

// The GPU of this build: number `index` of the machine's NVIDIA GPUs, or the simulator in a build without CUDA.
// Errors: frit::Error if there is no such GPU.
std::unique_ptr<Gpu> make_gpu(int index = 0);
// True in a build with CUDA: make_gpu() is a real one.
bool built_with_cuda();

}  // namespace frit
