// Finds the known name nearest to a mistyped one, for error messages.
#pragma once
#include <span>
#include <string>
#include <string_view>

namespace frit {

// Returns the name with the least edit distance (insert, delete, replace, swap of neighbours each count 1; case, '-'
// and
// '_' do not count); the first of equals. Empty when `names` is empty.
std::string nearest_name(std::string_view name, std::span<const std::string_view> names);

}  // namespace frit
