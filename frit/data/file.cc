#include "frit/data/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "frit/core/error.h"

namespace frit {

std::string read_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail("[file] cannot open {}: {}", path, std::strerror(errno));
  std::string bytes;
  char buffer[1 << 16];
  for (;;) {
    const ssize_t got = ::read(fd, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      const int error = errno;
      ::close(fd);
      fail("[file] reading {} failed: {}", path, std::strerror(error));
    }
    if (got == 0) break;
    bytes.append(buffer, static_cast<size_t>(got));
  }
  ::close(fd);
  return bytes;
}

std::string temporary_name(const std::string& path) {
  static std::atomic<int> counter{0};  // two threads of a process may write the same file
  return fmt::format("{}.tmp-{}-{}", path, ::getpid(), counter++);
}

void write_all(int descriptor, const void* data, size_t bytes, const std::string& path) {
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put = ::write(descriptor, p, bytes);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("[file] writing {} failed: {}", path, std::strerror(errno));
    p += put, bytes -= static_cast<size_t>(put);
  }
}

void finish_file(int descriptor, const std::string& temporary, const std::string& path) {
  if (::fsync(descriptor) != 0) fail("[file] flushing {} failed: {}", path, std::strerror(errno));
  if (std::rename(temporary.c_str(), path.c_str()) != 0)
    fail("[file] cannot rename {} to {}: {}", temporary, path, std::strerror(errno));
}

void write_file_atomically(const std::string& path, std::string_view bytes) {
  const std::string temporary = temporary_name(path);
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) fail("[file] cannot write {}: {}", temporary, std::strerror(errno));
  try {
    write_all(fd, bytes.data(), bytes.size(), path);
    finish_file(fd, temporary, path);
  } catch (...) {
    ::close(fd);
    ::unlink(temporary.c_str());
    throw;
  }
  ::close(fd);
}

}  // namespace frit
