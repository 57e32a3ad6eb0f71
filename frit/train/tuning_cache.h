// What timing found on a GPU, kept in files: a run goes on with what it was begun with, and a new one begins with what
// other runs on this kind of GPU found.
#pragma once
#include <filesystem>
#include <string>

#include "frit/backend/tuning.h"
#include "frit/train/prepare.h"

namespace frit {

// RUN/tuning.json and $XDG_CACHE_HOME/frit/tuning.json (or ~/.cache/frit/tuning.json). The second is a convenience:
// what is wrong with it is a notice.
class TuningCache {
 public:
  // Errors: frit::Error if the run's own file is there and is none.
  TuningCache(const std::filesystem::path& run, std::string gpu, Say say);
  // Stays where it is as long as this lives.
  Tuning& tuning() { return tuning_; }
  // False if the run has its own file: what is there is used, so that it goes on as it began.
  bool fresh() const { return fresh_; }
  // Writes the run's file, and with `found` (something is new) the common one. Errors: frit::Error for the run's.
  void save(bool found);

 private:
  std::filesystem::path own_, common_;
  std::string gpu_;
  Say say_;
  Tuning tuning_;
  bool fresh_ = true;
};

}  // namespace frit
