#include "frit/ops/linear_rows/linear_rows.h"

#include <limits>

#include "frit/ops/linear_rows/cpu.h"
#include "frit/ops/linear_rows/gpu.h"

namespace frit {
namespace {

void check_vector(const char* name, const Tensor& t, int64_t columns, DType dtype) {
  FRIT_CHECK(t.shape() == Shape{columns} && t.dtype() == dtype && t.contiguous(),
             "[linear_rows] {} is {}, expected {}[{}]", name, t.to_string(), name_of(dtype), columns);
}
void check_matrix(const char* name, const Tensor& t, int64_t rows, int64_t columns, DType dtype) {
  FRIT_CHECK(t.shape() == (Shape{rows, columns}) && t.dtype() == dtype, "[linear_rows] {} is {}, expected {}[{}, {}]",
             name, t.to_string(), name_of(dtype), rows, columns);
}

}  // namespace

void linear_rows(Context& context, const LinearRowsArgs& args, const Tensor& y) {
  FRIT_CHECK(args.x.rank() == 2 && args.w.rank() == 2, "[linear_rows] x is {}, w is {}, expected rank 2",
             args.x.to_string(), args.w.to_string());
  check_float("linear_rows", "x", args.x, context);
  const int64_t rows = args.x.dim(0), k = args.x.dim(1), n = args.w.dim(0);
  const DType dtype = args.x.dtype();
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  FRIT_CHECK(k >= 1 && n >= 1 && k < kMost && n < kMost && rows < kMost, "[linear_rows] x is {}, w is {}",
             args.x.to_string(), args.w.to_string());
  check_matrix("w", args.w, n, k, dtype);
  FRIT_CHECK(y.shape() == (Shape{rows, n}) && (y.dtype() == dtype || y.dtype() == DType::kF32),
             "[linear_rows] y is {}, expected {} or f32[{}, {}]", y.to_string(), name_of(dtype), rows, n);
  if (args.bias.defined()) check_vector("bias", args.bias, n, dtype);
  if (args.residual.defined()) check_matrix("residual", args.residual, rows, n, dtype);
  FRIT_CHECK(args.gamma.defined() == args.beta.defined() && (args.gamma.defined() || !args.normed.defined()),
             "[linear_rows] a norm needs gamma and beta");
  if (args.gamma.defined()) check_vector("gamma", args.gamma, k, dtype), check_vector("beta", args.beta, k, dtype);
  if (args.normed.defined()) check_matrix("normed", args.normed, rows, k, dtype);
  if (rows > 0 && !context.planning())
    FRIT_CHECK(y.raw() != args.x.raw() && (!args.normed.defined() || args.normed.raw() != args.x.raw()),
               "[linear_rows] y and normed must not be x");
  if (rows == 0) return;
  if (context.on_gpu()) return linear_rows_gpu(context, args, y);
  linear_rows_cpu(context, args, y);
}

int linear_rows_choice(int64_t rows, int64_t n, DType dtype, bool normed) {
  enum { k16x8, k16x16, k16x32, k32x8, k32x16, k32x32 };
  const auto blocks = [&](int i) {
    const LinearRowsTile tile = kLinearRowsTiles[i];
    return ((rows + tile.rows - 1) / tile.rows) * ((n + tile.columns - 1) / tile.columns);
  };
  // The first of the tiles that makes so many blocks; the last if none does.
  const auto first = [&](std::initializer_list<std::pair<int, int64_t>> tiles) {
    for (const auto& [i, most] : tiles)
      if (linear_rows_takes(i, dtype) && blocks(i) >= most) return i;
    return (tiles.end() - 1)->first;
  };
  if (rows <= 16) return first({{k16x32, 96}, {k16x16, 96}, {k16x8, 0}});
  const bool many = dtype != DType::kF32 && rows > 32;
  if (normed) {
    // A multiprocessor holds three blocks of 16x32 and one of 32x32, which is not there yet while the kernel before
    // ends; 64x64 has a launch more, for the norm.
    if (many && blocks(kLinearRowsMany) >= 96) return kLinearRowsMany;
    return first({{k16x32, 64}, {k16x16, 64}, {k16x8, 0}});
  }
  if (many && blocks(kLinearRowsMany) >= 192) return kLinearRowsMany;
  const int low = first({{k16x32, 96}, {k16x16, 64}, {k16x8, 0}});
  return blocks(low) < 256 ? low : first({{k32x32, 96}, {k32x16, 96}, {k32x8, 0}});
}

}  // namespace frit
