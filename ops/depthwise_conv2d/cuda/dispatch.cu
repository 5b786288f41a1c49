#include "depthwise_conv2d/cuda/families.cuh"
#include "depthwise_conv2d/cuda/large_filter.cuh"
#include "depthwise_conv2d/cuda/naive.cuh"
#include "depthwise_conv2d/cuda/two_stage_reduction.cuh"
#include "depthwise_conv2d/op.h"

namespace ops::cuda {
namespace {

bool is_unit_stride(const DepthwiseGeometry& g) {
  return g.stride_h == 1 && g.stride_w == 1 && g.dilation_h == 1 && g.dilation_w == 1;
}

// Strides of an image tensor of g.c channels, h × w, in g's memory format.
ImageStrides strides_of(const DepthwiseGeometry& g, int64_t h, int64_t w) {
  return image_strides(g.channels_last, g.c, h, w);
}

struct LargePlan {
  LargeLaunch launch;
  dim3 block;
  int64_t tiles;
  size_t shared;
};

// Blocks of the large kernels, filters shared by the images of a block or one each. Nothing where
// not even one image's filter and window fit into shared memory.
std::optional<LargePlan> plan_large(int64_t images, int64_t in_h, int64_t in_w, int64_t filter_h,
                                    int64_t filter_w, int64_t padding_h, int64_t padding_w,
                                    bool shared_filter) {
  LargeLaunch launch{};
  launch.in_h = in_h, launch.in_w = in_w;
  launch.filter_h = filter_h, launch.filter_w = filter_w;
  launch.out_h = in_h + 2 * padding_h - filter_h + 1;
  launch.out_w = in_w + 2 * padding_w - filter_w + 1;
  launch.padding_h = padding_h, launch.padding_w = padding_w;
  launch.images = images;
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
bool convolve_large(const Convolution<T>& c) {
  const DepthwiseGeometry& g = c.g;
  if (!is_unit_stride(g)) {
    return false;
  }
  auto plan =
      plan_large(g.n, c.in.h, c.in.w, g.kernel_h, g.kernel_w, c.padding_h, c.padding_w, true);
  if (!plan) {
    return false;
  }
  plan->launch.in = strides_of(g, c.in.h, c.in.w);
  plan->launch.filter = {0, g.kernel_h * g.kernel_w, g.kernel_w, 1};
  plan->launch.out = strides_of(g, c.out.h, c.out.w);
  launch_kernel(large_kernel<T>, dim3(ceil_div(g.n, plan->block.z), g.c, plan->tiles), plan->block,
                plan->shared, c.stream, plan->launch, c.flip, c.in.data, c.weight, c.bias,
                c.out.data);
  return true;
}

template <typename T>
bool sum_weights_large(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  if (!is_unit_stride(g)) {
    return false;
  }
  auto plan = plan_large(g.n, g.h, g.w, g.out_h, g.out_w, g.padding_h, g.padding_w, false);
  if (!plan) {
    return false;
  }
  plan->launch.in = strides_of(g, g.h, g.w);
  plan->launch.filter = strides_of(g, g.out_h, g.out_w);
  const int64_t steps = ceil_div(g.n, plan->block.z);
  const int64_t at_a_time = 4 * Device().multiprocessors;
  const int64_t splits = best_split(steps, g.c * plan->tiles, at_a_time, 1);
  sum_splits(c, splits, plan->tiles == 1, [&](const WeightTotals<T>& totals) {
    launch_kernel(large_weight_kernel<T>, dim3(splits, g.c, plan->tiles), plan->block, plan->shared,
                  c.stream, plan->launch, c.x, c.grad, totals);
  });
  return true;
}

// Whether the tiled kernels' 32-bit coordinates and grids hold the problem.
bool is_tileable(const DepthwiseGeometry& g) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  const int64_t rows = g.h + 2 * g.padding_h, cols = g.w + 2 * g.padding_w;
  return rows * cols * g.n < kLimit && g.n * g.c < kLimit && g.c * cols < kLimit && g.c < 65536 &&
         g.c * (g.kernel_h * g.kernel_w + 1) < kLimit &&
         ceil_div(rows, 8) * ceil_div(cols, 8) < 65536;
}

// Elements of a multiprocessor up to which convolve_pixels and sum_weights_pixels are faster than
// blocks that march through images.
constexpr int64_t kFewStrips = 40'000, kFewPlanes = 4'500, kFewForWeights = 20'000;
// Outputs of a plane up to which that holds for weights of contiguous images.
constexpr int64_t kSmallPlane = 16 * 16;

template <typename T>
bool convolve_contiguous(const Convolution<T>& c) {
  if (elements_of_multiprocessor(c.g) <= kFewPlanes && convolve_pixels(c)) {
    return true;
  }
  if constexpr (sizeof(T) == 2) {
    if (convolve_matrix(c)) {
      return true;
    }
  }
  return convolve_planes(c);
}

template <typename T>
bool convolve_channels_last(const Convolution<T>& c) {
  if constexpr (sizeof(T) == 2) {
    if (convolve_slabs(c)) {
      return true;
    }
  }
  return (elements_of_multiprocessor(c.g) <= kFewStrips && convolve_pixels(c)) ||
         convolve_strips(c) || convolve_pixels(c);
}

template <typename T>
bool convolve(const Convolution<T>& c) {
  if (!is_tileable(c.g)) {
    return false;
  }
  const bool tiled = c.g.channels_last ? convolve_channels_last(c) : convolve_contiguous(c);
  return tiled || convolve_large(c);
}

template <typename T>
bool sum_weights_contiguous(const WeightGradient<T>& c) {
  if (c.g.out_h * c.g.out_w <= kSmallPlane && elements_of_multiprocessor(c.g) <= kFewForWeights &&
      sum_weights_pixels(c)) {
    return true;
  }
  if constexpr (sizeof(T) == 2) {
    if (sum_weights_matrix(c)) {
      return true;
    }
  }
  return sum_weights_planes(c);
}

template <typename T>
bool sum_weights_channels_last(const WeightGradient<T>& c) {
  if constexpr (sizeof(T) == 2) {
    if (sum_weights_slabs(c)) {
      return true;
    }
  }
  return (elements_of_multiprocessor(c.g) <= kFewForWeights && sum_weights_pixels(c)) ||
         sum_weights_strips(c) || sum_weights_pixels(c);
}

template <typename T>
bool sum_weights(const WeightGradient<T>& c) {
  if (!is_tileable(c.g)) {
    return false;
  }
  const bool tiled = c.g.channels_last ? sum_weights_channels_last(c) : sum_weights_contiguous(c);
  return tiled || sum_weights_large(c);
}

struct Kernels {
  static constexpr bool kTakesAnyPlanes = false;

  template <typename T>
  static void forward(const Tensor& like, const DepthwiseGeometry& g, const T* x, const T* weight,
                      const T* bias, T* out) {
    const DeviceGuard guard(like.get_device_index());
    const cudaStream_t stream = current_stream(like);
    if constexpr (!std::is_same_v<T, double>) {
      if (convolve<T>({g,
                       false,
                       {x, g.h, g.w},
                       {out, g.out_h, g.out_w},
                       g.padding_h,
                       g.padding_w,
                       false,
                       weight,
                       bias,
                       stream})) {
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
      Convolution<T> c{
          g,       false, {grad, g.out_h, g.out_w}, {out, g.h, g.w}, 0, 0, false, weight,
          nullptr, stream};
      if (g.stride_h == 1 && g.stride_w == 1) {  // a convolution again, with the filters flipped
        c.flip = true;
        c.padding_h = (g.kernel_h - 1) * g.dilation_h - g.padding_h;
        c.padding_w = (g.kernel_w - 1) * g.dilation_w - g.padding_w;
      } else {
        c.transposed = true;
        c.padding_h = g.padding_h;
        c.padding_w = g.padding_w;
      }
      if (convolve(c)) {
        return;
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
      if (grad_weight && !g.empty() &&
          sum_weights<T>({g, like, x, grad, grad_weight, grad_bias, stream})) {
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
