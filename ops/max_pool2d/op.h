// Max pooling: arguments, geometry and output allocation, the same on every device.
#pragma once

#include <tuple>

#include "core/windows.h"

namespace ops::max_pool2d {

// The tap of a maximum, its row-major index in the window, is stored as uint8 in windows of fewer
// than kByteTaps pixels, else as int64. kNoTap (uint8: 255): all pixels are padding.
constexpr int64_t kByteTaps = 256;
constexpr int kNoTap = -1;

// In place of a pointer to indices: forward stores none.
struct NoIndices {
  OPS_DEVICE void operator+=(int64_t) {}
};

struct Geometry : Windows {
  int64_t n, c;
  bool channels_last;  // of input, output, indices and gradients

  int64_t taps() const { return kernel_h * kernel_w; }
  int64_t outputs() const { return n * c * out_h * out_w; }
  ScalarType index_type() const { return taps() < kByteTaps ? ScalarType::Byte : ScalarType::Long; }
};

// Check the arguments for `x` (input or grad_output) and an input of h × w pixels.
inline Geometry geometry(const char* op, const Tensor& x, int64_t h, int64_t w,
                         const std::vector<int64_t>& kernel_size, const Spacing& spacing,
                         bool ceil_mode, bool channels_last) {
  check_pair(op, "kernel_size", kernel_size, 1);
  const Geometry g{windows(op, h, w, kernel_size[0], kernel_size[1], spacing, ceil_mode), x.size(0),
                   x.size(1), channels_last};
  check(h > 0 && w > 0, op, ": the input must have pixels, got height ", h, " and width ", w);
  check(g.kernel_h <= (int64_t{1} << 31) / g.kernel_w, op,
        ": kernel_size must have at most 2^31 pixels, got [", g.kernel_h, ", ", g.kernel_w, "]");
  check(g.padding_h <= g.kernel_h / 2 && g.padding_w <= g.kernel_w / 2, op,
        ": padding must be at most half of kernel_size, [", g.kernel_h / 2, ", ", g.kernel_w / 2,
        "], got [", g.padding_h, ", ", g.padding_w, "]");
  return g;
}

template <typename F>
void dispatch_index(ScalarType type, const F& f) {
  type == ScalarType::Byte ? f(type_tag<uint8_t>{}) : f(type_tag<int64_t>{});
}

// Return the output or, if Result is a tuple, output and indices.
template <typename Backend, typename Result>
Result forward(const Tensor& input, std::vector<int64_t> kernel_size, std::vector<int64_t> stride,
               std::vector<int64_t> padding, std::vector<int64_t> dilation, bool ceil_mode) {
  constexpr bool kIndices = !std::is_same_v<Result, Tensor>;
  const char* op = kIndices ? "max_pool2d_with_indices" : "max_pool2d";
  check(input.dim() == 4, op, ": input must have shape [N, C, H, W], got ", shape{input});
  const auto g = geometry(op, input, input.size(2), input.size(3), kernel_size,
                          {stride, padding, dilation}, ceil_mode, is_channels_last(input));
  const Tensor x = as_contiguous(input, g.channels_last);
  Tensor out = empty(x, {g.n, g.c, g.out_h, g.out_w}, g.channels_last);
  const auto run = [&](auto indices) {
    dispatch_floating(op, x.scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      if (out.numel() > 0) {
        Backend::forward(x, g, x.const_data_ptr<T>(), out.mutable_data_ptr<T>(), indices);
      }
    });
  };
  if constexpr (kIndices) {
    Tensor indices =
        empty_strided(out, out.sizes().data(), out.strides().data(), 4, g.index_type());
    dispatch_index(g.index_type(), [&](auto tag) {
      run(indices.mutable_data_ptr<typename decltype(tag)::type>());
    });
    return {out, indices};
  } else {
    run(NoIndices{});
    return out;
  }
}

template <typename Backend>
Tensor backward(const Tensor& grad_output, const Tensor& indices, std::vector<int64_t> kernel_size,
                std::vector<int64_t> stride, std::vector<int64_t> padding,
                std::vector<int64_t> dilation, bool ceil_mode, int64_t height, int64_t width,
                bool channels_last) {
  const char* op = "max_pool2d_with_indices_backward";
  check(grad_output.dim() == 4, op, ": grad_output must have shape [N, C, Ho, Wo], got ",
        shape{grad_output});
  const auto g = geometry(op, grad_output, height, width, kernel_size, {stride, padding, dilation},
                          ceil_mode, channels_last);
  check_shape(op, "grad_output", grad_output, {g.n, g.c, g.out_h, g.out_w});
  check_shape(op, "indices", indices, {g.n, g.c, g.out_h, g.out_w});
  check_device(op, "grad_output", grad_output, "indices", indices);
  const Tensor grad = as_contiguous(grad_output, channels_last);
  const Tensor taps = as_contiguous(indices, channels_last);
  Tensor out = empty(grad, {g.n, g.c, g.h, g.w}, channels_last);
  dispatch_floating(op, grad.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    check_dtype(op, "indices", indices, g.index_type());
    dispatch_index(g.index_type(), [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      if (out.numel() > 0) {
        Backend::backward(grad, g, grad.const_data_ptr<T>(), taps.const_data_ptr<I>(),
                          out.mutable_data_ptr<T>());
      }
    });
  });
  return out;
}

}  // namespace ops::max_pool2d
