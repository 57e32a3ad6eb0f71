// `frit plan CONFIG`: memory by tensor and the cost of a step, before anything runs.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>

#include "apps/cli/cli.h"
#include "frit/core/error.h"
#include "frit/memory/planner.h"
#include "frit/train/prepare.h"
#include "frit/train/progress.h"
#include "frit/train/trainer.h"

namespace frit::cli {
namespace {

struct Options {
  std::string config;
  int64_t tensors = 20, sentence = 25;
};

std::string mib(double bytes) {
  return fmt::format("{:.1f} MiB", bytes / (1 << 20));
}

double machine_memory() {
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

int plan(const Options& o, const Overrides& overrides) {
  if (o.config.empty() && overrides.empty())
    throw UsageError("frit plan needs a configuration file or keys as flags (see frit plan --help)");
  const TrainConfig config = load_config(o.config, overrides);
  const TransformerConfig sizes = model_config(config);
  const Transformer::Options options = training_options(config);
  ParameterLayout layout = Transformer::layout(sizes);
  layout.finish();

  // The blocks, one after the other: bytes an element of each.
  const Precision precision = options.precision;
  const double width = static_cast<double>(size_of(compute_dtype(precision)));
  std::vector<std::pair<const char*, double>> blocks = {
      {"parameters", width}, {"gradients", static_cast<double>(size_of(options.gradient_dtype))}};
  if (precision == Precision::kBF16Master) blocks.emplace_back("fp32 master", 4);
  if (precision == Precision::kBF16Residual) blocks.emplace_back("residual", 2);
  if (options.moments > 0) blocks.emplace_back(options.moments == 2 ? "m and v" : "momentum", 4.0 * options.moments);
  double kept = 0;
  for (const auto& [name, bytes] : blocks) kept += bytes * static_cast<double>(layout.elements());
  if (config.training.ema_decay > 0)
    blocks.emplace_back("moving average", 4), kept += 4.0 * static_cast<double>(layout.elements());

  std::cout << fmt::format("model       {}, {} parameters, {}\n", config.model.preset,
                           format_count(layout.parameters()), config.training.precision);
  const int64_t tokens = config.training.batch_tokens;
  std::cout << fmt::format("batch       up to {} source and {} target tokens, {} an update\n", format_count(tokens),
                           format_count(tokens), config.training.accumulate);
  std::cout << "workspace   " << mib(kept) << '\n';
  for (const auto& [name, bytes] : blocks)
    std::cout << fmt::format("  {:<16}{}\n", name, mib(bytes * static_cast<double>(layout.elements())));
  const double memory = machine_memory();
  if (kept > memory) {
    std::cout << fmt::format("total       more than the {} of this machine: does not fit\n", mib(memory));
    return kGood;
  }

  // The step's own code, recorded: nothing is computed.
  Transformer model(sizes, options);
  ThreadPool pool(static_cast<int>(config.run.threads));
  TrainingStep step(model, pool, step_settings(config, model.workspace()));
  std::vector<Lifetime> lifetimes = step.record(TrainingStep::Kind::kTrain, tokens, tokens);
  const Plan& planned = step.plan(TrainingStep::Kind::kTrain, tokens, tokens);
  std::cout << fmt::format("arena       {} for {} temporary tensors; no plan needs less than {}; without sharing {}\n",
                           mib(static_cast<double>(planned.peak)), lifetimes.size(),
                           mib(static_cast<double>(planned.lower_bound)), mib(static_cast<double>(planned.total)));
  const double total = kept + static_cast<double>(planned.peak);
  std::cout << fmt::format("total       {} of {}: {}\n", mib(total), mib(memory),
                           total < memory ? "fits" : "does not fit");
  BatchShape shape;
  shape.source_tokens = shape.target_tokens = tokens;
  shape.source_squares = shape.target_squares = shape.cross_products = tokens * o.sentence;
  // Every block is read, and all but the gradients are written.
  const double moved = 2 * kept - static_cast<double>(size_of(options.gradient_dtype) * layout.elements());
  const double batches = static_cast<double>(config.training.accumulate);
  std::cout << fmt::format("step        {:.1f} GFLOP in products, {:.1f} of them forward (sentences of {} tokens)\n",
                           batches * flops_per_step(sizes, shape) / 1e9, batches * flops_forward(sizes, shape) / 1e9,
                           o.sentence);
  std::cout << fmt::format("update      {} read and written\n", mib(moved));

  std::stable_sort(lifetimes.begin(), lifetimes.end(),
                   [](const Lifetime& a, const Lifetime& b) { return a.bytes > b.bytes; });
  const size_t shown = o.tensors == 0 ? lifetimes.size() : std::min<size_t>(lifetimes.size(), o.tensors);
  std::cout << fmt::format("\n{} of {} temporary tensors, largest first (alive: events of the step, of {})\n", shown,
                           lifetimes.size(), 2 * lifetimes.size());
  for (size_t i = 0; i < shown; ++i)
    std::cout << fmt::format("{:>12}  {:>5} to {:<5} {}\n", mib(static_cast<double>(lifetimes[i].bytes)),
                             lifetimes[i].birth, lifetimes[i].death, lifetimes[i].name);

  std::vector<ParameterLayout::Slice> slices = layout.slices();
  std::stable_sort(slices.begin(), slices.end(),
                   [](const auto& a, const auto& b) { return a.shape.numel() > b.shape.numel(); });
  const size_t named = o.tensors == 0 ? slices.size() : std::min<size_t>(slices.size(), o.tensors);
  double each = 0;
  for (const auto& [name, bytes] : blocks) each += bytes;
  std::cout << fmt::format("\n{} of {} parameters, largest first, with gradient and optimizer state\n", named,
                           slices.size());
  for (size_t i = 0; i < named; ++i)
    std::cout << fmt::format("{:>12}  {:<14} {}\n", mib(each * static_cast<double>(slices[i].shape.numel())),
                             slices[i].shape.to_string(), slices[i].name);
  return kGood;
}

}  // namespace

void add_plan(CLI::App& app, const Overrides& overrides, Action* action) {
  CLI::App* sub = app.add_subcommand("plan", "Memory by tensor and the cost of a step, before anything runs");
  auto o = std::make_shared<Options>();
  sub->add_option("CONFIG.toml", o->config, "Configuration file")->type_name("");
  sub->add_option("--tensors", o->tensors, "Tensors and parameters listed; 0: all")
      ->type_name("N")
      ->check(CLI::NonNegativeNumber);
  sub->add_option("--sentence-length", o->sentence, "Tokens of a sentence, for the cost of attention")
      ->type_name("N")
      ->check(CLI::PositiveNumber);
  describe_overrides(*sub);
  sub->footer(
      "The arena is planned for the largest batch. Nothing is read but the configuration, and nothing is written.\n\n"
      "Examples:\n"
      "  frit plan examples/demo.toml\n"
      "  frit plan --model.preset transformer-big --training.precision bf16-residual --tensors 0");
  sub->callback([o, action, &overrides] { *action = [o, &overrides] { return plan(*o, overrides); }; });
}

}  // namespace frit::cli
