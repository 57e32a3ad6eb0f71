// "onednn": dnnl_sgemm on fixed blocks of rows, one thread a call.
#include <dnnl.h>
#include <omp.h>

#include <algorithm>

#include "frit/ops/gemm/cpu.h"

namespace frit {
namespace {

// Rows of one call: fixed, so that the cuts depend on m alone.
constexpr int64_t kCallRows = 256;

// Keeps OpenMP from starting threads for calls from this thread, and gives the caller's setting back.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

}  // namespace

const char* gemm_onednn_missing() {
  return nullptr;
}

void gemm_onednn(Context& context, const GemmProblem& p) {
  if (context.planning() || p.batch == 0 || p.m == 0 || p.n == 0) return;
  const float *a = static_cast<const float*>(p.a.data), *b = static_cast<const float*>(p.b.data);
  float* c = static_cast<float*>(p.c);
  const int64_t pieces = (p.m + kCallRows - 1) / kCallRows;
  context.pool().run(p.batch * pieces, [&](int64_t task, int) {
    const int64_t item = task / pieces, i0 = task % pieces * kCallRows, rows = std::min(kCallRows, p.m - i0);
    float* to = c + item * p.c_step + i0 * p.c_stride;
    if (p.bias.defined()) {
      const float* bias = p.bias.data<float>();
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < p.n; ++j)
          to[i * p.c_stride + j] = bias[j] + (p.accumulate ? to[i * p.c_stride + j] : 0.0f);
    }
    const bool add = p.accumulate || p.bias.defined();
    if (p.k == 0) {
      if (!add)
        for (int64_t i = 0; i < rows; ++i) std::fill(to + i * p.c_stride, to + i * p.c_stride + p.n, 0.0f);
      return;
    }
    const OneThread one;
    const dnnl_status_t status =
        dnnl_sgemm(p.a.transposed ? 'T' : 'N', p.b.transposed ? 'T' : 'N', rows, p.n, p.k, 1.0f,
                   a + item * p.a_step + i0 * (p.a.transposed ? 1 : p.a.stride), p.a.stride, b + item * p.b_step,
                   p.b.stride, add ? 1.0f : 0.0f, to, p.c_stride);
    if (status != dnnl_success) fail("[gemm] oneDNN returned status {}", static_cast<int>(status));
  });
}

}  // namespace frit
