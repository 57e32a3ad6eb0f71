#include "frit/models/format/safetensors.h"
#include "frit/core/file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

namespace frit {
namespace {

// A directory that is removed with everything in it.
class SafetensorsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "frit-safetensors-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  std::string path(const char* name = "model.safetensors") const { return (directory_ / name).string(); }

  // Writes a file of a header and `data_bytes` zeros, the header's length as given or as it is.
  std::string file(const std::string& header, size_t data_bytes, int64_t length = -1) {
    const uint64_t n = length < 0 ? header.size() : static_cast<uint64_t>(length);
    std::ofstream out(path("hostile.safetensors"), std::ios::binary);
    for (int i = 0; i < 8; ++i) out.put(static_cast<char>(n >> (8 * i)));
    out << header << std::string(data_bytes, '\0');
    return path("hostile.safetensors");
  }
  // The message of the error that reading the file gives.
  static std::string error_of(const std::string& path) {
    try {
      SafetensorsFile file(path);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  std::filesystem::path directory_;
};

TEST_F(SafetensorsTest, ReturnsWhatWasWritten) {
  float a[6] = {1, -2, 3, 4, 5, 6.5f};
  bfloat16 b[3] = {bfloat16(1.0f), bfloat16(-0.5f), bfloat16(3e38f)};
  float16 c[2] = {float16(0.25f), float16(-7.0f)};
  int32_t d[1] = {-5};
  int64_t e[2] = {1ll << 40, -1};
  save_safetensors(path(), {{"a", Tensor(a, DType::kF32, {2, 3})},
                            {"b", Tensor(b, DType::kBF16, {3})},
                            {"c", Tensor(c, DType::kF16, {1, 2})},
                            {"d", Tensor(d, DType::kI32, Shape{})},
                            {"e", Tensor(e, DType::kI64, {2})},
                            {"empty", Tensor(nullptr, DType::kF32, {0, 4})}});
  const SafetensorsFile in(path());
  EXPECT_EQ(in.entries().size(), 6u);
  EXPECT_EQ(in.metadata().at("format"), "pt");
  EXPECT_EQ(in.at("a").shape, (Shape{2, 3}));
  EXPECT_EQ(std::memcmp(in.at("a").data, a, sizeof(a)), 0);
  EXPECT_EQ(std::memcmp(in.at("b").data, b, sizeof(b)), 0);
  EXPECT_EQ(std::memcmp(in.at("e").data, e, sizeof(e)), 0);
  EXPECT_EQ(in.at("d").shape.rank(), 0);
  EXPECT_EQ(in.at("empty").bytes, 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(in.at("a").data) % 256, 0u);
  float values[3];
  convert_to_f32(in.at("b"), values);
  EXPECT_EQ(values[1], -0.5f);
  convert_to_f32(in.at("c"), values);
  EXPECT_EQ(values[1], -7.0f);
  EXPECT_THROW(convert_to_f32(in.at("e"), values), Error);
  EXPECT_EQ(in.find("z"), nullptr);
  EXPECT_THROW(in.at("z"), Error);
}

TEST_F(SafetensorsTest, WriterLeavesTheOldFileUntilItHasFinished) {
  float a[1] = {1}, b[1] = {2};
  save_safetensors(path(), {{"a", Tensor(a, DType::kF32, {1})}});
  {
    SafetensorsWriter writer(path());
    writer.declare("b", DType::kF32, {1});
    EXPECT_THROW(writer.declare("b", DType::kF32, {1}), std::invalid_argument);
    EXPECT_THROW(writer.write("b", b, 3), std::invalid_argument);
    EXPECT_THROW(writer.write("a", b, 4), std::invalid_argument);
    writer.write("b", b, 4);
  }
  EXPECT_NE(SafetensorsFile(path()).find("a"), nullptr);
  // Nothing is left of the abandoned file.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_), {}), 1);
  EXPECT_THROW(save_safetensors(path("no/such/directory"), {{"a", Tensor(a, DType::kF32, {1})}}), Error);
}

TEST_F(SafetensorsTest, RefusesHostileFiles) {
  const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  EXPECT_EQ(error_of(file(good, 8)), "");
  const struct {
    const char* header;
    size_t data_bytes;
    int64_t length;
    const char* says;
  } cases[] = {
      {good.c_str(), 7, -1, "lies at bytes 0..8"},
      {good.c_str(), 9, -1, "the tensors take 8 bytes"},
      {good.c_str(), 8, 1 << 20, "the file has"},
      {good.c_str(), 8, INT64_MAX, "at most"},
      {"{", 0, -1, "not JSON"},
      {"[]", 0, -1, "not a JSON object"},
      {"", 0, -1, "not JSON"},
      {R"({"a":3})", 0, -1, "lacks"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", 8, -1, "lacks"},
      {R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", 8, -1, "lacks"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8, -1, "lacks"},
      {R"({"a":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}})", 8, -1, "F8_E4M3"},
      {R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, -1, "integer"},
      {R"({"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}})", 8, -1, "integer"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", 8, -1, "integer"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, -1, "lies at bytes"},
      {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8, -1, "takes 12 bytes"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}})", 0, -1, "more than 2^63"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0, -1, "more than 2^63"},
      {R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]}})", 8, -1, "integer"},
      {R"({"a":{"dtype":"F32","shape":[99999999999999999999999],"data_offsets":[0,8]}})", 8, -1, "integer"},
      {R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1, -1, "dimensions"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
       12, -1, "overlap"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})",
       12, -1, "gap"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8, -1, "gap"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       8, -1, "twice"},
      {R"({"__metadata__":{"x":1}})", 0, -1, "__metadata__"},
      {R"({"__metadata__":[]})", 0, -1, "__metadata__"},
  };
  for (const auto& c : cases) {
    const std::string error = error_of(file(c.header, c.data_bytes, c.length));
    EXPECT_NE(error.find(c.says), std::string::npos) << c.header << "\n" << error;
  }
  std::ofstream(path("short"), std::ios::binary) << "1234567";
  EXPECT_NE(error_of(path("short")).find("too short"), std::string::npos);
  EXPECT_NE(error_of(path("absent")).find("cannot open"), std::string::npos);
  EXPECT_NE(error_of(directory_.string()).find("not a regular file"), std::string::npos);
  // A header nested deeper than any stack.
  EXPECT_NE(error_of(file(std::string(1 << 20, '['), 0)).find("not JSON"), std::string::npos);
}

TEST_F(SafetensorsTest, EveryTruncationAndEveryFlippedHeaderByteIsRefusedOrRead) {
  float a[4] = {1, 2, 3, 4};
  save_safetensors(path(), {{"a", Tensor(a, DType::kF32, {2, 2})}});
  const std::string whole = read_file(path());
  for (size_t n = 0; n < whole.size(); n += 7) {
    std::ofstream(path("cut"), std::ios::binary) << whole.substr(0, n);
    EXPECT_NE(error_of(path("cut")), "") << n;
  }
  for (size_t i = 0; i < 120; ++i) {
    for (int bit = 0; bit < 8; bit += 3) {
      std::string changed = whole;
      changed[i] = static_cast<char>(changed[i] ^ (1 << bit));
      std::ofstream(path("flipped"), std::ios::binary) << changed;
      try {
        const SafetensorsFile in(path("flipped"));
        for (const auto& entry : in.entries()) {  // whatever was accepted lies inside the file
          std::vector<char> copy(static_cast<size_t>(entry.bytes));
          if (entry.bytes) std::memcpy(copy.data(), entry.data, copy.size());
        }
      } catch (const Error&) {
      }
    }
  }
}

TEST_F(SafetensorsTest, ReadsShardsByTheirIndex) {
  float a[1] = {1}, b[1] = {2};
  EXPECT_THROW(ModelTensors{directory_.string()}, Error);
  std::ofstream(path("pytorch_model.bin")) << "x";
  try {
    ModelTensors tensors(directory_.string());
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("pytorch_model.bin"), std::string::npos);
  }
  save_safetensors(path("model-1.safetensors"), {{"a", Tensor(a, DType::kF32, {1})}});
  save_safetensors(path("model-2.safetensors"), {{"b", Tensor(b, DType::kF32, {1})}});
  write_file_atomically(path("model.safetensors.index.json"),
                        R"({"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}})");
  const ModelTensors tensors(directory_.string());
  EXPECT_EQ(tensors.names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_NE(tensors.find("b"), nullptr);
  write_file_atomically(path("model.safetensors.index.json"), R"({"weight_map":{"a":"../model-1.safetensors"}})");
  EXPECT_THROW(ModelTensors{directory_.string()}, Error);
  write_file_atomically(path("model.safetensors.index.json"), R"({"weights":{}})");
  EXPECT_THROW(ModelTensors{directory_.string()}, Error);
  save_safetensors(path("model-2.safetensors"), {{"a", Tensor(a, DType::kF32, {1})}});
  write_file_atomically(path("model.safetensors.index.json"),
                        R"({"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}})");
  EXPECT_THROW(ModelTensors{directory_.string()}, Error);
}

}  // namespace
}  // namespace frit
