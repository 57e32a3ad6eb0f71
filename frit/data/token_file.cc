#include "frit/data/token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/core/thread_pool.h"
#include "frit/data/hash.h"

namespace frit {
namespace {

static_assert(std::endian::native == std::endian::little, "the token file is little endian");

constexpr char kMagic[8] = {'F', 'R', 'I', 'T', 'T', 'O', 'K', '\n'};
constexpr uint32_t kVersion = 1;
constexpr int64_t kChunkPairs = 8192;      // tokenised at once
constexpr int64_t kChunkBytes = 16 << 20;  // of text; bounds memory where lines are long

struct Header {
  char magic[8];
  uint32_t version, id_bytes;
  int32_t source_vocabulary, target_vocabulary;
  uint64_t sentences, source_tokens, target_tokens;
  uint64_t tokenizer_hash;  // of the tokenizer that made the ids
  uint64_t origin_hash;     // of what the file was made from: text files, tokenizer, options
  uint64_t body_hash;       // of ids and offsets
  int64_t lines, kept, empty, too_long, invalid_utf8, crlf, bom;
  uint64_t header_hash;  // of everything before
};
static_assert(sizeof(Header) == 136 && offsetof(Header, header_hash) == 128);

uint64_t hash_of(const Header& header) {
  Hash64 hash;
  hash.update(&header, offsetof(Header, header_hash));
  return hash.value();
}

int64_t ids_bytes_padded(const Header& h) {
  const auto bytes = static_cast<int64_t>((h.source_tokens + h.target_tokens) * h.id_bytes);
  return (bytes + 7) / 8 * 8;
}

struct stat stat_of(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) fail("[text] cannot open {}: {}", path, std::strerror(errno));
  return info;
}

uint64_t origin_of(const std::string& source_path, const std::string& target_path, const Tokenizer& tokenizer,
                   const TextOptions& text) {
  Hash64 hash;
  for (const std::string& path : {source_path, target_path}) {
    const struct stat info = stat_of(path);
    hash.update_number(static_cast<uint64_t>(info.st_size));
    hash.update_number(static_cast<uint64_t>(info.st_mtim.tv_sec));
    hash.update_number(static_cast<uint64_t>(info.st_mtim.tv_nsec));
  }
  hash.update_number(tokenizer.hash());
  hash.update_number(static_cast<uint64_t>(text.invalid_utf8));
  hash.update_number(static_cast<uint64_t>(text.max_line_bytes));
  return hash.value();
}

// A file being written: closed and removed unless it was finished.
class OutputFile {
 public:
  explicit OutputFile(std::string path) : path_(std::move(path)), temporary_(temporary_name(path_)) {
    fd_ = ::open(temporary_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd_ < 0) fail("[token_file] cannot write {}: {}", temporary_, std::strerror(errno));
  }
  ~OutputFile() {
    ::close(fd_);
    if (!finished_) ::unlink(temporary_.c_str());
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, size_t bytes) { write_all(fd_, data, bytes, path_); }
  void rewind() {
    if (::lseek(fd_, 0, SEEK_SET) != 0) fail("[token_file] cannot seek in {}: {}", temporary_, std::strerror(errno));
  }
  size_t read(void* data, size_t bytes) {
    ssize_t got;
    do got = ::read(fd_, data, bytes);
    while (got < 0 && errno == EINTR);
    if (got < 0) fail("[token_file] reading {} failed: {}", temporary_, std::strerror(errno));
    return static_cast<size_t>(got);
  }
  void finish() {
    finish_file(fd_, temporary_, path_);
    finished_ = true;
  }

 private:
  std::string path_, temporary_;
  int fd_;
  bool finished_ = false;
};

// One chunk of pairs: text in, ids out.
struct Chunk {
  std::string text;                                  // all lines, one behind the other
  std::vector<std::pair<uint32_t, uint32_t>> spans;  // begin and size of source, target, source, ...
  std::vector<std::vector<int32_t>> ids;             // of each task
  std::vector<std::vector<uint32_t>> lengths;        // of each task
};

}  // namespace

TokenFile TokenFile::build(const std::string& path, const std::string& source_path, const std::string& target_path,
                           const Tokenizer& tokenizer, ThreadPool& pool, const TokenFileOptions& options) {
  Header header = {};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.source_vocabulary = tokenizer.vocabulary_size(Side::kSource);
  header.target_vocabulary = tokenizer.vocabulary_size(Side::kTarget);
  header.id_bytes = std::max(header.source_vocabulary, header.target_vocabulary) <= 65536 ? 2 : 4;
  header.tokenizer_hash = tokenizer.hash();
  header.origin_hash =
      origin_of(source_path, target_path, tokenizer, options.text);  // before reading: a later change shows
  const int64_t total_bytes = stat_of(source_path).st_size + stat_of(target_path).st_size;

  ParallelReader reader(source_path, target_path, options.text);
  OutputFile out(path), offsets_out(path + ".offsets");  // the second one is read back and removed
  out.write(&header, sizeof(header));
  Hash64 body;
  Chunk chunk;
  std::vector<unsigned char> bytes;
  std::vector<uint64_t> offsets;
  uint64_t at = 0;
  std::string_view source, target;
  for (bool more = true; more;) {
    if (options.stop_requested && options.stop_requested()) throw BuildStopped("[token_file] stopped: " + path);
    chunk.text.clear(), chunk.spans.clear();
    auto add = [&](std::string_view line) {
      chunk.spans.emplace_back(static_cast<uint32_t>(chunk.text.size()), static_cast<uint32_t>(line.size()));
      chunk.text += line;
    };
    while (static_cast<int64_t>(chunk.spans.size()) < 2 * kChunkPairs &&
           static_cast<int64_t>(chunk.text.size()) < kChunkBytes && (more = reader.next(&source, &target))) {
      add(source);
      add(target);
    }
    const auto pairs = static_cast<int64_t>(chunk.spans.size() / 2);
    const int64_t tasks = (pairs + 127) / 128;
    chunk.ids.resize(static_cast<size_t>(std::max<int64_t>(tasks, static_cast<int64_t>(chunk.ids.size()))));
    chunk.lengths.resize(chunk.ids.size());
    pool.run(tasks, [&](int64_t task, int) {
      auto& ids = chunk.ids[static_cast<size_t>(task)];
      auto& lengths = chunk.lengths[static_cast<size_t>(task)];
      ids.clear(), lengths.clear();
      for (int64_t i = task * 256; i < std::min(2 * pairs, (task + 1) * 256); ++i) {
        const auto [begin, size] = chunk.spans[static_cast<size_t>(i)];
        const Side side = i % 2 == 0 ? Side::kSource : Side::kTarget;
        const size_t before = ids.size();
        tokenizer.encode(side, std::string_view(chunk.text).substr(begin, size), &ids);
        ids.push_back(tokenizer.eos_id(side));
        lengths.push_back(static_cast<uint32_t>(ids.size() - before));
      }
    });
    for (int64_t task = 0; task < tasks; ++task) {
      const auto& ids = chunk.ids[static_cast<size_t>(task)];
      bytes.resize(ids.size() * header.id_bytes);
      if (header.id_bytes == 4) {
        std::memcpy(bytes.data(), ids.data(), bytes.size());
      } else {
        for (size_t i = 0; i < ids.size(); ++i) {
          const auto id = static_cast<uint16_t>(ids[i]);
          std::memcpy(bytes.data() + 2 * i, &id, 2);
        }
      }
      body.update(bytes.data(), bytes.size());
      out.write(bytes.data(), bytes.size());
      offsets.clear();
      bool target_side = false;
      for (uint32_t n : chunk.lengths[static_cast<size_t>(task)]) {
        offsets.push_back(at);
        at += n;
        (target_side ? header.target_tokens : header.source_tokens) += n;
        header.sentences += target_side;
        target_side = !target_side;
      }
      offsets_out.write(offsets.data(), offsets.size() * 8);
    }
    if (options.progress) options.progress(reader.bytes_read(), total_bytes);
  }
  const TextCounts& counts = reader.counts();
  if (header.sentences == 0)
    fail("[token_file] {} and {} hold no sentence pair: {}", source_path, target_path, counts.to_string());
  const unsigned char zeros[8] = {};
  const auto padding = static_cast<size_t>(ids_bytes_padded(header) - static_cast<int64_t>(at * header.id_bytes));
  body.update(zeros, padding);
  out.write(zeros, padding);
  offsets_out.write(&at, 8);
  offsets_out.rewind();
  bytes.resize(1 << 20);
  while (const size_t got = offsets_out.read(bytes.data(), bytes.size())) {
    body.update(bytes.data(), got);
    out.write(bytes.data(), got);
  }
  header.body_hash = body.value();
  header.lines = counts.lines, header.kept = counts.kept, header.empty = counts.empty,
  header.too_long = counts.too_long;
  header.invalid_utf8 = counts.invalid_utf8, header.crlf = counts.crlf, header.bom = counts.bom;
  header.header_hash = hash_of(header);
  out.rewind();
  out.write(&header, sizeof(header));
  out.finish();
  return open(path, 0);
}

TokenFile TokenFile::open(const std::string& path, int64_t verify_bytes) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail("[token_file] cannot open {}: {}", path, std::strerror(errno));
  struct stat info;
  void* mapped = MAP_FAILED;
  int error = 0;
  const bool readable = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  if (readable && info.st_size >= static_cast<int64_t>(sizeof(Header))) {
    mapped = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_SHARED, fd, 0);
    error = errno;
  }
  ::close(fd);
  if (!readable) fail("[token_file] {} is not a file", path);
  if (info.st_size < static_cast<int64_t>(sizeof(Header)))
    fail("[token_file] {} is no token file: it has {} bytes, fewer than a header", path, info.st_size);
  if (mapped == MAP_FAILED) fail("[token_file] cannot map {}: {}", path, std::strerror(error));

  TokenFile file;  // unmaps if anything below throws
  file.path_ = path;
  file.data_ = static_cast<const unsigned char*>(mapped);
  file.mapped_bytes_ = info.st_size;
  Header h;
  std::memcpy(&h, mapped, sizeof(h));
  if (std::memcmp(h.magic, kMagic, sizeof(kMagic)) != 0) fail("[token_file] {} is no token file", path);
  if (h.version != kVersion)
    fail("[token_file] {} has version {}, expected {}: build it again", path, h.version, kVersion);
  if (h.header_hash != hash_of(h) || (h.id_bytes != 2 && h.id_bytes != 4))
    fail("[token_file] the header of {} is damaged", path);
  // Counts are trusted from here on, but not so far that the size below could wrap around.
  const uint64_t limit = uint64_t{1} << 56;
  if (h.sentences > limit || h.source_tokens > limit || h.target_tokens > limit)
    fail("[token_file] the header of {} is damaged", path);
  const int64_t ids_end = static_cast<int64_t>(sizeof(Header)) + ids_bytes_padded(h);
  const int64_t expected = ids_end + static_cast<int64_t>(2 * h.sentences + 1) * 8;
  if (info.st_size != expected)
    fail("[token_file] {} has {} bytes, expected {}: it was cut short or changed", path, info.st_size, expected);
  if (info.st_size <= verify_bytes) {
    Hash64 body;
    body.update(file.data_ + sizeof(Header), static_cast<size_t>(info.st_size) - sizeof(Header));
    if (body.value() != h.body_hash)
      fail("[token_file] {} is damaged: its checksum is not the one it was written with", path);
  }
  file.ids_ = file.data_ + sizeof(Header);
  file.offsets_ = reinterpret_cast<const uint64_t*>(file.data_ + ids_end);  // 8-byte aligned: the ids are padded
  file.sentences_ = static_cast<int64_t>(h.sentences);
  file.source_tokens_ = static_cast<int64_t>(h.source_tokens);
  file.target_tokens_ = static_cast<int64_t>(h.target_tokens);
  file.vocabulary_[0] = h.source_vocabulary, file.vocabulary_[1] = h.target_vocabulary;
  file.id_bytes_ = static_cast<int>(h.id_bytes);
  file.tokenizer_hash_ = h.tokenizer_hash, file.origin_hash_ = h.origin_hash, file.body_hash_ = h.body_hash;
  file.counts_ = {h.lines, h.kept, h.empty, h.too_long, h.invalid_utf8, h.crlf, h.bom};
  return file;
}

TokenFile TokenFile::open_or_build(const std::string& path, const std::string& source_path,
                                   const std::string& target_path, const Tokenizer& tokenizer, ThreadPool& pool,
                                   const TokenFileOptions& options, bool* built) {
  if (built != nullptr) *built = false;
  struct stat info;
  if (::stat(path.c_str(), &info) == 0) {
    try {
      TokenFile file = open(path);
      if (file.origin_hash_ == origin_of(source_path, target_path, tokenizer, options.text)) return file;
    } catch (const Error&) {
      // Damaged, or of an older version: it is only a cache, and built again below; *built tells.
    }
  }
  if (built != nullptr) *built = true;
  return build(path, source_path, target_path, tokenizer, pool, options);
}

TokenFile::~TokenFile() {
  if (data_ != nullptr) ::munmap(const_cast<unsigned char*>(data_), static_cast<size_t>(mapped_bytes_));
}

TokenFile::TokenFile(TokenFile&& other) noexcept {
  *this = std::move(other);
}

TokenFile& TokenFile::operator=(TokenFile&& other) noexcept {
  if (this == &other) return *this;
  if (data_ != nullptr) ::munmap(const_cast<unsigned char*>(data_), static_cast<size_t>(mapped_bytes_));
  path_ = std::move(other.path_);
  data_ = std::exchange(other.data_, nullptr);
  mapped_bytes_ = std::exchange(other.mapped_bytes_, 0);
  ids_ = other.ids_, offsets_ = other.offsets_;
  sentences_ = std::exchange(other.sentences_, 0);
  source_tokens_ = other.source_tokens_, target_tokens_ = other.target_tokens_;
  vocabulary_[0] = other.vocabulary_[0], vocabulary_[1] = other.vocabulary_[1];
  id_bytes_ = other.id_bytes_;
  tokenizer_hash_ = other.tokenizer_hash_, origin_hash_ = other.origin_hash_, body_hash_ = other.body_hash_;
  counts_ = other.counts_;
  return *this;
}

int64_t TokenFile::length(int64_t piece) const {
  const uint64_t begin = offsets_[piece], end = offsets_[piece + 1];
  const auto all = static_cast<uint64_t>(source_tokens_ + target_tokens_);
  if (begin >= end || end > all || end - begin > INT32_MAX)
    fail("[token_file] {} is damaged: sentence {} lies at ids {} to {} of {}", path_, piece / 2, begin, end, all);
  return static_cast<int64_t>(end - begin);
}

void TokenFile::read(int64_t piece, int32_t vocabulary, int32_t* out) const {
  const int64_t n = length(piece);
  const unsigned char* from = ids_ + offsets_[piece] * static_cast<uint64_t>(id_bytes_);
  uint32_t top = 0;
  if (id_bytes_ == 2) {
    for (int64_t i = 0; i < n; ++i) {
      uint16_t id;
      std::memcpy(&id, from + 2 * i, 2);
      out[i] = id;
      top = std::max<uint32_t>(top, id);
    }
  } else {
    std::memcpy(out, from, static_cast<size_t>(n) * 4);
    for (int64_t i = 0; i < n; ++i) top = std::max(top, static_cast<uint32_t>(out[i]));
  }
  if (top >= static_cast<uint32_t>(vocabulary))
    fail("[token_file] {} is damaged: sentence {} holds id {}, the vocabulary has {}", path_, piece / 2, top,
         vocabulary);
}

void TokenFile::require_tokenizer(const Tokenizer& tokenizer) const {
  if (tokenizer.hash() != tokenizer_hash_)
    fail("[token_file] {} was made with another tokenizer (hash {:016x}, this one is {:016x})", path_, tokenizer_hash_,
         tokenizer.hash());
}

}  // namespace frit
