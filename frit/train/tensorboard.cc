#include "frit/train/tensorboard.h"

#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>

#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/train/crc32c.h"

namespace frit {
namespace {

// The protobuf wire format (protobuf.dev/programming-guides/encoding): a field is its number and wire type, then a
// varint (type 0), 8 bytes (1), a length and bytes (2) or 4 bytes (5).
template <typename T>
std::string little_endian(T value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof(T); ++i) bytes += static_cast<char>((value >> (8 * i)) & 255);
  return bytes;
}

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 128; value >>= 7) bytes += static_cast<char>(value | 128);
  return bytes + static_cast<char>(value);
}

std::string key(int field, int wire_type) {
  return varint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(wire_type));
}
std::string integer_field(int field, int64_t value) {
  return key(field, 0) + varint(static_cast<uint64_t>(value));
}
std::string double_field(int field, double value) {
  return key(field, 1) + little_endian(std::bit_cast<uint64_t>(value));
}
std::string float_field(int field, float value) {
  return key(field, 5) + little_endian(std::bit_cast<uint32_t>(value));
}
std::string bytes_field(int field, std::string_view bytes) {
  return key(field, 2) + varint(bytes.size()) + std::string(bytes);
}

// Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; SessionLog session_log =
// 7; }
std::string event(double wall_time, int64_t step, int field, std::string_view content) {
  return double_field(1, wall_time) + (step != 0 ? integer_field(2, step) : "") + bytes_field(field, content);
}

// Summary { repeated Value value = 1; }   Value { string tag = 1; float simple_value = 2; TensorProto tensor = 8;
// SummaryMetadata metadata = 9; }
std::string summary_event(double wall_time, int64_t step, std::string_view tag, std::string_view rest) {
  return event(wall_time, step, 5, bytes_field(1, bytes_field(1, tag) + std::string(rest)));
}

}  // namespace

std::string tfrecord(std::string_view data) {
  const std::string length = little_endian(static_cast<uint64_t>(data.size()));
  return length + little_endian(masked_crc32c(length)) + std::string(data) + little_endian(masked_crc32c(data));
}

std::string version_event(double wall_time) {
  return event(wall_time, 0, 3, "brain.Event:2");
}

// SessionLog { SessionStatus status = 1; }, START = 1.
std::string session_start_event(double wall_time, int64_t step) {
  return event(wall_time, step, 7, integer_field(1, 1));
}

std::string scalar_event(double wall_time, int64_t step, std::string_view tag, float value) {
  return summary_event(wall_time, step, tag, float_field(2, value));
}

std::string text_event(double wall_time, int64_t step, std::string_view tag, std::string_view text) {
  // TensorProto { DataType dtype = 1 (DT_STRING = 7); TensorShapeProto tensor_shape = 2 { Dim dim = 2 { int64 size = 1;
  // } }; repeated bytes string_val = 8; }   SummaryMetadata { PluginData plugin_data = 1 { string plugin_name = 1; } }
  const std::string shape = bytes_field(2, integer_field(1, 1));
  const std::string tensor = integer_field(1, 7) + bytes_field(2, shape) + bytes_field(8, text);
  const std::string metadata = bytes_field(1, bytes_field(1, "text"));
  return summary_event(wall_time, step, tag, bytes_field(8, tensor) + bytes_field(9, metadata));
}

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& directory, double wall_time, int64_t first_step) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) fail("[tensorboard] cannot make folder {}: {}", directory.string(), error.message());
  char host[256] = "localhost";
  if (::gethostname(host, sizeof host - 1) != 0) std::strcpy(host, "localhost");
  for (int n = 0; fd_ < 0; ++n) {
    // TensorBoard reads a folder's files in the order of their names: the time comes first, in ten digits.
    path_ = directory / fmt::format("events.out.tfevents.{:010.0f}.{}.{}.{}", wall_time, host, ::getpid(), n);
    fd_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd_ < 0 && errno != EEXIST) fail("[tensorboard] cannot create {}: {}", path_.string(), std::strerror(errno));
  }
  write(version_event(wall_time));
  if (first_step > 0) write(session_start_event(wall_time, first_step));
}

TensorBoardWriter::~TensorBoardWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void TensorBoardWriter::scalar(std::string_view tag, double value, int64_t step, double wall_time) {
  write(scalar_event(wall_time, step, tag, static_cast<float>(value)));
}

void TensorBoardWriter::text(std::string_view tag, std::string_view text, int64_t step, double wall_time) {
  write(text_event(wall_time, step, tag, text));
}

void TensorBoardWriter::write(std::string_view event) {
  write_all(fd_, tfrecord(event), path_);
}

}  // namespace frit
