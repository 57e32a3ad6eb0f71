#include <algorithm>
#include <cmath>
#include <numeric>

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

int64_t over(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
int64_t vectors_of(int64_t cols, DType dtype) {
  return over(cols, 16 / size_of(dtype));
}

// The warps that share a row of 16-bit elements which runs in registers as fp32 (forward's `held`); 0 if none can: each
// has 2, 3 or 4 steps of 32 vectors, all the same number, and the last one at most 7 columns more.
int64_t held_warps(int64_t cols, DType dtype, std::initializer_list<int64_t> steps_of_a_warp = {4, 3, 2}) {
  const int64_t steps = over(cols / 8, 32);
  if (size_of(dtype) != 2 || steps == 0) return 0;
  for (int64_t each : steps_of_a_warp)
    if (steps % each == 0 && steps / each <= 8) return steps / each;
  return 0;
}

// How rows of more than 32 vectors are shared out: `each` vectors a thread, `warps` warps a row, blocks that take rows
// which begin equally far past a multiple of 16 bytes. each is 0 if no such form holds a row.
struct Spans {
  int64_t each = 0, warps = 0, groups = 0, period = 1, blocks = 0;
  int64_t batches = 0;  // of rows, that the busiest block takes
};
Spans spans_of(int64_t rows, int64_t cols, int64_t stride, DType dtype, bool backward) {
  const int64_t n = 16 / size_of(dtype);
  Spans s;
  s.period = std::min(n / std::gcd(stride, n), std::max<int64_t>(rows, 1));
  const int64_t chunks = over(cols + (s.period > 1 ? n - 1 : 0), n);
  const int64_t vectors = vectors_of(cols, dtype);
  if (vectors <= 32 || (!backward && s.period == 1 && vectors <= 128 && rows <= 8192)) return s;
  // Which form runs backward does not depend on the number of rows.
  const int64_t most_chunks = backward && stride % n != 0 ? over(cols + n - 1, n) : chunks;
  for (int64_t each : {2, 4, 5}) {
    const int64_t warps = over(most_chunks, 32 * each), held = each * warps, least = s.each * s.warps;
    // Of equals: forward the fewest warps, backward as many of a block's 8 as can be.
    const bool equal = held == least && (!backward || 8 / warps * warps > 8 / s.warps * s.warps);
    if (warps <= 8 && (s.each == 0 || held < least || equal)) s.each = each, s.warps = warps;
  }
  if (s.each == 0) return s;
  s.warps = over(chunks, 32 * s.each);
  const bool large = backward && s.each == 2 && s.warps == 1;  // blocks of 16 warps
  s.groups = (large ? 16 : 8) / s.warps;
  const int64_t of_class = over(rows, s.period), most = backward && (s.each != 2 || large) ? 132 : 264;
  const int64_t pieces = std::clamp<int64_t>(over(of_class, s.groups * (backward ? 2 : 1)), 1, most / s.period);
  s.blocks = pieces * s.period, s.batches = over(of_class, pieces * s.groups);
  return s;
}

// How backward's `held` shares out rows, as few vectors a thread as can be: a row's warps, and blocks that have room
// for 16 of them and take rows that begin equally far past a multiple of 16 bytes.
Spans held_backward_of(int64_t rows, int64_t cols, int64_t stride, DType dtype) {
  Spans s;
  s.warps = held_warps(cols, dtype, {2, 3, 4});
  if (s.warps == 0 || vectors_of(cols, dtype) <= 32) return s;
  s.each = over(cols / 8, 32) / s.warps;
  s.period = std::min(8 / std::gcd(stride, int64_t{8}), std::max<int64_t>(rows, 1));
  s.groups = 16 / s.warps;
  const int64_t of_class = over(rows, s.period),
                pieces = std::clamp<int64_t>(over(of_class, 2 * s.groups), 1, 132 / s.period);
  s.blocks = pieces * s.period, s.batches = over(of_class, pieces * s.groups);
  return s;
}

// Do rows of 16 bits run where they lie (forward's `in_place`)? Many that are no whole vectors do.
bool runs_in_place(int64_t rows, int64_t cols, int64_t stride, DType dtype) {
  return held_warps(cols, dtype) > 0 && (cols % 8 != 0 || stride % 8 != 0) && rows * cols * 2 > int64_t{16} << 20;
}

// x once, y once. A block reads gamma and beta once, or a warp for the row it takes (up to 32 vectors two rows); a row
// in registers of one warp meets no barrier but the one behind gamma and beta; past 2048 vectors x is read twice.
GpuBudget forward_gpu(int64_t rows, int64_t cols, int64_t stride, DType dtype) {
  const int64_t size = size_of(dtype), vectors = vectors_of(cols, dtype);
  const Spans s = spans_of(rows, cols, stride, dtype, false);
  GpuBudget b;
  b.launches = rows == 0 ? 0 : 1;
  if (runs_in_place(rows, cols, stride, dtype)) {
    b.barriers = held_warps(cols, dtype) > 1 ? 1 : 0;
    // Of gamma and beta each, where a row begins past a multiple of 16 bytes, two vectors for each of its own but the
    // last.
    int64_t shared = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t head = (8 - i * (stride % 8) % 8) % 8;
      shared += cols + (head > 0 ? (cols - head) / 8 * 8 - 8 : 0);
    }
    b.read_bytes = (rows * cols + 2 * shared) * size, b.written_bytes = rows * cols * size + 8 * rows;
    b.atomics = 0, b.scratch_bytes = 0;
    return b;
  }
  if (const int64_t warps = held_warps(cols, dtype); warps > 0) {
    b.barriers = rows > 0 && warps > 1 ? 1 : 0;
    b.read_bytes = rows * 3 * cols * size, b.written_bytes = rows * cols * size + 8 * rows;
    b.atomics = 0, b.scratch_bytes = 0;
    return b;
  }
  if (rows == 0)
    b.barriers = 0;
  else if (s.each > 0)
    b.barriers = 1 + (s.warps > 1 ? s.batches : 0);
  else
    b.barriers = vectors > 128 ? 1 : 0;
  const int64_t times = s.each > 0 ? (rows == 0 ? 0 : s.blocks) : vectors <= 32 ? over(rows, 2) : rows;
  b.read_bytes = rows * cols * size * (vectors > 2048 ? 2 : 1) + times * 2 * cols * size;
  b.written_bytes = rows * cols * size + 8 * rows;
  b.atomics = 0, b.scratch_bytes = 0;
  return b;
}

// dy and x (and dresidual) once, dx once. Beside them: mean and rstd once for each warp of a row; gamma once for each
// block, or, up to 32 vectors, each of its warps (from 1025 vectors on twice a row); the partial sums of `blocks`
// blocks, which the second launch reads. Barriers: one behind gamma, one a batch of rows unless a warp owns a row, one
// to add the block's groups, one in the second launch; where warps share held rows, or have three of 3 vectors a lane
// under way, one behind the last of them.
GpuBudget backward_gpu(int64_t rows, int64_t cols, int64_t stride, DType dtype, DType dgamma, bool residual) {
  const int64_t size = size_of(dtype), vectors = vectors_of(cols, dtype);
  GpuBudget b;
  if (vectors > 2048) return b;
  Spans s = held_backward_of(rows, cols, stride, dtype);
  const bool held = s.each > 0;
  if (!held) s = spans_of(rows, cols, stride, dtype, true);
  const int64_t each = vectors <= 32 ? 1 : 4, warps = s.each > 0 ? s.warps : over(vectors, 32 * each),
                groups = std::max<int64_t>(1, 8 / warps), batch = groups * (each == 1 ? 2 : 1),
                most = 132 * std::max<int64_t>(1, 16 / (warps * groups)),
                blocks = s.each > 0 ? s.blocks : std::clamp<int64_t>(over(rows, 2 * batch), 1, most),
                batches = s.each > 0 ? s.batches : over(over(rows, blocks), batch);
  b.launches = 2;
  b.barriers = (s.each > 0 ? 1 : 0) + (warps > 1 ? batches : 0) + (held && (warps > 1 || s.each == 3) ? 1 : 0) +
               ((s.each > 0 ? s.groups : groups) > 1 ? 1 : 0) + 1;
  b.read_bytes = rows * cols * size * (residual ? 3 : 2) + rows * warps * 8 +
                 (s.each > 0  ? blocks
                  : each == 1 ? blocks * groups
                              : 2 * rows) *
                     cols * size +
                 blocks * 2 * cols * 4;
  b.written_bytes = rows * cols * size + blocks * 2 * cols * 4 + 2 * cols * size_of(dgamma);
  b.atomics = 0;
  b.scratch_bytes = static_cast<int64_t>(align_up(blocks * 2 * cols * 4));
  return b;
}

// Every kernel instance that can run the case (frit/ops/layer_norm/gpu.h) but backward's "atomic", whose bits are not
// the same from run to run.
void add_instances(OpCase& c, int64_t cols, DType dtype) {
  const int64_t vectors = vectors_of(cols, dtype);
  c.forward_instances = {"looped"};
  if (held_warps(cols, dtype) > 0)
    for (const char* name : {"held", "in_place"}) c.forward_instances.push_back(name);
  std::vector<std::string> spans;
  for (int64_t each : {2, 4, 5})
    if (vectors + 1 <= 8 * 32 * each) spans.push_back(fmt::format("spans_{}", each));
  c.forward_instances.insert(c.forward_instances.end(), spans.begin(), spans.end());
  if (vectors <= 8 * 32)
    for (const char* name : {"one_sync_1", "two_sync", "moments"}) c.forward_instances.push_back(name);
  if (vectors <= 8 * 64) c.forward_instances.push_back("one_sync_2");
  if (vectors <= 8 * 128) c.forward_instances.push_back("one_sync_4");
  if (vectors <= 16 * 128) c.forward_instances.push_back("one_sync_wide");
  if (!c.backward) return;
  c.backward_instances = {"looped", "column_serial", "tiled_32x32", "tiled_32x33", "two_stage_apart"};
  c.backward_instances.insert(c.backward_instances.end(), spans.begin(), spans.end());
  if (held_warps(cols, dtype) > 0) c.backward_instances.push_back("held");
  if (vectors <= 8 * 32)
    for (const char* name : {"xhat_1", "dependence", "slides"}) c.backward_instances.push_back(name);
  if (vectors <= 8 * 64) c.backward_instances.push_back("xhat_2");
  if (vectors <= 16 * 128) c.backward_instances.push_back("xhat_4");
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
  if (dtype == DType::kF16) c.where = Where::kGpu;
  c.forward_gpu = forward_gpu(rows, cols, o.stride ? o.stride : cols, dtype);
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
  c.backward_gpu = backward_gpu(rows, cols, o.stride ? o.stride : cols, dtype, o.dgamma, o.residual);
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

// Rows of +-1024, as many of each: xhat is exactly +-1, and with whole dy all sums are exact, so that even sums in no
// fixed order have the same bits.
OpCase make_exact(int64_t rows, int64_t cols, DType dtype) {
  OpCase c = make(rows, cols, dtype, {.note = "/exact"});
  c.inputs[0].fill = [=](CaseRandom& random, Array& a) {
    for (int64_t r = 0; r < rows; ++r) {
      const double sign = random.below(2) ? 1024 : -1024;
      for (int64_t i = 0; i < cols; ++i) a[r * cols + i] = i % 2 ? sign : -sign;
    }
  };
  c.incoming_fill = [](CaseRandom& random, Array& a) {
    for (double& v : a.v) v = static_cast<double>(random.below(7) - 3);
  };
  c.backward_instances = {"atomic", "column_serial", "tiled_32x32", "tiled_32x33", "two_stage_apart"};
  return c;
}

}  // namespace

std::vector<OpCase> layer_norm_cases() {
  std::vector<OpCase> cases;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const bool f16 = dtype == DType::kF16;
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
    // Every kernel instance: rows that fill vectors and that do not, one warp a row and several, several batches a
    // block.
    cases.push_back(make(70, 40, dtype, {.note = "/instances"}));
    cases.push_back(make(67, 131, dtype, {.residual = true, .note = "/instances"}));
    cases.push_back(make(9, 800, dtype, {.stride = 801, .note = "/instances"}));
    cases.push_back(make(13, 1001, dtype, {.residual = true, .note = "/instances"}));
    cases.push_back(make(2, 2560, dtype, {.note = "/instances"}));
    for (size_t i = cases.size() - 5; i < cases.size(); ++i)
      add_instances(cases[i], cases[i].inputs[0].shape[1], dtype);
    if (dtype != DType::kF32)
      // forward's `held` and `in_place`, of a warp and of several, x and y beginning apart or not at all whole
      for (int64_t cols : {505, 766, 1536, 2052, 4097}) {
        cases.push_back(make_forward(9, cols, dtype, {.stride = cols + cols % 3, .note = "/held"}));
        cases.back().forward_instances = {"in_place"};
      }
    if (dtype != DType::kF32) {  // more rows than 16, and not a multiple of them
      cases.push_back(make_forward(45, 265, dtype, {.note = "/held"}));
      cases.back().forward_instances = {"in_place"};
    }
    cases.push_back(make_exact(67, 66, dtype));
    cases.push_back(make(2, 2049 * (16 / size_of(dtype)) - 3, dtype, {.note = "/looped"}));
    // E[x^2] - E[x]^2: the variance's relative error is eps * (mean / std)^2, here 900 units of 2^-23 and some
    // rounding.
    OpCase moments = make_forward(7, 300, dtype, {.fill = fill_normal(30, 1), .note = "/mean30"});
    moments.forward_instances = {"moments", "two_sync"};
    if (dtype == DType::kF32) moments.tolerance["y"] = {5e-4, 5e-4};
    moments.tolerance["rstd"] = {0, 2e-4};
    moments.tolerance["mean"] = {0, 1e-6};
    cases.push_back(moments);
    cases.push_back(make_forward(5, 64, dtype, {.fill = fill_uniform(3, 3), .note = "/constant"}));
    cases.push_back(make_far(7, 1024, dtype, 1000, 0.1, "/mean1000_std0.1"));
    cases.push_back(make_far(7, 1023, dtype, 10, 1e-2, "/mean10_std0.01"));
    for (size_t i = cases.size() - 2; i < cases.size(); ++i)
      cases[i].forward_instances = {"one_sync_1", "one_sync_2", "one_sync_4", "one_sync_wide",
                                    "looped",     "spans_2",    "spans_4",    "spans_5"};
    if (dtype != DType::kF32)
      for (size_t i = cases.size() - 2; i < cases.size(); ++i)
        cases[i].forward_instances.insert(cases[i].forward_instances.end(), {"in_place"});
    // One element far from the rest: a shift by the first element alone would lose the others.
    OpCase outlier = make_forward(3, 1024, dtype, {.note = "/outlier"});
    outlier.inputs[0].fill = [](CaseRandom& random, Array& a) {
      for (double& v : a.v) v = random.normal();
      for (int64_t r = 0; r < 3; ++r) a[r * 1024] = 1e4;
    };
    outlier.tolerance["mean"] = {5e-5, 0};  // the sum passes 1e4
    cases.push_back(outlier);
    for (int64_t cols : {256, 1024}) {
      if (f16) continue;
      cases.push_back(make(4096, cols, dtype));
      cases.back().benchmark = true, cases.back().test = false;
    }
    if (f16) continue;
    cases.push_back(make(4096, 1024, dtype, {.residual = true}));
    cases.back().benchmark = true, cases.back().test = false;
  }
  for (auto [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{{65536, 1024},
                                                                    {65536, 1023},
                                                                    {65536, 1025},
                                                                    {32768, 768},
                                                                    {32768, 767},
                                                                    {16384, 4096},
                                                                    {16384, 4095},
                                                                    {4096, 512},
                                                                    {16384, 512}}) {
    OpCase c = make(rows, cols, DType::kBF16);
    c.where = Where::kGpu, c.benchmark = true, c.test = false;
    add_instances(c, cols, DType::kBF16);
    if (cols == 1024) c.backward_instances.push_back("atomic");
    cases.push_back(c);
  }
  cases.push_back(make(66, 40, DType::kBF16, {.dgamma = DType::kBF16}));
  return cases;
}

}  // namespace frit
