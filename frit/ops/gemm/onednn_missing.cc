// Stands in for onednn.cc in a build without oneDNN.
#include "frit/ops/gemm/cpu.h"

namespace frit {

const char* gemm_onednn_missing() {
  return "this build has no oneDNN";
}

void gemm_onednn(Context&, const GemmProblem&) {
  fail("[gemm] onednn was called, but {}", gemm_onednn_missing());
}

}  // namespace frit
