#include <algorithm>
#include <cmath>

#include "frit/ops/bias_activation_dropout/bias_activation_dropout.h"
#include "frit/ops/case.h"
#include "frit/ops/column_sum/cpu.h"

namespace frit {
namespace {

struct Options {
  float p_drop = 0.2f;
  bool bias = true;
  int64_t stride = 0;
  DType dbias = DType::kF32;
  bool in_place = false;
  bool from_output = false;  // backward is relu_dropout_backward
  Fill fill = fill_normal(0, 2);
  const char* note = "";
};

double value(Activation activation, double x) {
  switch (activation) {
    case Activation::kRelu:
      return x > 0 ? x : 0;
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
  }
  return 0;
}
double slope(Activation activation, double x) {
  switch (activation) {
    case Activation::kRelu:
      return x > 0 ? 1 : 0;
    case Activation::kGelu:
      return 0.5 * std::erfc(-x / std::sqrt(2.0)) + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
    case Activation::kGeluTanh: {
      const double root = std::sqrt(2 / M_PI), t = std::tanh(root * (x + 0.044715 * x * x * x));
      return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
    }
    case Activation::kSilu: {
      const double s = 1 / (1 + std::exp(-x));
      return s * (1 + x * (1 - s));
    }
  }
  return 0;
}

// The GPU walks rows in classes of equal alignment (frit/simt/columns.h). A thread reads its columns of the
// bias once, for 2 to 8 rows in forward. Partial sums are kept by at most 132 blocks of 768 threads with 4 rows
// or more each in 16 bits, of 512 with 8 in 32. Stated where a row is whole vectors.
void state_gpu_budgets(OpCase& c, int64_t rows, int64_t cols, DType dtype, const Options& o) {
  const int64_t n = 16 / size_of(dtype), s = size_of(dtype);
  if (rows == 0 || cols == 0 || cols % n || o.stride % n || cols > 256 * n) return;
  const int64_t lanes = std::min(rows, 256 / (cols / n));
  const auto blocks = [&](int64_t rows_a_thread, int64_t most) {
    return std::min((rows + lanes * rows_a_thread - 1) / (lanes * rows_a_thread), most);
  };
  const int64_t bias_reads = blocks(std::clamp<int64_t>(rows * cols / n / (1 << 18) * 2, 2, 8), rows) * lanes;
  c.forward_gpu = {1, 0, rows * cols * s + (o.bias ? bias_reads * cols * s : 0), rows * cols * s, 0, 0};
  const int64_t sum_lanes = std::min(rows, (s == 2 ? 768 : 512) / (cols / n)), each = 32 / n;
  const int64_t pieces = std::min<int64_t>((rows + sum_lanes * each - 1) / (sum_lanes * each), 132),
                partial = pieces * cols * 4;
  if (o.bias)
    c.backward_gpu = {2,
                      (sum_lanes > 1 ? 1 : 0) + 1,
                      rows * cols * s * 2 + (o.from_output ? 0 : pieces * sum_lanes * cols * s) + partial,
                      rows * cols * s + partial + cols * size_of(o.dbias),
                      0,
                      static_cast<int64_t>(align_up(partial))};
  else
    c.backward_gpu = {1, 0, rows * cols * s * 2, rows * cols * s, 0, 0};
}

OpCase make(int64_t rows, int64_t cols, DType dtype, Activation activation, Options o = {}) {
  OpCase c;
  c.name =
      fmt::format("{}x{}/{}/{}/p{}{}{}{}{}{}", rows, cols, name_of(dtype), name_of(activation), o.p_drop,
                  o.bias ? "" : "/no_bias", o.stride ? "/strided" : "", o.dbias == DType::kF32 ? "" : "/bf16_dbias",
                  o.in_place      ? "/y_is_x"
                  : o.from_output ? "/from_output"
                                  : "",
                  o.note);
  const Dropout dropout{o.p_drop, dropout_site("case"), 1, {5, 9}};
  const auto factor = [=](int64_t i) {
    return !dropout.active() ? 1 : dropout.keep(i / cols, i % cols) ? static_cast<double>(dropout.scale()) : 0;
  };
  c.inputs = {{"x", dtype, {rows, cols}, o.fill, o.stride}};
  if (o.bias) c.inputs.push_back({"bias", dtype, {cols}});
  const std::string out = o.in_place ? "x" : "y";
  c.outputs = {{out, dtype, {rows, cols}, fill_normal(), o.stride}};
  c.forward = [=](Context& context, const Tensors& t) {
    bias_activation_dropout_forward(context, t.at("x"), o.bias ? t.at("bias") : Tensor(), activation, dropout,
                                    t.at(out));
  };
  c.oracle = [=](const Arrays& in, Arrays& result) {
    const Array x = in.at("x");
    for (int64_t i = 0; i < rows * cols; ++i)
      result[out][i] = factor(i) * value(activation, x[i] + (o.bias ? in.at("bias")[i % cols] : 0));
  };
  // The functions themselves are good to about 1e-6 of their value; x + bias, rounded to fp32, moves far tails a little
  // more.
  if (dtype == DType::kF32) c.tolerance[out] = {2e-6, 2e-6};
  c.forward_budget = {rows * cols == 0 ? 0 : 1, 0,
                      rows * cols * size_of(dtype) * 2 + (o.bias ? cols * size_of(dtype) : 0)};
  state_gpu_budgets(c, rows, cols, dtype, o);
  if (dtype == DType::kF16) c.where = Where::kGpu;
  if (o.in_place) return c;
  c.incoming = {"y"};
  c.differentiable = {"x"};
  if (o.bias) {
    c.differentiable.push_back("bias");
    c.accumulates = {"bias"};
    c.gradient_dtype["bias"] = o.dbias;
    c.gradient_tolerance["bias"] =
        tolerance_for(o.dbias, o.dbias == DType::kF32 ? std::max<double>(4, rows / 32.0) : 4);
    // The GPU's bf16 kernels take the hardware's tanh, which is good to 2^-11; a column's sum adds such errors up.
    if (dtype == DType::kBF16 && activation == Activation::kGeluTanh)
      c.gradient_tolerance["bias"].absolute = std::max(c.gradient_tolerance["bias"].absolute, 0x1p-11);
  }
  if (dtype == DType::kF32) c.gradient_tolerance["x"] = {1e-5, 1e-5};
  c.backward = [=](Context& context, const Tensors& t, bool accumulate) {
    if (o.from_output)
      return relu_dropout_backward(context, t.at("dy"), t.at("y"), dropout, accumulate, t.at("dx"),
                                   o.bias ? t.at("dbias") : Tensor());
    bias_activation_dropout_backward(context, t.at("dy"), t.at("x"), o.bias ? t.at("bias") : Tensor(), activation,
                                     dropout, accumulate, t.at("dx"), o.bias ? t.at("dbias") : Tensor());
  };
  c.gradient_oracle = [=](const Arrays& in, Arrays& result) {
    for (int64_t i = 0; i < rows * cols; ++i) {
      const double g =
          in.at("dy")[i] * factor(i) * slope(activation, in.at("x")[i] + (o.bias ? in.at("bias")[i % cols] : 0));
      result["dx"][i] = g;
      if (o.bias) result["dbias"][i % cols] += g;
    }
  };
  // A step that crosses ReLU's kink gives neither slope; bf16 sums of x + bias hit it exactly.
  if (activation == Activation::kRelu) c.finite_difference_step = dtype == DType::kF32 ? 1e-8 : 0;  // f16 likewise
  c.backward_budget = {cols == 0   ? 0
                       : o.bias    ? 2
                       : rows == 0 ? 0
                                   : 1,
                       o.bias ? static_cast<int64_t>(align_up(partial_sum_pieces(rows) * cols * 4)) : 0,
                       rows * cols * size_of(dtype) * 3 + (o.bias ? cols * size_of(o.dbias) : 0)};
  return c;
}

constexpr Activation kAll[] = {Activation::kRelu, Activation::kGelu, Activation::kGeluTanh, Activation::kSilu};

}  // namespace

std::vector<OpCase> bias_activation_dropout_cases() {
  std::vector<OpCase> cases;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    int turn = 0;
    for (int64_t cols : {1, 7, 31, 32, 33, 127, 511, 513, 1023, 1024, 1025}) {
      for (int64_t rows : {0, 1, 3}) cases.push_back(make(rows, cols, dtype, kAll[turn++ % 4]));
      for (int64_t rows : {31, 67, 130})
        if (cols < 128) cases.push_back(make(rows, cols, dtype, kAll[turn++ % 4]));
    }
    // Rows that lie end to end fold on the GPU; the last fold is cut but for 24 rows.
    for (auto [rows, cols] : {std::pair<int64_t, int64_t>{67, 257}, {41, 1025}, {24, 1023}, {19, 260}, {35, 258}})
      cases.push_back(make(rows, cols, dtype, kAll[turn++ % 4], {.p_drop = 0.3f}));
    for (Activation activation : kAll) {
      cases.push_back(make(33, 65, dtype, activation, {.p_drop = 0}));
      cases.push_back(make(5, 65, dtype, activation, {.p_drop = 0.1f, .bias = false}));
      // Every value from -20 to 20: tails and centre.
      cases.push_back(make(1, 4001, dtype, activation,
                           {.p_drop = 0,
                            .bias = false,
                            .fill =
                                [](CaseRandom&, Array& a) {
                                  for (int64_t i = 0; i < 4001; ++i) a[i] = -20 + 0.01 * static_cast<double>(i) + 1e-4;
                                },
                            .note = "/sweep"}));
      cases.push_back(make(4096, 1024, dtype, activation, {.p_drop = 0.1f}));
      cases.back().benchmark = true, cases.back().test = false;
      cases.push_back(make(9, 133, dtype, activation, {.in_place = true}));
      // Rows of whole vectors, several a thread.
      if (dtype == DType::kF32) continue;
      if (activation == Activation::kRelu)
        cases.push_back(make(411, 24, dtype, activation, {.p_drop = 0.6f, .bias = false, .stride = 32}));
      else
        cases.push_back(
            make(137, activation == Activation::kGeluTanh ? 264 : 520, dtype, activation, {.p_drop = 0.3f}));
    }
    if (dtype != DType::kF32) {
      cases.push_back(make(451, 40, dtype, Activation::kGelu, {.p_drop = 0.3f}));
      cases.push_back(make(411, 24, dtype, Activation::kGeluTanh, {.p_drop = 0.6f, .bias = false, .stride = 32}));
    }
    cases.push_back(make(17, 65, dtype, Activation::kGelu, {.stride = 72}));
    cases.push_back(
        make(4, 33, dtype, Activation::kSilu, {.stride = int64_t{1} << 30}));  // the last row begins past 2^31 elements
    cases.push_back(make(5, 0, dtype, Activation::kGelu));
    // ReLU from its output.
    for (auto [rows, cols] : {std::pair<int64_t, int64_t>{0, 33}, {1, 1}, {33, 65}, {67, 257}, {19, 260}, {40, 512}})
      for (float p_drop : {0.0f, 0.3f})
        cases.push_back(make(rows, cols, dtype, Activation::kRelu, {.p_drop = p_drop, .from_output = true}));
    cases.push_back(make(9, 64, dtype, Activation::kRelu, {.bias = false, .stride = 72, .from_output = true}));
    cases.push_back(make(4096, 2048, dtype, Activation::kRelu, {.p_drop = 0.1f, .from_output = true}));
    cases.back().benchmark = true, cases.back().test = false;
    cases.push_back(make(4096, 1024, dtype, Activation::kGelu, {.p_drop = 0}));
    cases.back().benchmark = true, cases.back().test = false;
  }
  cases.push_back(make(66, 40, DType::kBF16, Activation::kGelu, {.dbias = DType::kBF16}));
  cases.push_back(make(1215, 257, DType::kBF16, Activation::kGeluTanh, {}));  // folded rows of several
  cases.back().where = Where::kGpu;
  // Rows of whole vectors, more a thread than are on their way.
  cases.push_back(make(1551, 264, DType::kBF16, Activation::kGelu, {}));
  cases.back().where = Where::kGpu;
  for (int64_t cols : {1023, 1024, 1025}) {
    for (Activation activation : {Activation::kGelu, Activation::kGeluTanh}) {
      cases.push_back(make(65536, cols, DType::kBF16, activation, {.p_drop = 0.1f}));
      cases.back().benchmark = true, cases.back().test = false, cases.back().where = Where::kGpu;
    }
  }
  return cases;
}

}  // namespace frit
