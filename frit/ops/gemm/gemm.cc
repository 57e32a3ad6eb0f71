#include "frit/ops/gemm/gemm.h"

#include "frit/ops/column_sum/column_sum.h"
#include "frit/ops/gemm/cpu.h"

namespace frit {
namespace {

// Elements between stored rows of a matrix, or of each matrix of a batch.
int64_t matrix_stride(const Tensor& t) {
  return t.rank() == 2 ? t.row_stride() : t.dim(2);
}
int64_t batch_step(const Tensor& t) {
  return t.rank() == 2 ? 0 : t.row_stride();
}

GemmProblem check(const Context& context, const GemmArgs& args) {
  const Tensor &a = args.a, &b = args.b, &c = args.c;
  const int rank = a.rank();
  FRIT_CHECK(rank == 2 || rank == 3, "[gemm] a is {}, expected two or three dimensions", a.to_string());
  FRIT_CHECK(b.rank() == rank && c.rank() == rank, "[gemm] b is {} and c is {}, expected {} dimensions as a has",
             b.to_string(), c.to_string(), rank);
  check_float("gemm", "a", a, context);
  FRIT_CHECK(b.dtype() == a.dtype(), "[gemm] b is {}, expected {} as a is", b.to_string(), name_of(a.dtype()));
  FRIT_CHECK(c.dtype() == DType::kF32 || c.dtype() == a.dtype(), "[gemm] c is {}, expected f32 or {}", c.to_string(),
             name_of(a.dtype()));
  const int row = rank - 2, column = rank - 1;
  GemmProblem p;
  p.batch = rank == 3 ? a.dim(0) : 1;
  p.m = args.transpose_a ? a.dim(column) : a.dim(row);
  p.k = args.transpose_a ? a.dim(row) : a.dim(column);
  const int64_t k = args.transpose_b ? b.dim(column) : b.dim(row);
  p.n = args.transpose_b ? b.dim(row) : b.dim(column);
  FRIT_CHECK(k == p.k, "[gemm] op(a) of {} has depth {}, op(b) of {} has {}", a.to_string(), p.k, b.to_string(), k);
  FRIT_CHECK(c.dim(row) == p.m && c.dim(column) == p.n, "[gemm] c is {}, expected [{}, {}]", c.to_string(), p.m, p.n);
  FRIT_CHECK(rank == 2 || (b.dim(0) == p.batch && c.dim(0) == p.batch), "[gemm] a batch of {} in a, {} in b, {} in c",
             p.batch, b.dim(0), c.dim(0));
  if (args.bias.defined()) {
    FRIT_CHECK(args.bias.rank() == 1 && args.bias.dim(0) == p.n, "[gemm] bias is {}, expected [{}]",
               args.bias.to_string(), p.n);
    FRIT_CHECK(args.bias.dtype() == DType::kF32 || args.bias.dtype() == a.dtype(),
               "[gemm] bias is {}, expected f32 or {}", args.bias.to_string(), name_of(a.dtype()));
    FRIT_CHECK(!context.on_gpu() || args.bias.dtype() == c.dtype(), "[gemm] bias is {}, expected {} as c is on a GPU",
               args.bias.to_string(), name_of(c.dtype()));
    FRIT_CHECK(!context.on_gpu() || reinterpret_cast<uintptr_t>(args.bias.raw()) % 16 == 0,
               "[gemm] bias {} begins at {}, expected a multiple of 16 bytes on a GPU", args.bias.to_string(),
               args.bias.raw());
    FRIT_CHECK(!context.on_gpu() || p.k > 0, "[gemm] op(a) of {} has no depth: on a GPU there is no bias then",
               a.to_string());
  }
  if (const Tensor& sums = args.bias_gradient; sums.defined()) {
    FRIT_CHECK(rank == 2 && args.transpose_a,
               "[gemm] a bias' gradient of {}, expected a transposed a of two dimensions", a.to_string());
    FRIT_CHECK(sums.rank() == 1 && sums.dim(0) == p.m, "[gemm] bias_gradient is {}, expected [{}]", sums.to_string(),
               p.m);
    FRIT_CHECK(sums.dtype() == DType::kF32 || sums.dtype() == a.dtype(),
               "[gemm] bias_gradient is {}, expected f32 or {}", sums.to_string(), name_of(a.dtype()));
  }
  p.a = {a.raw(), a.dtype(), matrix_stride(a), args.transpose_a};
  p.b = {b.raw(), b.dtype(), matrix_stride(b), args.transpose_b};
  p.a_step = batch_step(a), p.b_step = batch_step(b), p.c_step = batch_step(c);
  p.c = c.raw(), p.c_dtype = c.dtype(), p.c_stride = matrix_stride(c);
  p.accumulate = args.accumulate;
  p.bias = args.bias;
  return p;
}

// A product as the GPU's library takes it; with bias_gradient where the library sums it along.
GpuProduct library_product(Context& context, const GemmProblem& p, const Tensor& bias_gradient) {
  GpuProduct product;
  product.a = p.a.data, product.b = p.b.data, product.c = p.c;
  product.dtype = p.a.dtype, product.c_dtype = p.c_dtype;
  product.m = p.m, product.n = p.n, product.k = p.k, product.batch = p.batch;
  product.a_stride = p.a.stride, product.b_stride = p.b.stride, product.c_stride = p.c_stride;
  product.a_step = p.a_step, product.b_step = p.b_step, product.c_step = p.c_step;
  product.transpose_a = p.a.transposed, product.transpose_b = p.b.transposed, product.accumulate = p.accumulate;
  if (p.bias.defined()) product.bias = p.bias.raw(), product.bias_dtype = p.bias.dtype();
  // What is only planned has no address yet. For a bias none means that there is none: any aligned one will do.
  if (p.bias.defined() && !product.bias) product.bias = reinterpret_cast<const void*>(kAlignment);
  if (bias_gradient.defined() && bias_gradient.dtype() == p.c_dtype &&
      context.forced("bias_gradient") == "with_product") {
    product.bias_gradient = bias_gradient.raw() ? bias_gradient.raw() : reinterpret_cast<void*>(kAlignment);
    if (!context.gpu().sums_bias_gradient(product)) product.bias_gradient = nullptr;
  }
  return product;
}

// Every product on a GPU is its library's. True if it sums the bias' gradient along.
bool gemm_library(Context& context, const GemmProblem& p, const Tensor& bias_gradient) {
  const GpuProduct product = library_product(context, p, bias_gradient);
  if (context.planning())
    context.gpu().note_product(product);
  else
    context.gpu().product(product);
  return product.bias_gradient != nullptr;
}

// Why "onednn" refuses a product; null if it takes it.
const char* onednn_refuses(const GemmProblem& p) {
  if (const char* missing = gemm_onednn_missing()) return missing;
  if (p.a.dtype != DType::kF32 || (p.bias.defined() && p.bias.dtype() != DType::kF32)) return "it multiplies f32 only";
  return nullptr;
}

void gemm_on_cpu(Context& context, const GemmArgs& args, const GemmProblem& p) {
  const std::string_view forced = context.forced("gemm");
  if (forced == "onednn") {
    const char* reason = onednn_refuses(p);
    FRIT_CHECK(!reason, "[gemm] onednn was forced, but {}; a is {}", reason, args.a.to_string());
    context.note_used("gemm", "onednn");
    gemm_onednn(context, p);
    return;
  }
  FRIT_CHECK(forced.empty() || forced == "packed", "[gemm] no implementation is called {}, expected packed or onednn",
             forced);
  context.note_used("gemm", "packed");
  gemm_packed(context, p);
}

}  // namespace

std::vector<const char*> gemm_implementations() {
  if (gemm_onednn_missing()) return {"packed"};
  return {"packed", "onednn"};
}

// On the CPU "packed" is taken unless another is forced. On a loaded Zen 3, one thread, processor time, in percent of
// the rate of bare fused multiply-adds (bench/results/gemm-cpu.json has all shapes of that run):
//   product                       packed  oneDNN 2.6  OpenBLAS 0.3.21
//   512 x 512 x 512                   73          70               70
//   4096 x 1024 x 256, forward        83          87               85
//   4096 x 256 x 1024, dx             80          77               74
//   256 x 1024 x 4096, dw             80          44               87
//   1024 x 256 x 4096, dw             74          37               78
//   8000 x 256 x 4096, dw             84          81               85
//   1024 * (32 x 32 x 32)             55          40               32
//   64 * (128 x 64 x 128)             64          72               56
// oneDNN allocated its packing buffers in every call measured whose a is not transposed, so training cannot have it.
// OpenBLAS is ahead at weight gradients; it promises nothing about a row's bits, and only weight gradients could do
// without that.
bool gemm_sums_bias_gradient(Context& context, const GemmArgs& args) {
  if (!context.on_gpu()) return false;
  return library_product(context, check(context, args), args.bias_gradient).bias_gradient != nullptr;
}

void gemm(Context& context, const GemmArgs& args) {
  const GemmProblem p = check(context, args);
  bool summed = false;
  if (context.on_gpu()) {
    const std::string_view forced = context.forced("gemm");
    FRIT_CHECK(forced.empty() || forced == "library",
               "[gemm] no implementation on a GPU is called {}, expected library", forced);
    context.note_used("gemm", "library");
    summed = gemm_library(context, p, args.bias_gradient);
  } else {
    gemm_on_cpu(context, args, p);
  }
  if (args.bias_gradient.defined() && !summed) column_sum(context, args.a, args.accumulate, args.bias_gradient);
}

}  // namespace frit
