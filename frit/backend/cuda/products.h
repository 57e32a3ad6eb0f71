// Products over cuBLASLt: descriptors by shape, algorithms by timing.
#pragma once
#include <memory>

#include "frit/backend/cuda/runtime.h"

namespace frit::cuda {

// What Gpu promises of products (frit/backend/gpu.h), on NVIDIA's GPUs. Sums over k are in fp32 whatever is multiplied
// (no TF32, no partial sums in 16 bits), though cuBLASLt may round them to c's type before it adds bias and c. No
// algorithm that adds in an order of chance is taken. The library and its workspace are opened by the first product.
// Cost: a product of a known shape is one look-up and one call of the library; a new shape asks the library once.
class Products {
 public:
  explicit Products(CudaGpu& gpu);
  ~Products();

  // A product without rows, columns or matrices is nothing; one without depth (k == 0) leaves c as it is or clears it.
  // Errors: frit::Error if the bias is not of c's type or not aligned to 16 bytes, if rows lie 2^31 bytes apart or
  // more, if k == 0 and there is a bias, or if the library refuses; the message names shape and types.
  void run(const GpuProduct& product);
  // Never where it accumulates, has a bias or lacks rows, columns or depth; else as the library says.
  bool sums_bias_gradient(const GpuProduct& product);
  // Of addresses the alignment alone counts (16 bytes or what is less); a tensor that is only planned begins at address
  // 0, as well aligned as the arena will be.
  void note(const GpuProduct& product);
  // Times what was noted and is not known yet: all that the library proposes of one shape of those whose rows (of a
  // weight's gradient: depth) differ by up to a quarter, and of the others what was best there and its first proposal.
  // Takes a device buffer as large as the largest noted operands while it runs. Not while a graph is recorded. Errors:
  // frit::Error if the library refuses a noted product, or if there is no memory.
  int tune(Tuning& tuning);
  // Bytes of the library's workspace, 0 before the first product.
  size_t scratch_bytes() const;

 private:
  struct Shape;  // descriptors and algorithm of one kind of product
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace frit::cuda
