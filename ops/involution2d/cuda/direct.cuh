// direct: involution with stride 1 or 2, for 3×3, 5×5 and 7×7 kernels and any layout.
//
//      windows of R pixels in a column         weights of these pixels
//      ┌──────────────────────────────┐        ┌───────────────────────┐
//      │ one channel (NHWC: four),    │  FMA   │ R × K², in registers, │
//      │ from the L1 cache: adjacent  │ ─────► │ loaded once for all   │ ──► R sums of a channel
//      │ threads read adjacent pixels │        │ channels              │
//      └──────────────────────────────┘        └───────────────────────┘
//
//   block:   128 adjacent columns of R pixels of the groups of an image
//   shared:  nothing
//   thread:  R pixels and all channels of their group, or a quarter of these
//
// Input gradient: source pixels have weights of their own. Weight gradient: the registers hold the
// sums of the taps over the channels. Threads that share a pixel exchange weights and sums by
// shuffles.
#pragma once

#include "core/cuda/common.cuh"
#include "involution2d/op.h"

namespace ops::involution2d {

using namespace cuda;

constexpr int kDirectThreads = 128;
constexpr int kParts = 4;   // threads that share a pixel
constexpr int kVector = 4;  // channels that a thread loads at once from an NHWC image

// 32-bit strides within an image.
struct Strides {
  int64_t n;
  int c, h, w;
};

// Sizes of a pass. `out` is the image whose pixels threads compute (weight gradient: grad_output).
struct DirectProblem {
  int groups, channels;  // channels per group
  int source_h, source_w, out_h, out_w, padding_h, padding_w;
  int rows;  // threads along the height of an image
  unsigned threads;
  Strides source, weight, out;
};

// Window along one axis of R outputs o, o + kPhases, …: sources start, start + 1, …. In the input
// gradient (kFlip) with stride S, an output reads every S-th tap, the first of which is `phase`.
template <int K, int S, bool kFlip>
struct Window {
  static constexpr int kTaps = kFlip ? (K + S - 1) / S : K;  // per output
  static constexpr int kStep = kFlip ? 1 : S;                // sources from an output to the next
  static constexpr int kPhases = kFlip ? S : 1;
  static constexpr int R = kTaps > 4 ? 2 : 4;
  int start, phase;

  __device__ Window(int output, int padding)
      : start(kFlip ? (output + padding) / S - (kTaps - 1) : output * S - padding),
        phase(kFlip ? (output + padding) % S : 0) {}

  // Return the tap with which an output reads its i-th source; not below K: none.
  __device__ int tap(int i) const { return kFlip ? phase + S * (kTaps - 1 - i) : i; }
};

// Load V elements, or zeros, and convert them to float. bfloat16: one instruction per element.
template <int V, typename T>
__device__ void load_or_zero(const T* from, bool inside, float (&to)[V]) {
  using Bits = typename BitsOf<V * sizeof(T)>::type;
  std::conditional_t<sizeof(Bits) == 2, unsigned, Bits> bits{};  // at least one register
  if (inside) {
    bits = *reinterpret_cast<const Bits*>(from);
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const unsigned pair = reinterpret_cast<const unsigned*>(&bits)[i / 2];
      to[i] = __uint_as_float(i % 2 ? pair & 0xffff0000 : pair << 16);
    } else {
      to[i] = static_cast<float>(reinterpret_cast<const T*>(&bits)[i]);
    }
  }
}

// Sum 4 values over the 4 threads of a pixel; return the sum of value `part`.
__device__ inline float sum_parts(const float (&sum)[kParts], int part) {
  const bool second = part & 2, odd = part & 1;
  float half[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float kept = second ? sum[i + 2] : sum[i], other = second ? sum[i] : sum[i + 2];
    half[i] = kept + __shfl_xor_sync(0xffffffff, other, 2);
  }
  return (odd ? half[1] : half[0]) + __shfl_xor_sync(0xffffffff, odd ? half[0] : half[1], 1);
}

// Q threads share a pixel and load V channels at once. Q = 1 needs an NCHW image, V > 1 NHWC.
template <Pass kPass, int K, int S, int Q, int V, typename T>
__global__ void __launch_bounds__(kDirectThreads, 3)
    direct_kernel(const __grid_constant__ DirectProblem p, const T* __restrict__ source,
                  const T* __restrict__ factor, T* __restrict__ out) {
  constexpr bool kFlip = kPass == Pass::backward_input, kWeight = kPass == Pass::backward_weight;
  using Window = involution2d::Window<K, S, kFlip>;
  constexpr int kTaps = Window::kTaps, kPhases = Window::kPhases, R = Window::R;
  unsigned i = blockIdx.x * kDirectThreads + threadIdx.x;
  const bool spare = i >= p.threads;  // takes part in the shuffles only
  i = spare ? p.threads - 1 : i;
  const int part = i % Q;
  i /= Q;
  const int w = i % p.out_w;
  i /= p.out_w;
  const int y = i % p.rows, h = y / kPhases * (kPhases * R) + y % kPhases;
  i /= p.rows;
  const int group = i % p.groups;
  const int64_t n = i / p.groups;
  const Window vertical(h, p.padding_h), horizontal(w, p.padding_w);
  const int source_pixel = Q == 1 ? 1 : p.source.w, out_pixel = Q == 1 ? 1 : p.out.w;

  const auto has_row = [&](int r) { return !spare && h + r * kPhases < p.out_h; };
  const auto out_offset = [&](int channel, int r) {
    return n * p.out.n + int64_t{channel} * p.out.c + (h + r * kPhases) * p.out.h + w * out_pixel;
  };
  const int64_t weight_offset = n * p.weight.n + int64_t{group} * K * K * p.weight.c;

  float taps[R][kTaps][kTaps] = {};  // weights or their gradients
  const T* weight = factor + weight_offset;
#pragma unroll
  for (int r = 0; !kWeight && r < R; ++r) {
    constexpr int kOwn = (kTaps * kTaps + Q - 1) / Q;
    float own[kOwn] = {};  // every Q-th tap
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int a = (i * Q + part) / kTaps, b = (i * Q + part) % kTaps;
      const int row = kFlip ? vertical.start + r + a : h + r, tap_row = vertical.tap(a);
      const int column = kFlip ? horizontal.start + b : w, tap_column = horizontal.tap(b);
      const bool inside = is_inside(row, kFlip ? p.source_h : p.out_h) &
                          is_inside(column, kFlip ? p.source_w : p.out_w) & (a < kTaps) &
                          (tap_row < K) & (tap_column < K);
      if (inside) {
        own[i] = static_cast<float>(weight[(tap_row * K + tap_column) * p.weight.c +
                                           row * p.weight.h + column * p.weight.w]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTaps * kTaps; ++i) {
      taps[r][i / kTaps][i % kTaps] =
          Q == 1 ? own[i] : __shfl_sync(0xffffffff, own[i / Q], i % Q, Q);
    }
  }

  unsigned columns = 0;  // bit b: column b of the window is inside the image
#pragma unroll
  for (int b = 0; b < kTaps; ++b) {
    columns |= static_cast<unsigned>(is_inside(horizontal.start + b, p.source_w)) << b;
  }
#pragma unroll 1
  for (int first = part * V; first < p.channels; first += Q * V) {
    const int channel = group * p.channels + first;
    float sum[R][V] = {};  // weight gradient: output gradients
#pragma unroll
    for (int r = 0; kWeight && r < R; ++r) {
      load_or_zero<V>(factor + out_offset(channel, r), has_row(r), sum[r]);
    }
    const T* row =
        source + (n * p.source.n + int64_t{channel} * p.source.c +
                  int64_t{vertical.start} * p.source.h + int64_t{horizontal.start} * source_pixel);
#pragma unroll
    for (int j = 0; j < (R - 1) * Window::kStep + kTaps; ++j) {
      const unsigned mask = is_inside(vertical.start + j, p.source_h) ? columns : 0;
      float x[kTaps][V];
#pragma unroll
      for (int b = 0; b < kTaps; ++b) {
        load_or_zero<V>(row + b * source_pixel, mask >> b & 1, x[b]);
      }
      row += p.source.h;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int a = j - r * Window::kStep;
        if (a >= 0 && a < kTaps) {
#pragma unroll
          for (int b = 0; b < kTaps; ++b) {
#pragma unroll
            for (int c = 0; c < V; ++c) {
              if constexpr (kWeight) {
                taps[r][a][b] += sum[r][c] * x[b][c];
              } else {
                sum[r][c] += taps[r][a][b] * x[b][c];
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; !kWeight && r < R; ++r) {
      if (has_row(r)) {
        store_vector<V>(out + out_offset(channel, r), sum[r]);
      }
    }
  }

  if constexpr (kWeight) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      T* to = out + (weight_offset + (h + r) * p.weight.h + w * p.weight.w);
#pragma unroll
      for (int first = 0; first < K * K; first += Q) {
        float sums[kParts] = {};
#pragma unroll
        for (int i = 0; i < Q && first + i < K * K; ++i) {
          sums[i] = taps[r][(first + i) / K][(first + i) % K];
        }
        const float sum = Q == 1 ? sums[0] : sum_parts(sums, part);
        if (has_row(r) && first + part < K * K) {
          to[(first + part) * p.weight.c] = static_cast<T>(sum);
        }
      }
    }
  }
}

}  // namespace ops::involution2d
