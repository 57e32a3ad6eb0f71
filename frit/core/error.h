// Errors: one macro that checks and throws with a formatted message.
#pragma once
#ifdef __CUDACC__
#define FMT_USE_CONSTEXPR 1  // fmt 9 turns constexpr off for old versions of nvcc; 13 has it
#endif
#include <fmt/core.h>

#include <stdexcept>
#include <string>

namespace frit {

// Thrown for bad input found while running (files, data, configuration); bad arguments of a call throw
// std::invalid_argument. The message says what is wrong, what was given and what was expected.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
[[noreturn]] void fail_argument(fmt::format_string<Args...> format, Args&&... args) {
  throw std::invalid_argument(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace frit

// Throws std::invalid_argument with the formatted message unless the condition holds.
// Form: FRIT_CHECK(gamma.numel() == cols, "[layer_norm] gamma has {} elements, x has {} columns", gamma.numel(), cols);
#define FRIT_CHECK(condition, ...)                      \
  do {                                                  \
    if (!(condition)) ::frit::fail_argument(__VA_ARGS__); \
  } while (0)
