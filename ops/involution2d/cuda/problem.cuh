// Parameters of the tuned involution kernels (planes, direct).
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

}  // namespace ops::involution2d
