// exp: CUDA registration.
#include "core/cuda/elementwise_loop.cuh"
#include "exp/op.h"

namespace ops::exp {

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("exp", TORCH_BOX(&cuda::Elementwise::forward<Forward>));
  m.impl("exp_backward", TORCH_BOX(&cuda::Elementwise::backward<Backward>));
}

}  // namespace ops::exp
