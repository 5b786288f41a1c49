// Global average pooling: every thread sums what is its own, then threads sum up in a fixed order.
#pragma once

#include "core/cuda/common.cuh"
#include "global_avg_pool2d/op.h"

namespace ops::cuda {

constexpr int kPoolThreads = 256;
constexpr int kPoolLoads = 8;   // of a thread, in flight
constexpr int kPoolBlocks = 4;  // of a multiprocessor: more leave no registers for the loads
constexpr int64_t kMostColumns = 32;
constexpr int kMostOfRow = 64;  // elements of a row of several pixels

// Adds `count` vectors that are `stride` elements apart, lane by lane. kOnce reads them as the
// first to leave the cache, which then keeps what others have yet to write.
template <bool kOnce, int V, typename T>
__device__ void add_vectors(const T* from, int count, int64_t stride, acc_t<T> (&sums)[V]) {
  using Bits = typename BitsOf<V * sizeof(T)>::type;
  for (; count > 0; count -= kPoolLoads, from += kPoolLoads * stride) {
    Bits bits[kPoolLoads] = {};
#pragma unroll
    for (int k = 0; k < kPoolLoads; ++k) {
      if (k < count) {
        const Bits* vector = reinterpret_cast<const Bits*>(from + k * stride);
        bits[k] = kOnce ? __ldcs(vector) : *vector;
      }
    }
#pragma unroll
    for (int k = 0; k < kPoolLoads; ++k) {
      const auto& values = reinterpret_cast<const Vector<T, V>&>(bits[k]);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        sums[v] += static_cast<acc_t<T>>(values.lane[v]);
      }
    }
  }
}

// What is averaged: [outer, length, inner], in parts of `part` along the length. Sums of parts go
// to `partial` [parts, outer, inner] where there are several.
template <typename T>
struct PoolForward {
  const T* x;
  T* out;
  acc_t<T>* partial;
  int64_t outer, length, inner;
  int64_t part;
  bool evict_first;

  // Adds the first of `vectors` vectors, which are `stride` / `step` elements apart, and every
  // step-th after it.
  template <int V>
  __device__ void add(const T* from, int vectors, int step, int64_t stride,
                      acc_t<T> (&sums)[V]) const {
    const int count = (vectors + step - 1) / step;
    evict_first ? add_vectors<true>(from, count, stride, sums)
                : add_vectors<false>(from, count, stride, sums);
  }

  __device__ void store(int64_t output, acc_t<T> sum) const {
    if (partial) {
      partial[blockIdx.y * outer * inner + output] = sum;
    } else {
      out[output] = static_cast<T>(sum / static_cast<acc_t<T>>(length));
    }
  }
};

template <int kGroup>
constexpr int kPlaneThreads = kGroup > 32 ? kGroup : kPoolThreads;  // of a block

// Contiguous images (inner is 1): kGroup threads a plane.
template <int V, int kGroup, typename T>
__global__ void __launch_bounds__(kPlaneThreads<kGroup>, kPoolBlocks)
    planes_kernel(PoolForward<T> f) {
  using A = acc_t<T>;
  constexpr int kGroups = kPlaneThreads<kGroup> / kGroup;
  const int lane = threadIdx.x % kGroup;
  const int64_t plane = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x / kGroup;
  A sums[V] = {};
  if (plane < f.outer) {
    const int64_t first = blockIdx.y * f.part;
    const int vectors = static_cast<int>(min(f.part, f.length - first) / V);
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
  if constexpr (kGroup > 32) {  // a block a plane
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

// On channels-last images a block takes `columns` vectors of neighbouring channels of an image, and
// as many of their rows at once as it has threads for. Where channels are few, a row is several
// pixels.
struct PoolRows {
  int64_t width;  // elements of a row
  int pixels;     // of a row
  int columns;
  int blocks;  // that lie side by side on an image
};

// The pixels of a row that make it whole 16-byte vectors, or come closest.
template <typename T>
int pixels_of_row(PoolLayout layout) {
  int pixels = 1;
  while (layout.inner * pixels * sizeof(T) % kVectorBytes != 0 &&
         layout.length % (2 * pixels) == 0 && layout.inner * pixels * 2 <= kMostOfRow) {
    pixels *= 2;
  }
  return pixels;
}

// Where a thread is.
struct RowThread {
  int rows, row;  // of the block
  int64_t image;
  int64_t element;  // the first of its vector in a row
  bool works;

  __device__ RowThread(const PoolRows& r, int vector)
      : rows(blockDim.x / r.columns),
        row(threadIdx.x / r.columns),
        image(blockIdx.x / r.blocks),
        element((blockIdx.x % r.blocks * int64_t{r.columns} + threadIdx.x % r.columns) * vector),
        works(row < rows && element < r.width) {}
};

template <int V, typename T>
__global__ void __launch_bounds__(kPoolThreads, kPoolBlocks)
    rows_kernel(PoolForward<T> f, PoolRows r) {
  using A = acc_t<T>;
  const RowThread at(r, V);
  A sums[V] = {};
  if (at.works) {
    const int64_t first = blockIdx.y * f.part;
    const int rows = static_cast<int>(min(f.part, f.length - first) / r.pixels);
    const T* x = f.x + (at.image * f.length + first) * f.inner + at.row * r.width + at.element;
    f.add(x, rows - at.row, at.rows, at.rows * r.width, sums);
  }
  __shared__ A shared[kPoolThreads * V];  // [rows, columns * V]
#pragma unroll
  for (int v = 0; v < V; ++v) {
    shared[threadIdx.x * V + v] = sums[v];
  }
  // Threads that share a lane take every so many-th row of it, then one takes what they have.
  const int lanes = r.columns * V;
  const int sharing = blockDim.x / lanes * lanes;
  A sum = 0;
  __syncthreads();
  if (threadIdx.x < sharing) {
#pragma unroll 4
    for (int i = threadIdx.x; i < at.rows * lanes; i += sharing) {
      sum += shared[i];
    }
  }
  __syncthreads();
  shared[threadIdx.x] = sum;
  __syncthreads();
  const int channels = lanes / r.pixels;
  const int64_t channel = blockIdx.x % r.blocks * int64_t{lanes} + threadIdx.x;
  if (threadIdx.x < channels && channel < f.inner) {
    sum = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < sharing; i += channels) {
      sum += shared[i];
    }
    f.store(at.image * f.inner + channel, sum);
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
        f_{x, out, nullptr, layout.outer, layout.length, layout.inner, layout.length} {
    // what is not much larger than the cache; on more it costs 4 %
    const int64_t elements = layout.outer * layout.length * layout.inner;
    f_.evict_first = elements * static_cast<int64_t>(sizeof(T)) <= 2 * device_.cache;
  }

  void operator()() { layout_.inner == 1 ? planes() : rows(); }

 private:
  const Tensor& like_;
  const PoolLayout layout_;
  const Device device_;
  PoolForward<T> f_;

  void planes() {
    dispatch_width<T>({f_.x}, {f_.length}, [&](auto v) {
      constexpr int V = decltype(v)::value;
      const int64_t vectors = f_.length / V;
      const auto launch = [&](auto group) {
        constexpr int kGroup = decltype(group)::value;
        constexpr int kThreads = kPlaneThreads<kGroup>;
        run(planes_kernel<V, kGroup, T>, ceil_div(f_.outer, kThreads / kGroup), kThreads,
            kThreads * kPoolLoads * V);
      };
      if (vectors <= 8 * kPoolLoads) {
        launch(Width<8>{});
      } else if (vectors <= 16 * kPoolLoads) {
        launch(Width<16>{});
      } else if (vectors < 64 * kPoolLoads) {
        launch(Width<32>{});
      } else if (vectors <= 128 * kPoolLoads) {
        launch(Width<128>{});
      } else {
        launch(Width<kPoolThreads>{});
      }
    });
  }

  void rows() {
    const int pixels = pixels_of_row<T>(layout_);
    dispatch_width<T>({f_.x}, {f_.inner * pixels}, [&](auto v) {
      constexpr int V = decltype(v)::value;
      const int64_t vectors = f_.inner * pixels / V;
      int columns = static_cast<int>(pixels > 1 ? vectors : std::min(vectors, kMostColumns));
      while (pixels == 1 && columns > 2 &&
             f_.outer * ceil_div(vectors, columns) < device_.multiprocessors) {
        columns = (columns + 1) / 2;
      }
      int threads = 64;
      while (threads < kPoolThreads &&
             (threads < columns * V || threads * kPoolLoads < f_.length / pixels * columns)) {
        threads *= 2;
      }
      const PoolRows r{f_.inner * pixels, pixels, columns,
                       static_cast<int>(ceil_div(vectors, columns))};
      run(rows_kernel<V, T>, f_.outer * r.blocks, threads, threads / columns * kPoolLoads * pixels,
          r);
    });
  }

  // Splits the length into multiples of `least` where the blocks would not fill the GPU.
  template <typename Kernel, typename... Args>
  void run(Kernel kernel, int64_t blocks, int threads, int64_t least, Args... args) {
    int64_t parts = 1;
    if (blocks < device_.multiprocessors && f_.length >= 2 * least) {
      const int64_t wanted =
          std::min(ceil_div(2 * device_.multiprocessors, blocks), f_.length / least);
      f_.part = ceil_div(f_.length, wanted * least) * least;
      parts = ceil_div(f_.length, f_.part);
    }
    const int64_t outputs = f_.outer * f_.inner;
    Tensor partial;
    if (parts > 1) {
      const auto type = std::is_same_v<acc_t<T>, double> ? ScalarType::Double : ScalarType::Float;
      partial = empty(like_, {parts, outputs}, type);
      f_.partial = partial.mutable_data_ptr<acc_t<T>>();
    }
    const cudaStream_t stream = current_stream(like_);
    launch_kernel(kernel, dim3(blocks, parts), threads, 0, stream, f_, args...);
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
