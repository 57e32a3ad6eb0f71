// Times the matrix products of a training step on a GPU, by the library's first proposal and by the algorithm that
// timing found (Gpu::tune_products); and weight gradients with the bias' gradient, by the library along with the
// product and by a column_sum behind it.
//   bench_products [--out FILE.json] [--replays N] [--filter REGEX]
// A figure is the median over replays of a graph of at least ten products, whose operands rotate over at least 256 MB,
// so that no product finds them in the L2 cache; first and tuned take turns. Operands are normal numbers in bf16.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/memory/planner.h"
#include "frit/ops/case.h"
#include "frit/ops/column_sum/column_sum.h"

namespace frit {
namespace {

using nlohmann::json;
constexpr int64_t kColdBytes = int64_t{256} << 20;
constexpr int64_t kWords = 32768, kLayers = 6;

// One of the step's linear layers y = x w^T: [tokens, in] to [tokens, out].
struct Layer {
  std::string name;
  int64_t in, out;
  int count;  // in a step
  bool bias;  // added by the product
};
struct Model {
  std::string name;
  int64_t width, inner;
  std::vector<Layer> layers() const {
    return {{"H->3H", width, 3 * width, 2 * kLayers, true},
            {"H->H", width, width, 4 * kLayers, false},
            {"H->F", width, inner, 2 * kLayers, false},
            {"F->H", inner, width, 2 * kLayers, false},
            {"H->layers*2H", width, kLayers * 2 * width, 1, true},
            {"H->V", width, kWords, 1, false}};
  }
};

struct Times {
  double median, low, high;
};
Times summary(std::vector<double> us, int calls) {
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2] / calls, us.front() / calls, us.back() / calls};
}
json to_json(const Times& t) {
  return {{"us", t.median}, {"us_min", t.low}, {"us_max", t.high}};
}

// Device memory full of normal numbers in bf16.
class Numbers {
 public:
  Numbers(Gpu& gpu, int64_t bytes) : gpu_(gpu), data_(gpu.allocate(static_cast<size_t>(bytes))) {
    constexpr int64_t kPiece = 4194301;  // a prime, so that rows of any width differ
    CaseRandom random{1, true};
    std::vector<bfloat16> piece;
    for (int64_t i = 0; i < kPiece; ++i) piece.emplace_back(static_cast<float>(random.normal()));
    for (int64_t at = 0; at < bytes; at += kPiece * 2)
      gpu.upload(this->at(at), piece.data(), static_cast<size_t>(std::min(kPiece * 2, bytes - at)));
  }
  ~Numbers() { gpu_.release(data_); }
  Numbers(const Numbers&) = delete;
  char* at(int64_t offset) const { return static_cast<char*>(data_) + offset; }

 private:
  Gpu& gpu_;
  void* data_;
};

int64_t aligned(int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// Bytes of a product's operands. What is read and what is written lie in memories of their own: the results of one
// product would be too large as operands of the next.
struct Operands {
  int64_t a, b, bias, c, bias_gradient;
  int64_t read() const { return aligned(a) + aligned(b) + aligned(bias); }
  int64_t written() const { return aligned(c) + aligned(bias_gradient); }
  int64_t total() const { return read() + written(); }
  int sets() const { return static_cast<int>(std::clamp<int64_t>((kColdBytes + total() - 1) / total(), 1, 64)); }
};
Operands operands_of(const GpuProduct& p, bool bias) {
  return {p.m * p.k * 2, p.k * p.n * 2, bias ? p.n * 2 : 0, p.m * p.n * 2, p.transpose_a ? p.m * 2 : 0};
}
void place(GpuProduct& p, const Operands& o, char* from, char* to) {
  p.a = from;
  p.b = from + aligned(o.a);
  if (o.bias) p.bias = from + aligned(o.a) + aligned(o.b);
  p.c = to;
}

struct Case {
  std::string model, layer, direction;
  int64_t tokens;
  int count;
  GpuProduct product;
  bool bias;
};

GpuProduct dense(int64_t m, int64_t n, int64_t k, bool transpose_a, bool transpose_b) {
  GpuProduct p;
  p.m = m, p.n = n, p.k = k, p.dtype = p.c_dtype = p.bias_dtype = DType::kBF16;
  p.transpose_a = transpose_a, p.transpose_b = transpose_b;
  p.a_stride = transpose_a ? m : k, p.b_stride = transpose_b ? k : n, p.c_stride = n;
  return p;
}

std::vector<Case> all_cases(const std::string& filter) {
  const std::regex wanted(filter.empty() ? ".*" : filter);
  std::vector<Case> cases;
  for (const Model& model : {Model{"mt-base", 512, 2048}, Model{"mt-big", 1024, 4096}})
    for (const int64_t tokens : {4096, 16384})
      for (const Layer& l : model.layers()) {
        cases.push_back(
            {model.name, l.name, "forward", tokens, l.count, dense(tokens, l.out, l.in, false, true), l.bias});
        cases.push_back({model.name, l.name, "dx", tokens, l.count, dense(tokens, l.in, l.out, false, false), false});
        cases.push_back({model.name, l.name, "dw", tokens, l.count, dense(l.out, l.in, tokens, true, false), false});
      }
  std::erase_if(cases, [&](const Case& c) {
    return !std::regex_search(fmt::format("{} {} {} {}", c.model, c.tokens, c.layer, c.direction), wanted);
  });
  return cases;
}

class Bench {
 public:
  Bench(const std::vector<Case>& cases, int replays)
      : cases_(cases),
        replays_(replays),
        first_(make_gpu()),
        tuned_(make_gpu()),
        numbers_(*first_, most(cases, false)),
        results_(*first_, most(cases, true)) {}

  json run() {
    for (const Case& c : cases_) {
      GpuProduct p = c.product;
      place(p, operands_of(p, c.bias), numbers_.at(0), results_.at(0));
      tuned_->note_product(p);
      if (!sums_bias(p)) continue;
      p.bias_gradient = gradient_of(p);
      tuned_->note_product(p);
    }
    const auto begin = std::chrono::steady_clock::now();
    const int shapes = tuned_->tune_products(tuning_);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    fmt::print("timed the proposals for {} shapes in {:.2f} s\n", shapes, seconds);
    json rows = json::array(), steps = json::array();
    for (const Case& c : cases_) rows.push_back(time_case(c));
    // What all products of a step take, each at its own rate.
    for (size_t i = 0; i < cases_.size();) {
      double first = 0, tuned = 0, flops = 0;
      const Case& group = cases_[i];
      for (; i < cases_.size() && cases_[i].model == group.model && cases_[i].tokens == group.tokens; ++i) {
        const Case& c = cases_[i];
        first += c.count * rows[i]["first"]["us"].get<double>();
        tuned += c.count * rows[i]["tuned"]["us"].get<double>();
        flops += c.count * flops_of(c.product);
      }
      steps.push_back({{"model", group.model},
                       {"tokens", group.tokens},
                       {"first_ms", first / 1e3},
                       {"tuned_ms", tuned / 1e3},
                       {"first_tflops", flops / first / 1e6},
                       {"tuned_tflops", flops / tuned / 1e6}});
      fmt::print(
          "{:<8} {:>5} tokens a side, all products of a step: first {:.3f} ms, tuned {:.3f} ms ({:.0f} TFLOP/s)\n",
          group.model, group.tokens, first / 1e3, tuned / 1e3, flops / tuned / 1e6);
    }
    return {{"gpu", first_->name()},
            {"replays", replays_},
            {"tuned_shapes", shapes},
            {"tuning_seconds", seconds},
            {"dtype", "bf16"},
            {"steps", steps},
            {"rows", rows}};
  }

 private:
  // The most that all sets of a case read or write.
  static int64_t most(const std::vector<Case>& cases, bool written) {
    int64_t bytes = 0;
    for (const Case& c : cases) {
      const Operands o = operands_of(c.product, c.bias);
      bytes = std::max(bytes, o.sets() * (written ? o.written() : o.read()));
    }
    return bytes;
  }
  // Where a weight gradient's product puts the bias' gradient: behind its result.
  static char* gradient_of(const GpuProduct& p) { return static_cast<char*>(p.c) + aligned(p.m * p.n * 2); }
  bool sums_bias(GpuProduct p) {
    if (!p.transpose_a) return false;
    p.bias_gradient = gradient_of(p);
    return tuned_->sums_bias_gradient(p);
  }
  static double flops_of(const GpuProduct& p) {
    return 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
  }

  // Microseconds of f(product in set i) on a GPU, over a graph of calls that rotate.
  template <typename F>
  Times time(Gpu& gpu, const GpuProduct& product, bool bias, F&& f) {
    const Operands o = operands_of(product, bias);
    const int sets = o.sets(), calls = (10 + sets - 1) / sets * sets;
    std::vector<GpuProduct> placed(static_cast<size_t>(sets), product);
    for (int i = 0; i < sets; ++i)
      place(placed[static_cast<size_t>(i)], o, numbers_.at(o.read() * i), results_.at(o.written() * i));
    return summary(gpu.time_graph(
                       [&] {
                         for (int i = 0; i < calls; ++i) f(placed[static_cast<size_t>(i % sets)]);
                       },
                       replays_),
                   calls);
  }

  json time_case(const Case& c) {
    const auto plain = [&](Gpu& gpu) {
      return time(gpu, c.product, c.bias, [&](const GpuProduct& p) { gpu.product(p); });
    };
    // Twice each, in turns: the quicker of the two.
    Times first = plain(*first_), tuned = plain(*tuned_);
    const Times first_again = plain(*first_), tuned_again = plain(*tuned_);
    if (first_again.median < first.median) first = first_again;
    if (tuned_again.median < tuned.median) tuned = tuned_again;
    json bias_gradient;
    if (c.product.transpose_a) bias_gradient = time_bias_gradient(c);
    const double flops = flops_of(c.product);
    json row = {{"model", c.model},
                {"tokens", c.tokens},
                {"layer", c.layer},
                {"direction", c.direction},
                {"m", c.product.m},
                {"n", c.product.n},
                {"k", c.product.k},
                {"bias", c.bias},
                {"in_a_step", c.count},
                {"first", to_json(first)},
                {"tuned", to_json(tuned)},
                {"first_tflops", flops / first.median / 1e6},
                {"tuned_tflops", flops / tuned.median / 1e6}};
    if (!bias_gradient.is_null()) row["bias_gradient"] = bias_gradient;
    fmt::print(
        "{:<8} {:>5} {:<13} {:<8} {:>6}x{:<6}x{:<6} first {:8.1f} us {:5.0f} TFLOP/s  tuned {:8.1f} us {:5.0f} "
        "TFLOP/s\n",
        c.model, c.tokens, c.layer, c.direction, c.product.m, c.product.n, c.product.k, first.median,
        flops / first.median / 1e6, tuned.median, flops / tuned.median / 1e6);
    if (!bias_gradient.is_null())
      fmt::print("  with the bias' gradient: by column_sum {:.1f} us, along {}\n",
                 bias_gradient["column_sum"]["us"].get<double>(),
                 bias_gradient.contains("along") ? fmt::format("{:.1f} us", bias_gradient["along"]["us"].get<double>())
                                                 : "not offered");
    std::fflush(stdout);
    return row;
  }

  json time_bias_gradient(const Case& c) {
    ThreadPool pool(1);
    Memory memory(tuned_.get());
    Context context(pool, memory, tuned_.get());
    const auto sum = [&](const GpuProduct& p) {
      const Tensor dy(const_cast<void*>(p.a), p.dtype, {p.k, p.m}, tuned_->device());
      column_sum(context, dy, false, Tensor(gradient_of(p), p.c_dtype, {p.m}, tuned_->device()));
    };
    GpuProduct placed = c.product;
    place(placed, operands_of(placed, false), numbers_.at(0), results_.at(0));
    memory.begin_recording();
    sum(placed);
    const Plan plan = plan_memory(memory.end_recording());
    memory.reserve(plan.peak);
    json result = {{"column_sum", to_json(time(*tuned_, c.product, false, [&](const GpuProduct& p) {
                      tuned_->product(p);
                      memory.begin_replay(plan);
                      sum(p);
                      memory.end_replay();
                    }))}};
    if (sums_bias(placed))
      result["along"] = to_json(time(*tuned_, c.product, false, [&](GpuProduct p) {
        p.bias_gradient = gradient_of(p);
        tuned_->product(p);
      }));
    return result;
  }

  const std::vector<Case>& cases_;
  int replays_;
  std::unique_ptr<Gpu> first_, tuned_;  // the same GPU twice: one without choices, one with
  Numbers numbers_, results_;
  Tuning tuning_;
};

int run(int argc, char** argv) {
  std::string out, filter;
  int replays = 20;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if ((flag != "--out" && flag != "--replays" && flag != "--filter") || i + 1 >= argc) {
      fmt::print(stderr, "usage: bench_products [--out FILE] [--replays N] [--filter REGEX]\n");
      return 2;
    }
    const std::string value = argv[++i];
    if (flag == "--out") out = value;
    if (flag == "--replays") replays = std::stoi(value);
    if (flag == "--filter") filter = value;
  }
  if (!built_with_cuda())
    fail("this build has the simulator, which has no clock: build the cuda preset (docs/building.md)");
  if (replays < 1) fail("--replays is {}, expected 1 or more", replays);
  const std::vector<Case> cases = all_cases(filter);
  if (cases.empty()) fail("no product matches {}", filter);
  Bench bench(cases, replays);
  const json result = bench.run();
  if (!out.empty()) write_file_atomically(out, result.dump(1) + "\n");
  return 0;
}

}  // namespace
}  // namespace frit

int main(int argc, char** argv) {
  try {
    return frit::run(argc, argv);
  } catch (const std::exception& e) {
    fmt::print(stderr, "bench_products: {}\n", e.what());
    return 1;
  }
}
