// Matrix products.
#pragma once
#include <vector>

#include "frit/backend/context.h"

namespace frit {

// Math: c = op(a) * op(b) [+ bias] [+ c], op(t) = t or its transpose; sums in fp32.
// Shapes: op(a) [m, k], op(b) [k, n], c [m, n]; or all with one more, leading dimension: that many products. bias [n].
// Two-dimensional operands may have any row stride.
// dtypes: a and b the same, f32 or bf16, on a GPU also f16; c the same or f32; bias f32 or a's, on a GPU c's.
// k == 0 gives bias (+ c). On a GPU there is no bias then, and else one begins at a multiple of 16 bytes.
// bias_gradient[i] (+)= sum over k of op(a)[i][k], in fp32: if op(a) is dy^T, what the bias' gradient is. [m], f32 or
// a's dtype; for a transposed a of two dimensions.
//
// On the CPU a row of c depends on that row of op(a) alone and comes out with the same bits whatever m is and wherever
// the row lies, as long as op(a) is not transposed: that is what makes a sentence's translation independent of its
// batch. The bits do not depend on the number of threads either. On a GPU a row's bits do depend on m: the library
// chooses its algorithm, and with it the order of additions, by the whole shape. There the same shape, strides and
// alignment of addresses give the same bits, with the same library and choices (Gpu::tune_products). A sum that is
// stored in 16 bits may be rounded to them before the bias is added, and again before c is (cuBLASLt 13.1 does both).
// Cost: on a GPU one product of the library, which counts as no launch. Takes nothing but scratch from the context, on
// a GPU nothing at all. bias_gradient costs a column_sum, unless it is of c's type, does not accumulate, and the GPU's
// library offers to sum it along. While planning the product is noted for Gpu::tune_products.
// Errors: std::invalid_argument if shapes or dtypes do not fit.
// Implementations (Context::force): on the CPU "packed" (ours, the default) and, if forced, "onednn" (f32 only; no
// promise about bits, and it allocates; not in every build); on a GPU "library".
struct GemmArgs {
  Tensor a, b, c;
  bool transpose_a = false, transpose_b = false;
  bool accumulate = false;
  Tensor bias;
  Tensor bias_gradient = {};
};
void gemm(Context& context, const GemmArgs& args);
// Whether gemm() has the GPU's library sum bias_gradient along with the product: where it offers that, and
// Context::force("bias_gradient", "with_product") asks for it. On an H200 that is slower than a column_sum (a step of
// mt-base with 128 sentences takes 5.03 instead of 4.85 ms).
bool gemm_sums_bias_gradient(Context& context, const GemmArgs& args);
// Names of the implementations on the CPU that this build has.
std::vector<const char*> gemm_implementations();

// A linear layer y = x * w^T + bias, w [n, k] as PyTorch and Hugging Face store it.
inline void linear(Context& context, const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& y) {
  gemm(context, {.a = x, .b = w, .c = y, .transpose_a = false, .transpose_b = true, .accumulate = false, .bias = bias});
}
// dx = dy * w.
inline void linear_backward_input(Context& context, const Tensor& dy, const Tensor& w, bool accumulate,
                                  const Tensor& dx) {
  gemm(context,
       {.a = dy, .b = w, .c = dx, .transpose_a = false, .transpose_b = false, .accumulate = accumulate, .bias = {}});
}
// Whether linear_backward_weight sums dbias along.
inline bool linear_sums_bias_gradient(Context& context, const Tensor& dy, const Tensor& x, bool accumulate,
                                      const Tensor& dw, const Tensor& dbias) {
  return gemm_sums_bias_gradient(context, {.a = dy,
                                           .b = x,
                                           .c = dw,
                                           .transpose_a = true,
                                           .transpose_b = false,
                                           .accumulate = accumulate,
                                           .bias = {},
                                           .bias_gradient = dbias});
}
// dw (+)= dy^T * x; dbias (+)= column sums of dy, if it is given.
inline void linear_backward_weight(Context& context, const Tensor& dy, const Tensor& x, bool accumulate,
                                   const Tensor& dw, const Tensor& dbias = {}) {
  gemm(context, {.a = dy,
                 .b = x,
                 .c = dw,
                 .transpose_a = true,
                 .transpose_b = false,
                 .accumulate = accumulate,
                 .bias = {},
                 .bias_gradient = dbias});
}

// A weight laid out once for many products with few rows (decoding), on the CPU: y = x * w^T + bias.
class PackedWeight {
 public:
  PackedWeight() = default;
  // w [n, k], f32 or bf16. The packed copy is owned and fp32. Errors: std::invalid_argument on a GPU.
  PackedWeight(Context& context, const Tensor& w);
  PackedWeight(PackedWeight&&) noexcept;
  PackedWeight& operator=(PackedWeight&&) noexcept;
  ~PackedWeight();
  int64_t rows() const { return n_; }
  int64_t cols() const { return k_; }
  bool defined() const { return data_ != nullptr; }

 private:
  friend void linear_packed(Context&, const Tensor&, const PackedWeight&, const Tensor&, const Tensor&);
  float* data_ = nullptr;
  int64_t n_ = 0, k_ = 0;
};
// The same bits for a row whatever the other rows are, and the same as gemm's "packed" implementation gives.
// Shapes: x [m, k]; bias f32 [n], optional; y [m, n]; x and y f32.
void linear_packed(Context& context, const Tensor& x, const PackedWeight& w, const Tensor& bias, const Tensor& y);

}  // namespace frit
