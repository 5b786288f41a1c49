// direct_l1_runtime, weight and bias gradient: stage 1 of a two-stage reduction.
//
//      grad_output             input                       sums
//      ┌───────────┐          ┌─────────────────┐         ┌───────┐
//      │ g (1 of a │   × each │ x   x   x       │   ──►   │ tile  │  + warps, + block, + splits
//      │  split)   │          │ x   x   x  taps │         │ (3×3) │
//      └───────────┘          └─────────────────┘         └───────┘
//
//   block:   kTile × kTile taps of lanes × V channels, over one split of the outputs
//   shared:  partial sums of threads (NHWC) or warps (NCHW), for the reduction over the block
//   thread:  kTile² taps and the bias of V channels, accumulated over every groups-th output
#include "core/choose.h"
#include "depthwise_conv2d/cuda/general/direct_l1_runtime.cuh"
#include "depthwise_conv2d/cuda/weight_reduction.cuh"

namespace ops::cuda {
namespace {

template <typename Index>
struct GradientParams {
  Index in_h, in_w, out_h, out_w;
  Index kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  DirectStrides<Index> in, out;
  RuntimeThreads threads;
  int channels, chunks;
  int tiles_w, tiles;    // tiles of taps: along the filter's width; total
  Index outputs, share;  // outputs of a channel over all images; of one split
  DivideBy<Index> by_out_w, by_out_h;
};

// The bound on blocks per SM leaves enough registers to load all inputs of an iteration at once.
template <int kTile, int V, typename Index, typename T>
__global__ void __launch_bounds__(kRuntimeThreads, 2)
    direct_runtime_weight_gradient_kernel(GradientParams<Index> params, const T* __restrict__ in,
                                          const T* __restrict__ grad,
                                          WeightReduction<T> reduction) {
  using Acc = acc_t<T>;
  constexpr int kTaps = kTile * kTile, kSums = kTaps + 1;
  constexpr int kUnroll = kTile == 1 ? 4 : kTile == 2 ? 2 : 1;  // outputs per iteration
  extern __shared__ __align__(16) unsigned char memory[];
  const RuntimeThreads& threads = params.threads;
  const int chunk = blockIdx.x % params.chunks, rest = blockIdx.x / params.chunks;
  const int tile = rest % params.tiles, split = rest / params.tiles;
  const int first_a = tile / params.tiles_w * kTile, first_b = tile % params.tiles_w * kTile;
  const int first = chunk * threads.lanes * V;
  const int channel = first + threads.lane() * V;
  const Index begin = split * params.share, end = min(begin + params.share, params.outputs);
  const Index next_tap_h = params.dilation_h * params.in.h;
  const Index next_tap_w = params.dilation_w * params.in.w;
  // Taps of the tile that lie within the filter; none if only the bias gradient is wanted.
  const int tile_h = reduction.taps ? min(Index{kTile}, params.kernel_h - first_a) : 0;
  const int tile_w = min(Index{kTile}, params.kernel_w - first_b);
  const Index base_h = first_a * params.dilation_h - params.padding_h;
  const Index base_w = first_b * params.dilation_w - params.padding_w;
  in += channel * static_cast<int64_t>(params.in.c);
  grad += channel * static_cast<int64_t>(params.out.c);
  Acc sum[kSums][V] = {};
  for (Index i = begin + threads.group(); channel < params.channels && i < end;
       i += kUnroll * threads.groups) {
    // Zero outside the image: 0 times a non-finite gradient is NaN.
    Vector<T, V> g[kUnroll] = {}, value[kUnroll][kTaps] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Index output = i + u * threads.groups;
      const Index line = params.by_out_w(output), n = params.by_out_h(line);
      const Index row = line - n * params.out_h, col = output - line * params.out_w;
      const Index y = row * params.stride_h + base_h, x = col * params.stride_w + base_w;
      const T* from = in + n * params.in.n + static_cast<int64_t>(y) * params.in.h +
                      static_cast<int64_t>(x) * params.in.w;
      if (output < end) {
        g[u] = load_vector<V>(grad + n * params.out.n + row * params.out.h +
                              static_cast<int64_t>(col) * params.out.w);
      }
#pragma unroll
      for (int a = 0; a < kTile; ++a) {
        const bool row_inside =
            output < end && a < tile_h && is_inside(y + a * params.dilation_h, params.in_h);
#pragma unroll
        for (int b = 0; b < kTile; ++b) {
          if (row_inside && b < tile_w && is_inside(x + b * params.dilation_w, params.in_w)) {
            value[u][a * kTile + b] = load_vector<V>(from + a * next_tap_h + b * next_tap_w);
          }
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kUnroll * V; ++v) {
      const Acc gradient = static_cast<Acc>(g[v / V].lane[v % V]);
      sum[kTaps][v % V] += gradient;
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        sum[k][v % V] += gradient * static_cast<Acc>(value[v / V][k].lane[v % V]);
      }
    }
  }

  Acc* shared = reinterpret_cast<Acc*>(memory);
  const int channels = min(threads.lanes * V, params.channels - first);
  int parts = 1;  // partial sums per channel: NCHW has one per warp
  if (threads.channels_last) {
    reduce_block(sum, shared, threads.lane(), threads.lanes, threads.group(), threads.groups);
  } else {
    trigger_dependent_launch();
    parts = threads.groups / kWarp;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
#pragma unroll
      for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
        sum[i][0] += __shfl_down_sync(~0u, sum[i][0], lanes);
      }
      if (threadIdx.x % kWarp == 0) {
        shared[flat_thread() / kWarp * kSums + i] = sum[i][0];
      }
    }
    __syncthreads();
  }
  BlockSums<T> to(reduction, split, first);
  for (int i = flat_thread(); i < channels * kSums; i += blockDim.x * blockDim.y) {
    const int c = i / kSums, slot = i % kSums;
    const int a = slot / kTile, b = slot % kTile;
    Acc total = shared[c * parts * kSums + slot];
    for (int part = 1; part < parts; ++part) {
      total += shared[(c * parts + part) * kSums + slot];
    }
    if (slot < kTaps && a < tile_h && b < tile_w) {
      to.put(c * (reduction.taps + 1) + (first_a + a) * params.kernel_w + first_b + b, total);
    } else if (slot == kTaps && tile == 0) {
      to.put(c * (reduction.taps + 1) + reduction.taps, total);
    }
  }
}

// Launch plan with tile × tile taps per block.
struct TapTiles {
  RuntimeThreads threads;
  int64_t chunks, turns;  // blocks along channels; outputs per thread before splitting
  int64_t tiles_w, tiles, splits;
  int64_t cost;  // estimated, in multiply-adds of a thread

  TapTiles(const DepthwiseGeometry& g, bool weight, int64_t outputs, int tile, int V)
      : threads(g.channels_last, ceil_div(g.c, V), outputs, kRuntimeThreads),
        chunks(ceil_div(g.c, int64_t{threads.lanes} * V)),
        turns(ceil_div(outputs, threads.groups)),
        tiles_w(weight ? ceil_div(g.kernel_w, tile) : 1),
        tiles(weight ? ceil_div(g.kernel_h, tile) * tiles_w : 1) {
    // Measured on an H200: index arithmetic costs kIndices taps, the block reduction kReduction
    // outputs; up to `few` outputs per thread, a single split is faster than a second stage.
    constexpr int64_t kIndices = 6, kReduction = 8;
    const int64_t few = tile == 1 ? 16 : 4, resident = 4 * Device().multiprocessors;
    splits = turns <= few ? 1 : choose_splits(turns, chunks * tiles, resident, kReduction);
    cost = ceil_div(chunks * tiles * splits, resident) * (ceil_div(turns, splits) + kReduction) *
           (tile * tile + kIndices);
  }
};

// The strides may be those of more channels than c.g has.
template <int kTile, int V, typename Index, typename T>
void launch_gradient(const WeightGradient<T>& c, const DirectStrides<Index>& in,
                     const DirectStrides<Index>& out) {
  const DepthwiseGeometry& g = c.g;
  const int64_t outputs = g.n * g.out_h * g.out_w;
  const TapTiles plan(g, c.grad_weight, outputs, kTile, V);
  const RuntimeThreads& threads = plan.threads;
  const int64_t chunks = plan.chunks, tiles = plan.tiles, splits = plan.splits;
  const int64_t share = ceil_div(plan.turns, splits) * threads.groups;
  // The stride of a single output and the dilation of a single tap are unused; they may overflow.
  const auto stride = [](int64_t s, int64_t out) { return static_cast<Index>(out == 1 ? 1 : s); };
  const auto dilation = [](int64_t d, int64_t k) { return static_cast<Index>(k == 1 ? 1 : d); };
  const GradientParams<Index> params{static_cast<Index>(g.h),
                                     static_cast<Index>(g.w),
                                     static_cast<Index>(g.out_h),
                                     static_cast<Index>(g.out_w),
                                     static_cast<Index>(g.kernel_h),
                                     static_cast<Index>(g.kernel_w),
                                     stride(g.stride_h, g.out_h),
                                     stride(g.stride_w, g.out_w),
                                     static_cast<Index>(g.padding_h),
                                     static_cast<Index>(g.padding_w),
                                     dilation(g.dilation_h, g.kernel_h),
                                     dilation(g.dilation_w, g.kernel_w),
                                     in,
                                     out,
                                     threads,
                                     static_cast<int>(g.c),
                                     static_cast<int>(chunks),
                                     static_cast<int>(plan.tiles_w),
                                     static_cast<int>(tiles),
                                     static_cast<Index>(outputs),
                                     static_cast<Index>(share),
                                     DivideBy<Index>(g.out_w),
                                     DivideBy<Index>(g.out_h)};
  const size_t shared =
      sizeof(acc_t<T>) * reduction_elements(threads.lanes, threads.groups, (kTile * kTile + 1) * V);
  reduce_weights(c, splits, [&](const WeightReduction<T>& reduction) {
    launch_kernel(direct_runtime_weight_gradient_kernel<kTile, V, Index, T>,
                  dim3(splits * chunks * tiles), threads.block(), shared, c.stream, params, c.x,
                  c.grad, reduction);
  });
}

// Call launch_gradient with the tile of the least cost.
template <int V, typename T>
void launch_cheapest(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  const int64_t outputs = g.n * g.out_h * g.out_w;
  const int64_t largest = std::min<int64_t>(V == 1 ? 4 : 3, std::max(g.kernel_h, g.kernel_w));
  Cheapest<int> tiles;
  for (int tile = 1; tile <= largest; ++tile) {
    tiles.offer(tile, TapTiles(g, c.grad_weight, outputs, tile, V).cost);
  }
  const int best = *tiles.best();
  const DirectStrides<> in(g, g.h, g.w), out(g, g.out_h, g.out_w);
  if constexpr (V == 1) {
    if (best == 4) {
      return launch_gradient<4, V>(c, in, out);
    }
  }
  switch (best) {
    case 1: return launch_gradient<1, V>(c, in, out);
    case 2: return launch_gradient<2, V>(c, in, out);
    default: return launch_gradient<3, V>(c, in, out);
  }
}

}  // namespace

template <typename T>
void direct_l1_runtime_weight_gradient(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  if (fits_32_bits(g)) {
    constexpr int kMaxChannels = sizeof(T) == 2 ? 2 : 1;  // per vector
    return dispatch_width<T, kMaxChannels>({c.x, c.grad}, {g.channels_last ? g.c : 1},
                                           [&](auto v) { launch_cheapest<v.value>(c); });
  }
  // Channels are independent: run as many at once as the indices of the sums allow.
  const int64_t taps = g.kernel_h * g.kernel_w, most = kMostSums / (taps + 1);
  check(most > 0, "depthwise_conv2d_backward: on CUDA, weight must have less than 2^30 taps, got ",
        taps);
  const DirectStrides<int64_t> in(g, g.h, g.w), out(g, g.out_h, g.out_w);
  for (int64_t first = 0; first < g.c; first += most) {
    DepthwiseGeometry some = g;
    some.c = std::min(most, g.c - first);
    launch_gradient<1, 1>(
        WeightGradient<T>{some, c.like, c.x + first * in.c, c.grad + first * out.c,
                          c.grad_weight ? c.grad_weight + first * taps : nullptr,
                          c.grad_bias ? c.grad_bias + first : nullptr, c.stream, c.dry_run},
        in, out);
  }
}

#define OPS_INSTANTIATE(T) template void direct_l1_runtime_weight_gradient(const WeightGradient<T>&)
OPS_INSTANTIATE(double);
OPS_INSTANTIATE(float);
OPS_INSTANTIATE(Half);
OPS_INSTANTIATE(BFloat16);
#undef OPS_INSTANTIATE

}  // namespace ops::cuda
