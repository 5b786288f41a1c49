#include "involution.h"
#include "involution_general.cuh"
#include "involution_tiled.cuh"

namespace ops::cuda {
namespace {

struct TiledPlan {
  TiledInvolution launch;
  dim3 blocks, threads;
  TileLayout at;
};

// f(Width<K>{}) with the kernel's side where it has tiled kernels; false for the others.
template <typename F>
bool dispatch_kernel(const InvolutionGeometry& g, const F& f) {
  if (g.kernel_h != g.kernel_w || g.stride_h != 1 || g.stride_w != 1 || g.dilation_h != 1 ||
      g.dilation_w != 1) {
    return false;
  }
  switch (g.kernel_h) {
    case 3: return f(Width<3>{});
    case 5: return f(Width<5>{});
    case 7: return f(Width<7>{});
    default: return false;
  }
}

// Nothing where 32 bits do not count an image's elements or the blocks.
std::optional<TiledPlan> plan_tiles(const InvolutionGeometry& g, bool transposed) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  const int64_t source_h = transposed ? g.out_h : g.h, source_w = transposed ? g.out_w : g.w;
  const int64_t out_h = transposed ? g.h : g.out_h, out_w = transposed ? g.w : g.out_w;
  const int64_t flipped = transposed ? g.kernel_h - 1 : 0;
  const int quads = out_w > kMostQuads / 2 * kTilePixels ? kMostQuads : kMostQuads / 2;
  const int64_t tiles_h = ceil_div(out_h, kTileRows),
                tiles_w = ceil_div(out_w, quads * kTilePixels);
  const int64_t blocks = g.n * g.groups * tiles_h * tiles_w;
  if (g.c * g.h * g.w >= kLimit || g.c * g.out_h * g.out_w >= kLimit ||
      g.groups * g.taps() * g.out_h * g.out_w >= kLimit || blocks >= kLimit ||
      std::max(g.h + 2 * g.padding_h, g.w + 2 * g.padding_w) >= kLimit / 2) {
    return std::nullopt;
  }
  const auto image = [](const ImageStrides& s, int64_t h, int64_t w) {
    return TiledImage{s.n,
                      static_cast<int>(s.c),
                      static_cast<int>(s.h),
                      static_cast<int>(s.w),
                      static_cast<int>(h),
                      static_cast<int>(w)};
  };
  const ImageStrides source = transposed ? g.output_strides() : g.input_strides();
  const ImageStrides out = transposed ? g.input_strides() : g.output_strides();
  const auto origin = [&](int64_t padding) {
    return static_cast<int>(transposed ? padding - flipped : -padding);
  };
  TiledInvolution launch{static_cast<int>(g.groups),
                         static_cast<int>(g.group_channels()),
                         image(source, source_h, source_w),
                         image(g.weight_strides(), g.out_h, g.out_w),
                         image(out, out_h, out_w),
                         origin(g.padding_h),
                         origin(g.padding_w),
                         static_cast<int>(tiles_h),
                         static_cast<int>(tiles_w),
                         false,
                         false};
  return TiledPlan{launch, dim3(blocks), dim3(quads, kTileRows),
                   TileLayout(quads, static_cast<int>(g.kernel_h))};
}

// Whether fours of adjacent pixels or, in a channels-last image, channels of a group are aligned.
template <typename T>
bool has_fours(const TiledImage& image, const T* data, int channels) {
  return reinterpret_cast<uintptr_t>(data) % (4 * sizeof(T)) == 0 && image.image % 4 == 0 &&
         (image.pixel == 1 ? image.w % 4 == 0 : image.pixel % 4 == 0 && channels % 4 == 0);
}

template <bool kTransposed, typename T>
bool involve_tiled(const InvolutionGeometry& g, const T* source, const T* weight, T* out,
                   cudaStream_t stream) {
  return dispatch_kernel(g, [&](auto kernel) {
    constexpr int K = decltype(kernel)::value;
    auto plan = plan_tiles(g, kTransposed);
    if (!plan) {
      return false;
    }
    TiledInvolution& p = plan->launch;
    p.weight_fours = p.weight.pixel == 1 && has_fours(p.weight, weight, 0);
    p.out_fours = has_fours(p.out, out, p.channels);
    const size_t shared = sizeof(float) * (kTileChannels * plan->at.window + K * plan->at.taps);
    launch_kernel(involve_tile_kernel<T, K, kTransposed>, plan->blocks, plan->threads, shared,
                  stream, p, source, weight, out);
    return true;
  });
}

template <typename T>
bool involve_weight_tiled(const InvolutionGeometry& g, const T* x, const T* grad, T* grad_weight,
                          cudaStream_t stream) {
  return dispatch_kernel(g, [&](auto kernel) {
    constexpr int K = decltype(kernel)::value;
    const auto plan = plan_tiles(g, false);
    if (!plan) {
      return false;
    }
    const TileLayout& at = plan->at;
    const size_t shared =
        sizeof(float) * (g.group_channels() * (at.window + at.grad) + K * at.taps);
    if (shared > Device().block_shared) {
      return false;
    }
    launch_kernel(involve_tile_weight_kernel<T, K>, plan->blocks, plan->threads, shared, stream,
                  plan->launch, x, grad, grad_weight);
    return true;
  });
}

template <bool kTransposed, typename T>
void involve(const Tensor& like, const InvolutionGeometry& g, const T* source, const T* weight,
             T* out) {
  const DeviceGuard guard(like.get_device_index());
  const cudaStream_t stream = current_stream(like);
  if constexpr (!std::is_same_v<T, double>) {
    if (involve_tiled<kTransposed>(g, source, weight, out, stream)) {
      return;
    }
  }
  const int64_t pixels = kTransposed ? g.h * g.w : g.out_h * g.out_w;
  launch_kernel(involve_general_kernel<kTransposed, T>,
                ceil_div(g.n * g.groups * pixels, kGeneralThreads), kGeneralThreads, 0, stream, g,
                kTransposed ? g.output_strides() : g.input_strides(), g.weight_strides(),
                kTransposed ? g.input_strides() : g.output_strides(), source, weight, out);
}

struct Kernels {
  template <typename T>
  static void forward(const Tensor& like, const InvolutionGeometry& g, const T* x, const T* weight,
                      T* out) {
    involve<false>(like, g, x, weight, out);
  }

  template <typename T>
  static void backward_input(const Tensor& like, const InvolutionGeometry& g, const T* grad,
                             const T* weight, T* out) {
    involve<true>(like, g, grad, weight, out);
  }

  template <typename T>
  static void backward_weight(const Tensor& like, const InvolutionGeometry& g, const T* grad,
                              const T* x, T* out) {
    const DeviceGuard guard(like.get_device_index());
    const cudaStream_t stream = current_stream(like);
    if constexpr (!std::is_same_v<T, double>) {
      if (involve_weight_tiled(g, x, grad, out, stream)) {
        return;
      }
    }
    launch_kernel(involve_general_weight_kernel<T>,
                  ceil_div(g.n * g.groups * g.taps() * g.out_h * g.out_w, kGeneralThreads),
                  kGeneralThreads, 0, stream, g, g.input_strides(), g.weight_strides(),
                  g.output_strides(), x, grad, out);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("involution2d", TORCH_BOX(&involution2d<Kernels>));
  m.impl("involution2d_backward", TORCH_BOX(&involution2d_backward<Kernels>));
}

}  // namespace ops::cuda
