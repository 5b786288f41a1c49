#include "exp.h"

#define OPS_KERNELS "exp_kernels.h"
#include "for_each_isa.h"
#include "pointwise_loop.h"

namespace ops::cpu {
namespace {

Tensor exp(const Tensor& input) {
  return map<PointwiseLoop>("exp", input, ExpForward{});
}

Tensor exp_backward(const Tensor& grad_output, const Tensor& output) {
  return map_backward<PointwiseLoop>("exp_backward", grad_output, "output", output, ExpBackward{});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def("exp(Tensor input) -> Tensor");
  m.def("exp_backward(Tensor grad_output, Tensor output) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  m.impl("exp", TORCH_BOX(&exp));
  m.impl("exp_backward", TORCH_BOX(&exp_backward));
}

}  // namespace ops::cpu
