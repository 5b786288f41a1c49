// exp: CUDA registration.
#include "core/cuda/elementwise_loop.cuh"
#include "exp/op.h"

namespace ops::cuda {

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("exp", TORCH_BOX(&Elementwise::forward<ExpForward>));
  m.impl("exp_backward", TORCH_BOX(&Elementwise::backward<ExpBackward>));
}

}  // namespace ops::cuda
