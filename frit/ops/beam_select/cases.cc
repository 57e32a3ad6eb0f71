#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>

#include "frit/ops/beam_select/beam_select.h"
#include "frit/ops/beam_select/cpu.h"
#include "frit/ops/beam_select/gpu.h"
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

// For large tensors: normal numbers drawn from a table.
void fill_quickly(CaseRandom& random, Array& a) {
  std::vector<double> table(1 << 16);
  for (double& v : table) v = 2 * random.normal();
  uint64_t state = 1;
  for (double& v : a.v) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    v = table[state >> 48] + static_cast<double>(state >> 24 & 0xffff) * 1e-6;
  }
}

// How many logits of a row are collected: those that are at least the count-th largest group maximum. group_of(column)
// in [0, groups).
template <typename G>
int64_t survivors_of(const double* x, int64_t vocabulary, int64_t count, int64_t groups, G&& group_of) {
  std::vector<double> maxima(groups, -kInfinity);
  for (int64_t i = 0; i < vocabulary; ++i) maxima[group_of(i)] = std::max(maxima[group_of(i)], x[i]);
  std::sort(maxima.begin(), maxima.end(), std::greater<double>());
  return std::count_if(x, x + vocabulary, [&](double v) { return v >= maxima[count - 1]; });
}

// The CPU and the GPU cut rows into other groups, so `survivors`, if asked for, is one device's.
OpCase make(int64_t rows, int64_t vocabulary, int64_t count, DType dtype, Fill fill = fill_normal(0, 2),
            const char* note = "", bool optional = true, int64_t stride = 0, Where where = Where::kCpu) {
  OpCase c;
  if (dtype == DType::kF16) where = Where::kGpu;
  c.where = optional ? where : dtype == DType::kF16 ? Where::kGpu : Where::kEverywhere;
  c.name = fmt::format("{}x{}/best{}/{}{}{}{}{}", rows, vocabulary, count, name_of(dtype), note,
                       optional ? "" : "/no_lse", stride ? "/strided" : "", c.where == Where::kGpu ? "/gpu" : "");
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
      if (where == Where::kCpu) {
        out["survivors"][r] = static_cast<double>(
            survivors_of(x, vocabulary, count, (vocabulary + group - 1) / group, [&](int64_t i) { return i / group; }));
      } else if (count > kBeamSelectMostByGroups) {
        out["survivors"][r] = static_cast<double>(count);
      } else {
        const int64_t n = 16 / size_of(dtype), shift = r * (stride ? stride : vocabulary) % n;
        const int64_t groups = beam_select_gpu_groups(count);
        out["survivors"][r] = static_cast<double>(survivors_of(x, vocabulary, count, groups, [&](int64_t i) {
          const int64_t v = (i + shift) / n - (shift > 0) + kBeamSelectThreads;
          return v % kBeamSelectThreads * groups / kBeamSelectThreads;
        }));
      }
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
  if (rows == 0) c.forward_gpu = {0, 0, 0, 0, 0, -1};
  return c;
}
OpCase on_gpu(int64_t rows, int64_t vocabulary, int64_t count, DType dtype, Fill fill = fill_normal(0, 2),
              const char* note = "", int64_t stride = 0) {
  return make(rows, vocabulary, count, dtype, fill, note, true, stride, Where::kGpu);
}

// A row of zeros with `count` peaks, each in another thread's share: what is read a second time is known. Elements in
// 16 bytes must divide the vocabulary, and there must be whole vectors for all threads.
OpCase with_budget(int64_t rows, int64_t vocabulary, int64_t count, DType dtype) {
  const int64_t n = 16 / size_of(dtype), apart = kBeamSelectThreads / beam_select_gpu_groups(count);
  OpCase c = on_gpu(
      rows, vocabulary, count, dtype,
      [=](CaseRandom&, Array& a) {
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t k = 0; k < count; ++k)
            a.v[r * vocabulary + k * apart * n] = static_cast<double>(1 + (k + r) % count);
      },
      "/peaks");
  int64_t again = 0;  // bytes of the first 32 elements of the `count` threads that hold a peak
  for (int64_t k = 0; k < count; ++k)
    again += std::min(32 / n, (vocabulary / n - k * apart + kBeamSelectThreads - 1) / kBeamSelectThreads) * 16;
  const int64_t first = kBeamSelectThreads * size_of(dtype);  // the first 32 logits, by every warp
  c.forward_gpu = {
      1, count <= 16 ? 2 : 3, rows * (vocabulary * size_of(dtype) + first + again), rows * (8 * count + 8), 0, 0};
  if (const int64_t parts = beam_select_gpu_parts(vocabulary, size_of(dtype)); parts > 1) {
    // Each part's block reads the first logits, and leaves n sums and a maximum a thread.
    const int64_t left = rows * parts * kBeamSelectThreads * (n + 1) * 4;
    c.forward_gpu.launches = 2;
    c.forward_gpu.read_bytes += rows * parts * first + left;
    c.forward_gpu.written_bytes += left;
    c.forward_gpu.scratch_bytes = static_cast<int64_t>(align_up(rows * parts * kBeamSelectThreads * n * 4) +
                                                       align_up(rows * parts * kBeamSelectThreads * 4));
  }
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
    cases.back().where = Where::kCpu;
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
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int64_t vocabulary : {1, 2, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 2047, 8001})
      for (int64_t count : std::set<int64_t>{1, 8, 16, 17, 128, 129, vocabulary})
        if (count <= vocabulary && (vocabulary < 2000 || count <= 17 || count == 129))
          cases.push_back(on_gpu(3, vocabulary, count, dtype));
    cases.push_back(on_gpu(0, 33, 8, dtype));
    cases.push_back(on_gpu(17, 1000, 10, dtype));
    cases.push_back(make(9, 333, 4, dtype, fill_normal(0, 2), "/both_forms", false));
    cases.back().forward_instances = {"groups", "radix"};
    cases.push_back(make(3, 5001, 33, dtype, fill_normal(0, 2), "/both_forms", false));
    cases.back().forward_instances = {"groups", "radix"};
    cases.push_back(make(2, 2000, 8, dtype, fill_ties, "/both_forms", false));
    cases.back().forward_instances = {"groups", "radix"};
    for (int64_t count : {1, 8, 64, 300}) {
      cases.push_back(on_gpu(2, 4000, count, dtype, fill_ties, "/ties"));
      cases.push_back(on_gpu(2, 4000, count, dtype, fill_uniform(7, 7), "/constant"));
      cases.push_back(on_gpu(2, 4000, count, dtype, fill_forbidden, "/forbidden"));
      cases.push_back(on_gpu(2, 4000, count, dtype, fill_peaked, "/peaked"));
    }
    cases.push_back(on_gpu(
        3, 100, 10, dtype, [](CaseRandom&, Array& a) { a.v.assign(a.v.size(), -kInfinity); }, "/all_forbidden"));
    // The first 32 logits, which exponentials are about, are far below or above the largest.
    for (double first : {-500.0, -50.0, 500.0, -kInfinity})
      cases.push_back(on_gpu(
          3, 1003, 8, dtype,
          [=](CaseRandom& random, Array& a) {
            for (size_t i = 0; i < a.v.size(); ++i)
              a.v[i] = random.normal() + (i % 1003 < 32 && (first < 0 || i % 1003 == 5) ? first : 0);
          },
          first == -500  ? "/first_far_below"
          : first == -50 ? "/first_below"
          : first == 500 ? "/one_above"
                         : "/first_forbidden"));
    cases.push_back(on_gpu(9, 500, 8, dtype, fill_normal(), "", 512));
    cases.push_back(
        on_gpu(4, 33, 8, dtype, fill_normal(), "", int64_t{1} << 30));  // the last row begins past 2^31 elements
    cases.push_back(with_budget(3, 8192, 8, dtype));
    cases.push_back(with_budget(2, 16384, 8, dtype));
    cases.push_back(with_budget(1, 24584, 20, dtype));
    for (int64_t vocabulary : {8193, 16385}) {
      cases.push_back(on_gpu(1, vocabulary, 8, dtype, fill_quickly, "/in_parts", 16392));
      cases.back().forward_instances = {"groups", "parts"};
    }
    cases.push_back(with_budget(2, 5000, 16, dtype));
    cases.push_back(with_budget(4, 2560, 1, dtype));
    cases.push_back(with_budget(2, 4096, 40, dtype));
  }
  for (auto [rows, vocabulary] : {std::pair<int64_t, int64_t>{512, 50304}, {2048, 32768}, {512, 50257}})
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      cases.push_back(on_gpu(rows, vocabulary, 8, dtype, fill_quickly, "/timed"));
      cases.back().forward_instances = {"groups", "radix"};
      cases.back().benchmark = true, cases.back().test = false;
    }
  return cases;
}

}  // namespace frit
