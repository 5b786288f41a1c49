// The gradient of global average pooling: a number a plane, spread over it.
#pragma once

#include "divide.cuh"
#include "global_avg_pool.h"

namespace ops::cuda {

constexpr int kSpreadThreads = 256;
constexpr int kSpreadVectors = 4;      // of a thread, where there are
constexpr int kBlocksForVectors = 32;  // so many blocks a multiprocessor

// A thread's vectors of the output, each of which ends in the plane that it begins in or in the
// next: planes have at least V elements.
template <int V, int kVectors, typename Divide, typename T>
__global__ void __launch_bounds__(kSpreadThreads)
    spread_planes_kernel(const T* __restrict__ grad, T* __restrict__ out, int64_t n, int64_t length,
                         Divide plane_of, acc_t<T> scale) {
  using Index = typename Divide::Index;
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kVectors * kSpreadThreads + threadIdx.x) * V;
  const auto value_of = [&](int64_t plane) {
    return static_cast<T>(static_cast<acc_t<T>>(grad[plane]) * scale);
  };
  Vector<T, V> results[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t i = first + k * kSpreadThreads * V;
    if (i < n) {
      const int64_t plane = plane_of(static_cast<Index>(i));
      const int64_t end = (plane + 1) * length;
      const int left = static_cast<int>(min(end - i, int64_t{V}));  // of the vector in the plane
      const T value = value_of(plane), next = left < V && end < n ? value_of(plane + 1) : value;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        results[k].lane[v] = v < left ? value : next;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t i = first + k * kSpreadThreads * V;
    if (i + V <= n) {
      *reinterpret_cast<Vector<T, V>*>(out + i) = results[k];
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (i + v < n) {
          out[i + v] = results[k].lane[v];
        }
      }
    }
  }
}

// Channels last: rows are whole numbers of vectors, `row` of them.
template <int V, int kVectors, typename Divide, typename T>
__global__ void __launch_bounds__(kSpreadThreads)
    spread_rows_kernel(const T* __restrict__ grad, T* __restrict__ out, int64_t vectors,
                       int64_t row, Divide row_of, Divide image_of, acc_t<T> scale) {
  using Index = typename Divide::Index;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t i =
        (static_cast<int64_t>(blockIdx.x) * kVectors + k) * kSpreadThreads + threadIdx.x;
    if (i >= vectors) {
      return;
    }
    const Index r = row_of(static_cast<Index>(i));
    const int64_t from = image_of(r) * row + (i - r * row);
    auto value = reinterpret_cast<const Vector<T, V>*>(grad)[from];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      value.lane[v] = static_cast<T>(static_cast<acc_t<T>>(value.lane[v]) * scale);
    }
    reinterpret_cast<Vector<T, V>*>(out)[i] = value;
  }
}

// Launches what writes out [outer, length, inner].
template <typename T>
void spread(const Tensor& like, PoolLayout layout, const T* grad, T* out) {
  const acc_t<T> scale = acc_t<T>(1) / static_cast<acc_t<T>>(layout.length);
  const int64_t n = layout.outer * layout.length * layout.inner;
  const int64_t many =
      int64_t{kBlocksForVectors} * Device().multiprocessors * kSpreadThreads * kSpreadVectors;
  // Calls f(Width<vectors a thread>{}, Divide's type) for so many vectors.
  const auto dispatch = [&](int64_t vectors, const auto& f) {
    const auto with_divide = [&](auto count) {
      n < kMostFastDivided ? f(count, type_tag<FastDivide>{}) : f(count, type_tag<Divide>{});
    };
    vectors < many ? with_divide(Width<1>{}) : with_divide(Width<kSpreadVectors>{});
  };
  const auto blocks = [](int64_t vectors, int count) {
    return dim3(ceil_div(vectors, int64_t{kSpreadThreads} * count));
  };
  if (layout.inner == 1) {
    const auto launch = [&](auto v) {
      constexpr int V = decltype(v)::value;
      dispatch(ceil_div(n, V), [&](auto count, auto tag) {
        using D = typename decltype(tag)::type;
        launch_kernel(spread_planes_kernel<V, count.value, D, T>,
                      blocks(ceil_div(n, V), count.value), kSpreadThreads, 0, current_stream(like),
                      grad, out, n, layout.length, D{layout.length}, scale);
      });
    };
    constexpr int V = kVectorBytes / sizeof(T);  // a new tensor is aligned
    layout.length < V ? launch(Width<1>{}) : launch(Width<V>{});
    return;
  }
  dispatch_width<T>({grad, out}, {layout.inner}, [&](auto v) {
    const int64_t row = layout.inner / v.value;
    const int64_t vectors = layout.outer * layout.length * row;
    dispatch(vectors, [&](auto count, auto tag) {
      using D = typename decltype(tag)::type;
      launch_kernel(spread_rows_kernel<v.value, count.value, D, T>, blocks(vectors, count.value),
                    kSpreadThreads, 0, current_stream(like), grad, out, vectors, row, D{row},
                    D{layout.length}, scale);
    });
  });
}

}  // namespace ops::cuda
