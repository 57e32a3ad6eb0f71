// `frit train CONFIG.toml`: trains, or goes on training.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <iostream>

#include "apps/cli/cli.h"
#include "frit/core/error.h"
#include "frit/train/progress.h"
#include "frit/train/trainer.h"

namespace frit::cli {
namespace {

struct Options {
  std::string config, tokens;
  bool dump_config = false, config_reference = false, plain = false, quiet = false;
};

int train(const Options& o, const Overrides& overrides) {
  if (o.config_reference) {
    std::cout << config_reference();
    return kGood;
  }
  if (o.config.empty() && overrides.empty() && !o.dump_config)
    throw UsageError("frit train needs a configuration file or keys as flags (see frit train --help)");
  TrainConfig config = load_config(o.config, overrides);
  if (!o.tokens.empty()) {
    try {
      set_config_key(config, "training.batch_tokens", o.tokens == "auto" ? "0" : o.tokens);
      validate_config(config);
    } catch (const Error& e) {
      throw UsageError(std::string("--tokens: ") + e.what());
    }
  }
  if (o.dump_config) {
    std::cout << dump_config(config, true);
    return kGood;
  }
  if (config.data.train_source.empty())
    throw UsageError("data.train_source is not set: name the training text in the configuration or as a flag");

  catch_signals();
  TrainerOutput output;
  output.log = o.quiet ? nullptr : &std::cerr;
  output.bar = !o.plain && is_terminal(STDERR_FILENO);
  output.colour = output.bar && !std::getenv("NO_COLOR");
  output.columns = terminal_columns(STDERR_FILENO);
  output.stop_requested = [] { return caught_signal() != 0; };
  Trainer trainer(config, output);
  const TrainResult result = trainer.run();
  if (result.end == TrainEnd::kInterrupted) return 128 + caught_signal();
  std::cout << "model " << result.model_directory << '\n';
  if (result.loss) std::cout << fmt::format("loss {:.4f}\n", *result.loss);
  if (result.bleu) std::cout << fmt::format("validation BLEU {:.1f}\n", *result.bleu);
  return kGood;
}

}  // namespace

void add_train(CLI::App& app, const Overrides& overrides, Action* action) {
  CLI::App* sub = app.add_subcommand("train", "Trains a model, or goes on where a training stopped");
  auto o = std::make_shared<Options>();
  sub->add_option("CONFIG.toml", o->config, "Configuration file")->type_name("");
  sub->add_option("--tokens", o->tokens, "training.batch_tokens; auto: the most that fits on the GPU")
      ->type_name("N|auto");
  sub->add_flag("--dump-config", o->dump_config, "Print the whole configuration as TOML and do nothing else");
  sub->add_flag("--config-reference", o->config_reference, "Print the reference of all keys (Markdown)");
  sub->add_flag("--plain", o->plain, "Plain progress lines on a terminal too");
  sub->add_flag("--quiet", o->quiet, "No progress and no notices");
  describe_overrides(*sub);
  sub->footer(
      "The run directory (run.directory) gets checkpoints, metrics.jsonl, TensorBoard events, the tokenizer and, at\n"
      "the end, model/ in Hugging Face's layout. If it has a checkpoint, training goes on from it with the same bits\n"
      "as if it had never stopped. The first SIGINT (Ctrl-C) or SIGTERM saves a checkpoint and ends with 130 or 143;\n"
      "the second ends at once. Standard output gets the model directory and its last validation.\n\n"
      "Examples:\n"
      "  frit train examples/demo.toml\n"
      "  frit train my.toml --training.learning_rate 5e-4 --set run.directory=run2\n"
      "  frit train --model.preset transformer-base --dump-config > my.toml");
  sub->callback([o, action, &overrides] { *action = [o, &overrides] { return train(*o, overrides); }; });
}

}  // namespace frit::cli
