// SIMD kernels of depthwise convolution, and the copies of image rows between memory and the vector
// layout [pixel][lane]. No include guard: see core/cpu/dispatch_isa.h.

namespace ops::cpu::OPS_ISA::depthwise_conv2d {

using namespace ops::depthwise_conv2d;

// Return whether sources are read in place, see dispatch.cpp.
template <typename T>
constexpr bool kReadsInPlace = std::is_same_v<T, acc_t<T>> || OPS_VECTOR_BYTES == 64;

// Convert `channels` ≤ 2 N channels of each of n pixels.
template <int N, typename From, typename To>
void convert_pixels(const From* from, int64_t from_stride, To* to, int64_t to_stride,
                    int64_t channels, int64_t n) {
  if (channels == N) {
    for (int64_t i = 0; i < n; ++i) {
      store<N>(to + i * to_stride, load<N>(from + i * from_stride));
    }
    return;
  }
  if (channels == 2 * N) {
    for (int64_t i = 0; i < n; ++i) {
      store<N>(to + i * to_stride, load<N>(from + i * from_stride));
      store<N>(to + i * to_stride + N, load<N>(from + i * from_stride + N));
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    convert_some<N>(from + i * from_stride, to + i * to_stride, channels);
  }
}

// Prefetch the first cache line of each pixel of row h < prefetch_rows to the L2 cache:
// large pixel strides defeat the hardware prefetcher. always_inline: GCC treats a function that
// only prefetches as pure and drops the call.
template <typename T>
__attribute__((always_inline)) inline void prefetch_row(const LaneView<const T>& view,
                                                        int64_t image, int64_t h) {
  const T* row = view.base[image] + h * view.row_stride;
  for (int64_t w = 0; h < view.prefetch_rows && w < view.width; ++w) {
    __builtin_prefetch(row + w * view.pixel_stride, 0, 2);
  }
}

// Copy an NCHW row to pixels [pixel][lane], or back if T is not const: transpose blocks of M lanes
// × M pixels. M is halved for rows shorter than M; the last block overlaps the one before it.
// Sources of the next channel group are prefetched in software: many short rows defeat the hardware
// prefetcher.
template <int M, typename T, typename A>
void copy_lanes(const LaneView<T>& view, int64_t h, uint32_t valid, A* pixels) {
  constexpr int N = kLanes<A>;
  if constexpr (M > 1) {
    if (view.width < M) {
      return copy_lanes<M / 2>(view, h, valid, pixels);
    }
  }
  for (int64_t first = 0; first < view.count; first += M) {
    for (int64_t i = 0; i < view.width; i += M) {
      const int64_t at = i + M <= view.width ? i : view.width - M;
      const auto row = [&](int l) { return view.base[first + l] + h * view.row_stride + at; };
      A* block = pixels + at * N + first;
      Vec<A, M> v[M];
      OPS_UNROLL
      for (int l = 0; l < M; ++l) {
        v[l] = Vec<A, M>{};
        if constexpr (!std::is_const_v<T>) {
          v[l] = load<M>(block + l * N);
        } else if (valid >> (first + l) & 1) {
          v[l] = load<M>(row(l));
          __builtin_prefetch(row(l) + view.group_stride, 0, 2);
        }
      }
      transpose<A, M>(v);
      OPS_UNROLL
      for (int l = 0; l < M; ++l) {
        if constexpr (std::is_const_v<T>) {
          store<M>(block + l * N, v[l]);
        } else if (valid >> (first + l) & 1) {
          store<M>(row(l), v[l]);
        }
      }
    }
  }
}

// Gather row h to [pixel][lane]. Lanes without a row in the image are zero.
template <typename T>
void gather_row(const LaneView<const T>& view, int64_t h, const LaneLayout& lanes, acc_t<T>* to) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  const uint32_t valid = view.valid_mask(h);
  if (__builtin_popcount(valid) <
      (view.pixel_stride ? lanes.images : lanes.images * lanes.channels)) {
    __builtin_memset(to, 0, view.width * lanes.count * sizeof(A));
  }
  if (!view.pixel_stride) {
    return copy_lanes<N>(view, h, valid, to);
  }
  for (int64_t i = 0; i < view.count; ++i) {
    if (valid >> i & 1) {
      prefetch_row(view, i, h + 1);
      convert_pixels<N>(view.base[i] + h * view.row_stride, view.pixel_stride,
                        to + i * lanes.channels, lanes.count, view.channels, view.width);
    }
  }
}

// Scatter [pixel][lane] to row h.
template <typename T>
void scatter_row(acc_t<T>* from, const LaneLayout& lanes, const LaneView<T>& view, int64_t h) {
  constexpr int N = kLanes<acc_t<T>>;
  const uint32_t valid = view.valid_mask(h);
  if (!view.pixel_stride) {
    return copy_lanes<N>(view, h, valid, from);
  }
  for (int64_t i = 0; i < view.count; ++i) {
    if (valid >> i & 1) {
      convert_pixels<N>(from + i * lanes.channels, lanes.count, view.base[i] + h * view.row_stride,
                        view.pixel_stride, view.channels, view.width);
    }
  }
}

// Return the lanes to compute: the active ones, rounded up to whole vectors (NCHW: all).
template <typename T>
int64_t active_lanes(const LaneLayout& lanes, const LaneView<T>& view) {
  constexpr int N = kLanes<acc_t<T>>;
  const int64_t lane_count = (view.count - 1) * lanes.channels + view.channels;
  const int64_t rounded = (lane_count + N - 1) / N * N;
  return view.pixel_stride && rounded < lanes.count ? rounded : lanes.count;
}

// Ring buffer of the latest source rows: row h is in slot h % slots.count.
template <typename T>
struct Ring {
  LaneView<const T> view;
  acc_t<T>* data;  // first pixel after the left padding of slot 0
  SourceRows slots;
  int64_t next;  // first row not yet gathered

  // Gather the missing rows up to `last`.
  void gather(const LaneLayout& lanes, int64_t last) {
    for (next = next > last - slots.count ? next : last - slots.count + 1; next <= last; ++next) {
      gather_row(view, next, lanes, data + next % slots.count * slots.size);
    }
  }
};

}  // namespace ops::cpu::OPS_ISA::depthwise_conv2d

// These use the functions above.
#include "depthwise_conv2d/cpu/correlate_kernels.h"
#include "depthwise_conv2d/cpu/weight_kernels.h"
