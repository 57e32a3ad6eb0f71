// Typed reading of a JSON object's keys, for the configurations' sources alone: it brings the JSON library with it.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "frit/core/error.h"

namespace frit::config_json {

using nlohmann::json;

inline json parse_object(std::string_view text, std::string_view file) {
  json parsed;
  try {
    parsed = json::parse(text.begin(), text.end());
  } catch (const json::exception& error) {
    fail("[config] {} is not JSON: {}", file, error.what());
  }
  if (!parsed.is_object()) fail("[config] {} is not a JSON object", file);
  return parsed;
}

// Reads typed keys of one file; absent and null keys leave the value as it is.
struct Reader {
  const json& object;
  std::string_view file;

  const json* find(const char* key) const {
    auto it = object.find(key);
    return it == object.end() || it->is_null() ? nullptr : &*it;
  }
  [[noreturn]] void wrong(const char* key, const json& value, const char* expected) const {
    fail("[config] {}: {} is {}, expected {}", file, key, value.dump(), expected);
  }
  void read(const char* key, int64_t& to) const {
    const json* value = find(key);
    if (!value) return;
    if (!value->is_number_integer()) wrong(key, *value, "an integer");
    to = value->get<int64_t>();
  }
  void read(const char* key, double& to) const {
    const json* value = find(key);
    if (!value) return;
    if (!value->is_number()) wrong(key, *value, "a number");
    to = value->get<double>();
  }
  void read(const char* key, bool& to) const {
    const json* value = find(key);
    if (!value) return;
    if (!value->is_boolean()) wrong(key, *value, "true or false");
    to = value->get<bool>();
  }
  void read(const char* key, std::string& to) const {
    const json* value = find(key);
    if (!value) return;
    if (!value->is_string()) wrong(key, *value, "a string");
    to = value->get<std::string>();
  }
  // An id, or a list of ids.
  void read(const char* key, std::vector<int64_t>& to) const {
    const json* value = find(key);
    if (!value) return;
    const json list = value->is_array() ? *value : json::array({*value});
    to.clear();
    for (const json& id : list) {
      if (!id.is_number_integer()) wrong(key, *value, "an integer or a list of integers");
      to.push_back(id.get<int64_t>());
    }
  }
};

}  // namespace frit::config_json
