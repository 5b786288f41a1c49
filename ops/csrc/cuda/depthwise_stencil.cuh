// What the tiled depthwise kernels share: which tap joins which input to which output, and tiles of
// images staged in shared memory.
#pragma once

#include <cuda_pipeline.h>

#include "common.cuh"

namespace ops::cuda {

constexpr int kMaxThreads = 256;
constexpr size_t kMaxSharedBytes = 64 * 1024;

constexpr int round_up(int a, int b) { return (a + b - 1) / b * b; }

// One axis of a convolution with K taps, stride S and dilation D, as a thread sees it that computes
// several neighbouring outputs from a window of inputs.
template <int K, int S, int D>
struct Direct {
  static constexpr int kTaps = K;
  static constexpr int kSamePadding = (K - 1) * D / 2;

  // Inputs under `outputs` neighbouring outputs, and from one such window to the next.
  static constexpr int inputs(int outputs) { return (outputs - 1) * S + (K - 1) * D + 1; }
  static constexpr int step(int outputs) { return outputs * S; }

  // The tap that joins output o to input i of the window, or -1.
  static constexpr int tap(int o, int i) {
    const int distance = i - o * S;
    return distance >= 0 && distance % D == 0 && distance / D < K ? distance / D : -1;
  }

  // The image coordinate of the first window's first input.
  static constexpr int start(int padding) { return -padding; }
};

// The same for the gradient with respect to the input of a convolution with stride 2: outputs of
// this axis are the convolution's inputs. (With stride 1 that is a Direct axis with flipped taps.)
template <int K, int kPaddingParity>
struct Transposed {
  static_assert(K % 2 == 1, "the window's first input must not depend on the output's parity");
  static constexpr int kTaps = K;
  static constexpr int kSamePadding = (K - 1) / 2;

  static constexpr int inputs(int outputs) {
    return (outputs - 1 + kPaddingParity) / 2 + (K - 1) / 2 + 1;
  }
  static constexpr int step(int outputs) { return outputs / 2; }
  static constexpr int tap(int o, int i) {
    const int t = o + kPaddingParity + (K - 1) - 2 * i;
    return t >= 0 && t < K ? t : -1;
  }
  static constexpr int start(int padding) { return padding / 2 - (K - 1) / 2; }
};

// Copies the windows of `count` images, whose top left corner is (first_h, first_w), to shared
// memory, zero outside the image; offset(p) is where image p begins. V divides first_w and width,
// so that no vector straddles the image's edge.
template <int V, typename T, typename Offset>
__device__ void stage_rows(T* shared, const T* __restrict__ image, const Offset& offset, int count,
                           int height, int width, int first_h, int first_w, int window_h,
                           int window_w) {
  const int per_row = window_w / V;
  int p = threadIdx.x / per_row / window_h;
  int r = threadIdx.x / per_row % window_h;
  int i = threadIdx.x % per_row;
  const int step_r = blockDim.x / per_row;
  const int step_i = blockDim.x % per_row;
  while (p < count) {
    const int h = first_h + r;
    const int w = first_w + i * V;
    const bool inside = h >= 0 && h < height && w >= 0 && w < width;
    T* to = shared + (p * window_h + r) * window_w + i * V;
    const T* from = image + (inside ? offset(p) + static_cast<int64_t>(h) * width + w : 0);
    if constexpr (V * sizeof(T) >= 4) {
      __pipeline_memcpy_async(to, from, V * sizeof(T), inside ? 0 : V * sizeof(T));
    } else {
      *to = inside ? *from : T(0);
    }
    i += step_i;
    r += step_r;
    if (i >= per_row) {
      i -= per_row;
      ++r;
    }
    while (r >= window_h) {
      r -= window_h;
      ++p;
    }
  }
}

template <typename T, typename Offset>
__device__ void stage(int vector, T* shared, const T* image, const Offset& offset, int count,
                      int height, int width, int first_h, int first_w, int window_h, int window_w) {
  const auto rows = [&](auto v) {
    stage_rows<decltype(v)::value>(shared, image, offset, count, height, width, first_h, first_w,
                                   window_h, window_w);
  };
  switch (vector) {
    case 4: return rows(Width<4>{});
    case 2: return rows(Width<2>{});
    default: return rows(Width<1>{});
  }
}

}  // namespace ops::cuda
