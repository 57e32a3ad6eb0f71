// Times the benchmark cases of every operator's case table, forward and backward apart, beside a plain copy of the same
// bytes in the same run. Cases that are tests too are first checked against their oracles; those that are for timing
// alone (large shapes, whose oracles in double precision take minutes) only with --check.
//   bench_ops [--check] [--benchmark_filter=layer_norm] [--benchmark_out=FILE] ... Google Benchmark's own flags
//   bench_ops --support-matrix             prints docs/support.md, from the same tables
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "frit/memory/planner.h"
#include "frit/ops/case.h"

namespace frit {
namespace {

// Copies of a case rotate until they hold this much, so that no call finds its operands in the cache.
constexpr int64_t kColdBytes = int64_t{96} << 20;

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

// A case with its inputs: made once for both directions and for all the calls by which Google Benchmark finds out how
// often to run.
class Timed {
 public:
  Timed(const OpCase& c, ThreadPool& pool, bool checked)
      : c_(c),
        failure_(checked ? check(c) : ""),
        context_(pool, memory_),
        run_(c, context_, static_cast<int>(sets(c))) {}

  const OpCase& op_case() const { return c_; }

  void time(benchmark::State& state, bool backward, bool& failed) {
    if (!failure_.empty()) {
      failed = true;
      state.SkipWithError(failure_.c_str());
      return;
    }
    const Budget& budget = backward ? c_.backward_budget : c_.forward_budget;
    const auto call = [&] { backward ? run_.backward() : run_.forward(); };
    // Scratch comes from a plan, as in training.
    if (!plan_ || planned_backward_ != backward) {
      memory_.begin_recording();
      call();
      plan_ = plan_memory(memory_.end_recording());
      planned_backward_ = backward;
      memory_.reserve(plan_->peak);
      // Memory that is touched for the first time costs page faults, in every set once.
      for (int64_t i = 0; i < sets(c_); ++i) replay(call);
    }
    Copy copy(budget.bytes);
    std::vector<double> op_s, copy_s;
    using Clock = std::chrono::steady_clock;
    const auto seconds = [](Clock::time_point from) {
      return std::chrono::duration<double>(Clock::now() - from).count();
    };
    for (auto _ : state) {
      auto begin = Clock::now();
      replay(call);
      op_s.push_back(seconds(begin));
      state.SetIterationTime(op_s.back());
      begin = Clock::now();
      copy.run(context_.pool());
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

 private:
  // As many copies of the operands as no cache holds.
  static int64_t sets(const OpCase& c) {
    const int64_t bytes = std::max<int64_t>(std::max(c.forward_budget.bytes, c.backward_budget.bytes), 1);
    return std::clamp<int64_t>((kColdBytes + bytes - 1) / bytes, 1, 8);
  }
  template <typename Call>
  void replay(const Call& call) {
    memory_.begin_replay(*plan_);
    call();
    memory_.end_replay();
  }

  const OpCase& c_;
  std::string failure_;
  Memory memory_;
  Context context_;
  CaseRun run_;
  std::optional<Plan> plan_;
  bool planned_backward_ = false;
};

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
      "memory; backward also against finite differences. Those of a gpu run in the simulator, and on a GPU by "
      "`tools/gpu_check.sh`.\n"
      "dtype is the storage of the operator's first floating-point "
      "input; fp32\n"
      "arithmetic throughout. \"any\" is the implementation that an operator chooses by itself.\n\n"
      "| operator | device | implementation | dtype | forward | backward | timed |\n|---|---|---|---|---|---|---|\n";
  for (const OpTable& table : op_tables()) {
    using Key = std::array<std::string, 3>;
    std::vector<Key> keys;
    std::map<Key, std::array<int64_t, 3>> counts;
    for (const OpCase& c : table.cases) {
      const char* device = c.where == Where::kGpu                     ? "gpu"
                           : c.where == Where::kCpu || !table.has_gpu ? "cpu"
                                                                      : "cpu, gpu";
      const Key key{device, c.variant.empty() ? "any" : c.variant, storage_of(c)};
      if (!counts.count(key)) keys.push_back(key);
      auto& n = counts[key];
      n[0] += c.test, n[1] += c.test && c.backward, n[2] += c.benchmark;
    }
    for (const auto& key : keys) {
      const auto& n = counts[key];
      text += fmt::format("| {} | {} | {} | {} | {} | {} | {} |\n", table.op, key[0], key[1], key[2], n[0],
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
  // 120 rows in about three minutes; Google Benchmark's own default would take twice that. A later flag wins.
  std::string least = "--benchmark_min_time=0.2";
  std::vector<char*> arguments = {argv[0], least.data()};
  bool check_all = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--check") == 0)
      check_all = true;
    else
      arguments.push_back(argv[i]);
  }
  argc = static_cast<int>(arguments.size());
  frit::ThreadPool pool;
  bool failed = false;
  std::unique_ptr<frit::Timed> timed;  // the case of the row that runs
  for (const frit::OpTable& table : frit::op_tables())
    for (const frit::OpCase& c : table.cases) {
      if (!c.benchmark) continue;
      for (bool backward : {false, true}) {
        if (backward && !c.backward) continue;
        const std::string name = fmt::format("{}/{}{}/{}", c.op, c.name, c.variant.empty() ? "" : "/" + c.variant,
                                             backward ? "backward" : "forward");
        benchmark::RegisterBenchmark(name.c_str(),
                                     [&, backward](benchmark::State& state) {
                                       if (!timed || &timed->op_case() != &c) {
                                         timed.reset();
                                         timed = std::make_unique<frit::Timed>(c, pool, c.test || check_all);
                                       }
                                       timed->time(state, backward, failed);
                                     })
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond);
      }
    }
  benchmark::Initialize(&argc, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(argc, arguments.data())) return 2;
  benchmark::AddCustomContext("checked", check_all ? "all cases" : "cases that are tests too (--check: all)");
  benchmark::AddCustomContext("threads", std::to_string(pool.threads()));
  const size_t ran = benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return failed ? 1 : ran == 0 ? 2 : 0;  // none: Google Benchmark has said that the filter matches nothing
}
