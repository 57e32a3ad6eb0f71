#include <cmath>

#include "frit/ops/case.h"
#include "frit/ops/column_sum/cpu.h"
#include "frit/ops/layer_norm/layer_norm.h"

namespace frit {
namespace {

constexpr float kEps = 1e-5f;

struct Options {
  bool residual = false;
  int64_t stride = 0;
  DType dgamma = DType::kF32;
  Fill fill = fill_normal(0.5, 2);
  const char* note = "";
};

struct RowStats {
  double mean, rstd;
};
RowStats stats(const Array& x, int64_t r) {
  const int64_t cols = x.dim(1);
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < cols; ++i) sum += x[r * cols + i];
  const double mean = sum / static_cast<double>(cols);
  for (int64_t i = 0; i < cols; ++i) squares += (x[r * cols + i] - mean) * (x[r * cols + i] - mean);
  return {mean, 1 / std::sqrt(squares / static_cast<double>(cols) + static_cast<double>(kEps))};
}

OpCase make_forward(int64_t rows, int64_t cols, DType dtype, Options o = {}) {
  OpCase c;
  c.name = fmt::format("{}x{}/{}{}{}{}{}", rows, cols, name_of(dtype), o.residual ? "/residual" : "",
                       o.stride ? "/strided" : "", o.dgamma == DType::kF32 ? "" : "/bf16_dgamma", o.note);
  c.inputs = {{"x", dtype, {rows, cols}, o.fill, o.stride},
              {"gamma", dtype, {cols}, fill_normal(1, 0.5)},
              {"beta", dtype, {cols}}};
  c.outputs = {{"y", dtype, {rows, cols}, fill_normal(), o.stride},
               {"mean", DType::kF32, {rows}},
               {"rstd", DType::kF32, {rows}}};
  c.forward = [](Context& context, const Tensors& t) {
    layer_norm_forward(context, t.at("x"), t.at("gamma"), t.at("beta"), kEps, t.at("y"), t.at("mean"), t.at("rstd"));
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    const Array& x = in.at("x");
    for (int64_t r = 0; r < rows; ++r) {
      const RowStats s = stats(x, r);
      out["mean"][r] = s.mean, out["rstd"][r] = s.rstd;
      for (int64_t i = 0; i < cols; ++i)
        out["y"][r * cols + i] = (x[r * cols + i] - s.mean) * s.rstd * in.at("gamma")[i] + in.at("beta")[i];
    }
  };
  c.tolerance["mean"] = {1e-6, 1e-6};
  c.forward_budget = {rows == 0 ? 0 : 1, 0, rows * cols * size_of(dtype) * 2 + 2 * cols * size_of(dtype) + 8 * rows};
  return c;
}

OpCase make(int64_t rows, int64_t cols, DType dtype, Options o = {}) {
  OpCase c = make_forward(rows, cols, dtype, o);
  c.incoming = {"y"};
  if (o.residual)
    c.inputs.push_back({"dresidual", dtype, {rows, cols}, fill_normal(), o.stride});  // what the caller adds to dx
  c.differentiable = {"x", "gamma", "beta"};
  c.accumulates = {"gamma", "beta"};
  c.gradient_dtype = {{"gamma", o.dgamma}, {"beta", o.dgamma}};
  const double grown = std::max<double>(4, rows / 16.0);
  for (const char* name : {"gamma", "beta"})
    c.gradient_tolerance[name] = tolerance_for(o.dgamma, o.dgamma == DType::kF32 ? grown : 4);
  c.backward = [=](Context& context, const Tensors& t, bool accumulate) {
    layer_norm_backward(context, t.at("dy"), t.at("x"), t.at("gamma"), t.at("mean"), t.at("rstd"),
                        o.residual ? t.at("dresidual") : Tensor(), accumulate, t.at("dx"), t.at("dgamma"),
                        t.at("dbeta"));
  };
  c.gradient_oracle = [=](const Arrays& in, Arrays& out) {
    const Array &x = in.at("x"), &dy = in.at("dy"), &gamma = in.at("gamma");
    for (int64_t r = 0; r < rows; ++r) {
      const RowStats s = stats(x, r);
      double sum = 0, product = 0;
      const auto hat = [&](int64_t i) { return (x[r * cols + i] - s.mean) * s.rstd; };
      for (int64_t i = 0; i < cols; ++i) {
        const double g = gamma[i] * dy[r * cols + i];
        sum += g, product += g * hat(i);
        out["dgamma"][i] += dy[r * cols + i] * hat(i);
        out["dbeta"][i] += dy[r * cols + i];
      }
      for (int64_t i = 0; i < cols; ++i)
        out["dx"][r * cols + i] =
            s.rstd * (gamma[i] * dy[r * cols + i] - (sum + hat(i) * product) / static_cast<double>(cols)) +
            (o.residual ? in.at("dresidual")[r * cols + i] : 0);
    }
  };
  // With two columns xhat is +-1 and everything cancels: what is left is rounding, times rstd.
  if (cols == 2) c.gradient_tolerance["x"] = tolerance_for(dtype, dtype == DType::kF32 ? 40 : 4);
  // The residual's gradient is no part of what the oracle's forward differentiates.
  if (o.residual) c.finite_difference_step = 0;
  c.backward_budget = {
      2, static_cast<int64_t>(align_up(partial_sum_pieces(rows) * 2 * cols * 4)),
      rows * cols * size_of(dtype) * (o.residual ? 4 : 3) + cols * (size_of(dtype) + 2 * size_of(o.dgamma)) + 8 * rows};
  return c;
}

// Rows far from 0: forward must be as exact as if the mean had been taken off beforehand. The fp32 mean that is kept
// for backward is not, so these have no backward.
OpCase make_far(int64_t rows, int64_t cols, DType dtype, double mean, double deviation, const char* note) {
  OpCase c = make_forward(rows, cols, dtype, {.fill = fill_normal(mean, deviation), .note = note});
  if (dtype == DType::kF32)
    c.tolerance["y"] = {4e-6, 4e-6}, c.tolerance["rstd"] = {0, 2e-6}, c.tolerance["mean"] = {0, 2e-7};
  return c;
}

}  // namespace

std::vector<OpCase> layer_norm_cases() {
  std::vector<OpCase> cases;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t cols : {2, 7, 31, 32, 33, 127, 511, 513, 1023, 1024, 1025}) {
      for (int64_t rows : {0, 1, 3}) cases.push_back(make(rows, cols, dtype));
      for (int64_t rows : {31, 67, 130})
        if (cols < 128) cases.push_back(make(rows, cols, dtype));
    }
    cases.push_back(make(5, 1, dtype));  // y = beta, dx = 0
    cases.push_back(make(33, 65, dtype, {.residual = true}));
    cases.push_back(make(129, 48, dtype, {.residual = true}));
    cases.push_back(make(17, 65, dtype, {.residual = true, .stride = 72}));
    cases.push_back(make(4, 33, dtype, {.stride = int64_t{1} << 30}));  // the last row begins past 2^31 elements
    cases.push_back(make(3, 5000, dtype));
    cases.push_back(make_forward(5, 64, dtype, {.fill = fill_uniform(3, 3), .note = "/constant"}));
    cases.push_back(make_far(7, 1024, dtype, 1000, 0.1, "/mean1000_std0.1"));
    cases.push_back(make_far(7, 1023, dtype, 10, 1e-2, "/mean10_std0.01"));
    // One element far from the rest: a shift by the first element alone would lose the others.
    OpCase outlier = make_forward(3, 1024, dtype, {.note = "/outlier"});
    outlier.inputs[0].fill = [](CaseRandom& random, Array& a) {
      for (double& v : a.v) v = random.normal();
      for (int64_t r = 0; r < 3; ++r) a[r * 1024] = 1e4;
    };
    outlier.tolerance["mean"] = {5e-5, 0};  // the sum passes 1e4
    cases.push_back(outlier);
    for (int64_t cols : {256, 1024}) {
      cases.push_back(make(4096, cols, dtype));
      cases.back().benchmark = true, cases.back().test = false;
    }
    cases.push_back(make(4096, 1024, dtype, {.residual = true}));
    cases.back().benchmark = true, cases.back().test = false;
  }
  cases.push_back(make(66, 40, DType::kBF16, {.dgamma = DType::kBF16}));
  return cases;
}

}  // namespace frit
