#include <cmath>
#include <cstring>

#include "frit/ops/case.h"
#include "frit/ops/column_sum/cases.h"
#include "frit/ops/cross_keys_values/cross_keys_values.h"

namespace frit {
namespace {

OpCase make(int64_t tokens, int64_t width, int64_t layers, DType dtype, std::vector<bool> frozen = {}) {
  OpCase c;
  std::string marks;
  for (bool f : frozen) marks += f ? 'f' : '-';
  const int64_t rows = layers * 2 * width;
  c.name = fmt::format("{}x{}x{}/{}{}", tokens, width, layers, name_of(dtype), marks.empty() ? "" : "/" + marks);
  const double scale = 1 / std::sqrt(std::max<double>(1, static_cast<double>(width)));
  c.inputs = {{"memory", dtype, {tokens, width}, fill_normal(), 0},
              {"weight", dtype, {rows, width}, fill_normal(0, scale), 0},
              {"bias", dtype, {rows}, fill_normal(), 0}};
  c.outputs = {{"y", dtype, {tokens, rows}, fill_normal(), 0}};
  c.forward = [](Context& context, const Tensors& t) {
    cross_keys_values_forward(context, t.at("memory"), t.at("weight"), t.at("bias"), t.at("y"));
  };
  c.oracle = [tokens, width, rows](const Arrays& in, Arrays& out) {
    const double *x = in.at("memory").v.data(), *w = in.at("weight").v.data(), *bias = in.at("bias").v.data();
    double* y = out.at("y").v.data();
    for (int64_t i = 0; i < tokens; ++i)
      for (int64_t j = 0; j < rows; ++j) {
        y[i * rows + j] = bias[j];
        for (int64_t k = 0; k < width; ++k) y[i * rows + j] += x[i * width + k] * w[j * width + k];
      }
  };
  const double rounding = dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : 1e-6;
  c.tolerance["y"] = {2e-6 * std::sqrt(static_cast<double>(width)), rounding};
  // cuBLASLt may round the sum before it adds the bias.
  if (built_with_cuda() && is_16bit_float(dtype)) c.tolerance["y"].absolute += 4 * rounding;
  if (dtype == DType::kF16) c.where = Where::kGpu;

  c.incoming = {"y"};
  c.differentiable = {"memory", "weight", "bias"};
  c.accumulates = {"weight", "bias"};
  if (is_16bit_float(dtype)) c.gradient_dtype = {{"weight", DType::kF32}, {"bias", DType::kF32}};
  // With gradients of two types no library sums the bias' along: these cases say what it costs ourselves. (What 16 bits
  // accumulate is rounded once more than the harness thinks.)
  const bool two_types = is_16bit_float(dtype) && width == 8;
  if (two_types) c.gradient_dtype.erase("bias"), c.accumulates.clear();
  c.backward = [frozen, layers](Context& context, const Tensors& t, bool accumulate) {
    // The slices of frozen layers are not touched: what "no gradient" means to the harness is written here.
    const int64_t step = layers ? t.at("dweight").dim(0) / layers : 0;
    for (size_t l = 0; !context.planning() && !accumulate && l < frozen.size(); ++l) {
      if (!frozen[l]) continue;
      const Tensor w = t.at("dweight").rows(static_cast<int64_t>(l) * step, static_cast<int64_t>(l + 1) * step);
      const Tensor b = t.at("dbias").rows(static_cast<int64_t>(l) * step, static_cast<int64_t>(l + 1) * step);
      for (const Tensor& slice : {w, b}) {
        if (context.on_gpu())
          context.gpu().fill(slice.raw(), 0, static_cast<size_t>(slice.bytes()));
        else
          std::memset(slice.raw(), 0, static_cast<size_t>(slice.bytes()));
      }
    }
    cross_keys_values_backward(context, t.at("dy"), t.at("memory"), t.at("weight"), frozen, accumulate, t.at("dmemory"),
                               t.at("dweight"), t.at("dbias"));
  };
  c.gradient_oracle = [tokens, width, rows, frozen](const Arrays& in, Arrays& out) {
    const double *x = in.at("memory").v.data(), *w = in.at("weight").v.data(), *dy = in.at("dy").v.data();
    double *dx = out.at("dmemory").v.data(), *dw = out.at("dweight").v.data(), *dbias = out.at("dbias").v.data();
    for (int64_t i = 0; i < tokens; ++i)
      for (int64_t j = 0; j < rows; ++j) {
        const bool still = !frozen.empty() && frozen[j / (2 * width)];
        const double g = dy[i * rows + j];
        if (!still) dbias[j] += g;
        for (int64_t k = 0; k < width; ++k) {
          dx[i * width + k] += g * w[j * width + k];
          if (!still) dw[j * width + k] += g * x[i * width + k];
        }
      }
  };
  const double rows_error = 1e-6 + 3e-7 * static_cast<double>(tokens);
  c.gradient_tolerance["memory"] = {1e-6 + 3e-7 * static_cast<double>(rows) * scale, rounding};
  c.gradient_tolerance["weight"] = {rows_error, 1e-6};
  c.gradient_tolerance["bias"] = {rows_error, two_types ? rounding : 1e-6};
  // The loss is linear in each operand: a large step costs no accuracy. Frozen layers have no gradient to compare with.
  c.finite_difference_step = frozen.empty() ? 1e-3 : 0;
  // Products are the library's on a GPU: what is ours is the bias' gradient.
  c.forward_gpu = {0, 0, 0, 0, 0, 0};
  if (frozen.empty() && two_types) c.backward_gpu = column_sum_gpu_budget(tokens, rows, dtype, dtype);
  return c;
}

}  // namespace

std::vector<OpCase> cross_keys_values_cases() {
  std::vector<OpCase> cases;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    for (int64_t tokens : {0, 1, 31, 33, 70})
      for (int64_t width : {1, 8, 31})
        for (int64_t layers : {1, 3}) cases.push_back(make(tokens, width, layers, dtype));
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    cases.push_back(make(33, 12, 1, dtype, {true}));
    cases.push_back(make(33, 12, 3, dtype, {true, false, false}));
    cases.push_back(make(33, 12, 3, dtype, {false, true, false}));
    cases.push_back(make(33, 12, 3, dtype, {false, false, true}));
    cases.push_back(make(33, 12, 4, dtype, {true, true, true, true}));
    cases.push_back(make(1025, 8, 2, dtype));
  }
  return cases;
}

}  // namespace frit
