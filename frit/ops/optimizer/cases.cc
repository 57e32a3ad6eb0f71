#include <cmath>
#include <cstring>
#include <optional>

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
      if (keeps_master(mode.precision)) out["master"][i] = p;
      if (out.count("joined")) out["joined"][i] = p;
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
  const double rate = 0.01, updates = 6, ema_decay = 0.9;
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
              {"numbers", DType::kF64, {kOptimizerNumbers}, fill_values({rate, updates, 2, finite_before, 0, 0.5})},
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
    optimizer_prepare(
        context, args,
        {.max_norm = max_norm, .growth_interval = interval, .largest_loss_scale = 4096, .ema_decay = ema_decay},
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
      numbers[kEmaStep] = 0;
      if (interval > 0) next = loss_scale / 2, numbers[kFinite] = 0;
    } else {
      numbers[kUpdates] += 1;
      numbers[kFinite] += 1;
      // The weights of the updates fall by the decay and sum to 1: the newest one's is this.
      double weights = 0;
      for (int i = 0; i < numbers[kUpdates]; ++i) weights += std::pow(ema_decay, i);
      numbers[kEmaStep] = 1 / weights;
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

// The rate of the update after `updates`, from a window of `count` rates from update `first` on, and the loss's factor.
OpCase make_begin(int64_t count, double first, double updates, float loss_scale) {
  OpCase c;
  c.name = fmt::format("begin/{} rates from {}/{} updates/loss scale {}", count, first, updates, loss_scale);
  c.inputs = {{"rates", DType::kF64, {count}, fill_uniform(1e-4, 1e-2)},
              {"first", DType::kF64, {1}, fill_values({first})},
              {"inverse_tokens", DType::kF32, {1}, fill_values({1.0 / 3001})},
              {"numbers", DType::kF64, {kOptimizerNumbers}, fill_values({0.5, updates, 2, 3, 4, 0.25})}};
  if (loss_scale > 0) c.inputs.push_back({"loss_scale", DType::kF32, {1}, fill_values({loss_scale})});
  c.outputs = {{"numbers", DType::kF64, {kOptimizerNumbers}}, {"scale", DType::kF32, {1}}};
  c.tolerance["numbers"] = {0, 0};
  c.tolerance["scale"] = {0, 0x1p-24};
  c.forward = [=](Context& context, const Tensors& t) {
    const OptimizerState state{t.at("numbers"), loss_scale > 0 ? t.at("loss_scale") : Tensor(), {}};
    optimizer_begin(context, t.at("rates"), t.at("first"), t.at("inverse_tokens"), state, t.at("scale"));
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    int64_t at = 0;
    while (at + 1 < count && first + static_cast<double>(at) < updates + 1) ++at;
    out["numbers"] = in.at("numbers");
    out["numbers"][kLearningRate] = in.at("rates")[at];
    out["scale"][0] = in.at("inverse_tokens")[0] * (loss_scale > 0 ? in.at("loss_scale")[0] : 1);
  };
  c.forward_budget.regions = c.forward_budget.scratch_bytes = 0;
  c.forward_gpu.launches = 1;
  c.forward_gpu.barriers = c.forward_gpu.atomics = c.forward_gpu.scratch_bytes = 0;
  c.forward_gpu.read_bytes = 3 * 8 + 4 + (loss_scale > 0 ? 4 : 0);
  c.forward_gpu.written_bytes = 8 + 4;
  return c;
}

// The blocks that hold the parameters' values, as inputs; `residual` as bytes, as in make().
void add_values(OpCase& c, int64_t n, Precision precision, const Fill& fill = fill_normal()) {
  if (keeps_master(precision)) c.inputs.push_back({"master", DType::kF32, {n}, fill});
  c.inputs.push_back({"parameters", compute_dtype(precision), {n}, fill});
  if (precision == Precision::kBF16Residual) c.inputs.push_back({"residual", DType::kU8, {n, 2}, fill_below(256)});
}
OptimizerBlocks blocks_of(Context& context, int64_t n, Precision precision, const Tensors& t) {
  const auto get = [&](const char* name) { return t.count(name) ? t.at(name) : Tensor(); };
  OptimizerBlocks b{precision, get("parameters"), get("gradients"), get("moment1"), get("moment2"), get("master"), {}};
  if (t.count("residual")) b.residual = Tensor(t.at("residual").raw(), DType::kBF16, Shape{n}, context.device());
  return b;
}
// The fp32 value of element i.
float value_of(const Arrays& in, Precision precision, int64_t i) {
  const float p = static_cast<float>(in.at(keeps_master(precision) ? "master" : "parameters")[i]);
  if (precision != Precision::kBF16Residual) return p;
  const uint16_t low = static_cast<uint16_t>(in.at("residual")[2 * i] + 256 * in.at("residual")[2 * i + 1]);
  return join_float({bfloat16(p).bits, low});
}
int64_t bytes_of_value(Precision precision) {
  return precision == Precision::kF32 || keeps_master(precision) || precision == Precision::kBF16Residual ? 4 : 2;
}

// `step`: what the device's numbers say, or nothing.
OpCase make_ema(int64_t n, Precision precision, double decay, std::optional<double> step = {}) {
  OpCase c;
  c.name = fmt::format("ema/{}/{}/decay {}{}", n, name_of(precision), decay,
                       step ? fmt::format("/step {} on the device", *step) : "");
  add_values(c, n, precision);
  c.inputs.push_back({"ema", DType::kF32, {n}});
  if (step) c.inputs.push_back({"numbers", DType::kF64, {kOptimizerNumbers}, fill_values({0.1, 20, 0, 20, 1, *step})});
  c.outputs = {{"ema", DType::kF32, {n}}};
  const double move = step ? *step : 1 - decay;
  c.forward = [=](Context& context, const Tensors& t) {
    ema_update(context, decay, blocks_of(context, n, precision, t), t.at("ema"), step ? t.at("numbers") : Tensor());
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    for (int64_t i = 0; i < n; ++i) {
      const double e = in.at("ema")[i];
      out["ema"][i] = (1 - move) * e + move * value_of(in, precision, i);
    }
  };
  c.tolerance["ema"] = {1e-12, 0x1.0001p-24};  // one rounding to fp32
  c.forward_budget.regions = n > 0 && move != 0;
  c.forward_budget.scratch_bytes = 0;
  c.forward_budget.bytes = n * (8 + bytes_of_value(precision));
  c.forward_gpu.launches = n > 0;
  c.forward_gpu.barriers = c.forward_gpu.atomics = c.forward_gpu.scratch_bytes = 0;
  c.forward_gpu.read_bytes = n * (4 + bytes_of_value(precision)) + (step ? (n + 511) / 512 * 32 * 8 : 0);
  c.forward_gpu.written_bytes = move == 0 ? 0 : n * 4;
  if (compute_dtype(precision) == DType::kF16) c.where = Where::kGpu;
  return c;
}

OpCase make_exchange(int64_t n, Precision precision, bool in_model) {
  const DType dtype = compute_dtype(precision);
  const bool wide = dtype == DType::kF32;
  OpCase c;
  c.name = fmt::format("exchange/{}/{}/{}", n, name_of(precision), in_model ? "in" : "out");
  add_values(c, n, precision);
  c.inputs.push_back({"ema", DType::kF32, {n}});
  c.outputs = {{"parameters", dtype, {n}}};
  if (wide) c.outputs.push_back({"ema", DType::kF32, {n}});
  if (!wide) (in_model ? c.outputs : c.inputs).push_back({"aside", dtype, {n}});
  c.forward = [=](Context& context, const Tensors& t) {
    ema_exchange(context, in_model, blocks_of(context, n, precision, t), t.at("ema"), wide ? Tensor() : t.at("aside"));
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    out["parameters"] = in.at(wide || in_model ? "ema" : "aside");
    if (wide) out["ema"] = in.at("parameters");
    if (!wide && in_model) out["aside"] = in.at("parameters");
  };
  for (const char* name : {"ema", "aside", "parameters"}) c.tolerance[name] = {0, 0};
  if (!wide && in_model)  // one rounding
    c.tolerance["parameters"] = dtype == DType::kBF16 ? Tolerance{0, 0x1p-8} : Tolerance{0x1p-25, 0x1p-11};
  c.forward_budget.regions = n > 0;
  c.forward_budget.scratch_bytes = 0;
  c.forward_gpu.launches = n > 0;
  c.forward_gpu.barriers = c.forward_gpu.atomics = c.forward_gpu.scratch_bytes = 0;
  c.forward_gpu.read_bytes = n * (wide ? 8 : in_model ? 6 : 2);
  c.forward_gpu.written_bytes = n * (wide ? 8 : in_model ? 4 : 2);
  c.forward_budget.bytes = c.forward_gpu.read_bytes + c.forward_gpu.written_bytes;
  if (dtype == DType::kF16) c.where = Where::kGpu;
  return c;
}

// Powers of ten of either sign, and zeros: updates from far below a spacing to far above it.
void fill_powers(CaseRandom& random, Array& a) {
  for (double& x : a.v) {
    const double size = std::pow(10, -12 + 12 * random.uniform()), kind = random.uniform();
    x = kind < 0.4 ? 0 : kind < 0.7 ? size : -size;
  }
}

// What 16 bits alone keep of x. random: of the element.
double kept_alone(double x, Precision precision, bool nearest, uint32_t random) {
  const float wide = static_cast<float>(x);
  const bool bf16 = precision == Precision::kBF16Stochastic;
  if (nearest) return bf16 ? static_cast<float>(bfloat16(wide)) : static_cast<float>(float16(wide));
  // In units of the spacing: 8 or 11 significant bits, in fp16 not below 2^-24. The way to the next number is cut into
  // as many steps as fp32 has there, 2^16 at most.
  const int exponent = wide == 0 ? -126 : std::ilogb(wide);
  const bool small = !bf16 && exponent < -14;
  const double spacing = std::ldexp(1, bf16 ? exponent - 7 : small ? -24 : exponent - 10);
  const int bits = bf16 || small ? 16 : 13;
  const double size = std::abs(static_cast<double>(wide)) / spacing, below = std::floor(size);
  const double steps = std::floor((size - below) * std::ldexp(1, bits)) + (random >> (16 - bits));
  return std::copysign((below + (steps >= std::ldexp(1, bits))) * spacing, wide);
}

// ends: of the slices.
OpCase make_swallowed(int64_t n, Mode mode, bool nearest, std::vector<int64_t> ends, int64_t step = 3,
                      bool momentum = true) {
  const bool adam = mode.kind != OptimizerKind::kSgd, has_m = adam || momentum;
  const int64_t slices = static_cast<int64_t>(ends.size());
  const bool alone = mode.precision == Precision::kBF16Stochastic || mode.precision == Precision::kF16Stochastic;
  OptimizerArgs args{.kind = mode.kind, .momentum = momentum ? 0.9 : 0.0, .weight_decay = 0.05, .decay_end = n / 5};
  args.seed = 7, args.nearest = nearest;
  const OptimizerStep now{.learning_rate = 0.01, .step = step, .gradient_scale = 0.5f};
  OpCase c;
  c.name = fmt::format("swallowed/{}/{} slices/{}{}/{}{}/{} gradients", n, slices, name_of(mode.kind),
                       momentum ? "" : " without momentum", name_of(mode.precision), nearest ? " to nearest" : "",
                       name_of(mode.gradient_dtype));
  add_values(c, n, mode.precision);
  c.inputs.push_back({"gradients", mode.gradient_dtype, {n}, fill_powers});
  if (has_m) c.inputs.push_back({"moment1", DType::kF32, {n}, fill_powers});
  if (adam) c.inputs.push_back({"moment2", DType::kF32, {n}, fill_uniform(0.01, 2)});
  c.inputs.push_back({"ends", DType::kI64, {slices}, fill_values(std::vector<double>(ends.begin(), ends.end()))});
  c.inputs.push_back({"counts", DType::kI64, {slices, 2}, fill_below(1000)});
  c.outputs = {{"counts", DType::kI64, {slices, 2}}};
  c.tolerance["counts"] = {0, 0};
  c.forward = [=](Context& context, const Tensors& t) {
    optimizer_swallowed(context, args, now, blocks_of(context, n, mode.precision, t), t.at("ends"), t.at("counts"));
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    out["counts"] = in.at("counts");
    int64_t slice = 0;
    for (int64_t i = 0; i < n; ++i) {
      while (slice < slices && ends[slice] <= i) ++slice;
      if (slice == slices) break;
      const double p = value_of(in, mode.precision, i), lr = now.learning_rate,
                   decay = i < args.decay_end ? args.weight_decay : 0;
      double g = now.gradient_scale * in.at("gradients")[i], update = 0;
      if (mode.kind != OptimizerKind::kAdamW) g += decay * p;
      if (adam) {
        const double m = args.beta1 * in.at("moment1")[i] + (1 - args.beta1) * g;
        const double v = args.beta2 * in.at("moment2")[i] + (1 - args.beta2) * g * g;
        const double m_hat = m / (1 - std::pow(args.beta1, step)), v_hat = v / (1 - std::pow(args.beta2, step));
        update = lr * m_hat / (std::sqrt(v_hat) + args.eps);
      } else {
        update = lr * (momentum ? args.momentum * in.at("moment1")[i] + g : g);
      }
      if (mode.kind == OptimizerKind::kAdamW) update += lr * decay * p;
      if (update == 0) continue;
      const PhiloxBlock block =
          philox({args.seed, static_cast<uint32_t>(step)}, static_cast<uint32_t>(i / 8), 0, 0, kRoundingSite);
      const uint32_t random = block.v[i % 8 / 2] >> (16 * (i % 2)) & 0xffffu;
      const double kept =
          alone ? kept_alone(p - update, mode.precision, nearest, random) : static_cast<float>(p - update);
      out["counts"][2 * slice] += 1;
      out["counts"][2 * slice + 1] += kept == p;
    }
  };
  c.forward_budget.regions = slices > 0;
  c.forward_budget.scratch_bytes = 0;
  c.forward_gpu.launches = n > 0 && slices > 0;
  c.forward_gpu.barriers = c.forward_gpu.scratch_bytes = 0;
  if (slices == 1 && ends[0] == n) {
    // A warp has 2048 elements; each thread finds the slice in one look, and reads its end.
    const int64_t warps = (n + 2047) / 2048;
    c.forward_gpu.read_bytes =
        n * (bytes_per_parameter(mode, momentum) - written_bytes_per_parameter(mode, momentum)) + warps * 32 * 2 * 8;
    c.forward_gpu.written_bytes = 0;
    if (n > 30) c.forward_gpu.atomics = 2 * warps;  // something moves in each
  }
  if (compute_dtype(mode.precision) == DType::kF16) c.where = Where::kGpu;
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
  for (const float loss_scale : {0.0f, 1024.0f}) {
    cases.push_back(make_begin(1, 1, 0, loss_scale));
    cases.push_back(make_begin(64, 101, 100, loss_scale));  // the window's first
    cases.push_back(make_begin(64, 101, 117, loss_scale));
    cases.push_back(make_begin(64, 101, 163, loss_scale));  // its last
    cases.push_back(make_begin(7, 101, 107, loss_scale));   // one behind it
    cases.push_back(make_begin(7, 101, 10, loss_scale));    // far before it
  }
  constexpr Precision kPrecisions[] = {Precision::kF32,          Precision::kBF16Master, Precision::kBF16Stochastic,
                                       Precision::kBF16Residual, Precision::kF16Master,  Precision::kF16Stochastic};
  for (const Precision precision : kPrecisions) {
    for (const int64_t n : {0, 1, 31, 128, 513, 1025, 5003}) cases.push_back(make_ema(n, precision, 0.99));
    cases.push_back(make_ema(700, precision, 0));
    for (const double step : {0.0, 0.25, 1.0}) cases.push_back(make_ema(1023, precision, 0.5, step));
    for (const int64_t n : {0, 1, 31, 128, 513, 5003})
      for (const bool in : {true, false}) cases.push_back(make_exchange(n, precision, in));
  }
  for (const Precision precision : kPrecisions) {
    for (const OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kSgd}) {
      for (const bool nearest : {false, true}) {
        if (nearest && precision != Precision::kBF16Stochastic && precision != Precision::kF16Stochastic) continue;
        const Mode mode{kind, precision, compute_dtype(precision)};
        for (const int64_t n : {1, 33, 1025, 5003}) cases.push_back(make_swallowed(n, mode, nearest, {n}));
        // Slices of one element, of none, in the middle of everything, past 2048; the tail is nobody's.
        cases.push_back(make_swallowed(6000, mode, nearest, {1, 2, 2, 130, 256, 777, 4096, 4500, 5900}));
      }
      if (precision != Precision::kF32)
        cases.push_back(make_swallowed(3001, {kind, precision, DType::kF32}, false, {1000, 3001}));
    }
    const Mode sgd{OptimizerKind::kSgd, precision, compute_dtype(precision)};
    cases.push_back(make_swallowed(2500, sgd, false, {2500}, 2, false));
    cases.push_back(make_swallowed(70, sgd, false, {}));
  }
  cases.push_back(make_swallowed(0, {OptimizerKind::kAdam, Precision::kF32, DType::kF32}, false, {0, 0}));
  std::vector<int64_t> ends;  // many slices
  for (int64_t end = 0; end < 20000; end += 37 + end % 301) ends.push_back(end);
  cases.push_back(make_swallowed(20000, {OptimizerKind::kAdam, Precision::kBF16Stochastic, DType::kBF16}, false, ends));
  for (const Mode& mode : {Mode{OptimizerKind::kAdam, Precision::kF32, DType::kF32},
                           Mode{OptimizerKind::kAdam, Precision::kBF16Stochastic, DType::kBF16},
                           Mode{OptimizerKind::kAdam, Precision::kBF16Residual, DType::kBF16},
                           Mode{OptimizerKind::kAdam, Precision::kBF16Master, DType::kBF16}}) {
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
