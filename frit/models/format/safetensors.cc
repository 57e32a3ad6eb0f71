#include "frit/models/format/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "frit/core/error.h"
#include "frit/core/file.h"

namespace frit {
namespace {

using nlohmann::json;

// The reference implementation's limit on the header.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
// Our headers end where the data starts at a multiple of this, so that a mapped tensor is aligned for SIMD when sizes
// allow.
constexpr uint64_t kDataAlignment = 256;

struct DTypeName {
  const char* name;
  DType dtype;
};
constexpr DTypeName kDTypes[] = {{"F32", DType::kF32}, {"BF16", DType::kBF16}, {"F16", DType::kF16},
                                 {"I32", DType::kI32}, {"I64", DType::kI64},   {"U8", DType::kU8},
                                 {"F64", DType::kF64}};

const char* file_name_of(DType dtype) {
  for (const DTypeName& d : kDTypes)
    if (d.dtype == dtype) return d.name;
  return "?";
}

std::string reason() {
  return std::strerror(errno);
}

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

// A non-negative integer of the header that fits int64.
int64_t read_size(const json& value, const std::string& path, const std::string& tensor, const char* what) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
    fail("[safetensors] {}: tensor {}: {} holds {}, expected an integer of 0 or more", path, tensor, what,
         value.dump());
  return static_cast<int64_t>(value.get<uint64_t>());
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  Descriptor d{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (d.fd < 0) fail("[safetensors] cannot open {}: {}", path, reason());
  struct stat status {};
  if (::fstat(d.fd, &status) != 0) fail("[safetensors] cannot read {}: {}", path, reason());
  if (!S_ISREG(status.st_mode)) fail("[safetensors] {} is not a regular file", path);
  size_ = static_cast<uint64_t>(status.st_size);
  if (size_ < 8) fail("[safetensors] {} has {} bytes, too short for a header", path, size_);
  void* mapping = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, d.fd, 0);
  if (mapping == MAP_FAILED) fail("[safetensors] cannot map {}: {}", path, reason());
  data_ = static_cast<const char*>(mapping);
  try {
    parse();
  } catch (...) {
    ::munmap(mapping, size_);
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() {
  ::munmap(const_cast<char*>(data_), size_);
}

void SafetensorsFile::parse() {
  uint64_t header_bytes = 0;
  for (int i = 0; i < 8; ++i) header_bytes |= static_cast<uint64_t>(static_cast<unsigned char>(data_[i])) << (8 * i);
  if (header_bytes > kMaxHeaderBytes)
    fail("[safetensors] {}: the header says it has {} bytes, at most {} are allowed (is this a safetensors file?)",
         path_, header_bytes, kMaxHeaderBytes);
  if (header_bytes > size_ - 8)
    fail("[safetensors] {}: the header says it has {} bytes, the file has {}", path_, header_bytes, size_);
  const char* begin = data_ + 8;
  const uint64_t data_bytes = size_ - 8 - header_bytes;
  const char* data = begin + header_bytes;

  // Repeated names: later ones would replace earlier ones in silence.
  std::set<std::string> names;
  std::string repeated;
  const json::parser_callback_t note_names = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::key && depth == 1 && !names.insert(parsed.get<std::string>()).second)
      repeated = parsed.get<std::string>();
    return true;
  };
  json header;
  try {
    header = json::parse(begin, begin + header_bytes, note_names);
  } catch (const json::exception& error) {
    fail("[safetensors] {}: the header is not JSON: {}", path_, error.what());
  }
  if (!header.is_object()) fail("[safetensors] {}: the header is not a JSON object", path_);
  if (!repeated.empty()) fail("[safetensors] {}: tensor {} is listed twice", path_, repeated);

  struct Range {
    int64_t begin, end;
    Entry entry;
  };
  std::vector<Range> ranges;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) fail("[safetensors] {}: __metadata__ is not an object of strings", path_);
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) fail("[safetensors] {}: __metadata__ is not an object of strings", path_);
        metadata_[key] = text.get<std::string>();
      }
      continue;
    }
    if (!value.is_object() || !value.contains("dtype") || !value["dtype"].is_string() || !value.contains("shape") ||
        !value["shape"].is_array() || !value.contains("data_offsets") || !value["data_offsets"].is_array() ||
        value["data_offsets"].size() != 2)
      fail("[safetensors] {}: tensor {} lacks a dtype, a shape or two data_offsets: {}", path_, name, value.dump());
    Range range{};
    range.entry.name = name;
    const std::string dtype = value["dtype"].get<std::string>();
    const auto* known =
        std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const DTypeName& d) { return dtype == d.name; });
    if (known == std::end(kDTypes))
      fail("[safetensors] {}: tensor {} has dtype {}, expected F32, F64, BF16, F16, I32, I64 or U8", path_, name,
           dtype);
    range.entry.dtype = known->dtype;
    if (value["shape"].size() > Shape::kMaxRank)
      fail("[safetensors] {}: tensor {} has {} dimensions, at most {} are supported", path_, name,
           value["shape"].size(), +Shape::kMaxRank);
    std::vector<int64_t> dims;
    int64_t bytes = size_of(range.entry.dtype);
    bool overflow = false;
    for (const json& d : value["shape"]) {
      dims.push_back(read_size(d, path_, name, "shape"));
      overflow = overflow || __builtin_mul_overflow(bytes, dims.back(), &bytes);
    }
    // A zero anywhere makes the tensor empty, whatever overflowed on the way.
    if (std::find(dims.begin(), dims.end(), 0) != dims.end()) bytes = 0, overflow = false;
    range.begin = read_size(value["data_offsets"][0], path_, name, "data_offsets");
    range.end = read_size(value["data_offsets"][1], path_, name, "data_offsets");
    if (range.begin > range.end || static_cast<uint64_t>(range.end) > data_bytes)
      fail("[safetensors] {}: tensor {} lies at bytes {}..{}, the file holds {} bytes of data", path_, name,
           range.begin, range.end, data_bytes);
    if (overflow || bytes != range.end - range.begin)
      fail("[safetensors] {}: tensor {} of {} {} takes {} bytes, its offsets span {}", path_, name, dtype,
           value["shape"].dump(), overflow ? std::string("more than 2^63") : std::to_string(bytes),
           range.end - range.begin);
    switch (dims.size()) {
      case 0:
        range.entry.shape = Shape{};
        break;
      case 1:
        range.entry.shape = Shape{dims[0]};
        break;
      case 2:
        range.entry.shape = Shape{dims[0], dims[1]};
        break;
      case 3:
        range.entry.shape = Shape{dims[0], dims[1], dims[2]};
        break;
      case 4:
        range.entry.shape = Shape{dims[0], dims[1], dims[2], dims[3]};
        break;
      case 5:
        range.entry.shape = Shape{dims[0], dims[1], dims[2], dims[3], dims[4]};
        break;
      default:
        range.entry.shape = Shape{dims[0], dims[1], dims[2], dims[3], dims[4], dims[5]};
        break;
    }
    range.entry.data = data + range.begin;
    range.entry.bytes = bytes;
    ranges.push_back(std::move(range));
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  int64_t end = 0;
  for (Range& range : ranges) {
    if (range.begin != end)
      fail("[safetensors] {}: tensor {} starts at byte {} where {} was expected: tensors overlap or leave a gap", path_,
           range.entry.name, range.begin, end);
    end = range.end;
    index_[range.entry.name] = entries_.size();
    entries_.push_back(std::move(range.entry));
  }
  if (static_cast<uint64_t>(end) != data_bytes)
    fail("[safetensors] {}: the tensors take {} bytes, the file holds {} bytes of data", path_, end, data_bytes);
}

const SafetensorsFile::Entry* SafetensorsFile::find(std::string_view name) const {
  auto it = index_.find(name);
  return it == index_.end() ? nullptr : &entries_[it->second];
}

const SafetensorsFile::Entry& SafetensorsFile::at(std::string_view name) const {
  const Entry* entry = find(name);
  if (!entry) fail("[safetensors] {} has no tensor {}", path_, name);
  return *entry;
}

ModelTensors::ModelTensors(const std::string& directory) {
  namespace fs = std::filesystem;
  const fs::path base(directory);
  std::vector<std::string> paths;
  if (fs::exists(base / "model.safetensors")) {
    paths.push_back((base / "model.safetensors").string());
  } else if (fs::exists(base / "model.safetensors.index.json")) {
    const std::string index_path = (base / "model.safetensors.index.json").string();
    std::set<std::string> shards;
    try {
      const json index = json::parse(read_file(index_path));
      for (const auto& [tensor, shard] : index.at("weight_map").items()) {
        const std::string file = shard.get<std::string>();
        if (fs::path(file).filename() != fs::path(file))
          fail("[model] {}: shard {} is not a plain file name", index_path, file);
        shards.insert(file);
      }
    } catch (const json::exception& error) {
      fail("[model] {} is not an index of shards: {}", index_path, error.what());
    }
    for (const std::string& shard : shards) paths.push_back((base / shard).string());
  } else if (fs::exists(base / "pytorch_model.bin")) {
    fail(
        "[model] {} holds pytorch_model.bin but no model.safetensors: save it again with transformers' save_pretrained",
        directory);
  } else {
    fail("[model] {} holds no model.safetensors", directory);
  }
  try {
    std::set<std::string> seen;
    for (const std::string& path : paths) {
      files_.push_back(new SafetensorsFile(path));
      for (const auto& entry : files_.back()->entries())
        if (!seen.insert(entry.name).second) fail("[model] {}: tensor {} is in two shards", directory, entry.name);
    }
  } catch (...) {
    for (SafetensorsFile* file : files_) delete file;
    throw;
  }
}

ModelTensors::~ModelTensors() {
  for (SafetensorsFile* file : files_) delete file;
}

const SafetensorsFile::Entry* ModelTensors::find(std::string_view name) const {
  for (const SafetensorsFile* file : files_)
    if (const auto* entry = file->find(name)) return entry;
  return nullptr;
}

std::vector<std::string> ModelTensors::names() const {
  std::vector<std::string> names;
  for (const SafetensorsFile* file : files_)
    for (const auto& entry : file->entries()) names.push_back(entry.name);
  std::sort(names.begin(), names.end());
  return names;
}

void convert_to_f32(const SafetensorsFile::Entry& entry, float* values) {
  const int64_t n = entry.shape.numel();
  const char* data = static_cast<const char*>(entry.data);
  const auto convert = [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < n; ++i) {
      T value;
      std::memcpy(&value, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
      values[i] = static_cast<float>(value);
    }
  };
  switch (entry.dtype) {
    case DType::kF32:
      if (n > 0) std::memcpy(values, data, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::kF64:
      return convert(double{});
    case DType::kBF16:
      return convert(bfloat16{});
    case DType::kF16:
      return convert(float16{});
    default:
      fail("[safetensors] tensor {} holds {}, expected floating-point numbers", entry.name, name_of(entry.dtype));
  }
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::map<std::string, std::string> metadata)
    : path_(std::move(path)), temporary_(temporary_name(path_)), metadata_(std::move(metadata)) {}

SafetensorsWriter::~SafetensorsWriter() {
  if (file_ >= 0) {
    ::close(file_);
    ::unlink(temporary_.c_str());
  }
}

void SafetensorsWriter::declare(std::string name, DType dtype, Shape shape) {
  FRIT_CHECK(file_ < 0, "[safetensors] {}: tensor {} declared after writing began", path_, name);
  FRIT_CHECK(name != "__metadata__", "[safetensors] __metadata__ is no name for a tensor");
  for (const Declared& t : tensors_)
    FRIT_CHECK(t.name != name, "[safetensors] {}: tensor {} declared twice", path_, name);
  tensors_.push_back({std::move(name), dtype, shape, shape.numel() * size_of(dtype)});
}

void SafetensorsWriter::begin() {
  nlohmann::ordered_json header;
  if (!metadata_.empty()) header["__metadata__"] = metadata_;
  int64_t offset = 0;
  for (const Declared& t : tensors_) {
    std::vector<int64_t> dims;
    for (int i = 0; i < t.shape.rank(); ++i) dims.push_back(t.shape[i]);
    header[t.name] = {{"dtype", file_name_of(t.dtype)}, {"shape", dims}, {"data_offsets", {offset, offset + t.bytes}}};
    offset += t.bytes;
  }
  std::string text = header.is_null() ? "{}" : header.dump();
  while ((8 + text.size()) % kDataAlignment != 0) text += ' ';
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) fail("[safetensors] cannot create {}: {}", temporary_, reason());
  unsigned char length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(static_cast<uint64_t>(text.size()) >> (8 * i));
  put(length, 8);
  put(text.data(), text.size());
}

void SafetensorsWriter::put(const void* data, uint64_t bytes) {
  write_all(file_, data, bytes, temporary_);
}

void SafetensorsWriter::write(std::string_view name, const void* data, int64_t bytes) {
  FRIT_CHECK(next_ < tensors_.size() && tensors_[next_].name == name,
             "[safetensors] {}: tensor {} written, expected {}", path_, name,
             next_ < tensors_.size() ? tensors_[next_].name : std::string("none"));
  FRIT_CHECK(bytes == tensors_[next_].bytes, "[safetensors] {}: tensor {} given {} bytes, declared with {}", path_,
             name, bytes, tensors_[next_].bytes);
  if (file_ < 0) begin();
  put(data, static_cast<uint64_t>(bytes));
  ++next_;
}

void SafetensorsWriter::finish() {
  FRIT_CHECK(next_ == tensors_.size(), "[safetensors] {}: finished after {} of {} tensors", path_, next_,
             tensors_.size());
  if (file_ < 0) begin();
  finish_file(file_, temporary_, path_);
  ::close(std::exchange(file_, -1));
}

void save_safetensors(const std::string& path, const std::vector<std::pair<std::string, Tensor>>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  SafetensorsWriter writer(path, metadata);
  for (const auto& [name, tensor] : tensors) {
    FRIT_CHECK(tensor.contiguous(), "[safetensors] tensor {} is a view with gaps between its rows", name);
    writer.declare(name, tensor.dtype(), tensor.shape());
  }
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor.raw(), tensor.bytes());
  writer.finish();
}

}  // namespace frit
