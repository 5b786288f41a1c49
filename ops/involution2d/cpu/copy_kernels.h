// Copies of image rows, in any layout, to and from buffers [channel][pixel] of acc_t<T>; see
// plan.h. Channels-last rows are transposed in registers, in blocks of N×N (N lanes), edges
// overlapping. No include guard: see core/cpu/dispatch_isa.h.

namespace ops::cpu::OPS_ISA {

// Transpose up to N pixels × N channels; write N pixels, padded with zeros. skip ≥ 0: load N
// channels, `skip` of them before the first one wanted. skip = −1: load `channels` only.
template <typename T>
void gather_block(const T* from, int64_t pixel, int64_t skip, int64_t channels, int64_t pixels,
                  acc_t<T>* to, int64_t pitch) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  Vec<A, N> v[N];
  if (skip >= 0 && pixels == N) {
    OPS_UNROLL
    for (int p = 0; p < N; ++p) {
      v[p] = load<N>(from + p * pixel);
    }
  } else {
    for (int p = 0; p < N; ++p) {
      A lanes[N] = {};
      if (p < pixels) {
        convert_row(from + p * pixel, lanes, skip >= 0 ? N : channels);
      }
      v[p] = load<N>(lanes);
    }
  }
  transpose<A, N>(v);
  const int64_t first = skip >= 0 ? skip : 0;
  OPS_UNROLL
  for (int c = 0; c < N; ++c) {
    if (c >= first && c < first + channels) {
      store<N>(to + (c - first) * pitch, v[c]);
    }
  }
}

template <typename T>
void scatter_block(const acc_t<T>* from, int64_t pitch, T* to, int64_t pixel, int64_t channels,
                   int64_t pixels) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  Vec<A, N> v[N];
  OPS_UNROLL
  for (int c = 0; c < N; ++c) {
    v[c] = c < channels ? load<N>(from + c * pitch) : Vec<A, N>{};
  }
  transpose<A, N>(v);
  if (channels == N && pixels == N) {
    OPS_UNROLL
    for (int p = 0; p < N; ++p) {
      store<N>(to + p * pixel, v[p]);
    }
  } else {
    for (int p = 0; p < N; ++p) {
      A lanes[N];
      store<N>(lanes, v[p]);
      if (p < pixels) {
        convert_row(lanes, to + p * pixel, channels);
      }
    }
  }
}

// Return the start of the i-th block of N that cover [0, n); the last block overlaps.
template <int N>
int64_t block_start(int64_t i, int64_t n) {
  return i * N + N <= n || n < N ? i * N : n - N;
}

// `count` channels of a pixel, and the number of channels before and after them in memory.
struct ChannelRange {
  int64_t before, count, after;
};

// Copy a range of channels of `pixels` pixels to a buffer; `channel` and `pixel` are strides.
template <typename T>
void gather_pixels(const T* from, int64_t channel, int64_t pixel, ChannelRange channels,
                   int64_t pixels, acc_t<T>* to, int64_t pitch) {
  constexpr int N = kLanes<acc_t<T>>;
  if (pixel == 1) {
    for (int64_t c = 0; c < channels.count; ++c) {
      convert_row(from + c * channel, to + c * pitch, pixels);
    }
  } else if (channel == 1) {
    const int64_t missing = N - channels.count - channels.after;  // to a whole vector
    const int64_t skip = channels.count >= N || missing <= 0 ? 0 : missing;
    for (int64_t i = 0; i * N < pixels; ++i) {
      for (int64_t j = 0; j * N < channels.count; ++j) {
        const int64_t p = block_start<N>(i, pixels), c = block_start<N>(j, channels.count);
        const bool readable = skip <= channels.before;
        gather_block(from + p * pixel + c - (readable ? skip : 0), pixel, readable ? skip : -1,
                     channels.count < N ? channels.count : N, pixels < N ? pixels : N,
                     to + c * pitch + p, pitch);
      }
    }
  } else {
    for (int64_t c = 0; c < channels.count; ++c) {
      for (int64_t p = 0; p < pixels; ++p) {
        to[c * pitch + p] = from[c * channel + p * pixel];
      }
    }
  }
}

template <typename T>
void scatter_pixels(const acc_t<T>* from, int64_t pitch, T* to, int64_t channel, int64_t pixel,
                    int64_t channels, int64_t pixels) {
  constexpr int N = kLanes<acc_t<T>>;
  if (pixel == 1) {
    for (int64_t c = 0; c < channels; ++c) {
      convert_row(from + c * pitch, to + c * channel, pixels);
    }
  } else if (channel == 1) {
    for (int64_t i = 0; i * N < pixels; ++i) {
      for (int64_t j = 0; j * N < channels; ++j) {
        const int64_t p = block_start<N>(i, pixels), c = block_start<N>(j, channels);
        scatter_block(from + c * pitch + p, pitch, to + p * pixel + c, pixel,
                      channels < N ? channels : N, pixels < N ? pixels : N);
      }
    }
  } else {
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t p = 0; p < pixels; ++p) {
        to[c * channel + p * pixel] = static_cast<T>(from[c * pitch + p]);
      }
    }
  }
}

}  // namespace ops::cpu::OPS_ISA
