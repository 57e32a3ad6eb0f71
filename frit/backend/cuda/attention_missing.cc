// In the place of attention_cudnn.cc in a build without cuDNN.
#include "frit/backend/cuda/attention.h"

namespace frit::cuda {

struct Attention::State {};

Attention::Attention(CudaGpu&) {}
Attention::~Attention() = default;

std::string Attention::refuses(const GpuAttention&) {
  return "this build has no cuDNN";
}
size_t Attention::scratch_bytes(const GpuAttention&, bool) {
  fail("[attention] this build has no cuDNN");
}
void Attention::run(const GpuAttention&, bool, void*) {
  fail("[attention] this build has no cuDNN");
}

}  // namespace frit::cuda

namespace frit {

bool built_with_cudnn() {
  return false;
}

}  // namespace frit
