// Device-independent part of depthwise convolution: argument checks, geometry, output allocation.
#pragma once

#include <optional>
#include <tuple>

#include "core/windows.h"

namespace ops::depthwise_conv2d {

struct Geometry : Windows {
  int64_t n, c;                      // batch, channels
  bool channels_last;                // the kernels run in NHWC
  int64_t input_n = 0, input_c = 0;  // strides between images and channels of the input

  bool empty() const { return n == 0 || c == 0; }
};

inline Geometry geometry(const char* op, const Tensor& input, const Tensor& weight,
                         const Spacing& spacing) {
  check(input.dim() == 4, op, ": input must have shape [N, C, H, W], got ", shape{input});
  check(weight.dim() == 4 && weight.size(0) == input.size(1) && weight.size(1) == 1 &&
            weight.size(2) > 0 && weight.size(3) > 0,
        op, ": weight must have shape [C, 1, kH, kW] with C = ", input.size(1), ", got ",
        shape{weight});
  check_same(op, "input", input, "weight", weight);
  // A single channel is both NCHW and NHWC; the NCHW kernels are faster.
  return {windows(op, input.size(2), input.size(3), weight.size(2), weight.size(3), spacing),
          input.size(0), input.size(1), input.size(1) > 1 && is_channels_last(input)};
}

// Return the input in a layout that Backend reads; set its strides in `g`. With
// kReadsStridedPlanes, an NCHW input with dense planes, such as a slice or an expansion along N or
// C, is not copied.
template <typename Backend>
Tensor input_of(const Tensor& input, Geometry& g) {
  const bool dense_planes =
      (g.w == 1 || input.stride(3) == 1) && (g.h == 1 || input.stride(2) == g.w);
  if (Backend::kReadsStridedPlanes && !g.channels_last && dense_planes) {
    g.input_n = input.stride(0);
    g.input_c = input.stride(1);
    return input;
  }
  const auto strides = image_strides(g.channels_last, g.c, g.h, g.w);
  g.input_n = strides.n;
  g.input_c = strides.c;
  return as_contiguous(input, g.channels_last);
}

template <typename Backend>
Tensor forward(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
               std::vector<int64_t> stride, std::vector<int64_t> padding,
               std::vector<int64_t> dilation) {
  const char* op = "depthwise_conv2d";
  auto g = geometry(op, input, weight, {stride, padding, dilation});
  if (bias) {
    check_same(op, "input", input, "bias", *bias);
    check_shape(op, "bias", *bias, {g.c});
  }
  const Tensor x = input_of<Backend>(input, g);
  const Tensor w = as_contiguous(weight);
  const std::optional<Tensor> b = bias ? std::optional<Tensor>(as_contiguous(*bias)) : std::nullopt;
  Tensor out = empty(x, {g.n, g.c, g.out_h, g.out_w}, is_channels_last(input));
  dispatch_floating(op, x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!g.empty()) {
      Backend::forward(x, g, x.const_data_ptr<T>(), w.const_data_ptr<T>(), data_or_null<T>(b),
                       out.mutable_data_ptr<T>());
    }
  });
  return out;
}

// Return (grad_input, grad_weight, grad_bias). Those not in output_mask have shape [0].
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& input,
                                            const Tensor& weight, std::vector<int64_t> stride,
                                            std::vector<int64_t> padding,
                                            std::vector<int64_t> dilation,
                                            std::vector<bool> output_mask) {
  const char* op = "depthwise_conv2d_backward";
  auto g = geometry(op, input, weight, {stride, padding, dilation});
  check_same(op, "input", input, "grad_output", grad_output);
  check_shape(op, "grad_output", grad_output, {g.n, g.c, g.out_h, g.out_w});
  check(output_mask.size() == 3, op, ": output_mask must be three booleans");
  const bool need_input = output_mask[0], need_weight = output_mask[1], need_bias = output_mask[2];
  const Tensor x = need_weight ? input_of<Backend>(input, g) : input;
  const Tensor w = as_contiguous(weight);
  const Tensor grad = as_contiguous(grad_output, g.channels_last);
  Tensor grad_input = empty_if(need_input, x, {g.n, g.c, g.h, g.w}, is_channels_last(input));
  Tensor grad_weight = need_weight ? empty_as(w) : empty(w, {0});
  Tensor grad_bias = empty_if(need_bias, w, {g.c});
  dispatch_floating(op, x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (g.empty()) {  // empty sums
      zero_(grad_weight), zero_(grad_bias);
      return;
    }
    Backend::backward(
        x, g, grad.const_data_ptr<T>(), need_weight ? x.const_data_ptr<T>() : nullptr,
        w.const_data_ptr<T>(),
        Gradients<T>{data_unless_empty<T>(grad_input), data_unless_empty<T>(grad_weight),
                     data_unless_empty<T>(grad_bias)});
  });
  return {grad_input, in_strides_of(weight, grad_weight), grad_bias};
}

}  // namespace ops::depthwise_conv2d
