// Parameters of the CUDA kernels of depthwise_conv1d, and the launch functions of the families for
// dispatch.cu. All but direct return false if the family has no kernel for the problem, or a slow
// one.
#pragma once

#include "core/cuda/reduce.cuh"
#include "depthwise_conv1d/op.h"

namespace ops::depthwise_conv1d {

using namespace ops::cuda;

// 1 / (1 + e⁻ʸ). float32: within 3 ulp. Results rounded to 16 bits: two approximate instructions.
template <typename T>
__device__ __forceinline__ acc_t<T> sigmoid(acc_t<T> y) {
  if constexpr (sizeof(T) == 2) {
    constexpr float kLog2E = 1.44269504f;
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(y * -kLog2E));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    return s;
  } else if constexpr (std::is_same_v<T, float>) {
    float s;
    asm("rcp.approx.f32 %0, %1;" : "=f"(s) : "f"(1.0f + std::exp(-y)));
    return s;
  } else {
    return 1 / (1 + std::exp(-y));
  }
}

// Return g · silu'(y).
template <typename T>
__device__ __forceinline__ acc_t<T> silu_gradient(acc_t<T> g, acc_t<T> y) {
  const acc_t<T> s = sigmoid<T>(y);
  return g * s * (1 + y * (1 - s));
}

// Sizes of a problem. The input gradient exchanges in_t and out_t.
struct Sizes {
  int64_t n, c, in_t, out_t, taps, stride, padding, dilation;
  bool channels_last;

  // Return whether the stride is 1, and 32-bit indices suffice for the rows, for the positions of a
  // channel, and for the weights.
  bool is_tileable() const {
    constexpr int64_t kLimit = int64_t{1} << 29;
    const int64_t pad = std::abs(padding);
    return stride == 1 && taps < kLimit && dilation < kLimit && taps * dilation < kLimit &&
           pad < kLimit && std::max(in_t, out_t) < kLimit && n * c < kLimit &&
           n * (std::max(in_t, out_t) + taps * dilation + pad) < kLimit && c * (taps + 1) < kLimit;
  }
};

template <typename T>
struct Problem : Sizes {
  using Acc = acc_t<T>;

  Rows<const T> in;

  // Return whether the kernels of tiles of rows can run: [N, C, T], stride 1, dilation 1.
  bool has_rows() const {
    return !this->channels_last && this->is_tileable() && this->dilation == 1 && in.t_stride == 1;
  }
  // Return whether the kernels of adjacent channels can run: [N, T, C], stride 1.
  bool has_pixels() const { return this->channels_last && this->is_tileable() && in.c_stride == 1; }
};

// Return the sum of one output over the taps inside the row, at `first`, first + step, …. It
// replaces a NaN of the tiled kernels, which may come from 0 · non-finite outside the window.
template <typename T>
__device__ __noinline__ float exact_sum(const T* row, int64_t stride, int row_size, int first,
                                        int step, const T* weight, int weight_step, int taps) {
  float sum = 0;
  for (int k = 0; k < taps; ++k, first += step, weight += weight_step) {
    if (is_inside(first, row_size)) {
      sum += static_cast<float>(*weight) * static_cast<float>(row[first * stride]);
    }
  }
  return sum;
}

// Forward pass, input gradient, or gradient of the pre-activation. The input gradient is the
// convolution with the flipped filter (`flip`) if the stride is 1, else a transposed convolution
// (`transposed`).
template <typename T>
struct Convolution : Problem<T> {
  using typename Problem<T>::Acc;
  using Sizes::dilation, Sizes::in_t, Sizes::out_t, Sizes::padding, Sizes::taps, Problem<T>::in;

  Rows<T> out;  // dense
  const T* weight;
  const T* bias;  // nullptr: none
  bool silu;
  const T* grad = nullptr;  // in the layout of `out`: return grad · silu'(convolution)
  bool transposed = false, flip = false;

  __device__ int64_t tap(int64_t k) const { return flip ? taps - 1 - k : k; }
  __device__ Acc bias_of(int64_t channel) const {
    return bias ? static_cast<Acc>(bias[channel]) : Acc(0);
  }

  // Return the activation of y, or g · silu'(y) if `grad` is given.
  __device__ Acc activate(Acc y, Acc g) const {
    return !silu ? y : grad ? silu_gradient<T>(g, y) : y * sigmoid<T>(y);
  }

  // Return the convolution at output t (stride 1), tap by tap.
  __device__ float exact(int64_t image, int64_t channel, int t) const {
    const int step = static_cast<int>(dilation), size = static_cast<int>(taps);
    const float sum = exact_sum(
        in.row(image, channel), in.t_stride, static_cast<int>(in_t), t - static_cast<int>(padding),
        step, weight + channel * taps + (flip ? size - 1 : 0), flip ? -1 : 1, size);
    return sum + bias_of(channel);
  }

  // Return y, or the exact convolution if y is NaN.
  __device__ float without_nan(float y, int64_t image, int64_t channel, int t) const {
    return isnan(y) && is_inside(t, static_cast<int>(out_t)) ? exact(image, channel, t) : y;
  }
};

// Gradients of weight and bias, sums over n and t. A block adds a split of them; stage 2 adds the
// splits (core/cuda/reduce.cuh).
template <typename T>
struct WeightGradient : Problem<T> {
  using typename Problem<T>::Acc;
  using Sizes::c, Sizes::taps;

  Rows<const T> grad;     // dense, of the pre-activation
  T* grad_weight;         // nullptr: not requested
  T* grad_bias;           // nullptr: not requested
  Acc* splits = nullptr;  // [splits, C, taps + 1]; nullptr: one split, which writes the gradients

  // Write a sum: tap k, or the bias if k is `taps`.
  __device__ void put(int64_t split, int64_t channel, int64_t k, Acc sum) const {
    if (splits) {
      splits[(split * c + channel) * (taps + 1) + k] = sum;
    } else {
      write(channel, k, sum);
    }
  }
  __device__ void operator()(int i, Acc sum) const {  // stage 2
    const int sums = static_cast<int>(taps) + 1;
    write(i / sums, i % sums, sum);
  }
  __device__ void write(int64_t channel, int64_t k, Acc sum) const {
    T* const to = k < taps ? grad_weight : grad_bias;
    if (to) {
      to[k < taps ? channel * taps + k : channel] = static_cast<T>(sum);
    }
  }
};

// Gradients of input, weight and bias in one pass.
template <typename T>
struct AllGradients : WeightGradient<T> {  // `grad` is that of the output
  const T* weight;
  const T* bias;  // nullptr: none
  bool silu;
  Rows<T> grad_input;  // nullptr: not requested
};

struct Run {
  const Tensor& like;  // device of temporary tensors
  cudaStream_t stream;
};

// Run stage 1, stage1(problem), which adds `splits` splits, then stage 2.
template <typename P, typename F>
void reduce_splits(P problem, const Run& run, int64_t splits, const F& stage1) {
  if (splits == 1) {
    stage1(problem);
    return;
  }
  const ScalarType dtype = accumulator_dtype(run.like.scalar_type());
  Tensor sums = empty(run.like, {splits, problem.c, problem.taps + 1}, dtype);
  problem.splits = sums.mutable_data_ptr<typename P::Acc>();
  stage1(problem);
  second_stage(problem.splits, splits, problem.c * (problem.taps + 1), problem, run.stream);
}

// [N, C, T], stride 1, dilation 1: a register tile along T; the convolution in float32 only.
bool planes(const Convolution<float>& p, const Run& run);
template <typename T>
bool planes_weight_gradient(const WeightGradient<T>& p, const Run& run);

// [N, T, C] in float32, stride 1, dilation 1: transposed in shared memory, a register tile along T.
bool channels(const Convolution<float>& p, const Run& run);

// [N, T, C], stride 1: a register tile along T of adjacent channels, inputs from the L1 cache.
template <typename T>
bool pixels(const Convolution<T>& p, const Run& run);
template <typename T>
bool pixels_weight_gradient(const WeightGradient<T>& p, const Run& run);

// 2 to 7 taps, stride 1, both layouts; all gradients, also that of SiLU, in one pass.
template <typename T>
bool short_filter(const Convolution<T>& p, const Run& run);
template <typename T>
bool short_filter_gradients(const AllGradients<T>& p, const Run& run);

// 16 bits, stride 1, dilation 1, both layouts: implicit GEMM on matrix units.
template <typename T>
bool toeplitz(const Convolution<T>& p, const Run& run);
template <typename T>
bool toeplitz_weight_gradient(const WeightGradient<T>& p, const Run& run);

// Any problem, also float64.
template <typename T>
void direct(const Convolution<T>& p, const Run& run);
template <typename T>
void direct_weight_gradient(const WeightGradient<T>& p, const Run& run);

}  // namespace ops::depthwise_conv1d
