// Memory formats: queries, allocation, and copies into the layout that a kernel needs.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "core/check.h"
#include "core/compat.h"
#include "core/dtype.h"

namespace ops {

// Return the k-th innermost dimension of a contiguous or channels-last layout. The latter has, from
// inside, C, the last spatial dimension, …, N.
inline int64_t dim_from_inside(int64_t n, int64_t k, bool channels_last) {
  return !channels_last ? n - 1 - k : k == 0 ? 1 : k == n - 1 ? 0 : n - k;
}

// Return whether x is channels-last (4-D NHWC or 5-D NDHWC). Same rules as torch's
// suggest_memory_format: by strides; ambiguous tensors count as contiguous.
inline bool is_channels_last(const Tensor& x) {
  const int64_t n = x.dim();
  if ((n != 4 && n != 5) || x.stride(1) == 0) {
    return false;
  }
  int64_t min_stride = 0;
  for (int64_t k = 0; k < n; ++k) {
    const int64_t d = dim_from_inside(n, k, /*channels_last=*/true);
    if (x.size(d) == 0 || x.stride(d) < min_stride || (d == 0 && min_stride == x.stride(1))) {
      return false;
    }
    min_stride = x.size(d) > 1 ? x.stride(d) * x.size(d) : x.stride(d);
  }
  return true;
}

// Return the strides of a dense tensor of shape `sizes`.
inline std::vector<int64_t> strides_of(const std::vector<int64_t>& sizes, bool channels_last) {
  const int64_t n = sizes.size();
  std::vector<int64_t> strides(n);
  int64_t stride = 1;
  for (int64_t k = 0; k < n; ++k) {
    const int64_t d = dim_from_inside(n, k, channels_last);
    strides[d] = stride;
    stride *= channels_last ? sizes[d] : std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

inline int32_t shim_dtype(ScalarType dtype) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
}

// Return the size of a dense tensor in bytes, at most 2⁶³ − 1.
inline int64_t bytes_of(const int64_t* sizes, int64_t dim, ScalarType dtype) {
  int64_t bytes = aoti_torch_dtype_element_size(shim_dtype(dtype));
  for (int64_t d = 0; d < dim; ++d) {
    if (__builtin_mul_overflow(bytes, sizes[d], &bytes)) {
      return std::numeric_limits<int64_t>::max();
    }
  }
  return bytes;
}

// Run call(), which allocates a dense tensor on the device of `like`. The stable ABI loses the type
// of an exception, so a failure is thrown as "cannot allocate N bytes on DEVICE"; memory.py or
// eager/memory.h then repeats the allocation to raise PyTorch's own exception.
template <typename Call>
Tensor allocate(const Tensor& like, const int64_t* sizes, int64_t dim, ScalarType dtype,
                const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    throw std::runtime_error(message("cannot allocate ", bytes_of(sizes, dim, dtype), " bytes on ",
                                     device{like}, ": ", error.what()));
  }
}

// Allocate a tensor on the device of `like`. Unlike torch::stable::empty, which looks up its
// operator by name at every call, this costs no lookup.
inline Tensor empty_strided(const Tensor& like, const int64_t* sizes, const int64_t* strides,
                            int64_t dim, ScalarType dtype) {
  int32_t device = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  return allocate(like, sizes, dim, dtype, [&] {
    AtenTensorHandle out = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, sizes, strides, shim_dtype(dtype),
                                                           device, like.get_device_index(), &out));
    return Tensor(out);
  });
}

inline Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  const auto strides = strides_of(sizes, /*channels_last=*/false);
  return empty_strided(like, sizes.data(), strides.data(), sizes.size(), dtype);
}

inline Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes,
                    bool channels_last = false) {
  const auto strides = strides_of(sizes, channels_last);
  return empty_strided(like, sizes.data(), strides.data(), sizes.size(), like.scalar_type());
}

// Allocate a result, of shape [0] if it is not needed.
inline Tensor empty_if(bool needed, const Tensor& like, const std::vector<int64_t>& sizes,
                       bool channels_last = false) {
  return needed ? empty(like, sizes, channels_last) : empty(like, {0});
}

// Return the data of a result, or nullptr if it is empty.
template <typename T>
T* data_unless_empty(const Tensor& x) {
  return x.numel() > 0 ? x.mutable_data_ptr<T>() : nullptr;
}

// Allocate a tensor with the shape, strides and dtype of the dense tensor x.
inline Tensor empty_as(const Tensor& x) {
  return empty_strided(x, x.sizes().data(), x.strides().data(), x.dim(), x.scalar_type());
}

template <typename T>
const T* data_or_null(const std::optional<Tensor>& x) {
  return x ? x->const_data_ptr<T>() : nullptr;
}

// Return `to` after x has been copied to it. Unlike torch::stable::copy_, which looks up its
// operator by name at every call, this costs no lookup.
inline Tensor copy_to(const Tensor& to, const Tensor& x) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(to.get(), x.get(), /*non_blocking=*/0));
  return to;
}

// Return x in `dtype`: x itself, or a contiguous copy.
inline Tensor to_dtype(const Tensor& x, ScalarType dtype) {
  return x.scalar_type() == dtype
             ? x
             : copy_to(empty(x, {x.sizes().begin(), x.sizes().end()}, dtype), x);
}

// Return x if it is contiguous (or channels-last), else a copy that is.
inline Tensor as_contiguous(const Tensor& x, bool channels_last = false) {
  const auto sizes = x.sizes(), strides = x.strides();
  const int64_t n = sizes.size();
  int64_t stride = 1;
  for (int64_t k = 0; k < n; ++k) {
    const int64_t d = dim_from_inside(n, k, channels_last);
    if (sizes[d] != 1 && strides[d] != stride) {
      return copy_to(empty(x, {sizes.begin(), sizes.end()}, channels_last), x);
    }
    stride *= sizes[d];
  }
  return x;
}

// Return x contiguous in `dtype`: x itself, or a copy.
inline std::optional<Tensor> in_dtype(const std::optional<Tensor>& x, ScalarType dtype) {
  return x ? std::optional(as_contiguous(to_dtype(*x, dtype))) : std::nullopt;
}

// Return whether x is non-overlapping and dense: no gaps, dimensions in any order.
inline bool is_dense(const Tensor& x) {
  if (x.numel() == 0 || x.is_contiguous()) {
    return true;
  }
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  int64_t expected = 1;  // stride of the next outer dimension
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

// Return x if it is dense, else a dense copy.
inline Tensor dense(const Tensor& x) {
  return is_dense(x) ? x : allocate(x, x.sizes().data(), x.dim(), x.scalar_type(), [&] {
    return torch::stable::clone(x);
  });
}

// Return x if it has the strides of `other` (dense, same shape), else a copy with these strides.
inline Tensor with_layout_of(const Tensor& x, const Tensor& other) {
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) > 1 && x.stride(d) != other.stride(d)) {
      return copy_to(empty_as(other), x);
    }
  }
  return x;
}

// Return `gradient` with the strides of the parameter x if x is dense: those of
// DistributedDataParallel's buckets, also along dimensions of size 1. Allocate it as empty_as(x) if
// x is contiguous: it is then not copied. A gradient of shape [0], not needed, stays as it is.
inline Tensor in_strides_of(const Tensor& x, const Tensor& gradient) {
  if (gradient.dim() != x.dim() || gradient.numel() != x.numel()) {
    return gradient;
  }
  const auto strides = x.strides(), given = gradient.strides();
  const bool same = std::equal(strides.begin(), strides.end(), given.begin());
  return same || !is_dense(x) ? gradient : copy_to(empty_as(x), gradient);
}

}  // namespace ops
