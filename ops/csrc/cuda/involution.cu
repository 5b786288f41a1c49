#include "involution.h"
#include "involution_general.cuh"
#include "involution_tiled.cuh"

namespace ops::cuda {
namespace {

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

// The largest power of two, up to `most`, that divides all.
int lanes_of(int most, std::initializer_list<int64_t> extents) {
  for (const int64_t extent : extents) {
    while (extent % most) {
      most /= 2;
    }
  }
  return most;
}

template <typename T>
TiledImage tiled_image(const ImageStrides& s, int64_t h, int64_t w, int64_t channels,
                       const T* data) {
  const auto place = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) / sizeof(T));
  const int64_t extent = s.w == 1 ? w : channels;
  return {s.n,
          static_cast<int>(s.c),
          static_cast<int>(s.h),
          static_cast<int>(s.w),
          static_cast<int>(h),
          static_cast<int>(w),
          lanes_of(kVectorBytes / sizeof(T), {place, extent, s.w == 1 ? s.n : s.w})};
}

struct TiledPlan {
  TiledInvolution launch;
  dim3 blocks, threads;
  size_t shared;
};

// A plan for the involution or, kFlip, its input gradient; with kAllChannels all of a group's
// windows lie in shared memory. Nothing where 32 bits do not count an image's elements or the
// blocks, or where shared memory does not suffice.
template <int K, bool kFlip, bool kAllChannels, typename T>
std::optional<TiledPlan> plan_tiles(const InvolutionGeometry& g, const T* source, const T* weight,
                                    const T* out) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  constexpr int kVector = kVectorBytes / sizeof(T);
  const int64_t out_h = kFlip ? g.h : g.out_h, out_w = kFlip ? g.w : g.out_w;
  if (g.c * g.h * g.w >= kLimit || g.c * g.out_h * g.out_w >= kLimit ||
      g.groups * g.taps() * g.out_h * g.out_w >= kLimit ||
      std::max(g.h + 2 * g.padding_h, g.w + 2 * g.padding_w) >= kLimit / 2) {
    return std::nullopt;
  }
  const int64_t channels = g.group_channels();
  const ImageStrides input = g.input_strides(), output = g.output_strides();
  TiledInvolution p{
      static_cast<int>(g.groups),
      static_cast<int>(channels),
      kFlip ? tiled_image(output, g.out_h, g.out_w, channels, source)
            : tiled_image(input, g.h, g.w, channels, source),
      tiled_image(g.weight_strides(), g.out_h, g.out_w, 1, weight),
      kFlip ? tiled_image(input, g.h, g.w, channels, out)
            : tiled_image(output, g.out_h, g.out_w, channels, out),
      static_cast<int>(kFlip ? g.padding_h - (K - 1) : -g.padding_h),
      static_cast<int>(kFlip ? g.padding_w - (K - 1) : -g.padding_w),
  };
  if (p.source.pixel == 1) {
    p.source.lanes = lanes_of(p.source.lanes, {p.offset_w - kLead<T, K>});
  }
  // Tiles of equal size, as large as there are threads.
  p.tiles_w = static_cast<int>(ceil_div(out_w, kFour * kTileFours));
  p.fours = round_up(static_cast<int>(ceil_div(ceil_div(out_w, p.tiles_w), kFour)), 2);
  p.pairs = FastDivide(p.fours / 2);
  p.columns =
      round_up(kFour * p.fours + SourceRow<T, K>::kFirst + kFour * (kWindowFours - 1), kVector);
  constexpr int kBanks = 64 / sizeof(T);
  p.pitch = p.columns + (kBanks * 3 / 2 - p.columns % kBanks) % kBanks;
  const size_t limit = Device().block_shared;
  size_t shared = 0;
  for (int most = kTileThreads / p.fours / 4 * 4; shared == 0 || shared > limit; most -= 4) {
    if (most == 0) {
      return std::nullopt;
    }
    p.tiles_h = static_cast<int>(ceil_div(out_h, most));
    p.rows = round_up(static_cast<int>(ceil_div(out_h, p.tiles_h)), 4);
    p.plane = (p.rows + K - 1) * p.pitch + kVector;
    const int weights = p.weight.pixel == 1 ? 0 : 2 * PixelRows<T, K, kFlip>::size(p);
    shared = sizeof(T) *
             (p.window_channels(kAllChannels ? p.channels : kTileChannels) * p.plane + weights);
  }
  const int64_t blocks = g.n * g.groups * p.tiles_h * p.tiles_w;
  if (blocks >= kLimit) {
    return std::nullopt;
  }
  return TiledPlan{p, dim3(blocks), dim3(p.fours * p.rows), shared};
}

template <bool kFlip, typename T>
bool involve_tiled(const InvolutionGeometry& g, const T* source, const T* weight, T* out,
                   cudaStream_t stream) {
  return dispatch_kernel(g, [&](auto kernel) {
    constexpr int K = decltype(kernel)::value;
    const auto plan = plan_tiles<K, kFlip, false>(g, source, weight, out);
    if (plan) {
      launch_kernel(g.weight_strides().w == 1 ? involve_tile_kernel<T, K, kFlip, true>
                                              : involve_tile_kernel<T, K, kFlip, false>,
                    plan->blocks, plan->threads, plan->shared, stream, plan->launch, source, weight,
                    out);
    }
    return plan.has_value();
  });
}

template <typename T>
bool involve_weight_tiled(const InvolutionGeometry& g, const T* x, const T* grad, T* grad_weight,
                          cudaStream_t stream) {
  return dispatch_kernel(g, [&](auto kernel) {
    constexpr int K = decltype(kernel)::value;
    const auto plan = plan_tiles<K, false, true>(g, x, grad_weight, grad);
    if (plan) {
      launch_kernel(g.weight_strides().w == 1 ? involve_tile_weight_kernel<T, K, true>
                                              : involve_tile_weight_kernel<T, K, false>,
                    plan->blocks, plan->threads, plan->shared, stream, plan->launch, x, grad,
                    grad_weight);
    }
    return plan.has_value();
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
