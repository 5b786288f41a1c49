// Batch normalisation with batch statistics, followed by an activation: arguments, memory layout
// and allocation on any device; scalar formulas (cpu_kernels.h has them for vectors).
#pragma once

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "core/layout.h"

namespace ops {

// Memory as [outer, channels, inner]: NCHW is [N, C, H·W], NHWC [N·H·W, C, 1].
struct NormLayout {
  int64_t outer, channels, inner;

  int64_t count() const { return outer * inner; }  // elements of a channel
};

inline NormLayout norm_layout(const Tensor& x, MemoryFormat format) {
  const int64_t n = x.size(0), c = x.size(1), area = x.size(2) * x.size(3);
  return format == MemoryFormat::Contiguous ? NormLayout{n, c, area} : NormLayout{n * area, c, 1};
}

// Per-channel values in the accumulator type. A null weight is 1, a null bias 0. The statistics are
// the batch's mean and 1 / sqrt(variance + eps).
template <typename A>
struct Channels {
  const A *weight, *bias, *mean, *rstd;
};

// Activations y = f(z), each with value(z) and gradient(g, z) = g f'(z).

// min(max(z, low), high): identity, ReLU and ReLU6. The gradient is 0 at a bound, as in PyTorch.
template <typename A>
struct Clamp {
  A low, high;

  OPS_DEVICE A value(A z) const { return z < low ? low : z > high ? high : z; }
  OPS_DEVICE A gradient(A g, A z) const { return z <= low || z >= high ? A(0) : g; }
};

// z σ(z)
template <typename A>
struct Silu {
  OPS_DEVICE A value(A z) const { return z / (A(1) + std::exp(-z)); }
  OPS_DEVICE A gradient(A g, A z) const {
    const A s = A(1) / (A(1) + std::exp(-z));
    return g * (s * (A(1) + z * (A(1) - s)));
  }
};

// z min(max(z + 3, 0), 6) / 6
template <typename A>
struct Hardswish {
  OPS_DEVICE A value(A z) const {
    const A t = z + A(3);
    return z * (t < A(0) ? A(0) : t > A(6) ? A(6) : t) * A(1.0 / 6.0);
  }
  OPS_DEVICE A gradient(A g, A z) const {
    return z <= A(-3) ? A(0) : z < A(3) ? g * (z * A(1.0 / 3.0) + A(0.5)) : g;
  }
};

enum class Activation : int64_t { identity, relu, relu6, silu, hardswish };  // as in __init__.py

// Call f with the functor of an activation.
template <typename A, typename F>
void dispatch_activation(int64_t activation, const F& f) {
  constexpr A infinity = std::numeric_limits<A>::infinity();
  switch (static_cast<Activation>(activation)) {
    case Activation::identity: return f(Clamp<A>{-infinity, infinity});
    case Activation::relu: return f(Clamp<A>{A(0), infinity});
    case Activation::relu6: return f(Clamp<A>{A(0), A(6)});
    case Activation::silu: return f(Silu<A>{});
    case Activation::hardswish: return f(Hardswish<A>{});
  }
}

// Check a tensor of one value per channel, in the dtype of the input or of its accumulators.
inline void check_channels(const char* op, const Tensor& input, const char* name,
                           const std::optional<Tensor>& x) {
  if (x) {
    const ScalarType dtype = input.scalar_type(), sums = accumulator_dtype(dtype);
    check_device(op, "input", input, name, *x);
    check_shape(op, name, *x, {input.size(1)});
    check(x->scalar_type() == dtype || x->scalar_type() == sums, op, ": ", name,
          " must have dtype ", dtype_name(dtype), dtype == sums ? "" : " or float32", ", got ",
          dtype_name(x->scalar_type()));
  }
}

inline void check_norm(const char* op, const Tensor& input, const std::optional<Tensor>& weight,
                       const std::optional<Tensor>& bias, int64_t activation, double eps) {
  check(input.dim() == 4, op, ": input must have shape [N, C, H, W], got ", shape{input});
  dispatch_floating(op, input.scalar_type(), [](auto) {});
  check(input.size(0) * input.size(2) * input.size(3) != 1, op,
        ": input must have more than 1 value per channel, got ", shape{input});
  check_channels(op, input, "weight", weight);
  check_channels(op, input, "bias", bias);
  check(0 <= activation && activation <= static_cast<int64_t>(Activation::hardswish), op,
        ": activation must be between 0 and 4, got ", activation);
  check(eps >= 0, op, ": eps must be at least 0, got ", eps);
}

// Return x contiguous in `dtype`: x itself, or a copy.
inline std::optional<Tensor> in_dtype(const std::optional<Tensor>& x, ScalarType dtype) {
  return x ? std::optional(as_contiguous(to_dtype(*x, dtype))) : std::nullopt;
}

template <typename A>
A* mutable_data_or_null(const std::optional<Tensor>& x) {
  return x ? static_cast<A*>(x->data_ptr()) : nullptr;
}

// Return a tensor of one value per channel, uninitialised; zeros for an empty batch.
inline Tensor new_channels(const Tensor& x, NormLayout layout, ScalarType dtype) {
  Tensor sums = empty(x, {layout.channels}, dtype);
  if (layout.count() == 0) {
    torch::stable::zero_(sums);
  }
  return sums;
}

// Copy x back to `to`, unless x is `to`.
inline void copy_back(const std::optional<Tensor>& x, const std::optional<Tensor>& to) {
  if (to && to->get() != x->get()) {
    copy_to(*to, *x);
  }
}

// Return the median of three elements of a channel, the origin of its sums. An outlier as the
// origin would cause cancellation.
template <typename A>
OPS_DEVICE A median(A a, A b, A c) {
  const A low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c < high ? c : high;
}

// Statistics are sums over scaled deviations d = x u − origin, u = kDeviationUnit: Σ d kSumUnit and
// Σ d². The origin is scaled by u, too. The units are powers of two. For finite x, d is finite, and
// so is the first sum of a million elements; the second may overflow.
constexpr float kDeviationUnit = 1.0f / 4, kSumUnit = 1.0f / (1 << 20);

// Return Σ d² − (Σ d)² / n, at least 0; infinite if Σ d² overflows, NaN if Σ d / n is not finite.
template <typename A>
OPS_DEVICE A central_squares(A sum, A mean, A square) {
  if (!(square < std::numeric_limits<A>::infinity())) {
    return square + (mean - mean);
  }
  const A squares = square - sum * mean;
  return squares < A(0) ? A(0) : squares;
}

// Return x if it is finite, else 0.
template <typename A>
OPS_DEVICE A finite_or_zero(A x) {
  return x - x == A(0) ? x : A(0);
}

template <typename A>
struct Moments {
  A mean, squares;  // Σ (x − mean)²

  // From the sums over n elements; `origin` is scaled by kDeviationUnit.
  OPS_DEVICE Moments(A origin, A sum, A square, A n) {
    constexpr A unit = A(1) / kDeviationUnit, sum_unit = A(1) / kSumUnit;
    const A shift = sum / n * sum_unit;
    mean = (origin + shift) * unit;
    squares = central_squares(sum * sum_unit, shift, square) * (unit * unit);
  }
};

// Return Σ g x̂, from Σ g and Σ g (x − mean). If the variance is infinite, x̂ is 0, but the second
// sum may overflow.
template <typename S, typename A>
OPS_DEVICE A weight_gradient(S sum, S product, A rstd) {
  return static_cast<A>(rstd == A(0) ? sum * 0 : product * rstd);
}

// Destination of the batch's statistics. Running statistics (null: none) move by `momentum` towards
// the mean and the unbiased variance.
template <typename A>
struct Statistics {
  A *mean, *rstd, *running_mean, *running_var;
  double momentum, eps;
  int64_t n;  // elements of a channel

  // Store the statistics of a channel, given Σ (x − mean)². If the variance is infinite, store mean
  // 0, so that (x − mean) rstd is 0 and does not overflow.
  OPS_DEVICE void store(int64_t c, double batch_mean, double squares) const {
    rstd[c] = static_cast<A>(1 / std::sqrt(squares / n + eps));
    mean[c] = rstd[c] == A(0) ? A(0) : static_cast<A>(batch_mean);
    if (running_mean) {
      move(running_mean + c, batch_mean);
    }
    if (running_var) {
      move(running_var + c, squares / (n - 1));
    }
  }

 private:
  OPS_DEVICE void move(A* running, double batch) const {
    *running = static_cast<A>((1 - momentum) * *running + momentum * batch);
  }
};

// Return the activations, and the mean and 1 / sqrt(variance + eps) of each channel; update the
// running statistics.
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> batch_norm_act2d(const Tensor& input,
                                                    std::optional<Tensor> weight,
                                                    std::optional<Tensor> bias, int64_t activation,
                                                    double eps, std::optional<Tensor> running_mean,
                                                    std::optional<Tensor> running_var,
                                                    double momentum) {
  const char* op = "batch_norm_act2d";
  check_norm(op, input, weight, bias, activation, eps);
  for (auto* running : {&running_mean, &running_var}) {
    if (*running && (*running)->numel() == 0) {  // as None: see _compiled in __init__.py
      running->reset();
    }
  }
  check_channels(op, input, "running_mean", running_mean);
  check_channels(op, input, "running_var", running_var);
  const ScalarType dtype = accumulator_dtype(input.scalar_type());
  const MemoryFormat format = memory_format(input);
  const Tensor x = as_contiguous(input, format);
  const NormLayout layout = norm_layout(x, format);
  const auto w = in_dtype(weight, dtype), b = in_dtype(bias, dtype);
  const auto new_mean = in_dtype(running_mean, dtype), new_var = in_dtype(running_var, dtype);
  Tensor out = empty(x, {x.sizes().begin(), x.sizes().end()}, format);
  Tensor mean = new_channels(x, layout, dtype), rstd = new_channels(x, layout, dtype);
  dispatch_floating(op, x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    A *const mean_data = mean.mutable_data_ptr<A>(), *const rstd_data = rstd.mutable_data_ptr<A>();
    const Statistics<A> statistics{mean_data,
                                   rstd_data,
                                   mutable_data_or_null<A>(new_mean),
                                   mutable_data_or_null<A>(new_var),
                                   momentum,
                                   eps,
                                   layout.count()};
    const Channels<A> channels{data_or_null<A>(w), data_or_null<A>(b), mean_data, rstd_data};
    if (x.numel() > 0) {
      dispatch_activation<A>(activation, [&](const auto& f) {
        Backend::forward(x, layout, x.const_data_ptr<T>(), statistics, channels, f,
                         out.mutable_data_ptr<T>());
      });
    }
  });
  copy_back(new_mean, running_mean);
  copy_back(new_var, running_var);
  return {out, mean, rstd};
}

// Return the gradients of input, weight and bias; those not in output_mask have shape [0].
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> batch_norm_act2d_backward(
    const Tensor& grad_output, const Tensor& input, std::optional<Tensor> weight,
    std::optional<Tensor> bias, const Tensor& mean, const Tensor& rstd, int64_t activation,
    double eps, std::vector<bool> output_mask) {
  const char* op = "batch_norm_act2d_backward";
  check_norm(op, input, weight, bias, activation, eps);
  check_same(op, "input", input, "grad_output", grad_output);
  check_shape(op, "grad_output", grad_output, {input.sizes().begin(), input.sizes().end()});
  const ScalarType dtype = accumulator_dtype(input.scalar_type());
  for (const auto& [name, x] : {std::pair{"mean", &mean}, std::pair{"rstd", &rstd}}) {
    check_device(op, "input", input, name, *x);
    check_shape(op, name, *x, {input.size(1)});
    check_dtype(op, name, *x, dtype);
  }
  check(output_mask.size() == 3, op, ": output_mask must be three booleans");
  const MemoryFormat format = memory_format(input);
  const Tensor x = as_contiguous(input, format), grad = as_contiguous(grad_output, format);
  const NormLayout layout = norm_layout(x, format);
  const auto w = in_dtype(weight, dtype), b = in_dtype(bias, dtype);
  const Tensor mu = as_contiguous(mean), r = as_contiguous(rstd);
  Tensor grad_input = output_mask[0] ? empty_as(x) : empty(x, {0});
  Tensor grad_weight = new_channels(x, layout, dtype), grad_bias = new_channels(x, layout, dtype);
  dispatch_floating(op, x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const Channels<A> channels{data_or_null<A>(w), data_or_null<A>(b), mu.const_data_ptr<A>(),
                               r.const_data_ptr<A>()};
    if (x.numel() > 0) {
      dispatch_activation<A>(activation, [&](const auto& f) {
        Backend::backward(x, layout, grad.const_data_ptr<T>(), x.const_data_ptr<T>(), channels, f,
                          output_mask[0] ? grad_input.mutable_data_ptr<T>() : nullptr,
                          grad_weight.mutable_data_ptr<A>(), grad_bias.mutable_data_ptr<A>());
      });
    }
  });
  const auto result = [&](bool wanted, const Tensor& gradient, const std::optional<Tensor>& like) {
    return wanted && like ? in_strides_of(*like, to_dtype(gradient, like->scalar_type()))
                          : empty(x, {0});
  };
  return {grad_input, result(output_mask[1], grad_weight, weight),
          result(output_mask[2], grad_bias, bias)};
}

}  // namespace ops
