// exp: CUDA registration.
#include "core/cuda/elementwise_loop.cuh"
#include "exp/op.h"

namespace ops::cuda {

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("exp", TORCH_BOX(&exp<PointwiseLoop>));
  m.impl("exp_backward", TORCH_BOX(&exp_backward<PointwiseLoop>));
}

}  // namespace ops::cuda
