#include "depthwise_conv.h"

#include "depthwise_general.cuh"
#include "depthwise_weight.cuh"

namespace ops::cuda {
namespace {

// Largest of 4, 2, 1 that divides every extent and, times sizeof(T), every pointer.
template <typename T>
int vector_of(std::initializer_list<const void*> pointers, std::initializer_list<int64_t> extents) {
  for (int v = 4; v > 1; v /= 2) {
    bool fits = true;
    for (const void* p : pointers) {
      fits &= reinterpret_cast<uintptr_t>(p) % (v * sizeof(T)) == 0;
    }
    for (int64_t n : extents) {
      fits &= n % v == 0;
    }
    if (fits) {
      return v;
    }
  }
  return 1;
}

template <typename Kernel, typename... Args>
void launch_kernel(Kernel kernel, dim3 blocks, int threads, size_t shared, cudaStream_t stream,
                   Args... args) {
  if (shared > 48 * 1024) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared)));
  }
  kernel<<<blocks, threads, shared, stream>>>(args...);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Calls f(Direct<K, S, D>{}) for the convolutions that have tiled kernels; false for the others.
template <typename F>
bool dispatch_direct(const DepthwiseGeometry& g, const F& f) {
  if (g.kernel_h != g.kernel_w || g.stride_h != g.stride_w || g.dilation_h != g.dilation_w) {
    return false;
  }
  const auto is = [&](int64_t kernel, int64_t stride, int64_t dilation) {
    return g.kernel_h == kernel && g.stride_h == stride && g.dilation_h == dilation;
  };
  if (is(3, 1, 1)) return f(Direct<3, 1, 1>{}), true;
  if (is(5, 1, 1)) return f(Direct<5, 1, 1>{}), true;
  if (is(7, 1, 1)) return f(Direct<7, 1, 1>{}), true;
  if (is(3, 1, 2)) return f(Direct<3, 1, 2>{}), true;
  if (is(3, 2, 1)) return f(Direct<3, 2, 1>{}), true;
  if (is(5, 2, 1)) return f(Direct<5, 2, 1>{}), true;
  if (is(7, 2, 1)) return f(Direct<7, 2, 1>{}), true;
  return false;
}

template <typename F>
bool dispatch_transposed(const DepthwiseGeometry& g, const F& f) {
  if (g.padding_h % 2 != g.padding_w % 2) {
    return false;
  }
  const bool odd = g.padding_h % 2;
  switch (g.kernel_h) {
    case 3: return odd ? f(Transposed<3, 1>{}) : f(Transposed<3, 0>{}), true;
    case 5: return odd ? f(Transposed<5, 1>{}) : f(Transposed<5, 0>{}), true;
    case 7: return odd ? f(Transposed<7, 1>{}) : f(Transposed<7, 0>{}), true;
    default: return false;
  }
}

// An image on one side of the convolution.
template <typename T>
struct Image {
  T* data;
  int64_t h, w;
};

// out = the convolution of `in` along Axis, in either memory format.
template <typename Axis, typename T>
void convolve(const DepthwiseGeometry& g, Image<const T> in, Image<T> out, int64_t padding_h,
              int64_t padding_w, bool flip, const T* weight, const T* bias, cudaStream_t stream) {
  if (g.channels_last) {
    using Stencil = ImageStencil<Axis>;
    const auto bytes = [](int window, int) {
      return sizeof(T) * window + sizeof(float) * Stencil::kTaps;
    };
    constexpr int kMaxLanes = 12;
    auto launch = plan_images<Axis, Stencil>(g, in.h, in.w, out.h, out.w, padding_h, padding_w,
                                             kMaxLanes, kMaxThreads / kMaxLanes, bytes);
    launch.load_vector = vector_of<T>({in.data}, {g.c});
    launch.store_vector = vector_of<T>({out.data}, {g.c}) == 4;
    const int threads = round_up(launch.lanes * launch.across * launch.down, 32);
    launch_kernel(image_kernel<Axis, T>, g.n * launch.tiles_h * launch.tiles_w * launch.chunks,
                  threads, launch.shared_bytes, stream, launch, flip, in.data, weight, bias,
                  out.data);
  } else {
    using Stencil = PlaneStencil<Axis>;
    auto launch = plan_planes<Axis>(g.n * g.c, g.c, in.h, in.w, out.h, out.w, padding_h, padding_w);
    launch.load_vector = vector_of<T>({in.data}, {in.w, launch.first_w});
    launch.store_vector = vector_of<T>({out.data}, {out.w}) == 4;
    const size_t shared = (sizeof(T) * launch.window_h * launch.window_w +
                           sizeof(float) * round_up(Stencil::kTaps, 4)) *
                          launch.planes_per_block;
    const int threads = round_up(
        launch.planes_per_block * launch.tile_h * launch.tile_w / Stencil::kRows / Stencil::kCols,
        32);
    const int64_t blocks =
        ceil_div(launch.planes, launch.planes_per_block) * launch.tiles_h * launch.tiles_w;
    launch_kernel(plane_kernel<Axis, T>, blocks, threads, shared, stream, launch, flip, in.data,
                  weight, bias, out.data);
  }
}

// Blocks that fill the device a few times over, so that the last ones to finish weigh little.
constexpr int64_t kTargetBlocks = 132 * 6;

template <typename Axis, typename T>
void sum_weights(const Tensor& like, const DepthwiseGeometry& g, const T* x, const T* grad,
                 T* grad_weight, T* grad_bias, cudaStream_t stream) {
  constexpr int kTaps = Axis::kTaps * Axis::kTaps;
  const auto partials = [&](int64_t splits) {
    return torch::stable::empty({splits, g.c, kTaps + 1}, ScalarType::Float, std::nullopt,
                                like.device());
  };
  int64_t splits;
  Tensor partial;
  if (g.channels_last) {
    using Stencil = ImageWeightStencil<Axis>;
    const auto bytes = [](int window, int outputs) {
      return std::max(sizeof(T) * (window + outputs), sizeof(float) * (kTaps + 1));
    };
    constexpr int kMaxLanes = 8, kMaxItems = 64;
    auto launch =
        plan_images<Axis, Stencil>(g, g.h, g.w, g.out_h, g.out_w, g.padding_h, g.padding_w,
                                   kMaxLanes, kMaxItems, bytes);
    launch.load_vector = vector_of<T>({x, grad}, {g.c});
    const int64_t tiles = g.n * launch.tiles_h * launch.tiles_w;
    splits = std::max<int64_t>(1, std::min(tiles, kTargetBlocks / launch.chunks));
    partial = partials(splits);
    const int per_pixel = launch.lanes * kChannels / Stencil::kLanes;
    const int threads = kMaxThreads / per_pixel * per_pixel;
    launch_kernel(image_weight_kernel<Axis, T>, dim3(launch.chunks, splits), threads,
                  launch.shared_bytes, stream, launch, tiles, static_cast<int>(splits), x, grad,
                  partial.mutable_data_ptr<float>());
  } else {
    using Stencil = PlaneStencil<Axis>;
    auto launch = plan_planes<Axis>(g.n, g.c, g.h, g.w, g.out_h, g.out_w, g.padding_h, g.padding_w);
    launch.load_vector = vector_of<T>({x}, {g.w, launch.first_w});
    const int grad_vector = vector_of<T>({grad}, {g.out_w});
    const int64_t steps = ceil_div(g.n, launch.planes_per_block);
    splits = std::max<int64_t>(1, std::min(steps, kTargetBlocks / g.c));
    partial = partials(splits);
    const int threads = round_up(
        launch.planes_per_block * launch.tile_h * launch.tile_w / Stencil::kRows / Stencil::kCols,
        32);
    const size_t shared = std::max(
        sizeof(T) * launch.planes_per_block *
            (launch.window_h * launch.window_w + launch.tile_h * launch.tile_w),
        sizeof(float) * (threads / 32) * (kTaps + 1));
    launch_kernel(plane_weight_kernel<Axis, T>, dim3(g.c, splits), threads, shared, stream, launch,
                  grad_vector, g.n, static_cast<int>(splits), x, grad,
                  partial.mutable_data_ptr<float>());
  }
  launch_kernel(sum_partials_kernel<T>, ceil_div(g.c * (kTaps + 1), kMaxThreads), kMaxThreads, 0,
                stream, partial.const_data_ptr<float>(), static_cast<int>(splits),
                static_cast<int>(g.c), kTaps, grad_weight, grad_bias);
}

// Whether the tiled kernels' 32-bit coordinates and grids hold the problem.
template <typename T>
bool is_tileable(const DepthwiseGeometry& g) {
  constexpr int64_t kLimit = int64_t{1} << 29;
  return !std::is_same_v<T, double> && g.h + g.padding_h < kLimit && g.w + g.padding_w < kLimit &&
         g.c < kLimit && g.n * g.c * ceil_div(g.h + 2 * g.padding_h, 8) *
                                 ceil_div(g.w + 2 * g.padding_w, 8) < kLimit;
}

struct Kernels {
  template <typename T>
  static void forward(const Tensor& like, const DepthwiseGeometry& g, const T* x, const T* weight,
                      const T* bias, T* out) {
    const DeviceGuard guard(like.get_device_index());
    const cudaStream_t stream = current_stream(like);
    if constexpr (!std::is_same_v<T, double>) {
      const auto tiled = [&](auto axis) {
        convolve<decltype(axis), T>(g, {x, g.h, g.w}, {out, g.out_h, g.out_w}, g.padding_h,
                                    g.padding_w, false, weight, bias, stream);
      };
      if (is_tileable<T>(g) && dispatch_direct(g, tiled)) {
        return;
      }
    }
    launch_kernel(general_forward_kernel<T>,
                  ceil_div(g.n * g.c * g.out_h * g.out_w, kGeneralThreads), kGeneralThreads, 0,
                  stream, g, x, weight, bias, out);
  }

  template <typename T>
  static void backward_input(const Tensor& like, const DepthwiseGeometry& g, const T* grad,
                             const T* weight, T* out) {
    const DeviceGuard guard(like.get_device_index());
    const cudaStream_t stream = current_stream(like);
    if constexpr (!std::is_same_v<T, double>) {
      const auto tiled = [&](auto axis, int64_t padding_h, int64_t padding_w, bool flip) {
        convolve<decltype(axis), T>(g, {grad, g.out_h, g.out_w}, {out, g.h, g.w}, padding_h,
                                    padding_w, flip, weight, nullptr, stream);
      };
      const auto direct = [&](auto axis) {
        using Axis = decltype(axis);
        if constexpr (Axis::step(1) == 1) {
          constexpr int span = Axis::inputs(1) - 1;
          tiled(axis, span - g.padding_h, span - g.padding_w, true);
        }
      };
      const auto transposed = [&](auto axis) { tiled(axis, g.padding_h, g.padding_w, false); };
      if (is_tileable<T>(g)) {
        const bool strided = g.stride_h == 2 && g.stride_w == 2 && g.kernel_h == g.kernel_w &&
                             g.dilation_h == 1 && g.dilation_w == 1;
        if (strided ? dispatch_transposed(g, transposed) : dispatch_direct(g, direct)) {
          return;
        }
      }
    }
    launch_kernel(general_backward_input_kernel<T>, ceil_div(g.n * g.c * g.h * g.w, kGeneralThreads),
                  kGeneralThreads, 0, stream, g, grad, weight, out);
  }

  template <typename T>
  static void backward_weight(const Tensor& like, const DepthwiseGeometry& g, const T* grad,
                              const T* x, T* grad_weight, T* grad_bias) {
    const DeviceGuard guard(like.get_device_index());
    const cudaStream_t stream = current_stream(like);
    if constexpr (!std::is_same_v<T, double>) {
      const auto tiled = [&](auto axis) {
        sum_weights<decltype(axis), T>(like, g, x, grad, grad_weight, grad_bias, stream);
      };
      if (grad_weight && is_tileable<T>(g) && !g.empty() && dispatch_direct(g, tiled)) {
        return;
      }
    }
    launch_kernel(general_backward_weight_kernel<T>, dim3(g.c, g.kernel_h * g.kernel_w + 1),
                  kGeneralThreads, 0, stream, g, grad, x, grad_weight, grad_bias);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("depthwise_conv2d", TORCH_BOX(&depthwise_conv2d<Kernels>));
  m.impl("depthwise_conv2d_backward", TORCH_BOX(&depthwise_conv2d_backward<Kernels>));
}

}  // namespace ops::cuda
