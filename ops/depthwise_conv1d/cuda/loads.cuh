// Loads and stores of the FMA kernels, and the division of their work.
#pragma once

#include "core/cuda/divide.cuh"
#include "depthwise_conv1d/cuda/problem.cuh"

namespace ops::depthwise_conv1d {

constexpr int kGroup = 4;  // elements of a vector along T or C, taps of a group

// Return the address modulo `elements` elements.
template <typename T>
__device__ int misalignment(const T* data, int elements) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(data) / sizeof(T) % elements);
}

// Load kCount elements from row[at] on. kInside: all are inside the row and aligned to a group;
// otherwise those outside are zeros.
template <bool kInside, int kCount, typename T>
__device__ __forceinline__ void load(const T* row, int at, int size, float* to) {
#pragma unroll
  for (int i = 0; i < kCount; i += kGroup) {
    if constexpr (kInside) {
      const auto lanes = load_vector<kGroup>(row + at + i);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        to[i + j] = static_cast<float>(lanes.lane[j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        to[i + j] = is_inside(at + i + j, size) ? static_cast<float>(row[at + i + j]) : 0.0f;
      }
    }
  }
}

// Store those of kCount elements that are inside the row, from row[at] on, at an aligned address.
template <int kCount, typename T>
__device__ __forceinline__ void store(T* row, int at, int size, const float (&from)[kCount]) {
  if (at >= 0 && at + kCount <= size) {
    store_vector(row + at, from);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (is_inside(at + i, size)) {
        row[at + i] = static_cast<T>(from[i]);
      }
    }
  }
}

// Elements of V adjacent channels at positions first, first + step, …; zeros outside the tensor.
template <typename T, int V>
class ChannelStream {
  using Bits = typename BitsOf<V * sizeof(T)>::type;

 public:
  // channel: at position 0.
  __device__ ChannelStream(const T* channel, int64_t stride, int first, int step, int size)
      : from_(channel + first * stride),
        stride_(step * stride),
        position_(first),
        step_(step),
        size_(size) {}

  // Start to load the next kCount positions.
  template <int kCount>
  __device__ __forceinline__ void load(Bits (&to)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      to[i] = Bits{};
      if (is_inside(position_, size_)) {
        to[i] = *reinterpret_cast<const Bits*>(from_);
      }
      from_ += stride_, position_ += step_;
    }
  }

 private:
  const T* from_;
  const int64_t stride_;
  int position_;
  const int step_, size_;
};

// Convert kCount loaded vectors to x[first], x[first + 1], …
template <typename T, int V, typename Bits, int kCount, int kAll>
__device__ __forceinline__ void widen_to(float (&x)[kAll][V], int first,
                                         const Bits (&bits)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const auto& lanes = reinterpret_cast<const Vector<T, V>&>(bits[i]);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      x[first + i][v] = static_cast<float>(lanes.lane[v]);
    }
  }
}

// Slide a window by kGroup positions.
template <int V, int kAll>
__device__ __forceinline__ void slide(float (&x)[kAll][V]) {
#pragma unroll
  for (int i = 0; i + kGroup < kAll; ++i) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      x[i][v] = x[i + kGroup][v];
    }
  }
}

// Return the number of threads along the channels: a power of two, at most 32.
inline int lanes_of(int64_t channels, int width) {
  int lanes = 32;
  while (lanes / 2 * width >= channels) {
    lanes /= 2;
  }
  return lanes;
}

// Units of work along T: `length` positions of one image and phase (position modulo the dilation).
struct Units {
  int count, per_split, per_phase, length;
};

// Divide `positions` of each phase into units for blocks of `rows` units at a time, and the units
// into splits; `blocks`: number of blocks of a split. nullopt: too many.
inline std::optional<Units> split_units(int64_t phases, int64_t positions, int64_t rows,
                                        int64_t blocks) {
  constexpr int64_t kBlocksPerMultiprocessor = 8, kMinLength = 32, kMaxLength = 256;
  const int64_t wanted = std::max<int64_t>(
      1, Device::attribute(cudaDevAttrMultiProcessorCount) * kBlocksPerMultiprocessor / blocks);
  const int64_t even = ceil_div(phases * positions, wanted * rows * kGroup) * kGroup;
  const int64_t length = std::clamp(even, kMinLength, kMaxLength);
  const int64_t per_phase = ceil_div(positions, length), count = phases * per_phase;
  const int64_t per_split = ceil_div(ceil_div(count, wanted), rows) * rows;
  if (count >= int64_t{1} << 29 || ceil_div(count, per_split) > 65535) {
    return std::nullopt;
  }
  return Units{static_cast<int>(count), static_cast<int>(per_split), static_cast<int>(per_phase),
               static_cast<int>(length)};
}

// Return f(taps) for filters of 2 to 4 taps, stride 1, else false.
template <typename P, typename F>
bool dispatch_short(const P& p, const F& f) {
  switch (p.is_tileable() ? p.taps : 0) {
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    default: return false;
  }
}

// Tiles of adjacent positions along T, the rows of a channel one after the other. Stores are
// aligned, so that the first tile of a row may begin before `first`.
struct Tiles {
  int first, per_row, count, per_split;
  FastDivide by_row;

  __device__ int image_of(int tile) const { return by_row(tile); }
};

// Divide the rows of a channel into tiles, and these into splits. `uniform`: rows are equally
// aligned, otherwise a split has one row. `blocks`, `threads`: of a split.
inline Tiles split_tiles(int64_t images, int64_t first, int64_t positions, int64_t length,
                         bool uniform, int64_t blocks, int64_t threads) {
  constexpr int64_t kBlocksPerMultiprocessor = 32, kMinTiles = 4;  // per thread
  const int64_t per_row = ceil_div(positions + length - 1, length), count = images * per_row;
  const int64_t wanted =
      Device::attribute(cudaDevAttrMultiProcessorCount) * kBlocksPerMultiprocessor / blocks;
  const int64_t splits = std::clamp<int64_t>(wanted, 1, ceil_div(count, threads * kMinTiles));
  return {static_cast<int>(first), static_cast<int>(per_row), static_cast<int>(count),
          static_cast<int>(uniform ? ceil_div(count, splits) : per_row), FastDivide(per_row)};
}

}  // namespace ops::depthwise_conv1d
