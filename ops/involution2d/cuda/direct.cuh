// direct: involution with stride 1 or 2, for 3×3, 5×5 and 7×7 kernels and any layout.
//
//      windows of R pixels in a column         weights of these pixels
//      ┌──────────────────────────────┐        ┌───────────────────────┐
//      │ one channel (NHWC: V),       │  FMA   │ R × K², in registers, │
//      │ from the L1 cache: adjacent  │ ─────► │ loaded once for all   │ ──► R sums of a channel
//      │ threads read adjacent memory │        │ channels              │
//      └──────────────────────────────┘        └───────────────────────┘
//
//   block:   128 / Q adjacent columns of R pixels; NHWC: of all groups
//   shared:  nothing (5×5 and 7×7 weight gradients of NHWC: those of a warp)
//   thread:  R pixels and all channels of their group; NHWC: V channels of every Q · V, from V · q
//
// Input gradient (kFlip): each source pixel has its own weights. Weight gradient: the registers
// hold the sums of the taps over the channels. Threads that share a pixel exchange weights and sums
// by shuffles.
#pragma once

#include "involution2d/cuda/problem.cuh"

namespace ops::involution2d {

struct DirectProblem : Problem {
  int columns;  // number of columns of R pixels along the height of an image
  unsigned threads;
};

// Sources start, start + 1, … that a thread's R outputs read along one axis. Input gradient with
// stride S: the outputs are S apart, and read taps phase, phase + S, ….
template <int K, int S, bool kFlip>
struct Window {
  static constexpr int kTaps = kFlip ? (K + S - 1) / S : K;  // per output
  static constexpr int kStep = kFlip ? 1 : S;                // sources from an output to the next
  static constexpr int kPhases = kFlip ? S : 1;
  static constexpr int R = kTaps > 4 ? 2 : 4;  // outputs of a thread
  int start, phase;

  __device__ Window(int output, int padding)
      : start(kFlip ? (output + padding) / S - (kTaps - 1) : output * S - padding),
        phase(kFlip ? (output + padding) % S : 0) {}

  // Return the tap with which an output reads its i-th source; a value ≥ K means no tap.
  __device__ int tap(int i) const { return kFlip ? phase + S * (kTaps - 1 - i) : i; }
};

// V elements in registers, as they are in memory. The loads are of integers: nvcc branches around
// loads of 16-bit classes.
template <typename T, int V = 1>
class Loaded {
 public:
  // Load from an aligned address, or zeros.
  __device__ void load_if(bool inside, const T* from) {
    bits_ = inside ? *reinterpret_cast<const Bits*>(from) : Bits{};
  }

  __device__ float value(int i = 0) const { return to_float<T>(bits_, i); }

 private:
  using Bits = typename BitsOf<V * sizeof(T)>::type;
  std::conditional_t<sizeof(Bits) == 2, unsigned, Bits> bits_;
};

// Sum Q values over the Q threads of a pixel; return the sum of value `part`.
template <int Q>
__device__ float sum_parts(const float* sum, int part) {
  if constexpr (Q == 1) {
    return sum[0];
  } else {
    const bool upper = part & Q / 2;
    float half[Q / 2];
#pragma unroll
    for (int i = 0; i < Q / 2; ++i) {
      const float other = upper ? sum[i] : sum[i + Q / 2];
      half[i] = (upper ? sum[i + Q / 2] : sum[i]) + __shfl_xor_sync(0xffffffff, other, Q / 2);
    }
    return sum_parts<Q / 2>(half, part);
  }
}

// Q threads share a pixel and load V channels at once. Q = 1 needs an NCHW image, V > 1 NHWC.
template <Pass kPass, int K, int S, int Q, int V, typename T>
__global__ void __launch_bounds__(kThreads, 3)
    direct_kernel(const __grid_constant__ DirectProblem p, const T* __restrict__ source,
                  const T* __restrict__ factor, T* __restrict__ out) {
  constexpr bool kFlip = kPass == Pass::backward_input, kWeight = kPass == Pass::backward_weight;
  using Window = involution2d::Window<K, S, kFlip>;
  constexpr int kTaps = Window::kTaps, kPhases = Window::kPhases, R = Window::R;
  unsigned index = blockIdx.x * kThreads + threadIdx.x;
  const bool spare = index >= p.threads;  // takes part in the shuffles only
  index = min(index, p.threads - 1);
  const auto next_index = [&](int size) {
    const int i = index % size;
    index /= size;
    return i;
  };
  const bool nhwc = Q > 1 && p.source.stride_c == 1;  // the groups of a pixel are adjacent
  const int part = next_index(Q), nhwc_group = next_index(nhwc ? p.groups : 1);
  const int w = next_index(p.out.w), y = next_index(p.columns);
  const int group = nhwc ? nhwc_group : next_index(p.groups);
  const int64_t n = index;
  const int h = y / kPhases * (kPhases * R) + y % kPhases;
  const Window vertical(h, p.padding_h), horizontal(w, p.padding_w);

  const int source_pixel = Q == 1 ? 1 : p.source.stride_w, out_pixel = Q == 1 ? 1 : p.out.stride_w;
  const auto has_row = [&](int r) { return !spare && h + r * kPhases < p.out.h; };
  const auto out_offset = [&](int channel, int r) {
    return n * p.out.stride_n + int64_t{channel} * p.out.stride_c +
           (h + r * kPhases) * p.out.stride_h + w * out_pixel;
  };
  const int64_t weight_offset = n * p.weight.stride_n + int64_t{group} * K * K * p.weight.stride_c;

  float taps[R][kTaps][kTaps] = {};  // weights or their gradients
#pragma unroll
  for (int r = 0; !kWeight && r < R; ++r) {
    constexpr int kOwn = (kTaps * kTaps + Q - 1) / Q;
    Loaded<T> own[kOwn];  // every Q-th tap
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int a = (i * Q + part) / kTaps, b = (i * Q + part) % kTaps;
      const int row = kFlip ? vertical.start + r + a : h + r, tap_row = vertical.tap(a);
      const int column = kFlip ? horizontal.start + b : w, tap_column = horizontal.tap(b);
      own[i].load_if(is_inside(row, p.weight.h) & is_inside(column, p.weight.w) & (a < kTaps) &
                         (tap_row < K) & (tap_column < K),
                     factor + (weight_offset + (tap_row * K + tap_column) * p.weight.stride_c +
                               row * p.weight.stride_h + column * p.weight.stride_w));
    }
#pragma unroll
    for (int i = 0; i < kTaps * kTaps; ++i) {
      taps[r][i / kTaps][i % kTaps] =
          Q == 1 ? own[i].value() : __shfl_sync(0xffffffff, own[i / Q].value(), i % Q, Q);
    }
  }

  unsigned columns = 0;  // bit b: column b of the window is inside the image
#pragma unroll
  for (int b = 0; b < kTaps; ++b) {
    columns |= static_cast<unsigned>(is_inside(horizontal.start + b, p.source.w)) << b;
  }
#pragma unroll 1
  for (int first = part * V; first < p.channels; first += Q * V) {
    const int channel = group * p.channels + first;
    float sum[R][V] = {};  // weight gradient: output gradients
#pragma unroll
    for (int r = 0; kWeight && r < R; ++r) {
      Loaded<T, V> grad;
      grad.load_if(has_row(r), factor + out_offset(channel, r));
#pragma unroll
      for (int c = 0; c < V; ++c) {
        sum[r][c] = grad.value(c);
      }
    }
    const T* row = source + (n * p.source.stride_n + int64_t{channel} * p.source.stride_c +
                             int64_t{vertical.start} * p.source.stride_h +
                             int64_t{horizontal.start} * source_pixel);
#pragma unroll
    for (int j = 0; j < (R - 1) * Window::kStep + kTaps; ++j) {
      const unsigned inside = is_inside(vertical.start + j, p.source.h) ? columns : 0;
      Loaded<T, V> x[kTaps];
#pragma unroll
      for (int b = 0; b < kTaps; ++b) {
        x[b].load_if(inside >> b & 1, row + b * source_pixel);
      }
      row += p.source.stride_h;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int a = j - r * Window::kStep;
        if (a >= 0 && a < kTaps) {
#pragma unroll
          for (int i = 0; i < kTaps * V; ++i) {
            const int b = i / V, c = i % V;
            if constexpr (kWeight) {
              taps[r][a][b] += sum[r][c] * x[b].value(c);
            } else {
              sum[r][c] += taps[r][a][b] * x[b].value(c);
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

  // Weight gradient of NHWC weights, 5×5 and 7×7: a warp stores one (pixel, group) at a time
  // through shared memory, so that adjacent threads store adjacent taps.
  constexpr bool kShared = kWeight && Q > 1 && K >= 5;
  constexpr int kPitch = round_up(K * K, 4);  // at most two bank conflicts
  __shared__ float shared[kShared ? kThreads / Q * kPitch : 1];
  const bool by_warp = kShared && p.weight.stride_c == 1 && p.channels >= Q;
  float* warp_sums = shared + threadIdx.x / kWarp * (kWarp / Q) * kPitch;
#pragma unroll
  for (int r = 0; kWeight && r < R; ++r) {
    const int64_t at = weight_offset + (h + r) * p.weight.stride_h + w * p.weight.stride_w;
#pragma unroll
    for (int first = 0; first < K * K; first += Q) {
      float sums[Q] = {};
#pragma unroll
      for (int i = 0; i < Q && first + i < K * K; ++i) {
        sums[i] = taps[r][(first + i) / kTaps][(first + i) % kTaps];
      }
      const float sum = sum_parts<Q>(sums, part);
      if (by_warp) {
        warp_sums[threadIdx.x % kWarp / Q * kPitch + first + part] = sum;
      } else if (has_row(r) && first + part < K * K) {
        out[at + (first + part) * p.weight.stride_c] = static_cast<T>(sum);
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; kShared && i < kWarp / Q; ++i) {
      const int64_t to = __shfl_sync(0xffffffff, has_row(r) ? at : -1, i * Q);
#pragma unroll
      for (int tap = threadIdx.x % kWarp; tap < K * K; tap += kWarp) {
        if (by_warp && to >= 0) {
          out[to + tap] = static_cast<T>(warp_sums[i * kPitch + tap]);
        }
      }
    }
    __syncwarp();
  }
}

}  // namespace ops::involution2d
