// Calls from Python: a C function per operator, which converts its arguments by the schema.
//
// The C function takes exact types only, and only if no mode, transform or trace is active. A
// Python function, `fallback`, takes all other calls. torch.ops is slower: its parser is made for
// every type and overload. The library uses Python's stable ABI. The headers of libtorch_python
// need the full API, so the names used from it are declared here.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <Python.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>
#include <exception>
#include <utility>

extern __attribute__((visibility("default"))) PyObject *THPVariableClass, *ParameterClass;
__attribute__((visibility("default"))) PyObject* THPVariable_Wrap(const at::TensorBase& x);
namespace torch {
__attribute__((visibility("default"))) void translate_exception_to_python(
    const std::exception_ptr& error);
}

namespace ops {

// First members of a Python tensor (THPVariable).
struct PythonTensor {
  PyObject header;
  at::Tensor tensor;
};

// Return whether Python tensors of this torch are laid out like PythonTensor.
inline bool has_known_layout() {
  const at::Tensor x = at::empty({0});
  PyObject* const object = THPVariable_Wrap(x);
  const void* const expected = x.unsafeGetTensorImpl();
  const bool same = object && !std::memcmp(&reinterpret_cast<PythonTensor*>(object)->tensor,
                                           &expected, sizeof(expected));
  Py_XDECREF(object);
  return same;
}

// Return whether this thread has only the default dispatch keys, and no torch-function mode.
inline bool is_plain_state() {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return c10::default_included_set.has_all(included) && !at::impl::torch_function_mode_enabled();
}

// Releases Python's global interpreter lock (GIL) for its lifetime.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() { PyEval_RestoreThread(state_); }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

// The C function of one operator.
class Caller {
 public:
  // The function calls `op` and returns the first output. Unless `rank` is 0, calls whose first
  // argument has another rank go to `fallback`.
  Caller(c10::OperatorHandle op, int64_t rank, PyObject* fallback)
      : op_(std::move(op)), rank_(rank), fallback_(fallback) {
    Py_INCREF(fallback);
  }

  // Return the Python function. The Caller is never freed: operators live until the process ends.
  PyObject* function() {
    PyObject* const self = PyCapsule_New(this, nullptr, nullptr);
    return self ? PyCFunction_NewEx(&definition_, self, nullptr) : nullptr;
  }

 private:
  static PyObject* call(PyObject* self, PyObject* args) {
    const auto& caller = *static_cast<const Caller*>(PyCapsule_GetPointer(self, nullptr));
    try {
      torch::jit::Stack stack;
      stack.reserve(caller.op_.schema().arguments().size());
      if (is_plain_state() && caller.read(args, &stack)) {
        {
          const ReleasedGil released;
          caller.op_.callBoxed(stack);
        }
        return THPVariable_Wrap(stack[0].toTensor());
      }
    } catch (...) {
      torch::translate_exception_to_python(std::current_exception());
      return nullptr;
    }
    return PyObject_CallObject(caller.fallback_, args);
  }

  bool read(PyObject* args, torch::jit::Stack* stack) const {
    const auto& arguments = op_.schema().arguments();
    const auto count = static_cast<Py_ssize_t>(arguments.size());
    if (PyTuple_Size(args) != count) {
      return false;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!read(arguments[i], PyTuple_GetItem(args, i), stack)) {
        return false;
      }
    }
    return rank_ == 0 || stack->front().toTensor().dim() == rank_;
  }

  // Push an argument; return false unless its type is exactly that of the schema. An int[2] is a
  // tuple of two ints, or one int for both.
  static bool read(const c10::Argument& argument, PyObject* value, torch::jit::Stack* stack) {
    PyTypeObject* const type = Py_TYPE(value);
    int64_t ints[2];
    switch (argument.type()->kind()) {
      case c10::TypeKind::OptionalType:  // Tensor?, the only optional type in the schemas
        if (value == Py_None) {
          stack->emplace_back();
          return true;
        }
        [[fallthrough]];
      case c10::TypeKind::TensorType: {
        const auto exact = reinterpret_cast<PyObject*>(type);
        if (exact != THPVariableClass && exact != ParameterClass) {
          return false;
        }
        stack->emplace_back(reinterpret_cast<PythonTensor*>(value)->tensor);
        return true;
      }
      case c10::TypeKind::IntType:
        if (!read_int(value, ints)) {
          return false;
        }
        stack->emplace_back(ints[0]);
        return true;
      case c10::TypeKind::FloatType:
        if (type != &PyFloat_Type) {
          return false;
        }
        stack->emplace_back(PyFloat_AsDouble(value));
        return true;
      case c10::TypeKind::ListType: {
        const bool two = type == &PyTuple_Type && PyTuple_Size(value) == 2;
        if (argument.N() != 2 || !read_int(two ? PyTuple_GetItem(value, 0) : value, ints) ||
            !read_int(two ? PyTuple_GetItem(value, 1) : value, ints + 1)) {
          return false;
        }
        stack->emplace_back(c10::IntArrayRef(ints));
        return true;
      }
      case c10::TypeKind::BoolType:
        if (type != &PyBool_Type) {
          return false;
        }
        stack->emplace_back(value == Py_True);
        return true;
      default: return false;
    }
  }

  static bool read_int(PyObject* value, int64_t* to) {
    if (Py_TYPE(value) != &PyLong_Type) {
      return false;
    }
    int overflow = 0;
    *to = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow == 0;
  }

  c10::OperatorHandle op_;
  int64_t rank_;
  PyObject* fallback_;
  PyMethodDef definition_{op_.schema().name().c_str(), &call, METH_VARARGS, nullptr};
};

// make_caller(name, rank, fallback): see core/calls.py.
inline PyObject* make_caller(PyObject*, PyObject* args) {
  const char* name = nullptr;
  Py_ssize_t rank = 0;
  PyObject* fallback = nullptr;
  if (!PyArg_ParseTuple(args, "snO", &name, &rank, &fallback)) {
    return nullptr;
  }
  try {
    if (static const bool known_layout = has_known_layout(); !known_layout) {
      Py_INCREF(fallback);
      return fallback;
    }
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    return (new Caller(op, rank, fallback))->function();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

}  // namespace ops
