// Raises PyTorch's own exception where a kernel could not allocate memory.
//
// The stable ABI loses the exception's type, so a kernel throws "cannot allocate N bytes on
// DEVICE". Here, between autograd and the kernel, the allocation is repeated by PyTorch.
#include "core/eager/memory.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <regex>
#include <string>

namespace ops {

void repeat_allocation(const std::string& message) {
  static const std::regex pattern("cannot allocate (\\d+) bytes on (\\w+(?::\\d+)?)");
  std::smatch match;
  if (std::regex_search(message, match, pattern)) {
    const c10::Device device(match[2].str());
    at::empty({std::stoll(match[1])}, at::dtype(at::kByte).device(device));
  }
}

void call_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  try {
    op.redispatchBoxed(keys & below, stack);
  } catch (const std::exception& error) {
    repeat_allocation(error.what());
    throw;
  }
}

}  // namespace ops
