#include "frit/core/file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <random>

#include "frit/core/error.h"

namespace frit {
namespace {

namespace fs = std::filesystem;

class FileTest : public testing::Test {
 protected:
  FileTest() { fs::create_directories(folder_); }
  ~FileTest() override { fs::remove_all(folder_); }
  int64_t entries() const { return std::distance(fs::directory_iterator(folder_), fs::directory_iterator()); }
  const fs::path folder_ = fs::temp_directory_path() / ("frit-file-" + std::to_string(std::random_device{}()));
};

TEST_F(FileTest, WhatIsWrittenIsRead) {
  const fs::path path = folder_ / "a";
  for (const size_t size : {size_t{0}, size_t{1}, size_t{65536}, size_t{200001}}) {
    std::string bytes(size, '\0');
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(i * 7);
    write_file_atomically(path, bytes);
    EXPECT_EQ(read_file(path), bytes);
  }
  EXPECT_EQ(entries(), 1);
}

TEST_F(FileTest, FailuresNameThePathAndLeaveNothing) {
  try {
    read_file(folder_ / "none");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()),
              "[file] cannot open " + (folder_ / "none").string() + ": No such file or directory");
  }
  fs::create_directories(folder_ / "taken" / "below");
  EXPECT_THROW(write_file_atomically(folder_ / "taken", "x"), Error);  // a folder that is not empty cannot be replaced
  EXPECT_EQ(entries(), 1);
  EXPECT_THROW(write_file_atomically(folder_ / "none" / "a", "x"), Error);
  EXPECT_THROW(read_file(folder_), Error);
}

TEST_F(FileTest, TemporaryNamesDiffer) {
  EXPECT_NE(temporary_name("a"), temporary_name("a"));
}

}  // namespace
}  // namespace frit
