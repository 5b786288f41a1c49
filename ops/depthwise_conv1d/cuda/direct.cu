// direct: any stride, dilation, size and dtype, both layouts. Inputs come from the L1 cache.
//
//   thread:  one output, in the order of memory; only taps on inputs, none on padding
//
// Weight gradient
//   block:   one channel (planes) or up to 32 (channels-last), a split of (n, t)
//   thread:  2 or 8 sums: adjacent taps, after the last one the bias
#include <numeric>

#include "core/choose.h"
#include "depthwise_conv1d/cuda/split.cuh"

namespace ops::depthwise_conv1d {
namespace {

constexpr int kDirectThreads = 256, kMostSums = 8;

// Output positions: [N, C, T] or [N, T, C], in the order of memory.
template <typename Division>
struct Outputs {
  int64_t count;
  Division inner, outer;  // sizes of the two inner dimensions
};

// Taps of an output: k, k + step, …, which read every speed-th input.
template <typename Division>
struct TapSteps {
  int64_t step, speed;  // step: 1, or that of a transposed convolution
  Division by_stride, by_step, by_speed;
};

template <typename T, typename Division>
__global__ void __launch_bounds__(kDirectThreads)
    direct_kernel(const Convolution<T> p, const Rows<const T> weights,
                  const Outputs<Division> outputs, const TapSteps<Division> steps) {
  using Acc = acc_t<T>;
  using Index = std::make_signed_t<typename Division::Index>;
  const Index channels = p.c, out_t = p.out_t, in_t = p.in_t, taps = p.taps;
  const Index stride = p.stride, padding = p.padding, dilation = p.dilation;
  const Index step = steps.step, speed = steps.speed, at_step = p.transposed ? -speed : speed;
  const Index slide = stride - (dilation - steps.by_stride(dilation) * stride);  // −dilation, mod
  const int64_t grid = static_cast<int64_t>(gridDim.x) * kDirectThreads;
  for (int64_t offset = static_cast<int64_t>(blockIdx.x) * kDirectThreads + threadIdx.x;
       offset < outputs.count; offset += grid) {
    const Index rest = outputs.inner(offset), image = outputs.outer(rest);
    const Index inner = static_cast<Index>(offset) - rest * (p.channels_last ? channels : out_t);
    const Index middle = rest - image * (p.channels_last ? out_t : channels);
    const Index channel = p.channels_last ? inner : middle, t = p.channels_last ? middle : inner;
    // The output applies `all` taps k, k + step, … at `at`, at + at_step, …
    Index k = 0, at = t * stride - padding, all = taps;
    if (p.transposed) {
      const Index from = t + padding;
      Index rest = from - steps.by_stride(from) * stride;  // (from − k dilation) mod stride
      for (; k < step && rest != 0; ++k) {
        rest = rest + slide < stride ? rest + slide : rest + slide - stride;
      }
      const Index distance = from - k * dilation;
      const Index inputs = steps.by_stride(distance < 0 ? -distance : distance);
      at = k == step ? -1 : distance < 0 ? -inputs : inputs;
      all = k < taps ? steps.by_step(taps - k + step - 1) : 0;
    }
    // Skip taps on padding.
    const Index behind = p.transposed ? at - (in_t - 1) : -at;  // distance to the first input
    const Index ahead = p.transposed ? at : in_t - 1 - at;      // distance to the last input
    const Index skipped = behind > 0 ? steps.by_speed(behind + speed - 1) : 0;
    const Index reads = ahead >= 0 ? steps.by_speed(ahead) + 1 : 0;
    const Index count = min(all, reads) - skipped;
    k += skipped * step, at += skipped * at_step;

    const T* x = p.in.row(image, channel) + at * p.in.t_stride;
    const T* weight = weights.row(0, channel) + p.tap(k) * weights.t_stride;
    const int64_t x_step = at_step * p.in.t_stride;
    const int64_t weight_step = (p.flip ? -step : step) * weights.t_stride;
    Acc sum = p.bias_of(channel);
#pragma unroll 8
    for (Index i = 0; i < count; ++i, x += x_step, weight += weight_step) {
      sum += static_cast<Acc>(*weight) * static_cast<Acc>(*x);
    }
    const Acc g = p.grad ? static_cast<Acc>(p.grad[offset]) : Acc(0);
    p.out.data[offset] = static_cast<T>(p.activate(sum, g));
  }
}

// Transpose [C, K] to [K, C].
template <typename T>
__global__ void __launch_bounds__(kDirectThreads)
    transpose_kernel(const T* from, T* to, int64_t channels, int64_t taps) {
  const int64_t grid = static_cast<int64_t>(gridDim.x) * kDirectThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kDirectThreads + threadIdx.x;
       i < channels * taps; i += grid) {
    to[i] = from[i % channels * taps + i / channels];
  }
}

template <typename T, typename Division, int kSums>
__global__ void __launch_bounds__(kDirectThreads)
    direct_weight_gradient_kernel(const WeightGradient<T> p, const Division by_out_t,
                                  int64_t length) {
  using Acc = acc_t<T>;
  using Index = std::make_signed_t<typename Division::Index>;
  __shared__ Acc shared[kDirectThreads / 2 * kSums];
  const int lanes = blockDim.x, groups = blockDim.y;
  const Index out_t = p.out_t, in_t = p.in_t, taps = p.taps, dilation = p.dilation;
  const Index stride = p.stride, padding = p.padding;
  const int64_t positions = p.n * p.out_t, first = blockIdx.y * length;
  const int64_t last = first + length < positions ? first + length : positions;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * lanes + threadIdx.x;
  const int64_t step = p.dilation * p.in.t_stride;
  const Index sums = p.grad_bias ? taps + 1 : taps;
  for (Index k0 = blockIdx.z * kSums; k0 < sums; k0 += gridDim.z * kSums) {
    Acc sum[kSums][1] = {};
    for (int64_t i = first + threadIdx.y; channel < p.c && i < last; i += groups) {
      const Index image = by_out_t(i), t = static_cast<Index>(i) - image * out_t;
      const Acc g = static_cast<Acc>(p.grad.row(image, channel)[t * p.grad.t_stride]);
      Index at = t * stride - padding + k0 * dilation;
      const T* x = p.in.row(image, channel) + at * p.in.t_stride;
#pragma unroll
      for (int j = 0; j < kSums; ++j, at += dilation, x += step) {
        const bool reads = k0 + j < taps && is_inside(at, in_t);
        sum[j][0] += g * (reads ? static_cast<Acc>(*x) : Acc(k0 + j == taps));
      }
    }
    if (lanes == 1) {
      reduce_warp(sum);
      const int warp = threadIdx.y / kWarp, warps = groups / kWarp;
      reduce_block(sum, shared, 0, 1, threadIdx.y % kWarp == 0 ? warp : warps, warps);
    } else {
      reduce_block(sum, shared, threadIdx.x, lanes, threadIdx.y, groups);
    }
    for (int i = flat_thread(); i < lanes * kSums; i += kDirectThreads) {
      const int64_t of = static_cast<int64_t>(blockIdx.x) * lanes + i / kSums;
      if (of < p.c && k0 + i % kSums < sums) {
        p.put(blockIdx.y, of, k0 + i % kSums, shared[i]);
      }
    }
    __syncthreads();
  }
}

// Call f with a type of division of indices: 32-bit if all indices are smaller.
template <typename P, typename F>
void dispatch_division(const P& p, const F& f) {
  const int64_t longest = std::max(p.in_t, p.out_t), pad = std::abs(p.padding);
  const auto product = [](std::initializer_list<int64_t> factors) {
    double result = 1;
    for (const int64_t factor : factors) {
      result *= static_cast<double>(factor);
    }
    return result;
  };
  constexpr double kLimit = kMostFastDivided / 4;
  if (product({p.n, p.c, longest}) < kLimit && product({longest, p.stride}) + pad < kLimit &&
      product({p.taps + kMostSums + p.stride, p.dilation}) < kLimit) {
    f(type_tag<FastDivide>{});
  } else {
    f(type_tag<Divide>{});
  }
}

}  // namespace

template <typename T>
void direct(const Convolution<T>& p, const Run& run) {
  // Threads along the channels read the weights [C, K] at a stride: transpose large filters.
  constexpr int64_t kMinTaps = 16, kMinPositions = 32, kMaxBlocks = int64_t{1} << 30;
  std::optional<Tensor> transposed;
  Rows<const T> weights{p.weight, 0, p.taps, 1};
  if (p.channels_last && p.taps >= kMinTaps && p.n * p.out_t >= kMinPositions) {
    const int64_t count = p.c * p.taps;
    transposed = empty(run.like, {count});
    T* const to = transposed->mutable_data_ptr<T>();
    launch_kernel(transpose_kernel<T>, std::min(ceil_div(count, kDirectThreads), kMaxBlocks),
                  kDirectThreads, 0, run.stream, p.weight, to, p.c, p.taps);
    weights = {to, 0, 1, p.c};
  }
  dispatch_division(p, [&](auto tag) {
    using Division = typename decltype(tag)::type;
    const int64_t inner = p.channels_last ? p.c : p.out_t, outer = p.channels_last ? p.out_t : p.c;
    const Outputs<Division> outputs{p.n * p.c * p.out_t, Division(inner), Division(outer)};
    const int64_t common = std::gcd(p.stride, p.dilation);
    const int64_t step = p.transposed ? p.stride / common : 1;
    const int64_t speed = p.transposed ? p.dilation / common : p.dilation;
    const TapSteps<Division> steps{step, speed, Division(p.stride), Division(step),
                                   Division(speed)};
    launch_kernel(direct_kernel<T, Division>,
                  std::min(ceil_div(outputs.count, kDirectThreads), kMaxBlocks), kDirectThreads, 0,
                  run.stream, p, weights, outputs, steps);
  });
}

// Sums per thread, and splits of the positions.
struct DirectPlan {
  int sums;
  int64_t splits;
};

// Return the plan of the least time, in steps of a thread, which have the latency of loads.
// `tiles`: blocks along the channels; `groups`: of a block along the positions.
inline DirectPlan plan_direct(int64_t tiles, int64_t sums, int64_t positions, int64_t groups,
                              int64_t most_splits) {
  constexpr int64_t kBlocksPerMultiprocessor = 16;
  constexpr double kStage2 = 4, kSplitsPerStep = 64;  // of the second stage
  const int64_t multiprocessors = Device::attribute(cudaDevAttrMultiProcessorCount);
  Cheapest<DirectPlan> plans;
  for (const int each : {kMostSums, 2}) {
    const int64_t blocks = tiles * ceil_div(sums, each);
    const int64_t most = std::min({most_splits, ceil_div(positions, groups),
                                   multiprocessors * kBlocksPerMultiprocessor / blocks});
    for (int64_t splits = 1; splits <= std::max<int64_t>(1, most); splits *= 2) {
      const double steps = ceil_div(positions, splits * groups);
      const double issue = static_cast<double>(blocks * splits) / multiprocessors * (3 + each) / 32;
      const double reduction = splits == 1 ? 0 : kStage2 + splits / kSplitsPerStep;
      plans.offer({each, splits}, steps * (1 + issue) + each / 8.0 + reduction);
    }
  }
  return *plans.best();
}

template <typename T>
void direct_weight_gradient(const WeightGradient<T>& p, const Run& run) {
  const int lanes = p.channels_last ? lanes_of(p.c, 1) : 1, groups = kDirectThreads / lanes;
  const int64_t tiles = ceil_div(p.c, lanes), positions = p.n * p.out_t;
  const int64_t sums = p.taps + (p.grad_bias ? 1 : 0);
  const int64_t most_splits = p.c * (p.taps + 1) < int64_t{1} << 31 ? kMaxGridY : 1;
  const DirectPlan plan = plan_direct(tiles, sums, positions, groups, most_splits);
  const int64_t length = ceil_div(positions, plan.splits), splits = ceil_div(positions, length);
  const dim3 blocks(tiles, splits, std::min(ceil_div(sums, plan.sums), kMaxGridY));
  dispatch_division(p, [&](auto tag) {
    using Division = typename decltype(tag)::type;
    reduce_splits(p, run, splits, [&](const WeightGradient<T>& split) {
      launch_kernel(plan.sums == 2 ? direct_weight_gradient_kernel<T, Division, 2>
                                   : direct_weight_gradient_kernel<T, Division, kMostSums>,
                    blocks, dim3(lanes, groups), 0, run.stream, split, Division(p.out_t), length);
    });
  });
}

#define OPS_INSTANTIATE(T)                                 \
  template void direct(const Convolution<T>&, const Run&); \
  template void direct_weight_gradient(const WeightGradient<T>&, const Run&);
OPS_INSTANTIATE(double)
OPS_INSTANTIATE(float)
OPS_INSTANTIATE(BFloat16)
OPS_INSTANTIATE(Half)
#undef OPS_INSTANTIATE

}  // namespace ops::depthwise_conv1d
