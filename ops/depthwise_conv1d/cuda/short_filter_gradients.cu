// short_filter: all gradients of filters with 2 to 7 taps in one pass, stride 1, both layouts, with
// that of the activation. Accumulates in float32; inputs come from the L1 cache.
//
// With i = t − padding, the gradient of the pre-activation is h[i] = g[t] · silu'(Σ_k w[k] x[i +
// k]),
//   grad_input[i] = Σ_k w[k] h[i − k],      grad_weight[k] = Σ_i h[i] x[i + k].
//
// Planes (dilation 1)
//   block:   a split of a channel's rows
//   thread:  16 bytes of adjacent grad_input at a time (float32 with 6 and 7 taps: 32); h of the
//            K − 1 elements after them comes from the next lane, so that the last lane writes
//            nothing
// Channels-last (any dilation)
//   block:   up to 32 threads along the channels × units of T
//   thread:  2 adjacent channels; marches along T with the last K − 1 inputs and h in registers
#include "depthwise_conv1d/cuda/split.cuh"

namespace ops::depthwise_conv1d {
namespace {

constexpr int kGradientsThreads = 128;
constexpr int kLaneTiles = kWarp - 1;  // tiles of planes per warp at a time

template <typename T, int K, Alignment kAlignment>
__global__ void __launch_bounds__(kGradientsThreads, K <= 4 ? 8 : 6)
    planes_gradients_kernel(const AllGradients<T> p, const Tiles tiles) {
  constexpr int kOutputs = kPlaneOutputs<T, K>, kHalo = K - 1, kWarps = kGradientsThreads / kWarp;
  constexpr bool kShiftsKnown = kAlignment != Alignment::kAny;
  __shared__ float shared[kWarps / 2 * (K + 1)];
  const TileBlock block(tiles);
  const int in_t = p.in_t, out_t = p.out_t, padding = p.padding;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const T* const in_rows = p.in.row(0, block.channel);
  const T* const grad_rows = p.grad.row(0, block.channel);
  T* const out_rows = p.grad_input.data ? p.grad_input.row(0, block.channel) : nullptr;
  const ShortFilter<K, 1> filter(p.weight, p.bias, block.channel, false);
  float sum[K + 1][1] = {};
  for (int warp_tile = block.first + warp * kLaneTiles; warp_tile < block.last;
       warp_tile += kWarps * kLaneTiles) {
    const int tile = warp_tile + lane;
    const bool exists = tile < tiles.count;
    const int image = exists ? tiles.image_of(tile) : 0, of_row = tile - image * tiles.per_row;
    const T* const grad = grad_rows + image * p.grad.n_stride;
    T* const out = out_rows + image * p.grad_input.n_stride;
    const int first =
        tiles.first + of_row * kOutputs -
        (kAlignment == Alignment::kVector ? 0 : misalignment(out_rows ? out : grad, kOutputs));
    const int from = first - kHalo;  // i of x[0] and h[0]
    Window<T, kOutputs + kHalo, kShiftsKnown ? kOutputs - kHalo : -1> inputs;
    Window<T, kOutputs, kShiftsKnown ? 0 : -1> grads;
    inputs.load(in_rows + image * p.in.n_stride, from, exists ? in_t : 0);
    // The same address. Computed anew, nvcc's code is 5 % faster in 16 bits, 4 % slower in float32.
    const T* const grad_row = sizeof(T) == 2 ? grad_rows + image * p.grad.n_stride : grad;
    grads.load(grad_row, from + padding, exists ? out_t : 0);
    float x[kOutputs + kHalo], g[kOutputs], h[kOutputs + kHalo];
    inputs.widen_to(x);
    grads.widen_to(g);
    if (p.silu) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        float y = filter.bias[0];
#pragma unroll
        for (int k = 0; k < K; ++k) {
          y += filter.w[k][0] * x[i + k];
        }
        g[i] = silu_gradient<T>(g[i], y);
      }
      if (from + padding < 0 || from + padding + kOutputs > out_t) {  // not 0 · NaN
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) {
          g[i] = is_inside(from + padding + i, out_t) ? g[i] : 0.0f;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kOutputs + kHalo; ++i) {
      h[i] = i < kOutputs ? g[i] : __shfl_down_sync(~0u, g[i - kOutputs], 1);
      if (i >= kOutputs && of_row + 1 == tiles.per_row) {
        h[i] = 0;
      }
    }
    if (lane < kLaneTiles && tile < block.last) {
#pragma unroll
      for (int r = 0; r < kOutputs; ++r) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
          sum[k][0] += h[r] * x[r + k];
        }
        sum[K][0] += h[r];
      }
      if (out_rows) {
        float result[kOutputs] = {};
#pragma unroll
        for (int r = 0; r < kOutputs; ++r) {
#pragma unroll
          for (int k = 0; k < K; ++k) {
            result[r] += filter.w[k][0] * h[r + kHalo - k];
          }
        }
        store<kOutputs>(out, first, in_t, result);
      }
    }
  }
  reduce_warp(sum);
  reduce_block(sum, shared, 0, 1, lane == 0 ? warp : kWarps, kWarps);
  if (threadIdx.x < K + 1) {
    p.put(block.split, block.channel, threadIdx.x, shared[threadIdx.x]);
  }
}

template <typename T, int V, int K>
__global__ void __launch_bounds__(kGradientsThreads)
    pixels_gradients_kernel(const AllGradients<T> p, const Units units, int start) {
  extern __shared__ float dynamic_shared[];
  using Bits = typename BitsOf<V * sizeof(T)>::type;
  constexpr int kBefore = K - 1, kWarmUp = round_up(kBefore, kGroup);
  const int lanes = blockDim.x, rows = blockDim.y, channels = p.c, dilation = p.dilation;
  const int in_t = p.in_t, out_t = p.out_t, padding = p.padding;
  const int channel = (blockIdx.x * lanes + threadIdx.x) * V, split = blockIdx.y;
  const int last_unit = channel < channels ? min(units.count, (split + 1) * units.per_split) : 0;
  const ShortFilter<K, V> filter(p.weight, p.bias, channel < channels ? channel : 0, false);
  float sum[K + 1][V] = {};
  for (int unit = split * units.per_split + threadIdx.y; unit < last_unit; unit += rows) {
    const int part = unit % units.per_phase, rest = unit / units.per_phase;
    const int image = rest / dilation, phase = rest - image * dilation;
    int i = start + (part * units.length - kWarmUp) * dilation + phase;
    ChannelStream<T, V> inputs(p.in.row(image, channel), p.in.t_stride, i, dilation, in_t);
    ChannelStream<T, V> grads(p.grad.row(image, channel), p.grad.t_stride, i + padding, dilation,
                              out_t);
    const int64_t out_step = dilation * p.grad_input.t_stride;
    T* out =
        p.grad_input.data ? p.grad_input.row(image, channel) + i * p.grad_input.t_stride : nullptr;
    float x[kBefore + kGroup][V], h[kBefore + kGroup][V] = {};
    Bits first[kBefore], next_x[kGroup], next_g[kGroup];
    inputs.load(first);
    inputs.load(next_x);
    grads.load(next_g);
    widen_to<T>(x, 0, first);
#pragma unroll 1
    for (int step = -kWarmUp; step < units.length; step += kGroup) {
      widen_to<T>(x, kBefore, next_x);
      widen_to<T>(h, kBefore, next_g);
      inputs.load(next_x);
      grads.load(next_g);
      if (p.silu) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            float y = filter.bias[v];
#pragma unroll
            for (int k = 0; k < K; ++k) {
              y += filter.w[k][v] * x[j + k][v];
            }
            h[kBefore + j][v] = silu_gradient<T>(h[kBefore + j][v], y);
          }
        }
        if (i + padding < 0 || i + padding + (kGroup - 1) * dilation >= out_t) {  // not 0 · NaN
#pragma unroll
          for (int j = 0; j < kGroup; ++j) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
              float& to = h[kBefore + j][v];
              to = is_inside(i + padding + j * dilation, out_t) ? to : 0.0f;
            }
          }
        }
      }
      if (step >= 0) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          float result[V] = {};
#pragma unroll
          for (int v = 0; v < V; ++v) {
            sum[K][v] += h[kBefore + j][v];
#pragma unroll
            for (int k = 0; k < K; ++k) {
              sum[k][v] += h[kBefore + j][v] * x[j + k][v];
              result[v] += filter.w[k][v] * h[kBefore + j - k][v];
            }
          }
          if (out && is_inside(i + j * dilation, in_t)) {
            store_vector(out + j * out_step, result);
          }
        }
      }
      i += kGroup * dilation;
      out = out ? out + kGroup * out_step : nullptr;
      slide(x);
      slide(h);
    }
  }
  reduce_block(sum, dynamic_shared, threadIdx.x, lanes, threadIdx.y, rows);
  for (int i = flat_thread(); i < lanes * V * (K + 1); i += lanes * rows) {
    const int c = blockIdx.x * lanes * V + i / (K + 1);
    if (c < channels) {
      p.put(split, c, i % (K + 1), dynamic_shared[i]);
    }
  }
}

template <typename T, int K>
bool launch_planes(const AllGradients<T>& p, const Run& run) {
  if (!p.has_rows()) {
    return false;
  }
  // A tile has the elements of h that are K − 1 before its outputs; all of them are in a tile.
  constexpr int64_t kOutputs = kPlaneOutputs<T, K>,
                    kThreads = kGradientsThreads / kWarp * kLaneTiles;
  const int64_t before = std::max<int64_t>(0, p.padding - (K - 1));
  const int64_t first = -ceil_div(before, kOutputs) * kOutputs;
  const int64_t positions = std::max(p.in_t, p.out_t - p.padding + K - 1) - first;
  const auto launch = [&](auto alignment) {
    constexpr auto kernel = planes_gradients_kernel<T, K, alignment.value>;
    const int64_t resident = resident_blocks(kernel, kGradientsThreads, 0);
    const Tiles tiles = split_tiles(p.n, first, positions, kOutputs,
                                    alignment.value == Alignment::kVector, p.c, kThreads, resident);
    reduce_splits(p, run, tiles.splits, [&](const AllGradients<T>& split) {
      launch_kernel(kernel, p.c * tiles.splits, kGradientsThreads, 0, run.stream, split, tiles);
    });
  };
  const bool equal = p.padding == K - 1 && are_equally_aligned(p.in, p.grad) &&
                     (!p.grad_input.data || are_equally_aligned(p.in, p.grad_input));
  dispatch_alignment<T>(equal, are_rows_aligned(p.grad), launch);
  return true;
}

template <typename T, int K>
bool launch_pixels(const AllGradients<T>& p, const Run& run) {
  const T* const out = p.grad_input.data ? p.grad_input.data : p.grad.data;
  return dispatch_width<T, 2>(
      {p.in.data, p.grad.data, out}, {p.c, p.in.n_stride, p.in.t_stride}, [&](auto width) {
        constexpr int V = width.value;
        const int lanes = lanes_of(p.c, V), rows = kGradientsThreads / lanes;
        const int64_t start = -ceil_div(p.padding, p.dilation) * p.dilation;
        const int64_t positions =
            ceil_div(std::max(p.in_t, p.out_t - p.padding) - start, p.dilation);
        const int64_t blocks = ceil_div(p.c, lanes * V);
        const size_t bytes = reduction_elements(lanes, rows, (K + 1) * V) * sizeof(float);
        const int64_t resident =
            resident_blocks(pixels_gradients_kernel<T, V, K>, kGradientsThreads, bytes);
        const auto units = split_units(p.n * p.dilation, positions, rows, blocks, resident);
        if (!units || !p.has_pixels()) {
          return false;
        }
        const int64_t splits = ceil_div(units->count, units->per_split);
        reduce_splits(p, run, splits, [&](const AllGradients<T>& split) {
          launch_kernel(pixels_gradients_kernel<T, V, K>, dim3(blocks, splits), dim3(lanes, rows),
                        bytes, run.stream, split, *units, static_cast<int>(start));
        });
        return true;
      });
}

}  // namespace

template <typename T>
bool short_filter_gradients(const AllGradients<T>& p, const Run& run) {
  return dispatch_short(p, [&](auto taps) {
    constexpr int K = taps.value;
    return p.channels_last ? launch_pixels<T, K>(p, run) : launch_planes<T, K>(p, run);
  });
}

template bool short_filter_gradients(const AllGradients<float>&, const Run&);
template bool short_filter_gradients(const AllGradients<BFloat16>&, const Run&);
template bool short_filter_gradients(const AllGradients<Half>&, const Run&);

}  // namespace ops::depthwise_conv1d
