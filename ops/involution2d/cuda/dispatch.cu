#include "involution2d/cuda/naive.cuh"
#include "involution2d/cuda/nchw.cuh"
#include "involution2d/cuda/nhwc.cuh"
#include "involution2d/op.h"

namespace ops::cuda {
namespace {

// f(Width<K>{}, Width<S>{}) with the kernel's side and the stride where there are tiled kernels;
// false for the others.
template <typename F>
bool dispatch_kernel(const InvolutionGeometry& g, const F& f) {
  if (g.kernel_h != g.kernel_w || g.stride_h != g.stride_w || g.stride_h > 2 || g.dilation_h != 1 ||
      g.dilation_w != 1) {
    return false;
  }
  const auto with_stride = [&](auto kernel) {
    return g.stride_h == 1 ? f(kernel, Width<1>{}) : f(kernel, Width<2>{});
  };
  switch (g.kernel_h) {
    case 3: return with_stride(Width<3>{});
    case 5: return with_stride(Width<5>{});
    case 7: return with_stride(Width<7>{});
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
          s.w == 1,
          lanes_of(kVectorBytes / sizeof(T), {place, extent, s.w == 1 ? s.n : s.w})};
}

// The first pixel of the output that the input gradient's first square takes.
int64_t flipped(int64_t padding, int64_t kernel, int64_t stride) {
  return padding / stride - (ceil_div(kernel, stride) - 1);
}

// The geometry of the involution or, kFlip, of its input gradient. Nothing where 32 bits do not
// count an image's elements.
template <bool kFlip, typename T>
std::optional<TiledInvolution> tiled_geometry(const InvolutionGeometry& g, const T* source,
                                              const T* weight, const T* out) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  if (g.c * g.h * g.w >= kLimit || g.c * g.out_h * g.out_w >= kLimit ||
      g.groups * g.taps() * g.out_h * g.out_w >= kLimit ||
      std::max(g.h + 2 * g.padding_h, g.w + 2 * g.padding_w) >= kLimit / 2) {
    return std::nullopt;
  }
  const int64_t channels = g.group_channels();
  const ImageStrides input = g.input_strides(), output = g.output_strides();
  return TiledInvolution{
      static_cast<int>(g.groups),
      static_cast<int>(channels),
      kFlip ? tiled_image(output, g.out_h, g.out_w, channels, source)
            : tiled_image(input, g.h, g.w, channels, source),
      tiled_image(g.weight_strides(), g.out_h, g.out_w, 1, weight),
      kFlip ? tiled_image(input, g.h, g.w, channels, out)
            : tiled_image(output, g.out_h, g.out_w, channels, out),
      static_cast<int>(kFlip ? flipped(g.padding_h, g.kernel_h, g.stride_h) : -g.padding_h),
      static_cast<int>(kFlip ? flipped(g.padding_w, g.kernel_w, g.stride_w) : -g.padding_w),
  };
}

// Tiles of equal size, as large as may be.
void set_tiles(TiledInvolution& p, int64_t width, int most_fours) {
  p.tiles_w = static_cast<int>(ceil_div(width, kFour * most_fours));
  p.fours = round_up(static_cast<int>(ceil_div(ceil_div(width, p.tiles_w), kFour)), 2);
}
void set_rows(TiledInvolution& p, int64_t height, int most_rows, int multiple) {
  p.tiles_h = static_cast<int>(ceil_div(height, most_rows));
  p.rows = round_up(static_cast<int>(ceil_div(height, p.tiles_h)), multiple);
}

struct TiledPlan {
  TiledInvolution launch;
  dim3 blocks, threads;
  size_t shared;
};

std::optional<TiledPlan> plan_of(const InvolutionGeometry& g, const TiledInvolution& p, int phases,
                                 int threads, size_t shared) {
  const int64_t blocks = g.n * g.groups * p.tiles_h * p.tiles_w * phases;
  if (blocks >= int64_t{1} << 31) {
    return std::nullopt;
  }
  return TiledPlan{p, dim3(blocks), dim3(threads), shared};
}

// In NCHW; nothing where shared memory does not suffice for the windows of `channels` channels.
template <int K, typename T>
std::optional<TiledPlan> plan_nchw(const InvolutionGeometry& g, TiledInvolution p, int channels) {
  p.source.lanes = lanes_of(p.source.lanes, {p.offset_w - kLead<T, K>});
  set_tiles(p, p.out.w, kTileFours);
  p.pairs = FastDivide(p.fours / 2);
  p.columns = round_up(p.width() + SourceRow<T, K>::kFirst + kFour * (kWindowFours - 1),
                       kVectorBytes / sizeof(T));
  constexpr int kBanks = 64 / sizeof(T);
  p.pitch = p.columns + (kBanks * 3 / 2 - p.columns % kBanks) % kBanks;
  const size_t limit = Device().block_shared;
  for (int rows = kTileThreads / p.fours / 4 * 4; rows > 0; rows -= 4) {
    set_rows(p, p.out.h, rows, 4);
    p.window_stride = (p.rows + K - 1) * p.pitch;
    const size_t shared = sizeof(T) * p.window_channels(channels) * p.window_stride;
    if (shared <= limit) {
      return plan_of(g, p, 1, p.fours * p.rows, shared);
    }
  }
  return std::nullopt;
}

// Of pixels; beside(p) bytes lie in shared memory beside the windows.
template <int K, int kStride, bool kFlip, typename T, typename Beside>
std::optional<TiledPlan> plan_pixels(const InvolutionGeometry& g, TiledInvolution p,
                                     const Beside& beside) {
  using Taps = PixelTaps<K, kStride, kFlip>;
  constexpr int kPhases = Taps::kPhases, kTaps = Taps::kTaps, kStep = Taps::kStep;
  p.lead = p.source.nchw ? p.offset_w & (kFour - 1) : 0;
  p.before_h = static_cast<int>(g.padding_h % kPhases);
  p.before_w = static_cast<int>(g.padding_w % kPhases);
  set_tiles(p, ceil_div(p.out.w + p.before_w, kPhases), kPixelFours);
  set_rows(p, ceil_div(p.out.h + p.before_h, kPhases), kPixelRows / kStep, 1);
  p.window_stride =
      window_rows(p, kTaps, kStep) * window_layout<kTaps, kStep>(p).row() * kTileChannels;
  return plan_of(g, p, kPhases, round_up(p.fours * p.rows * kPixelParts, 32),
                 sizeof(T) * p.window_stride + beside(p));
}

template <typename Kernel, typename... Pointers>
bool launch(Kernel kernel, const std::optional<TiledPlan>& plan, cudaStream_t stream,
            Pointers... pointers) {
  if (plan) {
    launch_kernel(kernel, plan->blocks, plan->threads, plan->shared, stream, plan->launch,
                  pointers...);
  }
  return plan.has_value();
}

template <bool kFlip, typename T>
bool involve_tiled(const InvolutionGeometry& g, const T* source, const T* weight, T* out,
                   cudaStream_t stream) {
  const auto p = tiled_geometry<kFlip>(g, source, weight, out);
  return p && dispatch_kernel(g, [&](auto kernel, auto stride) {
           constexpr int K = decltype(kernel)::value, S = decltype(stride)::value;
           if (S == 1 && p->source.nchw && p->weight.nchw) {
             return launch(involve_nchw_kernel<T, K, kFlip>, plan_nchw<K, T>(g, *p, kTileChannels),
                           stream, source, weight, out);
           }
           const auto plan = plan_pixels<K, S, kFlip, T>(g, *p, [](const TiledInvolution& tiles) {
             return sizeof(T) * PixelWeights<T, K, S, kFlip>::size(tiles);
           });
           return launch(involve_pixels_kernel<T, K, S, kFlip>, plan, stream, source, weight, out);
         });
}

template <typename T>
bool involve_weight_tiled(const InvolutionGeometry& g, const T* x, const T* grad, T* grad_weight,
                          cudaStream_t stream) {
  const auto p = tiled_geometry<false>(g, x, grad_weight, grad);
  return p && dispatch_kernel(g, [&](auto kernel, auto stride) {
           constexpr int K = decltype(kernel)::value, S = decltype(stride)::value;
           if (S == 1 && p->source.nchw && p->weight.nchw &&
               launch(involve_nchw_weight_kernel<T, K>, plan_nchw<K, T>(g, *p, p->channels), stream,
                      x, grad, grad_weight)) {
             return true;
           }
           const auto plan = plan_pixels<K, S, false, T>(g, *p, [](const TiledInvolution& tiles) {
             return sizeof(float) * tiles.rows * tiles.width() * K * K;
           });
           return launch(involve_pixels_weight_kernel<T, K, S>, plan, stream, x, grad, grad_weight);
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
