// Register autograd and autocast in C++. A single translation unit, because ATen's headers dominate
// the compile time.
#include "core/eager/autocast.h"
#include "core/eager/autograd.h"

namespace ops {

TORCH_LIBRARY_FRAGMENT(lenet_ops_eager, library) {
  library.def(
      "register_autograd(str name, str recorded, str backward, str[] kinds, int[] indices) -> ()",
      &register_autograd);
  library.def("register_autocast(str name, Device device, ScalarType? dtype) -> ()",
              &register_autocast);
}

}  // namespace ops
