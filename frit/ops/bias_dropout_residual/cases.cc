#include <algorithm>
#include <string_view>

#include "frit/ops/bias_dropout_residual/bias_dropout_residual.h"
#include "frit/ops/case.h"
#include "frit/ops/column_sum/cpu.h"

namespace frit {
namespace {

struct Options {
  float p_drop = 0.3f;
  bool bias = true, residual = true;
  int64_t stride = 0;
  DType dbias = DType::kF32;
  const char* in_place = "";  // "x" or "residual": y is that operand
  const char* keep = "";      // "bytes" or "bits": the GPU keeps the mask
};

// The GPU walks rows in classes of equal alignment (frit/simt/columns.h). A thread reads its columns of the bias
// once, for 2 to 8 rows; partial sums are kept by at most 264 blocks. Budgets are stated where a row is whole vectors.
bool whole_vectors(int64_t cols, int64_t stride, DType dtype) {
  const int64_t n = 16 / size_of(dtype);
  return cols % n == 0 && stride % n == 0 && cols <= 256 * n;
}
void state_gpu_budgets(OpCase& c, int64_t rows, int64_t cols, DType dtype, const Options& o) {
  if (!whole_vectors(cols, o.stride, dtype) || rows == 0 || cols == 0) return;
  const int64_t n = 16 / size_of(dtype), s = size_of(dtype), lanes = std::min(rows, 256 / (cols / n));
  const auto blocks = [&](int64_t rows_a_thread, int64_t most) {
    return std::min((rows + lanes * rows_a_thread - 1) / (lanes * rows_a_thread), most);
  };
  const int64_t bias_reads = blocks(std::clamp<int64_t>(rows * cols / n / (1 << 18) * 2, 2, 8), rows) * lanes;
  c.forward_gpu = {1, 0, rows * cols * s * (o.residual ? 2 : 1) + (o.bias ? bias_reads * cols * s : 0), rows * cols * s,
                   0, 0};
  if (!o.bias) {
    c.backward_gpu = {1, 0, rows * cols * s, rows * cols * s, 0, 0};
    return;
  }
  // Blocks that write a row of partial sums: one a multiprocessor, of 1024 threads with 4 rows or more each, in 16
  // bits; two of 256 with 8 rows in 32, and where the mask is kept.
  const bool large = size_of(dtype) == 2 && !*o.keep;
  const int64_t sum_lanes = large ? std::min(rows, 1024 / (cols / n)) : lanes, least = sum_lanes * (large ? 4 : 8);
  const int64_t partial = std::min<int64_t>((rows + least - 1) / least, large ? 132 : 264) * cols * 4;
  c.backward_gpu = {2,
                    (sum_lanes > 1 ? 1 : 0) + 1,
                    rows * cols * s + partial,
                    rows * cols * s + partial + cols * size_of(o.dbias),
                    0,
                    static_cast<int64_t>(align_up(partial))};
}

OpCase make(int64_t rows, int64_t cols, DType dtype, Options o = {}) {
  OpCase c;
  c.name = fmt::format("{}x{}/{}/p{}{}{}{}{}{}", rows, cols, name_of(dtype), o.p_drop, o.bias ? "" : "/no_bias",
                       o.residual ? "" : "/no_residual", o.stride ? "/strided" : "",
                       o.dbias == DType::kF32 ? "" : "/bf16_dbias",
                       *o.in_place ? fmt::format("/y_is_{}", o.in_place)
                       : *o.keep   ? fmt::format("/keep_{}", o.keep)
                                   : "");
  const Dropout dropout{o.p_drop, dropout_site("case"), 3, {11, 7}};
  c.inputs = {{"x", dtype, {rows, cols}, fill_normal(), o.stride}};
  if (o.bias) c.inputs.push_back({"bias", dtype, {cols}});
  if (o.residual) c.inputs.push_back({"residual", dtype, {rows, cols}, fill_normal(), o.stride});
  const std::string out = *o.in_place ? o.in_place : "y";
  c.outputs = {{out, dtype, {rows, cols}, fill_normal(), o.stride}};
  const bool bits = std::string_view(o.keep) == "bits";
  if (*o.keep) c.outputs.push_back({"keep", DType::kU8, {rows, bits ? cols / 8 : cols}}), c.where = Where::kGpu;
  c.forward = [=](Context& context, const Tensors& t) {
    bias_dropout_residual_forward(context, t.at("x"), o.bias ? t.at("bias") : Tensor(),
                                  o.residual ? t.at("residual") : Tensor(), dropout, t.at(out),
                                  *o.keep ? t.at("keep") : Tensor());
  };
  c.oracle = [=](const Arrays& in, Arrays& result) {
    const Array x = in.at("x");
    for (int64_t i = 0; i < rows * cols; ++i) {
      const int64_t r = i / cols, col = i % cols;
      const double v = x[i] + (o.bias ? in.at("bias")[col] : 0);
      const double kept = !dropout.active() ? v : dropout.keep(r, col) ? v * dropout.scale() : 0;
      result[out][i] = kept + (o.residual ? in.at("residual")[i] : 0);
      if (*o.keep && dropout.keep(r, col)) result["keep"][bits ? i / 8 : i] += bits ? 1 << i % 8 : 1;
    }
  };
  c.forward_budget = {rows * cols == 0 ? 0 : 1, 0,
                      rows * cols * size_of(dtype) * (o.residual ? 3 : 2) + (o.bias ? cols * size_of(dtype) : 0)};
  const int64_t mask_bytes = *o.keep ? rows * cols / (bits ? 8 : 1) : 0;
  c.forward_budget.bytes += mask_bytes;
  state_gpu_budgets(c, rows, cols, dtype, o);
  if (mask_bytes > 0 && c.forward_gpu.launches > 0)
    c.forward_gpu.written_bytes += mask_bytes, c.backward_gpu.read_bytes += mask_bytes;
  if (dtype == DType::kF16) c.where = Where::kGpu;
  if (*o.in_place) return c;
  c.incoming = {"y"};
  c.differentiable = {"x"};
  if (o.bias) {
    c.differentiable.push_back("bias");
    c.accumulates = {"bias"};
    c.gradient_dtype["bias"] = o.dbias;
    // Sums of many roundings to fp32.
    c.gradient_tolerance["bias"] =
        tolerance_for(o.dbias, o.dbias == DType::kF32 ? std::max<double>(4, rows / 32.0) : 4);
  }
  c.backward = [=](Context& context, const Tensors& t, bool accumulate) {
    bias_dropout_residual_backward(context, t.at("dy"), dropout, accumulate, t.at("dx"),
                                   o.bias ? t.at("dbias") : Tensor(), *o.keep ? t.at("keep") : Tensor());
  };
  c.gradient_oracle = [=](const Arrays& in, Arrays& result) {
    for (int64_t i = 0; i < rows * cols; ++i) {
      const int64_t r = i / cols, col = i % cols;
      const double g = !dropout.active() ? in.at("dy")[i] : dropout.keep(r, col) ? in.at("dy")[i] * dropout.scale() : 0;
      result["dx"][i] = g;
      if (o.bias) result["dbias"][col] += g;
    }
  };
  c.backward_budget = {cols == 0   ? 0
                       : o.bias    ? 2
                       : rows == 0 ? 0
                                   : 1,
                       o.bias ? static_cast<int64_t>(align_up(partial_sum_pieces(rows) * cols * 4)) : 0,
                       rows * cols * size_of(dtype) * 2 + (o.bias ? cols * size_of(o.dbias) : 0) + mask_bytes};
  return c;
}

}  // namespace

std::vector<OpCase> bias_dropout_residual_cases() {
  std::vector<OpCase> cases;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int64_t cols : {1, 7, 31, 32, 33, 127, 511, 513, 1023, 1024, 1025}) {
      for (int64_t rows : {0, 1, 3}) cases.push_back(make(rows, cols, dtype));
      for (int64_t rows : {31, 67, 130})
        if (cols < 128) cases.push_back(make(rows, cols, dtype));
    }
    // Rows that lie end to end fold on the GPU; the last fold is cut but for 24 rows.
    for (auto [rows, cols] : {std::pair<int64_t, int64_t>{67, 257}, {41, 1025}, {24, 1023}, {19, 260}, {35, 258}})
      cases.push_back(make(rows, cols, dtype, {.p_drop = 0.3f}));
    cases.push_back(make(131, 96, dtype, {.p_drop = 0}));
    cases.push_back(make(130, 97, dtype, {.p_drop = 0.9f}));
    cases.push_back(make(33, 65, dtype, {.p_drop = 0.1f, .bias = false}));
    cases.push_back(make(33, 65, dtype, {.p_drop = 0.1f, .residual = false}));
    cases.push_back(make(33, 65, dtype, {.p_drop = 0, .bias = false, .residual = false}));
    cases.push_back(make(17, 65, dtype, {.stride = 72}));
    cases.push_back(make(4, 33, dtype, {.stride = int64_t{1} << 30}));  // the last row begins past 2^31 elements
    cases.push_back(make(9, 133, dtype, {.in_place = "x"}));
    cases.push_back(make(9, 133, dtype, {.in_place = "residual"}));
    cases.push_back(make(5, 0, dtype));
    // Rows of whole vectors, eight a thread; in place.
    cases.push_back(make(152, 104, dtype, {.p_drop = 0.3f}));
    cases.push_back(make(187, 256, dtype, {.p_drop = 0.3f}));
    for (const char* in_place : {"x", "residual"})
      cases.push_back(make(9, 136, dtype, {.p_drop = 0.6f, .in_place = in_place}));
    for (float p : {0.0f, 0.1f}) {
      cases.push_back(make(4096, 256, dtype, {.p_drop = p}));
      cases.push_back(make(4096, 1024, dtype, {.p_drop = p}));
      for (int i = 1; i <= 2; ++i) cases.end()[-i].benchmark = true, cases.end()[-i].test = false;
    }
  }
  for (const char* keep : {"bytes", "bits"}) {
    for (int64_t rows : {1, 33, 130}) cases.push_back(make(rows, 136, DType::kBF16, {.keep = keep}));
    cases.push_back(make(65536, 1024, DType::kBF16, {.p_drop = 0.1f, .keep = keep}));
    cases.back().benchmark = true, cases.back().test = false;
  }
  // Rows of whole vectors, more a thread than are on their way, and fewer.
  for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1551, 264}, {41, 512}, {5, 2048}}) {
    cases.push_back(make(rows, cols, DType::kBF16, {}));
    cases.back().where = Where::kGpu;
  }
  cases.push_back(make(300, 264, DType::kF16, {.p_drop = 0}));
  for (int64_t cols : {1023, 1024, 1025}) {
    cases.push_back(make(65536, cols, DType::kBF16, {.p_drop = 0.1f}));
    cases.back().benchmark = true, cases.back().test = false, cases.back().where = Where::kGpu;
  }
  cases.push_back(make(66, 40, DType::kBF16, {.dbias = DType::kBF16}));
  cases.push_back(make(1530, 257, DType::kBF16, {}));  // folded rows of several blocks
  cases.back().where = Where::kGpu;
  return cases;
}

}  // namespace frit
