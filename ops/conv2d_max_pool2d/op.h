// Convolution and max pooling for any device: argument checks, and the implementation by PyTorch's
// convolution (or depthwise_conv2d) and max_pool2d.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "core/compat.h"
#include "core/windows.h"

namespace ops {

using Pair = std::vector<int64_t>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // of input, weight and bias

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

struct ConvPool {
  Windows conv;
  int64_t n, in_c, out_c;
  int64_t pool_h, pool_w;  // windows of the pooling; they do not overlap
  int64_t out_h, out_w;    // after pooling
  bool channels_last;

  // Return an upper bound of the bytes that a pass allocates, apart from workspaces.
  int64_t pass_bytes(const Tensor& x) const {
    const int64_t image = in_c * conv.h * conv.w;
    const int64_t outputs = out_c * (conv.out_h * conv.out_w + 2 * out_h * out_w);
    return n * (image + outputs) * element_size(x.scalar_type());
  }
};

inline ConvPool conv_pool(const char* op, const Tensor& input, const Tensor& weight,
                          const Spacing& spacing, const Pair& pool) {
  check(input.dim() == 4, op, ": input must have shape [N, C, H, W], got ", shape{input});
  check(weight.dim() == 4 && weight.size(1) == input.size(1) && weight.size(1) > 0 &&
            weight.size(0) > 0 && weight.size(2) > 0 && weight.size(3) > 0,
        op, ": weight must have shape [Co, C, kH, kW] with C = ", input.size(1), ", got ",
        shape{weight});
  check_same(op, "input", input, "weight", weight);
  dispatch_floating(op, input.scalar_type(), [](auto) {});
  const Windows conv =
      windows(op, input.size(2), input.size(3), weight.size(2), weight.size(3), spacing);
  check_pair(op, "pool", pool, 1);
  check(pool[0] <= conv.out_h && pool[1] <= conv.out_w, op, ": pool must be at most the ",
        conv.out_h, " x ", conv.out_w, " pixels of the convolution, got ", list{pool});
  return {conv,    input.size(0),        input.size(1),        weight.size(0),         pool[0],
          pool[1], conv.out_h / pool[0], conv.out_w / pool[1], is_channels_last(input)};
}

// Return call(). The stable ABI loses the type of an exception: if call() throws, allocate `bytes`;
// if memory is short, that throws the out-of-memory error.
template <typename Call>
auto with_memory(const Tensor& like, int64_t bytes, const Call& call) {
  try {
    return call();
  } catch (const std::exception&) {
    empty(like, {bytes}, ScalarType::Byte);
    throw;
  }
}

// One input channel on the CPU: depthwise_conv2d of the input expanded to Co channels (a view) is
// faster if a row fills its vectors.
inline bool is_depthwise(const ConvPool& g, const Tensor& input) {
  return g.in_c == 1 && g.conv.out_w >= 16 && !input.is_cuda();
}

inline Tensor copies(const ConvPool& g, const Tensor& input) {
  const Pair size{g.n, g.out_c, g.conv.h, g.conv.w};
  return std::get<0>(call_operator<Tensor>("aten::expand", input, size, false));
}

// Return the pooled output, and the tap of each maximum as max_pool2d does.
inline std::tuple<Tensor, Tensor> conv2d_max_pool2d(const Tensor& input, const Tensor& weight,
                                                    std::optional<Tensor> bias, Pair stride,
                                                    Pair padding, Pair dilation, Pair pool) {
  const char* op = "conv2d_max_pool2d";
  const ConvPool g = conv_pool(op, input, weight, {stride, padding, dilation}, pool);
  if (bias) {
    check_same(op, "input", input, "bias", *bias);
    check_shape(op, "bias", *bias, {g.out_c});
  }
  const auto convolve = [&] {
    if (g.n == 0) {
      return empty_image(input, 0, g.out_c, g.conv.out_h, g.conv.out_w, g.channels_last);
    }
    if (is_depthwise(g, input)) {
      return std::get<0>(call_operator<Tensor>("lenet_ops::depthwise_conv2d", copies(g, input),
                                               weight, bias, stride, padding, dilation));
    }
    return std::get<0>(call_operator<Tensor>("aten::convolution", input, weight, bias, stride,
                                             padding, dilation, false, Pair{0, 0}, int64_t{1}));
  };
  return with_memory(input, g.pass_bytes(input), [&] {
    return call_operator<Tensor, Tensor>("lenet_ops::max_pool2d",
                                         in_format(convolve(), g.channels_last), pool, pool,
                                         Pair{0, 0}, Pair{1, 1}, false);
  });
}

}  // namespace ops
