// Error messages, without iostreams and their locales.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdio>
#include <string>
#include <type_traits>

namespace ops {

inline void append(std::string& text, const std::string& part) {
  text += part;
}
inline void append(std::string& text, const char* part) {
  text += part;
}
inline void append(std::string& text, char part) {
  text += part;
}
inline void append(std::string& text, double part) {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%g", part);
  text += digits;
}
inline void append(std::string& text, torch::headeronly::ScalarType part) {
  text += torch::headeronly::toString(part);
}
template <typename T, typename = std::enable_if_t<std::is_integral_v<T>>>
void append(std::string& text, T part) {
  text += std::to_string(part);
}

// Return the concatenated parts.
template <typename... Args>
std::string message(const Args&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

}  // namespace ops
