// Registration of CUDA global average pooling. forward.cuh chooses nchw_kernel (inner = 1) or
// nhwc_kernel.
#include "global_avg_pool2d/cuda/backward.cuh"
#include "global_avg_pool2d/cuda/forward.cuh"

namespace ops::global_avg_pool2d {
namespace {

struct Loops {
  template <typename T>
  static void forward(const Tensor& like, PoolLayout layout, const T* x, T* out) {
    const DeviceGuard guard(like.get_device_index());
    PoolForwardLaunch<T>(like, layout, x, out)();
  }

  template <typename T>
  static void backward(const Tensor& like, PoolLayout layout, const T* grad, T* out) {
    const DeviceGuard guard(like.get_device_index());
    broadcast(like, layout, grad, out);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("global_avg_pool2d", TORCH_BOX(&forward<Loops>));
  m.impl("global_avg_pool2d_backward", TORCH_BOX(&backward<Loops>));
}

}  // namespace ops::global_avg_pool2d
