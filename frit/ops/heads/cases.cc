#include <algorithm>

#include "frit/ops/case.h"
#include "frit/ops/column_sum/cpu.h"
#include "frit/ops/heads/heads.h"

namespace frit {
namespace {

// The GPU walks the joined side as rows of blocks * d columns (frit/simt/columns.h). A thread reads its columns of the
// bias once for four of its rows, row by row where a head is no whole vectors; partial sums are kept by at most 264
// blocks. With bias, budgets are stated where a head is whole vectors and a row at most 256 of them.
void state_gpu_budgets(OpCase& c, int64_t tokens, int64_t width, int64_t d, int64_t stride, DType dtype,
                       int64_t bias_size) {
  const int64_t n = 16 / size_of(dtype), bytes = tokens * width * size_of(dtype);
  if (tokens == 0 || width == 0) return;
  c.forward_gpu = c.backward_gpu = {1, 0, bytes, bytes, 0, 0};
  if (bias_size == 0) return;
  if (d % n || stride % n || width > 256 * n) {
    c.forward_gpu = c.backward_gpu = {};
    return;
  }
  const int64_t lanes = std::min(tokens, 256 / (width / n));
  // A thread takes the rows k, k + step, four at a time: so many reads of the bias' columns.
  const int64_t step = (tokens + lanes * 4 - 1) / (lanes * 4) * lanes;
  int64_t bias_reads = 0;
  for (int64_t k = 0; k < std::min(step, tokens); ++k) bias_reads += ((tokens - k + step - 1) / step + 3) / 4;
  c.forward_gpu.read_bytes += bias_reads * width * bias_size;
  const int64_t partial = std::min<int64_t>((tokens + lanes * 8 - 1) / (lanes * 8), 264) * width * 4;
  c.backward_gpu = {2,
                    (lanes > 1 ? 1 : 0) + 1,
                    bytes + partial,
                    bytes + partial + width * bias_size,
                    0,
                    static_cast<int64_t>(align_up(partial))};
}

OpCase make_split(int64_t tokens, int64_t parts, int64_t n, int64_t d, DType dtype, DType bias_dtype, bool bias,
                  int64_t stride = 0) {
  OpCase c;
  c.name = fmt::format("split/{}x{}x{}x{}/{}{}{}", tokens, parts, n, d, name_of(dtype),
                       bias ? fmt::format("/bias {}", name_of(bias_dtype)) : "",
                       stride ? fmt::format("/stride{}", stride) : "");
  c.inputs = {{"x", dtype, {tokens, parts, n, d}, fill_normal(), stride}};
  if (bias) c.inputs.push_back({"bias", bias_dtype, {parts * n * d}});
  c.outputs = {{"y", dtype, {parts, n, tokens, d}}};
  c.forward = [=](Context& context, const Tensors& t) {
    split_heads_forward(context, t.at("x"), bias ? t.at("bias") : Tensor(), t.at("y"));
  };
  // Walks x in memory order; at: the element of y it becomes.
  const auto each = [=](auto&& body) {
    int64_t i = 0;
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t p = 0; p < parts; ++p)
        for (int64_t h = 0; h < n; ++h)
          for (int64_t x = 0; x < d; ++x) body(i++, ((p * n + h) * tokens + t) * d + x, (p * n + h) * d + x);
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    each([&](int64_t i, int64_t at, int64_t b) { out["y"][at] = in.at("x")[i] + (bias ? in.at("bias")[b] : 0); });
  };
  c.incoming = {"y"};
  c.differentiable = {"x"};
  if (bias) c.differentiable.push_back("bias"), c.accumulates = {"bias"};
  c.backward = [=](Context& context, const Tensors& t, bool accumulate) {
    split_heads_backward(context, t.at("dy"), accumulate, t.at("dx"), bias ? t.at("dbias") : Tensor());
  };
  c.gradient_oracle = [=](const Arrays& in, Arrays& out) {
    each([&](int64_t i, int64_t at, int64_t b) {
      out["dx"][i] = in.at("dy")[at];
      if (bias) out["dbias"][b] += in.at("dy")[at];
    });
  };
  c.forward_budget.regions = tokens * parts * n * d > 0;
  c.forward_budget.scratch_bytes = 0;
  c.forward_budget.bytes = 2 * tokens * parts * n * d * size_of(dtype);
  c.backward_budget.regions = parts * n * d == 0 ? 0 : bias ? 2 : tokens > 0;
  c.backward_budget.scratch_bytes =
      bias ? static_cast<int64_t>(align_up(partial_sum_pieces(tokens) * parts * n * d * 4)) : 0;
  c.backward_budget.bytes = c.forward_budget.bytes;
  state_gpu_budgets(c, tokens, parts * n * d, d, stride, dtype, bias ? size_of(bias_dtype) : 0);
  if (dtype == DType::kF16) c.where = Where::kGpu;
  return c;
}

OpCase make_merge(int64_t tokens, int64_t n, int64_t d, DType dtype) {
  OpCase c;
  c.name = fmt::format("merge/{}x{}x{}/{}", tokens, n, d, name_of(dtype));
  c.inputs = {{"x", dtype, {n, tokens, d}}};
  c.outputs = {{"y", dtype, {tokens, n, d}}};
  const auto each = [=](auto&& body) {
    int64_t i = 0;
    for (int64_t h = 0; h < n; ++h)
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t x = 0; x < d; ++x) body(i++, (t * n + h) * d + x);
  };
  c.forward = [](Context& context, const Tensors& t) { merge_heads_forward(context, t.at("x"), t.at("y")); };
  c.oracle = [=](const Arrays& in, Arrays& out) { each([&](int64_t i, int64_t at) { out["y"][at] = in.at("x")[i]; }); };
  c.incoming = {"y"};
  c.differentiable = {"x"};
  c.backward = [](Context& context, const Tensors& t, bool) { merge_heads_backward(context, t.at("dy"), t.at("dx")); };
  c.gradient_oracle = [=](const Arrays& in, Arrays& out) {
    each([&](int64_t i, int64_t at) { out["dx"][i] = in.at("dy")[at]; });
  };
  // A copy: not one bit may differ.
  c.tolerance["y"] = c.gradient_tolerance["x"] = {0, 0};
  c.forward_budget.regions = c.backward_budget.regions = tokens * n * d > 0;
  c.forward_budget.scratch_bytes = c.backward_budget.scratch_bytes = 0;
  c.forward_budget.bytes = c.backward_budget.bytes = 2 * tokens * n * d * size_of(dtype);
  state_gpu_budgets(c, tokens, n * d, d, 0, dtype, 0);
  if (dtype == DType::kF16) c.where = Where::kGpu;
  return c;
}

}  // namespace

std::vector<OpCase> heads_cases() {
  std::vector<OpCase> cases;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const auto split = [&](int64_t tokens, int64_t parts, int64_t n, int64_t d) {
      cases.push_back(make_split(tokens, parts, n, d, dtype, dtype, true));
    };
    for (int64_t tokens : {0, 1, 31, 32, 33, 65}) split(tokens, 3, 3, 8);
    for (int64_t tokens : {1023, 1024, 1025}) split(tokens, 1, 1, 3);
    for (int64_t d : {1, 7, 31, 32, 33, 64}) split(5, 3, 2, d);
    for (int64_t d : {1023, 1024, 1025}) split(3, 2, 1, d);
    for (int64_t n : {0, 1, 5, 31, 33}) split(4, 2, n, 9);
    split(4, 0, 2, 8);
    split(67, 3, 2, 32);
    split(37, 3, 16, 64);  // two or three blocks along a row
    cases.push_back(make_split(9, 3, 5, 12, dtype, dtype, false));
    cases.push_back(make_split(70, 2, 3, 10, dtype, DType::kF32, true, 77));
    cases.push_back(make_split(5, 3, 2, 11, dtype, dtype, true, int64_t{1} << 30));
    for (int64_t tokens : {0, 1, 33, 1025}) cases.push_back(make_merge(tokens, 3, 5, dtype));
    for (int64_t d : {1, 31, 32, 33, 1023, 1024, 1025}) cases.push_back(make_merge(3, 3, d, dtype));
    cases.push_back(make_merge(7, 0, 8, dtype));
    cases.push_back(make_split(4096, 3, 8, 64, dtype, DType::kF32, true));
    cases.back().benchmark = true, cases.back().test = false;
    cases.push_back(make_merge(4096, 8, 64, dtype));
    cases.back().benchmark = true, cases.back().test = false;
  }
  for (int64_t tokens : {4096, 16384, 65536}) {
    cases.push_back(make_split(tokens, 3, 16, 64, DType::kBF16, DType::kBF16, true));
    cases.push_back(make_merge(tokens, 16, 64, DType::kBF16));
    for (int i = 1; i <= 2; ++i) {
      OpCase& c = cases.end()[-i];
      c.benchmark = true, c.test = false, c.where = Where::kGpu;
    }
  }
  return cases;
}

}  // namespace frit
