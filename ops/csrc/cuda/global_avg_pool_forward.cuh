// Global average pooling: every thread sums what is its own, then threads sum up in a fixed order.
#pragma once

#include "common.cuh"
#include "global_avg_pool.h"

namespace ops::cuda {

constexpr int kPoolThreads = 256;
constexpr int kPoolLoads = 8;   // of a thread, in flight
constexpr int kPoolBlocks = 4;  // of a multiprocessor: more leave no registers for the loads

// What is averaged: [outer, length, inner], in parts of `part` along the length. Sums of parts go
// to `partial` [parts, outer, inner] where there are several.
template <typename T>
struct PoolForward {
  const T* x;
  T* out;
  acc_t<T>* partial;
  int64_t outer, length, inner;
  int64_t part;

  __device__ void store(int64_t output, acc_t<T> sum) const {
    if (partial) {
      partial[blockIdx.y * outer * inner + output] = sum;
    } else {
      out[output] = static_cast<T>(sum / static_cast<acc_t<T>>(length));
    }
  }
};

// Adds the vectors at x + first, first + step, … below end, lane by lane, kPoolLoads of them at
// once.
template <int V, typename T>
__device__ void add_vectors(const T* x, int64_t first, int64_t end, int64_t step,
                            acc_t<T> (&sums)[V]) {
  for (int64_t i = first; i < end; i += kPoolLoads * step) {
    Vector<T, V> values[kPoolLoads] = {};
#pragma unroll
    for (int k = 0; k < kPoolLoads; ++k) {
      if (i + k * step < end) {
        values[k] = *reinterpret_cast<const Vector<T, V>*>(x + i + k * step);
      }
    }
#pragma unroll
    for (int k = 0; k < kPoolLoads; ++k) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        sums[v] += static_cast<acc_t<T>>(values[k].lane[v]);
      }
    }
  }
}

// Contiguous images (inner is 1): kGroup threads a plane.
template <int V, int kGroup, typename T>
__global__ void __launch_bounds__(kPoolThreads, kPoolBlocks) planes_kernel(PoolForward<T> f) {
  using A = acc_t<T>;
  constexpr int kGroups = kPoolThreads / kGroup;
  const int lane = threadIdx.x % kGroup;
  const int64_t plane = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x / kGroup;
  A sums[V] = {};
  if (plane < f.outer) {
    const T* x = f.x + plane * f.length;
    const int64_t first = blockIdx.y * f.part;
    add_vectors(x, first + lane * V, min(first + f.part, f.length), kGroup * V, sums);
  }
  A sum = sums[0];
#pragma unroll
  for (int v = 1; v < V; ++v) {
    sum += sums[v];
  }
  constexpr int kWidth = kGroup < 32 ? kGroup : 32;
#pragma unroll
  for (int half = kWidth / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(0xffffffff, sum, half, kWidth);
  }
  if constexpr (kGroup > 32) {  // a block a plane
    __shared__ A warps[kPoolThreads / 32];
    if (threadIdx.x % 32 == 0) {
      warps[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    sum = 0;
    for (int w = 0; w < kPoolThreads / 32; ++w) {
      sum += warps[w];
    }
  }
  if (lane == 0 && plane < f.outer) {
    f.store(plane, sum);
  }
}

// Channels-last images: a block takes `columns` vectors of neighbouring channels of an image, and
// as many of their rows at once as it has threads for.
template <int V, typename T>
__global__ void __launch_bounds__(kPoolThreads, kPoolBlocks)
    columns_kernel(PoolForward<T> f, int columns, int blocks) {
  using A = acc_t<T>;
  const int rows = kPoolThreads / columns;
  const int row = threadIdx.x / columns;
  const int64_t image = blockIdx.x / blocks;
  const int64_t channel =
      (static_cast<int64_t>(blockIdx.x % blocks) * columns + threadIdx.x % columns) * V;
  A sums[V] = {};
  if (row < rows && channel < f.inner) {
    const T* x = f.x + image * f.length * f.inner + channel;
    const int64_t first = blockIdx.y * f.part;
    add_vectors(x, (first + row) * f.inner, min(first + f.part, f.length) * f.inner, rows * f.inner,
                sums);
  }
  __shared__ A shared[V][kPoolThreads];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    shared[v][threadIdx.x] = sums[v];
  }
  for (int n = rows; n > 1;) {  // the second half of the rows onto the first
    const int half = (n + 1) / 2;
    __syncthreads();
    if (row + half < n) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        shared[v][threadIdx.x] += shared[v][threadIdx.x + half * columns];
      }
    }
    n = half;
  }
  if (row == 0 && channel < f.inner) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      f.store(image * f.inner + channel + v, shared[v][threadIdx.x]);
    }
  }
}

// kGroup threads an output.
template <int kGroup, typename T>
__global__ void __launch_bounds__(kPoolThreads)
    sum_parts_kernel(const acc_t<T>* __restrict__ partial, T* __restrict__ out, int64_t outputs,
                     int parts, int64_t length) {
  constexpr int kGroups = kPoolThreads / kGroup;
  const int lane = threadIdx.x % kGroup;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x / kGroup;
  acc_t<T> sum = 0;
  if (i < outputs) {
#pragma unroll 4
    for (int part = lane; part < parts; part += kGroup) {
      sum += partial[part * outputs + i];
    }
  }
#pragma unroll
  for (int half = kGroup / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(0xffffffff, sum, half, kGroup);
  }
  if (lane == 0 && i < outputs) {
    out[i] = static_cast<T>(sum / static_cast<acc_t<T>>(length));
  }
}

// Launches what averages layout.
template <typename T>
class PoolForwardLaunch {
 public:
  PoolForwardLaunch(const Tensor& like, PoolLayout layout, const T* x, T* out)
      : like_(like),
        layout_(layout),
        f_{x, out, nullptr, layout.outer, layout.length, layout.inner, layout.length} {}

  void operator()() { layout_.inner == 1 ? planes() : columns(); }

 private:
  const Tensor& like_;
  const PoolLayout layout_;
  const int64_t multiprocessors_ = Device().multiprocessors;
  PoolForward<T> f_;

  void planes() {
    dispatch_width<T>({f_.x}, {f_.length}, [&](auto v) {
      constexpr int V = decltype(v)::value;
      const int64_t vectors = f_.length / V;
      const auto launch = [&](auto group) {
        constexpr int kGroup = decltype(group)::value;
        run(planes_kernel<V, kGroup, T>, ceil_div(f_.outer, kPoolThreads / kGroup),
            kPoolThreads * kPoolLoads * V);
      };
      if (vectors >= 4 * kPoolThreads) {
        launch(Width<kPoolThreads>{});
      } else if (vectors >= 64) {
        launch(Width<32>{});
      } else {
        launch(Width<8>{});
      }
    });
  }

  void columns() {
    dispatch_width<T>({f_.x}, {f_.inner}, [&](auto v) {
      const int64_t vectors = f_.inner / v.value;
      int columns = static_cast<int>(std::min<int64_t>(vectors, 32));
      while (columns > 4 && f_.outer * ceil_div(vectors, columns) < 2 * multiprocessors_) {
        columns = (columns + 1) / 2;
      }
      const int64_t blocks = ceil_div(vectors, columns);
      run(columns_kernel<v.value, T>, f_.outer * blocks, kPoolThreads / columns * kPoolLoads,
          columns, static_cast<int>(blocks));
    });
  }

  // Splits the length into multiples of `least` where the blocks would not fill the GPU.
  template <typename Kernel, typename... Args>
  void run(Kernel kernel, int64_t blocks, int64_t least, Args... args) {
    int64_t parts = 1;
    if (blocks < multiprocessors_ && f_.length >= 2 * least) {
      const int64_t wanted = std::min(ceil_div(2 * multiprocessors_, blocks), f_.length / least);
      f_.part = ceil_div(f_.length, wanted * least) * least;
      parts = ceil_div(f_.length, f_.part);
    }
    const int64_t outputs = f_.outer * f_.inner;
    Tensor partial;
    if (parts > 1) {
      const auto type = std::is_same_v<acc_t<T>, double> ? ScalarType::Double : ScalarType::Float;
      partial = torch::stable::empty({parts, outputs}, type, std::nullopt, like_.device());
      f_.partial = partial.mutable_data_ptr<acc_t<T>>();
    }
    const cudaStream_t stream = current_stream(like_);
    launch_kernel(kernel, dim3(blocks, parts), kPoolThreads, 0, stream, f_, args...);
    if (parts > 1) {
      const auto sum = [&](auto group) {
        launch_kernel(sum_parts_kernel<group.value, T>,
                      ceil_div(outputs, kPoolThreads / group.value), kPoolThreads, 0, stream,
                      f_.partial, f_.out, outputs, static_cast<int>(parts), f_.length);
      };
      parts < 32 ? sum(Width<1>{}) : sum(Width<32>{});
    }
  }
};

}  // namespace ops::cuda
