// Register autograd and autocast in C++, and call operators from Python. A single translation unit,
// because ATen's headers dominate the compile time.
#include "core/eager/autocast.h"
#include "core/eager/autograd.h"
#include "core/eager/call.h"

namespace ops {

TORCH_LIBRARY_FRAGMENT(lenet_ops_eager, library) {
  library.def(
      "register_autograd(str name, str variant, str? backward=None, str kinds='', "
      "int[] indices=[], int[] tensors=[]) -> ()",
      &register_autograd);
  library.def("register_autocast(str name, Device device, ScalarType? dtype) -> ()",
              &register_autocast);
}

}  // namespace ops

#define OPS_CONCATENATE(a, b) a##b
#define OPS_INIT(name) OPS_CONCATENATE(PyInit_, name)

PyMODINIT_FUNC OPS_INIT(TORCH_EXTENSION_NAME)() {
  static PyMethodDef functions[] = {{"make_caller", &ops::make_caller, METH_VARARGS, nullptr}, {}};
  static PyModuleDef module{
      PyModuleDef_HEAD_INIT, "_C_eager", nullptr, -1, functions, {}, {}, {}, {}};
  return PyModule_Create(&module);
}
