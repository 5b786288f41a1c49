// Convert a kernel's failed allocation to PyTorch's out-of-memory exception, with the operator's
// name. The stable ABI loses the exception's type, so the allocation is repeated through ATen.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>

#include <new>
#include <string>

namespace ops {

// If `message` reports a failed allocation, "cannot allocate N bytes on DEVICE: REASON", repeat it,
// so that ATen throws.
inline void repeat_allocation(const std::string& message) {
  const std::string before_size = "cannot allocate ", before_device = " bytes on ";
  const size_t size = message.find(before_size), device = message.find(before_device);
  if (size != std::string::npos && device != std::string::npos) {
    const size_t begin = device + before_device.size();
    const c10::Device on(message.substr(begin, message.find(": ", begin) - begin));
    at::empty({std::stoll(message.substr(size + before_size.size()))},
              at::dtype(at::kByte).device(on));
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
