// Argument checks. ops/core/check.py has those of fakes, with the same messages.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/compat.h"

namespace ops {

using torch::stable::Tensor;

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

}  // namespace ops
