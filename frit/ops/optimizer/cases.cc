#include <cmath>
#include <cstring>

#include "frit/ops/case.h"
#include "frit/ops/gradient_norm/gradient_norm.h"
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
    case Precision::kF16Master:
      return bytes + 8 + 2;  // master read and written, parameters written
    case Precision::kBF16Stochastic:
    case Precision::kF16Stochastic:
      return bytes + 4;
    case Precision::kBF16Residual:
      return bytes + 8;
  }
  return bytes;
}

int64_t written_bytes_per_parameter(const Mode& mode, bool momentum) {
  const int64_t moments = mode.kind == OptimizerKind::kSgd ? momentum : 2;
  return 4 * moments + size_of(compute_dtype(mode.precision)) + (keeps_master(mode.precision) ? 4 : 0) +
         (mode.precision == Precision::kBF16Residual ? 2 : 0);
}

// The two halves' fp32 values, wherever the tensors lie.
void join(Context& context, const Tensor& high, const Tensor& low, const Tensor& joined) {
  const int64_t n = joined.numel();
  std::vector<uint16_t> h(n), l(n);
  std::vector<float> values(n);
  const auto copy = [&](void* to, const void* from, int64_t bytes, bool up) {
    if (!context.on_gpu())
      std::memcpy(to, from, bytes);
    else if (up)
      context.gpu().upload(to, from, bytes);
    else
      context.gpu().download(to, from, bytes);
  };
  copy(h.data(), high.raw(), 2 * n, false), copy(l.data(), low.raw(), 2 * n, false);
  for (int64_t i = 0; i < n; ++i) values[i] = join_float({h[i], l[i]});
  copy(joined.raw(), values.data(), 4 * n, true);
}

// Cheap to make: large cases are timed, and their values matter little.
void fill_ramp(CaseRandom&, Array& a) {
  uint32_t state = 1;
  for (double& x : a.v) state = state * 1664525u + 1013904223u, x = state * 0x1p-32 + 0.01;
}

OpCase make(int64_t n, Mode mode, int64_t step, bool momentum = true, bool timed = false) {
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
    c.inputs.push_back({name, DType::kF32, {n}, timed ? fill_ramp : fill_uniform(low, 2)});
  };
  const Fill fill = timed ? fill_ramp : fill_normal();
  if (keeps_master(mode.precision)) {
    c.inputs.push_back({"master", DType::kF32, {n}, fill});
    c.outputs.push_back({"master", DType::kF32, {n}});
    c.outputs.push_back({"parameters", dtype, {n}});
  } else {
    c.inputs.push_back({"parameters", dtype, {n}, fill});
    c.outputs.push_back({"parameters", dtype, {n}});
  }
  if (mode.precision == Precision::kBF16Residual) {
    // Random low halves, as bytes: the harness has no 16-bit integers. `joined` is the fp32 value that the two halves
    // are.
    c.inputs.push_back({"residual", DType::kU8, {n, 2}, fill_below(256)});
    c.outputs.push_back({"residual", DType::kU8, {n, 2}});
    if (!timed) c.outputs.push_back({"joined", DType::kF32, {n}});
    c.tolerance["residual"] = {255, 0};  // judged as joined
  }
  c.inputs.push_back({"gradients", mode.gradient_dtype, {n}, fill});
  if (has_m) moment("moment1", -2), c.outputs.push_back({"moment1", DType::kF32, {n}});
  if (adam) moment("moment2", 0.01), c.outputs.push_back({"moment2", DType::kF32, {n}});

  c.forward = [=](Context& context, const Tensors& t) {
    const auto get = [&](const char* name) { return t.count(name) ? t.at(name) : Tensor(); };
    OptimizerBlocks b{
        mode.precision, get("parameters"), get("gradients"), get("moment1"), get("moment2"), get("master"), {}};
    if (t.count("residual")) b.residual = Tensor(t.at("residual").raw(), DType::kBF16, Shape{n}, context.device());
    optimizer_step(context, args, now, b);
    if (t.count("joined") && !context.planning()) join(context, b.parameters, b.residual, t.at("joined"));
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    for (int64_t i = 0; i < n; ++i) {
      double p = keeps_master(mode.precision) ? in.at("master")[i] : in.at("parameters")[i];
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
<<<<<<< HEAD
      if (keeps_master(mode.precision)) out["master"][i] = p;
      if (mode.precision == Precision::kBF16Residual) out["joined"][i] = p;
=======
      if (mode.precision == Precision::kBF16Master) out["master"][i] = p;
      if (out.count("joined")) out["joined"][i] = p;
>>>>>>> main
    }
  };
  // fp32 arithmetic of about ten operations; bf16 parameters to the spacing (stochastic: to either side).
  for (const char* name : {"moment1", "moment2", "master", "joined"}) c.tolerance[name] = {1e-6, 1e-6};
  const bool stochastic = mode.precision == Precision::kBF16Stochastic || mode.precision == Precision::kF16Stochastic;
  c.tolerance["parameters"] = dtype == DType::kF32 ? Tolerance{1e-6, 1e-6}
                              : dtype == DType::kF16
                                  ? (stochastic ? Tolerance{1e-6, 0x1p-10} : Tolerance{1e-6, 0x1.1p-11})
                              : stochastic ? Tolerance{1e-6, 0x1p-7}
                                           : Tolerance{1e-6, 0x1.02p-8};
  c.forward_budget.regions = n > 0;
  c.forward_budget.scratch_bytes = 0;
  c.forward_budget.bytes = n * bytes_per_parameter(mode, momentum);
  c.forward_gpu.launches = n > 0;
  c.forward_gpu.barriers = c.forward_gpu.atomics = c.forward_gpu.scratch_bytes = 0;
  c.forward_gpu.written_bytes = n * written_bytes_per_parameter(mode, momentum);
  c.forward_gpu.read_bytes = c.forward_budget.bytes - c.forward_gpu.written_bytes;
  if (dtype == DType::kF16) c.where = Where::kGpu;
  return c;
}

// A whole update that the host takes no part in: norm, the update's numbers, the update; then once more.
OpCase make_prepared(int64_t n, Mode mode, double max_norm, float loss_scale, double finite_before, int64_t interval,
                     double bad = 0) {
  const DType dtype = compute_dtype(mode.precision);
  const bool adam = mode.kind != OptimizerKind::kSgd;
  const OptimizerArgs args{.kind = mode.kind, .weight_decay = 0.05, .decay_end = n / 2, .seed = 5};
  const double rate = 0.01, updates = 6;
  OpCase c;
  c.name = fmt::format("{}/{}/{}/norm {}/loss scale {}/{} of {}{}", n, name_of(mode.kind), name_of(mode.precision),
                       max_norm, loss_scale, finite_before, interval, bad == 0 ? "" : fmt::format("/{}", bad));
  c.inputs = {{"gradients",
               mode.gradient_dtype,
               {n},
               [=](CaseRandom& random, Array& a) {
                 for (double& x : a.v) x = loss_scale * random.normal();
                 if (bad != 0) a.v[n / 3] = bad;
               }},
              {"numbers", DType::kF64, {kOptimizerNumbers}, fill_values({rate, updates, 2, finite_before, 0})},
              {"loss_scale", DType::kF32, {1}, fill_values({loss_scale})},
              {"moment1", DType::kF32, {n}, fill_uniform(-1, 1)}};
  if (adam) c.inputs.push_back({"moment2", DType::kF32, {n}, fill_uniform(0.01, 1)});
  const std::string fp32 = keeps_master(mode.precision) ? "master" : "parameters";
  c.inputs.push_back({"parameters", dtype, {n}});
  if (keeps_master(mode.precision)) c.inputs.push_back({"master", DType::kF32, {n}});
  for (size_t i = 1; i < c.inputs.size(); ++i)
    c.outputs.push_back({c.inputs[i].name, c.inputs[i].dtype, c.inputs[i].shape});
  c.outputs.push_back({"prepared", DType::kF32, {kOptimizerConstants}});
  c.tolerance["prepared"] = {1e30, 0};  // also holds integers: judged by what the update does
  if (bad != 0)
    for (const Operand& o : c.inputs) c.tolerance[o.name] = {0, 0};
  c.forward = [=](Context& context, const Tensors& t) {
    const OptimizerBlocks b{mode.precision,
                            t.at("parameters"),
                            t.at("gradients"),
                            t.at("moment1"),
                            adam ? t.at("moment2") : Tensor(),
                            keeps_master(mode.precision) ? t.at("master") : Tensor(),
                            {}};
    const Buffer squares = context.allocate({1}, DType::kF64, "squares"),
                 not_finite = context.allocate({1}, DType::kI32, "not_finite");
    const OptimizerState state{t.at("numbers"), t.at("loss_scale"), t.at("prepared")};
    gradient_norm(context, t.at("gradients"), squares, not_finite);
    optimizer_prepare(context, args, {.max_norm = max_norm, .growth_interval = interval, .largest_loss_scale = 4096},
                      squares, not_finite, state);
    optimizer_step(context, args, {.prepared = state.prepared}, b);
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    for (const char* name : {"numbers", "loss_scale", "moment1", "moment2", "master", "parameters"})
      if (in.count(name)) out[name] = in.at(name);
    double squares = 0;
    for (const double g : in.at("gradients").v) squares += g * g;
    Array& numbers = out["numbers"];
    numbers[kGradientNorm] = std::sqrt(squares) / loss_scale;
    double next = loss_scale;
    if (bad != 0) {
      numbers[kSkipped] += 1;
      if (interval > 0) next = loss_scale / 2, numbers[kFinite] = 0;
    } else {
      numbers[kUpdates] += 1;
      numbers[kFinite] += 1;
      if (interval > 0 && numbers[kFinite] >= static_cast<double>(interval))
        next = loss_scale * 2, numbers[kFinite] = 0;
    }
    out["loss_scale"][0] = next > 4096 ? loss_scale : next;
    if (bad != 0) return;
    const double norm = numbers[kGradientNorm], step = numbers[kUpdates];
    const double scale = (max_norm > 0 && norm > max_norm ? max_norm / norm : 1) / loss_scale;
    for (int64_t i = 0; i < n; ++i) {
      double p = in.at(fp32)[i], g = scale * in.at("gradients")[i];
      const double decay = i < args.decay_end ? args.weight_decay : 0;
      if (mode.kind == OptimizerKind::kAdamW)
        p -= rate * decay * p;
      else
        g += decay * p;
      if (adam) {
        const double m = args.beta1 * in.at("moment1")[i] + (1 - args.beta1) * g;
        const double v = args.beta2 * in.at("moment2")[i] + (1 - args.beta2) * g * g;
        p -= rate * m / (1 - std::pow(args.beta1, step)) / (std::sqrt(v / (1 - std::pow(args.beta2, step))) + args.eps);
        out["moment1"][i] = m, out["moment2"][i] = v;
      } else {
        const double m = args.momentum * in.at("moment1")[i] + g;
        p -= rate * m;
        out["moment1"][i] = m;
      }
      out[fp32][i] = out["parameters"][i] = p;
    }
  };
  if (bad == 0)
    for (const char* name : {"moment1", "moment2", "master"}) c.tolerance[name] = {1e-6, 1e-6};
  c.tolerance["numbers"] = {1e-12, 1e-12};
  if (dtype == DType::kF16) c.where = Where::kGpu;
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
  for (const OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kSgd})
    for (const Precision precision : {Precision::kF16Master, Precision::kF16Stochastic})
      for (const DType dtype : {DType::kF32, DType::kF16})
        for (const int64_t n : {1, 33, 255, 1025, 3001}) {
          cases.push_back(make(n, {kind, precision, dtype}, 3));
          if (n == 3001 && kind == OptimizerKind::kSgd) cases.push_back(make(n, {kind, precision, dtype}, 2, false));
        }
  for (const Mode& mode : {Mode{OptimizerKind::kAdam, Precision::kF32, DType::kF32},
                           Mode{OptimizerKind::kSgd, Precision::kF32, DType::kF32},
                           Mode{OptimizerKind::kAdamW, Precision::kBF16Stochastic, DType::kBF16},
                           Mode{OptimizerKind::kAdamW, Precision::kF16Master, DType::kF16},
                           Mode{OptimizerKind::kAdam, Precision::kF16Stochastic, DType::kF32}}) {
    cases.push_back(make_prepared(700, mode, 0, 1, 0, 0));         // neither clips nor scales
    cases.push_back(make_prepared(700, mode, 5, 1, 0, 0));         // clips
    cases.push_back(make_prepared(700, mode, 1000, 1024, 9, 10));  // too small to be clipped; the scale doubles
    cases.push_back(make_prepared(300, mode, 0.5f, 4096, 9, 10));  // the scale is at its largest
    for (const double bad : {INFINITY, -INFINITY}) cases.push_back(make_prepared(700, mode, 1, 512, 9, 10, bad));
  }
  for (const Mode& mode : {Mode{OptimizerKind::kAdam, Precision::kF32, DType::kF32},
                           Mode{OptimizerKind::kAdam, Precision::kBF16Stochastic, DType::kBF16},
                           Mode{OptimizerKind::kAdam, Precision::kBF16Residual, DType::kBF16},
                           Mode{OptimizerKind::kAdam, Precision::kBF16Master, DType::kBF16},
                           Mode{OptimizerKind::kAdam, Precision::kF16Stochastic, DType::kF16}}) {
    cases.push_back(make(210000000, mode, 10, true, true));
    cases.back().benchmark = true;
    cases.back().test = false;
    cases.back().where = Where::kGpu;
  }
  for (const Mode& mode : modes) {
    if (mode.kind == OptimizerKind::kAdamW || mode.gradient_dtype != compute_dtype(mode.precision)) continue;
    cases.push_back(make(8 << 20, mode, 10));
    // Joining is the harness's work, many times that of the operator: not to be timed.
    std::erase_if(cases.back().outputs, [](const Operand& o) { return o.name == "joined"; });
    cases.back().benchmark = true;
    cases.back().test = false;
    cases.back().where = Where::kCpu;
  }
  return cases;
}

}  // namespace frit
