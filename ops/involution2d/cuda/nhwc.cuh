// Involution with stride 1 or 2 and a square kernel of 3, 5 or 7, made for channels-last images and
// weights. All weights of a tile of pixels and its windows, 16 channels at a time, lie in shared
// memory.
#pragma once

#include "involution2d/cuda/nhwc_tile.cuh"

namespace ops::cuda {

// The weights of a tile in shared memory: for each pixel a run of all taps or, kFlip, for each
// pixel of the source that the squares' taps of kernel row `a` take a run of the taps of that row.
// A run of adjacent taps comes in blocks of memory that hold it, from a block's start on.
template <typename T, int K, int kStride, bool kFlip>
class PixelWeights {
  using Taps = PixelTaps<K, kStride, kFlip>;

 public:
  static OPS_DEVICE int size(const TiledInvolution& p) {
    return kRows * p.rows * (kFlip ? layout(p).row() : p.width()) * kPitch;
  }

  __device__ PixelWeights(const T* __restrict__ weight, const TiledInvolution& p,
                          const PixelTile& tile, T* shared)
      : p_(p), tile_(tile), shared_(shared), weight_(weight), skew_(block_skew(weight)) {}

  __device__ void copy() const { p_.weight.nchw ? copy_nchw() : copy_runs(); }

  // The factors of the squares' outputs, zeros where a tap does not exist.
  __device__ void take(int a, float (&factor)[Taps::kPhases][Taps::kTaps][kFour]) const {
#pragma unroll
    for (int j = 0; j < kFour + (kFlip ? Taps::kTaps - 1 : 0); ++j) {
      const int x = tile_.x + j, row = kFlip ? a : 0;
      const T* run = shared_ + place(row, tile_.y, x) * kPitch + skipped(index(row, tile_.y, x));
#pragma unroll
      for (int b = 0; b < Taps::kTaps; ++b) {
        const int i = kFlip ? j - b : j;
#pragma unroll
        for (int phase = 0; phase < Taps::kPhases; ++phase) {
          const int tap = Taps::tap(phase, b);
          if (i >= 0 && i < kFour) {
            factor[phase][b][i] =
                tap < K ? static_cast<float>(run[tap + (kFlip ? 0 : a * K)]) : 0.0f;
          }
        }
      }
    }
  }

 private:
  static constexpr int kRows = kFlip ? Taps::kTaps : 1;  // runs of a pixel, one each kernel row
  static constexpr int kRun = kFlip ? K : K * K;
  static constexpr int kBlock = (kFlip ? 8 : 16) / sizeof(T);
  static constexpr int kBlocks = (kRun + 2 * (kBlock - 1)) / kBlock;
  static constexpr int kPitch = (kBlocks | 1) * kBlock;  // odd: other banks

  const TiledInvolution& p_;
  const PixelTile& tile_;
  T* shared_;
  const T* __restrict__ weight_;
  int skew_;

  // Elements of the block of memory that holds this one which come before it.
  static __device__ int block_skew(const T* at) {
    return reinterpret_cast<uintptr_t>(at) / sizeof(T) % kBlock;
  }

  // Of kFlip's; without, all fours of the tile are one row.
  static OPS_DEVICE PixelLayout layout(const TiledInvolution& p) {
    return PixelLayout{p.fours + (Taps::kTaps + kFour - 2) / kFour, kFour};
  }
  __device__ int columns() const { return p_.width() + (kFlip ? Taps::kTaps - 1 : 0); }
  __device__ int place(int a, int y, int x) const {
    const int fours = kFlip ? layout(p_).threads : p_.fours;
    return kFlip ? (a * p_.rows + y) * kFour * fours + layout(p_).place(x)
                 : x % kFour * p_.rows * fours + y * fours + x / kFour;
  }
  // The kernel's row.
  __device__ int tap_row(int a) const { return kFlip ? Taps::tap(tile_.phase, a) : 0; }
  __device__ int h(int a, int y) const { return tile_.row + y + (kFlip ? p_.offset_h + a : 0); }
  __device__ int w(int x) const { return tile_.col + x + (kFlip ? p_.offset_w : 0); }
  // Of a run's first tap.
  __device__ int index(int a, int y, int x) const {
    return tap_row(a) * K * p_.weight.channel + h(a, y) * p_.weight.row + w(x) * p_.weight.pixel;
  }
  // Elements in shared memory that come before the run.
  __device__ int skipped(int index) const {
    return p_.weight.nchw ? 0 : (index + skew_) & (kBlock - 1);
  }

  // A column for a group of threads.
  __device__ void copy_runs() const {
    constexpr int kGroup = kBlocks > 8 ? 16 : kBlocks > 4 ? 8 : kBlocks > 2 ? 4 : 2;
    static_assert(kBlocks <= kGroup);
    const int element = threadIdx.x % kGroup * kBlock;
    if (element >= kBlocks * kBlock) {
      return;
    }
    for (int x = threadIdx.x / kGroup; x < columns(); x += blockDim.x / kGroup) {
      const bool there = is_inside(w(x), p_.weight.w);
#pragma unroll 1
      for (int a = Taps::first_row(tile_.phase); a < kRows; ++a) {
        const T* run = weight_ + (index(a, 0, x) + element);
        T* to = shared_ + place(a, 0, x) * kPitch + element;
#pragma unroll 4
        for (int y = 0; y < p_.rows; ++y) {
          const int skip = block_skew(run);
          copy_async<kBlock>(to, run - skip,
                             there & is_inside(h(a, y), p_.weight.h) & (element < skip + kRun));
          run += p_.weight.row;
          to += (place(0, 1, 0) - place(0, 0, 0)) * kPitch;
        }
      }
    }
  }

  // Pixels side by side for threads side by side.
  __device__ void copy_nchw() const {
    for (Walk at(columns(), p_.rows); at.slow < kRows; at.next()) {
      const int a = at.slow, y = at.middle, x = at.fast;
      const bool inside =
          is_inside(h(a, y), p_.weight.h) & is_inside(w(x), p_.weight.w) & (tap_row(a) < K);
      const T* from = weight_ + (inside ? index(a, y, x) : 0);
      T* to = shared_ + place(a, y, x) * kPitch;
      constexpr int kAtOnce = 16;
#pragma unroll
      for (int first = 0; first < kRun; first += kAtOnce) {
        T taps[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce && first + i < kRun; ++i) {
          taps[i] = inside ? *from : T(0);
          from += p_.weight.channel;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce && first + i < kRun; ++i) {
          to[first + i] = taps[i];
        }
      }
    }
  }
};

// Stores the sums of a thread's adjacent outputs, `out` of the tile's first channel.
template <int kPhases, int kOuts, typename T>
__device__ void store_pixel_sums(float (&sum)[kPartChannels][kOuts], const TiledInvolution& p,
                                 const PixelTile& tile, int channels, T* __restrict__ out) {
  const int h = kPhases * (tile.row + tile.y) + tile.phase - p.before_h;
  int w = kPhases * (tile.col + tile.x) - p.before_w, end = p.out.w;
  const int first = tile.part * kPartChannels;
  if (kPhases > 1 && p.before_w > 0 && p.out.nchw) {
    // So that fours are aligned, each thread hands its first output to the one before it.
    const bool alone = tile.x == 0 && !tile.spare && is_inside(h, p.out.h) && is_inside(w, end);
#pragma unroll
    for (int c = 0; c < kPartChannels; ++c) {
      const float next = __shfl_down_sync(0xffffffff, sum[c][0], kPixelParts);
      if (alone && first + c < channels) {
        out[(first + c) * p.out.channel + h * p.out.row + w] = static_cast<T>(sum[c][0]);
      }
#pragma unroll
      for (int i = 0; i + 1 < kOuts; ++i) {
        sum[c][i] = sum[c][i + 1];
      }
      sum[c][kOuts - 1] = next;
    }
    ++w;
    end = tile.x + kFour == p.width() ? min(end, w + kOuts - 1) : end;
  }
  for_each_pixel_out<kOuts>(
      p, tile, channels, h, w, end, [&](auto of_channels, auto of_pixels, int c, int i) {
        constexpr int C = decltype(of_channels)::value, V = C * decltype(of_pixels)::value;
        Vector<T, V> value;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          value.lane[v] = static_cast<T>(sum[c + v % C][i + v / C]);
        }
        store<V>(out + ((first + c) * p.out.channel + h * p.out.row + (w + i) * p.out.pixel),
                 value);
      });
}

template <typename T, int K, int kStride, bool kFlip>
__global__ void __launch_bounds__(kPixelThreads)
    involve_pixels_kernel(const __grid_constant__ TiledInvolution p, const T* __restrict__ source,
                          const T* __restrict__ weight, T* __restrict__ out) {
  using Taps = PixelTaps<K, kStride, kFlip>;
  extern __shared__ float4 shared[];
  T* windows = reinterpret_cast<T*>(shared);
  const PixelTile tile(p, Taps::kPhases);
  const PixelWeights<T, K, kStride, kFlip> weights(tile.start(weight, p.weight, tile.group * K * K),
                                                   p, tile, windows + p.window_stride);
  weights.copy();
  const PixelRow<Taps::kTaps, Taps::kStep> row(p, tile);
  for (int first = 0; first < p.channels; first += kTileChannels) {
    const int channels = min(kTileChannels, p.channels - first);
    const int channel = tile.group * p.channels + first;
    if (first > 0) {
      __syncthreads();
    }
    copy_pixel_windows<Taps::kTaps, Taps::kStep>(tile.start(source, p.source, channel), p, tile,
                                                 channels, windows);
    wait_for_copies();
    float sum[kPartChannels][Taps::kOuts] = {};
#pragma unroll 1
    for (int a = Taps::first_row(tile.phase); a < Taps::kTaps; ++a) {
      float factor[Taps::kPhases][Taps::kTaps][kFour];
      weights.take(a, factor);
#pragma unroll
      for (int j = 0; j < row.kPixels; ++j) {
        float x[kPartChannels];
        row.load_pixel(windows, a, j, x);
#pragma unroll
        for (int i = 0; i < kFour; ++i) {
          const int b = j - i * Taps::kStep;
#pragma unroll
          for (int phase = 0; phase < Taps::kPhases; ++phase) {
            if (b >= 0 && b < Taps::kTaps && Taps::tap(phase, b) < K) {
#pragma unroll
              for (int c = 0; c < kPartChannels; ++c) {
                sum[c][i * Taps::kPhases + phase] += factor[phase][b][i] * x[c];
              }
            }
          }
        }
      }
    }
    store_pixel_sums<Taps::kPhases>(sum, p, tile, channels, tile.start(out, p.out, channel));
  }
}

// Adds up four sums over the threads that share pixels; each gets that of its own pixel.
__device__ inline float sum_of_parts(const float (&sum)[kFour], int part) {
  const bool second = part & 2, odd = part & 1;
  float half[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float mine = second ? sum[i + 2] : sum[i], other = second ? sum[i] : sum[i + 2];
    half[i] = mine + __shfl_xor_sync(0xffffffff, other, 2);
  }
  return (odd ? half[1] : half[0]) + __shfl_xor_sync(0xffffffff, odd ? half[0] : half[1], 1);
}

// The weight gradient. All taps of a thread's own pixel come together in shared memory.
template <typename T, int K, int kStride>
__global__ void __launch_bounds__(kPixelThreads)
    involve_pixels_weight_kernel(const __grid_constant__ TiledInvolution p, const T* __restrict__ x,
                                 const T* __restrict__ grad, T* __restrict__ grad_weight) {
  extern __shared__ float4 shared[];
  T* windows = reinterpret_cast<T*>(shared);
  float* sums = reinterpret_cast<float*>(windows + p.window_stride);
  const PixelTile tile(p, 1);
  const int h = tile.row + tile.y, w = tile.col + tile.x;
  const PixelRow<K, kStride> row(p, tile);
  float* mine = sums + threadIdx.x * K * K;
  for (int first = 0; first < p.channels; first += kTileChannels) {
    const int channels = min(kTileChannels, p.channels - first);
    const int channel = tile.group * p.channels + first;
    if (first > 0) {
      __syncthreads();
    }
    copy_pixel_windows<K, kStride>(tile.start(x, p.source, channel), p, tile, channels, windows);
    float grads[kPartChannels][kFour] = {};
    const T* from = tile.start(grad, p.out, channel + tile.part * kPartChannels);
    for_each_pixel_out<kFour>(
        p, tile, channels, h, w, p.out.w, [&](auto of_channels, auto of_pixels, int c, int i) {
          constexpr int C = decltype(of_channels)::value, V = C * decltype(of_pixels)::value;
          const auto value =
              load_vector<V>(from + (c * p.out.channel + h * p.out.row + (w + i) * p.out.pixel));
#pragma unroll
          for (int v = 0; v < V; ++v) {
            grads[c + v % C][i + v / C] = static_cast<float>(value.lane[v]);
          }
        });
    wait_for_copies();
#pragma unroll 1
    for (int a = 0; a < K; ++a) {
      float sum[K][kFour] = {};
#pragma unroll
      for (int j = 0; j < row.kPixels; ++j) {
        float source[kPartChannels];
        row.load_pixel(windows, a, j, source);
#pragma unroll
        for (int i = 0; i < kFour; ++i) {
          const int b = j - i * kStride;
          if (b >= 0 && b < K) {
#pragma unroll
            for (int c = 0; c < kPartChannels; ++c) {
              sum[b][i] += grads[c][i] * source[c];
            }
          }
        }
      }
#pragma unroll
      for (int b = 0; b < K; ++b) {
        const float all = sum_of_parts(sum[b], tile.part);
        if (!tile.spare) {
          float& total = mine[a * K + b];
          total = first > 0 ? total + all : all;
        }
      }
    }
  }
  const TiledImage& image = p.weight;
  T* to = tile.start(grad_weight, image, tile.group * K * K);
  if (image.nchw) {
    if (!tile.spare && h < image.h && w + tile.part < image.w) {
      to += h * image.row + w + tile.part;
#pragma unroll K
      for (int tap = 0; tap < K * K; ++tap) {
        to[tap * image.channel] = static_cast<T>(mine[tap]);
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
        to[tap + (tile.row + y) * image.row + (tile.col + col) * image.pixel] =
            static_cast<T>(sums[(y * p.width() + col) * K * K + tap]);
      }
    }
  }
}

}  // namespace ops::cuda
