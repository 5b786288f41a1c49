#include "depthwise_conv.h"

#include <algorithm>

namespace ops::cpu {
namespace {

// Where element (n, c, h, w) of an image lies.
struct Strides {
  int64_t n, c, h, w;

  Strides(const DepthwiseGeometry& g, int64_t height, int64_t width)
      : n(g.c * height * width),
        c(g.channels_last ? 1 : height * width),
        h(g.channels_last ? width * g.c : width),
        w(g.channels_last ? g.c : 1) {}
};

struct Kernels {
  template <typename T>
  static void forward(const Tensor&, const DepthwiseGeometry& g, const T* x, const T* weight,
                      const T* bias, T* out) {
    const Strides in(g, g.h, g.w), to(g, g.out_h, g.out_w);
    planes(g, [&](int64_t n, int64_t c) {
      for (int64_t oh = 0; oh < g.out_h; ++oh) {
        for (int64_t ow = 0; ow < g.out_w; ++ow) {
          acc_t<T> sum = bias ? static_cast<acc_t<T>>(bias[c]) : acc_t<T>(0);
          taps(g, oh, ow, [&](int64_t tap, int64_t h, int64_t w) {
            sum += static_cast<acc_t<T>>(weight[c * g.kernel_h * g.kernel_w + tap]) *
                   static_cast<acc_t<T>>(x[n * in.n + c * in.c + h * in.h + w * in.w]);
          });
          out[n * to.n + c * to.c + oh * to.h + ow * to.w] = static_cast<T>(sum);
        }
      }
    });
  }

  template <typename T>
  static void backward_input(const Tensor&, const DepthwiseGeometry& g, const T* grad,
                             const T* weight, T* out) {
    const Strides to(g, g.h, g.w), in(g, g.out_h, g.out_w);
    planes(g, [&](int64_t n, int64_t c) {
      std::vector<acc_t<T>> plane(g.h * g.w);
      for (int64_t oh = 0; oh < g.out_h; ++oh) {
        for (int64_t ow = 0; ow < g.out_w; ++ow) {
          const acc_t<T> value =
              static_cast<acc_t<T>>(grad[n * in.n + c * in.c + oh * in.h + ow * in.w]);
          taps(g, oh, ow, [&](int64_t tap, int64_t h, int64_t w) {
            plane[h * g.w + w] +=
                value * static_cast<acc_t<T>>(weight[c * g.kernel_h * g.kernel_w + tap]);
          });
        }
      }
      for (int64_t h = 0; h < g.h; ++h) {
        for (int64_t w = 0; w < g.w; ++w) {
          out[n * to.n + c * to.c + h * to.h + w * to.w] = static_cast<T>(plane[h * g.w + w]);
        }
      }
    });
  }

  template <typename T>
  static void backward_weight(const Tensor&, const DepthwiseGeometry& g, const T* grad, const T* x,
                              T* grad_weight, T* grad_bias) {
    const Strides in(g, g.h, g.w), from(g, g.out_h, g.out_w);
    const int64_t num_taps = g.kernel_h * g.kernel_w;
    torch::stable::parallel_for(0, g.c, 1, [&](int64_t begin, int64_t end) {
      std::vector<double> sums(
          num_taps);  // of every pixel of the batch: float32 has too few digits
      for (int64_t c = begin; c < end; ++c) {
        std::fill(sums.begin(), sums.end(), 0.0);
        double bias_sum = 0;
        for (int64_t n = 0; n < g.n; ++n) {
          for (int64_t oh = 0; oh < g.out_h; ++oh) {
            for (int64_t ow = 0; ow < g.out_w; ++ow) {
              const acc_t<T> value =
                  static_cast<acc_t<T>>(grad[n * from.n + c * from.c + oh * from.h + ow * from.w]);
              bias_sum += value;
              if (grad_weight) {
                taps(g, oh, ow, [&](int64_t tap, int64_t h, int64_t w) {
                  sums[tap] +=
                      value * static_cast<acc_t<T>>(x[n * in.n + c * in.c + h * in.h + w * in.w]);
                });
              }
            }
          }
        }
        if (grad_weight) {
          std::copy(sums.begin(), sums.end(), grad_weight + c * num_taps);
        }
        if (grad_bias) {
          grad_bias[c] = static_cast<T>(bias_sum);
        }
      }
    });
  }

 private:
  template <typename F>
  static void planes(const DepthwiseGeometry& g, const F& f) {
    torch::stable::parallel_for(0, g.n * g.c, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        f(i / g.c, i % g.c);
      }
    });
  }

  // Calls f(tap, h, w) for the taps of output (oh, ow) that fall inside the input.
  template <typename F>
  static void taps(const DepthwiseGeometry& g, int64_t oh, int64_t ow, const F& f) {
    for (int64_t i = 0; i < g.kernel_h; ++i) {
      const int64_t h = oh * g.stride_h - g.padding_h + i * g.dilation_h;
      if (h < 0 || h >= g.h) {
        continue;
      }
      for (int64_t j = 0; j < g.kernel_w; ++j) {
        const int64_t w = ow * g.stride_w - g.padding_w + j * g.dilation_w;
        if (w >= 0 && w < g.w) {
          f(i * g.kernel_w + j, h, w);
        }
      }
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def(
      "depthwise_conv2d(Tensor input, Tensor weight, Tensor? bias, int[2] stride, int[2] padding, "
      "int[2] dilation) -> Tensor");
  m.def(
      "depthwise_conv2d_backward(Tensor grad_output, Tensor input, Tensor weight, int[2] stride, "
      "int[2] padding, int[2] dilation, bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  m.impl("depthwise_conv2d", TORCH_BOX(&depthwise_conv2d<Kernels>));
  m.impl("depthwise_conv2d_backward", TORCH_BOX(&depthwise_conv2d_backward<Kernels>));
}

}  // namespace ops::cpu
