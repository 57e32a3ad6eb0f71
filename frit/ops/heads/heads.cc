#include "frit/ops/heads/heads.h"

#include "frit/ops/heads/cpu.h"
#include "frit/ops/heads/gpu.h"

namespace frit {
namespace {

// joined [tokens, ...], apart [..., tokens, D] with the same inner dimensions.
void check(const Context& context, const Tensor& joined, const Tensor& apart, int rank) {
  FRIT_CHECK(joined.rank() == rank && apart.rank() == rank, "[heads] joined is {}, apart is {}, expected {} dimensions",
             joined.to_string(), apart.to_string(), rank);
  check_float("heads", "joined", joined, context);
  const Shape& j = joined.shape();
  const Shape expected = rank == 4 ? Shape{j[1], j[2], j[0], j[3]} : Shape{j[1], j[0], j[2]};
  FRIT_CHECK(apart.shape() == expected && apart.dtype() == joined.dtype(), "[heads] apart is {}, expected {}{}",
             apart.to_string(), name_of(joined.dtype()), expected.to_string());
  FRIT_CHECK(apart.contiguous(), "[heads] apart is {}, with rows {} elements apart, expected contiguous",
             apart.to_string(), apart.row_stride());
}
void check_bias(const Tensor& bias, const Tensor& joined, const char* name) {
  if (!bias.defined()) return;
  FRIT_CHECK(bias.rank() == 1 && bias.dim(0) == joined.shape().inner() && bias.contiguous() &&
                 (bias.dtype() == DType::kF32 || bias.dtype() == joined.dtype()),
             "[heads] {} is {}, expected {} elements of f32 or {}", name, bias.to_string(), joined.shape().inner(),
             name_of(joined.dtype()));
}

}  // namespace

void split_heads_forward(Context& context, const Tensor& x, const Tensor& bias, const Tensor& y) {
  check(context, x, y, 4);
  check_bias(bias, x, "bias");
  if (context.on_gpu()) return joined_to_heads_gpu(context, x, bias, y, x.dim(1) * x.dim(2), x.dim(3));
  joined_to_heads_cpu(context, x, bias, y, x.dim(1) * x.dim(2), x.dim(3));
}

void split_heads_backward(Context& context, const Tensor& dy, bool accumulate, const Tensor& dx, const Tensor& dbias) {
  check(context, dx, dy, 4);
  check_bias(dbias, dx, "dbias");
  if (context.on_gpu())
    return heads_to_joined_gpu(context, dy, dx, accumulate, dbias, dx.dim(1) * dx.dim(2), dx.dim(3));
  heads_to_joined_cpu(context, dy, dx, accumulate, dbias, dx.dim(1) * dx.dim(2), dx.dim(3));
}

void merge_heads_forward(Context& context, const Tensor& x, const Tensor& y) {
  check(context, y, x, 3);
  if (context.on_gpu()) return heads_to_joined_gpu(context, x, y, false, {}, y.dim(1), y.dim(2));
  heads_to_joined_cpu(context, x, y, false, {}, y.dim(1), y.dim(2));
}

void merge_heads_backward(Context& context, const Tensor& dy, const Tensor& dx) {
  check(context, dy, dx, 3);
  if (context.on_gpu()) return joined_to_heads_gpu(context, dy, {}, dx, dy.dim(1), dy.dim(2));
  joined_to_heads_cpu(context, dy, {}, dx, dy.dim(1), dy.dim(2));
}

}  // namespace frit
