// Involution: arguments, geometry and output allocation, the same on every device.
#pragma once

#include <tuple>

#include "core/windows.h"

namespace ops::involution2d {

// The weight [N, G, kH, kW, Ho, Wo] is stored like an image of G · kH · kW channels: contiguous, or
// channels-last as a channels-last convolution returns it.
struct Geometry : Windows {
  int64_t n, c, groups;
  bool channels_last;         // of input, output and their gradients
  bool weight_channels_last;  // of the weight and its gradient

  OPS_DEVICE int64_t group_channels() const { return c / groups; }
  OPS_DEVICE int64_t taps() const { return kernel_h * kernel_w; }
  bool empty() const { return n == 0 || c == 0 || out_h == 0 || out_w == 0; }

  ImageStrides input_strides() const { return image_strides(channels_last, c, h, w); }
  ImageStrides output_strides() const { return image_strides(channels_last, c, out_h, out_w); }
  ImageStrides weight_strides() const {
    return image_strides(weight_channels_last, groups * taps(), out_h, out_w);
  }
};

// Return whether the weight is stored as [N, Ho, Wo, G, kH, kW] and is not contiguous.
inline bool is_weight_channels_last(const Tensor& weight) {
  int64_t expected = 1;
  for (const int64_t d : {3, 2, 1, 5, 4, 0}) {
    if (weight.size(d) > 1 && weight.stride(d) != expected) {
      return false;
    }
    expected *= weight.size(d);
  }
  return !weight.is_contiguous();
}

inline Geometry geometry(const char* op, const Tensor& input, const Tensor& weight,
                         const Spacing& spacing) {
  check(input.dim() == 4, op, ": input must have shape [N, C, H, W], got ", shape{input});
  check(weight.dim() == 6 && weight.size(0) == input.size(0) && weight.size(1) > 0 &&
            input.size(1) % weight.size(1) == 0 && weight.size(2) > 0 && weight.size(3) > 0,
        op, ": weight must have shape [N, G, kH, kW, Ho, Wo] with N = ", input.size(0),
        " and G a divisor of C = ", input.size(1), ", got ", shape{weight});
  check_same(op, "input", input, "weight", weight);
  const Geometry g{
      windows(op, input.size(2), input.size(3), weight.size(2), weight.size(3), spacing),
      input.size(0),
      input.size(1),
      weight.size(1),
      is_channels_last(input),
      is_weight_channels_last(weight)};
  check(weight.size(4) == g.out_h && weight.size(5) == g.out_w, op,
        ": weight must have a kernel for each place, Ho = ", g.out_h, " and Wo = ", g.out_w,
        ", got ", shape{weight});
  return g;
}

inline Tensor empty_weight(const Tensor& like, const Geometry& g) {
  const Tensor image =
      empty(like, {g.n, g.groups * g.taps(), g.out_h, g.out_w}, g.weight_channels_last);
  return torch::stable::view(image, {g.n, g.groups, g.kernel_h, g.kernel_w, g.out_h, g.out_w});
}

inline Tensor weight_in_format(const Tensor& weight, const Geometry& g) {
  return g.weight_channels_last ? weight : as_contiguous(weight);
}

enum class Pass { forward, backward_input, backward_weight };

// Check, allocate and call Backend::run(like, g, pass, source, factor, out): `source` is x (input
// gradient: grad_output), `factor` the weight (weight gradient: grad_output).
template <typename Backend>
Tensor forward(const Tensor& input, const Tensor& weight, std::vector<int64_t> stride,
               std::vector<int64_t> padding, std::vector<int64_t> dilation) {
  const char* op = "involution2d";
  const auto g = geometry(op, input, weight, {stride, padding, dilation});
  const Tensor x = as_contiguous(input, g.channels_last);
  const Tensor w = weight_in_format(weight, g);
  Tensor out = empty(x, {g.n, g.c, g.out_h, g.out_w}, g.channels_last);
  dispatch_floating(op, x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!g.empty()) {
      Backend::run(x, g, Pass::forward, x.const_data_ptr<T>(), w.const_data_ptr<T>(),
                   out.mutable_data_ptr<T>());
    }
  });
  return out;
}

// Return (grad_input, grad_weight); gradients not in output_mask have shape [0].
template <typename Backend>
std::tuple<Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& input,
                                    const Tensor& weight, std::vector<int64_t> stride,
                                    std::vector<int64_t> padding, std::vector<int64_t> dilation,
                                    std::vector<bool> output_mask) {
  const char* op = "involution2d_backward";
  const auto g = geometry(op, input, weight, {stride, padding, dilation});
  check_same(op, "input", input, "grad_output", grad_output);
  check_shape(op, "grad_output", grad_output, {g.n, g.c, g.out_h, g.out_w});
  check(output_mask.size() == 2, op, ": output_mask must be two booleans");
  const Tensor grad = as_contiguous(grad_output, g.channels_last);
  Tensor grad_input = empty_if(output_mask[0], input, {g.n, g.c, g.h, g.w}, g.channels_last);
  Tensor grad_weight = output_mask[1] ? empty_weight(weight, g) : empty(input, {0});
  dispatch_floating(op, input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (grad_input.numel() > 0) {
      const Tensor w = weight_in_format(weight, g);
      Backend::run(input, g, Pass::backward_input, grad.const_data_ptr<T>(), w.const_data_ptr<T>(),
                   grad_input.mutable_data_ptr<T>());
    }
    if (grad_weight.numel() > 0) {
      const Tensor x = as_contiguous(input, g.channels_last);
      Backend::run(input, g, Pass::backward_weight, x.const_data_ptr<T>(), grad.const_data_ptr<T>(),
                   grad_weight.mutable_data_ptr<T>());
    }
  });
  return {grad_input, in_strides_of(weight, grad_weight)};
}

}  // namespace ops::involution2d
