// ncrelu(x) = concat(max(x, 0), min(x, 0)) along `dim`: arguments, layout and allocation.
#pragma once

#include <tuple>

#include "core/layout.h"

namespace ops {

// Signs saved for backward instead of the input: 2 bits per element, bit 0 [x > 0], bit 1 [x < 0],
// four elements per byte from the low bits up, in memory order.
constexpr int kSignsPerByte = 4;

// Memory as [outer, inner] for the input and [outer, 2, inner] for the output.
struct HalvesLayout {
  int64_t outer = 1;
  int64_t inner = 1;

  int64_t elements() const { return outer * inner; }
  int64_t sign_bytes() const { return (elements() + kSignsPerByte - 1) / kSignsPerByte; }
};

inline int64_t wrap_dim(const char* op, int64_t dim, int64_t n) {
  check(n > 0, op, ": input must have at least one dimension, got []");
  check(-n <= dim && dim < n, op, ": dim must be in [", -n, ", ", n - 1, "], got ", dim);
  return dim < 0 ? dim + n : dim;
}

// Return the layout of x, which is dense in `format`.
inline HalvesLayout halves_layout(const Tensor& x, int64_t dim, MemoryFormat format) {
  const int64_t n = x.dim();
  HalvesLayout layout;
  int64_t* size = &layout.inner;
  for (int64_t k = 0; k < n; ++k) {
    const int64_t d = dim_from_inside(n, k, format);
    *size *= x.size(d);
    if (d == dim) {
      size = &layout.outer;
    }
  }
  return layout;
}

// Return an empty tensor like x with `size` elements along dim.
inline Tensor empty_with_size(const Tensor& x, int64_t dim, int64_t size, MemoryFormat format) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes[dim] = size;
  return empty(x, sizes, format);
}

// Check, allocate and call Backend's loop. Return (output, signs); signs are empty if not needed.
template <typename Backend>
std::tuple<Tensor, Tensor> ncrelu_forward(const char* op, const Tensor& input, int64_t dim,
                                          bool needs_signs) {
  dim = wrap_dim(op, dim, input.dim());
  const MemoryFormat format = memory_format(input);
  const Tensor x = as_contiguous(input, format);
  const HalvesLayout layout = halves_layout(x, dim, format);
  Tensor out = empty_with_size(x, dim, 2 * x.size(dim), format), signs;
  uint8_t* bytes = nullptr;
  if (needs_signs) {
    signs = empty(x, {layout.sign_bytes()}, ScalarType::Byte);
    bytes = signs.mutable_data_ptr<uint8_t>();
  }
  if (x.numel() > 0) {
    dispatch_floating(op, x.scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      Backend::forward(x, layout, x.const_data_ptr<T>(), out.mutable_data_ptr<T>(), bytes);
    });
  }
  return {out, signs};
}

template <typename Backend>
Tensor ncrelu(const Tensor& input, int64_t dim) {
  return std::get<0>(ncrelu_forward<Backend>("ncrelu", input, dim, /*needs_signs=*/false));
}

template <typename Backend>
std::tuple<Tensor, Tensor> ncrelu_with_signs(const Tensor& input, int64_t dim) {
  return ncrelu_forward<Backend>("ncrelu_with_signs", input, dim, /*needs_signs=*/true);
}

template <typename Backend>
Tensor ncrelu_backward(const Tensor& grad_output, const Tensor& input, int64_t dim) {
  dim = wrap_dim("ncrelu_backward", dim, input.dim());
  check_same("ncrelu_backward", "input", input, "grad_output", grad_output);
  std::vector<int64_t> expected(input.sizes().begin(), input.sizes().end());
  expected[dim] *= 2;
  check_shape("ncrelu_backward", "grad_output", grad_output, expected);
  const MemoryFormat format = memory_format(input);
  const Tensor x = as_contiguous(input, format);
  const Tensor g = as_contiguous(grad_output, format);
  Tensor out = empty_with_size(x, dim, x.size(dim), format);
  if (x.numel() > 0) {
    dispatch_floating("ncrelu_backward", x.scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      Backend::backward(x, halves_layout(x, dim, format), g.const_data_ptr<T>(),
                        x.const_data_ptr<T>(), out.mutable_data_ptr<T>());
    });
  }
  return out;
}

// `channels_last`: memory format of the input.
template <typename Backend>
Tensor ncrelu_with_signs_backward(const Tensor& grad_output, const Tensor& signs, int64_t dim,
                                  bool channels_last) {
  const char* op = "ncrelu_with_signs_backward";
  const int64_t n = grad_output.dim();
  dim = wrap_dim(op, dim, n);
  check(grad_output.size(dim) % 2 == 0, op, ": grad_output must have an even size in dimension ",
        dim, ", got ", shape{grad_output});
  check(!channels_last || n == 4 || n == 5, op,
        ": channels_last needs a grad_output of 4 or 5 dimensions, got ", shape{grad_output});
  const MemoryFormat format = memory_format(n, channels_last);
  const Tensor g = as_contiguous(grad_output, format);
  Tensor out = empty_with_size(g, dim, g.size(dim) / 2, format);
  const HalvesLayout layout = halves_layout(out, dim, format);
  check_shape(op, "signs", signs, {layout.sign_bytes()});
  check_device(op, "grad_output", grad_output, "signs", signs);
  const Tensor kept = as_contiguous(signs);
  if (out.numel() > 0) {
    dispatch_floating(op, g.scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      check_dtype(op, "signs", signs, ScalarType::Byte);
      Backend::backward(g, layout, g.const_data_ptr<T>(), kept.const_data_ptr<uint8_t>(),
                        out.mutable_data_ptr<T>());
    });
  }
  return out;
}

}  // namespace ops
