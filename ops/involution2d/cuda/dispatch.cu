// Dispatch of the CUDA involution kernels. First match wins:
//
//   layout   geometry                                     dtype      kernel
//   any      any                                          float64    general
//   any      3×3, 5×5, 7×7; stride 1×1, 2×2; dilation 1   ≤ 32 bits  direct
//   any      any                                          any        general
//
// direct needs 32-bit offsets within an image of x, output and weight, and < 2³¹ threads.
#include "involution2d/cuda/direct.cuh"
#include "involution2d/cuda/general.cuh"
#include "involution2d/op.h"

namespace ops::involution2d {
namespace {

// Call f(Width<K>{}, Width<S>{}) with kernel size and stride if they are tuned, else return false.
template <typename F>
bool dispatch_tuned(const Geometry& g, const F& f) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  if (g.c * g.h * g.w >= kLimit || g.c * g.out_h * g.out_w >= kLimit ||
      g.groups * g.taps() * g.out_h * g.out_w >= kLimit ||
      std::max(g.h + 2 * g.padding_h, g.w + 2 * g.padding_w) >= kLimit / 2) {
    return false;
  }
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

Strides narrow(const ImageStrides& s) {
  return {s.n, static_cast<int>(s.c), static_cast<int>(s.h), static_cast<int>(s.w)};
}

// Run `direct`; return false if it does not take the problem.
template <Pass kPass, int K, int S, typename T>
bool run_direct(const Geometry& g, const T* source, const T* factor, T* out, cudaStream_t stream) {
  constexpr bool kFlip = kPass == Pass::backward_input;
  using Window = Window<K, S, kFlip>;
  const auto size = [](int64_t extent) { return static_cast<int>(extent); };
  DirectProblem p{};
  p.groups = size(g.groups), p.channels = size(g.group_channels());
  p.source_h = size(g.h), p.source_w = size(g.w), p.out_h = size(g.out_h), p.out_w = size(g.out_w);
  p.padding_h = size(g.padding_h), p.padding_w = size(g.padding_w);
  p.source = narrow(g.input_strides()), p.out = narrow(g.output_strides());
  p.weight = narrow(g.weight_strides());
  if (kFlip) {
    std::swap(p.source_h, p.out_h), std::swap(p.source_w, p.out_w), std::swap(p.source, p.out);
  }
  p.rows = size(ceil_div(p.out_h, Window::R * Window::kPhases)) * Window::kPhases;
  const int64_t columns = g.n * g.groups * p.rows * p.out_w;
  const auto launch = [&](auto kernel, int parts) {
    if (columns * parts >= int64_t{1} << 31) {
      return false;
    }
    p.threads = static_cast<unsigned>(columns * parts);
    launch_kernel(kernel, ceil_div(p.threads, kDirectThreads), kDirectThreads, 0, stream, p, source,
                  factor, out);
    return true;
  };
  constexpr int64_t kMinThreads = 64;  // per multiprocessor
  if (!g.channels_last &&
      columns >= kMinThreads * Device::attribute(cudaDevAttrMultiProcessorCount)) {
    return launch(direct_kernel<kPass, K, S, 1, 1, T>, 1);
  }
  if (g.channels_last && p.channels % kVector == 0 &&
      are_aligned({source, factor, out}, kVector * sizeof(T))) {
    return launch(direct_kernel<kPass, K, S, kParts, kVector, T>, kParts);
  }
  return launch(direct_kernel<kPass, K, S, kParts, 1, T>, kParts);
}

template <Pass kPass, typename T>
void involve(const Geometry& g, const T* source, const T* factor, T* out, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, double>) {
    if (dispatch_tuned(g, [&](auto kernel, auto stride) {
          return run_direct<kPass, kernel.value, stride.value>(g, source, factor, out, stream);
        })) {
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
