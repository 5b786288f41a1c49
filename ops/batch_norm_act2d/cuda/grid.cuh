// CUDA batch normalisation and activation: distribution of a tensor over blocks and threads. The
// figure is in kernels.cuh.
#pragma once

#include "batch_norm_act2d/op.h"
#include "core/cuda/common.cuh"

namespace ops::batch_norm_act2d {

using namespace ops::cuda;

constexpr int kUnroll = 4;
constexpr int kMaxColumns = 64;       // columns of a block
constexpr int kSectorVectors = 4;     // a 32-byte sector, if a vector has 8 bytes
constexpr int64_t kMostTerms = 4096;  // of a thread's sum, whose error grows with their number

// Distribution of a tensor over blocks. Vectors of V elements lie along the channels (NHWC), or
// along the pixels of one channel (NCHW).
template <int kLanes, bool kNhwc>
struct Grid {
  static constexpr int V = kLanes;
  static constexpr bool kAlongChannels = kNhwc;
  static constexpr int kChannels = kNhwc ? V : 1;  // channels of a vector
  static constexpr int kThreads = kNhwc ? 256 : 128;
  // Blocks per SM, at 64 registers per thread. Without a bound ptxas serialises the loads.
  static constexpr int kBlocks = 1024 / kThreads;
  static constexpr int kLeastRows =
      std::max(kUnroll, 16 / V);  // of a thread: 16 elements, at least

  int64_t rows;      // vectors of a column
  int64_t channels;  // C
  int64_t plane;     // vectors of a channel in an image (NHWC: 1)
  int columns;       // of a block
  int thread_rows;   // rows that the threads of a block load at once
  int64_t tiles;     // blocks along the columns
  int64_t chunk;     // rows of a block
  int64_t chunks;    // blocks along the rows

  // Aim at `blocks` blocks per SM; there are more if the tiles are more.
  Grid(Layout layout, int blocks)
      : rows(layout.count() / (V / kChannels)),
        channels(layout.channels),
        plane(layout.inner / (V / kChannels)) {
    const int64_t vectors = channels / kChannels;
    // Columns of a block: whole sectors. Add tiles while over a tenth of the threads idle and a
    // block keeps 8 columns.
    const auto width = [&] {
      return std::min(vectors, ceil_div(ceil_div(vectors, tiles), kSectorVectors) * kSectorVectors);
    };
    tiles = kNhwc ? ceil_div(vectors, kMaxColumns) : channels;
    while (kNhwc && vectors > 8 * tiles &&
           10 * (kThreads / width()) * vectors < 9 * kThreads * tiles) {
      ++tiles;
    }
    columns = kNhwc ? static_cast<int>(width()) : 1;
    tiles = ceil_div(vectors, columns);
    thread_rows = kThreads / columns;
    const int64_t wanted =
        ceil_div(blocks * Device::attribute(cudaDevAttrMultiProcessorCount), tiles);
    const int64_t most = std::max<int64_t>(1, rows / (thread_rows * kLeastRows));
    const int64_t least = ceil_div(rows * (V / kChannels), thread_rows * kMostTerms);
    chunk = ceil_div(rows, std::min(std::max(least, std::min(wanted, most)), int64_t{65535}));
    chunks = ceil_div(rows, chunk);
  }

  dim3 blocks() const { return dim3(tiles, chunks); }
};

// Vectors of an input, which no kernel writes: GCC does not take packs of __restrict__ pointers.
template <typename T, int V, int N>
struct Vectors {
  Vector<T, V> vector[N];

  __device__ Vectors(const T* x, const int64_t* offsets) {
    using Bits = typename BitsOf<V * sizeof(T)>::type;  // see load_vector
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Bits bits = __ldg(reinterpret_cast<const Bits*>(x + offsets[i]));
      vector[i] = reinterpret_cast<const Vector<T, V>&>(bits);
    }
  }
};

// The vectors of one thread.
template <typename G>
struct Slice {
  const G& g;
  int column, thread_row;
  int64_t channel, first, last;  // channel of element 0; rows of the chunk: [first, last)

  // reverse: blocks take the chunks from the last to the first.
  __device__ Slice(const G& g, bool reverse)
      : g(g), column(threadIdx.x % g.columns), thread_row(threadIdx.x / g.columns) {
    const int64_t index = reverse ? gridDim.y - 1 - blockIdx.y : blockIdx.y;
    channel = (static_cast<int64_t>(blockIdx.x) * g.columns + column) * G::kChannels;
    first = index * g.chunk;
    last = min(first + g.chunk, g.rows);
  }

  __device__ bool inside() const { return thread_row < g.thread_rows && channel < g.channels; }

  // Return the index of the first element of a vector.
  __device__ int64_t offset(int64_t row) const {
    const int64_t image = G::kAlongChannels ? row : row / g.plane;  // of a plane of 1: the pixel
    const int64_t pixel = row - image * g.plane;
    return ((image * g.channels + channel) * g.plane + pixel) * (G::V / G::kChannels);
  }

  // Call f(Width<n>{}, offsets, Vectors of each input) for groups of n vectors.
  template <typename F, typename... In>
  __device__ void for_each(const F& f, const In*... in) const {
    int64_t row = first + thread_row, at = offset(row);
    [[maybe_unused]] int64_t pixel = row % g.plane;  // NCHW
    const int64_t images = g.thread_rows / g.plane, pixels = g.thread_rows % g.plane;
    const int64_t image_size = g.channels * g.plane * (G::V / G::kChannels);
    const int64_t step = images * image_size + pixels * G::V;
    const auto next = [&] {
      const int64_t result = at;
      at += step;
      if constexpr (!G::kAlongChannels) {
        pixel += pixels;
        if (pixel >= g.plane) {
          pixel -= g.plane;
          at += image_size - g.plane * G::V;
        }
      }
      return result;
    };
    int64_t offsets[kUnroll];
    for (; row + (kUnroll - 1) * g.thread_rows < last; row += kUnroll * g.thread_rows) {
#pragma unroll
      for (int64_t& offset : offsets) {
        offset = next();
      }
      f(Width<kUnroll>{}, offsets, Vectors<In, G::V, kUnroll>(in, offsets)...);
    }
    for (; row < last; row += g.thread_rows) {
      offsets[0] = next();
      f(Width<1>{}, offsets, Vectors<In, G::V, 1>(in, offsets)...);
    }
  }
};

}  // namespace ops::batch_norm_act2d
