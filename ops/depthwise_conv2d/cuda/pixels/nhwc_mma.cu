// nhwc_mma: NHWC, 16 bits, stride 1: implicit GEMM on sparse matrix units (mma.sp.sync).
//
//      filter row a: 2 outputs × 8 channels       inputs (ldmatrix)           16 × 8 outputs,
//      ┌──────────────────────────┐               ┌─────────────────────┐     two products per
//      │ diag w[a,0] … diag w[a,3]│ output 2 n    │ 4 pixels, each with │     filter row and
//      │     0       … diag w[a,2]│ output 2 n + 1│ 8 channels, of each │     input row
//      └──────────────────────────┘       ×       │ pixel pair n < 8    │ ──► += [output, channel]
//        4 pixels × 8 channels                    └─────────────────────┘        × pair
//
// diag w[a, b]: 8 × 8, the tap (a, b) of each channel. Of four adjacent elements of a row at most
// one is a tap, which the sparse product stores together with a zero.
//
//   block:   kMmaSlots tiles: a band of rows and up to kColumns columns of 8 channels of one image.
//            A slot keeps its channels; its next tile is in another band or image
//   shared:  the input windows, [slot][row][pixel parity][pixel pair], which outputs overwrite, and
//            those of the next tiles, copied during the products
//   thread:  4 accumulators for each of its output rows; a warp computes 16 columns at once,
//            in the tail of a tile 8 columns of twice as many rows
#include "core/cuda/mma.cuh"
#include "depthwise_conv2d/cuda/pixels/nhwc_mma.cuh"

namespace ops::depthwise_conv2d {
namespace {

// Transpose an 8 × 8 matrix that the warp holds in the fragments of mma.sync.
__device__ inline unsigned transpose_matrix(unsigned pair) {
  unsigned transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// Load four 8 × 8 matrices. Lane 8 m + i passes the address of row i of matrix m.
__device__ inline void load_matrices(unsigned row, unsigned (&matrices)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row)
               : "memory");
}

// Left operands of a channel's filter rows. Lane 4 g + t stores channel g at pixels t / 2 and
// t / 2 + 2 of both outputs, if the channel is one of the four that begin at 4 (t % 2).
template <int K, typename T>
class FilterRows {
 public:
  __device__ FilterRows(const T* filter, bool flip) {
    const Lane lane;
    const auto* bits = reinterpret_cast<const unsigned short*>(filter);
    const bool stored = lane.g / 4 == lane.t % 2;
    const int pixel = lane.t / 2, shift = lane.g % 4 == 3 ? 16 : 0;
#pragma unroll
    for (int a = 0; a < K; ++a) {
#pragma unroll
      for (int j = 0; j <= K; ++j) {
        const int b = j + pixel - 1, i = a * K + b;
        const bool inside = stored && b >= 0 && b < K;
        taps_[a][j] = inside ? unsigned{bits[flip ? K * K - 1 - i : i]} << shift : 0;
      }
    }
    // Positions of the two stored elements of four, 2 bits each: (c, c + 1) for channel c; (2, 3)
    // for channel 3, whose tap is the second.
    constexpr unsigned kPositions[] = {0b0100, 0b1001, 0b1110, 0b1110};
    positions_ = kPositions[lane.g % 4] * 0x11111111;
  }

  // Add the products of filter row `a` and pixels 4 half … 4 half + 3 of each pair's window.
  // Operands: outputs 2 n and 2 n + 1 at pixel t / 2, then both at pixel t / 2 + 2.
  __device__ void add(float (&sum)[4], int a, int half, const unsigned (&inputs)[4]) const {
    Packed<T>::mma_sparse(sum, tap(a, 4 * half + 1), tap(a, 4 * half), tap(a, 4 * half + 3),
                          tap(a, 4 * half + 2), inputs, positions_);
  }

 private:
  unsigned taps_[K][K + 1];  // [a][j]: tap (a, j + t / 2 − 1)
  unsigned positions_;

  __device__ unsigned tap(int a, int j) const { return j <= K ? taps_[a][j] : 0; }
};

template <int K, int kRows, int kColumns, int kRowWarps, typename T>
__global__ void __launch_bounds__(32 * kMmaSlots * kRowWarps,
                                  kMmaThreads / (32 * kMmaSlots * kRowWarps))
    nhwc_mma_kernel(const __grid_constant__ NhwcMmaParams p, const T* __restrict__ in,
                    const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out) {
  using Layout = NhwcMmaWindow<K, kRows, kColumns, kRowWarps>;
  constexpr int kThreads = 32 * kMmaSlots * kRowWarps, kBandRows = Layout::kBandRows;
  extern __shared__ uint4 windows[];
  uint4 *current = windows, *next = windows + kMmaSlots * Layout::kSize;
  const NhwcMmaThread<kThreads, kColumns> pixel;
  NhwcMmaSlot copied(p, pixel.slot);  // whose windows the thread copies and outputs it stores
  NhwcMmaCopies<Layout, kThreads, T> copies(p, in, copied.channel);
  copies.start(copied.tile, current);
  while (copies.remain()) {
    copies.issue();
  }
  commit_copies();

  const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  const int first_row = kRowWarps == 1 ? 0 : warp / kMmaSlots * kRows;
  NhwcMmaSlot computed(p, warp % kMmaSlots);  // of the warp
  const Lane lane;
  const int channel = computed.channel + lane.g;
  const FilterRows<K, T> filter(weight + channel * K * K, p.flip);
  const float initial = bias ? static_cast<float>(bias[channel]) : 0.0f;

  // Address of lane 8 m + n: pixel m of the window of pair n; in the tail pairs 4 … 7 are
  // pairs 0 … 3 of the second warp's rows.
  const unsigned body_lane =
      (first_row * Layout::kPitch + Layout::column(thread / 8) + thread % 8) * sizeof(uint4);
  const unsigned tail_lane = body_lane + (thread / 4 % 2) *
                                             (kRows * Layout::kPitch - kTailColumns / 2) *
                                             unsigned{sizeof(uint4)};
  for (int step = 0; step < p.share; ++step) {
    wait_for_copies<0>();
    __syncthreads();
    copies.start(copied.tile + p.splits, next);

    if (computed.tile < p.tiles) {
      const NhwcMmaTile tile(p, computed.tile, kBandRows);
      const int columns = min(p.tile_columns, p.out_w - tile.col);
      const int end = first_row == 0                   ? columns
                      : tile.row + first_row < p.out_h ? min(columns, p.tail)
                                                       : 0;
      uint4* const window = current + warp % kMmaSlots * Layout::kSize;
      float nan_check = 0;
      for (int x = 0; x < end; x += kMmaColumns) {
        float sum[kRows][4];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[r][i] = initial;
          }
        }
        const unsigned first = static_cast<unsigned>(__cvta_generic_to_shared(window + x / 2)) +
                               (x < p.tail ? body_lane : tail_lane);
#pragma unroll
        for (int h = 0; h < kRows + K - 1; ++h) {
          if (h % 2 == 0) {
            copies.issue();
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            unsigned inputs[4];
            load_matrices(first + (h * Layout::kPitch + 2 * half) * sizeof(uint4), inputs);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              if (h - r >= 0 && h - r < K) {
                filter.add(sum[r], h - r, half, inputs);
              }
            }
          }
        }
        // Overwrite inputs that no later columns read.
        __syncwarp();
        unsigned* to =
            reinterpret_cast<unsigned*>(window + Layout::output(p, first_row, x) + lane.g);
#pragma unroll
        for (int r = 0; r < kRows; ++r, to += 4 * Layout::kPitch) {
          nan_check += (sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3]);
          to[lane.t] = transpose_matrix(Packed<T>::pack(sum[r][0], sum[r][1]));
          to[4 * Layout::kHalf + lane.t] = transpose_matrix(Packed<T>::pack(sum[r][2], sum[r][3]));
        }
        __syncwarp();
      }
      if (__any_sync(~0u, isnan(nan_check))) {
        // Zeros of the filter's matrix times non-finite inputs: recompute the warp's outputs that
        // are NaN.
        for (int i = thread; i < end * kBandRows * kSlotChannels; i += 32) {
          const int c = i % kSlotChannels, x = i / kSlotChannels % end;
          const int y = i / kSlotChannels / end;
          const bool computed_here = x >= p.tail || y / kRows * kRows == first_row;
          T& output = reinterpret_cast<T*>(window + Layout::output(p, y, x))[c];
          if (computed_here && tile.row + y < p.out_h && isnan(static_cast<float>(output))) {
            const int filter_channel = computed.channel + c;
            const float exact = exact_output<K>(
                in + static_cast<int64_t>(tile.image) * p.h * p.w * p.channels + filter_channel,
                static_cast<int64_t>(p.w) * p.channels, p.channels, p.h, p.w,
                tile.row + p.start_h + y, tile.col + p.start_w + x, weight + filter_channel * K * K,
                p.flip);
            output =
                static_cast<T>(exact + (bias ? static_cast<float>(bias[filter_channel]) : 0.0f));
          }
        }
      }
    }
    while (copies.remain()) {
      copies.issue();
    }
    commit_copies();
    __syncthreads();

    if (copied.tile < p.tiles) {
      const NhwcMmaTile tile(p, copied.tile, kBandRows);
      const int rows = min(kBandRows, p.out_h - tile.row);
      const int columns = min(p.tile_columns, p.out_w - tile.col);
      const uint4* from = current + pixel.slot * Layout::kSize;
      const int64_t first =
          (static_cast<int64_t>(tile.image) * p.out_h + tile.row) * p.out_w + tile.col + pixel.x;
      T* to = out + first * p.channels + copied.channel;
#pragma unroll 4
      for (int y = pixel.y; pixel.x < columns && y < rows; y += pixel.kStep) {
        *reinterpret_cast<uint4*>(to + static_cast<int64_t>(y) * p.out_w * p.channels) =
            from[Layout::output(p, y, pixel.x)];
      }
    }
    uint4* const swapped = current;
    current = next, next = swapped;
    copied.tile += p.splits, computed.tile += p.splits;
  }
}

// Return whether nhwc_mma is faster than nhwc_ring and direct_l1 (H100).
bool is_faster(const Geometry& g, int64_t out_w) {
  const int64_t load = load_of(g);
  const bool large = g.kernel_h > 5;
  if (out_w <= kMmaColumns / 2) {
    return large || load <= 60'000;
  }
  return out_w <= kMmaColumns || load >= (large ? 6'000 : 10'000);
}

}  // namespace

template <typename T>
bool nhwc_mma(const Convolution<T>& c) {
  const Geometry& g = c.g;
  if (c.transposed || g.c % kSlotChannels != 0 ||
      !are_aligned({c.in.data, c.out.data}, sizeof(uint4)) || !is_faster(g, c.out.w)) {
    return false;
  }
  const Device device;
  const int64_t row_warps = c.out.h > kMmaRows || c.out.w > kMmaColumns ? 2 : 1;
  const int64_t rows = row_warps == 1 ? kMmaRows : choose_rows(c.out.h, g.kernel_h);
  const int64_t bands = ceil_div(c.out.h, row_warps * rows);
  // Slots that run at once, per chunk of channels.
  const int64_t threads = 32 * kMmaSlots * row_warps, chunks = g.c / kSlotChannels;
  const int64_t slots =
      std::max<int64_t>(1, kMmaThreads / threads * device.multiprocessors * kMmaSlots / chunks);
  const int columns = choose_tile_columns(c.out.w, g.n * bands, slots, row_warps == 2);
  NhwcMmaParams p{};
  p.h = c.in.h, p.w = c.in.w, p.out_h = c.out.h, p.out_w = c.out.w, p.channels = g.c;
  p.start_h = -c.padding_h, p.start_w = -c.padding_w, p.flip = c.flip;
  p.chunks = chunks, p.bands = bands;
  p.tile_columns = columns, p.tiles_w = ceil_div(p.out_w, columns);
  p.tiles = g.n * p.bands * p.tiles_w;
  // As many blocks as run at once, with equal numbers of tiles.
  p.share = ceil_div(p.tiles, slots);
  p.splits = ceil_div(p.tiles, p.share);
  const auto run = [&](auto taps, auto rows_of_warp, auto max_columns, auto warps) {
    constexpr int K = taps.value, kRows = rows_of_warp.value;
    constexpr int kColumns = max_columns.value, kRowWarps = warps.value;
    constexpr size_t kShared = 2 * NhwcMmaWindow<K, kRows, kColumns, kRowWarps>::kBytes;
    if (kShared > device.block_shared) {
      return false;
    }
    const int rest = columns % kMmaColumns;
    p.tail = kRowWarps == 2 && rest > 0 && rest <= kTailColumns ? columns - rest : columns;
    c.launch(nhwc_mma_kernel<K, kRows, kColumns, kRowWarps, T>,
             ceil_div(int64_t{p.splits} * p.chunks, kMmaSlots), threads, kShared, p, c.in.data,
             c.weight, c.bias, c.out.data);
    return true;
  };
  return dispatch_forward_axis(g, [&](auto axis) {
    using Axis = decltype(axis);
    if constexpr (Axis::kTaps >= 5 && Axis::kStride == 1) {
      using K = Width<Axis::kTaps>;
      const auto run_rows = [&](auto rows_of_warp) {
        return columns > kMmaColumns ? run(K{}, rows_of_warp, Width<32>{}, Width<2>{})
                                     : run(K{}, rows_of_warp, Width<16>{}, Width<2>{});
      };
      if (row_warps == 1) return run(K{}, Width<kMmaRows>{}, Width<16>{}, Width<1>{});
      return rows == kMmaRows ? run_rows(Width<kMmaRows>{})
                              : run_rows(Width<low_rows(Axis::kTaps)>{});
    }
    return false;
  });
}

template bool nhwc_mma(const Convolution<Half>&);
template bool nhwc_mma(const Convolution<BFloat16>&);

}  // namespace ops::depthwise_conv2d
