// Error macros of PyTorch's headers, without iostreams: the C++ runtime may be linked statically,
// beside PyTorch's copy. setup.py includes this file before the first line of each source.
// STABLE_TORCH_ERROR_CODE_CHECK is missing from the headers of torch 2.10, 2.11 and 2.12.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <stdexcept>
#include <string>

#include "core/message.h"

namespace ops {

// Throw with the message of the failed call (kept by torch >= 2.13), or else with its source text.
[[noreturn]] inline void throw_failed_call(const char* call, const char* file, int line) {
  using GetMessage = const char* (*)();
  const auto get_message = reinterpret_cast<GetMessage>(
      dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  const std::string failed = message(call, " API call failed at ", file, ", line ", line);
  const char* reason = get_message ? get_message() : nullptr;
  throw std::runtime_error(reason ? message(reason, " (originally from ", failed, ")") : failed);
}

}  // namespace ops

#undef STABLE_TORCH_ERROR_CODE_CHECK  // torch >= 2.13
#define STABLE_TORCH_ERROR_CODE_CHECK(call)              \
  if ((call) != TORCH_SUCCESS) {                         \
    ::ops::throw_failed_call(#call, __FILE__, __LINE__); \
  }

#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call) STABLE_TORCH_ERROR_CODE_CHECK(call)

#undef STD_TORCH_CHECK
#define STD_TORCH_CHECK(condition, ...)                                                   \
  if (!(condition)) {                                                                     \
    throw std::runtime_error(::ops::message("Expected " #condition ". ", ##__VA_ARGS__)); \
  }
