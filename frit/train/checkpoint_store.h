// A directory of checkpoints that survives a crash at any point: written aside, synced, renamed, verified when read.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace frit {

// One file of a checkpoint, borrowed: a plain name and the pieces that follow each other in it.
struct CheckpointBlob {
  std::string name;                                // no '/', not "manifest.json"
  std::vector<std::span<const std::byte>> pieces;  // alive until save() returns

  static CheckpointBlob text(std::string name, std::string_view text);
  template <typename T>
  static CheckpointBlob array(std::string name, std::span<T> values) {
    return {std::move(name), {std::as_bytes(values)}};
  }
};

// A checkpoint whose manifest and file sizes are right. Checksums are verified by verify(), latest(), best() and
// read().
struct CheckpointInfo {
  struct File {
    std::string name;
    int64_t size_bytes = 0;
    uint32_t crc32c = 0;
  };
  std::filesystem::path path;  // RUN/checkpoints/step-000123
  int64_t step = 0;
  std::optional<double> metric;
  std::vector<File> files;
};

// A checkpoint that was passed over, and why.
struct SkippedCheckpoint {
  std::filesystem::path path;
  std::string reason;
};

struct CheckpointOptions {
  int64_t keep_newest = 3;        // >= 1
  bool keep_best = true;          // the best metric; the earliest of equals
  int64_t keep_every = 0;         // also keep steps that are multiples of this; 0: none
  bool higher_is_better = false;  // direction of the metric: true for BLEU, false for a loss
  // Called before each change of the disk with its name ("write step...", "rename", ...). For tests: throwing stands
  // for a crash there; save() then leaves everything as a crash would.
  std::function<void(std::string_view operation)> before_operation = {};
};

// Layout: DIR/step-000123/{blobs..., manifest.json}. The manifest holds sizes and CRC-32C of the blobs and of itself,
// and is written last. A folder under writing is DIR/tmp-step-000123, one under removal DIR/tmp-delete-step-000123; one
// being replaced by a newer of the same step stands as DIR/old-step-000123 for a moment, and still counts if that is
// all there is. Readers may use a store while a run writes to it; only one run writes at a time.
class CheckpointStore {
 public:
  // Touches nothing on the disk. Errors: std::invalid_argument for bad options.
  explicit CheckpointStore(std::filesystem::path directory, CheckpointOptions options = {});

  // Removes leftovers of a crash; returns their names. Call once when a run starts or resumes, before save().
  std::vector<std::string> recover();

  // Writes the blobs as the checkpoint of `step` (one that exists is replaced), then removes what the options do not
  // keep. Returns when the data is on the disk. The checkpoint just written is always kept. Errors: frit::Error if the
  // disk fails; the checkpoints before are then untouched. std::invalid_argument for a metric that is not finite, a
  // negative step, bad or repeated names.
  CheckpointInfo save(int64_t step, std::span<const CheckpointBlob> blobs, std::optional<double> metric = std::nullopt);

  // All checkpoints with a good manifest and sizes, oldest first. Others are added to `skipped` with a reason.
  std::vector<CheckpointInfo> list(std::vector<SkippedCheckpoint>* skipped = nullptr) const;

  // The newest (best) checkpoint whose checksums are right; damaged ones are added to `skipped`, and the one before is
  // taken. Empty when there is none. best() looks at checkpoints that have a metric alone.
  std::optional<CheckpointInfo> latest(std::vector<SkippedCheckpoint>* skipped = nullptr) const;
  std::optional<CheckpointInfo> best(std::vector<SkippedCheckpoint>* skipped = nullptr) const;

  // The checkpoint of a step, verified. Errors: frit::Error saying why it cannot be used.
  CheckpointInfo at(int64_t step) const;

  // Removes checkpoints of later steps, damaged ones too: a run that resumes at `step` calls it, so that what it leaves
  // behind is not found again. Errors: frit::Error, removing nothing, unless the checkpoint of `step` verifies; step 0
  // needs none.
  void drop_after(int64_t step);

  const std::filesystem::path& directory() const { return directory_; }
  const CheckpointOptions& options() const { return options_; }

 private:
  void operation(std::string_view what) const;
  void remove_checkpoint(const std::filesystem::path& path);
  void prune(int64_t just_saved);

  std::filesystem::path directory_;
  CheckpointOptions options_;
};

// Reads every file and compares checksums; returns what is wrong, empty when all is well.
std::string verify_checkpoint(const CheckpointInfo& checkpoint);

// Reads one blob, verified. Errors: frit::Error if it is missing or damaged; for the second form also if the sizes
// differ.
std::string read_blob(const CheckpointInfo& checkpoint, std::string_view name);
void read_blob(const CheckpointInfo& checkpoint, std::string_view name, std::span<std::byte> into);

}  // namespace frit
