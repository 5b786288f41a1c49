// Schemas and CPU dispatch of depthwise_conv1d: packed filters, threads, reductions.
#include <ratio>

#include "core/cpu/parallel.h"
#include "depthwise_conv1d/cpu/plan.h"
#define OPS_KERNELS "depthwise_conv1d/cpu/kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::depthwise_conv1d {
namespace {

constexpr int64_t kGrain = 200000;  // minimum multiply-adds per thread
constexpr int64_t kFixedTaps = 8;   // time of loads and stores, in taps
constexpr int64_t kMaxTasks = 64;   // of a weight gradient
const std::vector<int64_t> kOnePhase{0};

// Repack [channel][tap] as [group][tap][lane]. Idle lanes are zero.
template <typename T>
std::vector<acc_t<T>> pack(const Lanes& lanes, const T* from, int64_t channels, int64_t taps) {
  std::vector<acc_t<T>> packed(lanes.groups * taps * lanes.tile);
  for (int64_t c = 0; from && c < channels; ++c) {
    for (int64_t tap = 0; tap < taps; ++tap) {
      packed[(c / lanes.tile * taps + tap) * lanes.tile + c % lanes.tile] = from[c * taps + tap];
    }
  }
  return packed;
}

// Return the minimum number of units per thread.
int64_t unit_grain(const Geometry& g, const Pass& p, const Lanes& lanes) {
  return kGrain / ((g.taps + kFixedTaps) * std::min(p.chunk, p.out_size) * lanes.tile + 1) + 1;
}

// Return the window of a source: in place, or copied to `tile`.
template <typename T>
const acc_t<T>* read(const Source<T>& s, const Lanes& lanes, std::vector<acc_t<T>>* tile) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    if (lanes.tile == 1 && s.step * s.phase_step == 1 && s.low >= 0 && s.low + s.width <= s.size) {
      return s.data + s.low;
    }
  }
  const size_t size = s.phases.size() * s.width * lanes.tile;
  if (tile->size() < size) {
    tile->resize(size);
  }
  OPS_CALL(depthwise_conv1d::gather(s, lanes.tile, tile->data()));
  return tile->data();
}

// Compute a pass. With `silu`: silu(sum), or grad · silu'(sum) if grad is given.
template <typename T>
void correlate(const Geometry& g, bool input_gradient, const Rows<const T>& source, const T* weight,
               const T* bias, bool silu, const Rows<const T>& grad, const Rows<T>& out) {
  using A = acc_t<T>;
  const Lanes lanes(g, A{});
  const Pass p(g, lanes, input_gradient);
  const auto filters = pack(lanes, weight, g.c, g.taps), biases = pack(lanes, bias, g.c, 1);
  if (static_cast<int64_t>(p.phases.size()) < p.out_step) {  // phases without taps
    std::fill_n(out.data, g.n * g.c * p.out_size, T(0));
  }
  const int64_t row = p.chunks * lanes.groups;  // units
  const int64_t out_step = p.out_step * out.t_stride;
  const bool direct = lanes.channels ? out.c_stride == 1 : out_step == 1;
  cpu::parallel_for(0, g.n * row, unit_grain(g, p, lanes), [&](int64_t begin, int64_t end) {
    Chunk chunk;
    std::vector<A> tile, grad_tile;
    std::vector<T> buffer(direct ? 0 : p.chunk * lanes.tile);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = i / row, unit = i % row;
      const int64_t group = lanes.channels ? unit % lanes.groups : unit / p.chunks;
      const int64_t c = group * lanes.tile, channels = std::min(lanes.tile, g.c - c);
      chunk.move_to(lanes.channels ? unit / lanes.groups : unit % p.chunks, p, lanes, lanes.tile);
      Outputs<T> o{read<T>({source.row(n, c), p.source_size, source.t_stride, source.c_stride,
                            channels, chunk.low, chunk.width, p.source_phases, p.source_step},
                           lanes, &tile),
                   &filters[c * g.taps],
                   &biases[c],
                   lanes.tile,
                   channels,
                   silu,
                   nullptr,
                   direct ? out_step : lanes.tile};
      if (grad.data) {
        const int64_t steps = std::min(p.chunk, p.out_size - chunk.begin);
        const int64_t width = steps + lanes.sums / lanes.tile - 1;  // whole vectors
        o.grad = read<T>({grad.row(n, c), p.out_size, grad.t_stride, grad.c_stride, channels,
                          chunk.begin, width, kOnePhase, 1},
                         lanes, &grad_tile);
      }
      for (size_t phase = 0; phase < p.phases.size(); ++phase) {
        T* const to =
            out.row(n, c) + (chunk.begin * p.out_step + p.phases[phase].offset) * out.t_stride;
        o.taps = chunk.taps.data() + (phase ? chunk.tap_ends[phase - 1] : 0);
        o.taps_end = chunk.taps.data() + chunk.tap_ends[phase];
        o.steps = chunk.outputs(p, p.phases[phase]);
        o.out = direct ? to : buffer.data();
        if (lanes.channels) {
          OPS_CALL(depthwise_conv1d::correlate<true>(o));
        } else {
          OPS_CALL(depthwise_conv1d::correlate<false>(o));
        }
        for (int64_t k = 0; !direct && k < channels; ++k) {
          for (int64_t s = 0; s < o.steps; ++s) {
            to[s * out_step + k * out.c_stride] = buffer[s * lanes.tile + k];
          }
        }
      }
    }
  });
}

// Deterministic two-stage reduction: sum ranges of chunks, then add the ranges in order. Ranges
// depend on the shape alone, so the result does not depend on the number of threads.
template <typename T>
void backward_weight(const Geometry& g, const Rows<const T>& grad, const Rows<const T>& x,
                     T* grad_weight, T* grad_bias) {
  using A = acc_t<T>;
  Geometry read_taps = g;
  read_taps.taps = grad_weight ? g.taps : 0;
  const Lanes lanes(g, A{});
  const Pass p(read_taps, lanes, false);
  const int64_t units = g.n * p.chunks, sums = (g.taps + 1) * lanes.sums;  // of a group
  const int64_t ranges = std::clamp<int64_t>(kMaxTasks / std::max<int64_t>(1, lanes.groups), 1,
                                             std::max<int64_t>(1, units));
  std::vector<double> totals(ranges * lanes.groups * sums);
  const int64_t grain = unit_grain(g, p, lanes) * ranges / std::max<int64_t>(1, units) + 1;
  cpu::parallel_for(0, ranges * lanes.groups, grain, [&](int64_t begin, int64_t end) {
    Chunk chunk;
    std::vector<A> tile, grad_tile;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t range = task / lanes.groups, c = task % lanes.groups * lanes.tile;
      const int64_t channels = std::min(lanes.tile, g.c - c);
      double* const total = &totals[task * sums];
      for (int64_t unit = units * range / ranges; unit < units * (range + 1) / ranges; ++unit) {
        const int64_t n = unit / p.chunks;
        chunk.move_to(unit % p.chunks, p, lanes, lanes.sums);
        const int64_t steps = chunk.outputs(p, p.phases[0]);
        const int64_t vector = lanes.sums / lanes.tile;  // steps of a vector
        const Products<A> products{read<T>({x.row(n, c), g.t, x.t_stride, x.c_stride, channels,
                                            chunk.low, chunk.width, p.source_phases, p.source_step},
                                           lanes, &tile),
                                   read<T>({grad.row(n, c), g.out_t, grad.t_stride, grad.c_stride,
                                            channels, chunk.begin, steps, kOnePhase, 1},
                                           lanes, &grad_tile),
                                   lanes.sums,
                                   steps / vector,
                                   steps % vector,
                                   chunk.taps.data(),
                                   static_cast<int64_t>(chunk.taps.size()),
                                   total,
                                   grad_bias ? total + g.taps * lanes.sums : nullptr};
        OPS_CALL(depthwise_conv1d::accumulate(products));
      }
    }
  });
  for (int64_t i = 0; i < g.c * (g.taps + 1); ++i) {
    const int64_t c = i / (g.taps + 1), tap = i % (g.taps + 1);
    double sum = 0;
    for (int64_t range = 0; range < ranges; ++range) {
      const double* const from =
          &totals[(range * lanes.groups + c / lanes.tile) * sums + tap * lanes.sums];
      for (int64_t lane = c % lanes.tile; lane < lanes.sums; lane += lanes.tile) {
        sum += from[lane];
      }
    }
    if (tap == g.taps && grad_bias) {  // the bias follows the last tap
      grad_bias[c] = static_cast<T>(sum);
    } else if (tap < g.taps && grad_weight) {
      grad_weight[c * g.taps + tap] = static_cast<T>(sum);
    }
  }
}

struct Kernels {
  template <typename T>
  static void forward(const Tensor&, const Geometry& g, const T* x, const T* weight, const T* bias,
                      T* out) {
    correlate<T>(g, false, input_rows(g, x), weight, bias, g.silu, {}, dense_rows(g, out, g.out_t));
  }

  template <typename T>
  static void backward(const Tensor& like, const Geometry& g, const T* grad_output, const T* x,
                       const T* weight, const T* bias, const Gradients<T>& to) {
    auto grad = dense_rows(g, grad_output, g.out_t);
    std::optional<Tensor> of_sum;  // gradient of the convolution
    if (g.silu) {
      of_sum = empty(like, {g.n, g.c, g.out_t}, g.channels_last);
      const auto out = dense_rows(g, of_sum->mutable_data_ptr<T>(), g.out_t);
      correlate<T>(g, false, input_rows(g, x), weight, bias, true, grad, out);
      grad.data = out.data;
    }
    if (to.input) {
      correlate<T>(g, true, grad, weight, nullptr, false, {}, dense_rows(g, to.input, g.t));
    }
    if (to.weight || to.bias) {
      backward_weight(g, grad, input_rows(g, x), to.weight, to.bias);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def(
      "depthwise_conv1d(Tensor input, Tensor weight, Tensor? bias, int stride, int[2] padding, "
      "int dilation, bool silu) -> Tensor");
  m.def(
      "depthwise_conv1d_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor? bias, "
      "int stride, int[2] padding, int dilation, bool silu, bool[3] output_mask) "
      "-> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  m.impl("depthwise_conv1d", TORCH_BOX(&forward<Kernels>));
  m.impl("depthwise_conv1d_backward", TORCH_BOX(&backward<Kernels>));
}

}  // namespace ops::depthwise_conv1d
