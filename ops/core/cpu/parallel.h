// Loops on PyTorch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>

#include "core/compat.h"

namespace ops::cpu {

// Call f(begin, end) for parts of [begin, end), of at least `grain` elements. Throw the message of
// the first exception, such as std::bad_alloc: torch < 2.13 would drop it.
template <typename F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  std::mutex mutex;
  std::optional<std::string> message;
  torch::stable::parallel_for(begin, end, grain, [&](int64_t part_begin, int64_t part_end) {
    try {
      f(part_begin, part_end);
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex);
      message = message.value_or(error.what());
    }
  });
  if (message) {
    throw std::runtime_error(*message);
  }
}

}  // namespace ops::cpu
