// Dispatch of the CUDA involution kernels. First match wins:
//
//   layout                  geometry                                     dtype      kernel
//   any                     any                                          float64    general
//   image and weight NCHW   3×3, 5×5, 7×7; stride 1; dilation 1          ≤ 32 bits  planes (1)
//   any                     3×3, 5×5, 7×7; stride 1×1, 2×2; dilation 1   ≤ 32 bits  direct
//   any                     any                                          any        general
//
// (1) Weight gradient: only if the windows of all channels of a group fit in shared memory.
// planes and direct need 32-bit offsets within an image of x, output and weight, and < 2³¹ blocks
// (direct: threads).
#include "involution2d/cuda/direct.cuh"
#include "involution2d/cuda/general.cuh"
#include "involution2d/cuda/planes.cuh"
#include "involution2d/op.h"

namespace ops::involution2d {
namespace {

// Call f(Width<K>{}, Width<S>{}) with kernel size and stride if they are tuned, else return false.
template <typename F>
bool dispatch_tuned(const Geometry& g, const F& f) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  if (g.c * g.h * g.w >= kLimit || g.c * g.out_h * g.out_w >= kLimit ||
      g.groups * g.taps() * g.out_h * g.out_w >= kLimit ||
      std::max(g.h + 2 * g.padding_h, g.w + 2 * g.padding_w) >= kLimit / 2 ||
      g.kernel_h != g.kernel_w || g.stride_h != g.stride_w || g.stride_h > 2 || g.dilation_h != 1 ||
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
Image image(const ImageStrides& s, int64_t h, int64_t w, int64_t channels, const T* data) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) / sizeof(T));
  const int64_t extent = s.w == 1 ? w : channels;
  const int vector =
      widest_vector(kVectorBytes / sizeof(T), {address, extent, s.w == 1 ? s.n : s.w});
  return {s.n, int(s.c), int(s.h), int(s.w), int(h), int(w), vector};
}

template <Pass kPass, typename T>
Problem problem(const Geometry& g, const T* source, const T* factor, const T* out) {
  constexpr bool kFlip = kPass == Pass::backward_input, kWeight = kPass == Pass::backward_weight;
  const int64_t channels = g.group_channels();
  Problem p{int(g.groups), int(channels), int(g.padding_h), int(g.padding_w)};
  p.source = image(g.input_strides(), g.h, g.w, channels, kFlip ? out : source);
  p.weight = image(g.weight_strides(), g.out_h, g.out_w, 1, kWeight ? out : factor);
  p.out = image(g.output_strides(), g.out_h, g.out_w, channels,
                kFlip     ? source
                : kWeight ? factor
                          : out);
  if (kFlip) {
    std::swap(p.source, p.out);
  }
  return p;
}

// Run `planes` with the tallest tiles whose windows fit in shared memory. A block computes all
// channels (weight gradient: kernel rows) of a group or, to fill the GPU, a chunk of them.
template <Pass kPass, int K, typename T>
bool run_planes(const Geometry& g, const Problem& problem, const T* source, const T* factor, T* out,
                cudaStream_t stream) {
  constexpr bool kFlip = kPass == Pass::backward_input, kWeight = kPass == Pass::backward_weight;
  PlanesProblem p{problem};
  p.offset_h = kFlip ? p.padding_h - (K - 1) : -p.padding_h;
  p.offset_w = kFlip ? p.padding_w - (K - 1) : -p.padding_w;
  p.source.vector = widest_vector(p.source.vector, {p.offset_w - kLead<T, K>});
  p.tiles_w = static_cast<int>(ceil_div(p.out.w, kQuad * kMaxQuads));
  p.quads = round_up(static_cast<int>(ceil_div(ceil_div(p.out.w, p.tiles_w), kQuad)), 2);
  p.window_columns = round_up(kQuad * p.quads + kFirstColumn<T, K> + kQuad * (kWindowQuads - 1),
                              kVectorBytes / sizeof(T));
  constexpr int kPeriod = 64 / sizeof(T);  // pitch: 32 bytes modulo 64, see PlanesTile
  p.window_pitch = p.window_columns + (kPeriod * 3 / 2 - p.window_columns % kPeriod) % kPeriod;
  const int extent = kWeight ? K : p.channels, unit = kWeight ? 1 : kChannelStep;
  const int at_once = std::min(p.channels, kWeight ? p.channels : kTileChannels);
  const Device device;
  for (int rows = kThreads / p.quads / 4 * 4; rows > 0; rows -= 4) {
    p.tiles_h = static_cast<int>(ceil_div(p.out.h, rows));
    p.rows = round_up(static_cast<int>(ceil_div(p.out.h, p.tiles_h)), 4);
    p.window_stride = (p.rows + K - 1) * p.window_pitch;
    const size_t shared = sizeof(T) * p.window_stride * round_up(at_once, kChannelStep);
    if (shared > device.block_shared) {
      continue;
    }
    const int64_t tiles = g.n * g.groups * p.tiles_h * p.tiles_w;
    p.chunks = 1, p.chunk_size = extent;
    while (tiles * p.chunks < device.multiprocessors && p.chunk_size > unit) {
      p.chunk_size = round_up((p.chunk_size + 1) / 2, unit);
      p.chunks = static_cast<int>(ceil_div(extent, p.chunk_size));
    }
    if (tiles * p.chunks >= int64_t{1} << 31) {
      return false;
    }
    const auto launch = [&](auto kernel) {
      launch_kernel(kernel, tiles * p.chunks, p.quads * p.rows, shared, stream, p, source, factor,
                    out);
    };
    if constexpr (kWeight) {
      launch(planes_weight_kernel<T, K>);
    } else {
      launch(planes_kernel<T, K, kFlip>);
    }
    return true;
  }
  return false;
}

template <Pass kPass, int K, int S, typename T>
bool run_direct(const Geometry& g, const Problem& problem, const T* source, const T* factor, T* out,
                cudaStream_t stream) {
  using Window = Window<K, S, kPass == Pass::backward_input>;
  DirectProblem p{problem};
  p.columns = static_cast<int>(ceil_div(p.out.h, Window::R * Window::kPhases)) * Window::kPhases;
  const int64_t columns = g.n * g.groups * p.columns * p.out.w;
  const auto launch = [&](auto kernel, int parts) {
    if (columns * parts >= int64_t{1} << 31) {
      return false;
    }
    p.threads = static_cast<unsigned>(columns * parts);
    launch_kernel(kernel, ceil_div(p.threads, kThreads), kThreads, 0, stream, p, source, factor,
                  out);
    return true;
  };
  constexpr int64_t kMinThreads = 64;  // per multiprocessor
  if (!g.channels_last) {
    return columns >= kMinThreads * Device::attribute(cudaDevAttrMultiProcessorCount)
               ? launch(direct_kernel<kPass, K, S, 1, 1, T>, 1)
               : launch(direct_kernel<kPass, K, S, 4, 1, T>, 4);
  }
  const int vector = widest_vector(std::min(p.source.vector, p.out.vector), {p.channels});
  if constexpr (sizeof(T) == 2) {
    if (vector == 8 && p.channels % 16 == 0) {
      return launch(direct_kernel<kPass, K, S, 2, 8, T>, 2);
    }
  }
  return vector >= 4 ? launch(direct_kernel<kPass, K, S, 4, 4, T>, 4)
                     : launch(direct_kernel<kPass, K, S, 4, 1, T>, 4);
}

template <Pass kPass, typename T>
void involve(const Geometry& g, const T* source, const T* factor, T* out, cudaStream_t stream) {
  constexpr bool kFlip = kPass == Pass::backward_input;
  if constexpr (!std::is_same_v<T, double>) {
    if (dispatch_tuned(g, [&](auto kernel, auto stride) {
          constexpr int K = decltype(kernel)::value, S = decltype(stride)::value;
          const Problem p = problem<kPass>(g, source, factor, out);
          if (S == 1 && !g.channels_last && !g.weight_channels_last &&
              run_planes<kPass, K>(g, p, source, factor, out, stream)) {
            return true;
          }
          return run_direct<kPass, K, S>(g, p, source, factor, out, stream);
        })) {
      return;
    }
  }
  const auto launch_general = [&](auto kernel, int64_t threads, const ImageStrides& source_strides,
                                  const ImageStrides& out_strides) {
    launch_kernel(kernel, ceil_div(g.n * g.groups * threads, kGeneralThreads), kGeneralThreads, 0,
                  stream, g, source_strides, g.weight_strides(), out_strides, source, factor, out);
  };
  const ImageStrides x = g.input_strides(), y = g.output_strides();
  if constexpr (kPass == Pass::backward_weight) {
    launch_general(involve_general_weight_kernel<T>, g.taps() * g.out_h * g.out_w, x, y);
  } else {
    launch_general(involve_general_kernel<kFlip, T>, kFlip ? g.h * g.w : g.out_h * g.out_w,
                   kFlip ? y : x, kFlip ? x : y);
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
