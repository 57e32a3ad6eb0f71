// Whole files: read at once, written so that a reader never sees half of one.
#pragma once
#include <string>
#include <string_view>

namespace frit {

// Errors: frit::Error if the file cannot be read.
std::string read_file(const std::string& path);
// Writes to a temporary name in the same directory, flushes to disk, renames. Errors: frit::Error, and nothing is left
// behind.
void write_file_atomically(const std::string& path, std::string_view bytes);
// A name beside path that no other process takes.
std::string temporary_name(const std::string& path);
// Flushes an open file to disk and gives it its name. Errors: frit::Error.
void finish_file(int descriptor, const std::string& temporary, const std::string& path);
// Writes all bytes to an open file. Errors: frit::Error naming path.
void write_all(int descriptor, const void* data, size_t bytes, const std::string& path);

}  // namespace frit
