// CUDA batch normalisation and activation: forward and backward each launch one fused kernel or
// three kernels (kernels.cuh).
#include "batch_norm_act2d/cuda/kernels.cuh"

namespace ops::cuda {
namespace {

// min(max(z, low), high), NaN for NaN.
struct FastClamp : Clamp<float> {
  __device__ float value(float z) const {
#if __CUDA_ARCH__ >= 800
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(z) : "f"(low));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(z) : "f"(high));
    return z;
#else
    return Clamp<float>::value(z);
#endif
  }
};

// z σ(z) without the exact division, whose code is longer than the memory time: an error of about 3
// units in the last place, and of 1e-6 for 16-bit tensors, where rounding hides it.
template <typename T>
struct FastSilu {
  __device__ static float sigmoid(float z) {
    return __fdividef(1.0f, 1.0f + (sizeof(T) == 2 ? __expf(-z) : expf(-z)));
  }

  __device__ float value(float z) const { return z * sigmoid(z); }
  __device__ float gradient(float g, float z) const {
    const float s = sigmoid(z);
    return g * (s * (1.0f + z * (1.0f - s)));
  }
};

// Return the activation for tensors of type T.
template <typename T, typename F>
F device_activation(const F& f) {
  return f;
}
template <typename T>
FastClamp device_activation(const Clamp<float>& f) {
  return {f};
}
template <typename T>
FastSilu<T> device_activation(const Silu<float>&) {
  return {};
}

// Call f(reduce, apply), the grids of both passes, with the widest vectors to which pointers and
// layout are aligned: four elements in NHWC, up to 16 bytes in NCHW; or one element.
template <typename T, bool kNhwc, int V, typename F>
void dispatch_grid(NormLayout layout, std::initializer_list<const void*> pointers, const F& f) {
  if constexpr (V > 1) {
    if ((kNhwc ? layout.channels : layout.inner) % V != 0 ||
        !are_aligned(pointers, V * sizeof(T))) {
      return dispatch_grid<T, kNhwc, V == 8 ? 4 : 1>(layout, pointers, f);
    }
  }
  f(Grid<V, kNhwc>(layout, kBlocks), Grid<V, kNhwc>(layout, 2 * kBlocks));
}

template <typename T, typename F>
void dispatch_layout(NormLayout layout, std::initializer_list<const void*> pointers, const F& f) {
  constexpr int kWidest = sizeof(T) == 8 ? 1 : kVectorBytes / sizeof(T);
  if (layout.inner == 1) {
    dispatch_grid<T, true, std::min(4, kWidest)>(layout, pointers, f);
  } else {
    dispatch_grid<T, false, kWidest>(layout, pointers, f);
  }
}

// Channels of at most kSmallBytes use a block each, even if there are fewer than multiprocessors.
constexpr int64_t kSmallBytes = 64 * 1024;
// Most 2-byte vectors of a channel: asynchronous copies take at least 4 bytes.
constexpr int64_t kMaxSynchronousCopies = 16 * 1024;

// Return whether to use the fused kernel, which keeps a channel of `tensors` tensors in shared
// memory.
template <typename G, typename T>
bool uses_fused_kernel(NormLayout layout, int tensors) {
  const Device device;
  const int64_t bytes = tensors * layout.count() * sizeof(T);
  return bytes + kStaticSharedBytes <= static_cast<int64_t>(device.block_shared) &&
         (bytes <= kSmallBytes || 2 * layout.channels >= device.multiprocessors) &&
         (G::V * sizeof(T) > 2 || layout.count() <= kMaxSynchronousCopies);
}

template <typename G>
Tensor partials_of(const Tensor& like, const G& g) {
  return empty(like, {2, g.chunks, g.channels}, accumulator_dtype(like.scalar_type()));
}

struct Backend {
  template <typename T, typename A, typename F>
  static void forward(const Tensor& like, NormLayout layout, const T* x,
                      const Statistics<A>& statistics, const Channels<A>& channels,
                      const F& activation, T* out) {
    const DeviceGuard guard(like.get_device_index());
    const cudaStream_t stream = current_stream(like);
    dispatch_layout<T>(layout, {x, out}, [&](const auto& reduce, const auto& apply) {
      using G = std::decay_t<decltype(reduce)>;
      const auto f = device_activation<T>(activation);
      using Activation = std::decay_t<decltype(f)>;
      if constexpr (!G::kAlongChannels) {
        if (uses_fused_kernel<G, T>(layout, 1)) {
          const G g(layout, 0);
          return launch_kernel(channel_forward<G, T, Activation>, g.blocks(), kThreads,
                               layout.count() * sizeof(T), stream, g, x, statistics, channels, f,
                               out);
        }
      }
      Tensor memory = partials_of(like, reduce);
      A* partials = memory.mutable_data_ptr<A>();
      launch_kernel(chunk_statistics<G, T>, reduce.blocks(), kThreads, 0, stream, reduce, x,
                    partials);
      launch_dependent(finish_statistics<A>, ceil_div(reduce.channels, kFinishChannels),
                       dim3(kFinishChannels, kFinishLines), stream, static_cast<const A*>(partials),
                       reduce.chunks, reduce.channels, reduce.chunk * (G::V / G::kChannels),
                       statistics);
      launch_dependent(apply_forward<G, T, Activation>, apply.blocks(), kThreads, stream, apply, x,
                       channels, f, out);
    });
  }

  // `out` may be null: no gradient of the input.
  template <typename T, typename A, typename F>
  static void backward(const Tensor& like, NormLayout layout, const T* grad, const T* x,
                       const Channels<A>& channels, const F& activation, T* out, A* grad_weight,
                       A* grad_bias) {
    const DeviceGuard guard(like.get_device_index());
    const cudaStream_t stream = current_stream(like);
    dispatch_layout<T>(layout, {grad, x, out}, [&](const auto& reduce, const auto& apply) {
      using G = std::decay_t<decltype(reduce)>;
      const auto f = device_activation<T>(activation);
      using Activation = std::decay_t<decltype(f)>;
      const A count_inverse = A(1) / static_cast<A>(layout.count());
      if constexpr (!G::kAlongChannels) {
        if (uses_fused_kernel<G, T>(layout, 2)) {
          const G g(layout, 0);
          return launch_kernel(channel_backward<G, T, Activation>, g.blocks(), kThreads,
                               2 * layout.count() * sizeof(T), stream, g, grad, x, channels, f,
                               grad_weight, grad_bias, count_inverse, out);
        }
      }
      Tensor memory = partials_of(like, reduce);
      A* partials = memory.mutable_data_ptr<A>();
      launch_kernel(chunk_gradients<G, T, Activation>, reduce.blocks(), kThreads, 0, stream, reduce,
                    grad, x, channels, f, partials);
      launch_dependent(finish_gradients<A>, ceil_div(reduce.channels, kFinishChannels),
                       dim3(kFinishChannels, kFinishLines), stream, static_cast<const A*>(partials),
                       reduce.chunks, reduce.channels, channels.rstd, grad_weight, grad_bias);
      if (out != nullptr) {
        launch_dependent(apply_backward<G, T, Activation>, apply.blocks(), kThreads, stream, apply,
                         grad, x, channels, f, static_cast<const A*>(grad_weight),
                         static_cast<const A*>(grad_bias), count_inverse, out);
      }
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("batch_norm_act2d", TORCH_BOX(&batch_norm_act2d<Backend>));
  m.impl("batch_norm_act2d_backward", TORCH_BOX(&batch_norm_act2d_backward<Backend>));
}

}  // namespace ops::cuda
