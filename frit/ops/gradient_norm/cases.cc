#include <cmath>
#include <limits>

#include "frit/ops/case.h"
#include "frit/ops/gradient_norm/cpu.h"
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
  return c;
}

}  // namespace

std::vector<OpCase> gradient_norm_cases() {
  std::vector<OpCase> cases;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t n :
         {0,   1,   2,   3,   7,    8,    9,    15,   16,    17,    31,    32,    33,    63,     64,     65,    100,
          127, 128, 129, 255, 1023, 1024, 1025, 4099, 16384, 32767, 32768, 32769, 65551, 100003, 163840, 500001})
      cases.push_back(make("", {n}, dtype));
    cases.push_back(make("", {7, 33}, dtype));
    cases.push_back(make("", {5, 3, 11}, dtype));
    cases.push_back(make(" zero", {1000}, dtype, fill_uniform(0, 0)));
    // Squares that neither fp32 nor a sum of fp32 numbers could hold.
    cases.push_back(make(" huge", {40000}, dtype, fill_uniform(-3e38, 3e38)));
    cases.push_back(make(" tiny", {40000}, dtype, fill_uniform(-1e-30, 1e-30)));
    cases.push_back(make("", {8 << 20}, dtype));
    cases.back().benchmark = true;
    cases.back().test = false;
  }
  return cases;
}

}  // namespace frit
