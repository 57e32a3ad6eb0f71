#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "frit/ops/case.h"
#include "frit/ops/criterion/criterion.h"
#include "frit/ops/criterion/gpu.h"

namespace frit {
namespace {

struct Options {
  double smoothing = 0.1;
  bool bias = false;
  DType bias_dtype = DType::kF32;
  double scale = 1;  // 0: no gradient
  int64_t stride = 0;
  Fill fill = fill_normal(0, 3);
  const char* note = "";
};

// What the instance that is chosen freely costs on the GPU (in the simulator: 4 multiprocessors). Labels and scale are
// read by every thread; the label's gradient is written once more, over what all columns get.
GpuBudget gpu_budget(int64_t tokens, int64_t vocabulary, DType dtype, const Options& o) {
  if (tokens == 0) return {0, 0, 0, 0, 0, 0};
  const bool gradient = o.scale != 0;
  const auto is_pad = [](int64_t t) { return t % 5 == 2; };
  const int64_t size = size_of(dtype), bias = o.bias ? size_of(o.bias_dtype) : 0;
  int64_t live = 0;
  for (int64_t t = 0; t < tokens; ++t) live += !is_pad(t);
  const int64_t limit = 227 * 1024;
  const CriterionBlock block = CriterionBlock::of(vocabulary, dtype, o.bias);
  const int64_t written = 8 * tokens + (gradient ? (tokens * vocabulary + live) * size : 0);
  if (vocabulary <= criterion_warp_columns(dtype))
    return {1,
            0,
            live * vocabulary * (size + bias * (gradient ? 3 : 2)) + 128 * tokens + (gradient ? 128 * live : 0),
            written - (gradient ? live * size : 0),
            0,
            0};
  if (block.shared_bytes <= limit) {
    const int64_t blocks = block.blocks(tokens, limit, 4);
    int64_t most = 0;  // rows with a label that one block has
    for (int64_t b = 0; b < blocks; ++b) {
      int64_t rows = 0;
      for (int64_t t = b; t < tokens; t += blocks) rows += !is_pad(t);
      most = std::max(most, rows);
    }
    return {1,
            2 * most,
            live * vocabulary * (size + bias * (gradient ? 3 : 2)) + live * bias + 4 * block.threads * tokens +
                (gradient ? 4 * block.threads * blocks : 0),
            written,
            0,
            0};
  }
  return {1,
          live > 0 ? 1 : 0,
          live * (vocabulary * (gradient ? 2 : 1) + 1) * (size + bias) +
              4 * kCriterionTwoPassThreads * (tokens + (gradient ? live : 0)),
          written,
          0,
          0};
}

OpCase make(int64_t tokens, int64_t vocabulary, DType dtype, Options o = {}) {
  OpCase c;
  c.name = fmt::format("{}x{}/{}/a{}{}{}{}{}", tokens, vocabulary, name_of(dtype), o.smoothing,
                       o.bias ? fmt::format("/{}_bias", name_of(o.bias_dtype)) : "", o.scale == 0 ? "/loss_only" : "",
                       o.stride ? "/strided" : "", o.note);
  c.inputs = {{"logits", dtype, {tokens, vocabulary}, o.fill, o.stride}};
  if (o.bias) c.inputs.push_back({"bias", o.bias_dtype, {vocabulary}});
  c.inputs.push_back({"labels", DType::kI32, {tokens}, [=](CaseRandom& random, Array& a) {
                        for (double& v : a.v) v = static_cast<double>(random.below(vocabulary));
                        for (size_t t = 2; t < a.v.size(); t += 5) a.v[t] = -1;  // pads
                        if (a.v.size() > 1) a.v[1] = static_cast<double>(vocabulary - 1);
                      }});
  const bool gradient = o.scale != 0;
  if (gradient) c.inputs.push_back({"scale", DType::kF32, {1}, fill_uniform(o.scale, o.scale)});
  c.outputs = {{"loss", DType::kF32, {tokens}}, {"nll", DType::kF32, {tokens}}};
  if (gradient) c.outputs.push_back({"logits", dtype, {tokens, vocabulary}, fill_normal(), o.stride});
  const float smoothing = static_cast<float>(o.smoothing);
  c.forward = [=](Context& context, const Tensors& t) {
    criterion_forward_backward(context, t.at("logits"), o.bias ? t.at("bias") : Tensor(), t.at("labels"), smoothing,
                               gradient ? t.at("scale") : Tensor(), t.at("loss"), t.at("nll"));
  };
  const auto oracle = [=](const Arrays& in, Arrays& out, const std::string& dlogits, bool losses) {
    const Array logits = in.at("logits");
    const double a = static_cast<double>(smoothing), v = static_cast<double>(vocabulary);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t label = static_cast<int64_t>(in.at("labels")[t]);
      if (label < 0) {
        for (int64_t i = 0; i < vocabulary && !dlogits.empty(); ++i) out[dlogits][t * vocabulary + i] = 0;
        continue;
      }
      const auto x = [&](int64_t i) { return logits[t * vocabulary + i] + (o.bias ? in.at("bias")[i] : 0); };
      double top = x(0), sum = 0, all = 0;
      for (int64_t i = 1; i < vocabulary; ++i) top = std::max(top, x(i));
      for (int64_t i = 0; i < vocabulary; ++i) sum += std::exp(x(i) - top), all += x(i);
      const double log_sum = top + std::log(sum);
      if (losses) {
        out["nll"][t] = log_sum - x(label);
        out["loss"][t] = a == 0 ? log_sum - x(label) : (1 - a) * (log_sum - x(label)) + a * (log_sum - all / v);
      }
      for (int64_t i = 0; i < vocabulary && !dlogits.empty(); ++i)
        out[dlogits][t * vocabulary + i] =
            (std::exp(x(i) - log_sum) - a / v - (i == label ? 1 - a : 0)) * in.at("scale")[0];
    }
  };
  c.oracle = [=](const Arrays& in, Arrays& out) { oracle(in, out, gradient ? "logits" : "", true); };
  // Gradients are below `scale` in size, most of them far below: the error allowed shrinks with them.
  if (gradient) {
    const double unit = dtype == DType::kF32 ? 2e-6 : dtype == DType::kBF16 ? 0x1p-8 : 0x1p-10;
    const double smallest = dtype == DType::kF16 ? 0x1p-24 : 0;  // f16's subnormal numbers lie that far apart
    c.tolerance["logits"] = {o.scale * (dtype == DType::kF32 ? 4e-7 : 0x1p-20) + smallest, unit};
  }
  const int64_t bytes = tokens * vocabulary * size_of(dtype) * (gradient ? 2 : 1);
  c.forward_budget = {tokens == 0 ? 0 : 1, 0, bytes + 12 * tokens + (o.bias ? vocabulary * size_of(o.bias_dtype) : 0)};
  c.forward_gpu = gpu_budget(tokens, vocabulary, dtype, o);
  c.backward_gpu = {0, 0, 0, 0, 0, 0};
  if (dtype == DType::kF16) c.where = Where::kGpu;
  if (!gradient) return c;
  // The gradient is there after forward: backward only hands it to the harness, for sum(loss) * scale.
  c.incoming = {"loss"};
  c.incoming_fill = fill_uniform(o.scale, o.scale);
  c.differentiable = {"logits"};
  c.backward = [=](Context& context, const Tensors& t, bool) {
    if (context.planning()) return;
    const Tensor &from = t.at("logits"), &to = t.at("dlogits");
    const size_t row_bytes = static_cast<size_t>(vocabulary * size_of(dtype));
    std::vector<char> row(row_bytes);
    for (int64_t r = 0; r < tokens; ++r) {
      char* target = static_cast<char*>(to.raw()) + r * to.row_stride() * size_of(dtype);
      const char* source = static_cast<const char*>(from.raw()) + r * from.row_stride() * size_of(dtype);
      if (context.on_gpu()) {
        context.gpu().download(row.data(), source, row_bytes);
        context.gpu().upload(target, row.data(), row_bytes);
      } else {
        std::memcpy(target, source, row_bytes);
      }
    }
  };
  c.gradient_oracle = [=](const Arrays& in, Arrays& out) { oracle(in, out, "dlogits", false); };
  c.gradient_tolerance["logits"] = c.tolerance["logits"];
  return c;
}

// Every fifth logit of a row is -inf (a mask of forbidden tokens), but not the label's.
void fill_masked(CaseRandom& random, Array& a) {
  for (size_t i = 0; i < a.v.size(); ++i)
    a.v[i] = i % 7 == 3 ? -std::numeric_limits<double>::infinity() : random.normal();
}

// For large tensors: normal numbers drawn from a table.
void fill_quickly(CaseRandom& random, Array& a) {
  std::vector<double> table(1 << 16);
  for (double& v : table) v = 3 * random.normal();
  uint64_t state = 1;
  for (double& v : a.v) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    v = table[state >> 48];
  }
}

// Every instance that can run the case.
OpCase with_instances(OpCase c) {
  const int64_t vocabulary = c.inputs[0].shape[1];
  const DType dtype = c.inputs[0].dtype;
  if (vocabulary <= criterion_warp_columns(dtype)) c.forward_instances.push_back("warp");
  if (CriterionBlock::of(vocabulary, dtype, true).shared_bytes <= 227 * 1024) c.forward_instances.push_back("shared");
  c.forward_instances.push_back("two_pass");
  return c;
}

}  // namespace

std::vector<OpCase> criterion_cases() {
  std::vector<OpCase> cases;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int64_t vocabulary : {1, 2, 31, 32, 33, 127, 511, 512, 513, 1023, 1024, 1025}) {
      for (int64_t tokens : {0, 1, 3}) cases.push_back(make(tokens, vocabulary, dtype));
      if (vocabulary == 1 || vocabulary == 33 || vocabulary == 512 || vocabulary == 1025)
        cases.back() = with_instances(cases.back());
      if (vocabulary < 128) cases.push_back(make(67, vocabulary, dtype));
    }
    // On the borders of the GPU's instances.
    for (int64_t vocabulary : {criterion_warp_columns(dtype), criterion_warp_columns(dtype) + 1})
      cases.push_back(with_instances(make(9, vocabulary, dtype)));
    cases.push_back(make(61, 8199, dtype));  // more rows than blocks
    cases.push_back(with_instances(make(3, 8001, dtype, {.bias = true})));
    cases.push_back(make(2, 131072 + 77, dtype));  // more columns than 256 chunks of 512, or than shared memory holds
    cases.push_back(make(33, 65, dtype, {.smoothing = 0}));
    cases.push_back(make(33, 65, dtype, {.smoothing = 1}));
    cases.push_back(with_instances(make(33, 65, dtype, {.bias = true, .scale = 0.25})));
    cases.push_back(with_instances(make(33, 65, dtype, {.bias = true, .scale = 0})));
    cases.push_back(with_instances(make(3, 1025, dtype, {.scale = 0})));
    cases.push_back(make(5, 600, dtype, {.scale = 1024}));
    cases.push_back(with_instances(make(17, 65, dtype, {.stride = 72})));
    cases.push_back(make(4, 33, dtype, {.stride = int64_t{1} << 30}));  // the last row begins past 2^31 elements
    cases.push_back(with_instances(make(5, 1025, dtype, {.fill = fill_normal(300, 50), .note = "/large"})));
    cases.push_back(with_instances(make(5, 1025, dtype, {.fill = fill_uniform(-1e4, -9e3), .note = "/far_below"})));
    OpCase masked = make(5, 1025, dtype, {.smoothing = 0, .fill = fill_masked, .note = "/masked"});
    for (Operand& operand : masked.inputs)
      if (operand.name == "labels") operand.fill = fill_values({0, 1, -1, 700, 1023});
    masked.finite_difference_step = 0;  // moving an infinite logit is no difference
    cases.push_back(with_instances(masked));
    if (dtype == DType::kF16) continue;
    for (auto [tokens, vocabulary] : {std::pair<int64_t, int64_t>{1024, 8000}, {512, 32768}}) {
      cases.push_back(make(tokens, vocabulary, dtype));
      cases.back().backward = nullptr;
      cases.back().where = Where::kCpu;
      cases.back().benchmark = true, cases.back().test = false;
    }
  }
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    cases.push_back(with_instances(make(9, 200, dtype, {.bias = true, .bias_dtype = dtype})));
    cases.push_back(with_instances(make(9, 2500, dtype, {.bias = true, .bias_dtype = dtype})));
  }
  for (auto [tokens, vocabulary] : {std::pair<int64_t, int64_t>{4096, 32768}, {16384, 50304}, {16384, 50257}}) {
    cases.push_back(with_instances(make(tokens, vocabulary, DType::kBF16, {.fill = fill_quickly, .note = "/timed"})));
    cases.back().backward = nullptr;
    cases.back().where = Where::kGpu;
    cases.back().benchmark = true, cases.back().test = false;
  }
  return cases;
}

}  // namespace frit
