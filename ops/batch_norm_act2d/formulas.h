// Batch normalisation with batch statistics, followed by an activation: the formulas on any device.
// Forward and backward are the same three stages:
//
//   reduce   two sums of each channel in each chunk of the tensor    Statistics, Gradients: add
//   finish   results of each channel, from the sums of its chunks    Statistics, Gradients: ()
//   map      each element of the output, or of the input's gradient  Normalise, InputGradient
//
// `load` returns the arguments of a channel; the formula of an element takes them and the inputs as
// T: a number on CUDA, a vector on the CPU (core/cpu/simd.h).
#pragma once

#include <limits>
#include <ratio>

#include "core/elementwise.h"

namespace ops::batch_norm_act2d {

// Memory as [outer, channels, inner]: NCHW is [N, C, H·W], NHWC [N·H·W, C, 1].
struct Layout {
  int64_t outer, channels, inner;

  OPS_DEVICE int64_t count() const { return outer * inner; }  // elements of a channel
};

// Activations y = f(z), each with value(z) and gradient(g, z) = g f'(z).

// Return min(max(z, low), high), NaN for NaN.
template <typename A>
OPS_FORMULA A clamp(A z, A low, A high) {
  return z < low ? low : z > high ? high : z;
}

enum class Activation : int64_t { identity, relu, relu6, silu, hardswish };  // as in __init__.py

// Identity, ReLU and ReLU6. The gradient is 0 at a bound, as in PyTorch.
template <typename A, Activation kActivation>
struct Clamp {
  static constexpr A infinity = std::numeric_limits<A>::infinity();
  static constexpr A low = kActivation == Activation::identity ? -infinity : A(0);
  static constexpr A high = kActivation == Activation::relu6 ? A(6) : infinity;

  template <typename T>
  OPS_FORMULA T value(T z) const {
    return clamp(z, T(low), T(high));
  }
  template <typename T>
  OPS_FORMULA T gradient(T g, T z) const {
    // GCC 12 compiles select(a, 0, select(b, 0, g)) to scalar code with AVX-512.
    const T inside = select(z >= T(high), T(low), z);
    return select(inside <= T(low), T(A(0)), g);
  }
};

// Return σ(z), for tensors of type S.
template <typename S, typename T>
OPS_FORMULA T sigmoid(T z) {
#ifdef __CUDA_ARCH__
  // Exact division exceeds the memory time. The error is about 3 units in the last place; 1e-6 for
  // 16-bit tensors, where rounding hides it.
  if constexpr (std::is_same_v<T, float>) {
    return __fdividef(1.0f, 1.0f + (sizeof(S) == 2 ? __expf(-z) : expf(-z)));
  }
#endif
  return T(acc_t<S>(1)) / (T(acc_t<S>(1)) + exp_of_multiple<std::ratio<-1>>(z));
}

// z σ(z)
template <typename S>
struct Silu {
  template <typename T>
  OPS_FORMULA T value(T z) const {
    return z * sigmoid<S>(z);
  }
  template <typename T>
  OPS_FORMULA T gradient(T g, T z) const {
    const T one = acc_t<S>(1), s = sigmoid<S>(z);
    return g * (s * (one + z * (one - s)));
  }
};

// z min(max(z + 3, 0), 6) / 6
template <typename A>
struct Hardswish {
  template <typename T>
  OPS_FORMULA T value(T z) const {
    return z * clamp(z + T(A(3)), T(A(0)), T(A(6))) * T(A(1.0 / 6.0));
  }
  template <typename T>
  OPS_FORMULA T gradient(T g, T z) const {
    const T slope = z * T(A(1.0 / 3.0)) + T(A(0.5));
    return select(z <= T(A(-3)), T(A(0)), select(z < T(A(3)), g * slope, g));
  }
};

// Call f with the functor of an activation for tensors of type S.
template <typename S, typename F>
void dispatch_activation(int64_t activation, const F& f) {
  using A = acc_t<S>;
  switch (static_cast<Activation>(activation)) {
    case Activation::identity: return f(Clamp<A, Activation::identity>{});
    case Activation::relu: return f(Clamp<A, Activation::relu>{});
    case Activation::relu6: return f(Clamp<A, Activation::relu6>{});
    case Activation::silu: return f(Silu<S>{});
    case Activation::hardswish: return f(Hardswish<A>{});
  }
}

// Values of each channel. A null weight is 1, a null bias 0. The statistics are the batch's mean
// and 1 / sqrt(variance + eps).
template <typename A>
struct Channels {
  const A *weight, *bias, *mean, *rstd;

  // Arguments of z = (x − mean) scale + bias: mean, scale, bias.
  OPS_DEVICE void load(int64_t c, A* a) const {
    a[0] = mean[c];
    a[1] = weight ? rstd[c] * weight[c] : rstd[c];
    a[2] = bias ? bias[c] : A(0);
  }
};

// Two sums of a channel, over a chunk in A, over all in double.
template <typename A>
struct Sums {
  A first, second;

  template <typename B>
  OPS_DEVICE void operator+=(const Sums<B>& other) {
    first += other.first;
    second += other.second;
  }
};

// Reduction to the batch's statistics, by sums over scaled deviations d = x u − origin, u =
// kDeviationUnit: Σ d kSumUnit and Σ d². The units are powers of two. For finite x, d is finite,
// and so is the first sum of a million elements; the second may overflow. Running statistics (null:
// none) move by `momentum` towards the mean and the unbiased variance.
template <typename A, typename S>
struct Statistics {
  static constexpr int kArguments = 1;
  static constexpr A kDeviationUnit = A(1) / 4, kSumUnit = A(1) / (1 << 20);

  const S* x;
  Layout layout;
  A *mean, *rstd, *running_mean, *running_var;
  double momentum, eps;

  OPS_DEVICE void load(int64_t c, A* a) const { a[0] = origin(c) * kDeviationUnit; }

  template <typename T>
  OPS_FORMULA void add(const T* a, T& sum, T& square, T x) const {
    const T d = x * T(kDeviationUnit) - a[0];
    sum = sum + d * T(kSumUnit);
    square = square + d * d;
  }

  // Store the statistics of a channel. If Σ d² overflows, the variance is infinite; if Σ d / n is
  // not finite, it is NaN. If it is infinite, store mean 0, so that (x − mean) rstd is 0 and does
  // not overflow.
  OPS_DEVICE void operator()(int64_t c, const Sums<double>& sums) const {
    const double n = static_cast<double>(layout.count()), first = origin(c);
    const double shift = sums.first / n / kSumUnit / kDeviationUnit, batch_mean = first + shift;
    const double squares = sums.second / n / kDeviationUnit / kDeviationUnit;
    const bool overflow = !(squares < std::numeric_limits<double>::infinity());
    const double difference = squares - (overflow ? shift - shift : shift * shift);
    const double variance = difference < 0 ? 0 : difference;
    rstd[c] = static_cast<A>(1 / std::sqrt(variance + eps));
    mean[c] = rstd[c] == A(0) ? A(0) : static_cast<A>(batch_mean);
    if (running_mean) {
      move(running_mean + c, batch_mean);
    }
    if (running_var) {
      move(running_var + c, variance * (n / (n - 1)));
    }
  }

 private:
  // Return the median of the first, a middle and the last element of a channel, or 0 if it is not
  // finite: an outlier as the origin would cause cancellation.
  OPS_DEVICE A origin(int64_t c) const {
    const auto at = [&](int64_t image, int64_t pixel) {
      return static_cast<A>(x[(image * layout.channels + c) * layout.inner + pixel]);
    };
    const A a = at(0, 0), b = at(layout.outer / 2, layout.inner / 2),
            last = at(layout.outer - 1, layout.inner - 1);
    const A low = a < b ? a : b, high = a < b ? b : a, most = last < high ? last : high;
    const A median = low < most ? most : low;
    return median - median == A(0) ? median : A(0);
  }

  OPS_DEVICE void move(A* running, double batch) const {
    *running = static_cast<A>((1 - momentum) * *running + momentum * batch);
  }
};

// Map to the output.
template <typename A, typename F>
struct Normalise {
  static constexpr int kArguments = 3;

  Channels<A> channels;
  F f;

  OPS_DEVICE void load(int64_t c, A* a) const { channels.load(c, a); }

  template <typename T>
  OPS_FORMULA T operator()(const T* a, T x) const {
    return f.value((x - a[0]) * a[1] + a[2]);
  }
};

// Reduction to the gradients of weight and bias: Σ g and Σ g (x − mean), where g is the gradient
// before the activation.
template <typename A, typename F>
struct Gradients {
  static constexpr int kArguments = 3;

  Channels<A> channels;
  F f;
  A *grad_weight, *grad_bias;

  OPS_DEVICE void load(int64_t c, A* a) const { channels.load(c, a); }

  template <typename T>
  OPS_FORMULA void add(const T* a, T& sum, T& product, T x, T grad) const {
    const T d = x - a[0], g = f.gradient(grad, d * a[1] + a[2]);
    sum = sum + g;
    product = product + g * d;
  }

  // If the variance is infinite, x̂ is 0, but the second sum may overflow.
  OPS_DEVICE void operator()(int64_t c, const Sums<double>& sums) const {
    const A rstd = channels.rstd[c];
    grad_bias[c] = static_cast<A>(sums.first);
    grad_weight[c] = static_cast<A>(rstd == A(0) ? sums.first * 0 : sums.second * rstd);
  }
};

// Map to the gradient of the input: scale (g − Σ g / n − x̂ Σ g x̂ / n), x̂ = (x − mean) rstd.
template <typename A, typename F>
struct InputGradient {
  static constexpr int kArguments = 5;

  Channels<A> channels;
  F f;
  const A *grad_weight, *grad_bias;
  A count_inverse;  // 1 / n

  OPS_DEVICE void load(int64_t c, A* a) const {
    channels.load(c, a);
    const A factor = a[1] * count_inverse;
    a[3] = factor * grad_bias[c];
    a[4] = factor * (grad_weight[c] * channels.rstd[c]);
  }

  template <typename T>
  OPS_FORMULA T operator()(const T* a, T x, T grad) const {
    const T d = x - a[0], g = f.gradient(grad, d * a[1] + a[2]);
    return a[1] * g - a[3] - d * a[4];
  }
};

}  // namespace ops::batch_norm_act2d
