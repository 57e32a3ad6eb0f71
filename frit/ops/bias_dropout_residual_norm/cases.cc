#include <algorithm>
#include <cmath>
#include <numeric>

#include "frit/ops/bias_dropout_residual_norm/bias_dropout_residual_norm.h"
#include "frit/ops/case.h"
#include "frit/ops/column_sum/cpu.h"

namespace frit {
namespace {

constexpr float kEps = 1e-5f;

struct Options {
  float p_drop = 0.3f;
  bool sum = true;      // s is written
  bool more = false;    // backward adds something to ds
  bool dropped = true;  // backward writes dx
  bool dbias = true;    // and sums its columns
  int64_t stride = 0;
  DType dgamma = DType::kF32;
  const char* s_is = "s";  // "x" or "residual": s is that operand; there is no backward then
  const char* note = "";
};

int64_t over(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// What layer_norm_forward runs on rows of whole vectors that at most 8192 rows have: a warp a row (up to 32 vectors
// two) up to 128 vectors, and blocks that take many rows beyond. See there.
GpuBudget forward_gpu(int64_t rows, int64_t cols, int64_t stride, DType dtype, const Options& o) {
  const int64_t size = size_of(dtype), n = 16 / size, vectors = over(cols, n);
  GpuBudget b;
  if (vectors > 128 || rows > 8192 || (vectors > 32 && (stride % n != 0 || (size == 2 && cols % n != 0)))) return b;
  b.launches = rows == 0 ? 0 : 1;
  b.barriers = 0;
  // bias, gamma and beta beside x and the residual.
  b.read_bytes = rows * cols * size * 2 + (vectors <= 32 ? over(rows, 2) : rows) * 3 * cols * size;
  b.written_bytes = rows * cols * size * (o.sum ? 2 : 1) + 8 * rows;
  b.atomics = 0, b.scratch_bytes = 0;
  return b;
}

// What layer_norm_backward runs, and beside it: dx, and a third of partial sums.
GpuBudget backward_gpu(int64_t rows, int64_t cols, int64_t stride, DType dtype, const Options& o) {
  const int64_t size = size_of(dtype), n = 16 / size, vectors = over(cols, n);
  GpuBudget b;
  if (vectors > 128 || (vectors > 64 && size != 2) || (vectors > 32 && (stride % n != 0 || cols % n != 0))) return b;
  // Rows of 16 bits go through shared memory where 2 or else 3 steps of 32 vectors a warp hold them, with blocks of 16
  // or 12 warps, which all wait for one another once a row if they share it; of others a warp has a row, 16 a block, of
  // one vector a thread 8 and two rows each.
  const int64_t steps = over(cols / n, 32);
  const int64_t each = steps % 2 == 0 ? 2 : 3;
  const bool held = vectors > 32 && size == 2 && steps % each == 0;
  const int64_t warps = held ? steps / each : 1, batch = (held && each == 3 ? 12 : 16) / warps,
                blocks = std::clamp<int64_t>(over(rows, 2 * batch), 1, vectors <= 32 ? 264 : 132),
                batches = over(rows, blocks * batch), sums = o.dbias ? 3 : 2;
  b.launches = 2;
  b.barriers = (vectors > 32 ? 1 : 0) + (held && (warps > 1 || each == 2) ? 1 : 0) + (warps > 1 ? batches : 0) + 2;
  b.read_bytes = rows * cols * size * (o.more ? 3 : 2) + rows * warps * 8 +
                 blocks * (vectors > 32 ? 1 : 8) * cols * size + blocks * sums * cols * 4;
  b.written_bytes = rows * cols * size * (o.dropped ? 2 : 1) + blocks * sums * cols * 4 +
                    cols * (2 * size_of(o.dgamma) + (o.dbias ? size_of(o.dgamma) : 0));
  b.atomics = 0;
  b.scratch_bytes = static_cast<int64_t>(align_up(blocks * 2 * cols * 4)) +
                    (o.dbias ? static_cast<int64_t>(align_up(blocks * cols * 4)) : 0);
  return b;
}

struct RowStats {
  double mean, rstd;
};
RowStats stats(const Array& s, int64_t r) {
  const int64_t cols = s.dim(1);
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < cols; ++i) sum += s[r * cols + i];
  const double mean = sum / static_cast<double>(cols);
  for (int64_t i = 0; i < cols; ++i) squares += (s[r * cols + i] - mean) * (s[r * cols + i] - mean);
  return {mean, 1 / std::sqrt(squares / static_cast<double>(cols) + static_cast<double>(kEps))};
}

OpCase make(int64_t rows, int64_t cols, DType dtype, Options o = {}) {
  OpCase c;
  const bool own = std::string_view(o.s_is) == "s";
  c.name = fmt::format("{}x{}/{}/p{}{}{}{}{}{}{}{}{}", rows, cols, name_of(dtype), o.p_drop, o.sum ? "" : "/no_sum",
                       o.more ? "/more" : "", o.dropped ? "" : "/no_dx", o.dbias ? "" : "/no_dbias",
                       o.stride ? "/strided" : "", own ? "" : fmt::format("/s_is_{}", o.s_is),
                       o.dgamma == DType::kF32 ? "" : "/bf16_dgamma", o.note);
  const Dropout dropout{o.p_drop, dropout_site("case"), 3, {11, 7}};
  c.inputs = {{"x", dtype, {rows, cols}, fill_normal(), o.stride},
              {"bias", dtype, {cols}},
              {"residual", dtype, {rows, cols}, fill_normal(0.5, 2), o.stride},
              {"gamma", dtype, {cols}, fill_normal(1, 0.5)},
              {"beta", dtype, {cols}}};
  const std::string sum = o.s_is;
  c.outputs = {{"y", dtype, {rows, cols}, fill_normal(), o.stride},
               {"mean", DType::kF32, {rows}},
               {"rstd", DType::kF32, {rows}}};
  if (o.sum) c.outputs.push_back({sum, dtype, {rows, cols}, fill_normal(), o.stride});
  c.forward = [=](Context& context, const Tensors& t) {
    bias_dropout_residual_norm_forward(context, t.at("x"), t.at("bias"), t.at("residual"), dropout, t.at("gamma"),
                                       t.at("beta"), kEps, o.sum ? t.at(sum) : Tensor(), t.at("y"), t.at("mean"),
                                       t.at("rstd"));
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    Array s = in.at("x");
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < cols; ++i) {
        const double v = s[r * cols + i] + in.at("bias")[i];
        const double kept = !dropout.active() ? v : dropout.keep(r, i) ? v * dropout.scale() : 0;
        s[r * cols + i] = kept + in.at("residual")[r * cols + i];
      }
      const RowStats stat = stats(s, r);
      out["mean"][r] = stat.mean, out["rstd"][r] = stat.rstd;
      for (int64_t i = 0; i < cols; ++i)
        out["y"][r * cols + i] = (s[r * cols + i] - stat.mean) * stat.rstd * in.at("gamma")[i] + in.at("beta")[i];
    }
    if (o.sum) out[sum] = s;
  };
  if (dtype == DType::kF16) c.where = Where::kGpu;
  // s is rounded before it is normalised.
  const bool sixteen = is_16bit_float(dtype);
  c.tolerance["y"] = tolerance_for(dtype, sixteen ? 2 : 1);
  c.tolerance["mean"] = c.tolerance["rstd"] = sixteen ? Tolerance{0.02, 0.01} : Tolerance{2e-6, 2e-6};
  if (cols <= 2) c.tolerance["y"] = tolerance_for(dtype, 8), c.tolerance["rstd"] = {0.05, 0.05};
  const int64_t elements = rows * cols * size_of(dtype), stride = o.stride ? o.stride : cols;
  c.forward_budget = {rows == 0 ? 0 : 2, 0, elements * (o.sum ? 4 : 3) + 3 * cols * size_of(dtype) + 8 * rows};
  c.forward_gpu = forward_gpu(rows, cols, stride, dtype, o);
  if (!own || !o.sum) return c;

  c.incoming = {"y"};
  if (o.more) c.inputs.push_back({"more", dtype, {rows, cols}, fill_normal(), o.stride});
  c.differentiable = {"residual", "gamma", "beta"};  // ds is the residual's gradient
  if (o.dropped) c.differentiable.push_back("x");
  if (o.dbias) c.differentiable.push_back("bias");
  c.accumulates = {"gamma", "beta"};
  if (o.dbias) c.accumulates.push_back("bias");
  const double grown = std::max<double>(8, rows / 8.0);
  for (const char* name : {"gamma", "beta", "bias"}) {
    if (!o.dbias && std::string_view(name) == "bias") continue;
    c.gradient_dtype[name] = o.dgamma;
    c.gradient_tolerance[name] = tolerance_for(o.dgamma, o.dgamma == DType::kF32 ? grown : 8);
    // Sums of values that were rounded to 16 bits, or computed from such.
    if (sixteen) c.gradient_tolerance[name] = {0.01 * std::sqrt(static_cast<double>(rows) + 1), 0.01};
  }
  c.backward = [=](Context& context, const Tensors& t, bool accumulate) {
    bias_dropout_residual_norm_backward(context, t.at("dy"), t.at("s"), t.at("gamma"), t.at("mean"), t.at("rstd"),
                                        o.more ? t.at("more") : Tensor(), dropout, accumulate, t.at("dresidual"),
                                        o.dropped ? t.at("dx") : Tensor(), t.at("dgamma"), t.at("dbeta"),
                                        o.dbias ? t.at("dbias") : Tensor());
  };
  c.gradient_oracle = [=](const Arrays& in, Arrays& out) {
    const Array &s = in.at("s"), &dy = in.at("dy"), &gamma = in.at("gamma");
    for (int64_t r = 0; r < rows; ++r) {
      const RowStats stat = stats(s, r);
      const auto hat = [&](int64_t i) { return (s[r * cols + i] - stat.mean) * stat.rstd; };
      double total = 0, product = 0;
      for (int64_t i = 0; i < cols; ++i) {
        const double d = dy[r * cols + i], g = gamma[i] * d;
        total += g, product += g * hat(i);
        out["dgamma"][i] += d * hat(i), out["dbeta"][i] += d;
      }
      for (int64_t i = 0; i < cols; ++i) {
        const double ds =
            stat.rstd * (gamma[i] * dy[r * cols + i] - (total + hat(i) * product) / static_cast<double>(cols)) +
            (o.more ? in.at("more")[r * cols + i] : 0);
        const double dx = !dropout.active() ? ds : dropout.keep(r, i) ? ds * dropout.scale() : 0;
        out["dresidual"][r * cols + i] = ds;
        if (o.dropped) out["dx"][r * cols + i] = dx;
        if (o.dbias) out["dbias"][i] += dx;
      }
    }
  };
  // What is added to ds is no part of what the oracle's forward differentiates.
  if (o.more) c.finite_difference_step = 0;
  const int64_t pieces = partial_sum_pieces(rows);
  c.backward_budget.bytes = elements * (o.more ? 3 : 2) + elements * (o.dropped ? 2 : 1) +
                            cols * (size_of(dtype) + 3 * size_of(o.dgamma)) + 8 * rows;
  c.backward_budget.regions = o.dbias ? 4 : 2 + (o.dropped && rows > 0 ? 1 : 0);
  c.backward_budget.scratch_bytes = static_cast<int64_t>(align_up(pieces * 2 * cols * 4));
  c.backward_gpu = backward_gpu(rows, cols, stride, dtype, o);
  return c;
}

// Every kernel instance that can run the case; "apart" is the two operators one after the other.
void add_instances(OpCase& c, int64_t cols, int64_t stride, DType dtype) {
  const int64_t n = 16 / size_of(dtype), vectors = over(cols, n);
  const bool whole = cols % n == 0 && stride % n == 0;
  c.forward_instances = {"apart", "one_sync_wide"};
  if (vectors <= 8 * 32) c.forward_instances.push_back("one_sync_1");
  if (vectors <= 8 * 64) c.forward_instances.push_back("one_sync_2");
  if (vectors <= 8 * 128) c.forward_instances.push_back("one_sync_4");
  const int64_t steps = over(cols / 8, 32);  // `held` shares them out evenly
  if (whole && n == 8 && steps > 1 && (steps % 4 == 0 || steps % 3 == 0 || steps % 2 == 0))
    c.forward_instances.push_back("held");
  for (int64_t each : {2, 4, 5})
    if (whole && vectors <= 8 * 32 * each) c.forward_instances.push_back(fmt::format("spans_{}", each));
  if (!c.backward) return;
  c.backward_instances = {"apart"};
  if (vectors <= 8 * 32) c.backward_instances.push_back("xhat_1");
  if (whole && n == 8 && steps > 0 && (steps % 2 == 0 || steps % 3 == 0) && steps <= 16)
    c.backward_instances.push_back("held");
  for (int64_t each : {2, 4})
    if (whole && vectors <= 8 * 32 * each) c.backward_instances.push_back(fmt::format("spans_{}", each));
}

}  // namespace

std::vector<OpCase> bias_dropout_residual_norm_cases() {
  std::vector<OpCase> cases;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    // The kernels are layer_norm's, whose cases say more of shapes.
    const bool f16 = dtype == DType::kF16;
    for (int64_t cols : f16 ? std::vector<int64_t>{33, 512, 1025}
                            : std::vector<int64_t>{2, 7, 31, 32, 33, 127, 512, 513, 1023, 1024, 1025})
      for (int64_t rows : {0, 1, 3, 33}) {
        if ((rows == 33 && cols > 128) || (rows == 3 && cols > 1000)) continue;
        cases.push_back(make(rows, cols, dtype));
      }
    cases.push_back(make(67, 64, dtype, {.more = true}));
    cases.push_back(make(67, 40, dtype, {.p_drop = 0}));
    cases.push_back(make(67, 40, dtype, {.p_drop = 0, .more = true, .dropped = false}));
    cases.push_back(make(19, 96, dtype, {.p_drop = 0, .dropped = false, .dbias = false}));
    cases.push_back(make(19, 96, dtype, {.dbias = false}));
    cases.push_back(make(19, 264, dtype, {.sum = false}));
    cases.push_back(make(9, 133, dtype, {.s_is = "x"}));
    cases.push_back(make(9, 136, dtype, {.s_is = "residual"}));
    cases.push_back(make(17, 65, dtype, {.more = true, .stride = 72}));
    cases.push_back(make(4, 33, dtype, {.stride = int64_t{1} << 30}));  // the last row begins past 2^31 elements
    cases.push_back(make(2, 2049 * (16 / size_of(dtype)) - 3, dtype, {.note = "/apart"}));
    // Every kernel instance: rows that fill vectors and that do not, one warp a row and several, several batches a
    // block.
    const struct {
      int64_t rows, cols, stride;
    } shapes[] = {{35, 40, 40}, {33, 131, 131}, {21, 264, 272}, {5, 1000, 1000}, {2, 2560, 2560}, {36, 516, 516}};
    for (const auto& [rows, cols, stride] : shapes) {
      if ((f16 && cols != 264) || (dtype == DType::kF32 && cols > 264)) continue;
      OpCase c = make(rows, cols, dtype,
                      {.more = rows == 33 || rows == 21, .stride = stride == cols ? 0 : stride, .note = "/instances"});
      add_instances(c, cols, stride, dtype);
      cases.push_back(c);
    }
  }
  cases.push_back(make(66, 40, DType::kBF16, {.dgamma = DType::kBF16}));
  for (auto [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{
           {4096, 512}, {16384, 512}, {4096, 1024}, {65536, 1024}, {65536, 1023}}) {
    OpCase c = make(rows, cols, DType::kBF16, {.p_drop = 0.1f});
    c.where = Where::kGpu, c.benchmark = true, c.test = false;
    add_instances(c, cols, cols, DType::kBF16);
    cases.push_back(c);
  }
  return cases;
}

}  // namespace frit
