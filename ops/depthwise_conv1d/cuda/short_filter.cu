// short_filter: 2 to 7 taps, stride 1, both layouts. Accumulates in float32; the filter is in
// registers, inputs come from the L1 cache. All gradients: short_filter_gradients.cu.
//
// Planes (dilation 1)
//   block:   a split of a channel's rows
//   thread:  16 bytes of adjacent outputs at a time (float32 with 6 and 7 taps: 32)
// Channels-last (any dilation)
//   block:   up to 32 threads along the channels × units of T
//   thread:  4 adjacent channels; marches along T with the last K − 1 inputs in registers
#include "depthwise_conv1d/cuda/split.cuh"

namespace ops::depthwise_conv1d {
namespace {

constexpr int kShortThreads = 128;

// Threads that every multiprocessor of the architecture can run.
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
constexpr int kResidentThreads = 2048;
#else
constexpr int kResidentThreads = 1024;
#endif

template <typename T, int K, Alignment kAlignment>
__global__ void __launch_bounds__(kShortThreads,
                                  kResidentThreads / kShortThreads *
                                      (kAlignment == Alignment::kAny || K > 4 ? 3 : 4) / 4)
    planes_kernel(const Convolution<T> p, const Tiles tiles) {
  constexpr int kOutputs = kPlaneOutputs<T, K>;
  const TileBlock block(tiles);
  const int in_t = p.in_t, out_t = p.out_t, padding = p.padding;
  const T* const in_rows = p.in.row(0, block.channel);
  T* const out_rows = p.out.row(0, block.channel);
  const ShortFilter<K, 1> filter(p.weight, p.bias, block.channel, p.flip);
  for (int tile = block.first + threadIdx.x; tile < block.last; tile += kShortThreads) {
    const int image = tiles.image_of(tile);
    T* const out = out_rows + image * p.out.n_stride;
    const int first = (tile - image * tiles.per_row) * kOutputs -
                      (kAlignment == Alignment::kVector ? 0 : misalignment(out, kOutputs));
    Window<T, kOutputs + K - 1, kAlignment == Alignment::kAny ? -1 : kOutputs - (K - 1)> inputs;
    inputs.load(in_rows + image * p.in.n_stride, first - padding, in_t);
    float x[kOutputs + K - 1], y[kOutputs];
    inputs.widen_to(x);
#pragma unroll
    for (int r = 0; r < kOutputs; ++r) {
      y[r] = filter.bias[0];
#pragma unroll
      for (int k = 0; k < K; ++k) {
        y[r] += filter.w[k][0] * x[r + k];
      }
    }
    if (p.silu) {
#pragma unroll
      for (int r = 0; r < kOutputs; ++r) {
        y[r] *= sigmoid<T>(y[r]);
      }
    }
    store<kOutputs>(out, first, out_t, y);
  }
}

template <typename T, int V, int K>
__global__ void __launch_bounds__(kShortThreads)
    pixels_kernel(const Convolution<T> p, const Units units) {
  using Bits = typename BitsOf<V * sizeof(T)>::type;
  constexpr int kBefore = K - 1;
  const int channels = p.c, dilation = p.dilation, in_t = p.in_t, out_t = p.out_t;
  const int channel = (blockIdx.x * blockDim.x + threadIdx.x) * V;
  const int last_unit = channel < channels
                            ? min(units.count, (static_cast<int>(blockIdx.y) + 1) * units.per_split)
                            : 0;
  const ShortFilter<K, V> filter(p.weight, p.bias, channel < channels ? channel : 0, p.flip);
  for (int unit = blockIdx.y * units.per_split + threadIdx.y; unit < last_unit;
       unit += blockDim.y) {
    const int part = unit % units.per_phase, rest = unit / units.per_phase;
    const int image = rest / dilation, phase = rest - image * dilation;
    int t = part * units.length * dilation + phase;
    const int last = min(out_t, t + units.length * dilation);
    ChannelStream<T, V> inputs(p.in.row(image, channel), p.in.t_stride,
                               t - static_cast<int>(p.padding), dilation, in_t);
    const int64_t step = dilation * p.out.t_stride;
    T* out = p.out.row(image, channel) + t * p.out.t_stride;
    float x[kBefore + kGroup][V];
    Bits first[kBefore], next[kGroup];
    inputs.load(first);
    inputs.load(next);
    widen_to<T>(x, 0, first);
#pragma unroll 1
    while (t < last) {
      widen_to<T>(x, kBefore, next);
      inputs.load(next);
#pragma unroll
      for (int j = 0; j < kGroup; ++j, t += dilation, out += step) {
        if (t >= last) {
          break;
        }
        float y[V];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          y[v] = filter.bias[v];
#pragma unroll
          for (int k = 0; k < K; ++k) {
            y[v] += filter.w[k][v] * x[j + k][v];
          }
        }
        if (p.silu) {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            y[v] *= sigmoid<T>(y[v]);
          }
        }
        store_vector(out, y);
      }
      slide(x);
    }
  }
}

template <typename T, int K>
bool launch_planes(const Convolution<T>& p, const Run& run) {
  if (!p.has_rows()) {
    return false;
  }
  constexpr int64_t kMostTiles = 4;  // per thread
  const auto launch = [&](auto alignment) {
    constexpr auto kernel = planes_kernel<T, K, alignment.value>;
    const Tiles tiles =
        split_tiles(p.n, 0, p.out_t, kPlaneOutputs<T, K>, alignment.value == Alignment::kVector,
                    p.c, kShortThreads, resident_blocks(kernel, kShortThreads, 0), kMostTiles);
    launch_kernel(kernel, p.c * tiles.splits, kShortThreads, 0, run.stream, p, tiles);
  };
  dispatch_alignment<T>(p.padding == K - 1 && are_equally_aligned(p.in, p.out),
                        are_rows_aligned(p.out), launch);
  return true;
}

template <typename T, int K>
bool launch_pixels(const Convolution<T>& p, const Run& run) {
  return dispatch_width<T, 4>(
      {p.in.data, p.out.data}, {p.c, p.in.n_stride, p.in.t_stride}, [&](auto width) {
        constexpr int V = width.value;
        const int lanes = lanes_of(p.c, V), rows = kShortThreads / lanes;
        const int64_t blocks = ceil_div(p.c, lanes * V);
        const int64_t resident = resident_blocks(pixels_kernel<T, V, K>, kShortThreads, 0);
        const auto units =
            split_units(p.n * p.dilation, ceil_div(p.out_t, p.dilation), rows, blocks, resident);
        if (!units || !p.has_pixels()) {
          return false;
        }
        launch_kernel(pixels_kernel<T, V, K>,
                      dim3(blocks, ceil_div(units->count, units->per_split)), dim3(lanes, rows), 0,
                      run.stream, p, *units);
        return true;
      });
}

}  // namespace

template <typename T>
bool short_filter(const Convolution<T>& p, const Run& run) {
  return dispatch_short(p, [&](auto taps) {
    constexpr int K = taps.value;
    return p.channels_last ? launch_pixels<T, K>(p, run) : launch_planes<T, K>(p, run);
  });
}

template bool short_filter(const Convolution<float>&, const Run&);
template bool short_filter(const Convolution<BFloat16>&, const Run&);
template bool short_filter(const Convolution<Half>&, const Run&);

}  // namespace ops::depthwise_conv1d
