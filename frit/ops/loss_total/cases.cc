#include "frit/ops/case.h"
#include "frit/ops/loss_total/loss_total.h"

namespace frit {
namespace {

OpCase make(int64_t tokens, bool accumulate, const std::string& kind = "", Fill loss = fill_uniform(0, 12)) {
  OpCase c;
  c.name = fmt::format("{}{}{}", tokens, kind, accumulate ? "/accumulate" : "");
  c.inputs = {{"loss", DType::kF32, {tokens}, loss},
              {"nll", DType::kF32, {tokens}, loss},
              {"labels", DType::kI32, {tokens}, [](CaseRandom& random, Array& a) {
                 for (double& y : a.v) y = static_cast<double>(random.below(9)) - 2;  // -2 and -1: no label
               }}};
  if (accumulate) c.inputs.push_back({"totals", DType::kF64, {3}, fill_uniform(0, 1000)});
  c.outputs = {{"totals", DType::kF64, {3}}};
  c.forward = [=](Context& context, const Tensors& t) {
    loss_total(context, t.at("loss"), t.at("nll"), t.at("labels"), accumulate, t.at("totals"));
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    long double sums[3] = {};
    if (accumulate)
      for (int k = 0; k < 3; ++k) sums[k] = in.at("totals")[k];
    for (int64_t i = 0; i < tokens; ++i) {
      sums[0] += in.at("loss")[i];
      sums[1] += in.at("nll")[i];
      sums[2] += in.at("labels")[i] >= 0;
    }
    for (int k = 0; k < 3; ++k) out["totals"][k] = static_cast<double>(sums[k]);
  };
  c.tolerance["totals"] = {0, 1e-13};
  c.forward_budget.regions = 0;
  c.forward_budget.scratch_bytes = 0;
  c.forward_budget.bytes = 12 * tokens + 24;
  c.forward_gpu.launches = 1;
  c.forward_gpu.barriers = 1;
  c.forward_gpu.read_bytes = 12 * tokens + (accumulate ? 24 : 0);
  c.forward_gpu.written_bytes = 24;
  c.forward_gpu.atomics = c.forward_gpu.scratch_bytes = 0;
  return c;
}

}  // namespace

std::vector<OpCase> loss_total_cases() {
  std::vector<OpCase> cases;
  for (const int64_t tokens :
       {0,   1,   2,   3,   4,   5,   7,    8,    15,   31,   32,   33,   63,   64,   65,   100,  127,
        128, 129, 255, 256, 500, 511, 1023, 1024, 1025, 2047, 4095, 4096, 4097, 5000, 8195, 12289})
    cases.push_back(make(tokens, false));
  for (const int64_t tokens : {0, 1, 33, 1025, 4097, 9001}) cases.push_back(make(tokens, true));
  cases.push_back(make(3000, false, " huge", fill_uniform(1e37, 3e38)));  // sums that fp32 could not hold
  cases.push_back(make(3000, true, " tiny", fill_uniform(1e-9, 1e-8)));
  return cases;
}

}  // namespace frit
