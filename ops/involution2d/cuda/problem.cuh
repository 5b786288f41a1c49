// Parameters and conversions of the tuned involution kernels (planes, direct).
#pragma once

#include "core/cuda/common.cuh"
#include "involution2d/op.h"

namespace ops::involution2d {

using namespace cuda;

constexpr int kThreads = 128;  // maximum of a block

// Size and strides (elements) of an image tensor. Offsets within one image fit 32 bits.
struct Image {
  int64_t stride_n;
  int stride_c, stride_h, stride_w;
  int h, w;
  int vector;  // elements of the widest aligned load, along w (NCHW) or c (NHWC)
};

struct Problem {
  int groups, channels;  // channels per group
  int padding_h, padding_w;
  Image source, weight, out;  // weight gradient: `weight` is the result, `out` grad_output
};

// Convert elements to float. A pair of bfloat16 in one register takes one instruction per element.
template <typename T, int V>
__device__ void to_floats(const Vector<T, V>& from, float* to) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if constexpr (std::is_same_v<T, BFloat16> && V > 1) {
      const unsigned pair = reinterpret_cast<const unsigned*>(&from)[i / 2];
      to[i] = __uint_as_float(i % 2 ? pair & 0xffff0000 : pair << 16);
    } else {
      to[i] = static_cast<float>(from.lane[i]);
    }
  }
}

}  // namespace ops::involution2d
