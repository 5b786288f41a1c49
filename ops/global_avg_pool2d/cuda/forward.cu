// CUDA global average pooling, forward. Deterministic: all sums have a fixed order.
//
//   x [outer][length][inner] in rows of one or several pixels, at least a vector where possible:
//   ┌──────────────┐
//   │ row 0        │  threads of an image: `columns` × `rows`, a vector each; every rows-th row
//   │ row 1        │  ─► shuffles (rows in a warp) ─► shared (rows in other warps; pixels of a row)
//   └──────────────┘
//
//   block:   64 to 256 threads: 1 to 32 images (NCHW: planes), of up to 32 adjacent vectors of
//            channels each; fewer to fill the GPU
//   shared:  the sums of each warp
//   thread:  V sums; 8 vector loads in flight
//
// Where the blocks would not fill the GPU, a two-stage reduction splits the length: stage 1 writes
// partial sums [splits, outer, inner], stage 2 adds the splits (core/cuda/reduce.cuh).
#include "core/cuda/reduce.cuh"
#include "global_avg_pool2d/op.h"

namespace ops::global_avg_pool2d {
namespace {

using namespace cuda;

constexpr int kThreads = 256, kFewThreads = 64;  // per block; few if that fills the GPU
constexpr int kLoadsInFlight = 8;                // vector loads in flight per thread
constexpr int kBlocksPerMultiprocessor = 4;      // more would leave no registers for the loads
constexpr int kMaxColumns = 32;
constexpr int kMaxRowElements = 64;  // of a row of several pixels

// Work of a block, as shifts: powers of two.
struct Tiling {
  int pixels;         // per row
  int columns, rows;  // threads of an image
  int images;         // per block
};

// Accumulate `count` vectors at a stride (elements) lane by lane. `streaming`: loads with the
// evict-first policy (ld.cs).
template <int V, typename T>
__device__ void add_vectors(const T* from, int count, int64_t stride, bool streaming,
                            acc_t<T> (&sums)[V]) {
  using Bits = typename BitsOf<V * sizeof(T)>::type;
  for (; count > 0; count -= kLoadsInFlight, from += kLoadsInFlight * stride) {
    Bits bits[kLoadsInFlight] = {};
#pragma unroll
    for (int k = 0; k < kLoadsInFlight; ++k) {
      if (k < count) {
        const Bits* vector = reinterpret_cast<const Bits*>(from + k * stride);
        bits[k] = streaming ? __ldcs(vector) : *vector;
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

// Write of the mean of an output.
template <typename T>
struct Mean {
  T* out;
  acc_t<T> length;

  __device__ void operator()(int64_t i, acc_t<T> sum) const {
    out[i] = static_cast<T>(sum / length);
  }
};

// Average over the length, in splits of split_length. `partial` [splits, outer, inner], if not
// null, receives the sums of the splits.
template <int V, typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    forward_kernel(const T* x, Mean<T> mean, acc_t<T>* partial, Layout layout, Tiling tile,
                   int row_blocks, int64_t split_length, bool streaming) {
  using A = acc_t<T>;
  const int columns = 1 << tile.columns, column = threadIdx.x & (columns - 1);
  const int row = threadIdx.x >> tile.columns & ((1 << tile.rows) - 1);
  const int image = threadIdx.x >> (tile.columns + tile.rows);  // of the block
  const int64_t first_image = static_cast<int64_t>(blockIdx.x / row_blocks) << tile.images;
  const int64_t first_element = (static_cast<int64_t>(blockIdx.x % row_blocks) << tile.columns) * V;
  const int64_t element = first_element + column * V, width = layout.inner << tile.pixels;
  A sums[V] = {};
  if (first_image + image < layout.outer && element < width) {
    const int64_t first = blockIdx.y * split_length;
    const int rows = static_cast<int>(min(split_length, layout.length - first) >> tile.pixels);
    x += ((first_image + image) * layout.length + first) * layout.inner + row * width + element;
    add_vectors(x, (rows - row + (1 << tile.rows) - 1) >> tile.rows, width << tile.rows, streaming,
                sums);
  }
  const bool planes = layout.inner == 1;  // one sum per thread
  if (planes) {
#pragma unroll
    for (int v = 1; v < V; ++v) {
      sums[0] += sums[v];
    }
  }
  __shared__ A shared[kThreads * V];  // [images, slices, elements]
  const int kept = planes ? 1 : V, elements = columns * kept;
  const int warp_rows = max(0, min(tile.rows, 5 - tile.columns));  // shift
  const int slices = 1 << (tile.rows - warp_rows), slice = (image << tile.rows | row) >> warp_rows;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (v < kept) {
      for (int lanes = columns; lanes < columns << warp_rows; lanes *= 2) {
        sums[v] += __shfl_xor_sync(~0u, sums[v], lanes);
      }
      if ((row & ((1 << warp_rows) - 1)) == 0) {
        shared[slice * elements + column * kept + v] = sums[v];
      }
    }
  }
  __syncthreads();
  const int pixels = planes ? columns : 1 << tile.pixels;
  const int channels = static_cast<int>(min(layout.inner - first_element, int64_t{elements}));
  for (int i = threadIdx.x; i < channels << tile.images; i += blockDim.x) {
    const int channel = i % channels, of = i / channels;
    const int64_t output = (first_image + of) * layout.inner + first_element + channel;
    const A* from = shared + of * slices * elements + channel;
    A sum = 0;
    for (int k = 0; k < slices; ++k, from += elements) {
      for (int pixel = 0; pixel < pixels; ++pixel) {
        sum += from[pixel * channels];
      }
    }
    if (first_image + of >= layout.outer) {
      return;
    }
    if (partial) {
      partial[blockIdx.y * layout.outer * layout.inner + output] = sum;
    } else {
      mean(output, sum);
    }
  }
}

// Return the pixels per row (as a shift) that make it whole 16-byte vectors, or come closest.
template <typename T>
int pixels_of_row(const Layout& layout) {
  int pixels = 0;
  while ((layout.inner << pixels) * sizeof(T) % kVectorBytes != 0 &&
         layout.length % (2 << pixels) == 0 && layout.inner << (pixels + 1) <= kMaxRowElements) {
    ++pixels;
  }
  return pixels;
}

// Return the tiling of rows of `vectors` vectors.
Tiling tiling(const Layout& layout, int pixels, int64_t vectors, int multiprocessors) {
  const int most = pixels > 0 ? kMaxRowElements : kMaxColumns;
  int columns = 0, rows = 0, images = 0;
  while (1 << columns < std::min<int64_t>(vectors, most)) {
    ++columns;
  }
  while (pixels == 0 && columns > 1 &&
         layout.outer * ceil_div(vectors, 1 << columns) < multiprocessors) {
    --columns;
  }
  while (columns + rows < 3 ||  // adjacent threads read 128 bytes
         (1 << (columns + rows) < kThreads &&
          int64_t{kLoadsInFlight} << (rows + pixels) < layout.length)) {
    ++rows;
  }
  while (1 << (columns + rows + images) < kFewThreads ||
         (1 << (columns + rows + images) < kThreads &&
          (layout.outer >> (images + 1)) * ceil_div(vectors, 1 << columns) >= multiprocessors)) {
    ++images;
  }
  return {pixels, columns, rows, images};
}

struct Forward {
  template <typename T>
  static void run(const Tensor& like, const Layout& layout, const T* x, T* out) {
    const DeviceGuard guard(like.get_device_index());
    const Device device;
    // Evict-first loads keep what the L2 cache holds of a larger input: 1.1 to 1.3 times as fast
    // after the kernel that writes it. A cached input of half the cache takes twice as long.
    const int64_t outputs = layout.outer * layout.inner,
                  bytes = outputs * layout.length * sizeof(T);
    const bool streaming = bytes > device.cache / 2 && bytes <= 2 * device.cache;
    const int pixels = pixels_of_row<T>(layout);
    dispatch_width<T>({x}, {layout.inner << pixels}, [&](auto v) {
      const int64_t vectors = (layout.inner << pixels) / v.value;
      const Tiling tile = tiling(layout, pixels, vectors, device.multiprocessors);
      const int row_blocks = static_cast<int>(ceil_div(vectors, 1 << tile.columns));
      const int64_t blocks = ceil_div(layout.outer, 1 << tile.images) * row_blocks;
      const int64_t unit = int64_t{kLoadsInFlight} << (tile.rows + pixels);  // of a split
      int64_t splits = 1, split_length = layout.length;
      if (blocks < device.multiprocessors && layout.length >= 2 * unit) {
        splits = std::min(ceil_div(2 * device.multiprocessors, blocks), layout.length / unit);
        split_length = ceil_div(layout.length, splits * unit) * unit;
        splits = ceil_div(layout.length, split_length);
      }
      Tensor partial;
      if (splits > 1) {
        partial = empty(like, {splits, outputs}, accumulator_dtype(like.scalar_type()));
      }
      acc_t<T>* sums = splits > 1 ? partial.mutable_data_ptr<acc_t<T>>() : nullptr;
      const Mean<T> mean{out, acc_t<T>(layout.length)};
      const cudaStream_t stream = current_stream(like);
      launch_kernel(forward_kernel<v.value, T>, dim3(blocks, splits),
                    1 << (tile.columns + tile.rows + tile.images), 0, stream, x, mean, sums, layout,
                    tile, row_blocks, split_length, streaming);
      if (splits > 1) {
        second_stage(sums, splits, outputs, mean, stream);
      }
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("global_avg_pool2d", TORCH_BOX(&forward<Forward>));
}

}  // namespace ops::global_avg_pool2d
