#include "frit/train/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "frit/core/error.h"

namespace frit {

std::string read_file(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail("cannot open {}: {}", path.string(), std::strerror(errno));
  std::string bytes;
  char buffer[1 << 16];
  while (true) {
    const ssize_t got = ::read(fd, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      const int error = errno;
      ::close(fd);
      fail("cannot read {}: {}", path.string(), std::strerror(error));
    }
    if (got == 0) break;
    bytes.append(buffer, static_cast<size_t>(got));
  }
  ::close(fd);
  return bytes;
}

void write_all(int fd, std::string_view bytes, const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(fd, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("cannot write {}: {}", path.string(), std::strerror(errno));
    bytes.remove_prefix(static_cast<size_t>(put));
  }
}

void sync_directory(const std::filesystem::path& path) {
  const int fd = ::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail("cannot open folder {}: {}", path.string(), std::strerror(errno));
  const int result = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  // Some network file systems cannot sync a folder and say EINVAL; the rename is then as durable as it gets there.
  if (result != 0 && error != EINVAL) fail("cannot sync folder {}: {}", path.string(), std::strerror(error));
}

void write_file_atomically(const std::filesystem::path& path, std::string_view bytes) {
  const std::filesystem::path temporary = path.string() + ".tmp" + std::to_string(::getpid());
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) fail("cannot create {}: {}", temporary.string(), std::strerror(errno));
  try {
    write_all(fd, bytes, temporary);
    if (::fsync(fd) != 0) fail("cannot sync {}: {}", temporary.string(), std::strerror(errno));
  } catch (...) {
    ::close(fd);
    ::unlink(temporary.c_str());
    throw;
  }
  ::close(fd);
  if (::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary.c_str());
    fail("cannot rename {} to {}: {}", temporary.string(), path.string(), std::strerror(error));
  }
  sync_directory(path.parent_path());
}

}  // namespace frit
