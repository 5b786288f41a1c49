// direct_l1 for every geometry and dtype: kernel, stride, dilation and padding are run-time values.
//
//      output rows o, o + s, …            input                          shared memory
//      ┌───┐ ┌───┐                ┌─────────────────────┐              ┌──────────────────┐
//      │ q │ │ q │  one thread ◄──│  L1 cache, no stage │              │ filter [tap][c]  │
//      └───┘ └───┘                └─────────────────────┘              └──────────────────┘
//
// Forward and input gradient
//   block:   some channels of a range of output tiles, of all images
//   shared:  the filters of the channels, transposed to [tap][channel]
//   thread:  kRows outputs of one column that meet the same taps, V channels each
// Weight gradient, stage 1 of a two-stage reduction
//   block:   kTile × kTile taps of some channels, over one split of the outputs
//   shared:  the tree that adds up the threads' sums
//   thread:  its share of the outputs; kTile² taps and the bias, V channels each
#include <numeric>

#include "core/cuda/divide.cuh"
#include "depthwise_conv2d/cuda/families.cuh"
#include "depthwise_conv2d/cuda/two_stage_reduction.cuh"

namespace ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;  // of channels, in channels-last images
constexpr size_t kFilterBytes = 32 * 1024;

// One axis of a convolution or of the gradient of its input. Output o meets the inputs
// in + k · in_step with the taps tap + k · tap_step, k = 0, 1, …; (tap, in) is start(o).
struct Axis {
  int in, out, taps;
  int stride, dilation, padding;
  bool transposed;
  int tap_step, in_step;
  int out_step, in_of_out;  // outputs out_step apart meet the same taps, inputs in_of_out apart

  Axis(int64_t in_size, int64_t out_size, int64_t kernel, int64_t s, int64_t d, int64_t p, bool t)
      : in(in_size), out(out_size), taps(kernel), padding(p), transposed(t) {
    // Sizes are less than kLargest: larger strides are equivalent, and so is any dilation of one
    // tap.
    constexpr int64_t kLargest = int64_t{1} << 30;
    stride = std::min(s, kLargest);
    dilation = kernel == 1 ? 1 : d;
    const int common = std::gcd(stride, dilation);
    tap_step = transposed ? stride / common : 1;
    in_step = transposed ? -dilation / common : dilation;
    out_step = transposed ? stride : 1;
    in_of_out = transposed ? 1 : stride;
  }

  struct Start {
    int tap, in;
  };
  __device__ Start start(int o) const {
    if (!transposed) {
      return {0, o * stride - padding};
    }
    const int most = min(tap_step, taps);
    int tap = 0, distance = o + padding;  // = input · stride + tap · dilation
    for (; tap < most && distance % stride != 0; ++tap) {
      distance -= dilation;
    }
    return {tap < most ? tap : taps, distance / stride};
  }
  // Leaves out the taps that meet no input; returns the number of the others.
  __device__ int clip(Start& at) const {
    const int step = transposed ? -in_step : in_step;
    const int before = transposed ? at.in - (in - 1) : -at.in;  // > 0: the first inputs are outside
    const int skipped = before > 0 ? (before + step - 1) / step : 0;
    at.tap += skipped * tap_step, at.in += skipped * in_step;
    const int inside = transposed ? at.in : in - 1 - at.in;  // steps · step fit before the edge
    if (inside < 0 || at.tap >= taps) {
      return 0;
    }
    return min(inside / step, (taps - 1 - at.tap) / tap_step) + 1;
  }
};

struct Strides {
  int64_t n;
  int c, h, w;

  Strides(const DepthwiseGeometry& g, int64_t height, int64_t width) {
    const auto strides = image_strides(g.channels_last, g.c, height, width);
    n = strides.n, c = strides.c, h = strides.h, w = strides.w;
  }
};

// Threads of a block, in either memory format: neighbours in memory to neighbouring threads.
struct Threads {
  bool channels_last;
  int lanes, groups;  // channels (of V each), and threads that share the outputs of a channel

  // lanes × groups threads; at most max_lanes lanes.
  Threads(bool last, int64_t vectors, int64_t outputs, int64_t max_lanes) : channels_last(last) {
    if (channels_last) {
      const int64_t most = std::min<int64_t>(kLanes, max_lanes);
      lanes = ceil_div(vectors, ceil_div(vectors, most));
      groups = std::min<int64_t>(kThreads / lanes, outputs);
    } else {
      groups = std::min<int64_t>(kThreads, outputs);
      lanes = std::min<int64_t>({kThreads / groups, vectors, max_lanes});
    }
  }
  dim3 block() const { return channels_last ? dim3(lanes, groups) : dim3(groups, lanes); }
  __device__ int lane() const { return channels_last ? threadIdx.x : threadIdx.y; }
  __device__ int group() const { return channels_last ? threadIdx.y : threadIdx.x; }
};

struct ConvolutionParams {
  Axis rows, cols;
  Strides in, out;
  Threads threads;
  int channels, chunks;  // chunks of the channels of a block
  int row_tiles, tiles;  // of an image, and of all images
  FastDivide by_cols, by_row_tiles, by_out_step;
};

template <int kRows, int V, typename T>
__global__ void __launch_bounds__(kThreads)
    direct_runtime_kernel(ConvolutionParams params, const T* __restrict__ in,
                          const T* __restrict__ weight, const T* __restrict__ bias,
                          T* __restrict__ out) {
  using Acc = acc_t<T>;
  using Lanes = Vector<Acc, V>;
  extern __shared__ __align__(16) unsigned char memory[];
  Acc* filters = reinterpret_cast<Acc*>(memory);  // [tap][channel of the block]
  const Axis &rows = params.rows, &cols = params.cols;
  const Threads& threads = params.threads;
  const int taps = rows.taps * cols.taps, pitch = (threads.lanes + 1) * V;
  const int first = blockIdx.x % params.chunks * threads.lanes * V;
  const int count = min(threads.lanes * V, params.channels - first) * taps;
  for (int i = flat_thread(); i < count; i += blockDim.x * blockDim.y) {
    filters[i % taps * pitch + i / taps] = static_cast<Acc>(weight[first * taps + i]);
  }
  __syncthreads();
  const int channel = first + threads.lane() * V;
  if (channel >= params.channels) {
    return;
  }
  filters += threads.lane() * V;
  Acc initial[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    initial[v] = bias ? static_cast<Acc>(bias[channel + v]) : Acc(0);
  }
  in += channel * static_cast<int64_t>(params.in.c);
  out += channel * static_cast<int64_t>(params.out.c);
  const int step = gridDim.x / params.chunks * threads.groups;
  for (int tile = blockIdx.x / params.chunks * threads.groups + threads.group();
       tile < params.tiles; tile += step) {
    const int line = params.by_cols(tile), n = params.by_row_tiles(line);
    const int col = tile - line * cols.out, row_tile = line - n * params.row_tiles;
    const int period = params.by_out_step(row_tile);
    const int row = period * (kRows - 1) * rows.out_step + row_tile;  // of the first output
    Axis::Start at_row = rows.start(row), at_col = cols.start(col);
    const int col_taps = cols.clip(at_col);
    Acc sum[kRows][V];
#pragma unroll
    for (int i = 0; i < kRows * V; ++i) {
      sum[i / V][i % V] = initial[i % V];
    }
    const T* image = in + n * params.in.n + static_cast<int64_t>(at_col.in) * params.in.w;
    const int next = cols.in_step * params.in.w;
    for (; at_row.tap < rows.taps; at_row.tap += rows.tap_step, at_row.in += rows.in_step) {
      const T* from[kRows];
      bool inside[kRows];
#pragma unroll
      for (int q = 0; q < kRows; ++q) {
        const int y = at_row.in + q * rows.in_of_out;
        inside[q] = static_cast<unsigned>(y) < static_cast<unsigned>(rows.in);
        from[q] = image + static_cast<int64_t>(y) * params.in.h;
      }
      const Acc* filter = filters + (at_row.tap * cols.taps + at_col.tap) * pitch;
#pragma unroll 4
      for (int k = 0; k < col_taps; ++k) {
        const Lanes tap = *reinterpret_cast<const Lanes*>(filter + k * cols.tap_step * pitch);
#pragma unroll
        for (int q = 0; q < kRows; ++q) {
          if (inside[q]) {
            const Vector<T, V> x = load_vector<V>(from[q] + k * next);
#pragma unroll
            for (int v = 0; v < V; ++v) {
              sum[q][v] += tap.lane[v] * static_cast<Acc>(x.lane[v]);
            }
          }
        }
      }
    }
    T* to = out + n * params.out.n + static_cast<int64_t>(col) * params.out.w;
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      const int64_t y = row + static_cast<int64_t>(q) * rows.out_step;
      if (y < rows.out) {
        store_vector(to + y * params.out.h, sum[q]);
      }
    }
  }
}

template <int kRows, int V, typename T>
bool launch_convolution(const Convolution<T>& c, const Axis& rows, const Axis& cols) {
  const DepthwiseGeometry& g = c.g;
  const int64_t filter_bytes = sizeof(acc_t<T>) * V * rows.taps * cols.taps;
  const int64_t max_lanes = std::max<int64_t>(1, kFilterBytes / filter_bytes - 1);
  const int64_t row_tiles =
      kRows == 1 ? c.out.h : ceil_div(c.out.h, int64_t{rows.out_step} * kRows) * rows.out_step;
  const int64_t tiles = g.n * row_tiles * c.out.w;
  const Threads threads(g.channels_last, ceil_div(g.c, V), tiles, max_lanes);
  const size_t shared = (threads.lanes + 1) * filter_bytes;
  const int64_t chunks = ceil_div(g.c, int64_t{threads.lanes} * V);
  if (shared > kSharedBytes || tiles >= kMostFastDivided) {
    return false;
  }
  constexpr int64_t kBlocks = 32;  // of a multiprocessor: each stages its filters once
  const int64_t blocks = std::min(ceil_div(tiles, threads.groups),
                                  ceil_div(kBlocks * Device().multiprocessors, chunks));
  const ConvolutionParams params{rows,
                                 cols,
                                 Strides(g, c.in.h, c.in.w),
                                 Strides(g, c.out.h, c.out.w),
                                 threads,
                                 static_cast<int>(g.c),
                                 static_cast<int>(chunks),
                                 static_cast<int>(row_tiles),
                                 static_cast<int>(tiles),
                                 FastDivide(c.out.w),
                                 FastDivide(row_tiles),
                                 FastDivide(rows.out_step)};
  c.launch(direct_runtime_kernel<kRows, V, T>, dim3(blocks * chunks), threads.block(), shared,
           params, c.in.data, c.weight, c.bias, c.out.data);
  return true;
}

// Whether 32-bit offsets hold an image of either side.
bool fits_32_bits(const DepthwiseGeometry& g) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  const int64_t rows = g.h + 2 * g.padding_h, cols = g.w + 2 * g.padding_w;
  const int64_t channels = g.channels_last ? g.c : 1;
  return rows < kLimit && cols < kLimit && rows * cols < kLimit / channels && g.n < kLimit &&
         g.n * rows * cols < kLimit && g.c * (g.kernel_h * g.kernel_w + 1) < kLimit &&
         g.n * g.out_h * g.out_w < kLimit;
}

// Channels that move in 8 bytes, where pixels are aligned.
template <typename T>
constexpr int kVector = 8 / sizeof(T);

template <typename T>
bool has_vectors(const DepthwiseGeometry& g, std::initializer_list<const void*> pointers) {
  return g.channels_last && g.c % kVector<T> == 0 && are_aligned(pointers, 8);
}

}  // namespace

template <typename T>
bool direct_l1_runtime(const Convolution<T>& c) {
  const DepthwiseGeometry& g = c.g;
  if (!fits_32_bits(g)) {
    return false;
  }
  const bool backward = c.transposed || c.flip;
  const Axis rows(c.in.h, c.out.h, g.kernel_h, g.stride_h, g.dilation_h, g.padding_h, backward);
  const Axis cols(c.in.w, c.out.w, g.kernel_w, g.stride_w, g.dilation_w, g.padding_w, backward);
  const bool vectors = has_vectors<T>(g, {c.in.data, c.out.data});
  // Several outputs a thread share loads of taps, where few of them are beyond the image and
  // threads are left for the whole device.
  constexpr int kRows = 4;
  const int64_t period = int64_t{rows.out_step} * kRows;
  const int64_t threads = g.n * g.c * c.out.h * c.out.w / (kRows * (vectors ? kVector<T> : 1));
  const bool tall = ceil_div(c.out.h, period) * period * 5 <= c.out.h * 8 &&
                    threads >= int64_t{2 * kThreads} * Device().multiprocessors;
  if (vectors) {
    return tall ? launch_convolution<kRows, kVector<T>>(c, rows, cols)
                : launch_convolution<1, kVector<T>>(c, rows, cols);
  }
  return tall ? launch_convolution<kRows, 1>(c, rows, cols)
              : launch_convolution<1, 1>(c, rows, cols);
}

namespace {

struct GradientParams {
  int in_h, in_w, out_h, out_w;
  int kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  Strides in, out;
  Threads threads;
  int channels, chunks;
  int tiles_w, tiles;  // of taps
  int outputs, share;  // of a channel, and of them a split's
  FastDivide by_out_w, by_out_h;
};

template <int kTile, int V, typename T>
__global__ void __launch_bounds__(kThreads)
    direct_runtime_weight_gradient_kernel(GradientParams params, const T* __restrict__ in,
                                          const T* __restrict__ grad,
                                          WeightReduction<T> reduction) {
  using Acc = acc_t<T>;
  constexpr int kTaps = kTile * kTile, kSums = kTaps + 1;
  extern __shared__ __align__(16) unsigned char memory[];
  const Threads& threads = params.threads;
  const int chunk = blockIdx.x % params.chunks, rest = blockIdx.x / params.chunks;
  const int tile = rest % params.tiles, split = rest / params.tiles;
  const int first_a = tile / params.tiles_w * kTile, first_b = tile % params.tiles_w * kTile;
  const int first = chunk * threads.lanes * V;
  const int channel = first + threads.lane() * V;
  const int begin = split * params.share, end = min(begin + params.share, params.outputs);
  const int next_tap_h = params.dilation_h * params.in.h;
  const int next_tap_w = params.dilation_w * params.in.w;
  // Unused taps of the tile are beyond the filter. Without a filter only the bias is left.
  const int tile_h = reduction.taps ? min(kTile, params.kernel_h - first_a) : 0;
  const int tile_w = min(kTile, params.kernel_w - first_b);
  const int base_h = first_a * params.dilation_h - params.padding_h;
  const int base_w = first_b * params.dilation_w - params.padding_w;
  in += channel * static_cast<int64_t>(params.in.c);
  grad += channel * static_cast<int64_t>(params.out.c);
  Acc sum[kSums][V] = {};
  for (int i = begin + threads.group(); channel < params.channels && i < end; i += threads.groups) {
    const int line = params.by_out_w(i), n = params.by_out_h(line);
    const int row = line - n * params.out_h, col = i - line * params.out_w;
    const Vector<T, V> g = load_vector<V>(grad + n * params.out.n + row * params.out.h +
                                          static_cast<int64_t>(col) * params.out.w);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      sum[kTaps][v] += static_cast<Acc>(g.lane[v]);
    }
    const int y = row * params.stride_h + base_h, x = col * params.stride_w + base_w;
    const T* from = in + n * params.in.n + static_cast<int64_t>(y) * params.in.h +
                    static_cast<int64_t>(x) * params.in.w;
#pragma unroll
    for (int a = 0; a < kTile; ++a) {
      const bool row_inside = a < tile_h && static_cast<unsigned>(y + a * params.dilation_h) <
                                                static_cast<unsigned>(params.in_h);
#pragma unroll
      for (int b = 0; b < kTile; ++b) {
        if (row_inside && b < tile_w &&
            static_cast<unsigned>(x + b * params.dilation_w) < static_cast<unsigned>(params.in_w)) {
          const Vector<T, V> value = load_vector<V>(from + a * next_tap_h + b * next_tap_w);
#pragma unroll
          for (int v = 0; v < V; ++v) {
            sum[a * kTile + b][v] += static_cast<Acc>(g.lane[v]) * static_cast<Acc>(value.lane[v]);
          }
        }
      }
    }
  }

  Acc* shared = reinterpret_cast<Acc*>(memory);
  reduce_block(sum, shared, threads.lane(), threads.lanes, threads.group(), threads.groups);
  const int channels = min(threads.lanes * V, params.channels - first);
  BlockSums<T> to(reduction, split, first);
  for (int i = flat_thread(); i < channels * kSums; i += blockDim.x * blockDim.y) {
    const int c = i / kSums, slot = i % kSums;
    const int a = slot / kTile, b = slot % kTile;
    if (slot < kTaps && a < tile_h && b < tile_w) {
      to.put(c * (reduction.taps + 1) + (first_a + a) * params.kernel_w + first_b + b, shared[i]);
    } else if (slot == kTaps && tile == 0) {
      to.put(c * (reduction.taps + 1) + reduction.taps, shared[i]);
    }
  }
}

template <int kTile, int V, typename T>
bool launch_gradient(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  const int64_t outputs = g.n * g.out_h * g.out_w;
  const Threads threads(g.channels_last, ceil_div(g.c, V), outputs, kThreads);
  const int64_t chunks = ceil_div(g.c, int64_t{threads.lanes} * V);
  const int64_t tiles_w = c.grad_weight ? ceil_div(g.kernel_w, kTile) : 1;
  const int64_t tiles = c.grad_weight ? ceil_div(g.kernel_h, kTile) * tiles_w : 1;
  constexpr int64_t kBlocks = 4, kReduction = 8;  // of a multiprocessor; of a split, in outputs
  const int64_t turns = ceil_div(outputs, threads.groups);
  const int64_t splits =
      best_split(turns, chunks * tiles, kBlocks * Device().multiprocessors, kReduction);
  const int64_t share = ceil_div(turns, splits) * threads.groups;
  if (splits * chunks * tiles >= kMostFastDivided) {
    return false;
  }
  // A single output does not move: strides larger than images are equivalent.
  const auto stride = [](int64_t s, int64_t out) { return static_cast<int>(out == 1 ? 1 : s); };
  const auto dilation = [](int64_t d, int64_t k) { return static_cast<int>(k == 1 ? 1 : d); };
  const GradientParams params{static_cast<int>(g.h),
                              static_cast<int>(g.w),
                              static_cast<int>(g.out_h),
                              static_cast<int>(g.out_w),
                              static_cast<int>(g.kernel_h),
                              static_cast<int>(g.kernel_w),
                              stride(g.stride_h, g.out_h),
                              stride(g.stride_w, g.out_w),
                              static_cast<int>(g.padding_h),
                              static_cast<int>(g.padding_w),
                              dilation(g.dilation_h, g.kernel_h),
                              dilation(g.dilation_w, g.kernel_w),
                              Strides(g, g.h, g.w),
                              Strides(g, g.out_h, g.out_w),
                              threads,
                              static_cast<int>(g.c),
                              static_cast<int>(chunks),
                              static_cast<int>(tiles_w),
                              static_cast<int>(tiles),
                              static_cast<int>(outputs),
                              static_cast<int>(share),
                              FastDivide(g.out_w),
                              FastDivide(g.out_h)};
  const size_t shared =
      sizeof(acc_t<T>) * reduction_elements(threads.lanes, threads.groups, (kTile * kTile + 1) * V);
  two_stage_reduction(c, splits, [&](const WeightReduction<T>& reduction) {
    launch_kernel(direct_runtime_weight_gradient_kernel<kTile, V, T>, dim3(splits * chunks * tiles),
                  threads.block(), shared, c.stream, params, c.x, c.grad, reduction);
  });
  return true;
}

}  // namespace

template <typename T>
bool direct_l1_runtime_weight_gradient(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  if (!fits_32_bits(g)) {
    return false;
  }
  // The tile of taps with fewer beyond the filter.
  const auto slots = [&](int64_t tile) {
    return ceil_div(g.kernel_h, tile) * ceil_div(g.kernel_w, tile) * tile * tile;
  };
  constexpr int V = sizeof(T) == 2 ? 2 : 1;
  const bool vectors =
      V > 1 && g.channels_last && g.c % V == 0 && are_aligned({c.x, c.grad}, V * sizeof(T));
  if (slots(3) < slots(4)) {
    return vectors ? launch_gradient<3, V>(c) : launch_gradient<3, 1>(c);
  }
  return vectors ? launch_gradient<4, V>(c) : launch_gradient<4, 1>(c);
}

#define OPS_INSTANTIATE(T)                                \
  template bool direct_l1_runtime(const Convolution<T>&); \
  template bool direct_l1_runtime_weight_gradient(const WeightGradient<T>&)
OPS_INSTANTIATE(double);
OPS_INSTANTIATE(float);
OPS_INSTANTIATE(Half);
OPS_INSTANTIATE(BFloat16);
#undef OPS_INSTANTIATE

}  // namespace ops::cuda
