// Dispatch of the CUDA involution kernels. First match wins:
//
//   layout                   geometry                                       dtype      kernel
//   any                      any                                            float64    general
//   x and weight NCHW        3×3, 5×5, 7×7; stride 1; dilation 1            ≤ 32 bits  nchw (1)
//   any                      3×3, 5×5, 7×7; stride 1×1, 2×2; dilation 1     ≤ 32 bits  nhwc
//   any                      any                                            any        general
//
// (1) Weight gradient: only if the windows of all channels of a group fit in shared memory.
// nchw and nhwc need 32-bit offsets within an image of x, output and weight, and < 2³¹ blocks.
#include "involution2d/cuda/general.cuh"
#include "involution2d/cuda/nchw.cuh"
#include "involution2d/cuda/nhwc.cuh"
#include "involution2d/op.h"

namespace ops::cuda {
namespace {

// Call f(Width<K>{}, Width<S>{}) with kernel size and stride if they are tuned, else return false.
template <typename F>
bool dispatch_tuned(const InvolutionGeometry& g, const F& f) {
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

// Return the largest power of two, at most max_vector, that divides all extents.
int widest_vector(int max_vector, std::initializer_list<int64_t> extents) {
  for (const int64_t extent : extents) {
    while (extent % max_vector) {
      max_vector /= 2;
    }
  }
  return max_vector;
}

template <typename T>
ImageView image_view(const ImageStrides& s, int64_t h, int64_t w, int64_t channels, const T* data) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) / sizeof(T));
  const int64_t extent = s.w == 1 ? w : channels;
  return {s.n,
          static_cast<int>(s.c),
          static_cast<int>(s.h),
          static_cast<int>(s.w),
          static_cast<int>(h),
          static_cast<int>(w),
          s.w == 1,
          widest_vector(kVectorBytes / sizeof(T), {address, extent, s.w == 1 ? s.n : s.w})};
}

// Return the source pixel (of grad_output) that the input gradient's first cell reads first.
int64_t transposed_offset(int64_t padding, int64_t kernel, int64_t stride) {
  return padding / stride - (ceil_div(kernel, stride) - 1);
}

// Return the parameters that do not depend on the kernel; nothing if offsets exceed 32 bits.
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
      kFlip ? image_view(output, g.out_h, g.out_w, channels, source)
            : image_view(input, g.h, g.w, channels, source),
      image_view(g.weight_strides(), g.out_h, g.out_w, 1, weight),
      kFlip ? image_view(input, g.h, g.w, channels, out)
            : image_view(output, g.out_h, g.out_w, channels, out),
      static_cast<int>(kFlip ? transposed_offset(g.padding_h, g.kernel_h, g.stride_h)
                             : -g.padding_h),
      static_cast<int>(kFlip ? transposed_offset(g.padding_w, g.kernel_w, g.stride_w)
                             : -g.padding_w),
  };
}

// Divide the image into equal tiles of at most max_quads, max_rows.
void set_tile_width(TiledInvolution& p, int64_t width, int max_quads) {
  p.tiles_w = static_cast<int>(ceil_div(width, kQuad * max_quads));
  p.quads = round_up(static_cast<int>(ceil_div(ceil_div(width, p.tiles_w), kQuad)), 2);
}
void set_tile_height(TiledInvolution& p, int64_t height, int max_rows, int multiple) {
  p.tiles_h = static_cast<int>(ceil_div(height, max_rows));
  p.rows = round_up(static_cast<int>(ceil_div(height, p.tiles_h)), multiple);
}

struct TiledPlan {
  TiledInvolution launch;
  dim3 blocks, threads;
  size_t shared;
};

std::optional<TiledPlan> make_plan(const InvolutionGeometry& g, const TiledInvolution& p,
                                   int phases, int threads, size_t shared) {
  const int64_t blocks = g.n * g.groups * p.tiles_h * p.tiles_w * phases;
  if (blocks >= int64_t{1} << 31) {
    return std::nullopt;
  }
  return TiledPlan{p, dim3(blocks), dim3(threads), shared};
}

// Return the launch of nchw; nothing if the windows of `channels` channels exceed shared memory. A
// block computes all `extent` channels or kernel rows or, to fill the GPU, a multiple of `unit`.
template <int K, typename T>
std::optional<TiledPlan> plan_nchw(const InvolutionGeometry& g, TiledInvolution p, int channels,
                                   int extent, int unit) {
  p.source.vector = widest_vector(p.source.vector, {p.offset_w - kLead<T, K>});
  set_tile_width(p, p.out.w, kNchwQuads);
  p.quad_pairs = FastDivide(p.quads / 2);
  p.window_columns = round_up(p.width() + WindowRow<T, K>::kFirst + kQuad * (kWindowQuads - 1),
                              kVectorBytes / sizeof(T));
  constexpr int kPeriod = 64 / sizeof(T);  // pitch: 32 bytes modulo 64, see NchwTile
  p.window_pitch = p.window_columns + (kPeriod * 3 / 2 - p.window_columns % kPeriod) % kPeriod;
  const Device device;
  for (int rows = kNchwThreads / p.quads / 4 * 4; rows > 0; rows -= 4) {
    set_tile_height(p, p.out.h, rows, 4);
    p.window_stride = (p.rows + K - 1) * p.window_pitch;
    const size_t shared = sizeof(T) * p.window_channels(channels) * p.window_stride;
    if (shared <= device.block_shared) {
      p.part_size = extent;
      while (g.n * g.groups * p.tiles_h * p.tiles_w * p.parts < device.multiprocessors &&
             p.part_size > unit) {
        p.part_size = round_up((p.part_size + 1) / 2, unit);
        p.parts = static_cast<int>(ceil_div(extent, p.part_size));
      }
      return make_plan(g, p, p.parts, p.quads * p.rows, shared);
    }
  }
  return std::nullopt;
}

// Return the launch of nhwc, with extra_shared(p) bytes of shared memory after the windows.
template <int K, int kStride, bool kFlip, typename T, typename ExtraShared>
std::optional<TiledPlan> plan_nhwc(const InvolutionGeometry& g, TiledInvolution p,
                                   const ExtraShared& extra_shared) {
  using Taps = PhaseTaps<K, kStride, kFlip>;
  constexpr int kPhases = Taps::kPhases, kTaps = Taps::kTaps, kStep = Taps::kStep;
  p.lead = p.source.nchw ? p.offset_w & (kQuad - 1) : 0;
  p.cell_offset_h = static_cast<int>(g.padding_h % kPhases);
  p.cell_offset_w = static_cast<int>(g.padding_w % kPhases);
  set_tile_width(p, ceil_div(p.out.w + p.cell_offset_w, kPhases), kNhwcQuads);
  set_tile_height(p, ceil_div(p.out.h + p.cell_offset_h, kPhases), kNhwcRows / kStep, 1);
  p.window_stride =
      window_rows(p, kTaps, kStep) * window_layout<kTaps, kStep>(p).row() * kTileChannels;
  return make_plan(g, p, kPhases, round_up(p.quads * p.rows * kChannelParts, 32),
                   sizeof(T) * p.window_stride + extra_shared(p));
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
bool run_tuned(const InvolutionGeometry& g, const T* source, const T* weight, T* out,
               cudaStream_t stream) {
  const auto p = tiled_geometry<kFlip>(g, source, weight, out);
  return p && dispatch_tuned(g, [&](auto kernel, auto stride) {
           constexpr int K = decltype(kernel)::value, S = decltype(stride)::value;
           if (S == 1 && p->source.nchw && p->weight.nchw) {
             const auto plan = plan_nchw<K, T>(g, *p, kTileChannels, p->channels, kChannelStep);
             return launch(involve_nchw_kernel<T, K, kFlip>, plan, stream, source, weight, out);
           }
           const auto plan = plan_nhwc<K, S, kFlip, T>(g, *p, [](const TiledInvolution& tiles) {
             return sizeof(T) * WeightTile<T, K, S, kFlip>::size(tiles);
           });
           return launch(involve_nhwc_kernel<T, K, S, kFlip>, plan, stream, source, weight, out);
         });
}

template <typename T>
bool run_tuned_weight(const InvolutionGeometry& g, const T* x, const T* grad, T* grad_weight,
                      cudaStream_t stream) {
  const auto p = tiled_geometry<false>(g, x, grad_weight, grad);
  return p && dispatch_tuned(g, [&](auto kernel, auto stride) {
           constexpr int K = decltype(kernel)::value, S = decltype(stride)::value;
           if (S == 1 && p->source.nchw && p->weight.nchw &&
               launch(involve_nchw_weight_kernel<T, K>, plan_nchw<K, T>(g, *p, p->channels, K, 1),
                      stream, x, grad, grad_weight)) {
             return true;
           }
           const auto plan = plan_nhwc<K, S, false, T>(g, *p, [](const TiledInvolution& tiles) {
             return sizeof(float) * tiles.rows * tiles.width() * K * K;
           });
           return launch(involve_nhwc_weight_kernel<T, K, S>, plan, stream, x, grad, grad_weight);
         });
}

template <bool kTransposed, typename T>
void involve(const InvolutionGeometry& g, const T* source, const T* weight, T* out,
             cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, double>) {
    if (run_tuned<kTransposed>(g, source, weight, out, stream)) {
      return;
    }
  }
  const int64_t pixels = kTransposed ? g.h * g.w : g.out_h * g.out_w;
  launch_kernel(involve_general_kernel<kTransposed, T>,
                ceil_div(g.n * g.groups * pixels, kGeneralThreads), kGeneralThreads, 0, stream, g,
                kTransposed ? g.output_strides() : g.input_strides(), g.weight_strides(),
                kTransposed ? g.input_strides() : g.output_strides(), source, weight, out);
}

template <typename T>
void involve_weight(const InvolutionGeometry& g, const T* x, const T* grad, T* out,
                    cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, double>) {
    if (run_tuned_weight(g, x, grad, out, stream)) {
      return;
    }
  }
  launch_kernel(involve_general_weight_kernel<T>,
                ceil_div(g.n * g.groups * g.taps() * g.out_h * g.out_w, kGeneralThreads),
                kGeneralThreads, 0, stream, g, g.input_strides(), g.weight_strides(),
                g.output_strides(), x, grad, out);
}

struct Kernels {
  template <typename T>
  static void run(const Tensor& like, const InvolutionGeometry& g, Pass pass, const T* source,
                  const T* factor, T* out) {
    const DeviceGuard guard(like.get_device_index());
    const cudaStream_t stream = current_stream(like);
    switch (pass) {
      case Pass::forward: return involve<false>(g, source, factor, out, stream);
      case Pass::backward_input: return involve<true>(g, source, factor, out, stream);
      case Pass::backward_weight: return involve_weight(g, source, factor, out, stream);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("involution2d", TORCH_BOX(&involution2d<Kernels>));
  m.impl("involution2d_backward", TORCH_BOX(&involution2d_backward<Kernels>));
}

}  // namespace ops::cuda
