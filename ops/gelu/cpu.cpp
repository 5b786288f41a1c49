// gelu: schemas and CPU registration.
#include "gelu/op.h"

#define OPS_KERNELS "gelu/cpu_kernels.h"
#include "core/cpu/dispatch_isa.h"
#include "core/cpu/elementwise_loop.h"

namespace ops::cpu {

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def("gelu(Tensor input) -> Tensor");
  m.def("gelu_backward(Tensor grad_output, Tensor input) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  m.impl("gelu", TORCH_BOX(&gelu<PointwiseLoop>));
  m.impl("gelu_backward", TORCH_BOX(&gelu_backward<PointwiseLoop>));
}

}  // namespace ops::cpu
