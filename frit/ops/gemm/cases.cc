#include <algorithm>
#include <cmath>

#include "frit/ops/case.h"
#include "frit/ops/column_sum/cases.h"
#include "frit/ops/column_sum/column_sum.h"
#include "frit/ops/gemm/gemm.h"

namespace frit {
namespace {

struct Product {
  int64_t m, n, k;
  bool transpose_a = false, transpose_b = false;
  DType in = DType::kF32, out = DType::kF32;
  bool accumulate = false;
  int bias = 0;  // 0 none, 1 f32, 2 as the inputs
  int64_t batch = 0;
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;
};

// A chain of len additions of products of normal numbers, one factor scaled: each rounds its partial sum, whose size
// grows with the root of its length, and the roundings add up like a random walk.
Tolerance chain_tolerance(DType out, double len, double scale, double factor = 1) {
  Tolerance t{factor * (1e-6 + 3e-7 * len * scale), factor * 1e-6};
  if (out == DType::kBF16) t.relative = factor * 0x1p-8;
  if (out == DType::kF16) t.relative = factor * 0x1p-11;
  return t;
}

constexpr const char* kLibrary = "library";  // the GPU's implementation; the others are the CPU's
// Tensor cores cut off what they do not keep of a sum of 16-bit products, where a CPU rounds: their errors do not
// cancel.
double cut_off(DType in, const std::string& variant) {
  return variant == kLibrary && is_16bit_float(in) ? 4 : 1;
}
// cuBLASLt may round a sum to c's type before it adds a bias to it, and again before it adds c: half a spacing of a
// normal number's largest, each time.
double rounded_between(DType out, const std::string& variant, int times) {
  if (variant != kLibrary || !built_with_cuda()) return 0;
  return times * (out == DType::kBF16 ? 0x1p-6 : out == DType::kF16 ? 0x1p-9 : 0);
}
// Every product on a GPU is the library's, none of our launches, and takes nothing from the context.
constexpr GpuBudget kNothingOfOurs = {0, 0, 0, 0, 0, 0};

// t[i][j] of op(t) in a batch item.
struct Item {
  const double* data;
  int64_t cols;
  bool transposed;
  double operator()(int64_t i, int64_t j) const { return transposed ? data[j * cols + i] : data[i * cols + j]; }
};

OpCase make(const Product& p, const std::string& variant = "") {
  OpCase c;
  c.name = fmt::format("{}{}x{}x{}/{}{}/{}->{}{}{}{}{}", p.batch ? fmt::format("{}*", p.batch) : "", p.m, p.n, p.k,
                       p.transpose_a ? "t" : "n", p.transpose_b ? "t" : "n", name_of(p.in), name_of(p.out),
                       p.accumulate ? "/accumulate" : "", p.bias ? fmt::format("/bias{}", p.bias) : "",
                       p.a_stride || p.b_stride || p.c_stride
                           ? fmt::format("/strides {} {} {}", p.a_stride, p.b_stride, p.c_stride)
                           : "",
                       variant.empty() ? "" : "/" + variant);
  c.variant = variant;
  const auto shape = [&](int64_t rows, int64_t cols) {
    return p.batch ? Shape{p.batch, rows, cols} : Shape{rows, cols};
  };
  const double scale = 1 / std::sqrt(std::max<double>(1, static_cast<double>(p.k)));
  c.inputs = {{"a", p.in, p.transpose_a ? shape(p.k, p.m) : shape(p.m, p.k), fill_normal(), p.a_stride},
              {"b", p.in, p.transpose_b ? shape(p.n, p.k) : shape(p.k, p.n), fill_normal(0, scale), p.b_stride}};
  if (p.bias) c.inputs.push_back({"bias", p.bias == 1 ? DType::kF32 : p.in, {p.n}, fill_normal(), 0});
  const Operand out{"c", p.out, shape(p.m, p.n), fill_normal(), p.c_stride};
  if (p.accumulate) c.inputs.push_back(out);
  c.outputs = {out};
  c.forward = [p](Context& context, const Tensors& t) {
    gemm(context, {.a = t.at("a"),
                   .b = t.at("b"),
                   .c = t.at("c"),
                   .transpose_a = p.transpose_a,
                   .transpose_b = p.transpose_b,
                   .accumulate = p.accumulate,
                   .bias = p.bias ? t.at("bias") : Tensor()});
  };
  c.oracle = [p](const Arrays& in, Arrays& out) {
    const double *a = in.at("a").v.data(), *b = in.at("b").v.data();
    double* y = out.at("c").v.data();
    for (int64_t item = 0; item < std::max<int64_t>(1, p.batch); ++item) {
      const Item ai{a + item * p.m * p.k, p.transpose_a ? p.m : p.k, p.transpose_a},
          bi{b + item * p.k * p.n, p.transpose_b ? p.k : p.n, p.transpose_b};
      for (int64_t i = 0; i < p.m; ++i)
        for (int64_t j = 0; j < p.n; ++j) {
          const int64_t at = (item * p.m + i) * p.n + j;
          double sum = (p.bias ? in.at("bias").v[j] : 0) + (p.accumulate ? in.at("c").v[at] : 0);
          for (int64_t k = 0; k < p.k; ++k) sum += ai(i, k) * bi(k, j);
          y[at] = sum;
        }
    }
  };
  c.tolerance["c"] = chain_tolerance(p.out, static_cast<double>(p.k), scale);
  c.tolerance["c"].absolute *= cut_off(p.in, variant);
  c.tolerance["c"].absolute += rounded_between(p.out, variant, (p.bias > 0) + p.accumulate);
  c.where = variant == kLibrary ? Where::kGpu : Where::kCpu;
  c.forward_gpu = kNothingOfOurs;
  const int64_t items = std::max<int64_t>(1, p.batch);
  c.forward_budget.flops = 2.0 * static_cast<double>(items * p.m) * static_cast<double>(p.n * p.k);
  c.forward_budget.bytes = items * ((p.m * p.k + p.k * p.n) * size_of(p.in) + p.m * p.n * size_of(p.out));
  return c;
}

// A linear layer with its backward: dx, dw and dbias, by column_sum or joined with dw (then with both in x's type).
OpCase make_linear(int64_t m, int64_t n, int64_t k, DType dtype, const std::string& variant = "", bool joined = false) {
  OpCase c;
  c.name = fmt::format("linear {}x{}x{}/{}{}{}", m, n, k, name_of(dtype), joined ? "/joined" : "",
                       variant.empty() ? "" : "/" + variant);
  c.variant = variant;
  const double dm = static_cast<double>(m), dn = static_cast<double>(n), dk = static_cast<double>(k);
  const double scale = 1 / std::sqrt(std::max(1.0, dk));
  c.inputs = {{"x", dtype, {m, k}, fill_normal(), 0},
              {"w", dtype, {n, k}, fill_normal(0, scale), 0},
              {"bias", dtype, {n}, fill_normal(), 0}};
  c.outputs = {{"y", dtype, {m, n}, fill_normal(), 0}};
  c.forward = [](Context& context, const Tensors& t) {
    linear(context, t.at("x"), t.at("w"), t.at("bias"), t.at("y"));
  };
  c.oracle = [m, n, k](const Arrays& in, Arrays& out) {
    const double *x = in.at("x").v.data(), *w = in.at("w").v.data(), *bias = in.at("bias").v.data();
    double* y = out.at("y").v.data();
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        y[i * n + j] = bias[j];
        for (int64_t l = 0; l < k; ++l) y[i * n + j] += x[i * k + l] * w[j * k + l];
      }
  };
  c.incoming = {"y"};
  c.differentiable = {"x", "w", "bias"};
  // The harness compares an accumulated gradient with old + plain, which bf16 rounds once more: dx in bf16 accumulates
  // in the products' own cases.
  c.accumulates = {"w", "bias"};
  if (dtype == DType::kF32) c.accumulates.push_back("x");
  const DType sums = joined ? dtype : DType::kF32;
  if (is_16bit_float(dtype)) c.gradient_dtype = {{"w", sums}, {"bias", sums}};
  if (is_16bit_float(sums)) c.accumulates.clear();
  c.backward = [joined, dtype](Context& context, const Tensors& t, bool accumulate) {
    linear_backward_input(context, t.at("dy"), t.at("w"), accumulate && dtype == DType::kF32, t.at("dx"));
    if (joined) return linear_backward_weight(context, t.at("dy"), t.at("x"), accumulate, t.at("dw"), t.at("dbias"));
    linear_backward_weight(context, t.at("dy"), t.at("x"), accumulate, t.at("dw"));
    column_sum(context, t.at("dy"), accumulate, t.at("dbias"));
  };
  c.gradient_oracle = [m, n, k](const Arrays& in, Arrays& out) {
    const double *x = in.at("x").v.data(), *w = in.at("w").v.data(), *dy = in.at("dy").v.data();
    double *dx = out.at("dx").v.data(), *dw = out.at("dw").v.data(), *dbias = out.at("dbias").v.data();
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        const double g = dy[i * n + j];
        dbias[j] += g;
        for (int64_t l = 0; l < k; ++l) dx[i * k + l] += g * w[j * k + l], dw[j * k + l] += g * x[i * k + l];
      }
  };
  c.tolerance["y"] = chain_tolerance(dtype, dk, scale);
  c.gradient_tolerance["x"] = chain_tolerance(dtype, dn, scale);
  c.gradient_tolerance["w"] = chain_tolerance(sums, dm, 1);
  c.gradient_tolerance["bias"] = chain_tolerance(sums, dm, 1);
  c.tolerance["y"].absolute *= cut_off(dtype, variant);
  c.tolerance["y"].absolute += rounded_between(dtype, variant, 1);
  for (const char* name : {"x", "w"}) c.gradient_tolerance[name].absolute *= cut_off(dtype, variant);
  c.where = variant == kLibrary ? Where::kGpu : Where::kCpu;
  c.forward_gpu = kNothingOfOurs;
  if (!joined) c.backward_gpu = column_sum_gpu_budget(m, n, dtype, DType::kF32);
  c.finite_difference_step = 1e-3;  // the loss is linear in each operand: a large step costs no accuracy
  return c;
}

// The library's products: each kind of operand with every transpose, at sizes that leave it no aligned row, and at
// sizes that do.
std::vector<OpCase> library_cases() {
  const DType f32 = DType::kF32, bf16 = DType::kBF16, f16 = DType::kF16;
  std::vector<OpCase> cases;
  const auto add = [&](const Product& p) { cases.push_back(make(p, kLibrary)); };
  for (const auto& [in, out] : {std::pair{f32, f32}, {bf16, bf16}, {bf16, f32}, {f16, f16}, {f16, f32}}) {
    const int bias = in == out ? 2 : 1;  // of c's type
    for (bool ta : {false, true})
      for (bool tb : {false, true}) {
        add({1, 1, 1, ta, tb, in, out});
        add({5, 31, 7, ta, tb, in, out});
        add({33, 1, 32, ta, tb, in, out, true});
        add({1, 33, 65, ta, tb, in, out, false, bias});
        add({33, 31, 33, ta, tb, in, out, true, bias});
        add({64, 48, 128, ta, tb, in, out, true, bias});
        add({129, 65, 513, ta, tb, in, out, false, bias});
        add({31, 32, 1024, ta, tb, in, out, true});
        add({17, 19, 33, ta, tb, in, out, true, bias, 5});
        add({33, 40, 64, ta, tb, in, out, false, 0, 8});
        add({33, 31, 65, ta, tb, in, out, true, bias, 0, 70, 72, 40});  // rows apart
        add({9, 16, 32, ta, tb, in, out, false, bias, 4, 600, 700, 304});
      }
    add({1023, 33, 31, false, true, in, out, false, bias});
    add({33, 1024, 32, true, false, in, out, true});
    add({130, 513, 300, false, false, in, out, true, bias});
    // Nothing to add up, nothing to write.
    add({0, 32, 33, false, true, in, out});
    add({32, 0, 33, false, true, in, out});
    add({31, 33, 0, true, false, in, out});
    add({31, 33, 0, true, false, in, out, true});
    add({5, 7, 0, false, true, in, out, false, 0, 3});
    add({9, 17, 0, true, false, in, out, false, 0, 0, 17, 17, 40});
  }
  // So far apart that the last row begins 2^32 elements in.
  const int64_t far = int64_t{1} << 27;
  add({33, 5, 17, false, false, f32, f32, false, 1, 0, far, 0, far});
  add({5, 17, 33, true, false, bf16, f32, false, 0, 0, far, far, 0});
  for (DType dtype : {f32, bf16, f16})
    for (int64_t m : {0, 1, 33, 129})
      for (int64_t n : {1, 16, 33})
        for (int64_t k : {1, 24, 33})
          for (bool joined : {false, true}) cases.push_back(make_linear(m, n, k, dtype, kLibrary, joined));
  for (DType dtype : {f32, bf16, f16}) cases.push_back(make_linear(256, 64, 128, dtype, kLibrary, true));
  return cases;
}

}  // namespace

std::vector<OpCase> gemm_cases() {
  std::vector<OpCase> cases;
  const DType f32 = DType::kF32, bf16 = DType::kBF16;
  // Every transpose of every awkward size, by both implementations, and 16-bit with both kinds of output.
  for (int64_t m : {1, 5, 33})
    for (int64_t n : {1, 31, 33})
      for (int64_t k : {1, 7, 32, 65})
        for (bool ta : {false, true})
          for (bool tb : {false, true}) {
            cases.push_back(make({m, n, k, ta, tb}, "packed"));
            cases.push_back(make({m, n, k, ta, tb}, "onednn"));
            cases.push_back(make({m, n, k, ta, tb, bf16, bf16}));
            cases.push_back(make({m, n, k, ta, tb, bf16, f32}, "packed"));
          }
  // Nothing to add up, nothing to write.
  for (const char* variant : {"packed", "onednn"}) {
    cases.push_back(make({0, 32, 33}, variant));
    cases.push_back(make({32, 0, 33}, variant));
    cases.push_back(make({31, 33, 0}, variant));
    cases.push_back(make({31, 33, 0, false, true, f32, f32, true, 1}, variant));
    cases.push_back(make({129, 33, 0, true, false, f32, f32, false, 1}, variant));
    cases.push_back(make({5, 7, 0, false, true, f32, f32, true, 0, 3}, variant));
    cases.push_back(make({5, 7, 9, false, true, f32, f32, false, 0, 0}, variant));
  }
  cases.push_back(make({31, 33, 0, false, false, bf16, bf16, true, 2}));
  // Long dimensions, cuts by columns, by rows, by depth, with all that begins a sum.
  for (const char* variant : {"packed", "onednn"})
    for (bool ta : {false, true})
      for (bool tb : {false, true}) {
        cases.push_back(make({1023, 33, 31, ta, tb, f32, f32, false, 1}, variant));
        cases.push_back(make({33, 1024, 32, ta, tb, f32, f32, true, 0}, variant));
        cases.push_back(make({31, 32, 1025, ta, tb, f32, f32, true, 1}, variant));
        cases.push_back(make({129, 65, 513, ta, tb, f32, f32, false, 1}, variant));
        cases.push_back(make({1, 1025, 300, ta, tb, f32, f32, true, 1}, variant));
        cases.push_back(make({3, 1023, 257, ta, tb, f32, f32, false, 1}, variant));
        cases.push_back(make({17, 19, 33, ta, tb, f32, f32, true, 1, 5}, variant));
        cases.push_back(make({33, 40, 64, ta, tb, f32, f32, false, 0, 8}, variant));
      }
  for (bool ta : {false, true})
    for (bool tb : {false, true}) {
      cases.push_back(make({1025, 33, 31, ta, tb, bf16, f32, true, 2}));
      cases.push_back(make({32, 1023, 33, ta, tb, bf16, bf16, false, 1}));
      cases.push_back(make({31, 32, 1024, ta, tb, bf16, bf16, true, 2}));
      cases.push_back(make({130, 70, 600, ta, tb, bf16, bf16, true, 2}));
      cases.push_back(make({17, 19, 33, ta, tb, bf16, f32, true, 2, 5}));
      cases.push_back(make({33, 40, 300, ta, tb, bf16, bf16, false, 0, 3}));
    }
  // Products large enough for several slabs of columns and of depths, and a batch of them.
  cases.push_back(make({97, 2100, 40, false, true}, "packed"));
  cases.push_back(make({130, 1030, 1100, true, false}, "packed"));
  cases.push_back(make({257, 260, 256, false, true, f32, f32, false, 1, 2}, "packed"));
  cases.push_back(make({2, 1100, 8000, false, true, f32, f32, false, 0, 2}, "packed"));
  // Rows apart; and so far that the last begins 2^32 elements in.
  for (const char* variant : {"packed", "onednn"})
    for (bool ta : {false, true})
      for (bool tb : {false, true}) {
        cases.push_back(make({33, 31, 65, ta, tb, f32, f32, true, 1, 0, 70, 72, 40}, variant));
        cases.push_back(make({9, 17, 33, ta, tb, f32, f32, false, 1, 4, 600, 700, 300}, variant));
      }
  const int64_t far = int64_t{1} << 30;
  cases.push_back(make({5, 33, 17, false, false, f32, f32, false, 1, 0, far, 0, far}, "packed"));
  cases.push_back(make({33, 5, 17, false, true, f32, f32, false, 0, 0, 0, far, 0}, "packed"));
  cases.push_back(make({33, 17, 5, true, false, f32, f32, false, 0, 0, far, far, 0}, "packed"));
  cases.push_back(make({5, 33, 17, false, false, bf16, bf16, false, 1, 0, far, 0, far}));
  cases.push_back(make({33, 17, 5, true, false, bf16, f32, false, 0, 0, far, far, 0}));
  cases.push_back(make({7, 9, 11, false, true, f32, f32, false, 0, 5, far, far, far}, "packed"));
  // oneDNN counts rows apart in 64 bits too.
  cases.push_back(make({5, 33, 17, false, false, f32, f32, false, 1, 0, far, 0, far}, "onednn"));

  // Linear layers, both directions.
  for (int64_t m : {1, 7, 33, 129})
    for (int64_t n : {1, 16, 33})
      for (int64_t k : {1, 24, 33}) {
        cases.push_back(make_linear(m, n, k, f32, "packed"));
        cases.push_back(make_linear(m, n, k, bf16));
      }
  for (int64_t m : {0, 1, 129}) {
    cases.push_back(make_linear(m, 33, 24, f32, "packed", true));
    cases.push_back(make_linear(m, 33, 24, bf16, "", true));
  }
  cases.push_back(make_linear(33, 17, 9, f32, "onednn"));
  cases.push_back(make_linear(0, 17, 9, f32));
  cases.push_back(make_linear(300, 20, 24, f32));

  for (const Product& p : {Product{512, 512, 512, false, true}, Product{4096, 256, 256, false, true},
                           Product{4096, 1024, 256, false, true}, Product{256, 1024, 4096, true, false}}) {
    cases.push_back(make(p, "packed"));
    cases.back().name += "/large";
    cases.back().benchmark = true;
    cases.back().test = false;
  }
  const std::vector<OpCase> library = library_cases();
  cases.insert(cases.end(), library.begin(), library.end());
  // A build without oneDNN has no such cases.
  std::vector<const char*> built = gemm_implementations();
  built.push_back(kLibrary);
  std::erase_if(cases,
                [&](const OpCase& c) { return !c.variant.empty() && std::ranges::count(built, c.variant) == 0; });
  return cases;
}

}  // namespace frit
