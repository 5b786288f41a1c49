// exp: schemas and CPU registration.
#include "exp/op.h"

#define OPS_KERNELS "exp/cpu_kernels.h"
#include "core/cpu/dispatch_isa.h"
#include "core/cpu/elementwise_loop.h"

namespace ops::cpu {

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def("exp(Tensor input) -> Tensor");
  m.def("exp_backward(Tensor grad_output, Tensor output) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  m.impl("exp", TORCH_BOX(&exp<PointwiseLoop>));
  m.impl("exp_backward", TORCH_BOX(&exp_backward<PointwiseLoop>));
}

}  // namespace ops::cpu
