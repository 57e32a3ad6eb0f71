// Products over cuBLASLt: descriptors by shape, algorithms by timing.
#pragma once
#include <map>
#include <memory>
#include <string>

#include "frit/backend/cuda/runtime.h"

namespace frit::cuda {

class Products {
 public:
  explicit Products(CudaGpu& gpu);
  ~Products();
  // See frit/backend/gpu.h.
  void run(const GpuProduct& product);
  void note(const GpuProduct& product);
  int tune(Tuning& tuning);
  size_t scratch_bytes() const;

 private:
  struct Shape;  // descriptors and algorithm of one kind of product
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace frit::cuda
