#include "frit/ops/softmax/softmax.h"

#include "frit/ops/softmax/cpu.h"

namespace frit {
namespace {

void check_matrix(const Tensor& t, const Tensor& x, const char* name) {
  FRIT_CHECK(t.rank() == 2 && t.shape() == x.shape(), "[softmax] {} is {}, x is {}", name, t.to_string(),
             x.to_string());
  FRIT_CHECK(t.dtype() == DType::kF32 || t.dtype() == DType::kBF16, "[softmax] {} is {}, expected f32 or bf16", name,
             t.to_string());
}

void check(const Context& context, const Tensor& x, const SoftmaxArgs& args, const Tensor& lse) {
  FRIT_CHECK(x.rank() == 2, "[softmax] x is {}, expected [rows, cols]", x.to_string());
  check_matrix(x, x, "x");
  const int64_t rows = x.dim(0), cols = x.dim(1);
  FRIT_CHECK(args.rows_per_head >= 0, "[softmax] rows_per_head is {}, expected 0 or more", args.rows_per_head);
  if (args.mask.defined())
    FRIT_CHECK(args.mask.dtype() == DType::kF32 && args.mask.shape() == x.shape(),
               "[softmax] mask is {}, expected f32[{}, {}]", args.mask.to_string(), rows, cols);
  if (lse.defined())
    FRIT_CHECK(lse.dtype() == DType::kF32 && lse.shape() == Shape({rows}) && lse.contiguous(),
               "[softmax] lse is {}, expected f32[{}]", lse.to_string(), rows);
  if (!args.lengths.defined()) return;
  FRIT_CHECK(args.lengths.dtype() == DType::kI32 && args.lengths.shape() == Shape({rows}) && args.lengths.contiguous(),
             "[softmax] lengths is {}, expected i32[{}]", args.lengths.to_string(), rows);
  if (context.planning()) return;
  const int32_t* lengths = args.lengths.data<int32_t>();
  for (int64_t r = 0; r < rows; ++r)
    FRIT_CHECK(lengths[r] >= 0 && lengths[r] <= cols, "[softmax] lengths[{}] is {}, x has {} columns", r, lengths[r],
               cols);
}

}  // namespace

void softmax_forward(Context& context, const Tensor& x, const SoftmaxArgs& args, const Tensor& y, const Tensor& lse) {
  check(context, x, args, lse);
  check_matrix(y, x, "y");
  softmax_forward_cpu(context, x, args, y, lse);
}

void softmax_backward(Context& context, const Tensor& dy, const Tensor& x, const Tensor& lse, const SoftmaxArgs& args,
                      const Tensor& dx) {
  FRIT_CHECK(lse.defined(), "[softmax] backward needs lse, which is not given");
  check(context, x, args, lse);
  check_matrix(dy, x, "dy");
  check_matrix(dx, x, "dx");
  FRIT_CHECK(dy.dtype() == x.dtype(), "[softmax] dy is {}, x is {}", dy.to_string(), x.to_string());
  softmax_backward_cpu(context, dy, x, lse, args, dx);
}

}  // namespace frit
