// Attention over cuDNN: one graph with its plan for each shape, built once. attention_cudnn.cc, or attention_missing.cc
// in a build without cuDNN.
#pragma once
#include <memory>
#include <string>

#include "frit/backend/cuda/runtime.h"

namespace frit::cuda {

class Attention {
 public:
  explicit Attention(CudaGpu& gpu);
  ~Attention();
  // See frit/backend/gpu.h.
  std::string refuses(const GpuAttention& attention);
  size_t scratch_bytes(const GpuAttention& attention, bool backward);
  void run(const GpuAttention& attention, bool backward, void* scratch);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace frit::cuda
