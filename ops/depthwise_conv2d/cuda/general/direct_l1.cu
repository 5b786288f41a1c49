// direct_l1: reads global memory through the L1 cache, without staging.
//
//      input window                     output
//      ┌───────────────┐               ┌───────────┐
//      │ x x x x x x x │  FMA, taps    │ register  │
//      │ x x x x x x x │ ────────────► │ tile      │
//      └───────────────┘               └───────────┘
//
//   block:   a range of register tiles of all images, of lanes × V channels
//   shared:  the filters of these channels, [tap][channel], where threads read them together
//   thread:  a register tile; overlapping windows hit the L1 cache
//
// direct_l1: compile-time kernel, stride and dilation. For small problems and unaligned NHWC. Tiles
// of 2 or 4 rows × 4 columns (small NCHW forward: 1 × 2); the filter is in registers.
// direct_l1_runtime: any kernel size, stride, dilation, padding and dtype. Tiles of 1 or 4 outputs
// that share taps: kRows rows out_step apart, or a pixel of kImages images (one of the two is 1).
#include "depthwise_conv2d/cuda/general/direct.cuh"

namespace ops::depthwise_conv2d {
namespace {

template <typename AxisMap, int kTileRows, int kTileCols, int V, typename T>
struct CompiledTile {
  using Map = AxisMap;
  using Axis = CompiledAxis<Map>;
  static constexpr int kImages = 1, kRows = kTileRows, kCols = kTileCols, kChannels = V;
  static constexpr int kTaps = Map::kTaps * Map::kTaps;
  static constexpr bool kStaged = Map::kTaps > 3;  // 3×3: lower latency from global memory
  static constexpr bool kReusesFilters = true;
  static constexpr int kResident = 0;  // blocks per SM, at least; 0: chosen by the compiler

  float filter[kTaps][V];

  // Place in shared memory of element i of the block's filters: [channel][tap].
  __device__ static int slot(int i, int, int) { return i; }

  __device__ CompiledTile(const DirectParams<CompiledTile>& params, const float* shared,
                          const T* weight, bool flip) {
    shared += params.threads.lane() * V * kTaps;
#pragma unroll
    for (int i = 0; i < kTaps * V; ++i) {
      const int tap = i / V, from = i % V * kTaps + (flip ? kTaps - 1 - tap : tap);
      filter[tap][i % V] = kStaged ? shared[from] : static_cast<float>(weight[from]);
    }
  }

  __device__ void accumulate(const DirectParams<CompiledTile>& params, const Position<int>& at,
                             const T* in, float (&sum)[kRows * kCols][V]) const {
    for_each_product(params, at, in, [&](int q, int j, int tap, const float (&x)[V]) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        sum[q * kCols + j][v] += filter[tap][v] * x[v];
      }
    });
  }
};

// The bound on blocks per SM leaves enough registers to load 4 taps at once.
template <int kTileRows, int kTileImages, int V, bool kStagedFilters, typename Index, typename T>
struct RuntimeTile {
  using Axis = RuntimeAxis<Index>;
  static constexpr int kImages = kTileImages, kRows = kTileRows, kCols = 1, kChannels = V;
  static constexpr bool kStaged = kStagedFilters, kReusesFilters = kStaged;
  static constexpr int kOutputs = kImages * kRows, kResident = kOutputs > 1 ? 3 : 4;
  using Acc = acc_t<T>;

  const Acc* filters;  // [tap][channel], if kStaged
  const T* weight;
  const int pitch;

  // Rows of the filters in shared memory are a vector longer than the block's channels.
  __device__ static int slot(int i, int taps, int pitch) { return i % taps * pitch + i / taps; }

  __device__ RuntimeTile(const DirectParams<RuntimeTile>& params, const Acc* shared,
                         const T* weight, bool)
      : filters(shared + params.threads.lane() * V), weight(weight), pitch(params.filter_pitch()) {}

  __device__ void accumulate(const DirectParams<RuntimeTile>& params, const Position<Index>& at,
                             const T* in, Acc (&sum)[kOutputs][V]) const {
    const Axis &rows = params.rows, &cols = params.cols;
    auto at_row = rows.start(at.row), at_col = cols.start(at.col);
    const Index col_taps = cols.clip(at_col);
    const T* image[kImages];  // clamped to the last image; sums of clamped images are not stored
#pragma unroll
    for (int i = 0; i < kImages; ++i) {
      image[i] = in + params.in.offset({min(at.image + i, params.images - 1), 0, at_col.in});
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
      for (int q = 0; q < kOutputs; ++q) {
        const Index y = at_row.in + q % kRows * rows.in_of_out;
        inside[q % kRows] = kRows == 1 || is_inside(y, rows.in);
        from[q] = image[q / kRows] + static_cast<int64_t>(y) * params.in.h;
      }
      const Index first_tap = at_row.tap * cols.taps + at_col.tap;
#pragma unroll 4
      for (Index k = 0; k < col_taps; ++k) {
        const Index index = first_tap + k * cols.tap_step;
        Vector<Acc, V> tap;
        if constexpr (kStaged) {
          tap = *reinterpret_cast<const Vector<Acc, V>*>(filters + index * pitch);
        } else {
          tap.lane[0] = static_cast<Acc>(weight[index]);
        }
#pragma unroll
        for (int q = 0; q < kOutputs; ++q) {
          if (inside[q % kRows]) {
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
  }
};

// Grid (chunk of channels, range of tiles).
template <typename Tile, typename T>
__global__ void __launch_bounds__(kDirectThreads, Tile::kResident)
    direct_kernel(DirectParams<Tile> params, bool flip, const T* __restrict__ in,
                  const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out) {
  using Acc = acc_t<T>;
  using Index = typename DirectParams<Tile>::Index;
  constexpr int kCols = Tile::kCols, kMap = Tile::kRows * kCols, V = Tile::kChannels;
  extern __shared__ __align__(16) unsigned char memory[];
  Acc* filters = reinterpret_cast<Acc*>(memory);
  const DirectThreads& threads = params.threads;
  const auto& rows = params.rows;
  const Index taps = rows.taps * params.cols.taps;
  const Index first = static_cast<Index>(blockIdx.x) * threads.lanes * V;
  const Index channel = first + threads.lane() * V;
  if constexpr (Tile::kStaged) {
    const int count = min(static_cast<Index>(threads.lanes * V), params.channels - first) * taps;
#pragma unroll 8
    for (int i = flat_thread(); i < count; i += blockDim.x * blockDim.y) {
      filters[Tile::slot(i, taps, params.filter_pitch())] =
          static_cast<Acc>(weight[first * taps + i]);
    }
    __syncthreads();
  }
  if (channel >= params.channels) {
    return;
  }
  const Tile tile(params, filters, weight + channel * taps, flip);
  Acc initial[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    initial[v] = bias ? static_cast<Acc>(bias[channel + v]) : Acc(0);
  }
  in += channel * static_cast<int64_t>(params.in.c);
  out += channel * static_cast<int64_t>(params.out.c);
  const Index begin = blockIdx.y * params.share, end = min(begin + params.share, params.tiles);
#pragma unroll 1
  for (Index i = begin + threads.group(); i < end; i += threads.groups) {
    const auto at = params.first(i);
    Acc sum[Tile::kImages * kMap][V];
#pragma unroll
    for (int k = 0; k < Tile::kImages * kMap * V; ++k) {
      sum[k / V][k % V] = initial[k % V];
    }
    tile.accumulate(params, at, in, sum);
    T* image = out + params.out.offset(at);
#pragma unroll
    for (int n = 0; n < Tile::kImages; ++n, image += params.out.n) {
      T* to = image;
#pragma unroll
      for (int q = 0; q < Tile::kRows; ++q) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          if (at.image + n < params.images && at.row + q * rows.out_step < rows.out &&
              at.col + j < params.cols.out) {
            store_vector(to + j * params.out.w, sum[(n * Tile::kRows + q) * kCols + j]);
          }
        }
        to += static_cast<int64_t>(rows.out_step) * params.out.h;
      }
    }
  }
}

template <typename Tile, typename T>
void launch_tiles(const Convolution<T>& c, const typename Tile::Axis& rows,
                  const typename Tile::Axis& cols, int64_t max_lanes) {
  constexpr int64_t kBlocks = 32, kMaxGrid = 65535;  // blocks: per SM; along y
  DirectParams<Tile> params(c.g, rows, cols, max_lanes);
  const int64_t blocks = params.divide(
      Tile::kReusesFilters ? kBlocks * Device().multiprocessors / params.chunks : kMaxGrid);
  const size_t filters =
      sizeof(acc_t<T>) * (params.threads.lanes + 1) * Tile::kChannels * rows.taps * cols.taps;
  c.launch(direct_kernel<Tile, T>, dim3(params.chunks, blocks), params.threads.block(),
           Tile::kStaged ? filters : 0, params, c.flip, c.in.data, c.weight, c.bias, c.out.data);
}

// Call launch(rows, cols) with run-time axes.
template <typename Index, typename T, typename F>
void with_axes(const Convolution<T>& c, const F& launch) {
  const bool backward = c.transposed || c.flip;
  launch(RuntimeAxis<Index>(vertical_axis(c.g, backward)),
         RuntimeAxis<Index>(horizontal_axis(c.g, backward)));
}

}  // namespace

template <typename T>
bool direct_l1(const Convolution<T>& c) {
  return dispatch_axis(c.g, c.transposed, [&](auto map) {
    using Map = decltype(map);
    constexpr int kMaxChannels = 4 / sizeof(T);  // per vector
    const int64_t channels = c.g.channels_last ? c.g.c : 1;
    return dispatch_width<T, kMaxChannels>({c.in.data, c.out.data}, {channels}, [&](auto width) {
      constexpr int V = width.value, kMaxLanes = 128 / V;
      const auto launch = [&](auto rows, auto cols) {
        launch_tiles<CompiledTile<Map, rows.value, cols.value, V, T>>(
            c, {c.in.h, c.out.h, c.padding_h}, {c.in.w, c.out.w, c.padding_w},
            c.g.channels_last ? kMaxLanes : 1);
        return true;
      };
      // High tiles re-read fewer halo rows, but need enough threads to fill the device.
      constexpr int kHighRows = 4, kCols = 4;
      const int64_t outputs = c.g.n * c.g.c * c.out.h * c.out.w;
      if (outputs / (kHighRows * kCols * V) >= int64_t{kDirectThreads} * Device().multiprocessors) {
        return launch(Width<kHighRows>{}, Width<kCols>{});
      }
      if constexpr (V == 1 && !Map::kTransposed) {
        if (!c.g.channels_last) {  // smaller tiles coalesce better
          return launch(Width<1>{}, Width<2>{});
        }
      }
      return launch(Width<2>{}, Width<kCols>{});
    });
  });
}

template <typename T>
void direct_l1_runtime(const Convolution<T>& c) {
  const Geometry& g = c.g;
  if (!fits_32_bits(g)) {
    with_axes<int64_t>(c, [&](const auto& rows, const auto& cols) {
      launch_tiles<RuntimeTile<1, 1, 1, false, int64_t, T>>(c, rows, cols, runtime_lanes(g));
    });
    return;
  }
  constexpr int kMaxChannels = 8 / sizeof(T);  // per vector
  constexpr int64_t kFilterBytes = 32 * 1024;
  const int64_t taps = g.kernel_h * g.kernel_w;
  // Lanes read filters of different channels: stage them if one lane and the padding fit.
  const bool staged = g.channels_last && 2 * sizeof(acc_t<T>) * kMaxChannels * taps <= kSharedBytes;
  with_axes<int>(c, [&](const auto& rows, const auto& cols) {
    dispatch_width<T, kMaxChannels>({c.in.data, c.out.data}, {staged ? g.c : 1}, [&](auto width) {
      constexpr int V = width.value;
      const int64_t fitting = kFilterBytes / (sizeof(acc_t<T>) * V * taps) - 1;
      const auto launch = [&](auto rows_per_thread, auto images_per_thread) {
        constexpr int kRows = rows_per_thread.value, kImages = images_per_thread.value;
        if constexpr (V == 1) {
          if (!staged) {
            return launch_tiles<RuntimeTile<kRows, kImages, V, false, int, T>>(c, rows, cols,
                                                                               runtime_lanes(g));
          }
        }
        launch_tiles<RuntimeTile<kRows, kImages, V, true, int, T>>(
            c, rows, cols, std::clamp<int64_t>(fitting, 1, runtime_lanes(g)));
      };
      // Compute 4 outputs per thread if one output per thread makes at least 4 blocks per SM, and a
      // multiple of 4 adds at most 20 %. Rows need a bounds test per tap, images do not: prefer
      // images for 4 or more taps along a row (measured on an H200).
      const int64_t blocks =
          g.n * g.c * c.out.h * c.out.w / V / kDirectThreads / Device().multiprocessors;
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
template bool direct_l1(const Convolution<float>&);
template bool direct_l1(const Convolution<Half>&);
template bool direct_l1(const Convolution<BFloat16>&);

}  // namespace ops::depthwise_conv2d
