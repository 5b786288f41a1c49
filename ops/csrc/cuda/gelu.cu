#include "gelu.h"
#include "pointwise_loop.cuh"

namespace ops::cuda {
namespace {

Tensor gelu(const Tensor& input) {
  return map<PointwiseLoop>("gelu", input, GeluForward{});
}

Tensor gelu_backward(const Tensor& grad_output, const Tensor& input) {
  return map_backward<PointwiseLoop>("gelu_backward", grad_output, "input", input, GeluBackward{});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("gelu", TORCH_BOX(&gelu));
  m.impl("gelu_backward", TORCH_BOX(&gelu_backward));
}

}  // namespace ops::cuda
