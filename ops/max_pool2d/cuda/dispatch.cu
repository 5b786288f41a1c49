// Dispatch of CUDA max pooling. First match wins:
//
//   layout   geometry without dilation             forward
//   NCHW     2×2 or 3×3, stride 2, out_w = W / 2   forward_stride_2_kernel<2 or 3>
//   any      2×2 or 3×3                            forward_kernel<2 or 3>
//   any      any, with dilation                    forward_kernel<0>
//
//                                                  backward
//   NCHW     2×2, stride 2, padding 0              backward_stride_2_kernel<2, 0>
//   NCHW     3×3, stride 2, padding 0 or 1         backward_stride_2_kernel<3, 0 or 1>
//   any      any, with dilation                    backward_kernel
//
// Indices are 32-bit if all sizes allow it (FastDivide).
#include "max_pool2d/cuda/stride_2.cuh"

namespace ops::max_pool2d {
namespace {

// Call f with FastDivide if all indices are below 2³¹, otherwise with Divide.
template <typename F>
void dispatch_divider(const Geometry& g, const F& f) {
  const auto bound = [](int64_t size, int64_t padding, int64_t stride) {
    return 2 * (size + 2 * padding + stride);  // of window coordinates
  };
  const bool fast =
      std::max({g.n * g.c * g.h * g.w, g.outputs(), g.taps(), bound(g.h, g.padding_h, g.stride_h),
                bound(g.w, g.padding_w, g.stride_w)}) < kMostFastDivided;
  fast ? f(type_tag<FastDivide>{}) : f(type_tag<Divide>{});
}

// Call f(Width<V>{}) with the widest vector that divides a row (of pixels, or of a pixel's
// channels) and that all pointers are aligned to; 1 with int64 indices.
template <typename T, typename Indices, typename F>
void dispatch_vectors(int64_t row, std::initializer_list<const void*> images, Indices indices,
                      const F& f) {
  if constexpr (!std::is_pointer_v<Indices>) {
    dispatch_width<T>(images, {row}, f);
  } else if constexpr (sizeof(*indices) > 1) {
    f(Width<1>{});
  } else {
    dispatch_width<T>(images, {row},
                      [&](auto v) { are_aligned({indices}, v.value) ? f(v) : f(Width<1>{}); });
  }
}

// Return whether windows are K×K with stride 2, padding P and without dilation, in NCHW.
template <int K, int P>
bool has_stride_2(const Geometry& g) {
  return !g.channels_last && g.kernel_h == K && g.kernel_w == K && g.stride_h == 2 &&
         g.stride_w == 2 && g.padding_h == P && g.padding_w == P && g.dilation_h == 1 &&
         g.dilation_w == 1;
}

int64_t channels_of_row(const Geometry& g) {
  return g.channels_last ? g.c : 1;
}

template <typename Kernel, typename Params, typename... Args>
void launch(const Tensor& like, Kernel kernel, const Params& params, Args... args) {
  launch_kernel(kernel, ceil_div(params.threads, kThreads), kThreads, 0, current_stream(like),
                params, args...);
}

struct Kernels {
  template <typename T, typename Indices>
  static void forward(const Tensor& like, const Geometry& g, const T* x, T* out, Indices indices) {
    const DeviceGuard guard(like.get_device_index());
    const bool halves = 2 * g.out_w == g.w;  // no window of ceil_mode beyond the last column
    const bool by_2 = halves && 2 * g.out_h <= g.h && has_stride_2<2, 0>(g);
    const bool by_3 = halves && has_stride_2<3, 1>(g);
    const bool square = g.kernel_h == g.kernel_w && g.dilation_h == 1 && g.dilation_w == 1;
    const int64_t side = square ? g.kernel_h : 0;
    dispatch_divider(g, [&](auto tag) {
      using Divider = typename decltype(tag)::type;
      dispatch_vectors<T>(by_2 || by_3 ? g.w : channels_of_row(g), {x}, indices, [&](auto v) {
        const auto run = [&](auto kernel, int64_t columns, int64_t width) {
          launch(like, kernel, Params<Divider>(g, g.out_h, columns, width), x, out, indices);
        };
        if constexpr (v.value > 1) {
          if (by_2 || by_3) {
            constexpr int V = v.value / 2;
            return run(by_2 ? forward_stride_2_kernel<2, V, T, Indices, Divider>
                            : forward_stride_2_kernel<3, V, T, Indices, Divider>,
                       g.out_w / V, 1);
          }
        }
        run(side == 2   ? forward_kernel<2, v.value, T, Indices, Divider>
            : side == 3 ? forward_kernel<3, v.value, T, Indices, Divider>
                        : forward_kernel<0, v.value, T, Indices, Divider>,
            g.out_w, v.value);
      });
    });
  }

  template <typename T, typename I>
  static void backward(const Tensor& like, const Geometry& g, const T* grad, const I* indices,
                       T* out) {
    const DeviceGuard guard(like.get_device_index());
    const bool by_2 = has_stride_2<2, 0>(g), by_3 = has_stride_2<3, 0>(g),
               by_3_padded = has_stride_2<3, 1>(g);
    const bool stride_2 = by_2 || by_3 || by_3_padded;
    dispatch_divider(g, [&](auto tag) {
      using Divider = typename decltype(tag)::type;
      dispatch_vectors<T>(stride_2 ? g.w : channels_of_row(g), {grad, out}, indices, [&](auto v) {
        if constexpr (std::is_same_v<I, uint8_t>) {
          if (stride_2) {
            constexpr int S = v.value, kPixels = S == 1 ? 2 : S;  // of a row, per thread
            const Params<Divider> params(g, (g.h + 1) / 2, ceil_div(g.w, kPixels), 1);
            const auto kernel = by_2   ? backward_stride_2_kernel<2, 0, S, T, Divider>
                                : by_3 ? backward_stride_2_kernel<3, 0, S, T, Divider>
                                       : backward_stride_2_kernel<3, 1, S, T, Divider>;
            return launch(like, kernel, params, grad, indices, out);
          }
        }
        const Params<Divider> params(g, g.h, g.w, v.value);
        launch(like, backward_kernel<v.value, T, I, Divider>, params, grad, indices, out);
      });
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  using Both = std::tuple<Tensor, Tensor>;
  m.impl("max_pool2d", TORCH_BOX((&forward<Kernels, Tensor>)));
  m.impl("max_pool2d_with_indices", TORCH_BOX((&forward<Kernels, Both>)));
  m.impl("max_pool2d_with_indices_backward", TORCH_BOX(&backward<Kernels>));
}

}  // namespace ops::max_pool2d
