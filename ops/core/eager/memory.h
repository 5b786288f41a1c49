// Convert a kernel's failed allocation to PyTorch's out-of-memory exception, with the operator's
// name. The stable ABI loses the exception's type, so the allocation is repeated through ATen.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>

#include <cstdio>
#include <cstring>
#include <new>
#include <string>

namespace ops {

// If `message` reports a failed allocation, "cannot allocate N bytes on DEVICE: REASON", repeat it,
// so that ATen throws.
inline void repeat_allocation(const char* message) {
  const char* const report = std::strstr(message, "cannot allocate ");
  long long bytes = 0;
  char device[16];
  if (report && std::sscanf(report, "cannot allocate %lld bytes on %15s", &bytes, device) == 2) {
    device[std::strlen(device) - 1] = 0;  // the colon
    at::empty({bytes}, at::dtype(at::kByte).device(c10::Device(device)));
  }
}

// BackendSelect kernel, the last in the dispatch order before the device's kernel.
inline void call_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack) {
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  try {
    op.redispatchBoxed(keys & below, stack);
  } catch (const std::exception& error) {
    const std::string& name = op.schema().name();  // with its namespace
    const std::string context = "in " + name.substr(name.find("::") + 2);
    try {
      repeat_allocation(error.what());
    } catch (c10::Error& own) {
      own.add_context(context);
      throw;
    }
    // A workspace's allocation cannot be repeated.
    TORCH_CHECK(std::string(error.what()) != std::bad_alloc().what(), error.what(), " (", context,
                ")");
    throw;
  }
}

}  // namespace ops
