#include "exp.h"

#define OPS_KERNELS "exp_kernels.h"
#include "for_each_isa.h"
#include "pointwise_loop.h"

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
