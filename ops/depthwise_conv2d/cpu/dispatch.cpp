#include <functional>
#include <numeric>

#include "depthwise_conv2d/cpu/plan.h"
#include "depthwise_conv2d/cpu/weight_plan.h"
#include "depthwise_conv2d/op.h"
#define OPS_KERNELS "depthwise_conv2d/cpu/kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::cpu {
namespace {

constexpr int64_t kGrain = 200000;  // multiply-adds: less is not worth waking a thread for
constexpr int64_t kUnits = 64;      // of work on the weight gradient, at most
// Outputs of a pixel that is not worth a copy, and where the first-level cache loses it in between.
constexpr int64_t kMostShared = 9, kMostCrowded = 4;
constexpr int64_t kLongRow = 20;            // of outputs: edges cost less than a copy of it
constexpr int64_t kPage = 4096, kWays = 8;  // a page has one line of each set
constexpr int64_t kCache = kWays * kPage;   // the first level, at least

// Vectors of channels that are computed together: channels-last memory comes in lines of two.
int64_t vectors_of(const DepthwiseGeometry& g) {
  return g.channels_last ? 2 : 1;
}

// Whether pixels of a channels-last image lie so far apart that the sets of the first-level cache
// that they fall into cannot hold what a block reads. Lines that are used at once need to stay only
// for the other taps of their row.
bool crowded(const Axis& vertical, const Axis& horizontal, int64_t pixel_bytes) {
  const int64_t step = horizontal.transposed ? 1 : horizontal.stride;
  const int64_t pixels = (kMostOutputs - 1) * step + horizontal.span();
  const int64_t rows = vector_bytes() < kLine ? vertical.span() : 1;
  return pixels * rows > kWays * (kPage / std::max(kLine, std::gcd(kPage, pixel_bytes)));
}

// An image of one channel has either memory format; planes are faster.
DepthwiseGeometry in_planes(DepthwiseGeometry g) {
  g.channels_last = g.channels_last && g.c > 1;
  return g;
}

// Output rows that are worth a thread, of so many lanes.
int64_t grain(const DepthwiseGeometry& g, int64_t lanes) {
  const double row = 1.0 * g.out_w * g.kernel_h * g.kernel_w * lanes;
  return std::max<int64_t>(1, static_cast<int64_t>(kGrain / row));
}

// [group of channels][tap][lane], from [channel][tap]; idle lanes are zero.
template <typename T>
std::vector<acc_t<T>> pack(const Lanes& lanes, const T* from, int64_t channels, int64_t taps) {
  std::vector<acc_t<T>> packed(lanes.channel_groups * taps * lanes.lanes);
  for (int64_t lane = 0; lane < lanes.images * lanes.channels; ++lane) {
    for (int64_t group = 0; group < lanes.channel_groups; ++group) {
      const int64_t c = group * lanes.channels + lane % lanes.channels;
      for (int64_t tap = 0; from && c < channels && tap < taps; ++tap) {
        packed[(group * taps + tap) * lanes.lanes + lane] = from[c * taps + tap];
      }
    }
  }
  return packed;
}

template <typename T>
void correlate(const DepthwiseGeometry& g, bool transposed, Images<const T> source, const T* weight,
               const T* bias, Images<T> out) {
  using A = acc_t<T>;
  const Axis vertical = vertical_axis(g, transposed), horizontal = horizontal_axis(g, transposed);
  const int64_t taps = g.kernel_h * g.kernel_w;
  const int64_t vector = vector_bytes() / sizeof(A), pixel = vectors_of(g) * vector;
  const bool far = crowded(vertical, horizontal, g.c * sizeof(A));
  const bool direct = std::is_same_v<T, A> && g.channels_last && g.c >= pixel &&
                      taps <= (far ? kMostCrowded : kMostShared) * g.stride_h * g.stride_w;
  // Lines are used at once where they would not stay in the cache for the rest.
  const int64_t vectors = direct && far ? 2 : 1;
  // The weights of two vectors may be too many for the first-level cache.
  const Lanes lanes(g, vertical, direct ? g.c : taps * kLine > kCache ? vector : pixel);
  const Columns columns(horizontal, lanes.lanes, kMostOutputs / vectors, !direct);
  const auto packed = pack(lanes, weight, g.c, taps);
  const auto packed_bias = pack(lanes, bias, g.c, 1);
  const Axis& band = lanes.bands.axis;
  const SourceRows source_rows{direct ? vertical.source_size : band.span(),
                               columns.width * lanes.lanes};
  const Correlation<T> c{g,      lanes,  columns,       source_rows,        vectors,
                         direct, source, packed.data(), packed_bias.data(), out};
  const int64_t ring_size = direct ? 0 : source_rows.count * source_rows.size;
  const int64_t row_size = direct ? 0 : horizontal.out_size * lanes.lanes;
  const int64_t rows = lanes.image_groups * lanes.channel_groups * band.out_size;
  torch::stable::parallel_for(0, rows, grain(g, lanes.lanes), [&](int64_t begin, int64_t end) {
    Workspace<A> workspace(band.taps, ring_size, row_size);
    OPS_CALL(correlate(c, begin, end, workspace));
  });
}

struct Kernels {
  static constexpr bool kTakesAnyPlanes = true;

  template <typename T>
  static void forward(const Tensor&, const DepthwiseGeometry& geometry, const T* x, const T* weight,
                      const T* bias, T* out) {
    const auto g = in_planes(geometry);
    correlate<T>(g, false, input_images(g, x), weight, bias,
                 dense_images(g, out, g.out_h, g.out_w));
  }

  template <typename T>
  static void backward_input(const Tensor&, const DepthwiseGeometry& geometry, const T* grad,
                             const T* weight, T* out) {
    const auto g = in_planes(geometry);
    correlate<T>(g, true, dense_images(g, grad, g.out_h, g.out_w), weight, nullptr,
                 dense_images(g, out, g.h, g.w));
  }

  // Ranges of rows make sums of their own, then these are added in order. The ranges depend on the
  // shape alone, so the result does not depend on the number of threads.
  template <typename T>
  static void backward_weight(const Tensor&, const DepthwiseGeometry& geometry, const T* grad,
                              const T* x, T* grad_weight, T* grad_bias) {
    using A = acc_t<T>;
    const auto g = in_planes(geometry);
    const int64_t vector = vector_bytes() / sizeof(A), pixel = vectors_of(g) * vector;
    const bool direct =
        std::is_same_v<T, A> && x && g.channels_last && g.c >= pixel && g.out_w >= kLongRow &&
        g.kernel_h * g.kernel_w <= kMostCrowded * g.stride_h * g.stride_w &&
        !crowded(vertical_axis(g, false), horizontal_axis(g, false), g.c * sizeof(A));
    const WeightGradient<T> p(g, grad, x, grad_bias,
                              direct ? (g.c + vector - 1) / vector * vector : pixel, direct);
    const int64_t groups = p.lanes.channel_groups,
                  rows = p.lanes.image_groups * p.vertical.out_size;
    const int64_t lanes = p.lanes.lanes, positions = g.kernel_h * g.kernel_w + 1;
    const int64_t thread_rows = grain(g, lanes);
    // Fewer rows, or terms, cost more than they save.
    const int64_t least = std::max(thread_rows, kMostTerms / std::max<int64_t>(1, g.out_w) + 1);
    const int64_t ranges =
        std::clamp<int64_t>(rows / least, 1, std::max<int64_t>(1, kUnits / groups));
    std::vector<double> totals(ranges * groups * positions * lanes);
    const auto work = [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t group = unit % groups, range = unit / groups;
        WeightWorkspace<A> workspace(p, &totals[unit * positions * lanes]);
        OPS_CALL(
            sum_weights(p, group, rows * range / ranges, rows * (range + 1) / ranges, workspace));
      }
    };
    const int64_t unit_grain = thread_rows * ranges / std::max<int64_t>(1, rows) + 1;
    torch::stable::parallel_for(0, groups * ranges, unit_grain, work);
    add_up(p, totals, ranges, grad_weight, grad_bias);
  }

 private:
  // The gradients from totals [range][group][position][lane].
  template <typename T>
  static void add_up(const WeightGradient<T>& p, const std::vector<double>& totals, int64_t ranges,
                     T* grad_weight, T* grad_bias) {
    const int64_t taps = p.g.kernel_h * p.g.kernel_w, positions = taps + 1;
    const int64_t groups = p.lanes.channel_groups, lanes = p.lanes.lanes;
    std::vector<double> sums(lanes);
    for (int64_t i = 0; i < groups * positions; ++i) {
      const int64_t first = i / positions * p.lanes.channels, position = i % positions;
      std::fill(sums.begin(), sums.end(), 0);
      for (int64_t range = 0; range < ranges; ++range) {
        const double* from = &totals[(range * groups * positions + i) * lanes];
        std::transform(sums.begin(), sums.end(), from, sums.begin(), std::plus<>());
      }
      for (int64_t c = first; c < std::min(first + p.lanes.channels, p.g.c); ++c) {
        double total = 0;
        for (int64_t image = 0; image < p.lanes.images; ++image) {
          total += sums[p.slot(image * p.lanes.channels + c - first)];
        }
        if (position == taps && grad_bias) {
          grad_bias[c] = static_cast<T>(total);
        } else if (position < taps && grad_weight) {
          grad_weight[c * taps + position] = static_cast<T>(total);
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
