// gelu: schemas and CPU registration.
#include "core/cpu/elementwise_loop.h"
#include "gelu/op.h"

namespace ops::gelu {

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def("gelu(Tensor input) -> Tensor");
  m.def("gelu_backward(Tensor grad_output, Tensor input) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  m.impl("gelu", TORCH_BOX(&cpu::Elementwise::forward<Forward>));
  m.impl("gelu_backward", TORCH_BOX(&cpu::Elementwise::backward<Backward>));
}

}  // namespace ops::gelu
