// Safetensors files: a memory-mapped reader that trusts nothing in the file, and a writer that replaces it atomically.
// Format: u64 length of the header (little endian), the header (JSON: name -> dtype, shape, data_offsets;
// "__metadata__" -> strings), then the tensors' bytes, one behind the other without gaps. Source: the format's
// description at github.com/huggingface/safetensors.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "frit/core/tensor.h"

namespace frit {

// Reads one file. Tensors are views of the mapping and live as long as this object; they may be unaligned for their
// dtype, so read them with convert_to_f32 or memcpy.
class SafetensorsFile {
 public:
  struct Entry {
    std::string name;
    DType dtype = DType::kF32;
    Shape shape;
    const void* data = nullptr;
    int64_t bytes = 0;
  };

  // Errors: frit::Error naming the file and what is wrong: not readable, shorter than it says, a header that is not
  // JSON, a dtype that Frit does not hold (f32, f64, bf16, f16, i32, i64, u8 are), negative or overflowing sizes,
  // offsets that leave the file, overlap, leave gaps or disagree with the shape.
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  const std::vector<Entry>& entries() const { return entries_; }  // in file order
  const Entry* find(std::string_view name) const;                 // null if the file has no such tensor
  const Entry& at(std::string_view name) const;                   // Errors: frit::Error naming file and tensor
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  void parse();
  std::string path_;
  const char* data_ = nullptr;
  uint64_t size_ = 0;
  std::vector<Entry> entries_;
  std::map<std::string, size_t, std::less<>> index_;
  std::map<std::string, std::string> metadata_;
};

// The tensors of a model directory: model.safetensors, or the shards that model.safetensors.index.json names.
// Errors: frit::Error if the directory has neither (it says so when it holds only pytorch_model.bin), or a tensor is in
// two shards.
class ModelTensors {
 public:
  explicit ModelTensors(const std::string& directory);
  ~ModelTensors();
  ModelTensors(const ModelTensors&) = delete;
  ModelTensors& operator=(const ModelTensors&) = delete;
  const SafetensorsFile::Entry* find(std::string_view name) const;
  std::vector<std::string> names() const;  // sorted

 private:
  std::vector<SafetensorsFile*> files_;
};

// Converts a floating-point tensor of a file to fp32. Errors: frit::Error naming the tensor if it holds integers.
void convert_to_f32(const SafetensorsFile::Entry& entry, float* values);

// Writes one file: declare all tensors, then give their bytes in the order of declaration, then finish. The data goes
// to a temporary name beside `path`; finish() flushes it to the disk and renames it, so that a reader sees the old file
// or the whole new one. Without finish() the temporary file is removed. Errors: frit::Error with the path and the
// system's reason if writing fails.
class SafetensorsWriter {
 public:
  explicit SafetensorsWriter(std::string path, std::map<std::string, std::string> metadata = {{"format", "pt"}});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // Errors: std::invalid_argument if the name is taken or writing has begun.
  void declare(std::string name, DType dtype, Shape shape);
  // The next tensor's bytes. Errors: std::invalid_argument if it is not `name`'s turn, or the size differs.
  void write(std::string_view name, const void* data, int64_t bytes);
  void finish();

 private:
  struct Declared {
    std::string name;
    DType dtype;
    Shape shape;
    int64_t bytes;
  };
  void begin();
  void put(const void* data, uint64_t bytes);
  std::string path_, temporary_;
  std::map<std::string, std::string> metadata_;
  std::vector<Declared> tensors_;
  size_t next_ = 0;
  int file_ = -1;
};

// Writes contiguous tensors under their names, in one call.
void save_safetensors(const std::string& path, const std::vector<std::pair<std::string, Tensor>>& tensors,
                      const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

}  // namespace frit
