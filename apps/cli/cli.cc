#include "apps/cli/cli.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <iostream>

#include "frit/core/error.h"
#include "frit/train/prepare.h"

namespace frit::cli {
namespace {

// A signal handler can reach nothing else, and threads ask for it.
std::atomic<int> g_signal = 0;
static_assert(std::atomic<int>::is_always_lock_free);

extern "C" void remember_signal(int number) {
  if (g_signal.exchange(number)) _exit(128 + number);
}

// Why a configuration cannot work, as far as that shows without opening files; "" if nothing does.
std::string refusal(const TrainConfig& config) {
  try {
    validate_config(config);
    if (config.model.init_from.empty()) check_settings(config);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace

Overrides take_overrides(std::vector<std::string>* arguments) {
  Overrides overrides;
  std::vector<std::string> rest;
  for (size_t i = 0; i < arguments->size(); ++i) {
    const std::string& argument = (*arguments)[i];
    if (argument == "--") {
      rest.insert(rest.end(), arguments->begin() + i, arguments->end());
      break;
    }
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    const bool set = name == "--set";
    if (!set && !(name.starts_with("--") && name.find('.') != std::string::npos)) {
      rest.push_back(argument);
      continue;
    }
    std::string value;
    if (equals != std::string::npos)
      value = argument.substr(equals + 1);
    else if (i + 1 < arguments->size())
      value = (*arguments)[++i];
    else
      throw UsageError(fmt::format("{} needs a value", name));
    if (!set) {
      overrides.emplace_back(name.substr(2), value);
      continue;
    }
    const size_t cut = value.find('=');
    if (cut == std::string::npos)
      throw UsageError(fmt::format("--set {} has no value, expected --set KEY=VALUE", value));
    overrides.emplace_back(value.substr(0, cut), value.substr(cut + 1));
  }
  *arguments = rest;
  return overrides;
}

TrainConfig load_config(const std::string& path, const Overrides& overrides) {
  TrainConfig config;
  if (!path.empty()) read_config(config, path);
  const bool sound = refusal(config).empty();
  for (const auto& [name, value] : overrides) {
    try {
      set_config_key(config, name, value);
    } catch (const Error& e) {
      throw UsageError(e.what());
    }
  }
  if (const std::string why = refusal(config); !why.empty()) {
    // What the flags brought in is a fault of the command line, the rest one of the file.
    if (sound) throw UsageError(why);
    throw Error(why);
  }
  return config;
}

void describe_overrides(CLI::App& app) {
  const std::string group = "Configuration";
  const std::function<void(const std::string&)> nothing = [](const std::string&) {};  // take_overrides has read them
  app.add_option_function<std::string>("--set", nothing, "Sets a key of the configuration")
      ->type_name("KEY=VALUE")
      ->group(group);
  app.add_option_function<std::string>(
         "--SECTION.KEY", nothing, "The same, e.g. --training.learning_rate 1e-3 (all: frit train --config-reference)")
      ->type_name("VALUE")
      ->group(group);
}

std::string model_directory(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (fs::exists(fs::path(path) / "config.json", ignored)) return path;
  const fs::path inner = fs::path(path) / "model";
  if (fs::exists(inner / "config.json", ignored)) return inner.string();
  if (!fs::exists(path, ignored)) fail("{}: there is no such model directory", path);
  if (fs::exists(fs::path(path) / "metrics.jsonl", ignored))
    fail("{}: this run has no model yet; it is written when training ends (run frit train again to go on)", path);
  fail("{}: this is no model directory, it has no config.json", path);
}

void catch_signals() {
  struct sigaction action = {};
  action.sa_handler = remember_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
}

int caught_signal() {
  return g_signal;
}

void notice(std::string_view text) {
  std::cerr << "frit: " << text << '\n';
}

}  // namespace frit::cli
