// `frit plan CONFIG`: memory by tensor and the cost of a step, before anything runs.
#include "frit/train/plan.h"

#include <CLI/CLI.hpp>
#include <iostream>

#include "apps/cli/cli.h"

namespace frit::cli {
namespace {

struct Options {
  std::string config;
  int tensors = 20;
  TrainingPlanOptions plan;
};

int plan(const Options& o, const Overrides& overrides) {
  if (o.config.empty() && overrides.empty())
    throw UsageError("frit plan needs a configuration file or keys as flags (see frit plan --help)");
  std::cout << plan_training(load_config(o.config, overrides), o.plan).to_string(o.tensors);
  return kGood;
}

}  // namespace

void add_plan(CLI::App& app, const Overrides& overrides, Action* action) {
  CLI::App* sub = app.add_subcommand("plan", "Memory by tensor and the cost of a step, before anything runs");
  auto o = std::make_shared<Options>();
  sub->add_option("CONFIG.toml", o->config, "Configuration file")->type_name("");
  sub->add_option("--tensors", o->tensors, "Largest tensors of each kind that are listed")
      ->type_name("N")
      ->check(CLI::Range(0, kMostCount));
  sub->add_option("--sentence-tokens", o->plan.sentence_tokens, "Length of a sentence, for the cost of attention")
      ->type_name("N")
      ->check(CLI::Range(1, kMostCount));
  sub->add_flag("--measure", o->plan.measure, "Time a product and a copy on run.device, to estimate a step's time");
  describe_overrides(*sub);
  sub->footer(
      "The arena is planned for the largest batch, of packed sentences (run.packed and run.planned_memory do not "
      "count). Nothing is read but the configuration, and nothing is written.\n\n"
      "Examples:\n"
      "  frit plan examples/demo.toml\n"
      "  frit plan --model.preset transformer-big --training.precision bf16-residual --measure");
  sub->callback([o, action, &overrides] { *action = [o, &overrides] { return plan(*o, overrides); }; });
}

}  // namespace frit::cli
