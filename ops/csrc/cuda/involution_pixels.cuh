// Involution with stride 1 or 2 and a square kernel of 3, 5 or 7, made for channels-last images and
// weights: a thread has 4 adjacent pixels of 8 channels. All weights of a tile of pixels and its
// windows, 16 channels at a time, lie in shared memory as in such images, adjacent taps and
// channels side by side. Planes come there an element at a time.
#pragma once

#include "involution_tile.cuh"

namespace ops::cuda {

constexpr int kPixelFours = 4;   // along a row of the tile, at most
constexpr int kPixelRows = 8;    // of the tile, at most
constexpr int kPixelHalves = 2;  // threads that share the pixels
constexpr int kHalfChannels = kTileChannels / kPixelHalves;
constexpr int kPixelThreads = kPixelFours * kPixelRows * kPixelHalves;

// The thread's pixels and channels of a tile. The last warp's spare threads repeat the last pixels.
struct PixelTile : TilePlace {
  int y, x, half;
  bool spare;

  __device__ explicit PixelTile(const TiledInvolution& p)
      : TilePlace(p), half(threadIdx.x % kPixelHalves) {
    const int index = threadIdx.x / kPixelHalves, fours = p.fours * p.rows;
    spare = index >= fours;
    y = min(index, fours - 1) / p.fours;
    x = (min(index, fours - 1) - y * p.fours) * kFour;
  }
};

// Rows of pixels in shared memory. Threads take theirs one after the other, so first come the
// pixels that they take first, side by side, then the next.
struct PixelLayout {
  int threads;    // of a row
  int of_thread;  // pixels from one thread's first to the next one's

  OPS_DEVICE int row() const { return threads * of_thread; }
  __device__ int place(unsigned x) const { return x % of_thread * threads + x / of_thread; }
};

// Of windows that K taps take at every kStride pixels.
template <int K, int kStride>
OPS_DEVICE PixelLayout window_layout(const TiledInvolution& p) {
  constexpr int kPixels = kFour * kStride;
  return PixelLayout{p.fours + round_up(K - kStride, kPixels) / kPixels, kPixels};
}
OPS_DEVICE inline int window_rows(const TiledInvolution& p, int kernel, int stride) {
  return (p.rows - 1) * stride + kernel;
}

// Calls f(element, y, x) for kElements of every pixel of an area, a pixel for a group of threads;
// for every pixel of kElements planes, if they are that.
template <int kElements, typename F>
__device__ void for_each_element(bool planes, int rows, int width, const F& f) {
  if (planes) {
    for (Walk at(width, rows); at.slow < kElements; at.next()) {
      f(at.slow, at.middle, at.fast);
    }
    return;
  }
  constexpr int kGroup = kElements > 16 ? 32 : kElements > 8 ? 16 : kElements > 4 ? 8 : kElements;
#pragma unroll
  for (int first = 0; first < kElements; first += kGroup) {
    const int element = first + threadIdx.x % kGroup;
    if (element < kElements) {
      for (int y = 0; y < rows; ++y) {
#pragma unroll 2
        for (int x = threadIdx.x / kGroup; x < width; x += blockDim.x / kGroup) {
          f(element, y, x);
        }
      }
    }
  }
}

// Where vector `v` of a window's 16 channels lies in shared memory, 16 bytes each. Exchanged so
// that the vectors of four neighbouring pixels that threads take at once lie in all banks.
template <typename T>
struct WindowVectors {
  static constexpr int kElements = kVectorBytes / sizeof(T);
  static constexpr int kVectors = kTileChannels / kElements;
  static constexpr int kOfThread = kVectors / kPixelHalves;

  static __device__ int at(int place, int v) {
    return (place * kVectors + (kVectors == 4 ? v ^ (place & 2) : v)) * kElements;
  }
  // The first channel of a thread's vector k.
  static __device__ int channel(int half, int k) { return (half + kPixelHalves * k) * kElements; }
};

template <int K, int kStride, typename T>
__device__ void copy_pixel_windows(const T* __restrict__ from, const TiledInvolution& p,
                                   const PixelTile& tile, int channels, T* __restrict__ to) {
  using Vectors = WindowVectors<T>;
  const TiledImage& image = p.source;
  const PixelLayout layout = window_layout<K, kStride>(p);
  const int row = tile.row * kStride + p.offset_h, col = tile.col * kStride + p.offset_w;
  const auto copy = [&](auto lanes) {
    constexpr int V = decltype(lanes)::value;
    for_each_element<kTileChannels / V>(
        image.planes, window_rows(p, K, kStride), (p.width() - 1) * kStride + K,
        [&](int element, int y, int x) {
          const int h = row + y, w = col + x, c = element * V;
          const bool inside = h >= 0 && h < image.h && w >= 0 && w < image.w && c < channels;
          const int at = Vectors::at(y * layout.row() + layout.place(x), c / Vectors::kElements);
          copy_async<V>(to + at + c % Vectors::kElements,
                        from + (inside ? c * image.channel + h * image.row + w * image.pixel : 0),
                        inside);
        });
  };
  if (!image.planes && image.lanes == Vectors::kElements) {
    copy(Width<Vectors::kElements>{});
  } else {
    copy(Width<1>{});
  }
}

// A thread's 8 channels of the pixels of a window's row that K taps of four outputs take.
template <typename T, int K, int kStride>
struct PixelRow {
  static constexpr int kPixels = (kFour - 1) * kStride + K;
  int places[kPixels];

  __device__ PixelRow(const TiledInvolution& p, const PixelTile& tile) {
    const PixelLayout layout = window_layout<K, kStride>(p);
#pragma unroll
    for (int j = 0; j < kPixels; ++j) {
      places[j] = tile.y * kStride * layout.row() + layout.place(tile.x * kStride + j);
    }
  }

  __device__ void load_pixel(const T* windows, int j, int half, float (&to)[kHalfChannels]) const {
    using Vectors = WindowVectors<T>;
#pragma unroll
    for (int k = 0; k < Vectors::kOfThread; ++k) {
      to_floats(load<Vectors::kElements>(windows + Vectors::at(places[j], half + kPixelHalves * k)),
                to + k * Vectors::kElements);
    }
  }
};

// The weights of a tile in shared memory: the taps of kernel row `a` for pixel (y, x). kFlip: for
// the input gradient, where rows come in reverse, of every p.step taps from p.first_h and p.first_w
// on K each; there they are the taps of the source's pixels that row `a` takes, those of x = 0 the
// first that output 0 takes.
template <typename T, int K, bool kFlip>
class PixelWeights {
 public:
  static OPS_DEVICE PixelLayout layout(const TiledInvolution& p) {
    return kFlip ? window_layout<K, 1>(p) : PixelLayout{p.fours, kFour};
  }
  static OPS_DEVICE int size(const TiledInvolution& p) {
    return K * p.rows * layout(p).row() * kPitch;
  }

  __device__ PixelWeights(const T* __restrict__ weight, const TiledInvolution& p,
                          const PixelTile& tile, T* shared)
      : p_(p), tile_(tile), adjacent_(p.weight.channel == 1 && p.step == 1), shared_(shared) {
    skew_ = adjacent_ ? reinterpret_cast<uintptr_t>(weight) / sizeof(T) % kPerWord : 0;
    weight_ = weight - skew_;
  }

  __device__ void copy() const {
    adjacent_ ? copy_pieces<kWords, kPerWord>() : copy_pieces<K, 1>();
  }

  __device__ void take(int a, float (&factor)[K][kFour]) const {
    const PixelLayout at = layout(p_);
    const T* from = shared_ + (a * p_.rows + tile_.y) * at.row() * kPitch;
#pragma unroll
    for (int b = 0; b < K; ++b) {
#pragma unroll
      for (int i = 0; i < kFour; ++i) {
        const int x = tile_.x + i + (kFlip ? b : 0), tap = kFlip ? K - 1 - b : b;
        factor[b][i] =
            static_cast<float>(from[at.place(x) * kPitch + tap + skipped(index(a, tile_.y, x))]);
      }
    }
  }

 private:
  static constexpr int kPerWord = sizeof(T) == 2 ? 2 : 1;  // elements of the smallest async copy
  static constexpr int kWords = (K + kPerWord - 1) / kPerWord;  // of a row, the first one cut
  static constexpr int kPitch = (kWords | 1) * kPerWord;        // odd: other banks

  const TiledInvolution& p_;
  const PixelTile& tile_;
  bool adjacent_;  // taps
  T* shared_;
  int skew_;  // elements between the last whole word's address and the weights'
  const T* __restrict__ weight_;

  __device__ int h(int a, int y) const { return tile_.row + y + (kFlip ? p_.offset_h + a : 0); }
  __device__ int w(int x) const { return tile_.col + x + (kFlip ? p_.offset_w : 0); }
  // Of the first tap.
  __device__ int index(int a, int y, int x) const {
    return (tap_row(a) * p_.kernel + p_.first_w) * p_.weight.channel + h(a, y) * p_.weight.row +
           w(x) * p_.weight.pixel;
  }
  __device__ int tap_row(int a) const { return kFlip ? p_.first_h + (K - 1 - a) * p_.step : a; }
  // Elements of a row's first word that come before it.
  __device__ int skipped(int index) const {
    return kPerWord == 1 || !adjacent_ ? 0 : (index + skew_) & (kPerWord - 1);
  }

  template <int kPieces, int kElements>
  __device__ void copy_pieces() const {
    const PixelLayout at = layout(p_);
    for_each_element<kPieces * K>(
        p_.weight.planes, p_.rows, p_.width() + (kFlip ? K - 1 : 0), [&](int piece, int y, int x) {
          const int a = piece / kPieces, element = piece % kPieces * kElements;
          const int row = h(a, y), col = w(x), first = index(a, y, x);
          const bool inside = row >= 0 && row < p_.weight.h && col >= 0 && col < p_.weight.w &&
                              tap_row(a) < p_.kernel && p_.first_w + element * p_.step < p_.kernel;
          const int from = first + skew_ - skipped(first) + element * p_.step * p_.weight.channel;
          copy_async<kElements>(
              shared_ + ((a * p_.rows + y) * at.row() + at.place(x)) * kPitch + element,
              weight_ + (inside ? from : 0), inside);
        });
  }
};

// Calls f(Width<V>{}, first of V lanes of the thread's 8, their channel, pixel) for those that are
// there of its 8 channels and 4 pixels in the image `out`.
template <typename T, typename F>
__device__ void for_each_pixel_out(const TiledInvolution& p, const PixelTile& tile, int channels,
                                   const F& f) {
  using Vectors = WindowVectors<T>;
  if (tile.spare || tile.row + tile.y >= p.out.h) {
    return;
  }
  const auto visit = [&](auto lanes) {
    constexpr int V = decltype(lanes)::value;
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
#pragma unroll
      for (int lane = 0; lane < kHalfChannels; lane += V) {
        const int c =
            Vectors::channel(tile.half, lane / Vectors::kElements) + lane % Vectors::kElements;
        if (c < channels && tile.col + tile.x + i < p.out.w) {
          f(lanes, lane, c, i);
        }
      }
    }
  };
  if (!p.out.planes && p.out.lanes == Vectors::kElements) {
    visit(Width<Vectors::kElements>{});
  } else {
    visit(Width<1>{});
  }
}

template <typename T, int K, int kStride, bool kFlip>
__global__ void __launch_bounds__(kPixelThreads)
    involve_pixels_kernel(const __grid_constant__ TiledInvolution p, const T* __restrict__ source,
                          const T* __restrict__ weight, T* __restrict__ out) {
  extern __shared__ float4 shared[];
  T* windows = reinterpret_cast<T*>(shared);
  const PixelTile tile(p);
  const PixelWeights<T, K, kFlip> weights(
      tile.start(weight, p.weight, tile.group * p.kernel * p.kernel), p, tile, windows + p.plane);
  weights.copy();
  const PixelRow<T, K, kStride> row(p, tile);
  for (int first = 0; first < p.channels; first += kTileChannels) {
    const int channels = min(kTileChannels, p.channels - first);
    const int channel = tile.group * p.channels + first;
    if (first > 0) {
      __syncthreads();
    }
    copy_pixel_windows<K, kStride>(tile.start(source, p.source, channel), p, tile, channels,
                                   windows);
    wait_for_copies();
    float sum[kHalfChannels][kFour] = {};
#pragma unroll 1
    for (int a = 0; a < K; ++a) {
      float factor[K][kFour];
      weights.take(a, factor);
      const T* from = windows + a * window_layout<K, kStride>(p).row() * kTileChannels;
#pragma unroll
      for (int j = 0; j < row.kPixels; ++j) {
        float x[kHalfChannels];
        row.load_pixel(from, j, tile.half, x);
#pragma unroll
        for (int i = 0; i < kFour; ++i) {
          const int b = j - i * kStride;
          if (b >= 0 && b < K) {
#pragma unroll
            for (int c = 0; c < kHalfChannels; ++c) {
              sum[c][i] += factor[b][i] * x[c];
            }
          }
        }
      }
    }
    T* to = tile.start(out, p.out, channel) + (tile.row + tile.y) * p.out.row +
            (tile.col + tile.x) * p.out.pixel;
    for_each_pixel_out<T>(p, tile, channels, [&](auto lanes, int lane, int c, int i) {
      constexpr int V = decltype(lanes)::value;
      Vector<T, V> value;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        value.lane[v] = static_cast<T>(sum[lane + v][i]);
      }
      store<V>(to + c * p.out.channel + i * p.out.pixel, value);
    });
  }
}

// The weight gradient: the sums of a tile come together in shared memory, whose pixels have all
// taps side by side.
template <typename T, int K, int kStride>
__global__ void __launch_bounds__(kPixelThreads)
    involve_pixels_weight_kernel(const __grid_constant__ TiledInvolution p, const T* __restrict__ x,
                                 const T* __restrict__ grad, T* __restrict__ grad_weight) {
  extern __shared__ float4 shared[];
  T* windows = reinterpret_cast<T*>(shared);
  float* sums = reinterpret_cast<float*>(windows + p.plane);
  const PixelTile tile(p);
  const PixelRow<T, K, kStride> row(p, tile);
  const PixelLayout layout{p.fours, kFour};
  for (int first = 0; first < p.channels; first += kTileChannels) {
    const int channels = min(kTileChannels, p.channels - first);
    const int channel = tile.group * p.channels + first;
    if (first > 0) {
      __syncthreads();
    }
    copy_pixel_windows<K, kStride>(tile.start(x, p.source, channel), p, tile, channels, windows);
    float grads[kHalfChannels][kFour] = {};
    const T* from = tile.start(grad, p.out, channel) + (tile.row + tile.y) * p.out.row +
                    (tile.col + tile.x) * p.out.pixel;
    for_each_pixel_out<T>(p, tile, channels, [&](auto lanes, int lane, int c, int i) {
      constexpr int V = decltype(lanes)::value;
      const auto value = load<V>(from + c * p.out.channel + i * p.out.pixel);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        grads[lane + v][i] = static_cast<float>(value.lane[v]);
      }
    });
    wait_for_copies();
#pragma unroll 1
    for (int a = 0; a < K; ++a) {
      float sum[K][kFour] = {};
      const T* pixels = windows + a * window_layout<K, kStride>(p).row() * kTileChannels;
#pragma unroll
      for (int j = 0; j < row.kPixels; ++j) {
        float source[kHalfChannels];
        row.load_pixel(pixels, j, tile.half, source);
#pragma unroll
        for (int i = 0; i < kFour; ++i) {
          const int b = j - i * kStride;
          if (b >= 0 && b < K) {
#pragma unroll
            for (int c = 0; c < kHalfChannels; ++c) {
              sum[b][i] += grads[c][i] * source[c];
            }
          }
        }
      }
      // Each half of the channels adds up two of the pixels.
#pragma unroll
      for (int b = 0; b < K; ++b) {
#pragma unroll
        for (int i = 0; i < kFour / 2; ++i) {
          const float mine = tile.half ? sum[b][i + 2] : sum[b][i];
          const float other = tile.half ? sum[b][i] : sum[b][i + 2];
          const float both = mine + __shfl_xor_sync(0xffffffff, other, 1);
          const int place = tile.y * layout.row() + layout.place(tile.x + 2 * tile.half + i);
          float& total = sums[place * K * K + a * K + b];
          if (!tile.spare) {
            total = first > 0 ? total + both : both;
          }
        }
      }
    }
  }
  __syncthreads();
  const TiledImage& image = p.weight;
  T* to = tile.start(grad_weight, image, tile.group * K * K);
  for_each_element<K * K>(image.planes, min(p.rows, image.h - tile.row),
                          min(p.width(), image.w - tile.col), [&](int tap, int y, int x) {
                            const int h = tile.row + y, w = tile.col + x;
                            const int place = y * layout.row() + layout.place(x);
                            to[tap * image.channel + h * image.row + w * image.pixel] =
                                static_cast<T>(sums[place * K * K + tap]);
                          });
}

}  // namespace ops::cuda
