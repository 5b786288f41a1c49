#include "max_pool2d/cuda/kernels.cuh"

namespace ops::cuda {
namespace {

bool is_aligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Calls f with the way to divide that sizes and products of this pooling allow.
template <typename F>
void with_divide(const MaxPoolGeometry& g, const F& f) {
  const auto reach = [](int64_t size, int64_t padding, int64_t stride) {
    return 2 * (size + 2 * padding + stride);  // as far from a window's begin as its end may be
  };
  const bool fast =
      std::max({g.n * g.c * g.h * g.w, g.outputs(), g.taps(), reach(g.h, g.padding_h, g.stride_h),
                reach(g.w, g.padding_w, g.stride_w)}) < kMostFastDivided;
  fast ? f(type_tag<FastDivide>{}) : f(type_tag<Divide>{});
}

// Calls f(Width<V>{}) with how many channels a thread takes: as many as `images` and `indices`
// allow to move at once.
template <typename T, typename I, typename F>
void with_channels(const MaxPoolGeometry& g, std::initializer_list<const void*> images,
                   const I* indices, const F& f) {
  if constexpr (sizeof(I) > 1) {
    return f(Width<1>{});
  }
  dispatch_width<T>(images, {g.channels_last ? g.c : 1},
                    [&](auto v) { is_aligned(indices, v.value) ? f(v) : f(Width<1>{}); });
}

// Whether 2x2 windows tile the rows of planes, of which 2 V elements move at once: calls
// f(Width<V>).
template <typename T, typename F>
bool with_tiles(const MaxPoolGeometry& g, std::initializer_list<const void*> images,
                const uint8_t* indices, const F& f) {
  bool launched = false;
  if (g.channels_last || g.kernel_h != 2 || g.kernel_w != 2 || g.stride_h != 2 || g.stride_w != 2 ||
      g.dilation_h != 1 || g.dilation_w != 1 || g.padding_h != 0 || g.padding_w != 0 ||
      g.out_h != g.h / 2) {  // not with a last row that reaches over
    return false;
  }
  dispatch_width<T>(images, {g.w}, [&](auto width) {
    if constexpr (width.value > 1) {
      if (is_aligned(indices, width.value / 2)) {
        f(Width<width.value / 2>{});
        launched = true;
      }
    }
  });
  return launched;
}

template <typename Kernel, typename Sizes, typename... Args>
void launch(const Tensor& like, Kernel kernel, const Sizes& sizes, Args... args) {
  launch_kernel(kernel, ceil_div(sizes.threads, kPoolThreads), kPoolThreads, 0,
                current_stream(like), sizes, args...);
}

struct Kernels {
  template <typename T, typename I>
  static void forward(const Tensor& like, const MaxPoolGeometry& g, const T* x, T* out,
                      I* indices) {
    const DeviceGuard guard(like.get_device_index());
    with_divide(g, [&](auto tag) {
      using By = typename decltype(tag)::type;
      if constexpr (std::is_same_v<I, uint8_t>) {
        if (with_tiles<T>(g, {x}, indices, [&](auto v) {
              PoolSizes<By> sizes(g, g.out_h, g.out_w / v.value, 1);
              launch(like, max_pool_tiles_kernel<v.value, T, By>, sizes, x, out, indices);
            })) {
          return;
        }
      }
      with_channels<T>(g, {x}, indices, [&](auto v) {
        const PoolSizes<By> sizes(g, g.out_h, g.out_w, v.value);
        if constexpr (std::is_same_v<I, uint8_t>) {
          const bool square = g.kernel_h == g.kernel_w && g.dilation_h == 1 && g.dilation_w == 1;
          if (square && g.kernel_h == 2) {
            return launch(like, max_pool_kernel<2, v.value, T, I, By>, sizes, x, out, indices);
          }
          if (square && g.kernel_h == 3) {
            return launch(like, max_pool_kernel<3, v.value, T, I, By>, sizes, x, out, indices);
          }
        }
        launch(like, max_pool_kernel<0, v.value, T, I, By>, sizes, x, out, indices);
      });
    });
  }

  template <typename T, typename I>
  static void backward(const Tensor& like, const MaxPoolGeometry& g, const T* grad,
                       const I* indices, T* out) {
    const DeviceGuard guard(like.get_device_index());
    with_divide(g, [&](auto tag) {
      using By = typename decltype(tag)::type;
      if constexpr (std::is_same_v<I, uint8_t>) {
        if (with_tiles<T>(g, {out, grad}, indices, [&](auto v) {
              const PoolSizes<By> sizes(g, (g.h + 1) / 2, g.out_w / v.value, 1);
              launch(like, max_pool_tiles_backward_kernel<v.value, T, By>, sizes, grad, indices,
                     out);
            })) {
          return;
        }
      }
      with_channels<T>(g, {grad}, indices, [&](auto v) {
        const PoolSizes<By> sizes(g, g.h, g.w, v.value);
        launch(like, max_pool_backward_kernel<v.value, T, I, By>, sizes, grad, indices, out);
      });
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("max_pool2d", TORCH_BOX(&max_pool2d<Kernels>));
  m.impl("max_pool2d_backward", TORCH_BOX(&max_pool2d_backward<Kernels>));
}

}  // namespace ops::cuda
