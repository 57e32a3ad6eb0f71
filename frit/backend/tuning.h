// Tuning: which kernel instance is fastest for a shape on a GPU, found by timing once and kept in a file.
#pragma once
#include <map>
#include <string>
#include <string_view>

namespace frit {

// (operator with direction, shape key) -> instance name. Belongs to one GPU model and one version of Frit.
class Tuning {
 public:
  // "" if nothing was found for this shape.
  std::string_view find(std::string_view op, std::string_view key) const;
  void set(std::string_view op, std::string_view key, std::string_view instance);
  size_t size() const { return chosen_.size(); }

  // A JSON file {"gpu": ..., "version": ..., "chosen": {"op key": "instance"}}. load() returns an empty Tuning if the
  // file is not there, or is for another GPU or version. Errors: frit::Error naming the file if it cannot be read or
  // parsed, or written, and with `own` if it is for another GPU or version.
  static Tuning load(const std::string& path, std::string_view gpu, bool own = false);
  void save(const std::string& path, std::string_view gpu) const;

 private:
  std::map<std::string, std::string, std::less<>> chosen_;
};

}  // namespace frit
