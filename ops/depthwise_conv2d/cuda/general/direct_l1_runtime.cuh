// Index types and block shapes of the direct_l1_runtime kernels.
#pragma once

#include "core/cuda/divide.cuh"
#include "depthwise_conv2d/cuda/families.cuh"

namespace ops::cuda {

constexpr int kRuntimeThreads = 256, kWarp = 32;
constexpr int kRuntimeLanes = 32;  // threads along NHWC channels, at most

// Indices are int where they fit (fits_32_bits), else int64_t. Height and width of a padded image
// are less than kLargestSize.
template <typename Index>
constexpr int64_t kLargestSize = int64_t{1} << (sizeof(Index) == sizeof(int) ? 28 : 44);
template <typename Index>
using DivideBy = std::conditional_t<sizeof(Index) == sizeof(int), FastDivide, Divide>;
constexpr int64_t kMostSums = int64_t{1} << 30;  // C (taps + 1), exclusive

// Shape of a block: lanes × groups threads; consecutive threads access consecutive addresses.
struct RuntimeThreads {
  bool channels_last;
  int lanes;   // threads along channels, V channels each
  int groups;  // threads along outputs

  // At most max_lanes lanes. NCHW: all threads of a warp have the same channel.
  RuntimeThreads(bool last, int64_t vectors, int64_t outputs, int64_t max_lanes)
      : channels_last(last) {
    if (channels_last) {
      lanes = ceil_div(vectors, ceil_div(vectors, std::min<int64_t>(kRuntimeLanes, max_lanes)));
      groups = kRuntimeThreads / lanes;
    } else {
      groups = std::min<int64_t>(kRuntimeThreads, ceil_div(outputs, kWarp) * kWarp);
      lanes = std::min<int64_t>({kRuntimeThreads / groups, vectors, max_lanes});
    }
  }
  dim3 block() const { return channels_last ? dim3(lanes, groups) : dim3(groups, lanes); }
  __device__ int lane() const { return channels_last ? threadIdx.x : threadIdx.y; }
  __device__ int group() const { return channels_last ? threadIdx.y : threadIdx.x; }
};

// Return whether offsets within an image, a channel and the filters fit in 32 bits.
inline bool fits_32_bits(const DepthwiseGeometry& g) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  const int64_t rows = g.h + 2 * g.padding_h, cols = g.w + 2 * g.padding_w;
  const int64_t channels = g.channels_last ? g.c : 1;
  return rows < kLargestSize<int> && cols < kLargestSize<int> && rows * cols < kLimit / channels &&
         g.n < kLimit && g.n * rows * cols < kLimit &&
         g.c * (g.kernel_h * g.kernel_w + 1) < kMostSums;
}

}  // namespace ops::cuda
