// Argument checks of the kernels. Fakes check the same (ops/core/check.py), with shorter messages.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/message.h"

namespace ops {

using torch::stable::Tensor;

// Throw std::runtime_error (RuntimeError in Python) if `condition` is false. The message is
// the concatenated parts.
template <typename... Args>
void check(bool condition, const Args&... parts) {
  if (!condition) {
    throw std::runtime_error(message(parts...));
  }
}

// Parts of messages, formatted only if a check fails. Integers as a Python list:
struct list {
  const std::vector<int64_t>& values;
};

inline void append(std::string& text, const list& l) {
  text += '[';
  for (size_t i = 0; i < l.values.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(l.values[i]);
  }
  text += ']';
}

// The shape of `x` as a Python list.
struct shape {
  const Tensor& x;
};

inline void append(std::string& text, const shape& s) {
  append(text, list{{s.x.sizes().begin(), s.x.sizes().end()}});
}

inline const char* dtype_name(torch::headeronly::ScalarType dtype) {
  using torch::headeronly::ScalarType;
  switch (dtype) {
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return torch::headeronly::toString(dtype);
  }
}

// The device of `x`: "cpu" or "cuda:0".
struct device {
  const Tensor& x;
};

inline void append(std::string& text, const device& d) {
  text += d.x.is_cuda() ? "cuda:" + std::to_string(d.x.get_device_index()) : "cpu";
}

inline void check_device(const char* op, const char* x_name, const Tensor& x,
                         const char* other_name, const Tensor& other) {
  check(other.is_cuda() == x.is_cuda() && other.get_device_index() == x.get_device_index(), op,
        ": ", other_name, " must be on the device of ", x_name, " (", device{x}, "), got ",
        device{other});
}

// Check that `other` has the dtype and device of `x`.
inline void check_same(const char* op, const char* x_name, const Tensor& x, const char* other_name,
                       const Tensor& other) {
  check(other.scalar_type() == x.scalar_type(), op, ": ", other_name, " must have the dtype of ",
        x_name, " (", dtype_name(x.scalar_type()), "), got ", dtype_name(other.scalar_type()));
  check_device(op, x_name, x, other_name, other);
}

inline void check_shape(const char* op, const char* name, const Tensor& x,
                        const std::vector<int64_t>& expected) {
  bool same = x.dim() == static_cast<int64_t>(expected.size());
  for (int64_t d = 0; same && d < x.dim(); ++d) {
    same = x.size(d) == expected[d];
  }
  check(same, op, ": ", name, " must have shape ", list{expected}, ", got ", shape{x});
}

inline void check_dtype(const char* op, const char* name, const Tensor& x,
                        torch::headeronly::ScalarType expected) {
  check(x.scalar_type() == expected, op, ": ", name, " must have dtype ", dtype_name(expected),
        ", got ", dtype_name(x.scalar_type()));
}

}  // namespace ops
