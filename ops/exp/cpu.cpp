// exp: schemas and CPU registration.
#include "core/cpu/elementwise_loop.h"
#include "exp/op.h"

namespace ops::exp {

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def("exp(Tensor input) -> Tensor");
  m.def("exp_backward(Tensor grad_output, Tensor output) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  m.impl("exp", TORCH_BOX(&cpu::Elementwise::forward<Forward>));
  m.impl("exp_backward", TORCH_BOX(&cpu::Elementwise::backward<Backward>));
}

}  // namespace ops::exp
