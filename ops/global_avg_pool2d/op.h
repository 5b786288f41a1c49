// Global average pooling: arguments, memory layout and allocation, the same on every device.
#pragma once

#include "core/layout.h"

namespace ops::global_avg_pool2d {

// Memory as [outer, length, inner], averaged over the length: NCHW is [N·C, H·W, 1], NHWC
// [N, H·W, C]. The result [outer, inner] is [N, C] for both.
struct PoolLayout {
  int64_t outer, length, inner;
};

inline PoolLayout pool_layout(const Tensor& image, bool channels_last) {
  const int64_t n = image.size(0), c = image.size(1), area = image.size(2) * image.size(3);
  return channels_last ? PoolLayout{n, area, c} : PoolLayout{n * c, area, 1};
}

// Check, allocate and call Backend's kernel.
template <typename Backend>
Tensor forward(const Tensor& input) {
  const char* op = "global_avg_pool2d";
  check(input.dim() == 4, op, ": input must have shape [N, C, H, W], got ", shape{input});
  const bool channels_last = is_channels_last(input);
  const Tensor x = as_contiguous(input, channels_last);
  Tensor out = empty(x, {x.size(0), x.size(1), 1, 1}, channels_last);
  dispatch_floating(op, x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (out.numel() > 0) {
      Backend::forward(x, pool_layout(x, channels_last), x.const_data_ptr<T>(),
                       out.mutable_data_ptr<T>());
    }
  });
  return out;
}

template <typename Backend>
Tensor backward(const Tensor& grad_output, int64_t height, int64_t width, bool channels_last) {
  const char* op = "global_avg_pool2d_backward";
  check(grad_output.dim() == 4 && grad_output.size(2) == 1 && grad_output.size(3) == 1, op,
        ": grad_output must have shape [N, C, 1, 1], got ", shape{grad_output});
  check(height >= 0 && width >= 0, op, ": height and width must be at least 0, got ", height,
        " and ", width);
  const Tensor grad = as_contiguous(grad_output);
  Tensor out = empty(grad, {grad.size(0), grad.size(1), height, width}, channels_last);
  dispatch_floating(op, grad.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (out.numel() > 0) {
      Backend::backward(grad, pool_layout(out, channels_last), grad.const_data_ptr<T>(),
                        out.mutable_data_ptr<T>());
    }
  });
  return out;
}

}  // namespace ops::global_avg_pool2d
