// toeplitz: 16 bits, stride 1, dilation 1, both layouts: implicit GEMM on matrix units.
//
//      16 overlapping windows      banded Toeplitz matrix       16 × 8 adjacent outputs,
//      x[8 i + m]                  w[m − j]                     one product per 16 taps
//      ┌───────────────┐           ┌───────────┐                ┌───────┐
//      │ 16 inputs     │     ×     │ t         │          ──►   │ += 8  │
//      │   16 inputs   │           │ t t       │                └───────┘
//      │     16 inputs │           │ t t t   8 │ outputs
//      └───────────────┘           └───────────┘
//
//   block:   8 rows, 512 outputs at a time (planes), or 32 × 256 outputs (channels-last)
//   shared:  rows of inputs (planes: of two tiles) and filters; channels-last: rows of outputs
//   thread:  4 accumulators of each of 2 tiles of 128 outputs
//
// The words of the windows, 8 i + 2 t, are adjacent across a warp: no bank conflicts. In planes
// `shift` zeros lead the filter, so that loads are aligned (as in planes.cu).
#include "depthwise_conv1d/cuda/stage.cuh"

namespace ops::depthwise_conv1d {
namespace {

constexpr int kTile = 128, kTiles = 2, kDepth = 16;  // outputs per product, tiles at once, taps

// Filter of one row in shared memory: zeros for 8 taps, then the taps, then zeros. Two copies:
// words that begin with even and with odd taps.
constexpr int filter_words(int products) {
  return round_up(products * kDepth / 2 + 8, 32) + 16;  // different banks for the copies
}

// Stage the filters of kRows adjacent channels, of which `rows` exist. All loads precede the
// stores.
template <int kRows, typename T>
__device__ void stage_filters(unsigned* to, const Convolution<T>& p, int channel, int rows,
                              int shift, int products) {
  const int taps = p.taps, words = filter_words(products);
  const auto* const weight =
      reinterpret_cast<const unsigned short*>(p.weight) + static_cast<int64_t>(channel) * taps;
  for (int i = threadIdx.x % 32; i < products * kDepth / 2 + 8; i += 32) {
    const int first = 2 * i - 9 - shift;
    unsigned three[kRows][3];  // taps first, first + 1, first + 2
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        const bool exists = r < rows && is_inside(first + j, taps);
        three[r][j] = exists ? weight[r * p.taps + p.tap(first + j)] : 0;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      to[2 * r * words + i] = three[r][1] | three[r][2] << 16;
      to[(2 * r + 1) * words + i] = three[r][0] | three[r][1] << 16;
    }
  }
}

// A row of a tile: inputs and filter in shared memory, outputs from position t0 on.
template <typename T>
struct RowTile {
  const unsigned* in;
  const unsigned* filter;
  int products, image, channel, t0;
  float bias;
};

// Finish two adjacent outputs from position t on: recompute those that are NaN, then the
// activation.
template <typename T>
__device__ void finish(const Convolution<T>& p, const RowTile<T>& row, int t, float& y0,
                       float& y1) {
  float* const y[2] = {&y0, &y1};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (is_inside(t + i, static_cast<int>(p.out_t))) {
      if (isnan(*y[i])) {
        *y[i] = p.exact(row.image, row.channel, t + i);
      }
      if (p.silu) {
        const int64_t offset =
            p.out.row(row.image, row.channel) - p.out.data + (t + i) * p.out.t_stride;
        *y[i] = p.activate(*y[i], p.grad ? static_cast<float>(p.grad[offset]) : 0.0f);
      }
    }
  }
}

// Compute the row's outputs; store_pair(t − t0, packed, whether all of the tile's exist).
template <int kRowTile, typename T, typename F>
__device__ __forceinline__ void convolve(const Convolution<T>& p, const RowTile<T>& row,
                                         const F& store_pair) {
  const int lane = threadIdx.x % 32, out_t = p.out_t;
  const Lane at;
  // The lane's pair of taps: 2 t − g.
  const unsigned* const pair_of_taps =
      row.filter + (at.g % 2 ? filter_words(row.products) + 1 : 0) + at.t - (at.g + 1) / 2 + 4;
#pragma unroll 1
  for (int first = 0; first < kRowTile && row.t0 + first < out_t; first += kTile * kTiles) {
    float sum[kTiles][4];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[n][i] = row.bias;
      }
    }
    const unsigned* x = row.in + first / 2 + lane;
#pragma unroll 3
    for (int i = 0; i < row.products; ++i, x += kDepth / 2) {
      const unsigned taps[2] = {pair_of_taps[i * kDepth / 2], pair_of_taps[i * kDepth / 2 + 4]};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const unsigned* const words = x + n * kTile / 2;
        Packed<T>::mma(sum[n], sum[n], words[0], words[32], words[4], words[36], taps);
      }
    }
    float nan_check = 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      nan_check += (sum[n][0] + sum[n][1]) + (sum[n][2] + sum[n][3]);
    }
    const bool whole = row.t0 + first >= 0 && row.t0 + first + kTile * kTiles <= out_t;
    const bool unfinished = p.silu || isnan(nan_check);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int local = first + n * kTile + half * 64 + 2 * lane;
        float &y0 = sum[n][2 * half], &y1 = sum[n][2 * half + 1];
        if (unfinished) {
          finish(p, row, row.t0 + local, y0, y1);
        }
        store_pair(local, Packed<T>::pack(y0, y1), whole);
      }
    }
  }
}

// [N, C, T]: a warp takes tiles of one row, and loads the next one at the same time.
template <typename T>
__global__ void __launch_bounds__(kStageThreads, 4)
    planes_toeplitz_kernel(const Convolution<T> p, int products, int pitch, int tiles) {
  using Shape = StageShape<false>;
  extern __shared__ uint4 aligned_shared[];
  const int warp = threadIdx.x / 32;
  unsigned* const shared = reinterpret_cast<unsigned*>(aligned_shared);
  unsigned* const inputs = shared + warp * 2 * pitch;
  unsigned* const filter = shared + kWarps * 2 * pitch + warp * 2 * filter_words(products);
  const unsigned channels = p.c, row = blockIdx.x * Shape::kRows + warp;
  if (row >= static_cast<unsigned>(p.n * p.c)) {
    return;
  }
  const unsigned image = row / channels, channel = row - image * channels;
  const int out_t = p.out_t;
  const T* const in = p.in.row(image, channel);
  T* const out = p.out.row(image, channel);
  const int start = -misalignment(out, 2) - static_cast<int>(p.padding);
  const int shift = (misalignment(in, kAligned) + start) & (kAligned - 1);
  const auto stage = [&](int tile) {
    const int outputs = round_up(out_t - tile * Shape::kTile + 1, kAligned);
    stage_row(inputs + tile % 2 * pitch, in, tile * Shape::kTile + start - shift,
              min(Shape::kTile, outputs) + kDepth * products, static_cast<int>(p.in_t));
  };
  const int first_tile = blockIdx.y * tiles;
  stage(first_tile);
  commit_copies();
  stage_filters<1>(filter, p, channel, 1, shift, products);
  const float bias = p.bias_of(channel);
  for (int tile = first_tile; tile < first_tile + tiles; ++tile) {
    const int t0 = tile * Shape::kTile - misalignment(out, 2);
    if (t0 >= out_t) {
      break;
    }
    if (tile + 1 < first_tile + tiles) {
      stage(tile + 1);
    }
    commit_copies();
    wait_for_copies<1>();
    __syncwarp();
    const RowTile<T> at{inputs + tile % 2 * pitch, filter, products, static_cast<int>(image),
                        static_cast<int>(channel), t0,     bias};
    convolve<Shape::kTile>(p, at, [&](int local, unsigned packed, bool whole) {
      T* const to = out + t0 + local;
      if (whole) {
        *reinterpret_cast<unsigned*>(to) = packed;
        return;
      }
      const auto* const pair = reinterpret_cast<const unsigned short*>(&packed);
      for (int i = 0; i < 2; ++i) {
        if (is_inside(t0 + local + i, out_t)) {
          reinterpret_cast<unsigned short*>(to)[i] = pair[i];
        }
      }
    });
    __syncwarp();
  }
  wait_for_copies<0>();
}

// [N, T, C]: a block transposes a tile to rows in shared memory, and its outputs back.
template <typename T>
__global__ void __launch_bounds__(kStageThreads, 4)
    channels_toeplitz_kernel(const Convolution<T> p, int products, int pitch, int tiles) {
  using Shape = StageShape<true>;
  constexpr int kOutPitch = Shape::pitch(Shape::kTile);
  extern __shared__ uint4 aligned_shared[];
  unsigned* const inputs = reinterpret_cast<unsigned*>(aligned_shared);
  unsigned* const outputs = inputs + Shape::kRows * pitch;
  const int warp = threadIdx.x / 32, channels = p.c;
  unsigned* const filters = outputs + Shape::kRows * kOutPitch;
  // Adjacent blocks have adjacent channels, so that rows of memory are read as a whole.
  const unsigned blocks = (channels + Shape::kRows - 1) / Shape::kRows, tile = blockIdx.x / blocks;
  const int image = tile / tiles, t0 = (tile - image * tiles) * Shape::kTile;
  const int first_channel = (blockIdx.x - tile * blocks) * Shape::kRows;
  const int lane_channel = first_channel + octet() * 8;
  stage_channels(
      inputs, pitch, p.in.row(image, lane_channel), p.in.t_stride, t0 - static_cast<int>(p.padding),
      min(Shape::kTile, round_up(static_cast<int>(p.out_t) - t0, kAligned)) + kDepth * products,
      lane_channel < channels ? static_cast<int>(p.in_t) : 0);
  const int first_row = warp * Shape::kRowsPerWarp;
  stage_filters<Shape::kRowsPerWarp>(filters + first_row * 2 * filter_words(products), p,
                                     first_channel + first_row,
                                     channels - first_channel - first_row, 0, products);
  __syncthreads();
#pragma unroll 1
  for (int r = 0; r < Shape::kRowsPerWarp; ++r) {
    const int row = warp * Shape::kRowsPerWarp + r, channel = first_channel + row;
    if (channel >= channels) {
      break;
    }
    const unsigned* const filter = filters + row * 2 * filter_words(products);
    const RowTile<T> at{inputs + row * pitch, filter, products, image, channel, t0,
                        p.bias_of(channel)};
    convolve<Shape::kTile>(p, at, [&](int local, unsigned packed, bool) {
      outputs[row * kOutPitch + local / 2] = packed;
    });
  }
  __syncthreads();
  store_channels(outputs, kOutPitch, p.out.row(image, lane_channel), p.out.t_stride, t0,
                 Shape::kTile, lane_channel < channels ? static_cast<int>(p.out_t) : 0);
}

template <typename T, bool kChannelsLast>
bool launch(const Convolution<T>& p, const Run& run) {
  using Shape = StageShape<kChannelsLast>;
  // Zeros before and after the taps in a product's window, and those that align loads.
  const int products = ceil_div(p.taps + 7 + (kChannelsLast ? 0 : kAligned - 1), kDepth);
  const int pitch = Shape::pitch(Shape::kTile + kDepth * products);
  const size_t words = Shape::kRows * (Shape::kBuffers * pitch + 2 * filter_words(products)) +
                       (kChannelsLast ? Shape::kRows * Shape::pitch(Shape::kTile) : 0);
  if (words * sizeof(unsigned) > Device().block_shared) {
    return false;
  }
  const auto start = [&](auto kernel, dim3 grid, int64_t tiles) {
    launch_kernel(kernel, grid, kStageThreads, words * sizeof(unsigned), run.stream, p, products,
                  pitch, static_cast<int>(tiles));
    return true;
  };
  const int64_t tiles = ceil_div(p.out_t + (kChannelsLast ? 0 : 1), Shape::kTile);
  if constexpr (kChannelsLast) {
    const int64_t blocks = ceil_div(p.c, Shape::kRows);
    return p.n * tiles * blocks < int64_t{1} << 31 &&
           start(channels_toeplitz_kernel<T>, p.n * tiles * blocks, tiles);
  } else {
    constexpr int64_t kBlocksPerMultiprocessor = 8;
    const int64_t blocks = ceil_div(p.n * p.c, Shape::kRows);
    const int64_t wanted =
        Device::attribute(cudaDevAttrMultiProcessorCount) * kBlocksPerMultiprocessor / blocks;
    const int64_t length = ceil_div(tiles, std::clamp<int64_t>(wanted, 1, tiles));
    return ceil_div(tiles, length) <= 65535 &&
           start(planes_toeplitz_kernel<T>, dim3(blocks, ceil_div(tiles, length)), length);
  }
}

}  // namespace

template <typename T>
bool toeplitz(const Convolution<T>& p, const Run& run) {
  if (!has_mma() || !p.is_tileable() || p.dilation != 1) {
    return false;
  }
  if (p.channels_last) {
    return p.c % 8 == 0 && p.in.c_stride == 1 && p.in.n_stride % 8 == 0 && p.in.t_stride % 8 == 0 &&
           are_aligned({p.in.data, p.out.data}, kVectorBytes) && launch<T, true>(p, run);
  }
  return p.in.t_stride == 1 && launch<T, false>(p, run);
}

template bool toeplitz(const Convolution<Half>&, const Run&);
template bool toeplitz(const Convolution<BFloat16>&, const Run&);

}  // namespace ops::depthwise_conv1d
