// What the subcommands of `frit` share: exit codes, errors of usage, keys of the configuration as flags, signals.
#pragma once
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "frit/train/config.h"

namespace CLI {
class App;
}

namespace frit::cli {

// What a shell sees; stopping by a signal gives 128 + its number (130 for SIGINT, 143 for SIGTERM).
enum ExitCode : int {
  kGood = 0,
  kFailed = 1,  // an error while running: a file, the data, the memory
  kUsage = 2,   // the command line was not understood; nothing was done
};

// A command line that makes no sense; ends the command with kUsage.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// `--section.key value`, `--section.key=value` and `--set section.key=value`, in the order they were given.
using Overrides = std::vector<std::pair<std::string, std::string>>;

// Takes these flags out of `arguments`. Errors: UsageError if a value is missing.
Overrides take_overrides(std::vector<std::string>* arguments);

// The configuration of a file (none if empty) with the overrides on top, validated. Errors: UsageError for an override
// that is not a key, not a value of it, or a value that cannot work; frit::Error for the file.
TrainConfig load_config(const std::string& path, const Overrides& overrides);

// Lists the two ways of giving a key in a subcommand's help (take_overrides reads them before CLI11 sees them).
void describe_overrides(CLI::App& app);

// A run directory that holds a finished model stands for that model: RUN/model if MODEL has no config.json of its own.
// Errors: frit::Error if there is no model directory.
std::string model_directory(const std::string& path);

// From here on the first SIGINT or SIGTERM is remembered, and the second ends the process at once. SIGPIPE is ignored:
// a reader of the log that goes away does not end hours of training.
void catch_signals();
int caught_signal();  // 0: none

// Most that a count on the command line may be: a bound that reads well in a message.
constexpr int kMostCount = 1'000'000'000;

// Writes a line to stderr, as `frit: text`.
void notice(std::string_view text);

// What a subcommand does once the command line is parsed; returns the exit code.
using Action = std::function<int()>;

// Each adds its subcommand to `app`; parsing it sets *action. `overrides` must outlive the action.
void add_train(CLI::App& app, const Overrides& overrides, Action* action);
void add_translate(CLI::App& app, Action* action);
void add_evaluate(CLI::App& app, Action* action);
void add_plan(CLI::App& app, const Overrides& overrides, Action* action);
void add_report(CLI::App& app, Action* action);
void add_bench(CLI::App& app, const Overrides& overrides, Action* action);

}  // namespace frit::cli
