// CUDA dispatch of depthwise convolution: a table of kernel families for the forward pass and the
// input gradient, and one for the weight gradient. The first match runs; direct_l1_runtime takes
// every problem. If input and weight gradient are both requested, a kernel for all gradients is
// tried first. docs/kernels.md explains the tables; each family's file has its figure.
#include <string>

#include "depthwise_conv2d/cuda/families.cuh"

namespace ops::depthwise_conv2d {
namespace {

// Return whether the problem fits 32-bit indices (direct_l1_runtime: see fits_32_bits).
bool is_tileable(const Geometry& g) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  const int64_t rows = g.h + 2 * g.padding_h, cols = g.w + 2 * g.padding_w;
  return rows * cols * g.n < kLimit && g.n * g.c < kLimit && g.c * cols < kLimit &&
         g.c * (g.kernel_h * g.kernel_w + 1) < kLimit;
}

// Largest load at which direct_l1 is faster than kernels that stage tiles (H200; weight gradients
// of 5×5 and 7×7 in NHWC: H100).
constexpr int64_t kSmallNchw = 4'500, kSmallGradient = 20'000, kSmallGradientNhwc5x5To7x7 = 7'000;
constexpr int64_t kSmallNhwc = 40'000, kSmallNhwc3x3Bits16 = 60'000;
// Largest feature map, in outputs, for whose NCHW weight gradient direct_l1 is tried first.
constexpr int64_t kSmallMap = 16 * 16;
// large_filter is faster than direct_l1_runtime above this load (not a condition of weight
// gradients), from these numbers of taps on (H100).
constexpr int64_t kLargeFilterLoad = 4'500;
constexpr int64_t kLargeNchw = 36, kLargeNhwc = 121;
constexpr int64_t kLargeGradientNchw = 144, kLargeGradientNhwc = 400;

// Run the first matching family and return its name.
template <typename T>
const char* run_convolution(const Convolution<T>& c) {
  if constexpr (!std::is_same_v<T, double>) {
    const bool nhwc = c.g.channels_last, nchw = !nhwc;
    const int64_t load = load_of(c.g);
    const int64_t taps = c.g.kernel_h * c.g.kernel_w;
    const int64_t small_nhwc = sizeof(T) == 2 && taps == 9 ? kSmallNhwc3x3Bits16 : kSmallNhwc;
    const bool small = load <= (nchw ? kSmallNchw : small_nhwc);
    const bool large = taps >= (nhwc ? kLargeNhwc : kLargeNchw);
    if (is_tileable(c.g)) {
      if (nchw && small && direct_l1(c)) return "direct_l1";
      if constexpr (sizeof(T) == 2) {
        if (nchw && has_mma() && nchw_mma(c)) return "nchw_mma";
        if (nhwc && has_mma() && nhwc_mma(c)) return "nhwc_mma";
      }
      if (nchw && nchw_fma(c)) return "nchw_fma";
      if (nhwc && small && direct_l1(c)) return "direct_l1";
      if (nhwc && nhwc_ring(c)) return "nhwc_ring";
      if (direct_l1(c)) return "direct_l1";
      if (large && load > kLargeFilterLoad && large_filter(c)) return "large_filter";
    }
  }
  direct_l1_runtime(c);
  return "direct_l1_runtime";
}

// The same for the weight gradient.
template <typename T>
const char* run_weight_gradient(const WeightGradient<T>& c) {
  if constexpr (!std::is_same_v<T, double>) {
    const bool nhwc = c.g.channels_last, nchw = !nhwc;
    const int64_t taps = c.g.kernel_h * c.g.kernel_w;
    const bool small =
        load_of(c.g) <= (nhwc && taps > 9 ? kSmallGradientNhwc5x5To7x7 : kSmallGradient);
    const bool large = taps >= (nhwc ? kLargeGradientNhwc : kLargeGradientNchw);
    const bool small_map = small && c.g.out_h * c.g.out_w <= kSmallMap;
    if (c.grad_weight && is_tileable(c.g)) {
      if (nchw && small_map && direct_l1_weight_gradient(c)) return "direct_l1";
      if constexpr (sizeof(T) == 2) {
        if (nchw && has_mma() && nchw_mma_weight_gradient(c)) return "nchw_mma";
      }
      if (nchw && nchw_fma_weight_gradient(c)) return "nchw_fma";
      if (nhwc && small && direct_l1_weight_gradient(c)) return "direct_l1";
      if (nhwc && nhwc_ring_weight_gradient(c)) return "nhwc_ring";
      if (direct_l1_weight_gradient(c)) return "direct_l1";
      if (large && large_filter_weight_gradient(c)) return "large_filter";
    }
  }
  direct_l1_runtime_weight_gradient(c);
  return "direct_l1_runtime";
}

// Run nhwc_ring for all gradients in one pass; return whether it has a kernel.
template <typename T>
bool run_all_gradients(const Convolution<T>& input_gradient,
                       const WeightGradient<T>& weight_gradient) {
  if constexpr (!std::is_same_v<T, double>) {
    const Geometry& g = weight_gradient.g;
    return g.channels_last && is_tileable(g) &&
           nhwc_ring_all_gradients(input_gradient, weight_gradient);
  }
  return false;
}

template <typename T>
Convolution<T> input_gradient(const Geometry& g, const T* grad, const T* weight, T* out,
                              cudaStream_t stream, bool dry_run = false) {
  Convolution<T> c{g, {grad, g.out_h, g.out_w}, {out, g.h, g.w}, weight, nullptr, stream, dry_run};
  c.flip = g.stride_h == 1 && g.stride_w == 1;
  c.transposed = !c.flip;
  if (c.flip) {
    c.padding_h = (g.kernel_h - 1) * g.dilation_h - g.padding_h;
    c.padding_w = (g.kernel_w - 1) * g.dilation_w - g.padding_w;
  }
  return c;
}

struct Kernels {
  static constexpr bool kReadsStridedPlanes = false;

  template <typename T>
  static void forward(const Tensor& like, const Geometry& g, const T* x, const T* weight,
                      const T* bias, T* out) {
    const DeviceGuard guard(like.get_device_index());
    const cudaStream_t stream = current_stream(like);
    run_convolution<T>({g, {x, g.h, g.w}, {out, g.out_h, g.out_w}, weight, bias, stream});
  }

  template <typename T>
  static void backward(const Tensor& like, const Geometry& g, const T* grad, const T* x,
                       const T* weight, const Gradients<T>& to) {
    const DeviceGuard guard(like.get_device_index());
    const cudaStream_t stream = current_stream(like);
    const auto for_input = input_gradient(g, grad, weight, to.input, stream);
    const WeightGradient<T> for_weight{g, like, x, grad, to.weight, to.bias, stream};
    if (to.input && to.weight && run_all_gradients(for_input, for_weight)) {
      return;
    }
    if (to.input) {
      run_convolution(for_input);
    }
    if (to.weight || to.bias) {
      run_weight_gradient(for_weight);
    }
  }
};

// Return the name of the family that would run kernel_pass ("forward", "input_gradient",
// "weight_gradient" or "all_gradients") for a dense input and newly allocated results. Return
// "separate" for all gradients if each has its own kernel. For tests and inspection.
std::string kernel_name(const Tensor& input, const Tensor& weight, std::vector<int64_t> stride,
                        std::vector<int64_t> padding, std::vector<int64_t> dilation,
                        std::string kernel_pass) {
  const char* op = "depthwise_conv2d_kernel";
  const auto g = geometry(op, input, weight, {stride, padding, dilation});
  check(!g.empty(), op, ": input must not be empty, got ", shape{input});
  const DeviceGuard guard(input.get_device_index());
  const char* family = nullptr;
  dispatch_floating(op, input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* const x = input.const_data_ptr<T>();
    T* const null = nullptr;  // passes every alignment check
    const auto for_input = input_gradient<T>(g, null, null, null, nullptr, true);
    T* const requested = input.mutable_data_ptr<T>();  // not null; not written to
    const WeightGradient<T> for_weight{g, input, x, null, requested, nullptr, nullptr, true};
    if (kernel_pass == "forward") {
      family = run_convolution<T>(
          {g, {x, g.h, g.w}, {null, g.out_h, g.out_w}, null, null, nullptr, true});
    } else if (kernel_pass == "input_gradient") {
      family = run_convolution(for_input);
    } else if (kernel_pass == "weight_gradient") {
      family = run_weight_gradient(for_weight);
    } else {
      check(kernel_pass == "all_gradients", op, ": kernel_pass must be forward, input_gradient, ",
            "weight_gradient or all_gradients, got ", kernel_pass);
      family = run_all_gradients(for_input, for_weight) ? "nhwc_ring" : "separate";
    }
  });
  return family;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def(
      "depthwise_conv2d_kernel(Tensor input, Tensor weight, int[2] stride, int[2] padding, "
      "int[2] dilation, str kernel_pass) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("depthwise_conv2d", TORCH_BOX(&forward<Kernels>));
  m.impl("depthwise_conv2d_backward", TORCH_BOX(&backward<Kernels>));
  m.impl("depthwise_conv2d_kernel", TORCH_BOX(&kernel_name));
}

}  // namespace ops::depthwise_conv2d
