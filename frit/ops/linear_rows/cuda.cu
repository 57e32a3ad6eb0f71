#include "frit/ops/linear_rows/gpu.h"
#include "frit/simt/launch.h"

namespace frit {
namespace {

// Whether all rows begin at multiples of 16 bytes.
bool aligned(const Tensor& t) {
  if (!t.defined()) return true;
  const int64_t step = t.rank() == 2 ? t.row_stride() * size_of(t.dtype()) : 0;
  return reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0 && step % 16 == 0;
}

}  // namespace

void linear_rows_gpu(Context& context, const LinearRowsArgs& args, const Tensor& y) {
  const int64_t rows = y.dim(0), n = y.dim(1), k = args.x.dim(1);
  const DType dtype = args.x.dtype();
  const bool norm = args.gamma.defined();
  bool all = k * size_of(dtype) % 16 == 0;
  for (const Tensor* t : {&args.x, &args.w, &args.gamma, &args.beta, &args.normed}) all = all && aligned(*t);
  const auto accepts = [&](int i) { return i == kLinearRowsAny || (all && linear_rows_takes(i, dtype)); };
  const std::string key = fmt::format("{}x{}x{}{}/{}", rows, n, k, norm ? " norm" : "", name_of(dtype));
  const bool normed = norm && linear_rows_norms_inside(0, dtype, k);
  const int i = choose_instance(context, "linear_rows_forward", key, kLinearRowsNames,
                                all ? linear_rows_choice(rows, n, dtype, normed) : kLinearRowsAny, accepts);
  if (dtype == DType::kF32) return linear_rows_f32_gpu(context, args, y, i);
  if (dtype == DType::kBF16) return linear_rows_bf16_gpu(context, args, y, i);
  linear_rows_f16_gpu(context, args, y, i);
}

}  // namespace frit
