// Autocast in C++: cast an operator's tensor arguments with torch's own cached_cast.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

namespace ops {

class Autocast : public c10::OperatorKernel {
 public:
  Autocast(c10::DeviceType device, std::optional<c10::ScalarType> dtype)
      : device_(device), dtype_(dtype) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard guard(key_of(device_));
    const auto dtype = dtype_.value_or(at::autocast::get_autocast_dtype(device_));
    const auto count = static_cast<ptrdiff_t>(op.schema().arguments().size());
    std::for_each(stack->end() - count, stack->end(), [&](c10::IValue& value) {
      if (value.isTensor()) {
        value = at::autocast::cached_cast(dtype, value.toTensor(), device_);
      }
    });
    op.callBoxed(stack);
  }

  static c10::DispatchKey key_of(c10::DeviceType device) {
    return at::autocast::get_autocast_dispatch_key_from_device_type(device);
  }

 private:
  c10::DeviceType device_;
  std::optional<c10::ScalarType> dtype_;  // nullopt: the dtype of the autocast region
};

// Register autocast for regions on `device`, to `dtype` or (nullopt) the region's dtype.
inline void register_autocast(const std::string& name, c10::Device device,
                              std::optional<c10::ScalarType> dtype) {
  static torch::Library libraries[] = {
      {torch::Library::IMPL, "lenet_ops", c10::DispatchKey::AutocastCPU, __FILE__, __LINE__},
      {torch::Library::IMPL, "lenet_ops", c10::DispatchKey::AutocastCUDA, __FILE__, __LINE__},
  };
  libraries[device.is_cuda()].impl(
      name.c_str(),
      torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Autocast>(device.type(), dtype)));
}

}  // namespace ops
