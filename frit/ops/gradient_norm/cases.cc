#include <cmath>
#include <limits>

#include "frit/ops/case.h"
#include "frit/ops/gradient_norm/cpu.h"
#include "frit/ops/gradient_norm/gpu.h"
#include "frit/ops/gradient_norm/gradient_norm.h"

namespace frit {
namespace {

OpCase make(std::string name, Shape shape, DType dtype, Fill fill = fill_normal()) {
  const int64_t n = shape.numel();
  OpCase c;
  c.name = fmt::format("{}{}/{}", shape.to_string(), name, name_of(dtype));
  c.inputs = {{"gradients", dtype, shape, std::move(fill)}};
  c.outputs = {{"sum_of_squares", DType::kF64, {1}}, {"not_finite", DType::kI32, {1}}};
  c.forward = [](Context& context, const Tensors& t) {
    gradient_norm(context, t.at("gradients"), t.at("sum_of_squares"), t.at("not_finite"));
  };
  c.oracle = [](const Arrays& in, Arrays& out) {
    long double sum = 0;
    for (const double g : in.at("gradients").v) sum += static_cast<long double>(g) * g;
    out["sum_of_squares"][0] = static_cast<double>(sum);
  };
  c.tolerance["sum_of_squares"] = {0, 1e-13};
  c.forward_budget.regions = 1;
  c.forward_budget.scratch_bytes = static_cast<int64_t>(align_up(gradient_norm_pieces(n) * sizeof(double)));
  c.forward_budget.bytes = n * size_of(dtype) + 12;
  // A piece a block, at most 8192, of whole steps: 256 threads by four vectors of 16 bytes.
  const int64_t step = 256 * 4 * 16 / size_of(dtype),
                steps = std::max<int64_t>((n + 8192 * step - 1) / (8192 * step), 1);
  const int64_t pieces = std::max<int64_t>((n + steps * step - 1) / (steps * step), 1);
  c.forward_gpu.launches = 2;
  c.forward_gpu.barriers = 1 + 1;
  c.forward_gpu.read_bytes = n * size_of(dtype) + pieces * 8;
  c.forward_gpu.written_bytes = pieces * 8 + 12;
  c.forward_gpu.atomics = 0;
  c.forward_gpu.scratch_bytes = static_cast<int64_t>(align_up(pieces * 8));
  if (dtype == DType::kF16) c.where = Where::kGpu;
  return c;
}

}  // namespace

std::vector<OpCase> gradient_norm_cases() {
  std::vector<OpCase> cases;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t n :
         {0,   1,   2,   3,   7,    8,    9,    15,   16,    17,    31,    32,    33,    63,     64,     65,    100,
          127, 128, 129, 255, 1023, 1024, 1025, 4099, 16384, 32767, 32768, 32769, 65551, 100003, 163840, 500001})
      cases.push_back(make("", {n}, dtype));
    cases.push_back(make("", {7, 33}, dtype));
    cases.push_back(make("", {5, 3, 11}, dtype));
    cases.push_back(make(" zero", {1000}, dtype, fill_uniform(0, 0)));
    // Squares that neither fp32 nor a sum of fp32 numbers could hold.
    const bool narrow = dtype == DType::kF16;
    cases.push_back(make(" huge", {40000}, dtype, narrow ? fill_uniform(-65504, 65504) : fill_uniform(-3e38, 3e38)));
    cases.push_back(make(" tiny", {40000}, dtype, narrow ? fill_uniform(-1e-6, 1e-6) : fill_uniform(-1e-30, 1e-30)));
    if (narrow) continue;
    cases.push_back(make(" subnormal", {5000}, dtype, fill_uniform(-1e-38, 1e-38)));
    cases.push_back(make("", {8 << 20}, dtype));
    cases.back().where = Where::kCpu;
    cases.back().benchmark = true;
    cases.back().test = false;
  }
  for (const int64_t n : {210000000, 209999999}) {
    cases.push_back(make("", {n}, DType::kBF16, fill_uniform(-1, 1)));
    cases.back().where = Where::kGpu;
    cases.back().benchmark = true;
    cases.back().test = false;
  }
  return cases;
}

}  // namespace frit
