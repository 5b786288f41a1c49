// Schemas and CPU dispatch of depthwise convolution: plans, packed filters, threads.
#include <functional>
#include <numeric>

#include "core/cpu/parallel.h"
#include "depthwise_conv2d/cpu/plan.h"
#include "depthwise_conv2d/cpu/weight_plan.h"
#include "depthwise_conv2d/op.h"
#define OPS_KERNELS "depthwise_conv2d/cpu/kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::depthwise_conv2d {
namespace {

constexpr int64_t kGrain = 200000;  // minimum multiply-adds per thread
constexpr int64_t kMaxTasks = 64;   // of a weight gradient
// Maximum reuse of channels-last sources that are read in place, not copied to the ring. Reuse is
// the number of outputs that read a source pixel: taps / (vertical stride · horizontal stride).
// With cache conflicts: kMaxConflictReuse; the weight gradient never reads in place.
constexpr int64_t kMaxReuse = 9, kMaxConflictReuse = 4;
constexpr int64_t kWayBytes = 4096, kWays = 8;  // smallest L1 data cache
constexpr int64_t kL1Bytes = kWays * kWayBytes;

// Return the vectors per group of lanes. NCHW: one. Channels-last: two, which are a cache line of a
// pixel (32 and 64 bits with AVX2, 16 bits with AVX-512).
int64_t vectors_of(const Geometry& g) {
  return g.channels_last ? 2 : 1;
}

// Channels-last pixels a multiple of 4 KB / n apart (n = 1, 2, 4, … 64) map to n sets of the L1
// cache. Return whether a block rereads more pixels than these sets have lines. If a load is a
// whole line, only the taps of one row reread it; otherwise the next vector of channels rereads the
// lines of all rows.
bool has_cache_conflicts(const Axis& vertical, const Axis& horizontal, int64_t pixel_bytes,
                         int64_t load_bytes) {
  const int64_t step = horizontal.transposed ? 1 : horizontal.stride;
  const int64_t pixels = (kMaxOutputs - 1) * step + horizontal.span();
  const int64_t rows = load_bytes < kCacheLine ? vertical.span() : 1;
  return pixels * rows >
         kWays * (kWayBytes / std::max(kCacheLine, std::gcd(kWayBytes, pixel_bytes)));
}

// Return the minimum output rows per thread.
int64_t row_grain(const Geometry& g, int64_t lanes) {
  const double row = 1.0 * g.out_w * g.kernel_h * g.kernel_w * lanes;
  return std::max<int64_t>(1, static_cast<int64_t>(kGrain / row));
}

// Repack [channel][tap] as [channel group][tap][lane]. Idle lanes are zero.
template <typename T>
std::vector<acc_t<T>> pack_channels(const LaneLayout& lanes, const T* from, int64_t channels,
                                    int64_t taps) {
  std::vector<acc_t<T>> packed(lanes.channel_groups * taps * lanes.count);
  for (int64_t lane = 0; lane < lanes.images * lanes.channels; ++lane) {
    for (int64_t group = 0; group < lanes.channel_groups; ++group) {
      const int64_t c = group * lanes.channels + lane % lanes.channels;
      for (int64_t tap = 0; from && c < channels && tap < taps; ++tap) {
        packed[(group * taps + tap) * lanes.count + lane] = from[c * taps + tap];
      }
    }
  }
  return packed;
}

template <typename T>
void correlate(const Geometry& g, bool transposed, ImageTensor<const T> source, const T* weight,
               const T* bias, ImageTensor<T> out) {
  using A = acc_t<T>;
  const Axis vertical = vertical_axis(g, transposed), horizontal = horizontal_axis(g, transposed);
  const int64_t taps = g.kernel_h * g.kernel_w;
  const int64_t vector = cpu::vector_bytes() / sizeof(A), group_lanes = vectors_of(g) * vector;
  const bool conflicts =
      has_cache_conflicts(vertical, horizontal, g.c * sizeof(T), vector * sizeof(T));
  // 16 bits: converted at each load, which pays with AVX-512.
  const bool in_place =
      (std::is_same_v<T, A> || cpu::vector_bytes() == kCacheLine) && g.channels_last &&
      g.c >= group_lanes &&
      taps <= (conflicts ? kMaxConflictReuse : kMaxReuse) * g.stride_h * g.stride_w;
  // With conflicts, consume a cache line at once: two vectors per block, one with AVX-512.
  const int64_t vectors = in_place && conflicts && cpu::vector_bytes() < kCacheLine ? 2 : 1;
  // One vector of lanes if the weights of two would exceed the L1 cache.
  const int64_t ring_lanes = taps * kCacheLine > kL1Bytes ? vector : group_lanes;
  const LaneLayout lanes(g, vertical, in_place ? g.c : ring_lanes);
  const RowPlan row_plan(horizontal, lanes.count, kMaxOutputs / vectors, !in_place);
  const auto packed = pack_channels(lanes, weight, g.c, taps);
  const auto packed_bias = pack_channels(lanes, bias, g.c, 1);
  const Axis& band = lanes.bands.axis;
  const SourceRows source_rows{in_place ? vertical.source_size : band.span(),
                               row_plan.width * lanes.count};
  const Correlation<T> c{g,        lanes,  row_plan,      source_rows,        vectors,
                         in_place, source, packed.data(), packed_bias.data(), out};
  const int64_t ring_size = in_place ? 0 : source_rows.count * source_rows.size;
  const int64_t row_size = in_place ? 0 : horizontal.out_size * lanes.count;
  const int64_t rows = lanes.image_groups * lanes.channel_groups * band.out_size;
  cpu::parallel_for(0, rows, row_grain(g, lanes.count), [&](int64_t begin, int64_t end) {
    Workspace<A> workspace(band.taps, ring_size, row_size);
    OPS_CALL(depthwise_conv2d::correlate(c, begin, end, workspace));
  });
}

struct Kernels {
  static constexpr bool kReadsStridedPlanes = true;

  template <typename T>
  static void forward(const Tensor&, const Geometry& g, const T* x, const T* weight, const T* bias,
                      T* out) {
    correlate<T>(g, false, input_tensor(g, x), weight, bias,
                 dense_tensor(g, out, g.out_h, g.out_w));
  }

  template <typename T>
  static void backward(const Tensor&, const Geometry& g, const T* grad, const T* x, const T* weight,
                       const Gradients<T>& to) {
    if (to.input) {
      correlate<T>(g, true, dense_tensor(g, grad, g.out_h, g.out_w), weight, nullptr,
                   dense_tensor(g, to.input, g.h, g.w));
    }
    if (to.weight || to.bias) {
      backward_weight(g, grad, x, to.weight, to.bias);
    }
  }

 private:
  // Deterministic two-stage reduction: sum ranges of rows, then add the ranges in order. Ranges
  // depend on the shape alone, so the result does not depend on the number of threads.
  template <typename T>
  static void backward_weight(const Geometry& g, const T* grad, const T* x, T* grad_weight,
                              T* grad_bias) {
    using A = acc_t<T>;
    const int64_t vector = cpu::vector_bytes() / sizeof(A), group_lanes = vectors_of(g) * vector;
    const bool in_place = std::is_same_v<T, A> && x && g.channels_last && g.c >= group_lanes &&
                          g.kernel_h * g.kernel_w <= kMaxReuse * g.stride_h * g.stride_w &&
                          !has_cache_conflicts(vertical_axis(g, false), horizontal_axis(g, false),
                                               g.c * sizeof(A), cpu::vector_bytes());
    const WeightGradient<T> p(g, grad, x, grad_bias,
                              in_place ? (g.c + vector - 1) / vector * vector : group_lanes,
                              in_place);
    const int64_t groups = p.lanes.channel_groups,
                  rows = p.lanes.image_groups * p.vertical.out_size;
    const int64_t lanes = p.lanes.count, sums_per_channel = g.kernel_h * g.kernel_w + 1;
    const int64_t thread_rows = row_grain(g, lanes);
    const int64_t min_rows = std::max(thread_rows, kFlushTerms / std::max<int64_t>(1, g.out_w) + 1);
    const int64_t ranges =
        std::clamp<int64_t>(rows / min_rows, 1, std::max<int64_t>(1, kMaxTasks / groups));
    std::vector<double> totals(ranges * groups * sums_per_channel * lanes);
    const auto work = [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t group = task % groups, range = task / groups;
        WeightWorkspace<A> workspace(p, &totals[task * sums_per_channel * lanes]);
        OPS_CALL(depthwise_conv2d::accumulate_weight_gradient(
            p, group, rows * range / ranges, rows * (range + 1) / ranges, workspace));
      }
    };
    const int64_t task_grain = thread_rows * ranges / std::max<int64_t>(1, rows) + 1;
    cpu::parallel_for(0, groups * ranges, task_grain, work);
    reduce_totals(p, totals, ranges, grad_weight, grad_bias);
  }

  // Reduce totals [range][group][tap, bias][lane] over ranges and images to the gradients.
  template <typename T>
  static void reduce_totals(const WeightGradient<T>& p, const std::vector<double>& totals,
                            int64_t ranges, T* grad_weight, T* grad_bias) {
    const int64_t taps = p.g.kernel_h * p.g.kernel_w, sums_per_channel = taps + 1;
    const int64_t groups = p.lanes.channel_groups, lanes = p.lanes.count;
    std::vector<double> sums(lanes);
    for (int64_t i = 0; i < groups * sums_per_channel; ++i) {
      const int64_t first = i / sums_per_channel * p.lanes.channels, tap = i % sums_per_channel;
      std::fill(sums.begin(), sums.end(), 0);
      for (int64_t range = 0; range < ranges; ++range) {
        const double* from = &totals[(range * groups * sums_per_channel + i) * lanes];
        std::transform(sums.begin(), sums.end(), from, sums.begin(), std::plus<>());
      }
      for (int64_t c = first; c < std::min(first + p.lanes.channels, p.g.c); ++c) {
        double total = 0;
        for (int64_t image = 0; image < p.lanes.images; ++image) {
          total += sums[p.sum_index(image * p.lanes.channels + c - first)];
        }
        if (tap == taps && grad_bias) {  // the bias follows the last tap
          grad_bias[c] = static_cast<T>(total);
        } else if (tap < taps && grad_weight) {
          grad_weight[c * taps + tap] = static_cast<T>(total);
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
  m.impl("depthwise_conv2d", TORCH_BOX(&forward<Kernels>));
  m.impl("depthwise_conv2d_backward", TORCH_BOX(&backward<Kernels>));
}

}  // namespace ops::depthwise_conv2d
