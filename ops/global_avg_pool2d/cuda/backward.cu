// CUDA global average pooling, backward: broadcast grad / length over the pixels.
//
//   grad [outer, inner]            out [outer, length, inner], in vectors of V
//   ┌────┬────┐  × 1 / length      ┌────┬────┬────┬────┬────┬────┐
//   │ g0 │ g1 │ ─────────────────► │ g0 │ g0 │ g0 │ g1 │ g1 │ g1 │  (NCHW; NHWC repeats pixels)
//   └────┴────┘                    └────┴────┴────┴────┴────┴────┘
//
//   block:   256 × kVectors adjacent vectors of out
//   shared:  nothing
//   thread:  kVectors vectors, 256 vectors apart, computed before the first store
#include "core/cuda/divide.cuh"
#include "global_avg_pool2d/op.h"

namespace ops::global_avg_pool2d {
namespace {

using namespace cuda;

constexpr int kThreads = 256;
constexpr int kVectors = 2;  // per thread

// Content of a vector of out. kPlanes: pixels of at most two planes (NCHW). kPixel: channels of one
// pixel (NHWC). kPixels: pixels of one image or plane.
enum class Content { kPlanes, kPixel, kPixels };

template <Content kContent, int V, typename T, typename Divider>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* grad, T* out, int64_t vectors, Layout layout, Divider by_length,
                    Divider by_inner, acc_t<T> scale) {
  using Index = typename Divider::Index;
  const auto scaled = [=](T value) { return static_cast<T>(static_cast<acc_t<T>>(value) * scale); };
  const Index length = layout.length, inner = layout.inner;
  const Index thread = static_cast<Index>(blockIdx.x) * kVectors * kThreads + threadIdx.x;
  Vector<T, V> results[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Vector<T, V>& result = results[k];
    const Index first = (thread + k * kThreads) * V;
    if (thread + k * kThreads >= vectors) {
      break;
    }
    if constexpr (kContent == Content::kPlanes) {
      const Index plane = by_length(first), rest = (plane + 1) * length - first;
      const T value = scaled(grad[plane]), next = rest < V ? scaled(grad[plane + 1]) : value;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        result.lane[v] = v < rest ? value : next;
      }
    } else {
      const Index pixel = by_inner(first), image = by_length(pixel);
      const T* row = grad + image * inner;
      Index channel = first - pixel * inner;
      if constexpr (kContent == Content::kPixel) {
        result = load_vector<V>(row + channel);
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        result.lane[v] = scaled(kContent == Content::kPixel ? result.lane[v] : row[channel]);
        channel = channel + 1 < inner ? channel + 1 : 0;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Index vector = thread + k * kThreads;
    if (vector < vectors) {
      *reinterpret_cast<Vector<T, V>*>(out + vector * V) = results[k];
    }
  }
}

struct Backward {
  template <typename T>
  static void run(const Tensor& like, const Layout& layout, const T* grad, T* out) {
    const DeviceGuard guard(like.get_device_index());
    constexpr int kWidest = kVectorBytes / sizeof(T);  // `out` is a new tensor: aligned
    const int64_t length = layout.length, inner = layout.inner, n = layout.outer * length * inner;
    const auto launch = [&](auto content, auto v) {
      const auto run = [&](auto by_length, auto by_inner) {
        const int64_t vectors = n / v.value;
        launch_kernel(backward_kernel<content.value, v.value, T, decltype(by_length)>,
                      ceil_div(vectors, kVectors * kThreads), kThreads, 0, current_stream(like),
                      grad, out, vectors, layout, by_length, by_inner,
                      acc_t<T>(1) / static_cast<acc_t<T>>(length));
      };
      n < kMostFastDivided ? run(FastDivide(length), FastDivide(inner))
                           : run(Divide(length), Divide(inner));
    };
    using Planes = std::integral_constant<Content, Content::kPlanes>;
    using Pixel = std::integral_constant<Content, Content::kPixel>;
    using Pixels = std::integral_constant<Content, Content::kPixels>;
    if (inner == 1 && length >= kWidest) {
      dispatch_width<T>({out}, {n}, [&](auto v) { launch(Planes{}, v); });
    } else if (inner % kWidest == 0 && are_aligned({grad}, kVectorBytes)) {
      launch(Pixel{}, Width<kWidest>{});
    } else {
      dispatch_width<T>({out}, {length * inner}, [&](auto v) { launch(Pixels{}, v); });
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("global_avg_pool2d_backward", TORCH_BOX(&backward<Backward>));
}

}  // namespace ops::global_avg_pool2d
