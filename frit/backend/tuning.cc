#include "frit/backend/tuning.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "frit/core/error.h"
#include "frit/core/file.h"

namespace frit {
namespace {

constexpr int kVersion = 1;  // raised when instances change their meaning

std::string joined(std::string_view op, std::string_view key) {
  return fmt::format("{} {}", op, key);
}

}  // namespace

std::string_view Tuning::find(std::string_view op, std::string_view key) const {
  auto it = chosen_.find(joined(op, key));
  return it == chosen_.end() ? std::string_view() : std::string_view(it->second);
}

void Tuning::set(std::string_view op, std::string_view key, std::string_view instance) {
  chosen_[joined(op, key)] = instance;
}

Tuning Tuning::load(const std::string& path, std::string_view gpu, bool own) {
  Tuning tuning;
  if (!std::filesystem::exists(path)) return tuning;
  try {
    const nlohmann::json file = nlohmann::json::parse(read_file(path));
    if (file.at("gpu") != gpu || file.at("version") != kVersion) {
      if (own)
        fail("[tuning] {} is for {}, version {}, not for {}", path, file.at("gpu").dump(), file.at("version").dump(),
             gpu);
      return tuning;
    }
    if (!file.at("chosen").is_object()) fail("[tuning] {} is no tuning file: \"chosen\" is no object", path);
    for (auto& [key, instance] : file.at("chosen").items()) tuning.chosen_[key] = instance.get<std::string>();
  } catch (const nlohmann::json::exception& e) {
    fail("[tuning] {} is no tuning file: {}", path, e.what());
  }
  return tuning;
}

void Tuning::save(const std::string& path, std::string_view gpu) const {
  const nlohmann::json file = {{"gpu", gpu}, {"version", kVersion}, {"chosen", chosen_}};
  write_file_atomically(path, file.dump(1) + "\n");
}

}  // namespace frit
