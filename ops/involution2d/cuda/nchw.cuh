// nchw: involution with stride 1, for 3×3, 5×5 and 7×7 kernels and NCHW image and weight.
//
//      windows [channel][row][column]      weights of kernel row a      register tile
//      ┌─────────────────────┐             ┌────────────────┐           ┌────────────────┐
//      │ rows y … y + K − 1, │   row y + a │ K taps × 4     │    FMA    │ 16 channels ×  │
//      │ halo of K − 1       │ ──────────► │ pixels         │ ────────► │ 4 pixels       │
//      └─────────────────────┘             └────────────────┘           └────────────────┘
//                                           row a + 1: prefetch
//
//   block:   a tile of one group of one image, up to 128 quads; to fill the GPU, 4 or 8 of the
//            group's channels (weight gradient: some of the kernel rows)
//   shared:  the input windows of the tile, 16 channels at a time
//   thread:  4 adjacent pixels × 16 channels; loads a weight once for all channels
//
// Input gradient (kFlip): the same with the taps reversed and the weight of each tap read at the
// source pixel. Weight gradient: output gradients (4 pixels × 16 channels) and sums of one kernel
// row (K taps × 4 pixels) in registers; the windows of all channels of the group in shared memory.
#pragma once

#include "involution2d/cuda/tile.cuh"

namespace ops::involution2d {

// Prefetch the weights of one kernel row for a quad of outputs. Pixels outside the image read the
// weight of the last pixel; their sums are not stored.
template <typename T, int K>
class WeightRow {
 public:
  __device__ WeightRow(const T* __restrict__ weight, const TiledInvolution& p, const NchwTile& tile)
      : weight_(weight), p_(p), h_(tile.row + tile.y), w_(tile.col + tile.x) {}

  __device__ void prefetch(int a) {
    const ImageView& image = p_.weight;
    const T* row = weight_ + a * K * image.stride_c + min(h_, image.h - 1) * image.stride_h;
    dispatch_vector<kQuad>(image, [&](auto lanes) {
      constexpr int V = decltype(lanes)::value;
#pragma unroll
      for (int i = 0; i < kQuad; i += V) {
        const T* from = row + min(w_ + i, image.w - V);
#pragma unroll
        for (int b = 0; b < K; ++b) {
          const auto value = load<V>(from + b * image.stride_c);
#pragma unroll
          for (int v = 0; v < V; ++v) {
            next_[b].lane[i + v] = value.lane[v];
          }
        }
      }
    });
  }

  __device__ void unpack(float (&taps)[K][kQuad]) const {
#pragma unroll
    for (int b = 0; b < K; ++b) {
      to_floats(next_[b], taps[b]);
    }
  }

 private:
  const T* __restrict__ weight_;
  const TiledInvolution& p_;
  int h_, w_;
  Vector<T, kQuad> next_[K];
};

// The same for the input gradient: taps in reverse order, the weight of each tap at its source
// pixel; 0 outside the image.
template <typename T, int K>
class FlippedWeightRow {
 public:
  __device__ FlippedWeightRow(const T* __restrict__ weight, const TiledInvolution& p,
                              const NchwTile& tile)
      : weight_(weight),
        p_(p),
        h_(tile.row + tile.y + p.offset_h),
        w_(tile.col + tile.x + p.offset_w) {}

  // Tap b of the reversed row reads pixels shifted by b. With a padding of K / 2 the alignment of
  // each shift is known at compile time.
  __device__ void prefetch(int a) {
    const ImageView& image = p_.weight;
    const int h = h_ + a;
    const T* row =
        weight_ + (K * K - 1 - a * K) * image.stride_c + (h * image.stride_h + w_);  // last tap
    const bool inside = h >= 0 && h < image.h;
    const bool aligned =
        sizeof(T) == sizeof(Lane) && image.vector >= kQuad && p_.offset_w == -(K / 2);
#pragma unroll
    for (int b = 0; b < K; ++b) {
      const T* from = row + (b - b * image.stride_c);
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
      for (int i = 0; i < kQuad; ++i) {
        next_[b][i] = 0;
      }
      const int shift = (b + kQuad - K / 2 % kQuad) % kQuad;  // modulo a quad
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

  __device__ void unpack(float (&taps)[K][kQuad]) const {
#pragma unroll
    for (int b = 0; b < K; ++b) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        const Bits bits = static_cast<Bits>(next_[b][i]);
        taps[b][i] = static_cast<float>(reinterpret_cast<const T&>(bits));
      }
    }
  }

 private:
  // One register per element: packing 16-bit pairs would wait for the prefetch.
  using Bits = std::conditional_t<sizeof(T) == 2, unsigned short, unsigned>;
  using Lane = unsigned;
  const T* __restrict__ weight_;
  const TiledInvolution& p_;
  int h_, w_;
  Lane next_[K][kQuad];
};

// Store the weight gradients of kernel row `a` for a quad.
template <int K, typename T>
__device__ void store_weight_row(const float (&sum)[K][kQuad], T* __restrict__ grad_weight,
                                 const TiledInvolution& p, const NchwTile& tile, int a) {
  const ImageView& image = p.weight;
  const int h = tile.row + tile.y, w = tile.col + tile.x;
  T* to = grad_weight + a * K * image.stride_c + h * image.stride_h + w;
  if (h >= image.h) {
    return;
  }
  dispatch_vector<kQuad>(image, [&](auto lanes) {
    constexpr int V = decltype(lanes)::value;
#pragma unroll
    for (int b = 0; b < K; ++b) {
#pragma unroll
      for (int i = 0; i < kQuad; i += V) {
        if (w + i < image.w) {
          store_sums<V>(to + b * image.stride_c + i, &sum[b][i]);
        }
      }
    }
  });
}

// Forward (source: x) or, with kFlip, input gradient (source: grad_output).
template <typename T, int K, bool kFlip>
__global__ void __launch_bounds__(kNchwThreads, 3)
    involve_nchw_kernel(const __grid_constant__ TiledInvolution p, const T* __restrict__ source,
                        const T* __restrict__ weight, T* __restrict__ out) {
  extern __shared__ float4 shared[];
  T* windows = reinterpret_cast<T*>(shared);
  const NchwTile tile(p);
  std::conditional_t<kFlip, FlippedWeightRow<T, K>, WeightRow<T, K>> weights(
      tile.base(weight, p.weight, tile.group * K * K), p, tile);
  const int end = min(tile.begin + p.chunk_size, p.channels);
  for (int first = tile.begin; first < end; first += kTileChannels) {
    const int channels = min(kTileChannels, end - first);
    const int channel = tile.group * p.channels + first;
    if (first > tile.begin) {
      __syncthreads();
    }
    weights.prefetch(0);
    copy_windows<K>(tile.base(source, p.source, channel), p, tile, 0, K, channels, windows);
    finish_copies();
    float sum[kTileChannels][kQuad] = {};
#pragma unroll 1
    for (int a = 0; a < K; ++a) {
      float taps[K][kQuad];
      weights.unpack(taps);
      if (a + 1 < K) {
        weights.prefetch(a + 1);
      }
      const T* row = windows + (tile.y + a) * p.window_pitch + tile.x;
#pragma unroll
      for (int c = 0; c < kTileChannels; ++c) {
        if (c % kChannelStep == 0 && c >= channels) {
          break;
        }
        const WindowRow<T, K> x(row + c * p.window_stride);
#pragma unroll
        for (int b = 0; b < K; ++b) {
#pragma unroll
          for (int i = 0; i < kQuad; ++i) {
            sum[c][i] += taps[b][i] * x.pixel[b + i];
          }
        }
      }
    }
    T* to =
        tile.base(out, p.out, channel) + (tile.row + tile.y) * p.out.stride_h + tile.col + tile.x;
    for_each_output(p, tile, channels, [&](auto lanes, int c, int i) {
      store_sums<lanes.value>(to + c * p.out.stride_c + i, &sum[c][i]);
    });
  }
}

template <typename T, int K>
__global__ void __launch_bounds__(kNchwThreads, 3)
    involve_nchw_weight_kernel(const __grid_constant__ TiledInvolution p, const T* __restrict__ x,
                               const T* __restrict__ grad, T* __restrict__ grad_weight) {
  extern __shared__ float4 shared[];
  T* windows = reinterpret_cast<T*>(shared);
  const NchwTile tile(p);
  const int channel = tile.group * p.channels;
  const int end = min(tile.begin + p.chunk_size, K);
  copy_windows<K>(tile.base(x, p.source, channel), p, tile, tile.begin, end - tile.begin,
                  p.channels, windows);
  float grads[kTileChannels][kQuad];
  const T* from =
      tile.base(grad, p.out, channel) + (tile.row + tile.y) * p.out.stride_h + tile.col + tile.x;
  const auto load_grads = [&](int first) {
#pragma unroll
    for (int c = 0; c < kTileChannels; ++c) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        grads[c][i] = 0;
      }
    }
    for_each_output(p, tile, p.channels - first, [&](auto lanes, int c, int i) {
      constexpr int V = decltype(lanes)::value;
      const auto value = load<V>(from + (first + c) * p.out.stride_c + i * p.out.stride_w);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        grads[c][i + v] = static_cast<float>(value.lane[v]);
      }
    });
  };
  grad_weight = tile.base(grad_weight, p.weight, tile.group * K * K);
#pragma unroll 1
  for (int a = tile.begin; a < end; ++a) {
    float sum[K][kQuad] = {};
    for (int first = 0; first < p.channels; first += kTileChannels) {
      if (a == tile.begin || p.channels > kTileChannels) {
        load_grads(first);
      }
      if (a == tile.begin && first == 0) {
        finish_copies();
      }
      const T* row =
          windows + first * p.window_stride + (tile.y + a - tile.begin) * p.window_pitch + tile.x;
#pragma unroll
      for (int c = 0; c < kTileChannels; ++c) {
        if (c % kChannelStep == 0 && first + c >= p.channels) {
          break;
        }
        const WindowRow<T, K> source(row + c * p.window_stride);
#pragma unroll
        for (int b = 0; b < K; ++b) {
#pragma unroll
          for (int i = 0; i < kQuad; ++i) {
            sum[b][i] += grads[c][i] * source.pixel[b + i];
          }
        }
      }
    }
    store_weight_row(sum, grad_weight, p, tile, a);
  }
}

}  // namespace ops::involution2d
