// Small file helpers of the trainer: read a whole file, replace a file so that a crash leaves the old or the new one.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>

namespace frit {

// Returns the bytes of a file. Errors: frit::Error with the path and the system's reason.
std::string read_file(const std::filesystem::path& path);

// Writes `bytes` to a temporary name beside `path`, fsyncs it, renames it over `path` and fsyncs the folder.
// Errors: frit::Error with the path and the system's reason; `path` is then as it was.
void write_file_atomically(const std::filesystem::path& path, std::string_view bytes);

// Writes all bytes to an open descriptor; `path` is named in errors. Errors: frit::Error with the system's reason.
void write_all(int fd, std::string_view bytes, const std::filesystem::path& path);

// Makes renames and new names in a folder survive a power cut. Errors: frit::Error with the system's reason.
void sync_directory(const std::filesystem::path& path);

}  // namespace frit
