// Times the benchmark cases of every operator's case table, forward and backward apart, beside a plain copy of the same
// bytes in the same run. Each case is first checked against its oracle.
//   bench_ops [--benchmark_filter=layer_norm] [--benchmark_out=FILE] ... Google Benchmark's own flags
//   bench_ops --support-matrix             prints docs/support.md, from the same tables
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "frit/memory/planner.h"
#include "frit/ops/case.h"

namespace frit {
namespace {

// Larger cases are timed unchecked (and say so in their label): the oracles take too long.
constexpr int64_t kCheckedElements = int64_t{1} << 25;
// Copies of a case rotate until they hold this much, so that no call finds its operands in the cache.
constexpr int64_t kColdBytes = int64_t{96} << 20;

int64_t elements(const OpCase& c) {
  int64_t most = 0;
  for (const auto* operands : {&c.inputs, &c.outputs})
    for (const Operand& o : *operands) most = std::max(most, o.shape.numel());
  return most;
}

// What failed, or "".
std::string check(const OpCase& c) {
  OpCase plain = c;
  plain.finite_difference_step = 0;  // the tests' business: here the gradient's oracle is enough
  const std::vector<std::string> failures = check_case(plain);
  return failures.empty() ? "" : failures.front();
}

double median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::nth_element(v.begin(), v.begin() + v.size() / 2, v.end());
  return v[v.size() / 2];
}

// Reads half of `bytes` and writes the other half, by all threads.
class Copy {
 public:
  explicit Copy(int64_t bytes) : half_(bytes / 2), from_(std::max<int64_t>(half_, 1), 1), to_(from_.size(), 2) {}
  void run(ThreadPool& pool) {
    pool.parallel_for(half_, 1 << 16, [&](int64_t begin, int64_t end, int) {
      std::memcpy(to_.data() + begin, from_.data() + begin, end - begin);
    });
    benchmark::ClobberMemory();
  }

 private:
  int64_t half_;
  std::vector<char> from_, to_;
};

void time_case(benchmark::State& state, const OpCase& c, bool backward, ThreadPool& pool, bool& failed) {
  if (elements(c) <= kCheckedElements) {
    if (const std::string failure = check(c); !failure.empty()) {
      failed = true;
      state.SkipWithError(failure.c_str());
      return;
    }
  } else {
    state.SetLabel("unchecked");
  }
  const Budget& budget = backward ? c.backward_budget : c.forward_budget;
  Memory memory;
  Context context(pool, memory);
  const int64_t sets = std::clamp<int64_t>(kColdBytes / std::max<int64_t>(budget.bytes, 1), 1, 8);
  CaseRun run(c, context, static_cast<int>(sets));
  const auto call = [&] { backward ? run.backward() : run.forward(); };
  // Scratch comes from a plan, as in training.
  memory.begin_recording();
  call();
  const Plan plan = plan_memory(memory.end_recording());
  memory.reserve(plan.peak);
  Copy copy(budget.bytes);
  std::vector<double> op_s, copy_s;
  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::time_point from) {
    return std::chrono::duration<double>(Clock::now() - from).count();
  };
  for (auto _ : state) {
    auto begin = Clock::now();
    memory.begin_replay(plan);
    call();
    memory.end_replay();
    op_s.push_back(seconds(begin));
    state.SetIterationTime(op_s.back());
    begin = Clock::now();
    copy.run(pool);
    copy_s.push_back(seconds(begin));
  }
  const double op = median(op_s), plain = median(copy_s);
  if (budget.flops > 0) state.counters["GFLOP/s"] = budget.flops / op * 1e-9;
  if (budget.bytes > 0) {
    state.counters["GB/s"] = static_cast<double>(budget.bytes) / op * 1e-9;
    state.counters["copy_GB/s"] = static_cast<double>(budget.bytes) / plain * 1e-9;
    state.counters["of_copy"] = plain / op;
  }
}

const char* storage_of(const OpCase& c) {
  for (const Operand& o : c.inputs)
    if (o.dtype == DType::kF32 || o.dtype == DType::kF64 || is_16bit_float(o.dtype)) return name_of(o.dtype);
  return c.inputs.empty() ? "" : name_of(c.inputs.front().dtype);
}

void print_support_matrix() {
  std::string text =
      "# What runs where\n\n"
      "Written by `bench_ops --support-matrix` from the operators' case tables; `tools/check_docs.sh` fails if it is "
      "out of date.\n"
      "Numbers are tested cases: each one runs against a double-precision oracle, on one and on three threads, and "
      "from planned\n"
      "memory; backward also against finite differences. dtype is the storage of the operator's first floating-point "
      "input; fp32\n"
      "arithmetic throughout. \"any\" is the implementation that an operator chooses by itself.\n\n"
      "| operator | device | implementation | dtype | forward | backward | timed |\n|---|---|---|---|---|---|---|\n";
  for (const OpTable& table : op_tables()) {
    std::vector<std::pair<std::string, std::string>> keys;
    std::map<std::pair<std::string, std::string>, std::array<int64_t, 3>> counts;
    for (const OpCase& c : table.cases) {
      const std::pair<std::string, std::string> key{c.variant.empty() ? "any" : c.variant, storage_of(c)};
      if (!counts.count(key)) keys.push_back(key);
      auto& n = counts[key];
      n[0] += c.test, n[1] += c.test && c.backward, n[2] += c.benchmark;
    }
    for (const auto& key : keys) {
      const auto& n = counts[key];
      text += fmt::format("| {} | cpu | {} | {} | {} | {} | {} |\n", table.op, key.first, key.second, n[0],
                          n[1] ? std::to_string(n[1]) : "-", n[2] ? std::to_string(n[2]) : "-");
    }
  }
  std::fputs(text.c_str(), stdout);
}

}  // namespace
}  // namespace frit

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i)
    if (std::strcmp(argv[i], "--support-matrix") == 0) {
      frit::print_support_matrix();
      return 0;
    }
  frit::ThreadPool pool;
  bool failed = false;
  for (const frit::OpTable& table : frit::op_tables())
    for (const frit::OpCase& c : table.cases) {
      if (!c.benchmark) continue;
      for (bool backward : {false, true}) {
        if (backward && !c.backward) continue;
        const std::string name = fmt::format("{}/{}{}/{}", c.op, c.name, c.variant.empty() ? "" : "/" + c.variant,
                                             backward ? "backward" : "forward");
        benchmark::RegisterBenchmark(
            name.c_str(), [&, backward](benchmark::State& state) { frit::time_case(state, c, backward, pool, failed); })
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond);
      }
    }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::AddCustomContext("threads", std::to_string(pool.threads()));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return failed ? 1 : 0;
}
