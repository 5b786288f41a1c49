// What every operator shares: argument checks, dtype dispatch, memory layout.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "core/compat.h"

// For functions that CPU and CUDA kernels share.
#ifdef __CUDACC__
#define OPS_DEVICE __host__ __device__
#else
#define OPS_DEVICE
#endif

namespace ops {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Sums and transcendental functions of T are computed in acc_t<T>.
template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Raises a Python RuntimeError with the message that the other arguments make.
template <typename... Args>
void check(bool condition, const Args&... message) {
  if (!condition) {
    std::ostringstream text;
    (text << ... << message);
    throw std::runtime_error(text.str());
  }
}

// Prints a shape into a message, only where the message is made.
struct shape {
  const Tensor& x;
};

inline std::ostream& operator<<(std::ostream& out, const shape& s) {
  out << '[';
  for (int64_t d = 0; d < s.x.dim(); ++d) {
    out << (d ? ", " : "") << s.x.size(d);
  }
  return out << ']';
}

// And a device.
struct device {
  const Tensor& x;
};

inline std::ostream& operator<<(std::ostream& out, const device& d) {
  return d.x.is_cuda() ? out << "cuda:" << d.x.get_device_index() : out << "cpu";
}

inline void check_device(const char* op, const char* x_name, const Tensor& x,
                         const char* other_name, const Tensor& other) {
  check(other.is_cuda() == x.is_cuda() && other.get_device_index() == x.get_device_index(), op,
        ": ", other_name, " must be on the device of ", x_name, " (", device{x}, "), got ",
        device{other});
}

// `other` must match `x` in dtype and device: kernels read both through one pointer type.
inline void check_same(const char* op, const char* x_name, const Tensor& x, const char* other_name,
                       const Tensor& other) {
  check(other.scalar_type() == x.scalar_type(), op, ": ", other_name, " must have the dtype of ",
        x_name, " (", torch::headeronly::toString(x.scalar_type()), "), got ",
        torch::headeronly::toString(other.scalar_type()));
  check_device(op, x_name, x, other_name, other);
}

inline void check_shape(const char* op, const char* name, const Tensor& x,
                        const std::vector<int64_t>& expected) {
  bool same = x.dim() == static_cast<int64_t>(expected.size());
  for (int64_t d = 0; same && d < x.dim(); ++d) {
    same = x.size(d) == expected[d];
  }
  if (!same) {
    std::ostringstream text;
    for (size_t d = 0; d < expected.size(); ++d) {
      text << (d ? ", " : "") << expected[d];
    }
    check(false, op, ": ", name, " must have shape [", text.str(), "], got ", shape{x});
  }
}

// A gradient must match the tensor that it belongs to in shape, dtype and device.
inline void check_like(const char* op, const char* name, const Tensor& x, const char* other_name,
                       const Tensor& other) {
  bool same = x.dim() == other.dim();
  for (int64_t d = 0; same && d < x.dim(); ++d) {
    same = x.size(d) == other.size(d);
  }
  check(same, op, ": ", name, " must have the shape of ", other_name, " (", shape{other}, "), got ",
        shape{x});
  check_same(op, other_name, other, name, x);
}

template <typename T>
struct type_tag {
  using type = T;
};

// Calls f(type_tag<T>{}) with the C++ type of `dtype`.
template <typename F>
void dispatch_floating(const char* op, ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Double: return f(type_tag<double>{});
    case ScalarType::Float: return f(type_tag<float>{});
    case ScalarType::Half: return f(type_tag<Half>{});
    case ScalarType::BFloat16: return f(type_tag<BFloat16>{});
    default:
      check(false, op, ": not implemented for dtype ", torch::headeronly::toString(dtype),
            "; allowed are Double, Float, Half and BFloat16");
  }
}

// Dimensions of a channels-last layout from the innermost outwards: C, the last spatial one, …, N.
inline int64_t channels_last_dim(int64_t n, int64_t k) {
  return k == 0 ? 1 : (k == n - 1 ? 0 : n - k);
}

// Whether x has a channels-last layout (4-D NHWC or 5-D NDHWC), decided as torch decides it:
// from the strides, and in favour of contiguous where a tensor is both and they tell nothing.
inline bool is_channels_last(const Tensor& x) {
  const int64_t n = x.dim();
  if ((n != 4 && n != 5) || x.stride(1) == 0) {
    return false;
  }
  int64_t least = 0;
  for (int64_t k = 0; k < n; ++k) {
    const int64_t d = channels_last_dim(n, k);
    if (x.size(d) == 0 || x.stride(d) < least || (d == 0 && least == x.stride(1))) {
      return false;
    }
    least = x.size(d) > 1 ? x.stride(d) * x.size(d) : x.stride(d);
  }
  return true;
}

inline MemoryFormat memory_format(const Tensor& x) {
  if (!is_channels_last(x)) {
    return MemoryFormat::Contiguous;
  }
  return x.dim() == 4 ? MemoryFormat::ChannelsLast : MemoryFormat::ChannelsLast3d;
}

// Strides of a tensor of so many elements each way whose memory has no gaps.
inline std::vector<int64_t> strides_of(const std::vector<int64_t>& sizes, MemoryFormat format) {
  const int64_t n = sizes.size();
  std::vector<int64_t> strides(n);
  int64_t next = 1;
  if (format == MemoryFormat::Contiguous) {
    for (int64_t d = n - 1; d >= 0; --d) {
      strides[d] = next;
      next *= std::max<int64_t>(sizes[d], 1);
    }
    return strides;
  }
  for (int64_t k = 0; k < n; ++k) {
    const int64_t d = channels_last_dim(n, k);
    strides[d] = next;
    next *= sizes[d];
  }
  return strides;
}

// A new tensor on the device of `like`. Not through torch::stable::empty, which makes the
// dispatcher look for its operator by name, every time.
inline Tensor empty_strided(const Tensor& like, const int64_t* sizes, const int64_t* strides,
                            int64_t dim, ScalarType dtype) {
  int32_t device = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  const auto type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dim, sizes, strides, type, device, like.get_device_index(), &made));
  return Tensor(made);
}

inline Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  const auto strides = strides_of(sizes, MemoryFormat::Contiguous);
  return empty_strided(like, sizes.data(), strides.data(), sizes.size(), dtype);
}

inline Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes,
                    MemoryFormat format = MemoryFormat::Contiguous) {
  const auto strides = strides_of(sizes, format);
  return empty_strided(like, sizes.data(), strides.data(), sizes.size(), like.scalar_type());
}

// In the layout of x, too, which is dense.
inline Tensor empty_as(const Tensor& x) {
  return empty_strided(x, x.sizes().data(), x.strides().data(), x.dim(), x.scalar_type());
}

// x where it has that format, else a copy that has it.
inline Tensor as_contiguous(const Tensor& x, MemoryFormat format = MemoryFormat::Contiguous) {
  const auto strides = strides_of({x.sizes().begin(), x.sizes().end()}, format);
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) != 1 && x.stride(d) != strides[d]) {
      return torch::stable::contiguous(x, format);
    }
  }
  return x;
}

// Whether x's elements fill their memory without gap or overlap, in whatever order.
inline bool is_dense(const Tensor& x) {
  if (x.numel() == 0 || x.is_contiguous()) {
    return true;
  }
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  int64_t expected = 1;  // the stride that the next dimension outwards must have
  for (bool found = true; found;) {
    found = false;
    for (size_t d = 0; d < sizes.size() && !found; ++d) {
      if (sizes[d] > 1 && strides[d] == expected) {
        expected *= sizes[d];
        found = true;
      }
    }
  }
  return expected == x.numel();
}

// x where it is dense, else a dense copy with the strides that empty_as(x) has.
inline Tensor dense(const Tensor& x) {
  return is_dense(x) ? x : torch::stable::clone(x);
}

// x where its strides are those of `other` (dense, same shape), else a copy that has them.
inline Tensor with_layout_of(const Tensor& x, const Tensor& other) {
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) > 1 && x.stride(d) != other.stride(d)) {
      Tensor copy = empty_as(other);
      return torch::stable::copy_(copy, x);
    }
  }
  return x;
}

}  // namespace ops
