// CUDA global average pooling, forward. Deterministic: all sums have a fixed order.
//
//   nchw_kernel: [plane][pixel]                   nhwc_kernel: [image][pixel][channel]
//   ┌──────────────────────────┐ 8 to 256         ┌──────────────┐
//   │ plane 0                  │ threads a plane  │ pixel 0      │  columns of threads: vectors
//   ├──────────────────────────┤                  │ pixel 1      │  of channels; rows of threads:
//   │ plane 1 …                │ ─► shuffles      │ …            │  every n-th pixel ─► shared
//   └──────────────────────────┘                  └──────────────┘
//
//   block:   nchw: one plane, or 256 / group planes; nhwc: 2 to 32 vectors of channels of an image,
//            fewer to fill the GPU
//   shared:  nchw: one sum per warp; nhwc: the sums of all threads, for the reduction over rows
//   thread:  V sums; 8 vector loads in flight
//
// Where the blocks would not fill the GPU, a two-stage reduction splits the length: stage 1 writes
// partial sums [splits, outer, inner], stage 2 adds the splits (core/cuda/reduce.cuh).
#include "core/cuda/reduce.cuh"
#include "global_avg_pool2d/op.h"

namespace ops::global_avg_pool2d {
namespace {

using namespace cuda;

constexpr int kPoolThreads = 256;
constexpr int kLoadsInFlight = 8;            // vector loads in flight per thread
constexpr int kBlocksPerMultiprocessor = 4;  // more would leave no registers for the loads
constexpr int64_t kMaxColumns = 32;

// Accumulate `count` vectors at a stride (elements) lane by lane. kStreaming: loads with the
// evict-first policy (ld.cs).
template <bool kStreaming, int V, typename T>
__device__ void add_vectors(const T* from, int count, int64_t stride, acc_t<T> (&sums)[V]) {
  using Bits = typename BitsOf<V * sizeof(T)>::type;
  for (; count > 0; count -= kLoadsInFlight, from += kLoadsInFlight * stride) {
    Bits bits[kLoadsInFlight] = {};
#pragma unroll
    for (int k = 0; k < kLoadsInFlight; ++k) {
      if (k < count) {
        const Bits* vector = reinterpret_cast<const Bits*>(from + k * stride);
        bits[k] = kStreaming ? __ldcs(vector) : *vector;
      }
    }
#pragma unroll
    for (int k = 0; k < kLoadsInFlight; ++k) {
      const auto& values = reinterpret_cast<const Vector<T, V>&>(bits[k]);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        sums[v] += static_cast<acc_t<T>>(values.lane[v]);
      }
    }
  }
}

// Average x [outer, length, inner] over the length, in splits of split_length. `partial` [splits,
// outer, inner], if not null, receives the sums of the splits.
template <typename T>
struct PoolForward {
  const T* x;
  T* out;
  acc_t<T>* partial;
  int64_t outer, length, inner;
  int64_t split_length;
  bool streaming;

  // Accumulate every step-th of `vectors` vectors, `stride` elements apart.
  template <int V>
  __device__ void add(const T* from, int vectors, int step, int64_t stride,
                      acc_t<T> (&sums)[V]) const {
    const int count = (vectors + step - 1) / step;
    streaming ? add_vectors<true>(from, count, stride, sums)
              : add_vectors<false>(from, count, stride, sums);
  }

  __device__ void store(int64_t output, acc_t<T> sum) const {
    if (partial) {
      partial[blockIdx.y * outer * inner + output] = sum;
    } else {
      (*this)(output, sum);
    }
  }
  // Write the mean; stage 2 calls it, too.
  __device__ void operator()(int64_t output, acc_t<T> sum) const {
    out[output] = static_cast<T>(sum / static_cast<acc_t<T>>(length));
  }
};

template <int kGroup>
constexpr int kNchwThreads = kGroup > 32 ? kGroup : kPoolThreads;  // per block

// NCHW (inner = 1): kGroup threads per plane.
template <int V, int kGroup, typename T>
__global__ void __launch_bounds__(kNchwThreads<kGroup>, kBlocksPerMultiprocessor)
    nchw_kernel(PoolForward<T> f) {
  using A = acc_t<T>;
  constexpr int kGroups = kNchwThreads<kGroup> / kGroup;
  const int lane = threadIdx.x % kGroup;
  const int64_t plane = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x / kGroup;
  A sums[V] = {};
  if (plane < f.outer) {
    const int64_t first = blockIdx.y * f.split_length;
    const int vectors = static_cast<int>(min(f.split_length, f.length - first) / V);
    f.add(f.x + plane * f.length + first + lane * V, vectors - lane, kGroup, kGroup * V, sums);
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
  if constexpr (kGroup > 32) {  // one plane per block
    __shared__ A warps[kGroup / 32];
    if (threadIdx.x % 32 == 0) {
      warps[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    sum = 0;
    for (int w = 0; w < kGroup / 32; ++w) {
      sum += warps[w];
    }
  }
  if (lane == 0 && plane < f.outer) {
    f.store(plane, sum);
  }
}

// NHWC: a block of `columns` × rows of threads covers adjacent vectors; an image has `blocks`.
template <int V, typename T>
__global__ void __launch_bounds__(kPoolThreads, kBlocksPerMultiprocessor)
    nhwc_kernel(PoolForward<T> f, int columns, int blocks) {
  using A = acc_t<T>;
  const int rows = blockDim.x / columns, row = threadIdx.x / columns;
  const int64_t image = blockIdx.x / blocks, first_column = blockIdx.x % blocks * int64_t{columns};
  const int64_t element = (first_column + threadIdx.x % columns) * V;
  A sums[V] = {};
  if (row < rows && element < f.inner) {
    const int64_t first = blockIdx.y * f.split_length;
    const int pixels = static_cast<int>(min(f.split_length, f.length - first));
    const T* x = f.x + (image * f.length + first + row) * f.inner + element;
    f.add(x, pixels - row, rows, rows * f.inner, sums);
  }
  __shared__ A shared[kPoolThreads * V];  // [rows, columns * V]
#pragma unroll
  for (int v = 0; v < V; ++v) {
    shared[threadIdx.x * V + v] = sums[v];
  }
  // Two-step reduction in shared memory: over rows, then over the threads of a channel.
  const int lanes = columns * V;
  const int threads_used = blockDim.x / lanes * lanes;
  A sum = 0;
  __syncthreads();
  if (threadIdx.x < threads_used) {
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * lanes; i += threads_used) {
      sum += shared[i];
    }
  }
  __syncthreads();
  shared[threadIdx.x] = sum;
  __syncthreads();
  const int64_t channel = first_column * V + threadIdx.x;
  if (threadIdx.x < lanes && channel < f.inner) {
    sum = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < threads_used; i += lanes) {
      sum += shared[i];
    }
    f.store(image * f.inner + channel, sum);
  }
}

// Launch stage 1 and, if blocks alone would not fill the GPU, split the length into multiples of
// `unit` and launch stage 2.
template <typename T, typename Kernel, typename... Args>
void launch(const Tensor& like, PoolForward<T> f, Kernel kernel, int64_t blocks, int threads,
            int64_t unit, Args... args) {
  const int64_t multiprocessors = Device::attribute(cudaDevAttrMultiProcessorCount);
  int64_t splits = 1;
  if (blocks < multiprocessors && f.length >= 2 * unit) {
    const int64_t target = std::min(ceil_div(2 * multiprocessors, blocks), f.length / unit);
    f.split_length = ceil_div(f.length, target * unit) * unit;
    splits = ceil_div(f.length, f.split_length);
  }
  const int64_t outputs = f.outer * f.inner;
  Tensor partial;
  if (splits > 1) {
    partial = empty(like, {splits, outputs}, accumulator_dtype(like.scalar_type()));
    f.partial = partial.mutable_data_ptr<acc_t<T>>();
  }
  const cudaStream_t stream = current_stream(like);
  launch_kernel(kernel, dim3(blocks, splits), threads, 0, stream, f, args...);
  if (splits > 1) {
    second_stage(f.partial, splits, outputs, f, stream);
  }
}

template <typename T>
void pool_nchw(const Tensor& like, const PoolForward<T>& f) {
  dispatch_width<T>({f.x}, {f.length}, [&](auto v) {
    constexpr int V = v.value;
    const int64_t vectors = f.length / V;
    const auto run = [&](auto group) {
      constexpr int kGroup = group.value, kThreads = kNchwThreads<kGroup>;
      launch(like, f, nchw_kernel<V, kGroup, T>, ceil_div(f.outer, kThreads / kGroup), kThreads,
             kThreads * kLoadsInFlight * V);
    };
    if (vectors <= 8 * kLoadsInFlight) return run(Width<8>{});
    if (vectors <= 16 * kLoadsInFlight) return run(Width<16>{});
    if (vectors < 64 * kLoadsInFlight) return run(Width<32>{});
    if (vectors <= 128 * kLoadsInFlight) return run(Width<128>{});
    run(Width<kPoolThreads>{});
  });
}

template <typename T>
void pool_nhwc(const Tensor& like, const PoolForward<T>& f) {
  dispatch_width<T>({f.x}, {f.inner}, [&](auto v) {
    constexpr int V = v.value;
    const int64_t vectors = f.inner / V;
    const int64_t multiprocessors = Device::attribute(cudaDevAttrMultiProcessorCount);
    int columns = static_cast<int>(std::min(vectors, kMaxColumns));
    while (columns > 2 && f.outer * ceil_div(vectors, columns) < multiprocessors) {
      columns = (columns + 1) / 2;
    }
    int threads = 64;
    while (threads < kPoolThreads &&
           (threads < columns * V || threads * kLoadsInFlight < f.length * columns)) {
      threads *= 2;
    }
    const int blocks = ceil_div(vectors, columns);
    launch(like, f, nhwc_kernel<V, T>, f.outer * blocks, threads,
           threads / columns * kLoadsInFlight, columns, blocks);
  });
}

struct Forward {
  template <typename T>
  static void forward(const Tensor& like, PoolLayout layout, const T* x, T* out) {
    const DeviceGuard guard(like.get_device_index());
    const auto [outer, length, inner] = layout;
    // Evict-first loads keep what the L2 cache holds of a larger input: 1.1 to 1.3 times as fast
    // after the kernel that writes it. A cached input of half the cache takes twice as long.
    const int64_t bytes = outer * length * inner * sizeof(T),
                  cache = Device::attribute(cudaDevAttrL2CacheSize);
    const bool streaming = bytes > cache / 2 && bytes <= 2 * cache;
    const PoolForward<T> f{x, out, nullptr, outer, length, inner, length, streaming};
    inner == 1 ? pool_nchw(like, f) : pool_nhwc(like, f);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("global_avg_pool2d", TORCH_BOX(&forward<Forward>));
}

}  // namespace ops::global_avg_pool2d
