// Shared by the kernel families: their problems and launch functions, for dispatch.cu; tuned
// geometries as compile-time axes; the two-stage reduction of weight gradients. Launch functions of
// type bool return false if their family has no kernel for the problem, or only a slow one.
#pragma once

#include "core/axis.h"
#include "core/choose.h"
#include "core/cuda/reduce.cuh"
#include "depthwise_conv2d/op.h"

namespace ops::depthwise_conv2d {

using namespace ops::cuda;

template <typename T>
struct Image {
  T* data;
  int64_t h, w;
};

// Forward pass or input gradient. The input gradient is the convolution with the flipped filter
// (`flip`) if the stride is 1, else a transposed convolution (`transposed`).
template <typename T>
struct Convolution {
  const Geometry& g;
  Image<const T> in;
  Image<T> out;
  const T* weight;
  const T* bias;
  cudaStream_t stream;
  bool dry_run = false;  // select a family without a launch
  bool transposed = false, flip = false;
  int64_t padding_h = g.padding_h, padding_w = g.padding_w;

  template <typename Kernel, typename... Args>
  void launch(Kernel kernel, dim3 grid, dim3 block, size_t shared, const Args&... args) const {
    if (!dry_run) {
      launch_kernel(kernel, grid, block, shared, stream, args...);
    }
  }
};

template <typename T>
struct WeightGradient {
  const Geometry& g;
  const Tensor& like;  // device and dtype
  const T* x;
  const T* grad;
  T* grad_weight;  // nullptr: not requested
  T* grad_bias;    // nullptr: not requested
  cudaStream_t stream;
  bool dry_run = false;
};

// NCHW: stages loaded by bulk copies, FMAs in float32.
template <typename T>
bool nchw_fma(const Convolution<T>& c);
template <typename T>
bool nchw_fma_weight_gradient(const WeightGradient<T>& c);

// NCHW, 16 bits: the same stages, implicit GEMM on matrix units.
template <typename T>
bool nchw_mma(const Convolution<T>& c);
template <typename T>
bool nchw_mma_weight_gradient(const WeightGradient<T>& c);

// NHWC, 16 bits: implicit GEMM on sparse matrix units.
template <typename T>
bool nhwc_mma(const Convolution<T>& c);

// NHWC: a ring buffer of input rows, pending output rows in registers.
template <typename T>
bool nhwc_ring(const Convolution<T>& c);
template <typename T>
bool nhwc_ring_weight_gradient(const WeightGradient<T>& c);
// All gradients in one pass.
template <typename T>
bool nhwc_ring_all_gradients(const Convolution<T>& input_gradient,
                             const WeightGradient<T>& weight_gradient);

// NCHW or NHWC: register tiles, inputs from the L1 cache.
template <typename T>
bool direct_l1(const Convolution<T>& c);
template <typename T>
bool direct_l1_weight_gradient(const WeightGradient<T>& c);

// The same with run-time filter size, stride and dilation; also float64.
template <typename T>
void direct_l1_runtime(const Convolution<T>& c);
template <typename T>
void direct_l1_runtime_weight_gradient(const WeightGradient<T>& c);

// NCHW or NHWC, stride 1, dilation 1: input and filter in shared memory.
template <typename T>
bool large_filter(const Convolution<T>& c);
template <typename T>
bool large_filter_weight_gradient(const WeightGradient<T>& c);

// Return the load: the input and output elements per SM.
inline int64_t load_of(const Geometry& g) {
  const int64_t elements = g.n * g.c * (g.h * g.w + g.out_h * g.out_w);
  return elements / Device::attribute(cudaDevAttrMultiProcessorCount);
}

// Return f(ForwardAxis<K, S, D>{}) for the tuned geometries, else false.
template <typename F>
bool dispatch_forward_axis(const Geometry& g, const F& f) {
  if (g.kernel_h != g.kernel_w || g.stride_h != g.stride_w || g.dilation_h != g.dilation_w) {
    return false;
  }
  const auto is = [&](int64_t kernel, int64_t stride, int64_t dilation) {
    return g.kernel_h == kernel && g.stride_h == stride && g.dilation_h == dilation;
  };
  if (is(3, 1, 1)) return f(ForwardAxis<3, 1, 1>{});
  if (is(5, 1, 1)) return f(ForwardAxis<5, 1, 1>{});
  if (is(7, 1, 1)) return f(ForwardAxis<7, 1, 1>{});
  if (is(3, 1, 2)) return f(ForwardAxis<3, 1, 2>{});
  if (is(3, 2, 1)) return f(ForwardAxis<3, 2, 1>{});
  if (is(5, 2, 1)) return f(ForwardAxis<5, 2, 1>{});
  if (is(7, 2, 1)) return f(ForwardAxis<7, 2, 1>{});
  return false;
}

// Return dispatch_forward_axis(g, f), or f(TransposedAxis<K, padding parity>{}) for the tuned
// transposed convolutions, else false.
template <typename F>
bool dispatch_axis(const Geometry& g, bool transposed, const F& f) {
  if (!transposed) {
    return dispatch_forward_axis(g, f);
  }
  if (g.kernel_h != g.kernel_w || g.stride_h != 2 || g.stride_w != 2 || g.dilation_h != 1 ||
      g.dilation_w != 1 || g.padding_h % 2 != g.padding_w % 2) {
    return false;
  }
  const bool odd = g.padding_h % 2;
  switch (g.kernel_h) {
    case 3: return odd ? f(TransposedAxis<3, 1>{}) : f(TransposedAxis<3, 0>{});
    case 5: return odd ? f(TransposedAxis<5, 1>{}) : f(TransposedAxis<5, 0>{});
    case 7: return odd ? f(TransposedAxis<7, 1>{}) : f(TransposedAxis<7, 0>{});
    default: return false;
  }
}

// Call multiply(j, tap, i) for each output j of a row and each of its taps; i is the window column.
template <typename Axis, int kCols, typename F>
__device__ __forceinline__ void for_each_column_tap(const F& multiply) {
#pragma unroll
  for (int i = 0; i < Axis::inputs(kCols); ++i) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      if (const int tap = Axis::tap(j, i); tap >= 0) {
        multiply(j, tap, i);
      }
    }
  }
}

// Call multiply(q, j, tap, i) for each output (q, j) of a tile and each of its taps that reads
// window row r, at column i.
template <typename Axis, int kRows, int kCols, typename F>
__device__ __forceinline__ void for_each_tap(int r, const F& multiply) {
#pragma unroll
  for (int q = 0; q < kRows; ++q) {
    const int a = Axis::tap(q, r);
    if (a >= 0) {
      for_each_column_tap<Axis, kCols>(
          [&](int j, int b, int i) { multiply(q, j, a * Axis::kTaps + b, i); });
    }
  }
}

// Return one output, tap by tap. Its window begins at row y, column x of the in_h × in_w map, whose
// rows are `pitch` and columns `stride` elements apart.
template <int kWidth, typename T>
__device__ __noinline__ float exact_output(const T* map, int64_t pitch, int stride, int in_h,
                                           int in_w, int y, int x, const T* filter, bool flip) {
  float sum = 0;
  for (int i = 0; i < kWidth * kWidth; ++i) {
    const int row = y + i / kWidth, col = x + i % kWidth;
    if (row >= 0 && row < in_h && col >= 0 && col < in_w) {
      sum += static_cast<float>(filter[flip ? kWidth * kWidth - 1 - i : i]) *
             static_cast<float>(map[row * pitch + col * static_cast<int64_t>(stride)]);
    }
  }
  return sum;
}

// Weight and bias gradients as a two-stage reduction over all images (core/cuda/reduce.cuh). A
// single split writes the gradients in stage 1. Padding is multiplied as zeros: if an input or
// gradient is non-finite, any tap of its channel may be NaN.

// Destination of both stages: per channel one sum per tap, then the bias; in stage 1, per split.
template <typename T>
struct WeightReduction {
  int channels, taps;
  T* grad_weight;
  T* grad_bias;          // nullptr: not requested
  acc_t<T>* split_sums;  // nullptr: a single split, which writes the gradients

  __host__ __device__ int sums() const { return channels * (taps + 1); }  // per split

  // Write sum i, counted from tap 0 of `channel`, to its gradient if that is requested.
  __device__ void write(int channel, int i, acc_t<T> sum) const {
    channel += i / (taps + 1);
    const int tap = i % (taps + 1);
    T* to = tap < taps  ? grad_weight + channel * taps + tap
            : grad_bias ? grad_bias + channel
                        : nullptr;
    if (to) {
      *to = static_cast<T>(sum);
    }
  }
  // Stage 1: write sum i of `split`, or the gradient if there is one split.
  __device__ void put(int split, int channel, int i, acc_t<T> sum) const {
    if (split_sums) {
      split_sums[static_cast<int64_t>(split) * sums() + channel * (taps + 1) + i] = sum;
    } else {
      write(channel, i, sum);
    }
  }
  __device__ void operator()(int i, acc_t<T> sum) const { write(0, i, sum); }  // stage 2
};

// Call stage1(reduction), which writes `splits` splits; with more than one, run stage 2.
template <typename T, typename F>
void reduce_weights(const WeightGradient<T>& c, int64_t splits, const F& stage1) {
  if (c.dry_run) {
    return;
  }
  const Geometry& g = c.g;
  const int64_t taps = c.grad_weight ? g.kernel_h * g.kernel_w : 0;  // 0: bias gradient only
  WeightReduction<T> reduction{static_cast<int>(g.c), static_cast<int>(taps), c.grad_weight,
                               c.grad_bias, nullptr};
  if (splits == 1) {
    stage1(reduction);
    return;
  }
  const ScalarType dtype = accumulator_dtype(c.like.scalar_type());
  Tensor split_sums = empty(c.like, {splits, g.c, taps + 1}, dtype);
  reduction.split_sums = split_sums.mutable_data_ptr<acc_t<T>>();
  stage1(reduction);
  second_stage(reduction.split_sums, splits, reduction.sums(), reduction, c.stream);
}

}  // namespace ops::depthwise_conv2d
