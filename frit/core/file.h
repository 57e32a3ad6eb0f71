// Whole files: read at once, written so that a reader or a crash never sees half of one.
#pragma once
#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

namespace frit {

// Returns the bytes of a file. Errors: frit::Error with the path and the system's reason.
std::string read_file(const std::filesystem::path& path);

// Writes `bytes` to a temporary name beside `path`, flushes them to the disk, renames, and flushes the folder.
// Errors: frit::Error with the path and the system's reason; `path` is then as it was, and nothing is left beside it.
void write_file_atomically(const std::filesystem::path& path, std::string_view bytes);

// The steps of that, for files written piece by piece:
// a name beside `path` that no other process and no other call takes;
std::string temporary_name(const std::filesystem::path& path);
// all bytes to an open descriptor (`path` is named in errors);
void write_all(int fd, std::string_view bytes, const std::filesystem::path& path);
void write_all(int fd, const void* data, size_t bytes, const std::filesystem::path& path);
// an open file flushed to the disk and given its name, and its folder flushed.
void finish_file(int fd, const std::filesystem::path& temporary, const std::filesystem::path& path);

// Makes renames and new names in a folder ("": the current one) survive a power cut. Errors: frit::Error with the
// system's reason.
void sync_directory(const std::filesystem::path& path);

}  // namespace frit
