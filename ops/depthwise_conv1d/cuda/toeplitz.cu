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
//            instead of inputs, rows of `grad`
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
  const int taps = p.taps, step = p.flip ? -1 : 1, words = filter_words(products);
  const auto* const weight = reinterpret_cast<const unsigned short*>(p.weight) +
                             static_cast<int64_t>(channel) * taps + (p.flip ? taps - 1 : 0);
  for (int i = threadIdx.x % 32; i < products * kDepth / 2 + 8; i += 32) {
    const int first = 2 * i - 9 - shift;
    unsigned three[kRows][3];  // taps first, first + 1, first + 2
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        const bool exists = r < rows && is_inside(first + j, taps);
        three[r][j] = exists ? weight[r * taps + (first + j) * step] : 0;
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

// Compute `count` outputs of the row, in pairs at position t0 + local: load_grad(local, whole) and
// store_pair(local, outputs, whole); whole: the type of a constant, whether all of them exist.
template <typename T, typename Load, typename Store>
__device__ __forceinline__ void convolve(const Convolution<T>& p, const RowTile<T>& row, int count,
                                         const Load& load_grad, const Store& store_pair) {
  const int lane = threadIdx.x % 32, out_t = p.out_t;
  const Lane at;
  // The lane's pair of taps: 2 t − g.
  const unsigned* const pair_of_taps =
      row.filter + (at.g % 2 ? filter_words(row.products) + 1 : 0) + at.t - (at.g + 1) / 2 + 4;
#pragma unroll 1
  for (int first = 0; first < count && row.t0 + first < out_t; first += kTile * kTiles) {
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
    const auto for_pairs = [&](const auto& f) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        f(first + i * kTile / 2 + 2 * lane, sum[i / 2][i % 2 * 2], sum[i / 2][i % 2 * 2 + 1]);
      }
    };
    float nan_check = 0;
    for_pairs([&](int, float y0, float y1) { nan_check += y0 + y1; });
    if (isnan(nan_check)) {
      for_pairs([&](int local, float& y0, float& y1) {
        y0 = p.without_nan(y0, row.image, row.channel, row.t0 + local);
        y1 = p.without_nan(y1, row.image, row.channel, row.t0 + local + 1);
      });
    }
    __syncwarp();  // outputs may overwrite inputs
    const auto finish = [&](auto whole) {
      if (p.grad) {
        for_pairs([&](int local, float& y0, float& y1) {
          const Vector<T, 2> grad = load_grad(local, whole);
          y0 = silu_gradient<T>(static_cast<float>(grad.lane[0]), y0);
          y1 = silu_gradient<T>(static_cast<float>(grad.lane[1]), y1);
        });
      } else if (p.silu) {
        for_pairs([&](int, float& y0, float& y1) {
          y0 *= sigmoid<T>(y0);
          y1 *= sigmoid<T>(y1);
        });
      }
      for_pairs([&](int local, float y0, float y1) {
        store_pair(local, Packed<T>::pack(y0, y1), whole);
      });
    };
    if (row.t0 + first >= 0 && row.t0 + first + kTile * kTiles <= out_t) {
      finish(std::true_type{});
    } else {
      finish(std::false_type{});
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
    convolve(
        p, at, Shape::kTile,
        [&](int local, auto whole) {
          const T* const grad = p.grad + (out - p.out.data) + t0 + local;
          if (whole && misalignment(grad, 2) == 0) {
            return load_vector<2>(grad);
          }
          Vector<T, 2> pair{};
          for (int i = 0; i < 2; ++i) {
            pair.lane[i] = is_inside(t0 + local + i, out_t) ? grad[i] : T(0);
          }
          return pair;
        },
        [&](int local, unsigned packed, auto whole) {
          T* const to = out + t0 + local;
          if constexpr (whole) {
            *reinterpret_cast<unsigned*>(to) = packed;
          } else {
            const auto& pair = reinterpret_cast<const Vector<T, 2>&>(packed);
            for (int i = 0; i < 2; ++i) {
              if (is_inside(t0 + local + i, out_t)) {
                to[i] = pair.lane[i];
              }
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
    channels_toeplitz_kernel(const Convolution<T> p, int products, int pitch, int tiles,
                             int length) {
  using Shape = StageShape<true>;
  extern __shared__ uint4 aligned_shared[];
  unsigned* const inputs = reinterpret_cast<unsigned*>(aligned_shared);
  unsigned* const filters = inputs + Shape::kRows * pitch;
  unsigned* const grads = filters + Shape::kRows * 2 * filter_words(products);
  const int warp = threadIdx.x / 32, channels = p.c;
  // Adjacent blocks have adjacent channels, so that rows of memory are read as a whole.
  const unsigned blocks = (channels + Shape::kRows - 1) / Shape::kRows, tile = blockIdx.x / blocks;
  const int image = tile / tiles, t0 = (tile - image * tiles) * length;
  const int first_channel = (blockIdx.x - tile * blocks) * Shape::kRows;
  const int lane_channel = first_channel + octet() * 8;
  const int tile_outputs = min(length, round_up(static_cast<int>(p.out_t) - t0, kAligned));
  stage_channels(inputs, pitch, p.in.row(image, lane_channel), p.in.t_stride,
                 t0 - static_cast<int>(p.padding), tile_outputs + kDepth * products,
                 lane_channel < channels ? static_cast<int>(p.in_t) : 0);
  const auto dense_row = [&](auto* data) {
    return data + (p.out.row(image, lane_channel) - p.out.data);
  };
  const int out_size = lane_channel < channels ? static_cast<int>(p.out_t) : 0;
  if (p.grad) {
    stage_channels(grads, pitch, dense_row(p.grad), p.out.t_stride, t0, tile_outputs, out_size);
  }
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
    unsigned* const words = inputs + row * pitch;  // outputs overwrite inputs
    const RowTile<T> at{words, filter, products, image, channel, t0, p.bias_of(channel)};
    convolve(
        p, at, length,
        [&](int local, auto) {
          return reinterpret_cast<const Vector<T, 2>&>(grads[row * pitch + local / 2]);
        },
        [&](int local, unsigned packed, auto) { words[local / 2] = packed; });
  }
  __syncthreads();
  store_channels(inputs, pitch, dense_row(p.out.data), p.out.t_stride, t0, tile_outputs, out_size);
}

constexpr int kMaxShift = kAligned - 1;  // zeros that align loads

// Return the products of a filter, with the zeros before and after its taps in a window.
int64_t products_of(int64_t taps, int64_t shift) {
  return ceil_div(taps + 7 + shift, kDepth);
}

template <typename T>
bool launch_planes(const Convolution<T>& p, const Run& run) {
  using Shape = StageShape<false>;
  constexpr int64_t kBlocksPerMultiprocessor = 8;
  const int64_t products = products_of(p.taps, kMaxShift);
  const int pitch = Shape::pitch(Shape::kTile + kDepth * products);
  const size_t bytes =
      Shape::kRows * (Shape::kBuffers * pitch + 2 * filter_words(products)) * sizeof(unsigned);
  const int64_t blocks = ceil_div(p.n * p.c, Shape::kRows);
  const int64_t tiles = ceil_div(p.out_t + 1, Shape::kTile);
  const int64_t length = share(tiles, blocks, kBlocksPerMultiprocessor);
  if (bytes > Device().block_shared || ceil_div(tiles, length) > kMaxGridY) {
    return false;
  }
  launch_kernel(planes_toeplitz_kernel<T>, dim3(blocks, ceil_div(tiles, length)), kStageThreads,
                bytes, run.stream, p, static_cast<int>(products), pitch, static_cast<int>(length));
  return true;
}

template <typename T>
bool launch_channels(const Convolution<T>& p, const Run& run) {
  using Shape = StageShape<true>;
  const int64_t products = products_of(p.taps, 0), channel_blocks = ceil_div(p.c, Shape::kRows);
  const auto launch = [&](int length, bool only_if_busy) {
    const int pitch = Shape::pitch(length + kDepth * products);
    const size_t bytes =
        Shape::kRows * sizeof(unsigned) * ((p.grad ? 2 : 1) * pitch + 2 * filter_words(products));
    const int64_t tiles = ceil_div(p.out_t, length), blocks = p.n * tiles * channel_blocks;
    if (bytes > Device().block_shared || blocks >= int64_t{1} << 31 ||
        (only_if_busy && occupied(blocks, resident_blocks(channels_toeplitz_kernel<T>,
                                                          kStageThreads, bytes)) < 0.9)) {
      return false;
    }
    launch_kernel(channels_toeplitz_kernel<T>, blocks, kStageThreads, bytes, run.stream, p,
                  static_cast<int>(products), pitch, static_cast<int>(tiles), length);
    return true;
  };
  // Longer tiles have less halo, but leave the device idle if they are few.
  return (!p.grad && launch(2 * Shape::kTile, true)) || launch(Shape::kTile, false);
}

}  // namespace

template <typename T>
bool toeplitz(const Convolution<T>& p, const Run& run) {
  if (!has_mma()) {
    return false;
  }
  return p.has_rows() ? launch_planes(p, run)
                      : has_vectors(p, {p.out.data, p.grad ? p.grad : p.out.data}) &&
                            launch_channels(p, run);
}

template bool toeplitz(const Convolution<Half>&, const Run&);
template bool toeplitz(const Convolution<BFloat16>&, const Run&);

}  // namespace ops::depthwise_conv1d
