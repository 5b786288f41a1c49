// direct_l1_runtime: any kernel size, stride, dilation, padding and dtype, as run-time values.
//
//      output rows o, o + s, …            input                          shared memory
//      ┌───┐ ┌───┐                ┌─────────────────────┐              ┌──────────────────┐
//      │ q │ │ q │  one thread ◄──│  L1 cache, no stage │              │ filter [tap][c]  │
//      └───┘ └───┘                └─────────────────────┘              └──────────────────┘
//
// Forward and input gradient
//   block:   lanes × V channels of every n-th group of tiles; tile: the outputs of a thread
//   shared:  NHWC: the filters of these channels, transposed to [tap][channel]; NCHW: nothing
//   thread:  1 or 4 outputs that share taps, V channels each: kRows rows out_step apart, or a pixel
//            of kImages images (one of the two is 1)
#include <numeric>

#include "depthwise_conv2d/cuda/general/direct_l1_runtime.cuh"

namespace ops::cuda {
namespace {

constexpr size_t kFilterBytes = 32 * 1024;

// Index map of one axis of a convolution or of its input gradient (`transposed`). With (tap, in) =
// start(o), output o is the sum over k of tap + k · tap_step times input in + k · in_step.
template <typename Index>
struct Axis {
  Index in, out, taps;
  Index stride, dilation, padding;
  bool transposed;
  Index tap_step, in_step;
  Index out_step, in_of_out;  // outputs out_step apart use the same taps, on inputs in_of_out apart
  Index before;               // quotient added to keep dividends positive
  DivideBy<Index> by_stride, by_in_step, by_tap_step;

  Axis(int64_t in_size, int64_t out_size, int64_t kernel, int64_t s, int64_t d, int64_t p, bool t)
      : in(in_size),
        out(out_size),
        taps(kernel),
        stride(std::min(s, kLargestSize<Index>)),  // equivalent to any larger stride
        dilation(kernel == 1 ? 1 : d),             // unused with one tap
        padding(p),
        transposed(t),
        tap_step(t ? stride / std::gcd(stride, dilation) : 1),
        in_step(t ? -dilation / std::gcd(stride, dilation) : dilation),
        out_step(t ? stride : 1),
        in_of_out(t ? 1 : stride),
        before(ceil_div(kLargestSize<Index>, stride)),
        by_stride(stride),
        by_in_step(std::abs(in_step)),
        by_tap_step(tap_step) {}

  struct Start {
    Index tap, in;
  };
  __device__ Start start(Index o) const {
    if (!transposed) {
      return {0, o * stride - padding};
    }
    const Index most = min(tap_step, taps);
    Index distance = o + padding;  // = input · stride + tap · dilation
    for (Index tap = 0; tap < most; ++tap, distance -= dilation) {
      const Index at = by_stride(distance + before * stride) - before;
      if (at * stride == distance) {
        return {tap, at};
      }
    }
    return {taps, 0};
  }
  // Advance `at` past taps on padding; return the number of taps inside the image.
  __device__ Index clip(Start& at) const {
    const Index outside = transposed ? at.in - (in - 1) : -at.in;  // inputs before the image
    if (outside > 0) {
      const Index skipped = by_in_step(outside + abs(in_step) - 1);
      at.tap += skipped * tap_step, at.in += skipped * in_step;
    }
    const Index inside = transposed ? at.in : in - 1 - at.in;  // inputs after this one
    if (inside < 0 || at.tap >= taps) {
      return 0;
    }
    return min(by_in_step(inside), by_tap_step(taps - 1 - at.tap)) + 1;
  }
};

template <typename Index>
struct ConvolutionParams {
  Axis<Index> rows, cols;
  DirectStrides<Index> in, out;
  RuntimeThreads threads;
  Index images, channels;
  Index chunks;            // blocks along channels
  Index row_tiles, tiles;  // output tiles: of a column of an image; of a channel
  DivideBy<Index> by_cols, by_row_tiles, by_out_step;
};

// kStaged: stage filters in shared memory (NHWC, where lanes read filters of different channels),
// if they fit. The bound on blocks per SM leaves enough registers to load 4 taps at once.
template <int kRows, int kImages, int V, bool kStaged, typename Index, typename T>
__global__ void __launch_bounds__(kRuntimeThreads, kRows* kImages > 1 ? 3 : 4)
    direct_runtime_kernel(ConvolutionParams<Index> params, const T* __restrict__ in,
                          const T* __restrict__ weight, const T* __restrict__ bias,
                          T* __restrict__ out) {
  using Acc = acc_t<T>;
  constexpr int kOutputs = kRows * kImages;
  extern __shared__ __align__(16) unsigned char memory[];
  Acc* filters = reinterpret_cast<Acc*>(memory);  // [tap][channel of the block]
  const Axis<Index>&rows = params.rows, &cols = params.cols;
  const RuntimeThreads& threads = params.threads;
  const int pitch = (threads.lanes + 1) * V;
  const Index taps = rows.taps * cols.taps;
  const Index first = blockIdx.x % params.chunks * threads.lanes * V;
  if constexpr (kStaged) {
    const int count = min(threads.lanes * V, params.channels - first) * taps;
#pragma unroll 8
    for (int i = flat_thread(); i < count; i += blockDim.x * blockDim.y) {
      filters[i % taps * pitch + i / taps] = static_cast<Acc>(weight[first * taps + i]);
    }
    __syncthreads();
  }
  const Index channel = first + threads.lane() * V;
  if (channel >= params.channels) {
    return;
  }
  filters += threads.lane() * V;
  weight += channel * taps;
  Acc initial[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    initial[v] = bias ? static_cast<Acc>(bias[channel + v]) : Acc(0);
  }
  in += channel * static_cast<int64_t>(params.in.c);
  out += channel * static_cast<int64_t>(params.out.c);
  const Index step = gridDim.x / params.chunks * threads.groups;
  for (Index tile = blockIdx.x / params.chunks * threads.groups + threads.group();
       tile < params.tiles; tile += step) {
    const Index line = params.by_cols(tile), image_tile = params.by_row_tiles(line);
    const Index col = tile - line * cols.out, row_tile = line - image_tile * params.row_tiles;
    const Index first_image = image_tile * kImages;
    Index row = row_tile;  // of the thread's first output
    if constexpr (kRows > 1) {
      row += params.by_out_step(row_tile) * (kRows - 1) * rows.out_step;
    }
    auto at_row = rows.start(row), at_col = cols.start(col);
    const Index col_taps = cols.clip(at_col);
    Acc sum[kOutputs][V];
#pragma unroll
    for (int i = 0; i < kOutputs * V; ++i) {
      sum[i / V][i % V] = initial[i % V];
    }
    const T* image[kImages];  // clamped to the last image; sums of clamped images are not stored
#pragma unroll
    for (int i = 0; i < kImages; ++i) {
      image[i] = in + min(first_image + i, params.images - 1) * params.in.n +
                 static_cast<int64_t>(at_col.in) * params.in.w;
    }
    const Index next_x = cols.in_step * params.in.w;
    Index row_taps = rows.taps;
    if constexpr (kRows == 1) {
      row_taps = rows.clip(at_row);
    }
    for (; row_taps > 0 && at_row.tap < rows.taps; --row_taps) {
      const T* from[kOutputs];
      bool inside[kRows];
#pragma unroll
      for (int q = 0; q < kRows; ++q) {
        const Index y = at_row.in + q * rows.in_of_out;
        inside[q] = kRows == 1 || is_inside(y, rows.in);
#pragma unroll
        for (int i = 0; i < kImages; ++i) {
          from[q * kImages + i] = image[i] + static_cast<int64_t>(y) * params.in.h;
        }
      }
      const Index first_tap = at_row.tap * cols.taps + at_col.tap;
#pragma unroll 4
      for (Index k = 0; k < col_taps; ++k) {
        Vector<Acc, V> tap;
        if constexpr (kStaged) {
          tap = *reinterpret_cast<const Vector<Acc, V>*>(filters +
                                                         (first_tap + k * cols.tap_step) * pitch);
        } else {
          tap.lane[0] = static_cast<Acc>(weight[first_tap + k * cols.tap_step]);
        }
#pragma unroll
        for (int q = 0; q < kOutputs; ++q) {
          if (inside[q / kImages]) {
            const Vector<T, V> x = load_vector<V>(from[q] + k * next_x);
#pragma unroll
            for (int v = 0; v < V; ++v) {
              sum[q][v] += tap.lane[v] * static_cast<Acc>(x.lane[v]);
            }
          }
        }
      }
      at_row.tap += rows.tap_step, at_row.in += rows.in_step;
    }
#pragma unroll
    for (int q = 0; q < kOutputs; ++q) {
      const Index n = first_image + q % kImages;
      const int64_t y = row + static_cast<int64_t>(q / kImages) * rows.out_step;
      if (n < params.images && y < rows.out) {
        store_vector(
            out + n * params.out.n + y * params.out.h + static_cast<int64_t>(col) * params.out.w,
            sum[q]);
      }
    }
  }
}

template <int kRows, int kImages, int V, bool kStaged, typename Index, typename T>
void launch_convolution(const Convolution<T>& c, const Axis<Index>& rows, const Axis<Index>& cols) {
  const DepthwiseGeometry& g = c.g;
  const int64_t filter_bytes = kStaged ? sizeof(acc_t<T>) * V * rows.taps * cols.taps : 1;
  const int64_t max_lanes = std::max<int64_t>(1, kFilterBytes / filter_bytes - 1);
  const int64_t row_tiles =
      kRows == 1 ? c.out.h : ceil_div(c.out.h, int64_t{rows.out_step} * kRows) * rows.out_step;
  const int64_t tiles = ceil_div(g.n, kImages) * row_tiles * c.out.w;
  const RuntimeThreads threads(g.channels_last, ceil_div(g.c, V), tiles, max_lanes);
  const size_t shared = kStaged ? (threads.lanes + 1) * filter_bytes : 0;
  const int64_t chunks = ceil_div(g.c, int64_t{threads.lanes} * V);
  // Staged filters are reused by several tiles per thread once there are kBlocks blocks per SM.
  constexpr int64_t kBlocks = 32;
  const int64_t most = ceil_div(kBlocks * Device().multiprocessors, chunks);
  const int64_t all = ceil_div(tiles, threads.groups);
  const int64_t turns = kStaged ? ceil_div(all, most) : 1;
  const ConvolutionParams<Index> params{rows,
                                        cols,
                                        DirectStrides<Index>(g, c.in.h, c.in.w),
                                        DirectStrides<Index>(g, c.out.h, c.out.w),
                                        threads,
                                        static_cast<Index>(g.n),
                                        static_cast<Index>(g.c),
                                        static_cast<Index>(chunks),
                                        static_cast<Index>(row_tiles),
                                        static_cast<Index>(tiles),
                                        DivideBy<Index>(c.out.w),
                                        DivideBy<Index>(row_tiles),
                                        DivideBy<Index>(rows.out_step)};
  c.launch(direct_runtime_kernel<kRows, kImages, V, kStaged, Index, T>,
           dim3(ceil_div(all, turns) * chunks), threads.block(), shared, params, c.in.data,
           c.weight, c.bias, c.out.data);
}

// Call launch(rows, cols) with the maps of both axes.
template <typename Index, typename T, typename F>
void with_axes(const Convolution<T>& c, const F& launch) {
  const DepthwiseGeometry& g = c.g;
  const bool backward = c.transposed || c.flip;
  launch(Axis<Index>(c.in.h, c.out.h, g.kernel_h, g.stride_h, g.dilation_h, g.padding_h, backward),
         Axis<Index>(c.in.w, c.out.w, g.kernel_w, g.stride_w, g.dilation_w, g.padding_w, backward));
}

}  // namespace

template <typename T>
void direct_l1_runtime(const Convolution<T>& c) {
  const DepthwiseGeometry& g = c.g;
  if (!fits_32_bits(g)) {
    with_axes<int64_t>(c, [&](const auto& rows, const auto& cols) {
      launch_convolution<1, 1, 1, false>(c, rows, cols);
    });
    return;
  }
  constexpr int kMaxChannels = 8 / sizeof(T);  // per vector
  // At least one lane and the padding.
  const bool staged = g.channels_last &&
                      2 * sizeof(acc_t<T>) * kMaxChannels * g.kernel_h * g.kernel_w <= kSharedBytes;
  const int64_t channels = staged ? g.c : 1;
  with_axes<int>(c, [&](const auto& rows, const auto& cols) {
    dispatch_width<T, kMaxChannels>({c.in.data, c.out.data}, {channels}, [&](auto width) {
      constexpr int V = width.value;
      const auto launch = [&](auto rows_per_thread, auto images_per_thread) {
        constexpr int kRows = rows_per_thread.value, kImages = images_per_thread.value;
        if constexpr (V == 1) {
          if (!staged) {
            return launch_convolution<kRows, kImages, V, false>(c, rows, cols);
          }
        }
        launch_convolution<kRows, kImages, V, true>(c, rows, cols);
      };
      // Compute 4 outputs per thread if one output per thread makes at least 4 blocks per SM, and a
      // multiple of 4 adds at most 20 %. Rows need a bounds test per tap, images do not: prefer
      // images for 4 or more taps along a row (measured on an H200).
      const int64_t blocks =
          g.n * g.c * c.out.h * c.out.w / V / kRuntimeThreads / Device().multiprocessors;
      const auto fits = [&](int64_t size, int64_t multiple) {
        return blocks >= 4 && ceil_div(size, multiple) * multiple * 5 <= size * 6;
      };
      const bool fits_rows = fits(c.out.h, int64_t{4} * rows.out_step);
      const bool many_taps = ceil_div(cols.taps, cols.tap_step) >= 4;
      if (fits(g.n, 4) && (many_taps || !fits_rows)) {
        launch(Width<1>{}, Width<4>{});
      } else if (fits_rows) {
        launch(Width<4>{}, Width<1>{});
      } else {
        launch(Width<1>{}, Width<1>{});
      }
    });
  });
}

#define OPS_INSTANTIATE(T) template void direct_l1_runtime(const Convolution<T>&)
OPS_INSTANTIATE(double);
OPS_INSTANTIATE(float);
OPS_INSTANTIATE(Half);
OPS_INSTANTIATE(BFloat16);
#undef OPS_INSTANTIATE

}  // namespace ops::cuda
