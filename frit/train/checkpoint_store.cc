#include "frit/train/checkpoint_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/train/crc32c.h"

namespace frit {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kManifest = "manifest.json";
constexpr std::string_view kPrefix = "step-", kOld = "old-step-", kTemporary = "tmp-", kDelete = "tmp-delete-";

std::string step_name(int64_t step) {
  return fmt::format("step-{:06}", step);
}

// The step of a folder name "<prefix>000123", or nothing.
std::optional<int64_t> step_of(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  int64_t step = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size() || step < 0) return std::nullopt;
  return step;
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string manifest_text(const CheckpointInfo& info) {
  nlohmann::json json = {{"format", 1}, {"step", info.step}, {"metric", nullptr}, {"files", nlohmann::json::array()}};
  if (info.metric) json["metric"] = *info.metric;
  for (const auto& file : info.files)
    json["files"].push_back({{"name", file.name}, {"size", file.size_bytes}, {"crc32c", file.crc32c}});
  // The manifest's own checksum is that of its compact text without the checksum.
  json["manifest_crc32c"] = crc32c(json.dump());
  return json.dump(1) + "\n";
}

// Reads and checks the manifest and the sizes. Throws frit::Error with the reason alone.
CheckpointInfo inspect(const fs::path& path, int64_t step) {
  std::string text;
  try {
    text = read_file(path / kManifest);
  } catch (const Error&) {
    fail("no readable {}", kManifest);
  }
  auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("manifest_crc32c")) fail("{} is cut short or not JSON", kManifest);
  CheckpointInfo info;
  info.path = path;
  try {
    const auto sum = json["manifest_crc32c"].get<uint32_t>();
    json.erase("manifest_crc32c");
    if (crc32c(json.dump()) != sum) fail("{} has a wrong checksum", kManifest);
    if (json.at("format").get<int>() != 1)
      fail("{} has format {}, expected 1", kManifest, json.at("format").get<int>());
    info.step = json.at("step").get<int64_t>();
    if (!json.at("metric").is_null()) info.metric = json.at("metric").get<double>();
    for (const auto& file : json.at("files"))
      info.files.push_back(
          {file.at("name").get<std::string>(), file.at("size").get<int64_t>(), file.at("crc32c").get<uint32_t>()});
  } catch (const nlohmann::json::exception& e) {
    fail("{} is not a manifest: {}", kManifest, e.what());
  }
  if (info.step != step) fail("{} is of step {}, the folder's name says {}", kManifest, info.step, step);
  for (const auto& file : info.files) {
    std::error_code error;
    const auto size = fs::file_size(path / file.name, error);
    if (error) fail("{} is missing", file.name);
    if (static_cast<int64_t>(size) != file.size_bytes)
      fail("{} has {} bytes, the manifest says {}", file.name, static_cast<int64_t>(size), file.size_bytes);
  }
  return info;
}

bool better(double a, double b, bool higher_is_better) {
  return higher_is_better ? a > b : a < b;
}

// The best checkpoint of a list, the earliest of equals; end() when none has a metric.
std::vector<CheckpointInfo>::const_iterator best_of(const std::vector<CheckpointInfo>& list, bool higher_is_better) {
  auto best = list.end();
  for (auto it = list.begin(); it != list.end(); ++it) {
    if (it->metric && (best == list.end() || better(*it->metric, *best->metric, higher_is_better))) best = it;
  }
  return best;
}

void rename_path(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  if (error) fail("[checkpoint] cannot rename {} to {}: {}", from.string(), to.string(), error.message());
}

void remove_tree(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail("[checkpoint] cannot remove {}: {}", path.string(), error.message());
}

// Reads a file in pieces through `f`; throws frit::Error if it cannot be read whole.
template <typename F>
void read_pieces(const fs::path& path, int64_t size_bytes, F&& f) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail("cannot open {}: {}", path.string(), std::strerror(errno));
  std::vector<std::byte> buffer(1 << 20);
  int64_t got = 0;
  while (true) {
    const ssize_t n = ::read(fd, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int error = errno;
      ::close(fd);
      fail("cannot read {}: {}", path.string(), std::strerror(error));
    }
    if (n == 0) break;
    if (got + n <= size_bytes) f(got, std::span<const std::byte>(buffer.data(), static_cast<size_t>(n)));
    got += n;
    if (got > size_bytes) break;
  }
  ::close(fd);
  if (got != size_bytes) fail("{} changed its size, expected {} bytes", path.string(), size_bytes);
}

const CheckpointInfo::File& find_file(const CheckpointInfo& checkpoint, std::string_view name) {
  for (const auto& file : checkpoint.files) {
    if (file.name == name) return file;
  }
  fail("[checkpoint] {} holds no {}", checkpoint.path.string(), name);
}

}  // namespace

CheckpointBlob CheckpointBlob::text(std::string name, std::string_view text) {
  return {std::move(name), {std::as_bytes(std::span(text))}};
}

CheckpointStore::CheckpointStore(fs::path directory, CheckpointOptions options)
    : directory_(std::move(directory)), options_(std::move(options)) {
  FRIT_CHECK(options_.keep_newest >= 1, "[checkpoint] keep_newest is {}, expected 1 or more", options_.keep_newest);
  FRIT_CHECK(options_.keep_every >= 0, "[checkpoint] keep_every is {}, expected 0 or more", options_.keep_every);
}

void CheckpointStore::operation(std::string_view what) const {
  if (options_.before_operation) options_.before_operation(what);
}

std::vector<std::string> CheckpointStore::recover() {
  std::vector<std::string> names, removed;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory_, error)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    if (const auto step = step_of(name, kOld)) {
      // A crash came between moving the old checkpoint of this step away and the new one in (then it goes back), or
      // after both (then it goes).
      const fs::path place = directory_ / step_name(*step);
      if (!fs::exists(place)) {
        operation("restore " + name);
        rename_path(directory_ / name, place);
        continue;
      }
      // The new one is in place, but a damaged disk may have spoilt it: the old one goes only if the new one is right.
      std::string wrong;
      try {
        wrong = verify_checkpoint(inspect(place, *step));
      } catch (const Error& e) {
        wrong = e.what();
      }
      if (!wrong.empty()) {
        remove_checkpoint(place);
        operation("restore " + name);
        rename_path(directory_ / name, place);
        continue;
      }
    } else if (!name.starts_with(kTemporary)) {
      continue;
    }
    operation("clean " + name);
    remove_tree(directory_ / name);
    removed.push_back(name);
  }
  if (!names.empty()) sync_directory(directory_);
  return removed;
}

CheckpointInfo CheckpointStore::save(int64_t step, std::span<const CheckpointBlob> blobs,
                                     std::optional<double> metric) {
  FRIT_CHECK(step >= 0, "[checkpoint] step is {}, expected 0 or more", step);
  FRIT_CHECK(!metric || std::isfinite(*metric), "[checkpoint] metric of step {} is {}, expected a finite number", step,
             *metric);
  std::set<std::string> names = {std::string(kManifest)};
  for (const auto& blob : blobs) {
    FRIT_CHECK(!blob.name.empty() && blob.name != "." && blob.name != ".." && blob.name.find('/') == std::string::npos,
               "[checkpoint] bad file name '{}', expected a plain name", blob.name);
    FRIT_CHECK(names.insert(blob.name).second, "[checkpoint] file name {} is used twice or reserved", blob.name);
  }
  const fs::path place = directory_ / step_name(step), temporary = directory_ / ("tmp-" + step_name(step));
  const fs::path old = directory_ / ("old-" + step_name(step));
  CheckpointInfo info;
  info.path = place;
  info.step = step;
  info.metric = metric;

  std::error_code error;
  operation("create folders");
  fs::create_directories(directory_, error);
  if (error) fail("[checkpoint] cannot make folder {}: {}", directory_.string(), error.message());
  remove_tree(temporary);
  fs::create_directory(temporary, error);
  if (error) fail("[checkpoint] cannot make folder {}: {}", temporary.string(), error.message());

  const auto write_file = [&](const std::string& name, std::span<const std::span<const std::byte>> pieces) {
    CheckpointInfo::File file{name, 0, 0};
    const fs::path path = temporary / name;
    operation("create " + name);
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) fail("[checkpoint] cannot create {}: {}", path.string(), std::strerror(errno));
    try {
      for (auto piece : pieces) {
        operation("write " + name);
        write_all(fd, text_of(piece), path);
        file.size_bytes += static_cast<int64_t>(piece.size());
        file.crc32c = crc32c(piece, file.crc32c);
      }
      operation("sync " + name);
      if (::fsync(fd) != 0) fail("[checkpoint] cannot sync {}: {}", path.string(), std::strerror(errno));
    } catch (...) {
      ::close(fd);
      throw;
    }
    if (::close(fd) != 0) fail("[checkpoint] cannot close {}: {}", path.string(), std::strerror(errno));
    return file;
  };
  for (const auto& blob : blobs) info.files.push_back(write_file(blob.name, blob.pieces));
  const std::string manifest = manifest_text(info);
  const std::span<const std::byte> manifest_bytes = std::as_bytes(std::span(manifest));
  write_file(std::string(kManifest), std::span(&manifest_bytes, 1));
  operation("sync temporary folder");
  sync_directory(temporary);

  if (fs::exists(old)) {  // recover() was not called after a crash: settle it before the name is used again
    operation("settle old");
    if (fs::exists(place)) {
      remove_checkpoint(old);
    } else {
      rename_path(old, place);
    }
  }
  const bool replaces = fs::exists(place);
  if (replaces) {
    operation("move old away");
    rename_path(place, old);
  }
  operation("rename into place");
  rename_path(temporary, place);
  operation("sync folder");
  sync_directory(directory_);
  if (replaces) remove_checkpoint(old);
  prune(step);
  return info;
}

void CheckpointStore::remove_checkpoint(const fs::path& path) {
  // Renamed first, so that a crash half way leaves a name nobody takes for a checkpoint.
  const fs::path doomed = directory_ / (std::string(kDelete) + path.filename().string());
  operation("clear " + doomed.filename().string());
  remove_tree(doomed);
  operation("rename for removal");
  rename_path(path, doomed);
  operation("remove " + doomed.filename().string());
  remove_tree(doomed);
}

void CheckpointStore::prune(int64_t just_saved) {
  const std::vector<CheckpointInfo> all = list();
  const auto best = options_.keep_best ? best_of(all, options_.higher_is_better) : all.end();
  int64_t newest = 0;
  std::vector<fs::path> doomed;
  for (auto it = all.end(); it != all.begin();) {
    --it;
    // Later ones are of a line of training that was left (see drop_after); they are not ours to count or remove.
    if (it->step > just_saved) continue;
    ++newest;
    const bool keep = it->step == just_saved || newest <= options_.keep_newest || it == best ||
                      (options_.keep_every > 0 && it->step % options_.keep_every == 0);
    if (!keep) doomed.push_back(it->path);
  }
  std::reverse(doomed.begin(), doomed.end());
  for (const auto& path : doomed) remove_checkpoint(path);
}

std::vector<CheckpointInfo> CheckpointStore::list(std::vector<SkippedCheckpoint>* skipped) const {
  std::map<int64_t, fs::path> places, olds;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory_, error)) {
    const std::string name = entry.path().filename().string();
    if (const auto step = step_of(name, kPrefix)) places[*step] = entry.path();
    if (const auto step = step_of(name, kOld)) olds[*step] = entry.path();
  }
  for (const auto& [step, path] : olds) places.emplace(step, path);  // counts if that is all there is
  std::vector<CheckpointInfo> result;
  for (const auto& [step, path] : places) {
    try {
      result.push_back(inspect(path, step));
    } catch (const Error& e) {
      if (skipped != nullptr) skipped->push_back({path, e.what()});
    }
  }
  return result;
}

std::optional<CheckpointInfo> CheckpointStore::latest(std::vector<SkippedCheckpoint>* skipped) const {
  std::vector<CheckpointInfo> all = list(skipped);
  for (; !all.empty(); all.pop_back()) {
    const std::string wrong = verify_checkpoint(all.back());
    if (wrong.empty()) return all.back();
    if (skipped != nullptr) skipped->push_back({all.back().path, wrong});
  }
  return std::nullopt;
}

std::optional<CheckpointInfo> CheckpointStore::best(std::vector<SkippedCheckpoint>* skipped) const {
  std::vector<CheckpointInfo> all = list(skipped);
  while (true) {
    const auto best = best_of(all, options_.higher_is_better);
    if (best == all.end()) return std::nullopt;
    const std::string wrong = verify_checkpoint(*best);
    if (wrong.empty()) return *best;
    if (skipped != nullptr) skipped->push_back({best->path, wrong});
    all.erase(best);
  }
}

CheckpointInfo CheckpointStore::at(int64_t step) const {
  fs::path path = directory_ / step_name(step);
  if (!fs::exists(path) && fs::exists(directory_ / ("old-" + step_name(step))))
    path = directory_ / ("old-" + step_name(step));
  if (!fs::exists(path)) fail("[checkpoint] there is no checkpoint of step {} in {}", step, directory_.string());
  std::string wrong;
  CheckpointInfo info;
  try {
    info = inspect(path, step);
    wrong = verify_checkpoint(info);
  } catch (const Error& e) {
    wrong = e.what();
  }
  if (!wrong.empty()) fail("[checkpoint] {} cannot be used: {}", path.string(), wrong);
  return info;
}

void CheckpointStore::drop_after(int64_t step) {
  if (step > 0 || fs::exists(directory_ / step_name(0))) at(step);
  std::vector<std::pair<int64_t, fs::path>> later;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory_, error)) {
    const std::string name = entry.path().filename().string();
    for (std::string_view prefix : {kPrefix, kOld}) {
      const auto found = step_of(name, prefix);
      if (found && *found > step) later.emplace_back(*found, entry.path());
    }
  }
  std::sort(later.begin(), later.end());
  for (const auto& [_, path] : later) remove_checkpoint(path);
  if (!later.empty()) sync_directory(directory_);
}

std::string verify_checkpoint(const CheckpointInfo& checkpoint) {
  for (const auto& file : checkpoint.files) {
    try {
      uint32_t crc = 0;
      read_pieces(checkpoint.path / file.name, file.size_bytes,
                  [&](int64_t, std::span<const std::byte> piece) { crc = crc32c(piece, crc); });
      if (crc != file.crc32c) return fmt::format("{} has a wrong checksum", file.name);
    } catch (const Error& e) {
      return e.what();
    }
  }
  return "";
}

void read_blob(const CheckpointInfo& checkpoint, std::string_view name, std::span<std::byte> into) {
  const auto& file = find_file(checkpoint, name);
  if (static_cast<int64_t>(into.size()) != file.size_bytes)
    fail("[checkpoint] {} of {} has {} bytes, expected {}", name, checkpoint.path.string(), file.size_bytes,
         into.size());
  uint32_t crc = 0;
  read_pieces(checkpoint.path / file.name, file.size_bytes, [&](int64_t at, std::span<const std::byte> piece) {
    std::memcpy(into.data() + at, piece.data(), piece.size());
    crc = crc32c(piece, crc);
  });
  if (crc != file.crc32c) fail("[checkpoint] {} of {} has a wrong checksum", name, checkpoint.path.string());
}

std::string read_blob(const CheckpointInfo& checkpoint, std::string_view name) {
  std::string bytes(static_cast<size_t>(find_file(checkpoint, name).size_bytes), '\0');
  read_blob(checkpoint, name, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

}  // namespace frit
