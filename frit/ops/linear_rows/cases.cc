#include <algorithm>
#include <cmath>

#include "frit/ops/case.h"
#include "frit/ops/linear_rows/gpu.h"
#include "frit/ops/linear_rows/linear_rows.h"

namespace frit {
namespace {

constexpr float kEpsilon = 1e-5f;

double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x * std::sqrt(0.5));
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
  }
  return x;
}

struct Options {
  bool bias = true, residual = false, in_place = false, norm = false, normed = false, wide = false;
  std::optional<Activation> activation = {};
  int64_t x_stride = 0, w_stride = 0, residual_stride = 0;
  double mean = 0.3, deviation = 1;
  bool budget = false;
  std::string note = {};
};

int64_t over(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// w once for every tile of rows; x once for every tile of columns; bias and residual once an element of y. A norm
// inside: gamma and beta once a block, and each row's first element by 32 threads of a block. One apart: x once, its
// first element by 32 lanes, and gamma and beta once a warp, eight a block.
GpuBudget gpu_budget(int64_t rows, int64_t n, int64_t k, DType dtype, const Options& o) {
  const int instance = linear_rows_choice(rows, n, dtype, o.norm && linear_rows_norms_inside(0, dtype, k));
  const LinearRowsTile tile = kLinearRowsTiles[instance];
  const bool inside = o.norm && linear_rows_norms_inside(instance, dtype, k), apart = o.norm && !inside;
  const int64_t size = size_of(dtype), row_tiles = over(rows, tile.rows), column_tiles = over(n, tile.columns);
  // f32: the 8 lanes that share a k each read the row of x.
  const int64_t x_reads = dtype == DType::kF32 ? 8 : 1;
  GpuBudget b;
  b.launches = apart ? 2 : 1, b.barriers = inside ? 2 : 1;
  int64_t read = row_tiles * n * k + column_tiles * rows * k * x_reads + rows * n * (o.bias + o.residual);
  if (inside) read += column_tiles * (row_tiles * 2 * k + rows * 32);
  if (apart) read += rows * (k + 32) + over(rows, 8) * 8 * 2 * k;
  if (instance == kLinearRowsMany) {
    // A barrier before every 64 of k, and two for what comes behind. Bias: by 8 lanes of 2 warps of a block.
    b.barriers = over(k, 64) + 2;
    if (o.bias) read += row_tiles * n * 16 - rows * n;
  }
  b.read_bytes = read * size;
  b.written_bytes = rows * n * (o.wide ? 4 : size) + ((o.norm && o.normed) || apart ? rows * k * size : 0);
  b.atomics = 0;
  b.scratch_bytes = apart && !o.normed ? static_cast<int64_t>(align_up(rows * k * size)) : 0;
  return b;
}

OpCase make(int64_t rows, int64_t n, int64_t k, DType dtype, const Options& o = {}, bool all = false) {
  OpCase c;
  c.op = "linear_rows";
  c.where = dtype == DType::kF16 ? Where::kGpu : Where::kEverywhere;
  c.name = fmt::format("{}x{}x{}/{}{}{}{}{}{}{}{}{}", rows, n, k, name_of(dtype), o.bias ? "" : "/no_bias",
                       o.norm ? o.normed ? "/normed" : "/norm" : "", o.activation ? "/" : "",
                       o.activation ? frit::name_of(*o.activation) : "",
                       o.in_place   ? "/in_place"
                       : o.residual ? "/residual"
                                    : "",
                       o.wide ? "/f32y" : "", o.x_stride || o.w_stride || o.residual_stride ? "/strided" : "",
                       o.note.empty() ? "" : "/" + o.note);
  const double spread = 1 / std::sqrt(static_cast<double>(k));
  c.inputs = {{"x", dtype, {rows, k}, fill_repeated(fill_normal(o.mean, o.deviation)), o.x_stride},
              {"w", dtype, {n, k}, fill_repeated(fill_normal(0, spread)), o.w_stride}};
  if (o.bias) c.inputs.push_back({"bias", dtype, {n}});
  if (o.residual)
    c.inputs.push_back({o.in_place ? "y" : "residual", dtype, {rows, n}, fill_normal(), o.residual_stride});
  if (o.norm) {
    c.inputs.push_back({"gamma", dtype, {k}, fill_normal(1, 0.2)});
    c.inputs.push_back({"beta", dtype, {k}, fill_normal(0, 0.3)});
  }
  c.outputs = {{"y", o.wide ? DType::kF32 : dtype, {rows, n}, fill_normal(), o.in_place ? o.residual_stride : 0}};
  if (o.normed) c.outputs.push_back({"normed", dtype, {rows, k}});
  c.forward = [=](Context& context, const Tensors& t) {
    const auto given = [&](const char* name, bool yes) { return yes ? t.at(name) : Tensor(); };
    linear_rows(context,
                {.x = t.at("x"),
                 .w = t.at("w"),
                 .bias = given("bias", o.bias),
                 .activation = o.activation,
                 .residual = given(o.in_place ? "y" : "residual", o.residual),
                 .gamma = given("gamma", o.norm),
                 .beta = given("beta", o.norm),
                 .epsilon = kEpsilon,
                 .normed = given("normed", o.normed)},
                t.at("y"));
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    const std::vector<double>&x = in.at("x").v, &w = in.at("w").v;
    std::vector<double> row(k);
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(x.data() + r * k, k, row.data());
      if (o.norm) {
        double mean = 0, squares = 0;
        for (double v : row) mean += v / static_cast<double>(k);
        for (double v : row) squares += (v - mean) * (v - mean);
        const double rstd = 1 / std::sqrt(squares / static_cast<double>(k) + static_cast<double>(kEpsilon));
        for (int64_t i = 0; i < k; ++i) row[i] = (row[i] - mean) * rstd * in.at("gamma")[i] + in.at("beta")[i];
        if (o.normed) std::copy_n(row.data(), k, out["normed"].v.data() + r * k);
        // What meets w is rounded.
        for (double& v : row) {
          if (dtype == DType::kBF16) v = static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(v))));
          if (dtype == DType::kF16) v = static_cast<double>(static_cast<float>(float16(static_cast<float>(v))));
        }
      }
      for (int64_t j = 0; j < n; ++j) {
        double sum = o.bias ? in.at("bias")[j] : 0;
        for (int64_t i = 0; i < k; ++i) sum += row[i] * w[j * k + i];
        if (o.activation) sum = activate(*o.activation, sum);
        if (o.residual) sum += in.at(o.in_place ? "y" : "residual")[r * n + j];
        out["y"][r * n + j] = sum;
      }
    }
  };
  // A norm that falls on the other side of a rounding moves the sum by a place of 16 bits times one of w.
  if (o.wide || o.norm)
    c.tolerance["y"] = dtype == DType::kF32 ? Tolerance{2e-5, 2e-5}
                       : o.norm             ? Tolerance{dtype == DType::kBF16 ? 1.6e-2 : 4e-3, 8e-3}
                                            : Tolerance{2e-5, 2e-5};
  // As exact as if the mean had been taken off beforehand.
  if (std::abs(o.mean) > 100 && dtype == DType::kF32) c.tolerance["normed"] = {4e-6, 4e-6};
  const int64_t size = size_of(dtype);
  c.forward_budget.bytes = (n * k + rows * k + rows * n) * size;
  c.forward_budget.flops = 0;
  if (rows == 0) c.forward_gpu = {0, 0, 0, 0, 0, 0};
  if (o.budget) c.forward_gpu = gpu_budget(rows, n, k, dtype, o);
  if (all)
    for (int i = 0; i <= kLinearRowsAny; ++i)
      if (linear_rows_takes(i, dtype)) c.forward_instances.push_back(kLinearRowsNames[i]);
  return c;
}

}  // namespace

std::vector<OpCase> linear_rows_cases() {
  std::vector<OpCase> cases;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    // Depths that fill the eight pieces, some of them, and none of them whole; odd ones take the form for any address.
    for (int64_t k : {1, 7, 8, 24, 31, 32, 33, 64, 256, 264, 320, 513, 520, 1024})
      for (bool norm : {false, true})
        if (!norm || k > 7) cases.push_back(make(5, 19, k, dtype, {.norm = norm, .normed = norm}));
    cases.push_back(make(3, 16, 2304, dtype));  // more than a thread holds
    cases.push_back(make(3, 16, 2304, dtype, {.norm = true}));
    cases.push_back(make(2, 3, 2311, dtype, {.norm = true, .normed = true}));
    // Rows and columns on both sides of every tile.
    for (int64_t rows : {0, 1, 4, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130})
      for (int64_t n : {1, 8, 65})
        if (n == 65 || rows < 34) cases.push_back(make(rows, n, 40, dtype));
    cases.push_back(make(70, 67, 64, dtype, {.residual = true}, true));
    cases.push_back(make(33, 130, 96, dtype, {.residual = true, .norm = true, .normed = true}, true));
    cases.push_back(make(9, 64, 512, dtype, {}, true));
    if (dtype != DType::kF32) {
      cases.push_back(make(133, 130, 328, dtype, {.residual = true, .activation = Activation::kGelu, .note = "many"}));
      cases.back().forward_instances = {"64x64"};
      cases.push_back(make(70, 6200, 32, dtype, {.norm = true, .normed = true, .note = "many"}));
      cases.push_back(make(130, 72, 40, dtype, {.norm = true, .wide = true, .note = "many"}));
      cases.back().forward_instances = {"64x64"};
    }
    // What comes behind.
    for (Activation activation : {Activation::kRelu, Activation::kGelu, Activation::kGeluTanh, Activation::kSilu})
      cases.push_back(make(6, 34, 72, dtype, {.activation = activation}));
    cases.push_back(make(6, 34, 72, dtype, {.residual = true, .activation = Activation::kRelu}));
    cases.push_back(make(6, 34, 72, dtype, {.bias = false}));
    cases.push_back(make(6, 33, 72, dtype, {.bias = false, .residual = true}));
    cases.push_back(make(6, 34, 72, dtype, {.residual = true, .in_place = true}));
    cases.push_back(make(35, 33, 72, dtype, {.residual = true, .in_place = true, .residual_stride = 37}));
    cases.push_back(make(35, 33, 72, dtype, {.residual = true, .residual_stride = 41}));
    if (dtype != DType::kF32) cases.push_back(make(6, 34, 72, dtype, {.residual = true, .wide = true}));
    if (dtype != DType::kF32) cases.push_back(make(6, 33, 72, dtype, {.norm = true, .wide = true}));
    cases.push_back(make(6, 34, 72, dtype, {.norm = true, .normed = true, .mean = 1000, .note = "far"}));
    for (int64_t k : {264, 1024, 1032})  // a norm inside the kernel and apart
      cases.push_back(
          make(18, 34, k, dtype, {.norm = true, .normed = true, .mean = 1000, .deviation = 0.1, .note = "farther"}));
    // Strides that are multiples of 16 bytes, and others.
    cases.push_back(make(6, 34, 72, dtype, {.x_stride = 80, .w_stride = 88, .budget = true}));
    cases.push_back(make(6, 34, 72, dtype, {.norm = true, .normed = true, .x_stride = 75, .w_stride = 88}));
    cases.push_back(make(6, 34, 72, dtype, {.x_stride = 80, .w_stride = 73, .note = "odd"}));
    cases.push_back(make(2, 2, 16, dtype, {.x_stride = int64_t{1} << 30, .w_stride = int64_t{1} << 30}));
    cases.push_back(make(5, 40, 512, dtype, {.budget = true}));
    cases.push_back(make(40, 24, 136, dtype, {.residual = true, .budget = true}));
    cases.push_back(make(32, 48, 512, dtype, {.norm = true, .normed = true, .budget = true}));
    cases.push_back(make(17, 800, 64, dtype, {.bias = false, .budget = true}));
    cases.push_back(make(7, 1600, 32, dtype, {.norm = true, .budget = true}));
    if (dtype != DType::kF32)
      cases.push_back(make(130, 2048, 40, dtype, {.norm = true, .budget = true, .note = "many"}));
  }
  // A step's products: mt-base and mt-big.
  struct Product {
    int64_t n, k;
    Options o;
  };
  for (int64_t h : {512, 1024})
    for (int64_t rows : {4, 32, 64, 128, 256, 512}) {
      const Product products[] = {
          {3 * h, h, {.norm = true, .normed = true, .note = "timed"}},
          {h, h, {.residual = true, .note = "timed"}},
          {h, h, {.norm = true, .normed = true, .note = "timed"}},
          {4 * h, h, {.norm = true, .normed = true, .activation = Activation::kRelu, .note = "timed"}},
          {h, 4 * h, {.residual = true, .note = "timed"}},
          {32768, h, {.note = "timed"}}};
      for (const Product& p : products) {
        cases.push_back(make(rows, p.n, p.k, DType::kF16, p.o));
        OpCase& c = cases.back();
        c.benchmark = true, c.test = false, c.where = Where::kGpu;
        if (rows == 4)
          c.forward_instances = {"16x8", "16x16", "16x32"};
        else if (p.n < 32768)
          c.forward_instances = {"16x16", "16x32", "32x16", "32x32", "64x64"};
        if (rows == 32 && (p.n == 3 * h || p.n == 32768)) {
          cases.push_back(make(rows, p.n, p.k, DType::kF32, p.o));
          cases.back().benchmark = true, cases.back().test = false, cases.back().where = Where::kGpu;
        }
      }
    }
  return cases;
}

}  // namespace frit
