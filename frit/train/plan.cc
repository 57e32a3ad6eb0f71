#include "frit/train/plan.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <map>

#include "frit/core/error.h"
#include "frit/ops/gemm/gemm.h"
#include "frit/ops/optimizer/per_tensor.h"
#include "frit/simt/copy.h"
#include "frit/train/prepare.h"
#include "frit/train/progress.h"
#include "frit/train/trainer.h"

namespace frit {
namespace {

std::string size_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) value /= 1024, ++unit;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

// MemAvailable of /proc/meminfo: free memory and what the system gives back at once.
int64_t available_memory(int64_t otherwise) {
  std::ifstream in("/proc/meminfo");
  std::string key, unit;
  for (int64_t kib; in >> key >> kib;) {
    if (key == "MemAvailable:") return kib * 1024;
    std::getline(in, unit);
  }
  return otherwise;
}

template <typename Run>
double best_seconds(int times, Run&& run) {
  double best = 1e30;
  for (int i = 0; i < times; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

// A product of the model's own width, and a copy too large for caches.
struct Measured {
  int64_t rows, cols, inner;
  DType dtype;
  static constexpr int64_t kCopyBytes = 64 << 20;
  void keep(double product_s, double copy_s, TrainingPlan& plan) const {
    plan.flops_per_s = 2.0 * static_cast<double>(rows * cols * inner) / product_s;
    plan.bytes_per_s = 2.0 * static_cast<double>(kCopyBytes) / copy_s;
  }
};

void measure_cpu(const TrainConfig& config, const Measured& what, TrainingPlan& plan) {
  ThreadPool pool(static_cast<int>(config.run.threads));
  Memory memory;
  Context context(pool, memory);
  const Buffer x = context.allocate({what.rows, what.inner}, what.dtype, "x"),
               w = context.allocate({what.cols, what.inner}, what.dtype, "w"),
               y = context.allocate({what.rows, what.cols}, what.dtype, "y");
  std::memset(x->raw(), 0, static_cast<size_t>(x->bytes()));
  std::memset(w->raw(), 0, static_cast<size_t>(w->bytes()));
  const double product_s = best_seconds(5, [&] { linear(context, x, w, {}, y); });
  const Block from = allocate_block(Measured::kCopyBytes), to = allocate_block(Measured::kCopyBytes);
  std::memset(from.get(), 1, Measured::kCopyBytes), std::memset(to.get(), 2, Measured::kCopyBytes);
  const double copy_s = best_seconds(3, [&] {
    pool.parallel_for(Measured::kCopyBytes, 1 << 20, [&](int64_t begin, int64_t end, int) {
      std::memcpy(to.get() + begin, from.get() + begin, static_cast<size_t>(end - begin));
    });
  });
  what.keep(product_s, copy_s, plan);
  plan.measured_on = fmt::format("{} CPU threads", pool.threads());
}

void measure_gpu(Gpu& gpu, const Measured& what, TrainingPlan& plan) {
  ThreadPool pool(1);
  Memory memory(&gpu);
  Context context(pool, memory, &gpu);
  const auto filled = [&](Shape shape, DType dtype, const char* name) {
    Buffer buffer = context.allocate(shape, dtype, name);
    gpu.fill(buffer->raw(), 0x3c, static_cast<size_t>(buffer->bytes()));  // small numbers: zeros would be faster
    return buffer;
  };
  const Buffer x = filled({what.rows, what.inner}, what.dtype, "x"),
               w = filled({what.cols, what.inner}, what.dtype, "w"),
               y = filled({what.rows, what.cols}, what.dtype, "y"),
               from = filled({Measured::kCopyBytes}, DType::kU8, "from"),
               to = filled({Measured::kCopyBytes}, DType::kU8, "to");
  const auto product = [&] { linear(context, x, w, {}, y); };
  memory.begin_recording();  // notes it, so that its algorithm is chosen as training does
  product();
  memory.end_recording();
  Tuning tuning;
  gpu.tune_products(tuning);
  const auto best_s = [&](const std::function<void()>& work) {
    const std::vector<double> us = gpu.time_graph(work, 10);
    return 1e-6 * *std::min_element(us.begin(), us.end());
  };
  const double product_s = best_s(product);
  what.keep(product_s, best_s([&] { copy_gpu(context, from, to); }), plan);
  plan.measured_on = gpu.name();
}

void append_items(std::string& text, const std::vector<TrainingPlan::Item>& items, int largest) {
  int64_t rest = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    if (static_cast<int>(i) < largest)
      text += fmt::format("  {:>12}  {}\n", size_text(items[i].bytes), items[i].name);
    else
      rest += items[i].bytes;
  }
  if (rest > 0)
    text += fmt::format("  {:>12}  in {} smaller ones\n", size_text(rest), items.size() - static_cast<size_t>(largest));
}

void sort_items(std::vector<TrainingPlan::Item>& items) {
  std::stable_sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
}

int64_t bytes_of(const Tensor& block) {
  return block.defined() ? block.bytes() : 0;
}

// What a TrainingStep would hold beside workspace and arena, see TrainingStep::extra_bytes.
int64_t average_bytes(const TrainConfig& config, const Workspace& w) {
  return config.training.ema_decay > 0 ? w.layout().elements() * (w.precision() == Precision::kF32 ? 4 : 6) : 0;
}
int64_t copy_bytes(const TrainConfig& config, const Workspace& w) {
  return config.training.trainer == "per_tensor" && optimizer_copies_gradients(w) ? w.layout().elements() * 4 : 0;
}
// Settings of steps that are recorded alone: none of that is allocated, and there is a plan in any case.
StepSettings planning_settings(const TrainConfig& config, const Workspace& workspace) {
  StepSettings settings = step_settings(config, workspace);
  settings.ema_decay = 0, settings.per_tensor_update = false, settings.planned_memory = true;
  return settings;
}

}  // namespace

TrainingPlan plan_training(const TrainConfig& given, const TrainingPlanOptions& options) {
  validate_config(given);
  TrainConfig config = given;
  FRIT_CHECK(options.sentence_tokens >= 1, "[plan] sentences of {} tokens, expected 1 or more",
             options.sentence_tokens);
  const auto& t = config.training;
  TransformerConfig sizes;
  if (config.data.tokenizer.empty() && config.model.init_from.empty())
    sizes = model_config(config);
  else
    sizes = model_config(
        config, Tokenizer::load(config.data.tokenizer.empty() ? config.model.init_from : config.data.tokenizer));
  const std::unique_ptr<Gpu> gpu = training_gpu(config);
  if (t.batch_tokens == 0) {
    if (!gpu || gpu->bytes_free() == 0)
      fail(
          "[plan] training.batch_tokens 0 takes the largest batches that fit on a GPU: give a number for run.device {}",
          config.run.device);
    config.training.batch_tokens = std::max<int64_t>(
        kPlanTokens, largest_batch_tokens(config, sizes, *gpu, static_cast<int64_t>(gpu->bytes_free())));
  }
  Transformer::Options model_options = training_options(config, gpu.get());
  model_options.planning = true;
  Transformer model(sizes, model_options);
  ThreadPool pool(static_cast<int>(config.run.threads));
  TrainingStep step(model, pool, planning_settings(config, model.workspace()), gpu.get());

  if (!step.planned())
    fail("[plan] run.attention is {}, whose memory depends on every sentence's length: leave it out to plan",
         config.run.attention);

  TrainingPlan plan;
  const Workspace& w = model.workspace();
  plan.parameters = w.layout().parameters();
  plan.parameter_bytes = bytes_of(w.parameters()), plan.gradient_bytes = bytes_of(w.gradients());
  plan.moment_bytes = bytes_of(w.moment1()) + bytes_of(w.moment2());
  plan.master_bytes = bytes_of(w.master()) + bytes_of(w.residual());
  plan.ema_bytes = average_bytes(config, w), plan.copy_bytes = copy_bytes(config, w);
  for (const auto& slice : w.layout().slices())
    plan.weights.push_back({slice.name, slice.shape.numel() * size_of(w.parameters().dtype())});
  sort_items(plan.weights);

  plan.source_tokens = plan.target_tokens = t.batch_tokens;
  plan.accumulate = t.accumulate;
  step.plan(TrainingStep::Kind::kTrain, full_batch(config));
  step.plan(TrainingStep::Kind::kEvaluate, full_batch(config));
  plan.arena_bytes = static_cast<int64_t>(step.peak());
  plan.lower_bound_bytes = static_cast<int64_t>(step.lower_bound());
  plan.unshared_bytes = static_cast<int64_t>(step.total());
  std::map<std::string, int64_t> by_name;
  for (const Lifetime& l : step.record(TrainingStep::Kind::kTrain, full_batch(config)))
    by_name[l.name] += static_cast<int64_t>(l.bytes);
  int64_t temporaries = 0;
  for (const auto& [name, bytes] : by_name) plan.temporaries.push_back({name, bytes}), temporaries += bytes;
  sort_items(plan.temporaries);

  const int64_t length = std::min({options.sentence_tokens, t.batch_tokens, sizes.max_positions});
  const int64_t squares = t.batch_tokens / length * length * length;
  const BatchShape shape{t.batch_tokens, t.batch_tokens, squares, squares, squares};
  plan.product_flops = flops_per_step(sizes, shape) * static_cast<double>(t.accumulate);
  plan.moved_bytes = 2 * temporaries * t.accumulate;
  // Reads gradients for their norm; then gradients, and all other blocks both ways.
  plan.update_bytes = 2 * plan.gradient_bytes + 2 * (plan.parameter_bytes + plan.moment_bytes + plan.master_bytes);
  plan.machine_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  plan.available_bytes = available_memory(plan.machine_bytes);
  if (gpu && gpu->bytes_free() > 0) plan.machine_bytes = plan.available_bytes = static_cast<int64_t>(gpu->bytes_free());
  if (options.measure) {
    const DType dtype = compute_dtype(w.precision());
    if (gpu && !built_with_cuda())
      fail("[plan] run.device simulator has no clock: nothing to measure; run.device cpu or cuda has one");
    // A GPU needs more rows to be busy, and has them.
    const Measured what{gpu ? t.batch_tokens : 1024, sizes.d_model, sizes.encoder_ffn_dim, dtype};
    if (gpu)
      measure_gpu(*gpu, what, plan);
    else
      measure_cpu(config, what, plan);
    plan.step_s = plan.product_flops / plan.flops_per_s +
                  static_cast<double>(plan.moved_bytes + plan.update_bytes) / plan.bytes_per_s;
  }
  return plan;
}

int64_t largest_batch_tokens(const TrainConfig& config, const TransformerConfig& sizes, Gpu& gpu, int64_t bytes) {
  Transformer::Options options = training_options(config, &gpu);
  options.planning = true;
  Transformer model(sizes, options);
  ThreadPool pool(1);
  TrainingStep step(model, pool, planning_settings(config, model.workspace()), &gpu);
  const Workspace& w = model.workspace();
  // What cuBLASLt, cuDNN and the run time take beside the arena: 2 % of everything, and 256 MiB.
  const int64_t fixed =
      w.bytes() + average_bytes(config, w) + copy_bytes(config, w) + (int64_t{256} << 20) + bytes / 50;
  const auto fits = [&](int64_t units) {
    const int64_t tokens = units * kPlanTokens;
    const auto peak =
        static_cast<int64_t>(plan_memory(step.record(TrainingStep::Kind::kTrain, full_batch(config, tokens))).peak);
    return fixed + peak + 5 * tokens * static_cast<int64_t>(sizeof(int32_t)) <= bytes;
  };
  int64_t good = 0, bad = 1;
  while (bad < (int64_t{1} << 20) && fits(bad)) good = bad, bad *= 2;
  while (bad - good > 1) {
    const int64_t middle = (good + bad) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good * kPlanTokens;
}

std::string TrainingPlan::to_string(int largest) const {
  std::string text =
      fmt::format("Model: {} parameters\n\nMemory of training, {} source and {} target tokens a batch:\n",
                  format_count(parameters), format_count(source_tokens), format_count(target_tokens));
  const auto line = [&](std::string_view what, int64_t bytes) {
    if (bytes > 0) text += fmt::format("  {:>12}  {}\n", size_text(bytes), what);
  };
  line("parameters", parameter_bytes);
  line("gradients", gradient_bytes);
  line("optimizer's moments", moment_bytes);
  line("fp32 master or residual", master_bytes);
  line("average of weights", ema_bytes);
  line("fp32 copies of gradients", copy_bytes);
  text += fmt::format("  {:>12}  arena of temporaries (least possible {}, without sharing {})\n",
                      size_text(arena_bytes), size_text(lower_bound_bytes), size_text(unshared_bytes));
  text += fmt::format("  {:>12}  in all; {} of {} are available: it {}\n", size_text(total_bytes()),
                      size_text(available_bytes), size_text(machine_bytes), fits() ? "fits" : "DOES NOT FIT");
  text += fmt::format("\nTemporaries of a step, by name (before sharing):\n");
  append_items(text, temporaries, largest);
  text += "\nParameters:\n";
  append_items(text, weights, largest);
  text += fmt::format(
      "\nCost of an update:\n  {:>12.1f} GFLOP of products\n  {:>12}  moved by everything else (each temporary written "
      "and read once)\n  {:>12}  moved by the optimizer\n",
      product_flops / 1e9, size_text(moved_bytes), size_text(update_bytes));
  if (step_s > 0)
    text += fmt::format(
        "  {:>10.2f} s  estimated: products at {:.1f} GFLOP/s and bytes at {:.1f} GB/s, as measured just now on "
        "{}; {} target tokens/s\n",
        step_s, flops_per_s / 1e9, bytes_per_s / 1e9, measured_on,
        format_count(static_cast<int64_t>(static_cast<double>(target_tokens * accumulate) / step_s)));
  return text;
}

}  // namespace frit
