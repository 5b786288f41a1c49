// Calls of other operators through PyTorch's dispatcher.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "core/compat.h"

namespace ops {

template <typename... Outputs, size_t... I>
std::tuple<Outputs...> outputs_of(const StableIValue* stack, std::index_sequence<I...>) {
  return {torch::stable::detail::to<Outputs>(stack[I])...};
}

// Call an operator by name, such as "aten::convolution". The types are those of its schema.
template <typename... Outputs, typename... Args>
std::tuple<Outputs...> call_operator(const char* name, const Args&... args) {
  std::array<StableIValue, std::max(sizeof...(Outputs), sizeof...(Args))> stack{
      torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return outputs_of<Outputs...>(stack.data(), std::index_sequence_for<Outputs...>{});
}

}  // namespace ops
