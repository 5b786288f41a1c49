// Stages of the toeplitz kernels: tiles of rows [channel][T] of 16-bit elements in shared memory,
// from either layout. Words: 32 bits, two elements that are adjacent along T.
#pragma once

#include "core/cuda/copy.cuh"
#include "core/cuda/mma.cuh"
#include "depthwise_conv1d/cuda/split.cuh"

namespace ops::depthwise_conv1d {

constexpr int kStageThreads = 256, kWarps = kStageThreads / 32;
constexpr int kAligned = 8;  // elements of a vector

// Return whether [N, T, C] can be read in vectors of channels, dilation 1. `others`: tensors of the
// strides of the output.
template <typename P>
bool has_vectors(const P& p, std::initializer_list<const void*> others) {
  constexpr int V = kVectorBytes / sizeof(*p.in.data);
  return p.has_pixels() && p.dilation == 1 && p.c % V == 0 && p.in.n_stride % V == 0 &&
         p.in.t_stride % V == 0 && are_aligned({p.in.data}, kVectorBytes) &&
         are_aligned(others, kVectorBytes);
}

// A block has kRows rows, each warp kRows / kWarps of them, and kTile positions along T.
template <bool kChannelsLast>
struct StageShape {
  static constexpr int kBuffers = kChannelsLast ? 1 : 2;
  static constexpr int kRows = kChannelsLast ? 32 : kWarps, kRowsPerWarp = kRows / kWarps;
  static constexpr int kTile = kChannelsLast ? 256 : 512;

  // Return the words from row to row, for rows of `elements` elements: vectors are aligned in
  // planes; without bank conflicts between 8 words along T × rows 8 apart in channels-last stages.
  static constexpr int pitch(int elements) {
    return kChannelsLast ? round_up(elements / 2, 4) + 1 : round_up(elements / 2, 4);
  }
};

// Start to copy `elements` (a multiple of a vector) elements from row[start] on, at an aligned
// address, to shared memory; zeros outside the row. Vector i goes to place(i). Call it from a warp.
template <typename T, typename F>
__device__ void stage_row(T* to, const T* row, int start, int elements, int size, const F& place) {
  constexpr int V = kVector<T>;
  for (int i = threadIdx.x % 32; i < elements / V; i += 32) {
    const int at = start + i * V;
    T* const vector = to + place(i) * V;
    if (at >= 0 && at + V <= size) {
      copy_async<kVectorBytes>(shared_address(vector), row + at);
    } else {
      for (int j = 0; j < V; ++j) {
        vector[j] = is_inside(at + j, size) ? row[at + j] : T(0);
      }
    }
  }
}

template <typename T>
__device__ void stage_row(unsigned* to, const T* row, int start, int elements, int size) {
  stage_row(reinterpret_cast<T*>(to), row, start, elements, size, [](int i) { return i; });
}

// Return the 8 channels of lane % 4 at one position, or zeros.
template <typename T>
__device__ uint4 load_channels(const T* first, int64_t stride, int at, int size) {
  return is_inside(at, size) ? *reinterpret_cast<const uint4*>(first + at * stride) : uint4{};
}

__device__ inline int octet() {  // of channels
  return threadIdx.x % 4;
}
__device__ inline int pair() {  // of positions
  return threadIdx.x / 4;
}
constexpr int kPairs = kStageThreads / 4;

// Transpose `elements` (even) positions of 32 channels from `start` on to rows in shared memory.
// first: the thread's octet of channels at position 0; size: 0 if it does not exist.
template <typename T>
__device__ void stage_channels(unsigned* to, int pitch, const T* first, int64_t stride, int start,
                               int elements, int size) {
  constexpr int kAtOnce = 3;  // pairs whose loads are in flight
  to += octet() * 8 * pitch;
#pragma unroll 1
  for (int first_pair = pair(); first_pair < elements / 2; first_pair += kAtOnce * kPairs) {
    uint4 even[kAtOnce], odd[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int i = first_pair + n * kPairs, exists = i < elements / 2 ? size : 0;
      even[n] = load_channels(first, stride, start + 2 * i, exists);
      odd[n] = load_channels(first, stride, start + 2 * i + 1, exists);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int i = first_pair + n * kPairs;
      const unsigned a[4] = {even[n].x, even[n].y, even[n].z, even[n].w};
      const unsigned b[4] = {odd[n].x, odd[n].y, odd[n].z, odd[n].w};
#pragma unroll
      for (int j = 0; j < 4 && i < elements / 2; ++j) {
        to[2 * j * pitch + i] = __byte_perm(a[j], b[j], 0x5410);
        to[(2 * j + 1) * pitch + i] = __byte_perm(a[j], b[j], 0x7632);
      }
    }
  }
}

// The inverse: store 32 rows of outputs from position `start` on.
template <typename T>
__device__ void store_channels(const unsigned* from, int pitch, T* first, int64_t stride, int start,
                               int elements, int size) {
  from += octet() * 8 * pitch;
  for (int i = pair(); i < elements / 2; i += kPairs) {
    unsigned a[4], b[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const unsigned even = from[2 * j * pitch + i], odd = from[(2 * j + 1) * pitch + i];
      a[j] = __byte_perm(even, odd, 0x5410);
      b[j] = __byte_perm(even, odd, 0x7632);
    }
    const int at = start + 2 * i;
    if (is_inside(at, size)) {
      *reinterpret_cast<uint4*>(first + at * stride) = uint4{a[0], a[1], a[2], a[3]};
    }
    if (is_inside(at + 1, size)) {
      *reinterpret_cast<uint4*>(first + (at + 1) * stride) = uint4{b[0], b[1], b[2], b[3]};
    }
  }
}

// Register tile of a row in float32: 8 adjacent outputs per thread, 256 per warp.
constexpr int kOutputs = 8, kTileOutputs = 32 * kOutputs;

// Place of vector i of a row. Threads read every second vector: half of them swap neighbours, so
// that these have no bank conflicts.
__device__ inline int swizzled(int i) {
  return i ^ (i >> 3 & 1);
}

// Convolve the window of vectors read(0), read(1), … with a filter of groups of 4 taps.
template <typename F>
__device__ __forceinline__ void convolve_window(const float4* filter, int groups, float bias,
                                                float (&sum)[kOutputs], const F& read) {
  float window[kOutputs + kGroup];
  const auto load = [&](int i, float* to) {
    const float4 four = read(i);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  };
  load(0, window);
  load(1, window + kGroup);
#pragma unroll
  for (int r = 0; r < kOutputs; ++r) {
    sum[r] = bias;
  }
#pragma unroll 3
  for (int g = 0; g < groups; ++g) {
    const float4 four = filter[g];
    const float w[kGroup] = {four.x, four.y, four.z, four.w};
    load(g + 2, window + kOutputs);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
#pragma unroll
      for (int r = 0; r < kOutputs; ++r) {
        sum[r] += w[j] * window[r + j];
      }
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      window[i] = window[i + kGroup];
    }
  }
}

}  // namespace ops::depthwise_conv1d
