#include "frit/train/tensorboard.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/train/crc32c.h"

namespace frit {
namespace {

namespace fs = std::filesystem;

TEST(Crc32c, EqualsPublishedValues) {
  EXPECT_EQ(crc32c(std::string_view("")), 0u);
  EXPECT_EQ(crc32c(std::string_view("123456789")), 0xE3069283u);  // the check value of the polynomial
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);          // RFC 3720, B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43u);
}

TEST(Crc32c, TablesEqualTheInstruction) {
  std::string text;
  for (int i = 0; i < 300; ++i) {
    const auto bytes = std::as_bytes(std::span(text));
    EXPECT_EQ(crc32c_by_tables(bytes, 7u * static_cast<uint32_t>(i)), crc32c(bytes, 7u * static_cast<uint32_t>(i)))
        << i;
    text += static_cast<char>(i * 37);
  }
  EXPECT_EQ(crc32c_by_tables(std::as_bytes(std::span(std::string_view("123456789")))), 0xE3069283u);
}

TEST(Crc32c, PiecesAddUp) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += static_cast<char>(i * 37);
  for (size_t cut = 0; cut <= text.size(); ++cut)
    EXPECT_EQ(crc32c(std::string_view(text).substr(cut), crc32c(std::string_view(text).substr(0, cut))), crc32c(text));
}

std::string hex(std::string_view bytes) {
  std::string text;
  for (unsigned char c : bytes) text += fmt::format("{:02x}", c);
  return text;
}

// Made by tools/goldens/make_tensorboard.py with the tensorboard package's own messages and record writer.
TEST(TensorBoard, BytesEqualThePackages) {
  const char* root = std::getenv("FRIT_SOURCE_DIR");
  const auto golden =
      nlohmann::json::parse(read_file(std::string(root != nullptr ? root : ".") + "/tests/goldens/tensorboard.json"));
  const double time = 1700000000.25;
  EXPECT_EQ(hex(tfrecord(version_event(time))), golden["version"]);
  EXPECT_EQ(hex(tfrecord(session_start_event(time, 201))), golden["session_start"]);
  EXPECT_EQ(hex(tfrecord(scalar_event(time, 300, "train/loss", 3.14159f))), golden["scalar"]);
  EXPECT_EQ(hex(tfrecord(scalar_event(time, 0, "lr", -1e-30f))), golden["scalar_step_0"]);
  EXPECT_EQ(hex(tfrecord(scalar_event(time, int64_t{1} << 40, std::string(200, 'x'), NAN))),
            golden["scalar_large_step"]);
  EXPECT_EQ(hex(tfrecord(text_event(time, 7, "sample", "Größe → 1,5 m"))), golden["text"]);
  EXPECT_EQ(hex(tfrecord(text_event(time, 128, "config", std::string(1000, 'a')))), golden["text_long"]);
}

TEST(TensorBoard, WritesWholeRecordsAtOnce) {
  const fs::path dir = fs::path(testing::TempDir()) / "frit_tensorboard";
  fs::remove_all(dir);
  TensorBoardWriter first(dir, 1700000000);
  std::string expected = tfrecord(version_event(1700000000));
  EXPECT_EQ(read_file(first.path()), expected);
  first.scalar("loss", 2.5, 10, 1700000001);
  expected += tfrecord(scalar_event(1700000001, 10, "loss", 2.5f));
  EXPECT_EQ(read_file(first.path()), expected);  // without closing
  first.text("note", "hi", 11, 1700000002);
  expected += tfrecord(text_event(1700000002, 11, "note", "hi"));
  EXPECT_EQ(read_file(first.path()), expected);
  // The same second and process: another name, and the resumed step is announced.
  TensorBoardWriter second(dir, 1700000000, 11);
  EXPECT_NE(second.path(), first.path());
  EXPECT_EQ(read_file(second.path()),
            tfrecord(version_event(1700000000)) + tfrecord(session_start_event(1700000000, 11)));
  EXPECT_EQ(second.path().filename().string().rfind("events.out.tfevents.1700000000.", 0), 0u);
  fs::remove_all(dir);
}

TEST(TensorBoard, FolderThatCannotBeIsAnError) {
  EXPECT_THROW(TensorBoardWriter("/dev/null/x", 0), Error);
}

}  // namespace
}  // namespace frit
