// ncrelu(x) = concat(max(x, 0), min(x, 0)) along `dim`: arguments and allocation.
//
// In memory x is rows of `inner` elements, in any format; the output has two rows for each of them:
//
//   x [row][inner]            out [row][2][inner]
//   ┌───────────┐             ┌───────────┬───────────┐
//   │ row r     │ ──────────► │ max(x, 0) │ min(x, 0) │
//   └───────────┘             └───────────┴───────────┘
#pragma once

#include <tuple>

#include "core/layout.h"

namespace ops::ncrelu {

// Signs saved for backward instead of the input: 2 bits per element, bit 0 [x > 0], bit 1 [x < 0],
// four elements per byte from the low bits up, in memory order.
constexpr int kSignsPerByte = 4;

inline int64_t sign_bytes(int64_t elements) {
  return (elements + kSignsPerByte - 1) / kSignsPerByte;
}

inline int64_t wrap_dim(const char* op, int64_t dim, int64_t n) {
  check(n > 0, op, ": input must have at least one dimension, got []");
  check(-n <= dim && dim < n, op, ": dim must be in [", -n, ", ", n - 1, "], got ", dim);
  return dim < 0 ? dim + n : dim;
}

// Return an empty tensor like x with `size` elements along dim.
inline Tensor empty_with_size(const Tensor& x, int64_t dim, int64_t size, bool channels_last) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes[dim] = size;
  return empty(x, sizes, channels_last);
}

// Check, allocate and call Backend's loop. Return (output, signs); signs are empty if not needed.
template <typename Backend>
std::tuple<Tensor, Tensor> forward(const char* op, const Tensor& input, int64_t dim,
                                   bool needs_signs) {
  dim = wrap_dim(op, dim, input.dim());
  const bool channels_last = is_channels_last(input);
  const Tensor x = as_contiguous(input, channels_last);
  const Tensor out = empty_with_size(x, dim, 2 * x.size(dim), channels_last);
  Tensor signs;
  uint8_t* bytes = nullptr;
  if (needs_signs) {
    signs = empty(x, {sign_bytes(x.numel())}, ScalarType::Byte);
    bytes = signs.mutable_data_ptr<uint8_t>();
  }
  dispatch_floating(op, x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (x.numel() > 0) {
      Backend::forward(x, x.size(dim) * out.stride(dim), x.const_data_ptr<T>(),
                       out.mutable_data_ptr<T>(), bytes);
    }
  });
  return {out, signs};
}

template <typename Backend>
Tensor ncrelu(const Tensor& input, int64_t dim) {
  return std::get<0>(forward<Backend>("ncrelu", input, dim, /*needs_signs=*/false));
}

template <typename Backend>
std::tuple<Tensor, Tensor> ncrelu_with_signs(const Tensor& input, int64_t dim) {
  return forward<Backend>("ncrelu_with_signs", input, dim, /*needs_signs=*/true);
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
  const Tensor grad = as_contiguous(grad_output, channels_last);
  const Tensor out = empty_with_size(grad, dim, grad.size(dim) / 2, channels_last);
  check_shape(op, "signs", signs, {sign_bytes(out.numel())});
  check_device(op, "grad_output", grad_output, "signs", signs);
  const Tensor bytes = as_contiguous(signs);
  dispatch_floating(op, grad.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    check_dtype(op, "signs", signs, ScalarType::Byte);
    if (out.numel() > 0) {
      Backend::backward(out, out.size(dim) * out.stride(dim), grad.const_data_ptr<T>(),
                        bytes.const_data_ptr<uint8_t>(), out.mutable_data_ptr<T>());
    }
  });
  return out;
}

}  // namespace ops::ncrelu
