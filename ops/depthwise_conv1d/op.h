// Device-independent part of depthwise_conv1d: argument checks, geometry, output allocation.
#pragma once

#include <optional>
#include <tuple>

#include "core/windows.h"

namespace ops::depthwise_conv1d {

struct Geometry {
  int64_t n, c, t, out_t;                   // batch, channels, input and output length
  int64_t taps, stride, padding, dilation;  // padding: zeros on the left; out_t implies the right
  bool silu;                                // the output is silu(convolution)
  bool channels_last;  // output, grad_output, grad_input: [N, T, C] dense, else [N, C, T] dense
  int64_t input_n = 0, input_c = 0, input_t = 0;  // strides of the input; input_t or input_c is 1

  bool empty() const { return n == 0 || c == 0; }
};

// A strided view [N, C, T].
template <typename T>
struct Rows {
  T* data;
  int64_t n_stride, c_stride, t_stride;

  constexpr T* row(int64_t n, int64_t c) const { return data + n * n_stride + c * c_stride; }
};

template <typename T>
Rows<const T> input_rows(const Geometry& g, const T* x) {
  return {x, g.input_n, g.input_c, g.input_t};
}

// Rows of the input gradient (length g.t) or of the output and gradients of it (g.out_t).
template <typename T>
Rows<T> dense_rows(const Geometry& g, T* data, int64_t t) {
  return {data, g.c * t, g.channels_last ? 1 : t, g.channels_last ? g.c : 1};
}

// Return whether x [N, C, T] is channels-last: dense along C, with any stride of N. Results are,
// too. A single channel is not.
inline bool is_channels_last(const Tensor& x) {
  return x.size(1) > 1 && x.stride(1) == 1 && x.stride(2) >= x.size(1);
}

// Check the user's arguments; `padding` is [left, right].
inline Geometry geometry(const char* op, const Tensor& input, const Tensor& weight,
                         const std::optional<Tensor>& bias, int64_t stride,
                         const std::vector<int64_t>& padding, int64_t dilation, bool silu) {
  check(input.dim() == 3, op, ": input must have shape [N, C, T], got ", shape{input});
  check(weight.dim() == 3 && weight.size(0) == input.size(1) && weight.size(1) == 1 &&
            weight.size(2) > 0,
        op, ": weight must have shape [C, 1, K] with C = ", input.size(1), ", got ", shape{weight});
  check_same(op, "input", input, "weight", weight);
  if (bias) {
    check_same(op, "input", input, "bias", *bias);
    check_shape(op, "bias", *bias, {input.size(1)});
  }
  check_value(op, "stride", stride, 1);
  check_pair(op, "padding", padding, 0);
  check_value(op, "dilation", dilation, 1);
  const int64_t span = dilation * (weight.size(2) - 1) + 1;
  const int64_t padded = input.size(2) + padding[0] + padding[1];
  check(padded >= span, op,
        ": the dilated kernel must fit into the padded input; the kernel spans ", span,
        ", the padded input ", padded);
  return {input.size(0),  input.size(1),
          input.size(2),  (padded - span) / stride + 1,
          weight.size(2), stride,
          padding[0],     dilation,
          silu,           is_channels_last(input)};
}

// Return the input, dense along T or C; set its strides in `g`. Other dimensions may have any
// stride: a slice of a projection, as in Mamba, is not copied.
inline Tensor readable(const Tensor& input, Geometry& g) {
  const bool in_place = g.channels_last || g.t == 1 || input.stride(2) == 1;
  const Tensor x = in_place ? input : as_contiguous(input);
  g.input_n = x.stride(0), g.input_c = x.stride(1), g.input_t = g.t == 1 ? 1 : x.stride(2);
  return x;
}

template <typename Backend>
Tensor forward(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
               int64_t stride, std::vector<int64_t> padding, int64_t dilation, bool silu) {
  const char* op = "depthwise_conv1d";
  auto g = geometry(op, input, weight, bias, stride, padding, dilation, silu);
  const Tensor x = readable(input, g), w = as_contiguous(weight);
  const std::optional<Tensor> b = bias ? std::optional<Tensor>(as_contiguous(*bias)) : std::nullopt;
  Tensor out = empty(x, {g.n, g.c, g.out_t}, g.channels_last);
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
                                            const Tensor& weight, std::optional<Tensor> bias,
                                            int64_t stride, std::vector<int64_t> padding,
                                            int64_t dilation, bool silu,
                                            std::vector<bool> output_mask) {
  const char* op = "depthwise_conv1d_backward";
  auto g = geometry(op, input, weight, bias, stride, padding, dilation, silu);
  check_same(op, "input", input, "grad_output", grad_output);
  check_shape(op, "grad_output", grad_output, {g.n, g.c, g.out_t});
  check(output_mask.size() == 3, op, ": output_mask must be three booleans");
  const bool need_input = output_mask[0], need_weight = output_mask[1], need_bias = output_mask[2];
  const bool reads_input = need_weight || silu;
  const Tensor x = reads_input ? readable(input, g) : input;
  const Tensor w = as_contiguous(weight);
  const std::optional<Tensor> b = bias ? std::optional<Tensor>(as_contiguous(*bias)) : std::nullopt;
  const Tensor grad = as_contiguous(grad_output, g.channels_last);
  Tensor grad_input = empty_if(need_input, x, {g.n, g.c, g.t}, g.channels_last);
  Tensor grad_weight = empty_if(need_weight, w, {g.c, 1, g.taps});
  Tensor grad_bias = empty_if(need_bias, w, {g.c});
  dispatch_floating(op, x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (g.empty()) {  // empty sums
      zero_(grad_weight), zero_(grad_bias);
      return;
    }
    Backend::backward(
        x, g, grad.const_data_ptr<T>(), reads_input ? x.const_data_ptr<T>() : nullptr,
        w.const_data_ptr<T>(), data_or_null<T>(b),
        Gradients<T>{data_unless_empty<T>(grad_input), data_unless_empty<T>(grad_weight),
                     data_unless_empty<T>(grad_bias)});
  });
  return {grad_input, in_strides_of(weight, grad_weight), grad_bias};
}

}  // namespace ops::depthwise_conv1d
