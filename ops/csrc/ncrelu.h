// ncrelu(x) = concat(max(x, 0), min(x, 0)) along `dim`: what both devices share.
#pragma once

#include "common.h"

namespace ops {

// Each half keeps NaN, as torch.clamp does.
template <typename T>
OPS_DEVICE T positive_part(T x) {
  return x < T(0) ? T(0) : x;
}

template <typename T>
OPS_DEVICE T negative_part(T x) {
  return x > T(0) ? T(0) : x;
}

// g₊ [x > 0] + g₋ [x < 0]
template <typename T>
OPS_DEVICE T ncrelu_gradient(T x, T grad_positive, T grad_negative) {
  return x > T(0) ? grad_positive : (x < T(0) ? grad_negative : T(0));
}

// Memory seen as `outer` rows: each is `inner` elements of the input, 2·inner of the output.
struct HalvesLayout {
  int64_t outer = 1;
  int64_t inner = 1;
};

inline int64_t wrap_dim(const char* op, int64_t dim, int64_t n) {
  check(n > 0, op, ": input must have at least one dimension, got []");
  check(-n <= dim && dim < n, op, ": dim must be in [", -n, ", ", n - 1, "], got ", dim);
  return dim < 0 ? dim + n : dim;
}

// x is in one of torch's memory formats.
inline HalvesLayout halves_layout(const Tensor& x, int64_t dim, MemoryFormat format) {
  const int64_t n = x.dim();
  const auto place = [&](int64_t d) {  // of dimension d in memory, outermost first
    if (format == MemoryFormat::Contiguous || d == 0) {
      return d;
    }
    return d == 1 ? n - 1 : d - 1;
  };
  HalvesLayout layout;
  for (int64_t d = 0; d < n; ++d) {
    (place(d) < place(dim) ? layout.outer : layout.inner) *= x.size(d);
  }
  return layout;
}

// An output with `size` channels along dim, otherwise like x, in memory format `format`.
inline Tensor empty_with_size(const Tensor& x, int64_t dim, int64_t size, MemoryFormat format) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes[dim] = size;
  return empty(x, sizes, format);
}

// ncrelu for one Backend, which brings the loops over memory.
template <typename Backend>
Tensor ncrelu(const Tensor& input, int64_t dim) {
  dim = wrap_dim("ncrelu", dim, input.dim());
  const MemoryFormat format = memory_format(input);
  const Tensor x = as_contiguous(input, format);
  Tensor out = empty_with_size(x, dim, 2 * x.size(dim), format);
  if (x.numel() > 0) {
    dispatch_floating("ncrelu", x.scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      Backend::forward(x, halves_layout(x, dim, format), x.const_data_ptr<T>(),
                       out.mutable_data_ptr<T>());
    });
  }
  return out;
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

}  // namespace ops
