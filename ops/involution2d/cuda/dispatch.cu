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

namespace ops::involution2d {
namespace {

// Call f(Width<K>{}, Width<S>{}) with kernel size and stride if they are tuned, else return false.
template <typename F>
bool dispatch_tuned(const Geometry& g, const F& f) {
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

// Return the parameters that do not depend on the kernel; nothing if offsets exceed 32 bits.
template <bool kFlip, typename T>
std::optional<TiledInvolution> tiled_geometry(const Geometry& g, const T* source, const T* weight,
                                              const T* out) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  if (g.c * g.h * g.w >= kLimit || g.c * g.out_h * g.out_w >= kLimit ||
      g.groups * g.taps() * g.out_h * g.out_w >= kLimit ||
      std::max(g.h + 2 * g.padding_h, g.w + 2 * g.padding_w) >= kLimit / 2) {
    return std::nullopt;
  }
  TiledInvolution p{};
  p.groups = static_cast<int>(g.groups);
  p.channels = static_cast<int>(g.group_channels());
  p.weight = image_view(g.weight_strides(), g.out_h, g.out_w, 1, weight);
  const T *input = kFlip ? out : source, *output = kFlip ? source : out;
  p.source = image_view(g.input_strides(), g.h, g.w, p.channels, input);
  p.out = image_view(g.output_strides(), g.out_h, g.out_w, p.channels, output);
  if (kFlip) {
    std::swap(p.source, p.out);
  }
  return p;
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
  TiledInvolution p;
  int64_t blocks;
  int threads;
  size_t shared;  // bytes
};

// Return the launch of nchw with the tallest tiles whose windows fit in shared memory. A block
// computes all channels (weight gradient: kernel rows) of a group or, to fill the GPU, a chunk of
// them.
template <Pass kPass, int K, typename T>
std::optional<TiledPlan> plan_nchw(const Geometry& g, TiledInvolution p) {
  constexpr bool kWeight = kPass == Pass::backward_weight;
  const int extent = kWeight ? K : p.channels, unit = kWeight ? 1 : kChannelStep;
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
    const size_t shared =
        sizeof(T) * p.window_stride * p.window_channels(kWeight ? p.channels : kTileChannels);
    if (shared <= device.block_shared) {
      const int64_t tiles = g.n * g.groups * p.tiles_h * p.tiles_w;
      p.chunks = 1, p.chunk_size = extent;
      while (tiles * p.chunks < device.multiprocessors && p.chunk_size > unit) {
        p.chunk_size = round_up((p.chunk_size + 1) / 2, unit);
        p.chunks = static_cast<int>(ceil_div(extent, p.chunk_size));
      }
      return TiledPlan{p, tiles * p.chunks, p.quads * p.rows, shared};
    }
  }
  return std::nullopt;
}

template <Pass kPass, int K, int kStride, typename T>
TiledPlan plan_nhwc(const Geometry& g, TiledInvolution p) {
  constexpr bool kFlip = kPass == Pass::backward_input;
  using Taps = CellTaps<K, kStride, kFlip>;
  using Weights = WeightTile<T, K, kStride, kFlip>;
  constexpr int kPhases = Taps::kPhases, kTaps = Taps::kTaps, kStep = Taps::kStep;
  p.lead = p.source.nchw ? p.offset_w & (kQuad - 1) : 0;
  p.cell_offset_h = static_cast<int>(g.padding_h % kPhases);
  p.cell_offset_w = static_cast<int>(g.padding_w % kPhases);
  set_tile_width(p, ceil_div(p.out.w + p.cell_offset_w, kPhases), kNhwcQuads);
  set_tile_height(p, ceil_div(p.out.h + p.cell_offset_h, kPhases), kNhwcRows / kStep, 1);
  p.weight_columns = FastDivide(Weights::columns(p));
  p.weight_rows = FastDivide(p.rows);
  p.window_stride =
      window_rows(p, kTaps, kStep) * window_layout<kTaps, kStep>(p).row() * kTileChannels;
  const size_t weights = kPass == Pass::backward_weight ? sizeof(float) * p.rows * p.width() * K * K
                                                        : sizeof(T) * Weights::size(p);
  return {p, g.n * g.groups * p.tiles_h * p.tiles_w * kPhases,
          round_up(p.quads * p.rows * kChannelParts, 32), sizeof(T) * p.window_stride + weights};
}

template <Pass kPass, int K, typename T>
auto nchw_kernel() {
  if constexpr (kPass == Pass::backward_weight) {
    return involve_nchw_weight_kernel<T, K>;
  } else {
    return involve_nchw_kernel<T, K, kPass == Pass::backward_input>;
  }
}

template <Pass kPass, int K, int kStride, typename T>
auto nhwc_kernel() {
  if constexpr (kPass == Pass::backward_weight) {
    return involve_nhwc_weight_kernel<T, K, kStride>;
  } else {
    return involve_nhwc_kernel<T, K, kStride, kPass == Pass::backward_input>;
  }
}

template <typename Kernel, typename... Pointers>
bool launch(Kernel kernel, const TiledPlan& plan, cudaStream_t stream, Pointers... pointers) {
  if (plan.blocks >= int64_t{1} << 31) {
    return false;
  }
  launch_kernel(kernel, plan.blocks, plan.threads, plan.shared, stream, plan.p, pointers...);
  return true;
}

// Run nchw or nhwc; return false if neither takes the problem.
template <Pass kPass, typename T>
bool run_tiled(const Geometry& g, const T* source, const T* factor, T* out, cudaStream_t stream) {
  constexpr bool kFlip = kPass == Pass::backward_input, kWeight = kPass == Pass::backward_weight;
  auto p = tiled_geometry<kFlip>(g, source, kWeight ? out : factor, kWeight ? factor : out);
  return p && dispatch_tuned(g, [&](auto kernel, auto stride) {
           constexpr int K = decltype(kernel)::value, S = decltype(stride)::value;
           using Taps = CellTaps<K, S, kFlip>;
           p->offset_h = Taps::start(static_cast<int>(g.padding_h));
           p->offset_w = Taps::start(static_cast<int>(g.padding_w));
           if (S == 1 && p->source.nchw && p->weight.nchw) {
             const auto plan = plan_nchw<kPass, K, T>(g, *p);
             if (plan && launch(nchw_kernel<kPass, K, T>(), *plan, stream, source, factor, out)) {
               return true;
             }
           }
           return launch(nhwc_kernel<kPass, K, S, T>(), plan_nhwc<kPass, K, S, T>(g, *p), stream,
                         source, factor, out);
         });
}

template <Pass kPass, typename T>
void involve(const Geometry& g, const T* source, const T* factor, T* out, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, double>) {
    if (run_tiled<kPass>(g, source, factor, out, stream)) {
      return;
    }
  }
  constexpr bool kTransposed = kPass == Pass::backward_input;
  const auto launch_general = [&](auto kernel, int64_t threads, const ImageStrides& source_strides,
                                  const ImageStrides& out_strides) {
    launch_kernel(kernel, ceil_div(g.n * g.groups * threads, kGeneralThreads), kGeneralThreads, 0,
                  stream, g, source_strides, g.weight_strides(), out_strides, source, factor, out);
  };
  if constexpr (kPass == Pass::backward_weight) {
    launch_general(involve_general_weight_kernel<T>, g.taps() * g.out_h * g.out_w,
                   g.input_strides(), g.output_strides());
  } else if constexpr (kTransposed) {
    launch_general(involve_general_kernel<true, T>, g.h * g.w, g.output_strides(),
                   g.input_strides());
  } else {
    launch_general(involve_general_kernel<false, T>, g.out_h * g.out_w, g.input_strides(),
                   g.output_strides());
  }
}

struct Kernels {
  template <typename T>
  static void run(const Tensor& like, const Geometry& g, Pass pass, const T* source,
                  const T* factor, T* out) {
    const DeviceGuard guard(like.get_device_index());
    const cudaStream_t stream = current_stream(like);
    switch (pass) {
      case Pass::forward: return involve<Pass::forward>(g, source, factor, out, stream);
      case Pass::backward_input:
        return involve<Pass::backward_input>(g, source, factor, out, stream);
      case Pass::backward_weight:
        return involve<Pass::backward_weight>(g, source, factor, out, stream);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("involution2d", TORCH_BOX(&forward<Kernels>));
  m.impl("involution2d_backward", TORCH_BOX(&backward<Kernels>));
}

}  // namespace ops::involution2d
