// CUDA dispatch of depthwise_conv1d: a table of kernel families for convolutions (forward pass,
// input gradient, gradient of the pre-activation), and one for the weight gradient. The first match
// runs; direct takes every problem.
#include "depthwise_conv1d/cuda/problem.cuh"

namespace ops::depthwise_conv1d {
namespace {

// Largest number of multiplications for which direct, whose latency is the least, is faster than
// short_filter, than other tiles of [N, C, T], and than other weight gradients (H200).
constexpr int64_t kTinyPlanes = int64_t{1} << 18, kTinyPixels = int64_t{1} << 20;
constexpr int64_t kSmallPlanes = int64_t{1} << 21;
constexpr int64_t kSmallGradientPlanes = int64_t{1} << 19;
// Largest number of multiplications per row for which direct is faster than the tiles of 256
// outputs and more (H200).
constexpr int64_t kShortRow = 400;
// Least number of taps for which matrix units are faster in weight gradients (H100).
constexpr int64_t kToeplitzPlanes = 5, kToeplitzPixels = 16;
// Least number of inputs at which planes is faster than short_filter in weight gradients of 4 taps
// in float32 (H100).
constexpr int64_t kLargePlanes = int64_t{1} << 24;

int64_t multiplications(const Sizes& p) {
  return p.n * p.c * p.out_t * p.taps;
}

bool is_tiny(const Sizes& p) {
  return multiplications(p) <= (p.channels_last ? kTinyPixels : kTinyPlanes);
}

template <typename T>
void run_convolution(const Convolution<T>& p, const Run& run) {
  if constexpr (!std::is_same_v<T, double>) {
    if (is_tiny(p)) return direct(p, run);
    if (short_filter(p, run)) return;
    const bool small = !p.channels_last && multiplications(p) <= kSmallPlanes;
    if (small || p.out_t * std::min(p.taps, p.in_t) <= kShortRow) return direct(p, run);
    if constexpr (sizeof(T) == 2) {
      if (toeplitz(p, run)) return;
    } else {
      if (planes(p, run)) return;
      if (channels(p, run)) return;
    }
    if (pixels(p, run)) return;
  }
  direct(p, run);
}

template <typename T>
void run_weight_gradient(const WeightGradient<T>& p, const Run& run) {
  if constexpr (!std::is_same_v<T, double>) {
    const int64_t small = p.channels_last ? kTinyPixels : kSmallGradientPlanes;
    if (multiplications(p) <= small) return direct_weight_gradient(p, run);  // 0: bias gradient
    if constexpr (sizeof(T) == 2) {
      const int64_t least = p.channels_last ? kToeplitzPixels : kToeplitzPlanes;
      if (p.taps >= least && toeplitz_weight_gradient(p, run)) return;
    }
    if (planes_weight_gradient(p, run)) return;
    if (pixels_weight_gradient(p, run)) return;
  }
  direct_weight_gradient(p, run);
}

Sizes sizes(const Geometry& g) {
  return {g.n, g.c, g.t, g.out_t, g.taps, g.stride, g.padding, g.dilation, g.channels_last};
}

template <typename T>
Convolution<T> forward_pass(const Geometry& g, const T* x, const T* weight, const T* bias, T* out) {
  return {{sizes(g), input_rows(g, x)}, dense_rows(g, out, g.out_t), weight, bias, g.silu};
}

template <typename T>
Convolution<T> input_gradient(const Geometry& g, const T* grad, const T* weight, T* out) {
  Convolution<T> p{
      {sizes(g), dense_rows(g, grad, g.out_t)}, dense_rows(g, out, g.t), weight, nullptr, false};
  std::swap(p.in_t, p.out_t);
  p.flip = g.stride == 1;
  p.transposed = !p.flip;
  if (p.flip) {
    p.padding = (g.taps - 1) * g.dilation - g.padding;
  }
  return p;
}

// Compute each requested gradient in a pass of its own; with SiLU, first that of the
// pre-activation.
template <typename T>
void run_gradients(const Geometry& g, const T* grad, const T* x, const T* weight, const T* bias,
                   const Gradients<T>& to, WeightGradient<T> sums, const Run& run) {
  Tensor pre_activation;
  if (g.silu && (to.input || to.weight || to.bias)) {
    pre_activation = empty(run.like, {g.n * g.c * g.out_t});
    T* const out = pre_activation.mutable_data_ptr<T>();
    auto p = forward_pass(g, x, weight, bias, out);
    p.grad = grad;
    run_convolution(p, run);
    sums.grad.data = out;
  }
  if (to.input) {
    run_convolution(input_gradient(g, sums.grad.data, weight, to.input), run);
  }
  if (to.weight || to.bias) {
    sums.taps = to.weight ? g.taps : 0;  // 0: bias gradient only
    run_weight_gradient(sums, run);
  }
}

struct Kernels {
  template <typename T>
  static void forward(const Tensor& like, const Geometry& g, const T* x, const T* weight,
                      const T* bias, T* out) {
    const DeviceGuard guard(like.get_device_index());
    run_convolution(forward_pass(g, x, weight, bias, out), {like, current_stream(like)});
  }

  template <typename T>
  static void backward(const Tensor& like, const Geometry& g, const T* grad, const T* x,
                       const T* weight, const T* bias, const Gradients<T>& to) {
    const DeviceGuard guard(like.get_device_index());
    const Run run{like, current_stream(like)};
    const WeightGradient<T> sums{
        {sizes(g), input_rows(g, x)}, dense_rows(g, grad, g.out_t), to.weight, to.bias};
    if constexpr (!std::is_same_v<T, double>) {
      const AllGradients<T> all{sums, weight, bias, g.silu, dense_rows(g, to.input, g.t)};
      // Separate passes are faster for a weight gradient alone of [N, T, C], and of [N, C, T] in
      // float32 with 5 taps or more (large: 4); for tiny problems of [N, T, C], and of [N, C, T]
      // for the input gradient alone with 5 taps or more.
      const bool large = g.taps == 4 && g.n * g.c * g.t >= kLargePlanes && g.t % 4 == 0;
      const bool alone = g.channels_last || (sizeof(T) == 4 && (g.taps > 4 || large));
      const bool both = to.input && to.weight;
      const bool tiny = is_tiny(sums) && (g.channels_last || (!to.weight && g.taps > 4));
      const bool together = !tiny && (g.silu || both || (to.weight && !alone));
      if (together && short_filter_gradients(all, run)) return;
    }
    run_gradients(g, grad, x, weight, bias, to, sums, run);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("depthwise_conv1d", TORCH_BOX(&forward<Kernels>));
  m.impl("depthwise_conv1d_backward", TORCH_BOX(&backward<Kernels>));
}

}  // namespace ops::depthwise_conv1d
