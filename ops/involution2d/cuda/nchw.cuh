// Involution with stride 1 and a square kernel of 3, 5 or 7. A thread has 4 adjacent pixels of up
// to 16 channels of a group in registers, and the weights of a row of the kernel, which it loads
// once for all channels while it computes with the row before; the windows of the source lie in
// shared memory. The weight gradient is the same the other way round.
#pragma once

#include "involution2d/cuda/tile.cuh"

namespace ops::cuda {

// Four pixels' weights of the taps of a row of the kernel, loaded ahead. Of pixels beyond the image
// any weight will do.
template <typename T, int K>
class WeightRow {
 public:
  __device__ WeightRow(const T* __restrict__ weight, const TiledInvolution& p, const Tile& tile)
      : weight_(weight), p_(p), h_(tile.row + tile.y), w_(tile.col + tile.x) {}

  __device__ void load_row(int a) {
    const TiledImage& image = p_.weight;
    const T* row = weight_ + a * K * image.channel + min(h_, image.h - 1) * image.row;
    dispatch_lanes<kFour>(image, [&](auto lanes) {
      constexpr int V = decltype(lanes)::value;
#pragma unroll
      for (int i = 0; i < kFour; i += V) {
        const T* from = row + min(w_ + i, image.w - V);
#pragma unroll
        for (int b = 0; b < K; ++b) {
          const auto value = load<V>(from + b * image.channel);
#pragma unroll
          for (int v = 0; v < V; ++v) {
            next_[b].lane[i + v] = value.lane[v];
          }
        }
      }
    });
  }

  __device__ void take(float (&factor)[K][kFour]) const {
#pragma unroll
    for (int b = 0; b < K; ++b) {
      to_floats(next_[b], factor[b]);
    }
  }

 private:
  const T* __restrict__ weight_;
  const TiledInvolution& p_;
  int h_, w_;
  Vector<T, kFour> next_[K];
};

// For the input gradient: taps come in reverse, and each lies at the pixel of the source that it
// takes. Beyond the image they are 0.
template <typename T, int K>
class FlippedWeightRow {
 public:
  __device__ FlippedWeightRow(const T* __restrict__ weight, const TiledInvolution& p,
                              const Tile& tile)
      : weight_(weight),
        p_(p),
        h_(tile.row + tile.y + p.offset_h),
        w_(tile.col + tile.x + p.offset_w) {}

  // Tap b of the reversed row lies b pixels further; with a padding of half the kernel it is known
  // which of them are aligned.
  __device__ void load_row(int a) {
    const TiledImage& image = p_.weight;
    const int h = h_ + a;
    const T* row =
        weight_ + (K * K - 1 - a * K) * image.channel + (h * image.row + w_);  // the last tap's
    const bool inside = h >= 0 && h < image.h;
    const bool aligned =
        sizeof(T) == sizeof(Lane) && image.lanes >= kFour && p_.offset_w == -(K / 2);
#pragma unroll
    for (int b = 0; b < K; ++b) {
      const T* from = row + (b - b * image.channel);
      const auto load_lanes = [&](int i, auto lanes) {
        constexpr int V = decltype(lanes)::value;
        const int w = w_ + b + i;
        if (inside && w >= 0 && w < image.w) {
          const auto value = load<V>(reinterpret_cast<const Bits*>(from + i));
#pragma unroll
          for (int v = 0; v < V; ++v) {
            next_[b][i + v] = value.lane[v];
          }
        }
      };
#pragma unroll
      for (int i = 0; i < kFour; ++i) {
        next_[b][i] = 0;
      }
      const int shift = (b + kFour - K / 2 % kFour) % kFour;  // from a multiple of four
      if (aligned && shift == 0) {
        load_lanes(0, Width<4>{});
      } else if (aligned && shift == 2) {
        load_lanes(0, Width<2>{});
        load_lanes(2, Width<2>{});
      } else {
        load_lanes(0, Width<1>{});
        if (aligned) {
          load_lanes(1, Width<2>{});
        } else {
          load_lanes(1, Width<1>{});
          load_lanes(2, Width<1>{});
        }
        load_lanes(3, Width<1>{});
      }
    }
  }

  __device__ void take(float (&factor)[K][kFour]) const {
#pragma unroll
    for (int b = 0; b < K; ++b) {
#pragma unroll
      for (int i = 0; i < kFour; ++i) {
        const Bits bits = static_cast<Bits>(next_[b][i]);
        factor[b][i] = static_cast<float>(reinterpret_cast<const T&>(bits));
      }
    }
  }

 private:
  // A register each: to put two of 16 bits into one would wait for the loads.
  using Bits = std::conditional_t<sizeof(T) == 2, unsigned short, unsigned>;
  using Lane = unsigned;
  const T* __restrict__ weight_;
  const TiledInvolution& p_;
  int h_, w_;
  Lane next_[K][kFour];
};

// Stores four pixels' weight gradients of row `a` of the kernel.
template <int K, typename T>
__device__ void store_weight_row(const float (&sum)[K][kFour], T* __restrict__ grad_weight,
                                 const TiledInvolution& p, const Tile& tile, int a) {
  const TiledImage& image = p.weight;
  const int h = tile.row + tile.y, w = tile.col + tile.x;
  T* to = grad_weight + a * K * image.channel + h * image.row + w;
  if (h >= image.h) {
    return;
  }
  dispatch_lanes<kFour>(image, [&](auto lanes) {
    constexpr int V = decltype(lanes)::value;
#pragma unroll
    for (int b = 0; b < K; ++b) {
#pragma unroll
      for (int i = 0; i < kFour; i += V) {
        Vector<T, V> value;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          value.lane[v] = static_cast<T>(sum[b][i + v]);
        }
        if (w + i < image.w) {
          store<V>(to + b * image.channel + i, value);
        }
      }
    }
  });
}

// The involution or, kFlip, its input gradient: the same with the kernel's taps in reverse and each
// tap's weights moved along with the source.
template <typename T, int K, bool kFlip>
__global__ void __launch_bounds__(kTileThreads, 3)
    involve_nchw_kernel(const __grid_constant__ TiledInvolution p, const T* __restrict__ source,
                        const T* __restrict__ weight, T* __restrict__ out) {
  extern __shared__ float4 shared[];
  T* windows = reinterpret_cast<T*>(shared);
  const Tile tile(p);
  std::conditional_t<kFlip, FlippedWeightRow<T, K>, WeightRow<T, K>> weights(
      tile.start(weight, p.weight, tile.group * K * K), p, tile);
  for (int first = 0; first < p.channels; first += kTileChannels) {
    const int channels = min(kTileChannels, p.channels - first);
    const int channel = tile.group * p.channels + first;
    if (first > 0) {
      __syncthreads();
    }
    weights.load_row(0);
    copy_windows<K>(tile.start(source, p.source, channel), p, tile, channels, windows);
    wait_for_copies();
    float sum[kTileChannels][kFour] = {};
#pragma unroll 1
    for (int a = 0; a < K; ++a) {
      float factor[K][kFour];
      weights.take(factor);
      if (a + 1 < K) {
        weights.load_row(a + 1);
      }
      const T* row = windows + (tile.y + a) * p.pitch + tile.x;
#pragma unroll
      for (int c = 0; c < kTileChannels; ++c) {
        if (c % kFour == 0 && c >= channels) {
          break;
        }
        const SourceRow<T, K> x(row + c * p.window_stride);
#pragma unroll
        for (int b = 0; b < K; ++b) {
#pragma unroll
          for (int i = 0; i < kFour; ++i) {
            sum[c][i] += factor[b][i] * x.lane[b + i];
          }
        }
      }
    }
    T* to = tile.start(out, p.out, channel) + (tile.row + tile.y) * p.out.row + tile.col + tile.x;
    for_each_out(p, tile, channels, [&](auto lanes, int c, int i) {
      constexpr int V = decltype(lanes)::value;
      Vector<T, V> value;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        value.lane[v] = static_cast<T>(sum[c][i + v]);
      }
      store<V>(to + c * p.out.channel + i, value);
    });
  }
}

// The weight gradient: the sum over the group's channels, whose gradients a thread has in
// registers.
template <typename T, int K>
__global__ void __launch_bounds__(kTileThreads, 3)
    involve_nchw_weight_kernel(const __grid_constant__ TiledInvolution p, const T* __restrict__ x,
                               const T* __restrict__ grad, T* __restrict__ grad_weight) {
  extern __shared__ float4 shared[];
  T* windows = reinterpret_cast<T*>(shared);
  const Tile tile(p);
  const int channel = tile.group * p.channels;
  copy_windows<K>(tile.start(x, p.source, channel), p, tile, p.channels, windows);
  float grads[kTileChannels][kFour];
  const T* from =
      tile.start(grad, p.out, channel) + (tile.row + tile.y) * p.out.row + tile.col + tile.x;
  const auto load_grads = [&](int first) {
#pragma unroll
    for (int c = 0; c < kTileChannels; ++c) {
#pragma unroll
      for (int i = 0; i < kFour; ++i) {
        grads[c][i] = 0;
      }
    }
    for_each_out(p, tile, p.channels - first, [&](auto lanes, int c, int i) {
      constexpr int V = decltype(lanes)::value;
      const auto value = load<V>(from + (first + c) * p.out.channel + i * p.out.pixel);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        grads[c][i + v] = static_cast<float>(value.lane[v]);
      }
    });
  };
  grad_weight = tile.start(grad_weight, p.weight, tile.group * K * K);
#pragma unroll 1
  for (int a = 0; a < K; ++a) {
    float sum[K][kFour] = {};
    for (int first = 0; first < p.channels; first += kTileChannels) {
      if (a == 0 || p.channels > kTileChannels) {
        load_grads(first);
      }
      if (a == 0 && first == 0) {
        wait_for_copies();
      }
      const T* row = windows + first * p.window_stride + (tile.y + a) * p.pitch + tile.x;
#pragma unroll
      for (int c = 0; c < kTileChannels; ++c) {
        if (c % kFour == 0 && first + c >= p.channels) {
          break;
        }
        const SourceRow<T, K> source(row + c * p.window_stride);
#pragma unroll
        for (int b = 0; b < K; ++b) {
#pragma unroll
          for (int i = 0; i < kFour; ++i) {
            sum[b][i] += grads[c][i] * source.lane[b + i];
          }
        }
      }
    }
    store_weight_row(sum, grad_weight, p, tile, a);
  }
}

}  // namespace ops::cuda
