// Dispatch of CUDA max pooling. First match wins:
//
//   layout         geometry                             indices          kernel
//   NCHW           2×2, stride 2, no padding, even W    uint8 max_pool_stride_2_kernel<2> NCHW 3×3,
//   stride 2, padding 1, even W     uint8            max_pool_stride_2_kernel<3> any            2×2
//   or 3×3 without dilation          uint8            max_pool_kernel<2 or 3> any            any
//   uint8 or int64   max_pool_kernel<0>
//
//   Backward: NCHW, 3×3, stride 2, padding 0 or 1, no dilation, uint8, 32-bit indices run in
//   max_pool_3x3_backward_kernel, the first row in max_pool_2x2_backward_kernel, any other case in
//   max_pool_backward_kernel.
//
// The first two rows also need out_w = W / 2 (the 2×2 kernels: out_h = H / 2) and pointers aligned
// to two elements. Indices are 32-bit if all sizes allow it (FastDivide).
#include "max_pool2d/cuda/kernels.cuh"

namespace ops::cuda {
namespace {

// Call f with FastDivide if all indices are below 2³¹, otherwise with Divide.
template <typename F>
void dispatch_divider(const MaxPoolGeometry& g, const F& f) {
  const auto bound = [](int64_t size, int64_t padding, int64_t stride) {
    return 2 * (size + 2 * padding + stride);  // of window coordinates
  };
  const bool fast =
      std::max({g.n * g.c * g.h * g.w, g.outputs(), g.taps(), bound(g.h, g.padding_h, g.stride_h),
                bound(g.w, g.padding_w, g.stride_w)}) < kMostFastDivided;
  fast ? f(type_tag<FastDivide>{}) : f(type_tag<Divide>{});
}

// Call f(Width<V>{}) with the widest vector of channels that all pointers are aligned to.
template <typename T, typename I, typename F>
void dispatch_channels(const MaxPoolGeometry& g, std::initializer_list<const void*> images,
                       const I* indices, const F& f) {
  if constexpr (sizeof(I) > 1) {
    return f(Width<1>{});
  }
  dispatch_width<T>(images, {g.channels_last ? g.c : 1},
                    [&](auto v) { are_aligned({indices}, v.value) ? f(v) : f(Width<1>{}); });
}

// Return whether windows are K×K with stride 2 and without dilation, in NCHW.
template <int K>
bool has_stride_2(const MaxPoolGeometry& g) {
  return !g.channels_last && g.kernel_h == K && g.kernel_w == K && g.stride_h == 2 &&
         g.stride_w == 2 && g.dilation_h == 1 && g.dilation_w == 1;
}

bool tiles_2x2(const MaxPoolGeometry& g) {
  return has_stride_2<2>(g) && g.padding_h == 0 && g.padding_w == 0 &&
         g.out_h == g.h / 2;  // not with ceil_mode and an odd height
}

// Call f(Width<V>) and return true if each thread can load 2 V inputs and store V outputs as
// vectors.
template <typename T, typename F>
bool dispatch_pairs(const MaxPoolGeometry& g, std::initializer_list<const void*> images,
                    const uint8_t* indices, const F& f) {
  bool launched = false;
  if (2 * g.out_w != g.w) {
    return false;
  }
  dispatch_width<T>(images, {g.w}, [&](auto width) {
    if constexpr (width.value > 1) {
      if (are_aligned({indices}, width.value / 2)) {
        f(Width<width.value / 2>{});
        launched = true;
      }
    }
  });
  return launched;
}

template <typename Kernel, typename Params, typename... Args>
void launch(const Tensor& like, Kernel kernel, const Params& params, Args... args) {
  launch_kernel(kernel, ceil_div(params.threads, kPoolThreads), kPoolThreads, 0,
                current_stream(like), params, args...);
}

struct Kernels {
  template <typename T, typename I>
  static void forward(const Tensor& like, const MaxPoolGeometry& g, const T* x, T* out,
                      I* indices) {
    const DeviceGuard guard(like.get_device_index());
    dispatch_divider(g, [&](auto tag) {
      using Divider = typename decltype(tag)::type;
      if constexpr (std::is_same_v<I, uint8_t>) {
        const bool by_2 = tiles_2x2(g);
        const bool by_3 = has_stride_2<3>(g) && g.padding_h == 1 && g.padding_w == 1;
        if ((by_2 || by_3) && dispatch_pairs<T>(g, {x}, indices, [&](auto v) {
              const PoolParams<Divider> params(g, g.out_h, g.out_w / v.value, 1);
              const auto kernel = by_2 ? max_pool_stride_2_kernel<2, v.value, T, Divider>
                                       : max_pool_stride_2_kernel<3, v.value, T, Divider>;
              launch(like, kernel, params, x, out, indices);
            })) {
          return;
        }
      }
      dispatch_channels<T>(g, {x}, indices, [&](auto v) {
        const PoolParams<Divider> params(g, g.out_h, g.out_w, v.value);
        if constexpr (std::is_same_v<I, uint8_t>) {
          const bool square = g.kernel_h == g.kernel_w && g.dilation_h == 1 && g.dilation_w == 1;
          if (square && g.kernel_h == 2) {
            return launch(like, max_pool_kernel<2, v.value, T, I, Divider>, params, x, out,
                          indices);
          }
          if (square && g.kernel_h == 3) {
            return launch(like, max_pool_kernel<3, v.value, T, I, Divider>, params, x, out,
                          indices);
          }
        }
        launch(like, max_pool_kernel<0, v.value, T, I, Divider>, params, x, out, indices);
      });
    });
  }

  template <typename T, typename I>
  static void backward(const Tensor& like, const MaxPoolGeometry& g, const T* grad,
                       const I* indices, T* out) {
    const DeviceGuard guard(like.get_device_index());
    dispatch_divider(g, [&](auto tag) {
      using Divider = typename decltype(tag)::type;
      if constexpr (std::is_same_v<I, uint8_t>) {
        if (tiles_2x2(g) && dispatch_pairs<T>(g, {out, grad}, indices, [&](auto v) {
              const PoolParams<Divider> params(g, (g.h + 1) / 2, g.out_w / v.value, 1);
              launch(like, max_pool_2x2_backward_kernel<v.value, T, Divider>, params, grad, indices,
                     out);
            })) {
          return;
        }
        if constexpr (std::is_same_v<Divider, FastDivide>) {
          if (has_stride_2<3>(g) && g.padding_h <= 1 && g.padding_w <= 1) {
            return dispatch_width<T>({out}, {g.w}, [&](auto width) {
              constexpr int kPixels = width.value == 1 ? 2 : width.value;  // of a row, per thread
              const PoolParams<Divider> params(g, (g.h + 1) / 2, ceil_div(g.w, kPixels), 1);
              launch(like, max_pool_3x3_backward_kernel<width.value, T, Divider>, params, grad,
                     indices, out);
            });
          }
        }
      }
      dispatch_channels<T>(g, {grad}, indices, [&](auto v) {
        const PoolParams<Divider> params(g, g.h, g.w, v.value);
        launch(like, max_pool_backward_kernel<v.value, T, I, Divider>, params, grad, indices, out);
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
