#include <cmath>

#include "frit/ops/case.h"
#include "frit/ops/optimizer/optimizer.h"

namespace frit {
namespace {

struct Mode {
  OptimizerKind kind;
  Precision precision;
  DType gradient_dtype;
};

// Bytes a parameter, from the definition: every block that the mode keeps is read, and all but the gradients written.
int64_t bytes_per_parameter(const Mode& mode, bool momentum) {
  const int64_t moments = mode.kind == OptimizerKind::kSgd ? momentum : 2;
  int64_t bytes = size_of(mode.gradient_dtype) + 2 * 4 * moments;
  switch (mode.precision) {
    case Precision::kF32:
      return bytes + 8;
    case Precision::kBF16Master:
      return bytes + 8 + 2;  // master read and written, parameters written
    case Precision::kBF16Stochastic:
      return bytes + 4;
    case Precision::kBF16Residual:
      return bytes + 8;
  }
  return bytes;
}

OpCase make(int64_t n, Mode mode, int64_t step, bool momentum = true) {
  const bool adam = mode.kind != OptimizerKind::kSgd, has_m = adam || momentum;
  const DType dtype = compute_dtype(mode.precision);
  OptimizerArgs args{.kind = mode.kind, .momentum = momentum ? 0.9 : 0.0, .weight_decay = 0.05, .decay_end = n / 3};
  args.seed = 5;
  const OptimizerStep now{.learning_rate = 0.01, .step = step, .gradient_scale = 0.5f};

  OpCase c;
  c.name = fmt::format("{}/{}/{}/{} gradients/step {}", n,
                       name_of(mode.kind) + std::string(momentum ? "" : " without momentum"), name_of(mode.precision),
                       name_of(mode.gradient_dtype), step);
  const auto moment = [&](const char* name, double low) {
    c.inputs.push_back({name, DType::kF32, {n}, fill_uniform(low, 2)});
  };
  if (mode.precision == Precision::kBF16Master) {
    c.inputs.push_back({"master", DType::kF32, {n}});
    c.outputs.push_back({"master", DType::kF32, {n}});
    c.outputs.push_back({"parameters", dtype, {n}});
  } else {
    c.inputs.push_back({"parameters", dtype, {n}});
    c.outputs.push_back({"parameters", dtype, {n}});
  }
  if (mode.precision == Precision::kBF16Residual) {
    // Random low halves, as bytes: the harness has no 16-bit integers. `joined` is the fp32 value that the two halves
    // are.
    c.inputs.push_back({"residual", DType::kU8, {n, 2}, fill_below(256)});
    c.outputs.push_back({"residual", DType::kU8, {n, 2}});
    c.outputs.push_back({"joined", DType::kF32, {n}});
    c.tolerance["residual"] = {255, 0};  // judged as joined
  }
  c.inputs.push_back({"gradients", mode.gradient_dtype, {n}});
  if (has_m) moment("moment1", -2), c.outputs.push_back({"moment1", DType::kF32, {n}});
  if (adam) moment("moment2", 0.01), c.outputs.push_back({"moment2", DType::kF32, {n}});

  c.forward = [=](Context& context, const Tensors& t) {
    const auto get = [&](const char* name) { return t.count(name) ? t.at(name) : Tensor(); };
    OptimizerBlocks b{
        mode.precision, get("parameters"), get("gradients"), get("moment1"), get("moment2"), get("master"), {}};
    if (t.count("residual")) b.residual = Tensor(t.at("residual").raw(), DType::kBF16, Shape{n});
    optimizer_step(context, args, now, b);
    if (t.count("joined") && !context.planning())
      for (int64_t i = 0; i < n; ++i)
        t.at("joined").data<float>()[i] =
            join_float({b.parameters.data<bfloat16>()[i].bits, b.residual.data<bfloat16>()[i].bits});
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    for (int64_t i = 0; i < n; ++i) {
      double p = mode.precision == Precision::kBF16Master ? in.at("master")[i] : in.at("parameters")[i];
      if (mode.precision == Precision::kBF16Residual) {
        const uint16_t low = static_cast<uint16_t>(in.at("residual")[2 * i] + 256 * in.at("residual")[2 * i + 1]);
        p = join_float({bfloat16(static_cast<float>(p)).bits, low});
      }
      const double decay = i < args.decay_end ? args.weight_decay : 0, lr = now.learning_rate;
      double g = now.gradient_scale * in.at("gradients")[i];
      if (mode.kind != OptimizerKind::kAdamW) g += decay * p;
      if (adam) {
        if (mode.kind == OptimizerKind::kAdamW) p -= lr * decay * p;
        const double m = args.beta1 * in.at("moment1")[i] + (1 - args.beta1) * g;
        const double v = args.beta2 * in.at("moment2")[i] + (1 - args.beta2) * g * g;
        const double m_hat = m / (1 - std::pow(args.beta1, step)), v_hat = v / (1 - std::pow(args.beta2, step));
        p -= lr * m_hat / (std::sqrt(v_hat) + args.eps);
        out["moment1"][i] = m, out["moment2"][i] = v;
      } else {
        const double m = momentum ? args.momentum * in.at("moment1")[i] + g : g;
        p -= lr * m;
        if (momentum) out["moment1"][i] = m;
      }
      out["parameters"][i] = p;
      if (mode.precision == Precision::kBF16Master) out["master"][i] = p;
      if (out.count("joined")) out["joined"][i] = p;
    }
  };
  // fp32 arithmetic of about ten operations; bf16 parameters to the spacing (stochastic: to either side).
  for (const char* name : {"moment1", "moment2", "master", "joined"}) c.tolerance[name] = {1e-6, 1e-6};
  c.tolerance["parameters"] = dtype == DType::kF32                           ? Tolerance{1e-6, 1e-6}
                              : mode.precision == Precision::kBF16Stochastic ? Tolerance{1e-6, 0x1p-7}
                                                                             : Tolerance{1e-6, 0x1.02p-8};
  c.forward_budget.regions = n > 0;
  c.forward_budget.scratch_bytes = 0;
  c.forward_budget.bytes = n * bytes_per_parameter(mode, momentum);
  return c;
}

}  // namespace

std::vector<OpCase> optimizer_cases() {
  std::vector<OpCase> cases;
  std::vector<Mode> modes;
  for (const OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kSgd})
    for (const Precision precision :
         {Precision::kF32, Precision::kBF16Master, Precision::kBF16Stochastic, Precision::kBF16Residual})
      for (const DType dtype : {DType::kF32, DType::kBF16})
        if (dtype == DType::kF32 || precision != Precision::kF32) modes.push_back({kind, precision, dtype});
  for (const Mode& mode : modes) {
    for (const int64_t n : {0, 1, 31, 32, 33, 1023, 1024, 1025}) cases.push_back(make(n, mode, 3));
    cases.push_back(make(70001, mode, 1));
    cases.push_back(make(65, mode, 100000));
    if (mode.kind == OptimizerKind::kSgd) cases.push_back(make(129, mode, 2, false));
  }
  for (const int64_t n :
       {2, 3, 5, 7, 8, 9, 15, 16, 17, 63, 64, 100, 127, 128, 255, 256, 257, 511, 513, 2047, 4097, 16385, 32769})
    cases.push_back(make(n, {OptimizerKind::kAdam, Precision::kBF16Stochastic, DType::kBF16}, 7));
  for (const Mode& mode : modes) {
    if (mode.kind == OptimizerKind::kAdamW || mode.gradient_dtype != compute_dtype(mode.precision)) continue;
    cases.push_back(make(8 << 20, mode, 10));
    // Joining is the harness's work, many times that of the operator: not to be timed.
    std::erase_if(cases.back().outputs, [](const Operand& o) { return o.name == "joined"; });
    cases.back().benchmark = true;
    cases.back().test = false;
  }
  return cases;
}

}  // namespace frit
