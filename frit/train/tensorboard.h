// Writes TensorBoard event files: TFRecord frames of hand-encoded protobuf messages, scalars and texts.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace frit {

// One TFRecord: length, masked CRC-32C of the length, data, masked CRC-32C of the data (all little-endian).
std::string tfrecord(std::string_view data);

// Protobuf `Event` messages (tensorflow/core/util/event.proto), serialised. wall_time in seconds since 1970.
std::string version_event(double wall_time);
std::string session_start_event(double wall_time, int64_t step);
std::string scalar_event(double wall_time, int64_t step, std::string_view tag, float value);
std::string text_event(double wall_time, int64_t step, std::string_view tag, std::string_view text);

// One event file of a run directory. A resumed run opens another file: its session-start event at `first_step` makes
// TensorBoard drop what earlier files hold from that step on.
class TensorBoardWriter {
 public:
  // Creates events.out.tfevents.SECONDS.HOST.PID.N in `directory` (made if missing), N counting up from 0 to a free
  // name. Errors: frit::Error if it cannot be written.
  TensorBoardWriter(const std::filesystem::path& directory, double wall_time, int64_t first_step = 0);
  TensorBoardWriter(const TensorBoardWriter&) = delete;
  TensorBoardWriter& operator=(const TensorBoardWriter&) = delete;
  ~TensorBoardWriter();

  // Each event is on its way to the disk (one write) when the call returns.
  void scalar(std::string_view tag, double value, int64_t step, double wall_time);
  void text(std::string_view tag, std::string_view text, int64_t step, double wall_time);

  const std::filesystem::path& path() const { return path_; }

 private:
  void write(std::string_view event);
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace frit
