#include <cmath>
#include <limits>

#include "frit/ops/case.h"
#include "frit/ops/softmax/softmax.h"

namespace frit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Problem {
  int64_t rows = 1, cols = 1;
  DType dtype = DType::kF32;
  DType y_dtype = DType::kF32;
  bool lengths = false, mask = false;
  float p_drop = 0;
  int64_t rows_per_head = 0;
  bool in_place = false;      // y is x; no backward
  bool forward_only = false;  // y in y_dtype; otherwise y, like dy, has x's dtype and dx has y_dtype
  float scale = 0.7f;
  int64_t stride = 0;      // of x
  bool stored = false;     // the published form
  bool poisoned = false;   // x is NaN past the rows' lengths, as in a bucket's tail
  bool instances = false;  // forces every instance that takes the shape
};

// What fits the GPU's instances, in vectors of 16 bytes.
constexpr int64_t kWarpVectors = 288, kBlockVectors = 1024, kAnyVectors = 64;
int64_t vectors_of(const Problem& p) {
  const int64_t n = 16 / size_of(p.dtype), stride = p.stride ? p.stride : p.cols;
  return (p.cols + (stride % n ? n - 1 : 0) + n - 1) / n;
}
// 16-bit rows without lengths or mask: whole vectors alone count, what is left over lies beside them.
bool row_per_warp(const Problem& p, int64_t vectors) {
  const bool plain = size_of(p.dtype) == 2 && p.y_dtype == p.dtype && !p.lengths && !p.mask && !p.stored && p.cols > 0;
  return (plain ? p.cols / 8 : vectors) <= 64;
}
std::vector<std::string> instances_of(const Problem& p) {
  const int64_t vectors = vectors_of(p);
  std::vector<std::string> names = {"any"};
  if (p.mask || p.dtype != p.y_dtype) return names;
  names.push_back("row_per_block");
  if (vectors <= 16) names.push_back("row_per_8_lanes");
  if (row_per_warp(p, vectors)) names.push_back("row_per_warp");
  if (vectors <= 80) names.push_back("row_per_16_lanes");
  if (vectors <= kWarpVectors) names.insert(names.end(), {"long_row_per_warp", "long_row_exponentials_twice"});
  if (vectors <= 320) names.push_back("row_per_2_warps");
  return names;
}
// Stated where the rows' lengths do not decide what is read, and a row fits registers.
void state_gpu_budgets(OpCase& c, const Problem& p) {
  const int64_t vectors = vectors_of(p), elements = p.rows * p.cols, s = size_of(p.dtype);
  const bool any = p.mask || p.dtype != p.y_dtype || (p.stored && (vectors <= kAnyVectors || vectors > kWarpVectors));
  if (p.lengths || vectors > (any ? kAnyVectors : kBlockVectors)) return;
  const int64_t launches = p.rows > 0, block = !any && vectors > kWarpVectors ? launches : 0;
  c.forward_gpu = {launches,
                   2 * block,
                   elements * (s + (p.mask ? 4 : 0)),
                   elements * (size_of(p.forward_only ? p.y_dtype : p.dtype) + (p.stored ? s + 1 : 0)) + p.rows * 4,
                   0,
                   0};
  const int64_t lanes = any || p.stored            ? 32
                        : vectors <= 16            ? 8
                        : row_per_warp(p, vectors) ? 32
                        : vectors <= 80            ? 16
                        : block                    ? 256
                                                   : 32;
  if (!p.mask)  // else rows that are masked whole are not read; each of a row's threads reads lse
    c.backward_gpu = {launches,
                      block,
                      elements * (2 * s + (p.stored && p.p_drop > 0 ? 1 : 0)) + p.rows * lanes * 4,
                      elements * size_of(p.y_dtype),
                      0,
                      0};
}

// Every fourth row is masked whole, the others at random.
Fill fill_mask() {
  return [](CaseRandom& r, Array& a) {
    const int64_t cols = a.dim(1);
    for (int64_t i = 0; i < static_cast<int64_t>(a.v.size()); ++i)
      a.v[i] = (cols > 0 && i / cols % 4 == 3) || r.uniform() < 0.2 ? -kInfinity : r.normal();
  };
}
// Lengths from 0 to cols, both included.
Fill fill_lengths(int64_t cols) {
  return [cols](CaseRandom& r, Array& a) {
    for (int64_t i = 0; i < static_cast<int64_t>(a.v.size()); ++i)
      a.v[i] = static_cast<double>(i == 0 ? 0 : i == 1 ? cols : r.below(cols + 1));
  };
}

int64_t poisoned_length(int64_t row, int64_t cols) {
  return row * 29 % (cols + 1);
}
Fill fill_poisoned(Fill fill) {
  return [fill](CaseRandom& r, Array& a) {
    fill(r, a);
    for (int64_t i = 0; i < a.dim(0); ++i)
      for (int64_t j = poisoned_length(i, a.dim(1)); j < a.dim(1); ++j)
        a[i * a.dim(1) + j] = std::numeric_limits<double>::quiet_NaN();
  };
}

OpCase make(Problem problem) {
  const int64_t rows = problem.rows, cols = problem.cols;
  const Dropout dropout{problem.p_drop, dropout_site("softmax.cases"), 1, {5, 6}};
  OpCase c;
  c.name = fmt::format("{}x{}/{}->{}{}{}{}{}{}{}{}", rows, cols, name_of(problem.dtype), name_of(problem.y_dtype),
                       problem.lengths ? "/lengths" : "", problem.mask ? "/mask" : "",
                       problem.p_drop > 0 ? fmt::format("/drop{}", problem.p_drop) : "",
                       problem.rows_per_head ? fmt::format("/heads of {}", problem.rows_per_head) : "",
                       problem.in_place ? "/in place" : "",
                       problem.stride ? fmt::format("/stride{}", problem.stride) : "", problem.stored ? "/stored" : "");
  c.inputs = {{"x", problem.dtype, {rows, cols}, fill_normal(0, 3), problem.stride}};
  if (problem.lengths) c.inputs.push_back({"lengths", DType::kI32, {rows}, fill_lengths(cols)});
  if (problem.poisoned) {
    std::vector<double> lengths(rows);
    for (int64_t r = 0; r < rows; ++r) lengths[r] = static_cast<double>(poisoned_length(r, cols));
    c.inputs[0].fill = fill_poisoned(c.inputs[0].fill), c.inputs[1].fill = fill_values(lengths);
    c.name += "/poisoned";
    c.finite_difference_step = 0;  // moves the poison, too
  }
  if (problem.mask) c.inputs.push_back({"mask", DType::kF32, {rows, cols}, fill_mask()});
  const std::string y = problem.in_place ? "x" : "y";
  c.outputs = {{y,
                problem.in_place ? problem.dtype : problem.y_dtype,
                {rows, cols},
                fill_normal(),
                problem.in_place ? problem.stride : 0},
               {"lse", DType::kF32, {rows}}};
  if (problem.stored) {
    c.variant = "stored";
    c.outputs.push_back({"p", problem.y_dtype, {rows, cols}});
    c.outputs.push_back({"keep", DType::kU8, {rows, cols}});
  }
  if (problem.instances) c.forward_instances = c.backward_instances = instances_of(problem);
  state_gpu_budgets(c, problem);
  if (problem.dtype == DType::kF16 || problem.y_dtype == DType::kF16 || problem.stored) c.where = Where::kGpu;
  if (problem.dtype == DType::kBF16 && problem.y_dtype == DType::kF32) c.where = Where::kCpu;
  const auto args = [=](const Tensors& t) {
    SoftmaxArgs a;
    a.scale = problem.scale;
    if (problem.lengths) a.lengths = t.at("lengths");
    if (problem.mask) a.mask = t.at("mask");
    a.dropout = dropout, a.first_row = 17, a.rows_per_head = problem.rows_per_head;
    if (problem.stored) a.p = t.at("p"), a.keep = t.at("keep");
    return a;
  };
  // Scaled and masked scores of a row, and their log sum exp.
  const auto scores = [=](const Arrays& in, int64_t r, std::vector<double>& s) {
    s.assign(cols, -kInfinity);
    const int64_t length = problem.lengths ? static_cast<int64_t>(in.at("lengths")[r]) : cols;
    double top = -kInfinity, sum = 0;
    for (int64_t j = 0; j < length; ++j) {
      s[j] = static_cast<double>(problem.scale) * in.at("x")[r * cols + j] +
             (problem.mask ? in.at("mask")[r * cols + j] : 0);
      top = std::max(top, s[j]);
    }
    if (top == -kInfinity) return top;
    for (double e : s) sum += std::exp(e - top);
    return top + std::log(sum);
  };
  const auto factor = [=](int64_t r, int64_t j) -> double {
    if (!dropout.active()) return 1;
    const int64_t per = problem.rows_per_head ? problem.rows_per_head : rows;
    return dropout.keep(17 + r % per, j, static_cast<uint32_t>(r / per)) ? dropout.scale() : 0;
  };
  c.forward = [=](Context& context, const Tensors& t) {
    softmax_forward(context, t.at("x"), args(t), t.at(y), t.at("lse"));
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    std::vector<double> s;
    for (int64_t r = 0; r < rows; ++r) {
      const double lse = scores(in, r, s);
      out["lse"][r] = lse;
      for (int64_t j = 0; j < cols; ++j)
        out[y][r * cols + j] = lse == -kInfinity ? 0 : std::exp(s[j] - lse) * factor(r, j);
      if (!problem.stored) continue;
      const int64_t length = problem.lengths ? static_cast<int64_t>(in.at("lengths")[r]) : cols;
      for (int64_t j = 0; j < cols; ++j) {
        out["p"][r * cols + j] = lse == -kInfinity ? 0 : std::exp(s[j] - lse);
        out["keep"][r * cols + j] = j < length && factor(r, j) > 0;
      }
    }
  };
  if (problem.instances) c.name += "/instances";
  c.forward_budget.regions = rows > 0;
  c.forward_budget.scratch_bytes = 0;
  c.forward_budget.bytes = rows * cols * (size_of(problem.dtype) + size_of(problem.y_dtype)) + rows * 4;
  if (problem.forward_only) c.name += "/forward";
  if (problem.in_place || problem.forward_only) return c;
  c.incoming = {"y"};
  c.differentiable = {"x"};
  // dy has x's dtype, as backward asks.
  c.outputs[0].dtype = problem.dtype;
  c.gradient_dtype["x"] = problem.y_dtype;
  c.backward = [=](Context& context, const Tensors& t, bool) {
    softmax_backward(context, t.at("dy"), t.at("x"), t.at("lse"), args(t), t.at("dx"));
  };
  c.gradient_oracle = [=](const Arrays& in, Arrays& out) {
    std::vector<double> s;
    for (int64_t r = 0; r < rows; ++r) {
      const double lse = scores(in, r, s);
      if (lse == -kInfinity) continue;
      double mean = 0;
      for (int64_t j = 0; j < cols; ++j) mean += std::exp(s[j] - lse) * factor(r, j) * in.at("dy")[r * cols + j];
      for (int64_t j = 0; j < cols; ++j)
        out["dx"][r * cols + j] =
            problem.scale * std::exp(s[j] - lse) * (factor(r, j) * in.at("dy")[r * cols + j] - mean);
    }
  };
  c.backward_budget.regions = rows > 0;
  c.backward_budget.scratch_bytes = 0;
  c.backward_budget.bytes = rows * cols * (2 * size_of(problem.dtype) + size_of(problem.y_dtype)) + rows * 4;
  return c;
}

}  // namespace

std::vector<OpCase> softmax_cases() {
  std::vector<OpCase> cases;
  const auto add = [&](Problem p) { cases.push_back(make(p)); };
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int64_t cols : {1, 2, 7, 8, 9, 31, 32, 33, 255, 257, 1023, 1024, 1025})
      add({.rows = 5, .cols = cols, .dtype = dtype, .y_dtype = dtype});
    for (int64_t cols : {1, 5, 16, 33, 61, 300, 1025})
      add({.rows = 7, .cols = cols, .dtype = dtype, .y_dtype = dtype, .lengths = true, .p_drop = 0.1f});
    for (int64_t cols : {3, 31, 40, 257}) {
      add({.rows = 9, .cols = cols, .dtype = dtype, .y_dtype = dtype, .mask = true});
      add({.rows = 9,
           .cols = cols,
           .dtype = dtype,
           .y_dtype = dtype,
           .lengths = true,
           .mask = true,
           .p_drop = 0.5f,
           .rows_per_head = 3});
    }
    for (int64_t rows : {0, 1, 31, 32, 33, 1023, 1025})
      add({.rows = rows, .cols = 12, .dtype = dtype, .y_dtype = dtype, .p_drop = 0.3f});
    add({.rows = 6, .cols = 0, .dtype = dtype, .y_dtype = dtype});
    add({.rows = 0, .cols = 0, .dtype = dtype, .y_dtype = dtype});
    for (int64_t cols : {2047, 2048, 2049, 2600})  // kept on the stack, and not
      add({.rows = 3, .cols = cols, .dtype = dtype, .y_dtype = dtype, .lengths = cols == 2600, .p_drop = 0.2f});
    for (int64_t cols : {1, 33, 100, 301, 2047, 2500})
      add({.rows = 4, .cols = cols, .dtype = dtype, .y_dtype = dtype, .p_drop = 0.2f, .in_place = true});
    for (DType other : {DType::kF32, DType::kBF16, DType::kF16})
      for (bool forward_only : {false, true})
        if (other == dtype || dtype == DType::kF32 || (dtype == DType::kBF16 && other == DType::kF32))
          add({.rows = 5, .cols = 37, .dtype = dtype, .y_dtype = other, .p_drop = 0.2f, .forward_only = forward_only});
    add({.rows = 5, .cols = 37, .dtype = dtype, .y_dtype = dtype, .p_drop = 0.2f, .stride = 50});
    add({.rows = 5, .cols = 33, .dtype = dtype, .y_dtype = dtype, .p_drop = 0.2f, .stride = int64_t{1} << 30});
    for (int64_t cols : {9, 65, 263, 511, 513, 1100, 2049, 4103})
      add({.rows = 5,
           .cols = cols,
           .dtype = dtype,
           .y_dtype = dtype,
           .lengths = cols == 263,
           .p_drop = 0.25f,
           .rows_per_head = 2,
           .instances = true});
    for (int64_t cols : {130, 258, 767, 1790})  // rows that x and y begin apart
      add({.rows = 9,
           .cols = cols,
           .dtype = dtype,
           .y_dtype = dtype,
           .p_drop = 0.3f,
           .rows_per_head = 4,
           .stride = cols + 3,
           .instances = true});
    for (int64_t cols : {40, 128, 504, 1000, 1504})  // whole aligned vectors
      add({.rows = 9,
           .cols = cols,
           .dtype = dtype,
           .y_dtype = dtype,
           .p_drop = cols == 1000 ? 0.6f : 0.25f,
           .rows_per_head = 4,
           .instances = true});
    // Pairs of rows of one head, 512 whole columns each: a kernel of their own where the rows are of 16 bits.
    add({.rows = 10, .cols = 512, .dtype = dtype, .y_dtype = dtype, .p_drop = 0.25f, .rows_per_head = 4});
    add({.rows = 6, .cols = 512, .dtype = dtype, .y_dtype = dtype, .p_drop = 0.25f, .in_place = true, .stride = 520});
    add({.rows = 2, .cols = 512, .dtype = dtype, .y_dtype = dtype});
    // Longer than what a block keeps in registers; the row's tail is read again.
    add({.rows = 2, .cols = 8211, .dtype = dtype, .y_dtype = dtype, .p_drop = 0.2f, .instances = true});
    add({.rows = 3, .cols = 700, .dtype = dtype, .y_dtype = dtype, .mask = true, .p_drop = 0.2f});
    for (int64_t cols : {40, 133, 519})
      add({.rows = 7,
           .cols = cols,
           .dtype = dtype,
           .y_dtype = dtype,
           .lengths = true,
           .p_drop = 0.2f,
           .poisoned = true,
           .instances = true});
    if (dtype == DType::kF32)
      for (DType other : {DType::kBF16, DType::kF16})
        add({.rows = 3, .cols = 403, .dtype = dtype, .y_dtype = other, .p_drop = 0.2f});
    for (int64_t cols : {1, 40, 133, 513, 2049, 2600})
      add({.rows = 5,
           .cols = cols,
           .dtype = dtype,
           .y_dtype = dtype,
           .lengths = cols == 133 || cols == 2600,
           .mask = cols == 40,
           .p_drop = cols == 513 ? 0.0f : 0.2f,
           .rows_per_head = 3,
           .stored = true});
    for (int64_t cols : {32, 512}) {
      add({.rows = 1 << 21 >> (cols == 32 ? 5 : 9), .cols = cols, .dtype = dtype, .y_dtype = dtype, .p_drop = 0.1f});
      cases.back().benchmark = true, cases.back().test = false;
    }
  }
  // Attention's scores, 8x16 heads of 512 queries and 4x16 of 2048.
  for (int64_t length : {512, 2048})
    for (int64_t cols : {length - 1, length, length + 1})
      for (bool stored : {false, true}) {
        if (stored && cols != length) continue;
        add({.rows = (length == 512 ? 128 : 64) * length,
             .cols = cols,
             .dtype = DType::kBF16,
             .y_dtype = DType::kBF16,
             .p_drop = 0.1f,
             .rows_per_head = length,
             .stored = stored});
        cases.back().inputs[0].fill = fill_repeated(fill_normal(0, 3));
        cases.back().incoming_fill = fill_repeated(fill_normal());
        OpCase& c = cases.back();
        c.benchmark = true, c.test = false, c.where = Where::kGpu;
        if (!stored)
          c.forward_instances = c.backward_instances =
              instances_of({.cols = cols, .dtype = DType::kBF16, .y_dtype = DType::kBF16});
      }
  return cases;
}

}  // namespace frit
