#include "frit/ops/softmax/softmax.h"

#include "frit/ops/softmax/cpu.h"
#include "frit/ops/softmax/gpu.h"

namespace frit {
namespace {

void check_matrix(const Context& context, const Tensor& t, const Tensor& x, const char* name) {
  FRIT_CHECK(t.rank() == 2 && t.shape() == x.shape(), "[softmax] {} is {}, x is {}", name, t.to_string(),
             x.to_string());
  check_float("softmax", name, t, context);
}
// y of forward, dx of backward.
void check_result(const Context& context, const Tensor& y, const Tensor& x, const SoftmaxArgs& args, const char* name) {
  check_matrix(context, y, x, name);
  if (!context.on_gpu()) return;
  FRIT_CHECK(y.dtype() == x.dtype() || (x.dtype() == DType::kF32 && !args.p.defined()),
             "[softmax] {} is {}, x is {}: on a GPU they have one dtype, or x is f32 and nothing is stored", name,
             y.to_string(), x.to_string());
}

// Chooses between the forms and notes the choice.
void choose_form(Context& context, const SoftmaxArgs& args, const Tensor& x) {
  const bool stored = args.p.defined();
  FRIT_CHECK(stored == args.keep.defined(), "[softmax] p and keep come together, but only {} is given",
             stored ? "p" : "keep");
  const char* form = stored ? "stored" : "recomputed";
  if (const std::string_view forced = context.forced("softmax"); !forced.empty())
    FRIT_CHECK(forced == form, "[softmax] {} cannot run: args.p and args.keep decide for {}", forced, form);
  if (stored) {
    FRIT_CHECK(context.on_gpu(), "[softmax] the stored form needs a GPU");
    FRIT_CHECK(args.p.shape() == x.shape() && args.p.dtype() == x.dtype(), "[softmax] p is {}, expected {}",
               args.p.to_string(), x.to_string());
    FRIT_CHECK(args.keep.shape() == x.shape() && args.keep.dtype() == DType::kU8,
               "[softmax] keep is {}, expected u8[{}, {}]", args.keep.to_string(), x.dim(0), x.dim(1));
  }
  context.note_used("softmax", form);
}

void check(Context& context, const Tensor& x, const SoftmaxArgs& args, const Tensor& lse) {
  FRIT_CHECK(x.rank() == 2, "[softmax] x is {}, expected [rows, cols]", x.to_string());
  check_matrix(context, x, x, "x");
  choose_form(context, args, x);
  const int64_t rows = x.dim(0), cols = x.dim(1);
  FRIT_CHECK(args.rows_per_head >= 0, "[softmax] rows_per_head is {}, expected 0 or more", args.rows_per_head);
  if (context.on_gpu()) {
    FRIT_CHECK(args.scale > 0, "[softmax] scale is {}, expected above 0 on a GPU", args.scale);
    FRIT_CHECK(rows <= 0x7fffffff && cols <= 0x3fffffff, "[softmax] x is {}, expected below 2^31 rows of 2^30 columns",
               x.to_string());
  }
  if (args.mask.defined())
    FRIT_CHECK(args.mask.dtype() == DType::kF32 && args.mask.shape() == x.shape(),
               "[softmax] mask is {}, expected f32[{}, {}]", args.mask.to_string(), rows, cols);
  if (lse.defined())
    FRIT_CHECK(lse.dtype() == DType::kF32 && lse.shape() == Shape({rows}) && lse.contiguous(),
               "[softmax] lse is {}, expected f32[{}]", lse.to_string(), rows);
  if (!args.lengths.defined()) return;
  FRIT_CHECK(args.lengths.dtype() == DType::kI32 && args.lengths.shape() == Shape({rows}) && args.lengths.contiguous(),
             "[softmax] lengths is {}, expected i32[{}]", args.lengths.to_string(), rows);
  if (context.planning() || context.on_gpu()) return;
  const int32_t* lengths = args.lengths.data<int32_t>();
  for (int64_t r = 0; r < rows; ++r)
    FRIT_CHECK(lengths[r] >= 0 && lengths[r] <= cols, "[softmax] lengths[{}] is {}, x has {} columns", r, lengths[r],
               cols);
}

}  // namespace

void softmax_forward(Context& context, const Tensor& x, const SoftmaxArgs& args, const Tensor& y, const Tensor& lse) {
  check(context, x, args, lse);
  check_result(context, y, x, args, "y");
  if (context.on_gpu()) return softmax_forward_gpu(context, x, args, y, lse);
  softmax_forward_cpu(context, x, args, y, lse);
}

void softmax_backward(Context& context, const Tensor& dy, const Tensor& x, const Tensor& lse, const SoftmaxArgs& args,
                      const Tensor& dx) {
  FRIT_CHECK(lse.defined(), "[softmax] backward needs lse, which is not given");
  check(context, x, args, lse);
  check_matrix(context, dy, x, "dy");
  check_result(context, dx, x, args, "dx");
  FRIT_CHECK(dy.dtype() == x.dtype(), "[softmax] dy is {}, x is {}", dy.to_string(), x.to_string());
  if (context.on_gpu()) return softmax_backward_gpu(context, dy, x, lse, args, dx);
  softmax_backward_cpu(context, dy, x, lse, args, dx);
}

}  // namespace frit
