#include "depthwise_conv.h"
#include "depthwise_general.cuh"
#include "depthwise_large.cuh"
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
void launch_kernel(Kernel kernel, dim3 blocks, dim3 threads, size_t shared, cudaStream_t stream,
                   Args... args) {
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

// About as many blocks of 128 threads with 128 registers as an H100 runs at a time.
constexpr int kBlocksAtATime = 132 * 4;

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
    using M = March<Axis>;
    const auto plan = plan_strips<Axis, M, T>(g.n, g.c, in.h, in.w, out.h, out.w, padding_h,
                                              padding_w, 0, kBlocksAtATime, {in.data, out.data});
    const int weights = round_up(M::kTaps * M::kTaps * plan.block.x * M::kChannels, 4);
    launch_kernel(strip_kernel<Axis, T>, plan.grid, plan.block,
                  sizeof(float) * weights + plan.ring_bytes, stream, plan.launch, flip, in.data,
                  weight, bias, out.data);
  } else {
    const auto bytes = [](size_t window, size_t) {
      return sizeof(T) * window + sizeof(float) * PlaneStencil<Axis>::kWeights;
    };
    auto [launch, block] =
        plan_planes<Axis>(g.n * g.c, g.c, in.h, in.w, out.h, out.w, padding_h, padding_w, bytes);
    launch.load_vector = vector_of<T>({in.data}, {in.w, launch.first_w});
    launch.store_vector = vector_of<T>({out.data}, {out.w}) == 4;
    launch_kernel(plane_kernel<Axis, T>,
                  dim3(ceil_div(launch.planes, block.z), launch.tiles_h * launch.tiles_w), block,
                  block.z * bytes(launch.window_h * launch.window_w, 0), stream, launch, flip,
                  in.data, weight, bias, out.data);
  }
}

template <typename T>
void add_partials(const Tensor& partial, int64_t splits, int64_t channels, int64_t taps,
                  T* grad_weight, T* grad_bias, cudaStream_t stream) {
  launch_kernel(sum_partials_kernel<T>, dim3(ceil_div(channels * (taps + 1), kSumColumns)),
                dim3(kSumColumns, kSumRows), 0, stream, partial.const_data_ptr<float>(),
                static_cast<int>(splits), static_cast<int>(channels), static_cast<int>(taps),
                grad_weight, grad_bias);
}

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
    using M = WeightMarch<Axis>;
    const auto plan = plan_strips<Axis, M, T>(g.n, g.c, g.h, g.w, g.out_h, g.out_w, g.padding_h,
                                              g.padding_w, 1, kBlocksAtATime, {x, grad});
    const int pitch = plan.block.x * M::kChannels;
    splits = plan.grid.x;
    partial = partials(splits);
    launch_kernel(strip_weight_kernel<Axis, T>, plan.grid, plan.block,
                  std::max(plan.ring_bytes, sizeof(float) * (kTaps + 1) * pitch), stream,
                  plan.launch, x, grad, partial.mutable_data_ptr<float>());
  } else {
    const auto bytes = [](size_t window, size_t outputs) { return sizeof(T) * (window + outputs); };
    auto [launch, block] =
        plan_planes<Axis>(g.n, g.c, g.h, g.w, g.out_h, g.out_w, g.padding_h, g.padding_w, bytes);
    launch.load_vector = vector_of<T>({x}, {g.w, launch.first_w});
    const int grad_vector = vector_of<T>({grad}, {g.out_w});
    const int planes = block.z;
    splits = best_split(ceil_div(g.n, planes), g.c, kBlocksAtATime, 1, ceil_div(g.n, planes));
    partial = partials(splits);
    const int threads = round_up(block.x * block.y * block.z, 32);
    const size_t shared =
        std::max(planes * bytes(launch.window_h * launch.window_w, launch.tile_h * launch.tile_w),
                 sizeof(float) * (threads / 32) * (kTaps + 1));
    launch_kernel(plane_weight_kernel<Axis, T>, dim3(g.c, splits), threads, shared, stream, launch,
                  planes, grad_vector, x, grad, partial.mutable_data_ptr<float>());
  }
  add_partials(partial, splits, g.c, kTaps, grad_weight, grad_bias, stream);
}

// Strides of an image tensor of g.c channels, h × w, in g's memory format.
ImageStrides strides_of(const DepthwiseGeometry& g, int64_t h, int64_t w) {
  return g.channels_last ? ImageStrides{g.c * h * w, 1, g.c * w, g.c}
                         : ImageStrides{g.c * h * w, h * w, w, 1};
}

struct LargePlan {
  LargeLaunch launch;
  dim3 block;
  int64_t tiles;
  size_t shared;
};

// Blocks of the large kernels, filters shared by the images of a block or one each. Nothing where
// not even one image's filter and window fit into shared memory.
std::optional<LargePlan> plan_large(int64_t channels, int64_t images, int64_t in_h, int64_t in_w,
                                    int64_t filter_h, int64_t filter_w, int64_t padding_h,
                                    int64_t padding_w, bool shared_filter) {
  LargeLaunch launch{};
  launch.in_h = in_h, launch.in_w = in_w;
  launch.filter_h = filter_h, launch.filter_w = filter_w;
  launch.out_h = in_h + 2 * padding_h - filter_h + 1;
  launch.out_w = in_w + 2 * padding_w - filter_w + 1;
  launch.padding_h = padding_h, launch.padding_w = padding_w;
  launch.channels = channels, launch.images = images;
  launch.filter_pitch = round_up(filter_shift(padding_w) + filter_w + 4, 4);
  const size_t filter = sizeof(float) * (filter_h + 2) * launch.filter_pitch;
  for (int most = 64; most >= 8; most /= 2) {
    launch.tiles_h = ceil_div(launch.out_h, most), launch.tiles_w = ceil_div(launch.out_w, most);
    launch.tile_h = round_up(ceil_div(launch.out_h, launch.tiles_h), kLargeRows);
    launch.tile_w = round_up(ceil_div(launch.out_w, launch.tiles_w), kLargeCols);
    launch.window_h = std::min<int64_t>(launch.tile_h + filter_h - 1, in_h);
    launch.window_w = round_up(std::min<int64_t>(launch.tile_w + filter_w, in_w + 12) + 20, 4);
    const size_t window = sizeof(float) * launch.window_h * launch.window_w;
    const int threads = launch.tile_h / kLargeRows * launch.tile_w / kLargeCols;
    const size_t fixed = shared_filter ? filter : 0;
    const size_t each = window + filter - fixed;
    const size_t sums = sizeof(float) * (launch.tile_h * launch.tile_w + threads);
    if (threads > kMaxThreads || std::max(fixed + each, sums) > kSharedBytes) {
      continue;
    }
    const int64_t z = std::min({int64_t{kMaxThreads / threads}, images, int64_t{64},
                                static_cast<int64_t>((kSharedBytes - fixed) / each)});
    return LargePlan{launch, dim3(launch.tile_w / kLargeCols, launch.tile_h / kLargeRows, z),
                     int64_t{launch.tiles_h} * launch.tiles_w, std::max(fixed + z * each, sums)};
  }
  return std::nullopt;
}

// The convolution with stride 1 for any filter; false where it is not that or does not fit.
template <typename T>
bool convolve_large(const DepthwiseGeometry& g, Image<const T> in, Image<T> out, int64_t padding_h,
                    int64_t padding_w, bool flip, const T* weight, const T* bias,
                    cudaStream_t stream) {
  auto plan = plan_large(g.c, g.n, in.h, in.w, g.kernel_h, g.kernel_w, padding_h, padding_w, true);
  if (!plan) {
    return false;
  }
  plan->launch.in = strides_of(g, in.h, in.w);
  plan->launch.filter = {0, g.kernel_h * g.kernel_w, g.kernel_w, 1};
  plan->launch.out = strides_of(g, out.h, out.w);
  launch_kernel(large_kernel<T>, dim3(ceil_div(g.n, plan->block.z), g.c, plan->tiles), plan->block,
                plan->shared, stream, plan->launch, flip, in.data, weight, bias, out.data);
  return true;
}

template <typename T>
bool sum_weights_large(const Tensor& like, const DepthwiseGeometry& g, const T* x, const T* grad,
                       T* grad_weight, T* grad_bias, cudaStream_t stream) {
  auto plan = plan_large(g.c, g.n, g.h, g.w, g.out_h, g.out_w, g.padding_h, g.padding_w, false);
  if (!plan) {
    return false;
  }
  plan->launch.in = strides_of(g, g.h, g.w);
  plan->launch.filter = strides_of(g, g.out_h, g.out_w);
  const int64_t taps = g.kernel_h * g.kernel_w;
  const int64_t steps = ceil_div(g.n, plan->block.z);
  const int64_t splits = best_split(steps, g.c * plan->tiles, kBlocksAtATime, 1, steps);
  Tensor partial =
      torch::stable::empty({splits, g.c, taps + 1}, ScalarType::Float, std::nullopt, like.device());
  launch_kernel(large_weight_kernel<T>, dim3(splits, g.c, plan->tiles), plan->block, plan->shared,
                stream, plan->launch, x, grad, partial.mutable_data_ptr<float>());
  add_partials(partial, splits, g.c, taps, grad_weight, grad_bias, stream);
  return true;
}

// Whether the tiled kernels' 32-bit coordinates and grids hold the problem.
template <typename T>
bool is_tileable(const DepthwiseGeometry& g) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  const int64_t rows = g.h + 2 * g.padding_h, cols = g.w + 2 * g.padding_w;
  return !std::is_same_v<T, double> && rows * cols * g.n < kLimit && g.n * g.c < kLimit &&
         g.c * cols < kLimit && g.c < 65536 && ceil_div(rows, 8) * ceil_div(cols, 8) < 65536;
}

bool is_unit_stride(const DepthwiseGeometry& g) {
  return g.stride_h == 1 && g.stride_w == 1 && g.dilation_h == 1 && g.dilation_w == 1;
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
      if (is_tileable<T>(g) &&
          (dispatch_direct(g, tiled) ||
           (is_unit_stride(g) &&
            convolve_large<T>(g, {x, g.h, g.w}, {out, g.out_h, g.out_w}, g.padding_h, g.padding_w,
                              false, weight, bias, stream)))) {
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
        if (is_unit_stride(g) &&
            convolve_large<T>(g, {grad, g.out_h, g.out_w}, {out, g.h, g.w},
                              g.kernel_h - 1 - g.padding_h, g.kernel_w - 1 - g.padding_w, true,
                              weight, nullptr, stream)) {
          return;
        }
      }
    }
    launch_kernel(general_backward_input_kernel<T>,
                  ceil_div(g.n * g.c * g.h * g.w, kGeneralThreads), kGeneralThreads, 0, stream, g,
                  grad, weight, out);
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
      if (grad_weight && is_tileable<T>(g) && !g.empty() &&
          (dispatch_direct(g, tiled) ||
           (is_unit_stride(g) &&
            sum_weights_large(like, g, x, grad, grad_weight, grad_bias, stream)))) {
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
