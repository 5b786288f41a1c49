// Involution with stride 1 and a square kernel of 3, 5 or 7 where images or weights are
// channels-last: a thread has 4 adjacent pixels of 8 channels. All weights of a tile of pixels and
// its windows, 16 channels at a time, lie in shared memory as in the images, adjacent taps and
// channels side by side. Any other strides work too, an element at a time.
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

// Rows of pixels in shared memory. Threads take their four pixels one after the other, so first
// come the pixels that they take first, side by side, then the next.
struct PixelLayout {
  int fours;  // of a row

  OPS_DEVICE int row() const { return kFour * fours; }
  OPS_DEVICE int place(int x) const { return x % kFour * fours + x / kFour; }
};

template <int K>
OPS_DEVICE PixelLayout window_layout(const TiledInvolution& p) {
  return PixelLayout{p.fours + round_up(K - 1, kFour) / kFour};
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

template <int K, typename T>
__device__ void copy_pixel_windows(const T* __restrict__ from, const TiledInvolution& p,
                                   const PixelTile& tile, int channels, T* __restrict__ to) {
  using Vectors = WindowVectors<T>;
  const TiledImage& image = p.source;
  const PixelLayout layout = window_layout<K>(p);
  const auto copy = [&](auto lanes) {
    constexpr int V = decltype(lanes)::value;
#pragma unroll 2
    for (Walk at(kTileChannels / V, p.width() + K - 1); at.slow < p.rows + K - 1; at.next()) {
      const int h = tile.row + p.offset_h + at.slow, w = tile.col + p.offset_w + at.middle;
      const int c = at.fast * V;
      const bool inside = h >= 0 && h < image.h && w >= 0 && w < image.w && c < channels;
      const int place = at.slow * layout.row() + layout.place(at.middle);
      copy_async<V>(to + Vectors::at(place, c / Vectors::kElements) + c % Vectors::kElements,
                    from + (inside ? c * image.channel + h * image.row + w * image.pixel : 0),
                    inside);
    }
  };
  if (image.pixel != 1 && image.lanes == Vectors::kElements) {
    copy(Width<Vectors::kElements>{});
  } else {
    copy(Width<1>{});
  }
}

// A thread's 8 channels of the pixels of a window's row that K taps of four outputs take.
template <typename T, int K>
struct PixelRow {
  static constexpr int kPixels = K + kFour - 1;
  int places[kPixels];

  __device__ PixelRow(const TiledInvolution& p, const PixelTile& tile) {
    const PixelLayout layout = window_layout<K>(p);
#pragma unroll
    for (int j = 0; j < kPixels; ++j) {
      places[j] = tile.y * layout.row() + layout.place(tile.x + j);
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
// the input gradient, where rows come in reverse; there they are the taps of the source's pixels
// that row `a` takes, those of x = 0 the first that output 0 takes.
template <typename T, int K, bool kFlip>
class PixelWeights {
 public:
  static OPS_DEVICE PixelLayout layout(const TiledInvolution& p) {
    return kFlip ? window_layout<K>(p) : PixelLayout{p.fours};
  }
  static OPS_DEVICE int size(const TiledInvolution& p) {
    return K * p.rows * layout(p).row() * kPitch;
  }

  __device__ PixelWeights(const T* __restrict__ weight, const TiledInvolution& p,
                          const PixelTile& tile, T* shared)
      : p_(p), tile_(tile), adjacent_(p.weight.channel == 1), shared_(shared) {
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
    return (kFlip ? K - 1 - a : a) * K * p_.weight.channel + h(a, y) * p_.weight.row +
           w(x) * p_.weight.pixel;
  }
  // Elements of a row's first word that come before it.
  __device__ int skipped(int index) const {
    return kPerWord == 1 || !adjacent_ ? 0 : (index + skew_) & (kPerWord - 1);
  }

  template <int kPieces, int kElements>
  __device__ void copy_pieces() const {
    const PixelLayout at = layout(p_);
    const auto copy = [&](int piece, int a, int y, int x) {
      const bool inside = h(a, y) >= 0 && h(a, y) < p_.weight.h && w(x) >= 0 && w(x) < p_.weight.w;
      const int first = index(a, y, x), element = piece * kElements;
      const int from = first + skew_ - skipped(first) + element * p_.weight.channel;
      copy_async<kElements>(
          shared_ + ((a * p_.rows + y) * at.row() + at.place(x)) * kPitch + element,
          weight_ + (inside ? from : 0), inside);
    };
    if (kFlip) {
#pragma unroll 2
      for (Walk walk(kPieces, p_.width() + K - 1); walk.slow < K * p_.rows; walk.next()) {
        copy(walk.fast, walk.slow % K, walk.slow / K, walk.middle);
      }
    } else {
#pragma unroll 2
      for (Walk walk(kPieces * K, p_.width()); walk.slow < p_.rows; walk.next()) {
        copy(walk.fast % kPieces, walk.fast / kPieces, walk.slow, walk.middle);
      }
    }
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
  if (p.out.pixel != 1 && p.out.lanes == Vectors::kElements) {
    visit(Width<Vectors::kElements>{});
  } else {
    visit(Width<1>{});
  }
}

template <typename T, int K, bool kFlip>
__global__ void __launch_bounds__(kPixelThreads)
    involve_pixels_kernel(const __grid_constant__ TiledInvolution p, const T* __restrict__ source,
                          const T* __restrict__ weight, T* __restrict__ out) {
  extern __shared__ float4 shared[];
  T* windows = reinterpret_cast<T*>(shared);
  const PixelTile tile(p);
  const PixelWeights<T, K, kFlip> weights(tile.start(weight, p.weight, tile.group * K * K), p, tile,
                                          windows + p.plane);
  weights.copy();
  const PixelRow<T, K> row(p, tile);
  for (int first = 0; first < p.channels; first += kTileChannels) {
    const int channels = min(kTileChannels, p.channels - first);
    const int channel = tile.group * p.channels + first;
    if (first > 0) {
      __syncthreads();
    }
    copy_pixel_windows<K>(tile.start(source, p.source, channel), p, tile, channels, windows);
    wait_for_copies();
    float sum[kHalfChannels][kFour] = {};
#pragma unroll 1
    for (int a = 0; a < K; ++a) {
      float factor[K][kFour];
      weights.take(a, factor);
      const T* from = windows + a * window_layout<K>(p).row() * kTileChannels;
#pragma unroll
      for (int j = 0; j < row.kPixels; ++j) {
        float x[kHalfChannels];
        row.load_pixel(from, j, tile.half, x);
#pragma unroll
        for (int i = 0; i < kFour; ++i) {
          if (j >= i && j < i + K) {
#pragma unroll
            for (int c = 0; c < kHalfChannels; ++c) {
              sum[c][i] += factor[j - i][i] * x[c];
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
template <typename T, int K>
__global__ void __launch_bounds__(kPixelThreads)
    involve_pixels_weight_kernel(const __grid_constant__ TiledInvolution p, const T* __restrict__ x,
                                 const T* __restrict__ grad, T* __restrict__ grad_weight) {
  extern __shared__ float4 shared[];
  T* windows = reinterpret_cast<T*>(shared);
  float* sums = reinterpret_cast<float*>(windows + p.plane);
  const PixelTile tile(p);
  const PixelRow<T, K> row(p, tile);
  const PixelLayout layout{p.fours};
  for (int first = 0; first < p.channels; first += kTileChannels) {
    const int channels = min(kTileChannels, p.channels - first);
    const int channel = tile.group * p.channels + first;
    if (first > 0) {
      __syncthreads();
    }
    copy_pixel_windows<K>(tile.start(x, p.source, channel), p, tile, channels, windows);
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
      const T* pixels = windows + a * window_layout<K>(p).row() * kTileChannels;
#pragma unroll
      for (int j = 0; j < row.kPixels; ++j) {
        float source[kHalfChannels];
        row.load_pixel(pixels, j, tile.half, source);
#pragma unroll
        for (int i = 0; i < kFour; ++i) {
          if (j >= i && j < i + K) {
#pragma unroll
            for (int c = 0; c < kHalfChannels; ++c) {
              sum[j - i][i] += grads[c][i] * source[c];
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
#pragma unroll 4
  for (Walk at(K * K, p.width()); at.slow < p.rows; at.next()) {
    const int h = tile.row + at.slow, w = tile.col + at.middle;
    const int place = at.slow * layout.row() + layout.place(at.middle);
    if (h < image.h && w < image.w) {
      to[at.fast * image.channel + h * image.row + w * image.pixel] =
          static_cast<T>(sums[place * K * K + at.fast]);
    }
  }
}

}  // namespace ops::cuda
