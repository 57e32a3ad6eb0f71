// `frit report RUN`: one HTML page about a run.
#include "frit/train/report.h"

#include <CLI/CLI.hpp>
#include <iostream>

#include "apps/cli/cli.h"

namespace frit::cli {
namespace {

struct Options {
  std::string run, output;
};

}  // namespace

void add_report(CLI::App& app, Action* action) {
  CLI::App* sub = app.add_subcommand("report", "Writes one self-contained HTML page about a run");
  auto o = std::make_shared<Options>();
  sub->add_option("RUN", o->run, "Run directory, of a training that goes on or is done")->type_name("")->required();
  sub->add_option("-o,--output", o->output, "Page to write (default: RUN/report.html)")->type_name("FILE");
  sub->footer(
      "Shows loss, learning rate, tokens/s, gradient norm, BLEU and sample translations over time.\n"
      "Prints the path of the page.\n\n"
      "Examples:\n"
      "  frit report run\n"
      "  frit report run --output /tmp/run.html");
  sub->callback([o, action] {
    *action = [o] {
      std::cout << write_report(o->run, o->output).string() << '\n';
      return kGood;
    };
  });
}

}  // namespace frit::cli
