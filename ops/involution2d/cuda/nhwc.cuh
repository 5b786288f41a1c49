// nhwc: involution with stride 1 or 2, for 3×3, 5×5 and 7×7 kernels and any layout; tuned for NHWC.
//
//      image                  windows [row][slot][channel]       4 threads of a quad
//      ┌─────────┐  cp.async  ┌───────────────────────┐          ┌─────┬─────┬──────┬───────┐
//      │ tile    │ ─────────► │ pixels × 16 channels  │ ──┐      │ c 0 │ c 4 │ c 8  │ c 12  │
//      │ + halo  │            └───────────────────────┘   │ FMA  │ … 3 │ … 7 │ … 11 │ … 15  │
//      └─────────┘            weights [pixel][tap]        ├────► ├─────┴─────┴──────┴───────┤
//      ┌─────────┐            ┌───────────────────────┐   │      │ 4 cells each             │
//      │ weight  │ ─────────► │ all taps of the tile  │ ──┘      └──────────────────────────┘
//      └─────────┘            └───────────────────────┘
//
//   block:   a tile of one group of one image, up to 8 rows (stride 2: 4) × 4 quads; input gradient
//            with stride 2: one row of pixels of each 2 × 2 cell
//   shared:  all weights of the tile; the windows of the tile, 16 channels at a time
//   thread:  4 cells × 4 channels; loads a weight once for 4 channels, an input once per kernel row
//
// Weight gradient: a thread sums the taps of one kernel row over its 4 channels; shuffles add the 4
// threads of a quad; sums [pixel][tap] over all channels accumulate in shared memory.
#pragma once

#include "involution2d/cuda/nhwc_tile.cuh"

namespace ops::involution2d {

// Weights of a tile in shared memory. Forward: for each pixel a run of all K² taps. Input gradient:
// for each source pixel and kernel row a run of K taps. Channels-last weights are copied as the
// aligned 8- or 16-byte blocks that contain a run; `skew` is the offset of the run in them.
template <typename T, int K, int kStride, bool kFlip>
class WeightTile {
  using Taps = CellTaps<K, kStride, kFlip>;

 public:
  static OPS_DEVICE int size(const TiledInvolution& p) {
    return kRows * p.rows * (kFlip ? layout(p).row() : p.width()) * kPitch;
  }

  static OPS_DEVICE int columns(const TiledInvolution& p) {
    return p.width() + (kFlip ? Taps::kTaps - 1 : 0);
  }

  __device__ WeightTile(const T* __restrict__ weight, const TiledInvolution& p,
                        const NhwcTile& tile, T* shared)
      : p_(p), tile_(tile), shared_(shared), weight_(weight), base_skew_(block_skew(weight)) {}

  __device__ void copy() const { p_.weight.nchw ? copy_nchw() : copy_runs(); }

  // Load the weights of kernel row `a` for the thread's outputs; 0 for taps that do not exist.
  __device__ void load_row(int a, float (&taps)[Taps::kPhases][Taps::kTaps][kQuad]) const {
#pragma unroll
    for (int j = 0; j < kQuad + (kFlip ? Taps::kTaps - 1 : 0); ++j) {
      const int x = tile_.x + j, row = kFlip ? a : 0;
      const T* run =
          shared_ + run_slot(row, tile_.y, x) * kPitch + skew(weight_offset(row, tile_.y, x));
#pragma unroll
      for (int b = 0; b < Taps::kTaps; ++b) {
        const int i = kFlip ? j - b : j;  // cell of the quad to which tap b of source j adds
#pragma unroll
        for (int phase = 0; phase < Taps::kPhases; ++phase) {
          const int tap = Taps::tap(phase, b);
          if (i >= 0 && i < kQuad) {
            taps[phase][b][i] =
                tap >= 0 ? static_cast<float>(run[tap + (kFlip ? 0 : a * K)]) : 0.0f;
          }
        }
      }
    }
  }

 private:
  static constexpr int kRows = kFlip ? Taps::kTaps : 1;  // runs per pixel
  static constexpr int kRun = kFlip ? K : K * K;
  static constexpr int kBlock = (kFlip ? 8 : 16) / sizeof(T);
  static constexpr int kBlocks = (kRun + 2 * (kBlock - 1)) / kBlock;
  static constexpr int kPitch = (kBlocks | 1) * kBlock;  // odd number of blocks: no bank conflicts

  const TiledInvolution& p_;
  const NhwcTile& tile_;
  T* shared_;
  const T* __restrict__ weight_;
  int base_skew_;

  // Return the elements between the start of the aligned block and `at`.
  static __device__ int block_skew(const T* at) {
    return reinterpret_cast<uintptr_t>(at) / sizeof(T) % kBlock;
  }

  // Layout of a row of runs in the input gradient. Forward: the whole tile is one row.
  static OPS_DEVICE InterleavedRow layout(const TiledInvolution& p) {
    return InterleavedRow{p.quads + (Taps::kTaps + kQuad - 2) / kQuad, kQuad};
  }
  __device__ int run_slot(int a, int y, int x) const {
    const int quads = kFlip ? layout(p_).threads : p_.quads;
    return kFlip ? (a * p_.rows + y) * kQuad * quads + layout(p_).slot(x)
                 : x % kQuad * p_.rows * quads + y * quads + x / kQuad;
  }
  __device__ int tap_row(int a) const { return kFlip ? Taps::tap(tile_.phase, a) : 0; }
  __device__ int h(int a, int y) const { return tile_.row + y + (kFlip ? p_.offset_h + a : 0); }
  __device__ int w(int x) const { return tile_.col + x + (kFlip ? p_.offset_w : 0); }
  // Return the offset in global memory of a run's first tap.
  __device__ int weight_offset(int a, int y, int x) const {
    return tap_row(a) * K * p_.weight.stride_c + h(a, y) * p_.weight.stride_h +
           w(x) * p_.weight.stride_w;
  }
  // Return the offset of the run in its first block.
  __device__ int skew(int weight_offset) const {
    return p_.weight.nchw ? 0 : (weight_offset + base_skew_) & (kBlock - 1);
  }

  // Channels-last weight: kGroup threads copy the runs of a column, a block each.
  __device__ void copy_runs() const {
    constexpr int kGroup = kBlocks > 8 ? 16 : kBlocks > 4 ? 8 : kBlocks > 2 ? 4 : 2;
    static_assert(kBlocks <= kGroup);
    const int element = threadIdx.x % kGroup * kBlock;
    if (element >= kBlocks * kBlock) {
      return;
    }
    for (int x = threadIdx.x / kGroup; x < columns(p_); x += blockDim.x / kGroup) {
      const bool column_inside = is_inside(w(x), p_.weight.w);
#pragma unroll 1
      for (int a = Taps::first_row(tile_.phase); a < kRows; ++a) {
        const T* run = weight_ + (weight_offset(a, 0, x) + element);
        T* to = shared_ + run_slot(a, 0, x) * kPitch + element;
#pragma unroll 4
        for (int y = 0; y < p_.rows; ++y) {
          const int skip = block_skew(run);
          copy_or_clear<kBlock>(
              to, run - skip,
              column_inside & is_inside(h(a, y), p_.weight.h) & (element < skip + kRun));
          run += p_.weight.stride_h;
          to += (run_slot(0, 1, 0) - run_slot(0, 0, 0)) * kPitch;
        }
      }
    }
  }

  // NCHW weight: adjacent threads read adjacent pixels.
  __device__ void copy_nchw() const {
    for (int i = threadIdx.x; i < kRows * p_.rows * columns(p_); i += blockDim.x) {
      const int line = p_.weight_columns(i), x = i - line * columns(p_);
      const int a = p_.weight_rows(line), y = line - a * p_.rows;
      const bool inside =
          is_inside(h(a, y), p_.weight.h) & is_inside(w(x), p_.weight.w) & (tap_row(a) >= 0);
      const T* from = weight_ + (inside ? weight_offset(a, y, x) : 0);
      T* to = shared_ + run_slot(a, y, x) * kPitch;
      constexpr int kBatch = 16;
#pragma unroll
      for (int first = 0; first < kRun; first += kBatch) {
        T loaded[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch && first + i < kRun; ++i) {
          loaded[i] = inside ? *from : T(0);
          from += p_.weight.stride_c;
        }
#pragma unroll
        for (int i = 0; i < kBatch && first + i < kRun; ++i) {
          to[first + i] = loaded[i];
        }
      }
    }
  }
};

// Store the thread's sums; `out` points to the first channel of the tile.
template <int kPhases, int kOuts, typename T>
__device__ void store_outputs(float (&sum)[kThreadChannels][kOuts], const TiledInvolution& p,
                              const NhwcTile& tile, int channels, T* __restrict__ out) {
  const int h = kPhases * (tile.row + tile.y) + tile.phase - p.cell_offset_h;
  int w = kPhases * (tile.col + tile.x) - p.cell_offset_w, end = p.out.w;
  const int first = tile.part * kThreadChannels;
  if (kPhases > 1 && p.cell_offset_w > 0 && p.out.nchw) {
    // The first cell begins left of the image: shift outputs by one thread, so that stores align.
    const bool cut = tile.x == 0 && !tile.spare && is_inside(h, p.out.h) && is_inside(w, end);
#pragma unroll
    for (int c = 0; c < kThreadChannels; ++c) {
      const float next = __shfl_down_sync(0xffffffff, sum[c][0], kChannelParts);
      if (cut && first + c < channels) {
        out[(first + c) * p.out.stride_c + h * p.out.stride_h + w] = static_cast<T>(sum[c][0]);
      }
#pragma unroll
      for (int i = 0; i + 1 < kOuts; ++i) {
        sum[c][i] = sum[c][i + 1];
      }
      sum[c][kOuts - 1] = next;
    }
    ++w;
    end = tile.x + kQuad == p.width() ? min(end, w + kOuts - 1) : end;
  }
  for_each_output_pixel<kOuts>(
      p, tile, channels, h, w, end, [&](auto channel_width, auto pixel_width, int c, int i) {
        constexpr int C = decltype(channel_width)::value, V = C * decltype(pixel_width)::value;
        Vector<T, V> value;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          value.lane[v] = static_cast<T>(sum[c + v % C][i + v / C]);
        }
        store<V>(
            out + ((first + c) * p.out.stride_c + h * p.out.stride_h + (w + i) * p.out.stride_w),
            value);
      });
}

template <typename T, int K, int kStride, bool kFlip>
__global__ void __launch_bounds__(kNhwcThreads)
    involve_nhwc_kernel(const __grid_constant__ TiledInvolution p, const T* __restrict__ source,
                        const T* __restrict__ weight, T* __restrict__ out) {
  using Taps = CellTaps<K, kStride, kFlip>;
  extern __shared__ float4 shared[];
  T* windows = reinterpret_cast<T*>(shared);
  const NhwcTile tile(p, Taps::kPhases);
  const WeightTile<T, K, kStride, kFlip> weights(tile.base(weight, p.weight, tile.group * K * K), p,
                                                 tile, windows + p.window_stride);
  weights.copy();
  const WindowPixels<Taps::kTaps, Taps::kStep> row(p, tile);
  for (int first = 0; first < p.channels; first += kTileChannels) {
    const int channels = min(kTileChannels, p.channels - first);
    const int channel = tile.group * p.channels + first;
    if (first > 0) {
      __syncthreads();
    }
    copy_windows_to_nhwc<Taps::kTaps, Taps::kStep>(tile.base(source, p.source, channel), p, tile,
                                                   channels, windows);
    finish_copies();
    float sum[kThreadChannels][Taps::kOuts] = {};
#pragma unroll 1
    for (int a = Taps::first_row(tile.phase); a < Taps::kTaps; ++a) {
      float taps[Taps::kPhases][Taps::kTaps][kQuad];
      weights.load_row(a, taps);
#pragma unroll
      for (int j = 0; j < row.kPixels; ++j) {
        float x[kThreadChannels];
        row.load_pixel(windows, a, j, x);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          const int b = j - i * Taps::kStep;
#pragma unroll
          for (int phase = 0; phase < Taps::kPhases; ++phase) {
            if (b >= 0 && b < Taps::kTaps && Taps::tap(phase, b) >= 0) {
#pragma unroll
              for (int c = 0; c < kThreadChannels; ++c) {
                sum[c][i * Taps::kPhases + phase] += taps[phase][b][i] * x[c];
              }
            }
          }
        }
      }
    }
    store_outputs<Taps::kPhases>(sum, p, tile, channels, tile.base(out, p.out, channel));
  }
}

// Sum 4 pixels over the 4 threads of a quad; return the sum of pixel `part`.
__device__ inline float reduce_parts(const float (&sum)[kQuad], int part) {
  const bool second = part & 2, odd = part & 1;
  float half[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float kept = second ? sum[i + 2] : sum[i], other = second ? sum[i] : sum[i + 2];
    half[i] = kept + __shfl_xor_sync(0xffffffff, other, 2);
  }
  return (odd ? half[1] : half[0]) + __shfl_xor_sync(0xffffffff, odd ? half[0] : half[1], 1);
}

// Weight gradient. A thread accumulates all taps of one pixel: pixel `part` of its quad.
template <typename T, int K, int kStride>
__global__ void __launch_bounds__(kNhwcThreads)
    involve_nhwc_weight_kernel(const __grid_constant__ TiledInvolution p, const T* __restrict__ x,
                               const T* __restrict__ grad, T* __restrict__ grad_weight) {
  extern __shared__ float4 shared[];
  T* windows = reinterpret_cast<T*>(shared);
  float* sums = reinterpret_cast<float*>(windows + p.window_stride);
  const NhwcTile tile(p, 1);
  const int h = tile.row + tile.y, w = tile.col + tile.x;
  const WindowPixels<K, kStride> row(p, tile);
  float* own_sums = sums + threadIdx.x * K * K;
  for (int first = 0; first < p.channels; first += kTileChannels) {
    const int channels = min(kTileChannels, p.channels - first);
    const int channel = tile.group * p.channels + first;
    if (first > 0) {
      __syncthreads();
    }
    copy_windows_to_nhwc<K, kStride>(tile.base(x, p.source, channel), p, tile, channels, windows);
    float grads[kThreadChannels][kQuad] = {};
    const T* from = tile.base(grad, p.out, channel + tile.part * kThreadChannels);
    for_each_output_pixel<kQuad>(
        p, tile, channels, h, w, p.out.w, [&](auto channel_width, auto pixel_width, int c, int i) {
          constexpr int C = decltype(channel_width)::value, V = C * decltype(pixel_width)::value;
          const auto value = load_vector<V>(
              from + (c * p.out.stride_c + h * p.out.stride_h + (w + i) * p.out.stride_w));
#pragma unroll
          for (int v = 0; v < V; ++v) {
            grads[c + v % C][i + v / C] = static_cast<float>(value.lane[v]);
          }
        });
    finish_copies();
#pragma unroll 1
    for (int a = 0; a < K; ++a) {
      float sum[K][kQuad] = {};
#pragma unroll
      for (int j = 0; j < row.kPixels; ++j) {
        float source[kThreadChannels];
        row.load_pixel(windows, a, j, source);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          const int b = j - i * kStride;
          if (b >= 0 && b < K) {
#pragma unroll
            for (int c = 0; c < kThreadChannels; ++c) {
              sum[b][i] += grads[c][i] * source[c];
            }
          }
        }
      }
#pragma unroll
      for (int b = 0; b < K; ++b) {
        const float all = reduce_parts(sum[b], tile.part);
        if (!tile.spare) {
          float& total = own_sums[a * K + b];
          total = first > 0 ? total + all : all;
        }
      }
    }
  }
  const ImageView& image = p.weight;
  T* to = tile.base(grad_weight, image, tile.group * K * K);
  if (image.nchw) {
    if (!tile.spare && h < image.h && w + tile.part < image.w) {
      to += h * image.stride_h + w + tile.part;
#pragma unroll K
      for (int tap = 0; tap < K * K; ++tap) {
        to[tap * image.stride_c] = static_cast<T>(own_sums[tap]);
      }
    }
    return;
  }
  __syncthreads();
  constexpr int kWarp = 32;
  for (int tap = threadIdx.x % kWarp; tap < K * K; tap += kWarp) {
    for (int col = threadIdx.x / kWarp; col < min(p.width(), image.w - tile.col);
         col += blockDim.x / kWarp) {
#pragma unroll 4
      for (int y = 0; y < min(p.rows, image.h - tile.row); ++y) {
        to[tap + (tile.row + y) * image.stride_h + (tile.col + col) * image.stride_w] =
            static_cast<T>(sums[(y * p.width() + col) * K * K + tap]);
      }
    }
  }
}

}  // namespace ops::involution2d
