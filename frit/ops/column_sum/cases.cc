#include <algorithm>

#include "frit/ops/case.h"
#include "frit/ops/column_sum/cases.h"
#include "frit/ops/column_sum/column_sum.h"
#include "frit/ops/column_sum/cpu.h"

namespace frit {

// At most 132 blocks of 512 threads write a row of partial sums each (walk.h), eight rows a thread.
GpuBudget column_sum_gpu_budget(int64_t rows, int64_t cols, DType dtype, DType out) {
  const int64_t n = 16 / size_of(dtype);
  if (rows == 0 || cols == 0 || cols % n != 0 || cols > 256 * n) return {};
  const int64_t lanes = std::min(rows, 512 / (cols / n));
  const int64_t partial = std::min<int64_t>((rows + lanes * 8 - 1) / (lanes * 8), 132) * cols * 4;
  return {2,
          (lanes > 1 ? 1 : 0) + 1,
          rows * cols * size_of(dtype) + partial,
          partial + cols * size_of(out),
          0,
          static_cast<int64_t>(align_up(partial))};
}

namespace {

OpCase make(int64_t rows, int64_t cols, DType dtype, DType out, int64_t stride = 0) {
  OpCase c;
  c.name = fmt::format("{}x{}/{}->{}{}", rows, cols, name_of(dtype), name_of(out), stride ? "/strided" : "");
  c.inputs = {{"x", dtype, {rows, cols}, fill_normal(), stride}};
  c.outputs = {{"y", out, {cols}}};
  c.forward = [](Context& context, const Tensors& t) { column_sum(context, t.at("x"), false, t.at("y")); };
  c.oracle = [](const Arrays& in, Arrays& out) {
    const Array& x = in.at("x");
    for (int64_t i = 0, n = static_cast<int64_t>(x.v.size()), cols = x.dim(1); i < n; ++i) out["y"][i % cols] += x[i];
  };
  // Sums of many roundings: absolute error grows with the number of rows.
  const double grown = std::max<double>(1, rows / 32.0);
  c.tolerance["y"] = tolerance_for(out, 1);
  c.tolerance["y"].absolute *= out == DType::kF32 ? grown : 1;
  const int64_t pieces = partial_sum_pieces(rows);
  c.forward_budget.regions = cols == 0 ? 0 : 2;
  c.forward_budget.scratch_bytes = static_cast<int64_t>(align_up(pieces * cols * 4));
  if (dtype == DType::kF16) c.where = Where::kGpu;
  if (stride == 0) c.forward_gpu = column_sum_gpu_budget(rows, cols, dtype, out);
  c.forward_budget.bytes = rows * cols * size_of(dtype) + cols * size_of(out);
  return c;
}

}  // namespace

std::vector<OpCase> column_sum_cases() {
  std::vector<OpCase> cases;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    for (int64_t rows : {0, 1, 31, 33, 65, 1025})
      for (int64_t cols : {1, 7, 31, 32, 33, 1023, 1024, 1025}) cases.push_back(make(rows, cols, dtype, DType::kF32));
  cases.push_back(make(129, 0, DType::kF32, DType::kF32));
  cases.push_back(make(129, 255, DType::kBF16, DType::kBF16));
  cases.push_back(make(129, 33, DType::kF32, DType::kF32, 40));
  cases.push_back(make(5, 33, DType::kF32, DType::kF32, int64_t{1} << 30));  // the last row begins 2^32 elements in
  cases.push_back(make(5, 33, DType::kBF16, DType::kF32, int64_t{1} << 30));
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    cases.push_back(make(4096, 1024, dtype, DType::kF32));
    cases.back().benchmark = true;
    cases.back().test = false;
  }
  for (int64_t cols : {1023, 1024, 1025}) {
    cases.push_back(make(65536, cols, DType::kBF16, DType::kF32));
    cases.back().benchmark = true, cases.back().test = false, cases.back().where = Where::kGpu;
  }
  return cases;
}

}  // namespace frit
