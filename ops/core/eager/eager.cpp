// Registers autograd and autocast without Python. One file: ATen's headers compile longer than all
// that follows.
#include "core/eager/autocast.h"
#include "core/eager/autograd.h"

namespace ops {

TORCH_LIBRARY_IMPL(lenet_ops, AutogradCPU, library) {
  record_all(library);
}

TORCH_LIBRARY_IMPL(lenet_ops, AutogradCUDA, library) {
  record_all(library);
}

TORCH_LIBRARY(lenet_ops_eager, library) {
  library.def("register_autocast(str name, Device device, ScalarType? dtype) -> ()",
              &register_autocast);
}

}  // namespace ops
