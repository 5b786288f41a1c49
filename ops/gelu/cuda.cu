// gelu: CUDA registration.
#include "core/cuda/elementwise_loop.cuh"
#include "gelu/op.h"

namespace ops::gelu {

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("gelu", TORCH_BOX(&cuda::Elementwise::forward<Forward>));
  m.impl("gelu_backward", TORCH_BOX(&cuda::Elementwise::backward<Backward>));
}

}  // namespace ops::gelu
