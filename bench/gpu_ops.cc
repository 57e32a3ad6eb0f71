// Times the benchmark cases of every operator that has GPU kernels, and all of their kernel instances, beside a plain
// copy of the same bytes in the same run.
//   bench_gpu_ops [--filter REGEX] [--replays N] [--seconds N] [--out FILE.json] [--tuning FILE.json] [--errors
//   FILE.json]
// A figure is the median over replays of a graph of at least ten calls, whose operands rotate over at least 256 MB, so
// that no call finds them in the L2 cache. --tuning writes the fastest instance of each shape; --errors writes how far
// the 16-bit results of the tests' cases are from double precision, for bench/peers/torch_numerics.py --check;
// --seconds stops cleanly.
#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <regex>
#include <thread>

#include "frit/core/file.h"
#include "frit/memory/planner.h"
#include "frit/ops/case.h"
#include "frit/simt/copy.h"

namespace frit {
namespace {

using nlohmann::json;
constexpr int64_t kColdBytes = int64_t{256} << 20;
constexpr int64_t kMostBytes = int64_t{24} << 30;  // of all sets of a case
// Of a case whose errors are measured; in doubles it takes about ten times as many.
constexpr int64_t kMostErrorBytes = int64_t{1} << 27;

struct Options {
  std::string filter, out, tuning, errors;
  int replays = 20;
  double seconds = 1e9;
};

struct Times {
  double median = 0, low = 0, high = 0, q1 = 0, q3 = 0;
};
Times summary(std::vector<double> us, int calls) {
  std::sort(us.begin(), us.end());
  for (double& t : us) t /= calls;
  const auto at = [&](double share) {
    return us[static_cast<size_t>(share * static_cast<double>(us.size() - 1) + 0.5)];
  };
  return {at(0.5), us.front(), us.back(), at(0.25), at(0.75)};
}

int64_t bytes_of(const OpCase& c) {
  int64_t bytes = 0;
  for (const auto* operands : {&c.inputs, &c.outputs})
    for (const Operand& o : *operands) bytes += o.shape.numel() * size_of(o.dtype);
  return bytes * (c.backward ? 2 : 1);
}

// Calls a rotation: at least ten, each set equally often.
int calls_for(int sets) {
  return (10 + sets - 1) / sets * sets;
}

Times time_copy(Gpu& gpu, int64_t bytes, int replays) {
  const int64_t half = std::max<int64_t>(bytes / 2 / 256 * 256, 256);
  const int sets = static_cast<int>(std::clamp<int64_t>((kColdBytes + 2 * half - 1) / (2 * half), 2, 64));
  ThreadPool pool(1);
  Memory memory(&gpu);
  Context context(pool, memory, &gpu);
  std::vector<Buffer> from, to;
  for (int i = 0; i < sets; ++i) {
    from.push_back(memory.allocate({half}, DType::kU8, "from"));
    to.push_back(memory.allocate({half}, DType::kU8, "to"));
    gpu.fill(from.back()->raw(), static_cast<unsigned char>(i + 1), static_cast<size_t>(half));
  }
  const int calls = calls_for(sets);
  return summary(gpu.time_graph(
                     [&] {
                       for (int i = 0; i < calls; ++i) copy_gpu(context, from[i % sets], to[i % sets]);
                     },
                     replays),
                 calls);
}

// Has the work of many threads done by one.
class Errands {
 public:
  // From any thread: returns when serve() has run `work`, and throws what it threw.
  void run(std::function<void()> work) {
    std::packaged_task<void()> task(std::move(work));
    std::future<void> done = task.get_future();
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
    done.get();
  }
  // Runs what comes in until close().
  void serve() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closed_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::packaged_task<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::packaged_task<void()>> tasks_;
  bool closed_ = false;
};

// Bounds the bytes of what is done at one time; a single piece always has room.
class Room {
 public:
  explicit Room(int64_t bytes) : bytes_(bytes) {}
  void take(int64_t bytes) {
    std::unique_lock lock(mutex_);
    freed_.wait(lock, [&] { return used_ == 0 || used_ + bytes <= bytes_; });
    used_ += bytes;
  }
  void give(int64_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      used_ -= bytes;
    }
    freed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable freed_;
  int64_t bytes_, used_ = 0;
};

class Bench {
 public:
  Bench(Gpu& gpu, const Options& options) : gpu_(gpu), options_(options), begin_(Clock::now()) {}

  void run() {
    const std::regex filter(options_.filter.empty() ? ".*" : options_.filter);
    for (const OpTable& table : op_tables()) {
      if (!table.has_gpu) continue;
      for (const OpCase& c : table.cases) {
        if (!c.benchmark || c.where == Where::kCpu || !std::regex_search(table.op + " " + c.name, filter)) continue;
        if (elapsed() > options_.seconds) {
          results_.push_back({{"op", c.op}, {"case", c.name}, {"error", "the time given was over"}});
          continue;
        }
        try {
          time_case(c);
        } catch (const std::exception& e) {
          fmt::print("{:<26} {:<44} FAILED: {}\n", c.op, c.name, e.what());
          results_.push_back({{"op", c.op}, {"case", c.name}, {"error", e.what()}});
          ++failures_;
        }
        std::fflush(stdout);
      }
    }
    save(options_.out, {{"gpu", gpu_.name()}, {"replays", options_.replays}, {"rows", results_}});
    if (!options_.tuning.empty()) tuning_.save(options_.tuning, gpu_.name());
  }

  // Errors of the tests' 16-bit cases, in the form of bench/peers/torch_numerics.py. The oracles run on all cores, the
  // GPU's work on this thread.
  void errors() {
    const std::regex filter(options_.filter.empty() ? ".*" : options_.filter);
    std::vector<const OpCase*> cases;
    for (const OpTable& table : op_tables()) {
      if (!table.has_gpu) continue;
      for (const OpCase& c : table.cases) {
        if (c.where == Where::kCpu || bytes_of(c) > kMostErrorBytes) continue;
        if (!std::regex_search(table.op + " " + c.name, filter)) continue;
        const bool sixteen =
            std::any_of(c.inputs.begin(), c.inputs.end(), [](const Operand& o) { return is_16bit_float(o.dtype); });
        const bool sparse =
            std::any_of(c.inputs.begin(), c.inputs.end(), [](const Operand& o) { return o.row_stride > (1 << 24); });
        if (sixteen && !sparse) cases.push_back(&c);
      }
    }
    // The largest first, so that none is left alone at the end.
    std::vector<size_t> order(cases.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return bytes_of(*cases[a]) > bytes_of(*cases[b]); });
    std::vector<json> found(cases.size());
    std::atomic<size_t> next = 0;
    Errands errands;
    Room room(4 * kMostErrorBytes);
    const auto work = [&] {
      for (size_t at = next++; at < order.size(); at = next++) {
        const OpCase& c = *cases[order[at]];
        json& rows = found[order[at]] = json::array();
        const int64_t bytes = bytes_of(c);
        room.take(bytes);
        try {
          const OnGpu on_gpu = [&](const std::function<void(Gpu&)>& f) { errands.run([&] { f(gpu_); }); };
          for (const CaseError& e : case_errors(c, on_gpu))
            rows.push_back({{"op", c.op},
                            {"case", c.name},
                            {"output", e.output},
                            {"dtype", name_of(e.dtype)},
                            {"rms_error", e.rms},
                            {"max_error", e.max}});
        } catch (const std::exception& e) {
          rows = json::array();
          rows.push_back({{"op", c.op}, {"case", c.name}, {"error", e.what()}});
        }
        room.give(bytes);
      }
    };
    const unsigned count = std::max(1u, std::thread::hardware_concurrency());
    std::vector<std::thread> threads;
    std::atomic<unsigned> working = count;
    for (unsigned i = 0; i < count; ++i)
      threads.emplace_back([&] {
        work();
        if (--working == 0) errands.close();
      });
    errands.serve();
    for (std::thread& t : threads) t.join();
    json list = json::array();
    for (json& rows : found)
      for (json& row : rows) list.push_back(std::move(row));
    save(options_.errors, list);
  }
  int failures() const { return failures_; }

 private:
  using Clock = std::chrono::steady_clock;
  double elapsed() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }
  static void save(const std::string& path, const json& value) {
    if (!path.empty()) write_file_atomically(path, value.dump(1) + "\n");
  }

  void time_case(const OpCase& c) {
    const int64_t bytes = std::max<int64_t>(bytes_of(c), 1);
    const int64_t moved = std::max<int64_t>(c.forward_budget.bytes, 1);
    const int sets =
        static_cast<int>(std::clamp<int64_t>(std::min((kColdBytes + moved - 1) / moved, kMostBytes / bytes), 1, 32));
    ThreadPool pool(1);
    Memory memory(&gpu_);
    Context context(pool, memory, &gpu_);
    std::map<std::string, std::string> keys;
    context.observe_keys(&keys);
    CaseRun run(c, context,
                moved < 2 * kColdBytes ? std::max(sets, 2) : 1);  // what is that large leaves the cache by itself
    const auto direction = [&](bool backward) {
      const Budget& budget = backward ? c.backward_budget : c.forward_budget;
      const std::vector<std::string>& instances = backward ? c.backward_instances : c.forward_instances;
      const std::string op = c.op + (backward ? "_backward" : "_forward");
      std::vector<std::string> names = {""};
      names.insert(names.end(), instances.begin(), instances.end());
      double best = 0, chosen = 0;
      std::string best_name, chosen_name;
      const Times copy = time_copy(gpu_, budget.bytes, options_.replays);
      for (const std::string& name : names) {
        context.force(op, name);
        const auto call = [&] { backward ? run.backward() : run.forward(); };
        memory.begin_recording();
        call();
        const Plan plan = plan_memory(memory.end_recording());
        memory.reserve(plan.peak);
        const int calls = calls_for(run.sets());
        const Times t = summary(gpu_.time_graph(
                                    [&] {
                                      for (int i = 0; i < calls; ++i) {
                                        memory.begin_replay(plan);
                                        call();
                                        memory.end_replay();
                                      }
                                    },
                                    options_.replays),
                                calls);
        const std::string used(context.used(op));
        if (name.empty()) chosen = t.median, chosen_name = used;
        if (!name.empty() && (best_name.empty() || t.median < best)) best = t.median, best_name = name;
        results_.push_back({{"op", c.op},
                            {"case", c.name},
                            {"direction", backward ? "backward" : "forward"},
                            {"instance", used},
                            {"forced", !name.empty()},
                            {"us", t.median},
                            {"us_min", t.low},
                            {"us_q1", t.q1},
                            {"us_q3", t.q3},
                            {"us_max", t.high},
                            {"bytes", budget.bytes},
                            {"copy_us", copy.median},
                            {"of_copy", copy.median / t.median},
                            {"sets", run.sets()},
                            {"calls", calls}});
        fmt::print("{:<26} {:<44} {:<8} {:<22} {:9.2f} us  copy {:9.2f} us  {:5.1f} %\n", c.op, c.name,
                   backward ? "backward" : "forward", name.empty() ? used + " *" : used, t.median, copy.median,
                   100 * copy.median / t.median);
      }
      context.force(op, "");
      if (!best_name.empty()) {
        if (!keys[op].empty()) tuning_.set(op, keys[op], best_name);  // none: the operator takes another one's choice
        if (chosen > 1.15 * best)
          fmt::print("{:<26} {:<44} {:<8} the rule's choice {} is {:.0f} % slower than {}\n", c.op, c.name,
                     backward ? "backward" : "forward", chosen_name, 100 * (chosen / best - 1), best_name);
      }
    };
    direction(false);
    if (c.backward && c.backward_budget.bytes > 0) direction(true);
  }

  Gpu& gpu_;
  const Options& options_;
  Clock::time_point begin_;
  json results_ = json::array();
  Tuning tuning_;
  int failures_ = 0;
};

int run(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const bool known = flag == "--filter" || flag == "--out" || flag == "--tuning" || flag == "--errors" ||
                       flag == "--replays" || flag == "--seconds";
    if (!known || i + 1 >= argc) {
      fmt::print(stderr,
                 "usage: bench_gpu_ops [--filter REGEX] [--replays N] [--seconds N] [--out FILE] [--tuning FILE] "
                 "[--errors FILE]\n");
      return 2;
    }
    const std::string value = argv[++i];
    if (flag == "--filter") o.filter = value;
    if (flag == "--out") o.out = value;
    if (flag == "--tuning") o.tuning = value;
    if (flag == "--errors") o.errors = value;
    if (flag == "--replays") o.replays = std::stoi(value);
    if (flag == "--seconds") o.seconds = std::stod(value);
  }
  const std::unique_ptr<Gpu> gpu = make_gpu();
  Bench bench(*gpu, o);
  if (!o.errors.empty()) bench.errors();
  if (!o.out.empty() || o.errors.empty()) {
    if (!built_with_cuda())
      fail("this build has the simulator, which has no clock: build the cuda preset (docs/building.md)");
    bench.run();
  }
  return bench.failures() ? 1 : 0;
}

}  // namespace
}  // namespace frit

int main(int argc, char** argv) {
  try {
    return frit::run(argc, argv);
  } catch (const std::exception& e) {
    fmt::print(stderr, "bench_gpu_ops: {}\n", e.what());
    return 1;
  }
}
