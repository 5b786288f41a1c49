// Definitions missing from the headers of torch 2.10, 2.11 and 2.12.
#pragma once

#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // new in torch 2.13

#include <dlfcn.h>

#include <sstream>
#include <stdexcept>

namespace ops {

// Throw with the message of the failed call (kept by torch >= 2.13), or else with its source text.
[[noreturn]] inline void throw_failed_call(const char* call, const char* file, int line) {
  std::ostringstream text;
  using GetMessage = const char* (*)();
  const auto get_message = reinterpret_cast<GetMessage>(
      dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  if (const char* message = get_message ? get_message() : nullptr) {
    text << message << " (originally from " << call << " API call failed at " << file << ", line "
         << line << ")";
  } else {
    text << call << " API call failed at " << file << ", line " << line;
  }
  throw std::runtime_error(text.str());
}

}  // namespace ops

#define STABLE_TORCH_ERROR_CODE_CHECK(call)              \
  if ((call) != TORCH_SUCCESS) {                         \
    ::ops::throw_failed_call(#call, __FILE__, __LINE__); \
  }

#endif
