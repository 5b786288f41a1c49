// Batch normalisation with batch statistics, followed by an activation: arguments, memory layout
// and allocation on any device.
#pragma once

#include <optional>
#include <tuple>

#include "batch_norm_act2d/formulas.h"
#include "core/layout.h"

namespace ops::batch_norm_act2d {

inline Layout layout_of(const Tensor& x, bool channels_last) {
  const int64_t n = x.size(0), c = x.size(1), area = x.size(2) * x.size(3);
  return channels_last ? Layout{n * area, c, 1} : Layout{n, c, area};
}

// Check a tensor of one value per channel, in the dtype of the input or of its accumulators.
inline void check_channels(const char* op, const Tensor& input, const char* name,
                           const std::optional<Tensor>& x) {
  if (x) {
    const ScalarType dtype = input.scalar_type(), sums = accumulator_dtype(dtype);
    check_device(op, "input", input, name, *x);
    check(x->dim() == 1 && x->size(0) == input.size(1), op, ": ", name, " must have shape ",
          list{{input.size(1)}}, ", one value per channel of input ", shape{input}, ", got ",
          shape{*x});
    check(x->scalar_type() == dtype || x->scalar_type() == sums, op, ": ", name,
          " must have dtype ", dtype_name(dtype), dtype == sums ? "" : " or float32", ", got ",
          dtype_name(x->scalar_type()));
  }
}

// The checked arguments of both operators.
struct Arguments {
  ScalarType dtype;  // of accumulators
  bool channels_last;
  Tensor x;
  Layout layout;
  std::optional<Tensor> weight, bias;

  Arguments(const char* op, const Tensor& input, const std::optional<Tensor>& given_weight,
            const std::optional<Tensor>& given_bias, int64_t activation, double eps)
      : x(input) {
    check(input.dim() == 4, op, ": input must have shape [N, C, H, W], got ", shape{input});
    dispatch_floating(op, input.scalar_type(), [](auto) {});
    check(input.size(0) * input.size(2) * input.size(3) != 1, op,
          ": input must have more than 1 value per channel, got ", shape{input});
    check_channels(op, input, "weight", given_weight);
    check_channels(op, input, "bias", given_bias);
    check(0 <= activation && activation <= static_cast<int64_t>(Activation::hardswish), op,
          ": activation must be between 0 and 4, got ", activation);
    check(eps >= 0, op, ": eps must be at least 0, got ", eps);
    dtype = accumulator_dtype(input.scalar_type());
    channels_last = is_channels_last(input);
    x = as_contiguous(input, channels_last);
    layout = layout_of(x, channels_last);
    weight = in_dtype(given_weight, dtype);
    bias = in_dtype(given_bias, dtype);
  }

  // Return a tensor of one value per channel, uninitialised; zeros for an empty batch.
  Tensor new_channels() const {
    Tensor values = empty(x, {layout.channels}, dtype);
    if (layout.count() == 0) {
      torch::stable::zero_(values);
    }
    return values;
  }

  // Call f(type_tag of the elements, Channels, activation's functor), unless the input is empty.
  template <typename F>
  void dispatch(int64_t activation, const Tensor& mean, const Tensor& rstd, const F& f) const {
    if (x.numel() == 0) {
      return;
    }
    dispatch_floating("batch_norm_act2d", x.scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      using A = acc_t<T>;
      const Channels<A> channels{data_or_null<A>(weight), data_or_null<A>(bias),
                                 mean.const_data_ptr<A>(), rstd.const_data_ptr<A>()};
      dispatch_activation<T>(activation, [&](const auto& functor) { f(tag, channels, functor); });
    });
  }
};

// Return the activations, and the mean and 1 / sqrt(variance + eps) of each channel; update the
// running statistics.
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& input, std::optional<Tensor> weight,
                                           std::optional<Tensor> bias, int64_t activation,
                                           double eps, std::optional<Tensor> running_mean,
                                           std::optional<Tensor> running_var, double momentum) {
  const char* op = "batch_norm_act2d";
  const Arguments a(op, input, weight, bias, activation, eps);
  check_channels(op, input, "running_mean", running_mean);
  check_channels(op, input, "running_var", running_var);
  const auto new_mean = in_dtype(running_mean, a.dtype), new_var = in_dtype(running_var, a.dtype);
  const Tensor mean = a.new_channels(), rstd = a.new_channels();
  const Tensor out = empty(a.x, {input.sizes().begin(), input.sizes().end()}, a.channels_last);
  a.dispatch(activation, mean, rstd, [&](auto tag, const auto& channels, const auto& f) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const auto data = [](const std::optional<Tensor>& x) {
      return x ? x->mutable_data_ptr<A>() : nullptr;
    };
    const T* x = a.x.const_data_ptr<T>();
    const Statistics<A, T> statistics{
        x, a.layout, data(mean), data(rstd), data(new_mean), data(new_var), momentum, eps};
    Backend::run(a.x, a.layout, statistics, Normalise<A, std::decay_t<decltype(f)>>{channels, f},
                 out.mutable_data_ptr<T>(), x);
  });
  for (const auto& [from, to] : {std::pair{&new_mean, &running_mean}, {&new_var, &running_var}}) {
    if (*to && (*to)->get() != (*from)->get()) {
      copy_to(**to, **from);
    }
  }
  return {out, mean, rstd};
}

// Return the gradients of input, weight and bias; those not in output_mask have shape [0].
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& input,
                                            std::optional<Tensor> weight,
                                            std::optional<Tensor> bias, const Tensor& mean,
                                            const Tensor& rstd, int64_t activation, double eps,
                                            std::vector<bool> output_mask) {
  const char* op = "batch_norm_act2d_backward";
  const Arguments a(op, input, weight, bias, activation, eps);
  check_same(op, "input", input, "grad_output", grad_output);
  check_shape(op, "grad_output", grad_output, {input.sizes().begin(), input.sizes().end()});
  for (const auto& [name, x] : {std::pair{"mean", &mean}, {"rstd", &rstd}}) {
    check_device(op, "input", input, name, *x);
    check_shape(op, name, *x, {input.size(1)});
    check_dtype(op, name, *x, a.dtype);
  }
  check(output_mask.size() == 3, op, ": output_mask must be three booleans");
  const Tensor grad = as_contiguous(grad_output, a.channels_last);
  const Tensor grad_input = output_mask[0] ? empty_as(a.x) : empty(a.x, {0});
  const Tensor grad_weight = a.new_channels(), grad_bias = a.new_channels();
  const Tensor mu = as_contiguous(mean), r = as_contiguous(rstd);
  a.dispatch(activation, mu, r, [&](auto tag, const auto& channels, const auto& f) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    using F = std::decay_t<decltype(f)>;
    A *const by_weight = grad_weight.mutable_data_ptr<A>(), *const by_bias =
                                                                grad_bias.mutable_data_ptr<A>();
    Backend::run(a.x, a.layout, Gradients<A, F>{channels, f, by_weight, by_bias},
                 InputGradient<A, F>{channels, f, by_weight, by_bias, A(1) / A(a.layout.count())},
                 data_unless_empty<T>(grad_input), a.x.const_data_ptr<T>(),
                 grad.const_data_ptr<T>());
  });
  const auto result = [&](bool wanted, const Tensor& gradient, const std::optional<Tensor>& like) {
    return wanted && like ? in_strides_of(*like, to_dtype(gradient, like->scalar_type()))
                          : empty(a.x, {0});
  };
  return {grad_input, result(output_mask[1], grad_weight, weight),
          result(output_mask[2], grad_bias, bias)};
}

}  // namespace ops::batch_norm_act2d
