#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>

#include "frit/ops/beam_select/beam_select.h"
#include "frit/ops/beam_select/cpu.h"
#include "frit/ops/case.h"

namespace frit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Few values: many ties.
void fill_ties(CaseRandom& random, Array& a) {
  for (double& v : a.v) v = static_cast<double>(random.below(3));
}
void fill_forbidden(CaseRandom& random, Array& a) {
  for (double& v : a.v) v = random.uniform() < 0.97 ? -kInfinity : random.normal();
}
void fill_peaked(CaseRandom& random, Array& a) {
  for (size_t i = 0; i < a.v.size(); ++i) a.v[i] = random.normal() + (i % 211 < 9 ? 20 : 0);
}

OpCase make(int64_t rows, int64_t vocabulary, int64_t count, DType dtype, Fill fill = fill_normal(0, 2),
            const char* note = "", bool optional = true, int64_t stride = 0) {
  OpCase c;
  c.name = fmt::format("{}x{}/best{}/{}{}{}{}", rows, vocabulary, count, name_of(dtype), note,
                       optional ? "" : "/no_lse", stride ? "/strided" : "");
  c.inputs = {{"logits", dtype, {rows, vocabulary}, fill, stride}};
  c.outputs = {{"values", DType::kF32, {rows, count}}, {"columns", DType::kI32, {rows, count}}};
  if (optional) {
    c.outputs.push_back({"lse", DType::kF32, {rows}});
    c.outputs.push_back({"survivors", DType::kI32, {rows}});
  }
  c.forward = [=](Context& context, const Tensors& t) {
    beam_select(context, t.at("logits"), count, t.at("values"), t.at("columns"), optional ? t.at("lse") : Tensor(),
                optional ? t.at("survivors") : Tensor());
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    const int64_t group = beam_select_group(vocabulary, count);
    for (int64_t r = 0; r < rows; ++r) {
      const double* x = in.at("logits").v.data() + r * vocabulary;
      std::vector<int64_t> order(vocabulary);
      std::iota(order.begin(), order.end(), int64_t{0});
      std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
      for (int64_t i = 0; i < count; ++i)
        out["values"][r * count + i] = x[order[i]], out["columns"][r * count + i] = order[i];
      if (!optional) continue;
      double sum = 0;
      for (int64_t i = 0; i < vocabulary; ++i) sum += x[i] == -kInfinity ? 0 : std::exp(x[i] - x[order[0]]);
      out["lse"][r] = sum == 0 ? -kInfinity : x[order[0]] + std::log(sum);
      std::vector<double> maxima;
      for (int64_t i = 0; i < vocabulary; i += group)
        maxima.push_back(*std::max_element(x + i, x + std::min(vocabulary, i + group)));
      std::sort(maxima.begin(), maxima.end(), std::greater<double>());
      for (int64_t i = 0; i < vocabulary; ++i) out["survivors"][r] += x[i] >= maxima[count - 1];
    }
  };
  c.tolerance["values"] = {0, 0};
  c.tolerance["lse"] = {2e-6, 1e-6};
  const int64_t tasks = beam_select_tasks(rows), group = beam_select_group(vocabulary, count),
                groups = (vocabulary + group - 1) / group;
  c.forward_budget = {rows == 0 ? 0 : 1,
                      static_cast<int64_t>(align_up(tasks * 2 * groups * 4) +
                                           align_up(tasks * beam_select_capacity(vocabulary, count) * 8)),
                      rows * vocabulary * size_of(dtype) + rows * (count * 8 + 8)};
  return c;
}

}  // namespace

std::vector<OpCase> beam_select_cases() {
  std::vector<OpCase> cases;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t vocabulary : {1, 2, 31, 32, 33, 63, 64, 65, 511, 1023, 1024, 1025, 8001})
      for (int64_t rows : {0, 1, 3})
        for (int64_t count : std::set<int64_t>{1, 2, 8, vocabulary / 2, vocabulary})
          if (count >= 1 && count <= vocabulary && (rows == 3 || count <= 8))
            cases.push_back(make(rows, vocabulary, count, dtype));
    cases.push_back(make(67, 1000, 10, dtype));
    cases.push_back(make(130, 333, 4, dtype, fill_normal(0, 2), "", false));
    for (int64_t count : {1, 8, 64, 1500}) {
      cases.push_back(make(5, 4000, count, dtype, fill_ties, "/ties"));
      cases.push_back(make(5, 4000, count, dtype, fill_uniform(7, 7), "/constant"));
      cases.push_back(make(5, 4000, count, dtype, fill_forbidden, "/forbidden"));
      cases.push_back(make(5, 4000, count, dtype, fill_peaked, "/peaked"));
    }
    cases.push_back(make(3, 100, 10, dtype, fill_uniform(-kInfinity, -kInfinity), "/all_forbidden"));
    for (Operand& operand : cases.back().inputs)
      operand.fill = [](CaseRandom&, Array& a) { std::fill(a.v.begin(), a.v.end(), -kInfinity); };
    cases.push_back(make(9, 500, 8, dtype, fill_normal(), "", true, 512));
    cases.push_back(
        make(4, 33, 8, dtype, fill_normal(), "", true, int64_t{1} << 30));  // the last row begins past 2^31 elements
    cases.push_back(make(64, 32768, 8, dtype, fill_normal(0, 2), "/timed"));
    cases.back().benchmark = true, cases.back().test = false;
    cases.push_back(make(16, 8000, 8, dtype, fill_normal(0, 2), "/timed"));
    cases.back().benchmark = true, cases.back().test = false;
  }
  return cases;
}

}  // namespace frit
