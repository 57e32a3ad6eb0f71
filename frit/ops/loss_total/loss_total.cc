#include "frit/ops/loss_total/loss_total.h"

#include "frit/ops/loss_total/cpu.h"
#include "frit/ops/loss_total/gpu.h"

namespace frit {

void loss_total(Context& context, const Tensor& loss, const Tensor& nll, const Tensor& labels, bool accumulate,
                const Tensor& totals) {
  FRIT_CHECK(labels.defined() && labels.dtype() == DType::kI32 && labels.rank() == 1 && labels.contiguous(),
             "[loss_total] labels are {}, expected contiguous i32 of rank 1", labels.to_string());
  const auto check = [&](const char* name, const Tensor& t) {
    FRIT_CHECK(t.defined() && t.dtype() == DType::kF32 && t.shape() == labels.shape() && t.contiguous(),
               "[loss_total] {} is {}, expected contiguous f32{}", name, t.to_string(), labels.shape().to_string());
  };
  check("loss", loss);
  check("nll", nll);
  FRIT_CHECK(totals.defined() && totals.dtype() == DType::kF64 && totals.shape() == Shape({3}),
             "[loss_total] totals are {}, expected f64[3]", totals.to_string());
  if (context.on_gpu()) return loss_total_gpu(context, loss, nll, labels, accumulate, totals);
  if (context.planning()) return;
  loss_total_cpu(loss, nll, labels, accumulate, totals);
}

}  // namespace frit
