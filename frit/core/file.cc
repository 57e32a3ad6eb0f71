#include "frit/core/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "frit/core/error.h"

namespace frit {
namespace {

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

std::string read_file(const std::filesystem::path& path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) fail("[file] cannot open {}: {}", path.string(), std::strerror(errno));
  std::string bytes;
  char buffer[1 << 16];
  for (;;) {
    const ssize_t got = ::read(file.fd, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("[file] cannot read {}: {}", path.string(), std::strerror(errno));
    if (got == 0) return bytes;
    bytes.append(buffer, static_cast<size_t>(got));
  }
}

std::string temporary_name(const std::filesystem::path& path) {
  static std::atomic<int> counter{0};  // two threads of a process may write the same file
  return fmt::format("{}.tmp-{}-{}", path.string(), ::getpid(), counter++);
}

void write_all(int fd, std::string_view bytes, const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(fd, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("[file] cannot write {}: {}", path.string(), std::strerror(errno));
    bytes.remove_prefix(static_cast<size_t>(put));
  }
}

void write_all(int fd, const void* data, size_t bytes, const std::filesystem::path& path) {
  write_all(fd, std::string_view(static_cast<const char*>(data), bytes), path);
}

void sync_directory(const std::filesystem::path& path) {
  const Descriptor folder{::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  if (folder.fd < 0) fail("[file] cannot open folder {}: {}", path.string(), std::strerror(errno));
  // Some network file systems cannot sync a folder and say EINVAL; the rename is then as durable as it gets there.
  if (::fsync(folder.fd) != 0 && errno != EINVAL)
    fail("[file] cannot sync folder {}: {}", path.string(), std::strerror(errno));
}

void finish_file(int fd, const std::filesystem::path& temporary, const std::filesystem::path& path) {
  if (::fsync(fd) != 0) fail("[file] cannot sync {}: {}", temporary.string(), std::strerror(errno));
  if (::rename(temporary.c_str(), path.c_str()) != 0)
    fail("[file] cannot rename {} to {}: {}", temporary.string(), path.string(), std::strerror(errno));
  sync_directory(path.parent_path());
}

void write_file_atomically(const std::filesystem::path& path, std::string_view bytes) {
  const std::string temporary = temporary_name(path);
  const Descriptor file{::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)};
  if (file.fd < 0) fail("[file] cannot create {}: {}", temporary, std::strerror(errno));
  try {
    write_all(file.fd, bytes, temporary);
    finish_file(file.fd, temporary, path);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

}  // namespace frit
