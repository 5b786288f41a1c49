// conv2d_max_pool2d: schemas, dispatch and packing.
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include "conv2d_max_pool2d/cpu/plan.h"
#include "core/cpu/parallel.h"
#define OPS_KERNELS "conv2d_max_pool2d/cpu/kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::cpu {
namespace {

// Limits of the kernels, measured by scripts/bench_geometry.py --op conv_max_pool.
constexpr int64_t kMaxOutChannels = 128;      // above, PyTorch's convolution is faster
constexpr int64_t kMinPixels = 3;             // per pooling window: below, few pixels are skipped
constexpr int64_t kMinWindows = 2;            // per image: each image updates all sums
constexpr int64_t kMaxPackedImage = 1 << 15;  // floats: two images stay in the L2 cache
constexpr int64_t kMinImages = 32;            // below, threads are idle
constexpr int64_t kMaxBlocks = 32;            // partial sums of the two-stage reduction
constexpr int64_t kMinTerms = 16;             // maxima per channel and partial sum

struct Kernels {
  // Return whether the kernels are faster than PyTorch's convolution.
  static bool covers(const ConvPool& g, const Tensor& input) {
    const Windows& conv = g.conv;
    const int64_t pixels = g.pool_h * g.pool_w;
    const int64_t rows = conv.h + 2 * conv.padding_h;
    const int64_t row = (conv.w + 2 * conv.padding_w) * g.in_c;
    return !input.is_cuda() && input.scalar_type() == ScalarType::Float && g.n >= kMinImages &&
           g.out_c <= kMaxOutChannels && g.out_h * g.out_w >= kMinWindows && pixels >= kMinPixels &&
           pixels <= kByteTaps && conv.dilation_h == 1 && conv.dilation_w == 1 &&
           conv.kernel_w * g.in_c <= kMaxTapRow && std::max(rows, row) <= kMaxPackedImage &&
           rows * row <= kMaxPackedImage;
  }

  // Deterministic two-stage reduction: sum blocks of images, then add the blocks in order. Blocks
  // depend on the shape alone, so the result does not depend on the number of threads.
  static Gradients backward(const ConvPool& g, const Tensor& grad_output, const Tensor& indices,
                            const Tensor& input, const Tensor& weight,
                            const std::vector<bool>& mask) {
    GradientPlan p(g, std::min<int64_t>(vector_bytes(), 32) / sizeof(float));
    const Tensor grad = in_format(grad_output, g.channels_last);
    const Tensor taps = in_format(indices, g.channels_last);
    const Tensor x = in_format(input, g.channels_last), w = as_contiguous(weight);
    Tensor grad_input =
        empty_if(mask[0], x, {g.n, g.in_c, g.conv.h, g.conv.w}, memory_format(4, g.channels_last));
    Tensor grad_weight = empty_if(mask[1], w, {g.out_c, g.in_c, g.conv.kernel_h, g.conv.kernel_w});
    Tensor grad_bias = empty_if(mask[2], w, {g.out_c});
    p.grad = grad.const_data_ptr<float>();
    p.indices = taps.const_data_ptr<uint8_t>();
    p.x = x.const_data_ptr<float>();
    p.grad_input = mask[0] ? grad_input.mutable_data_ptr<float>() : nullptr;

    const int64_t filters = g.out_c * p.filter(), sums_size = filters + g.out_c;
    std::vector<float> packed(filters);
    for_weights(p, [&](int64_t i, int64_t at) { packed[at] = w.const_data_ptr<float>()[i]; });
    p.weight = packed.data();
    const int64_t maxima = g.n * g.out_h * g.out_w;
    const int64_t blocks = std::clamp<int64_t>(maxima / kMinTerms, 1, kMaxBlocks);
    std::vector<float> sums(blocks * sums_size);
    parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> image(p.packed_size()), grad_image(mask[0] ? p.packed_size() : 0);
      std::vector<Term> terms(p.windows.size() + 1);
      for (int64_t block = begin; block < end; ++block) {
        float* sum = &sums[block * sums_size];
        for (int64_t n = g.n * block / blocks; n < g.n * (block + 1) / blocks; ++n) {
          OPS_CALL(backward_image(p, n, image.data(), grad_image.data(), terms.data(),
                                  mask[1] ? sum : nullptr, sum + filters));
        }
      }
    });
    std::vector<double> total(sums.begin(), sums.begin() + sums_size);
    for (int64_t block = 1; block < blocks; ++block) {
      for (int64_t i = 0; i < sums_size; ++i) {
        total[i] += sums[block * sums_size + i];
      }
    }
    if (mask[1]) {
      float* to = grad_weight.mutable_data_ptr<float>();
      for_weights(p, [&](int64_t i, int64_t at) { to[i] = total[at]; });
    }
    if (mask[2]) {
      std::copy_n(&total[filters], g.out_c, grad_bias.mutable_data_ptr<float>());
    }
    return {grad_input, grad_weight, grad_bias};
  }

 private:
  // Call f(index in [co][ci][kh][kw], index in [co][kh][tap_row]) for each weight.
  template <typename F>
  static void for_weights(const GradientPlan& p, const F& f) {
    int64_t i = 0;
    for (int64_t row = 0; row < p.out_c * p.in_c * p.conv.kernel_h; ++row) {
      const int64_t kh = row % p.conv.kernel_h, ci = row / p.conv.kernel_h % p.in_c;
      const int64_t at = row / (p.conv.kernel_h * p.in_c) * p.filter() + kh * p.tap_row + ci;
      for (int64_t kw = 0; kw < p.conv.kernel_w; ++kw) {
        f(i++, at + kw * p.in_c);
      }
    }
  }
};

// Return the gradients; those not in output_mask have shape [0].
Gradients conv2d_max_pool2d_backward(const Tensor& grad_output, const Tensor& indices,
                                     const Tensor& input, const Tensor& weight, Pair stride,
                                     Pair padding, Pair dilation, Pair pool,
                                     std::vector<bool> output_mask) {
  const char* op = "conv2d_max_pool2d_backward";
  const ConvPool g = conv_pool(op, input, weight, {stride, padding, dilation}, pool);
  check_same(op, "input", input, "grad_output", grad_output);
  check_shape(op, "grad_output", grad_output, {g.n, g.out_c, g.out_h, g.out_w});
  check_shape(op, "indices", indices, {g.n, g.out_c, g.out_h, g.out_w});
  check_device(op, "input", input, "indices", indices);
  check_dtype(op, "indices", indices, tap_dtype(g.pool_h * g.pool_w));
  check(output_mask.size() == 3, op, ": output_mask must be three booleans");
  if (Kernels::covers(g, input)) {
    return Kernels::backward(g, grad_output, indices, input, weight, output_mask);
  }
  const auto differentiate = [&] {
    const auto [image] = call_operator<Tensor>("lenet_ops::max_pool2d_backward", grad_output,
                                               indices, pool, pool, Pair{0, 0}, Pair{1, 1}, false,
                                               g.conv.out_h, g.conv.out_w, g.channels_last);
    const std::array<bool, 3> array{output_mask[0], output_mask[1], output_mask[2]};
    const torch::headeronly::HeaderOnlyArrayRef<bool> mask(array);
    if (is_depthwise(g, input) && !output_mask[0]) {
      return call_operator<Tensor, Tensor, Tensor>("lenet_ops::depthwise_conv2d_backward", image,
                                                   copies(g, input), weight, stride, padding,
                                                   dilation, mask);
    }
    return call_operator<Tensor, Tensor, Tensor>(
        "aten::convolution_backward", image, input, weight, std::optional<Pair>(Pair{g.out_c}),
        stride, padding, dilation, false, Pair{0, 0}, int64_t{1}, mask);
  };
  const auto [grad_input, grad_weight, grad_bias] =
      with_memory(input, g.pass_bytes(input), differentiate);
  return {output_mask[0] ? in_format(grad_input, g.channels_last) : empty(input, {0}),
          output_mask[1] ? as_contiguous(grad_weight) : empty(input, {0}),
          output_mask[2] ? grad_bias : empty(input, {0})};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def(
      "conv2d_max_pool2d(Tensor input, Tensor weight, Tensor? bias, int[2] stride, "
      "int[2] padding, int[2] dilation, int[2] pool) -> (Tensor output, Tensor indices)");
  m.def(
      "conv2d_max_pool2d_backward(Tensor grad_output, Tensor indices, Tensor input, "
      "Tensor weight, int[2] stride, int[2] padding, int[2] dilation, int[2] pool, "
      "bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
}

// On every device: PyTorch's convolution has kernels for all.
STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CompositeExplicitAutograd, m) {
  m.impl("conv2d_max_pool2d", TORCH_BOX(&conv2d_max_pool2d));
  m.impl("conv2d_max_pool2d_backward", TORCH_BOX(&conv2d_max_pool2d_backward));
}

}  // namespace ops::cpu
