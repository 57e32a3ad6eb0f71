// The command `frit`: reads the command line, runs one subcommand, and says with its exit code how it went.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <iostream>
#include <new>
#include <string>
#include <vector>

#include "apps/cli/cli.h"
#include "frit/core/error.h"
#include "frit/core/nearest.h"

namespace frit::cli {
namespace {

// One line, whatever the error's text holds.
int report_error(std::string text, ExitCode code) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  for (size_t at = 0; (at = text.find('\n', at)) != std::string::npos;) {
    const size_t next = std::min(text.find_first_not_of(" \n", at), text.size());
    const bool goes_on = at > 0 && (text[at - 1] == ':' || text[at - 1] == '.' || text[at - 1] == ';');
    text.replace(at, next - at, goes_on ? " " : "; ");
  }
  std::cerr << "frit: error: " << text << '\n';
  return code;
}

// Long names of an app's options, with their dashes.
std::vector<std::string> flags_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

// The name that a word begins, else the nearest one.
std::string suggestion(const std::string& word, const std::vector<std::string>& names) {
  std::string nearest = nearest_name(word, names);
  for (const std::string& name : names)
    if (name.starts_with(word)) nearest = name;
  return nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest);
}

// What is wrong with a command line that CLI11 refused, with the nearest name for one that is not known.
std::string explain(const CLI::App& app, const CLI::ParseError& error) {
  // The subcommand of a subcommand, as deep as the words went.
  const CLI::App* found = &app;
  std::string command = "frit";
  while (!found->get_subcommands().empty()) {
    found = found->get_subcommands().front();
    command += " " + found->get_name();
  }
  const CLI::App& at = *found;
  const std::string help = fmt::format(" (see {} --help)", command);
  std::vector<std::string> commands;
  for (const CLI::App* sub : at.get_subcommands([](const CLI::App*) { return true; }))
    commands.push_back(sub->get_name());
  for (const std::string& word : at.remaining(true)) {
    const std::string name = word.substr(0, word.find('='));
    if (word.starts_with("-") && word.size() > 1)
      return fmt::format("unknown flag {}{}{}", name, suggestion(name, flags_of(at)), help);
    if (!commands.empty()) return fmt::format("unknown command {}{}{}", word, suggestion(word, commands), help);
    return fmt::format("{} does not take the argument {}{}", command, word, help);
  }
  if (!commands.empty()) return fmt::format("{} needs a command: {}{}", command, fmt::join(commands, ", "), help);
  return error.what() + help;
}

int run(std::vector<std::string> arguments) {
  CLI::App app("Trains Transformers on parallel text and translates with them.", "frit");
  app.set_version_flag("--version", "frit " FRIT_VERSION);
  app.require_subcommand(1);
  app.footer(
      "Examples:\n"
      "  frit train CONFIG.toml                       train; run again to go on after a stop\n"
      "  frit translate RUN/model < in.txt > out.txt  translate, a line each\n"
      "  frit evaluate RUN/model test.en test.de      BLEU, loss and perplexity\n"
      "\n"
      "Exit codes: 0 good; 1 an error while running; 2 a command line that makes no sense;\n"
      "130 or 143 stopped by SIGINT or SIGTERM (training saves a checkpoint first).\n"
      "Results go to standard output; progress, notices and errors to standard error.");
  Action action;
  Overrides overrides;
  add_train(app, overrides, &action);
  add_translate(app, &action);
  add_evaluate(app, &action);
  add_plan(app, overrides, &action);
  add_report(app, &action);
  add_bench(app, overrides, &action);

  try {
    if (!arguments.empty() && (arguments[0] == "train" || arguments[0] == "plan" || arguments[0] == "bench"))
      overrides = take_overrides(&arguments);
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
    app.parse(arguments);
    if (!action) throw UsageError("nothing to do (see frit --help)");
    const int code = action();
    if (!std::cout.flush()) return report_error("cannot write to standard output", kFailed);
    return code;
  } catch (const CLI::Success& asked) {  // --help, --version
    app.exit(asked);
    return kGood;
  } catch (const CLI::ParseError& e) {
    return report_error(explain(app, e), kUsage);
  } catch (const UsageError& e) {
    return report_error(e.what(), kUsage);
  } catch (const std::bad_alloc&) {
    return report_error("out of memory", kFailed);
  } catch (const std::exception& e) {
    return report_error(e.what(), kFailed);
  }
}

}  // namespace
}  // namespace frit::cli

int main(int argc, char** argv) {
  // A reader that has enough (`frit translate ... | head`) ends us without a word, even if our parent ignores SIGPIPE.
  std::signal(SIGPIPE, SIG_DFL);
  std::ios::sync_with_stdio(false);
  return frit::cli::run(std::vector<std::string>(argv + 1, argv + argc));
}
