#include "frit/train/tuning_cache.h"

#include <cstdlib>

#include "frit/core/error.h"

namespace frit {
namespace {

namespace fs = std::filesystem;

fs::path cache_directory() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache && *cache) return fs::path(cache) / "frit";
  if (const char* home = std::getenv("HOME"); home && *home) return fs::path(home) / ".cache" / "frit";
  return fs::temp_directory_path() / "frit";
}

}  // namespace

TuningCache::TuningCache(const fs::path& run, std::string gpu, Say say)
    : own_(run / "tuning.json"),
      common_(cache_directory() / "tuning.json"),
      gpu_(std::move(gpu)),
      say_(std::move(say)) {
  tuning_ = Tuning::load(own_.string(), gpu_);
  fresh_ = tuning_.size() == 0;
  if (fresh_) try {
      tuning_ = Tuning::load(common_.string(), gpu_);
    } catch (const Error& e) {
      say_(fmt::format("Note: {}; everything is timed again", e.what()));
    }
}

void TuningCache::save(bool found) {
  tuning_.save(own_.string(), gpu_);
  if (!found) return;
  std::error_code error;
  fs::create_directories(common_.parent_path(), error);
  if (error)
    say_(fmt::format("Note: {} cannot be made, so the next run times everything again: {}",
                     common_.parent_path().string(), error.message()));
  else
    try {
      tuning_.save(common_.string(), gpu_);
    } catch (const Error& e) {
      say_(fmt::format("Note: the next run times everything again: {}", e.what()));
    }
}

}  // namespace frit
