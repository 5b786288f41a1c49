// pixels: [N, T, C], stride 1, any dilation. Accumulates in float32; inputs come from the L1 cache.
//
//   block:   up to 32 threads along the channels × tiles along T
//   shared:  filters of 32 taps, transposed
//   thread:  2 adjacent channels × 16 outputs that are `dilation` apart; a window of inputs slides
//            by a group of 4 taps
//
// Weight gradient
//   block:   up to 32 threads along the channels × groups of taps × units of T
//   thread:  2 adjacent channels × 8 or 12 adjacent taps; a window of inputs slides by 4 outputs
#include "depthwise_conv1d/cuda/split.cuh"

namespace ops::depthwise_conv1d {
namespace {

constexpr int kPixelThreads = 256, kPixelChannels = 2, kPixelOutputs = 16, kChunk = 32;

template <typename T, int V>
__global__ void __launch_bounds__(kPixelThreads, 2)
    pixels_kernel(const Convolution<T> p, int tiles) {
  using Bits = typename BitsOf<V * sizeof(T)>::type;
  extern __shared__ float filter[];  // [chunk][blockDim.x · V]
  const int lanes = blockDim.x, channels = p.c, taps = p.taps, dilation = p.dilation;
  const int out_t = p.out_t;
  const int chunk = min(kChunk, round_up(taps, kGroup)), pitch = lanes * V + V;
  // Adjacent blocks have adjacent channels, so that rows of memory are read as a whole.
  const unsigned blocks = (channels + lanes * V - 1) / (lanes * V), block = blockIdx.x / blocks;
  const int first_channel = (blockIdx.x - block * blocks) * lanes * V;
  const int channel = first_channel + threadIdx.x * V;
  const unsigned tile_blocks = (tiles + blockDim.y - 1) / blockDim.y, image = block / tile_blocks;
  const int tile = (block - image * tile_blocks) * blockDim.y + threadIdx.y;
  const bool active = tile < tiles && channel < channels;
  const int phase = dilation == 1 ? 0 : tile % dilation;
  const int t0 = (tile - phase) * kPixelOutputs + phase;  // of output 0
  ChannelStream<T, V> inputs(p.in.row(image, channel), p.in.t_stride,
                             t0 - static_cast<int>(p.padding), dilation,
                             active ? static_cast<int>(p.in_t) : 0);
  float window[kPixelOutputs + kGroup][V], sum[kPixelOutputs][V];
  Bits before[kPixelOutputs], next[kGroup];
  inputs.load_checked(before);
  inputs.load_checked(next);
  widen_to<T>(window, 0, before);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const float bias = active ? p.bias_of(channel + v) : 0.0f;
#pragma unroll
    for (int r = 0; r < kPixelOutputs; ++r) {
      sum[r][v] = bias;
    }
  }
  for (int first = 0; first < taps; first += chunk) {
    __syncthreads();
    for (int i = flat_thread(); i < chunk * lanes * V; i += blockDim.x * blockDim.y) {
      const int k = first + i % chunk, c = i / chunk;
      const bool inside = k < taps && first_channel + c < channels;
      const int64_t at = static_cast<int64_t>(first_channel + c) * taps + p.tap(k);
      filter[i % chunk * pitch + c] = inside ? static_cast<float>(p.weight[at]) : 0.0f;
    }
    __syncthreads();
    const int count = min(chunk, taps - first);
#pragma unroll 4
    for (int g = 0; g < count; g += kGroup) {
      widen_to<T>(window, kPixelOutputs, next);
      inputs.load_checked(next);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        const auto w = load_vector<V>(filter + (g + j) * pitch + threadIdx.x * V);
#pragma unroll
        for (int r = 0; r < kPixelOutputs; ++r) {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            sum[r][v] += w.lane[v] * window[r + j][v];
          }
        }
      }
      slide(window);
    }
  }
  if (!active) {
    return;
  }
#pragma unroll
  for (int r = 0; r < kPixelOutputs; ++r) {
    const int t = t0 + r * dilation;
    if (t < out_t) {
      const int64_t offset = (static_cast<int64_t>(image) * out_t + t) * channels + channel;
      Vector<T, V> grad{};
      if (p.grad) {
        grad = load_vector<V>(p.grad + offset);
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const float y = p.without_nan(sum[r][v], image, channel + v, t);
        sum[r][v] = p.activate(y, static_cast<float>(grad.lane[v]));
      }
      store_vector(p.out.data + offset, sum[r]);
    }
  }
}

template <typename T, int V, int kTaps>
__global__ void __launch_bounds__(kPixelThreads, 2)
    pixels_weight_gradient_kernel(const WeightGradient<T> p, int groups, const Units units) {
  using Bits = typename BitsOf<V * sizeof(T)>::type;
  extern __shared__ float shared[];
  const int lanes = blockDim.x, channels = p.c, taps = p.taps, dilation = p.dilation;
  const int in_t = p.in_t, out_t = p.out_t, padding = p.padding;
  const int channel = (blockIdx.x * lanes + threadIdx.x) * V, split = blockIdx.y;
  const int group = threadIdx.y % groups, row = threadIdx.y / groups, rows = blockDim.y / groups;
  const int first_tap = (blockIdx.z * groups + group) * kTaps;
  const int last_unit = channel < channels ? min(units.count, (split + 1) * units.per_split) : 0;
  float sum[kTaps + 1][V] = {};
  for (int unit = split * units.per_split + row; unit < last_unit; unit += rows) {
    const int part = unit % units.per_phase, rest = unit / units.per_phase;
    const int image = rest / dilation, phase = rest - image * dilation;
    int t = part * units.length * dilation + phase;
    const int last = min(out_t, t + units.length * dilation);
    ChannelStream<T, V> grads(p.grad.row(image, channel), p.grad.t_stride, t, dilation, last);
    ChannelStream<T, V> inputs(p.in.row(image, channel), p.in.t_stride,
                               t - padding + first_tap * dilation, dilation, in_t);
    float window[kTaps + kGroup][V], g[kGroup][V];
    Bits before[kTaps], next_x[kGroup], next_g[kGroup];
    inputs.load(before);
    inputs.load(next_x);
    grads.load(next_g);
    widen_to<T>(window, 0, before);
#pragma unroll((kTaps + kGroup) / kGroup)
    for (; t < last; t += kGroup * dilation) {
      widen_to<T>(window, kTaps, next_x);
      widen_to<T>(g, 0, next_g);
      inputs.load(next_x);
      grads.load(next_g);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
            sum[j][v] += g[i][v] * window[i + j][v];
          }
          sum[kTaps][v] += g[i][v];
        }
      }
      slide(window);
    }
  }
  const int reduced = lanes * groups;
  reduce_block(sum, shared, group * lanes + threadIdx.x, reduced, row, rows);
  for (int i = flat_thread(); i < reduced * V * (kTaps + 1); i += blockDim.x * blockDim.y) {
    const int j = i % (kTaps + 1), lane_channel = i / (kTaps + 1);
    const int in_group = lane_channel / (lanes * V);
    const int c = blockIdx.x * lanes * V + lane_channel % (lanes * V);
    const int first = (blockIdx.z * groups + in_group) * kTaps;
    if (c < channels) {
      if (j < kTaps && first + j < taps) {
        p.put(split, c, first + j, shared[i]);
      } else if (j == kTaps && first == 0 && p.grad_bias) {
        p.put(split, c, taps, shared[i]);
      }
    }
  }
}

}  // namespace

template <typename T>
bool pixels(const Convolution<T>& p, const Run& run) {
  if (!p.has_pixels()) {
    return false;
  }
  const T* const grad = p.grad ? p.grad : p.out.data;
  return dispatch_width<T, kPixelChannels>(
      {p.in.data, p.out.data, grad}, {p.c, p.in.n_stride, p.in.t_stride}, [&](auto width) {
        constexpr int V = width.value;
        const int lanes = lanes_of(p.c, V);
        const int64_t tiles = ceil_div(ceil_div(p.out_t, p.dilation), kPixelOutputs) * p.dilation;
        int rows = kPixelThreads / lanes;
        while (rows / 2 >= tiles) {
          rows /= 2;
        }
        const int64_t blocks = p.n * ceil_div(tiles, rows) * ceil_div(p.c, lanes * V);
        // Large filters on few outputs, or mostly on padding: direct has more threads, and skips
        // padding.
        constexpr int64_t kLargeTaps = 32;
        const bool few = blocks * 2 < Device::attribute(cudaDevAttrMultiProcessorCount);
        if (tiles >= 1 << 29 || blocks >= int64_t{1} << 31 ||
            (p.taps > kLargeTaps && (few || p.dilation > 1))) {
          return false;
        }
        const int chunk = std::min<int64_t>(kChunk, ceil_div(p.taps, kGroup) * kGroup);
        launch_kernel(pixels_kernel<T, V>, blocks, dim3(lanes, rows),
                      chunk * (lanes + 1) * V * sizeof(float), run.stream, p,
                      static_cast<int>(tiles));
        return true;
      });
}

template <typename T>
bool pixels_weight_gradient(const WeightGradient<T>& p, const Run& run) {
  if (!p.has_pixels()) {
    return false;
  }
  const auto launch = [&](auto width, auto tap_count) {
    constexpr int V = width.value, kTaps = tap_count.value;
    const int lanes = lanes_of(p.c, V);
    const int64_t channel_blocks = ceil_div(p.c, lanes * V);
    const int64_t all_groups = ceil_div(p.taps, kTaps);
    const int64_t tap_blocks = ceil_div(all_groups, kPixelThreads / lanes);
    const int64_t groups = ceil_div(all_groups, tap_blocks);
    const int64_t rows = kPixelThreads / lanes / groups;
    const size_t bytes = reduction_elements(lanes * groups, rows, (kTaps + 1) * V) * sizeof(float);
    const auto units = split_units(
        p.n * p.dilation, ceil_div(p.out_t, p.dilation), rows, channel_blocks * tap_blocks,
        resident_blocks(pixels_weight_gradient_kernel<T, V, kTaps>, lanes * rows * groups, bytes));
    if (!units || tap_blocks > kMaxGridY) {
      return false;
    }
    const int64_t splits = ceil_div(units->count, units->per_split);
    reduce_splits(p, run, splits, [&](const WeightGradient<T>& split) {
      launch_kernel(pixels_weight_gradient_kernel<T, V, kTaps>,
                    dim3(channel_blocks, splits, tap_blocks), dim3(lanes, rows * groups), bytes,
                    run.stream, split, static_cast<int>(groups), *units);
    });
    return true;
  };
  return dispatch_width<T, kPixelChannels>(
      {p.in.data, p.grad.data}, {p.c, p.in.n_stride, p.in.t_stride}, [&](auto width) {
        return p.taps <= 8 ? launch(width, std::integral_constant<int, 8>{})
                           : launch(width, std::integral_constant<int, 12>{});
      });
}

#define OPS_INSTANTIATE(T)                                 \
  template bool pixels(const Convolution<T>&, const Run&); \
  template bool pixels_weight_gradient(const WeightGradient<T>&, const Run&);
OPS_INSTANTIATE(float)
OPS_INSTANTIATE(BFloat16)
OPS_INSTANTIATE(Half)
#undef OPS_INSTANTIATE

}  // namespace ops::depthwise_conv1d
