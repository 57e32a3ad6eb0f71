// The known name nearest to a misspelt one, for error messages.
#pragma once
#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace frit {

// Levenshtein distance: the fewest insertions, deletions and replacements of one character that turn a into b.
inline size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// The element of `names` (anything that iterates over strings) nearest to `name`, the first of equals; empty if there
// is none.
template <typename Names>
std::string nearest_name(std::string_view name, const Names& names) {
  std::string_view best;
  size_t best_distance = std::numeric_limits<size_t>::max();
  for (const auto& candidate : names) {
    const size_t distance = edit_distance(name, candidate);
    if (distance < best_distance) best_distance = distance, best = candidate;
  }
  return std::string(best);
}

}  // namespace frit
