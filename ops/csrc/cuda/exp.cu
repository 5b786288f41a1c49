#include "exp.h"
#include "pointwise_loop.cuh"

namespace ops::cuda {
namespace {

Tensor exp(const Tensor& input) {
  return map<PointwiseLoop>("exp", input, ExpForward{});
}

Tensor exp_backward(const Tensor& grad_output, const Tensor& output) {
  return map_backward<PointwiseLoop>("exp_backward", grad_output, "output", output, ExpBackward{});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("exp", TORCH_BOX(&exp));
  m.impl("exp_backward", TORCH_BOX(&exp_backward));
}

}  // namespace ops::cuda
