// Rows of images to and from buffers [channel][pixel], which hold acc_t<T>; see plan.h.
// No include guard: see core/cpu/dispatch_isa.h.

namespace ops::cpu::OPS_ISA {

// At most N adjacent channels of at most N pixels. Writes N pixels, zeros where there are less.
// Of N channels that can be read from `from` on, the first `skip` are not wanted; −1: there are not
// so many.
template <typename T>
void gather_square(const T* from, int64_t pixel, int64_t skip, int64_t channels, int64_t pixels,
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
        convert_row<N>(from + p * pixel, lanes, skip >= 0 ? N : channels);
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
void scatter_square(const acc_t<T>* from, int64_t pitch, T* to, int64_t pixel, int64_t channels,
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
        convert_row<N>(lanes, to + p * pixel, channels);
      }
    }
  }
}

// Where squares of N begin that cover 0 to n, the last one overlapping: the i-th.
template <int N>
int64_t square_at(int64_t i, int64_t n) {
  return i * N + N <= n || n < N ? i * N : n - N;
}

// Some channels of a pixel, and how many there are on either side of them.
struct Channels {
  int64_t before, count, after;
};

// Copies `pixels` pixels of some channels, which lie `channel` and `pixel` apart in memory.
template <typename T>
void gather_pixels(const T* from, int64_t channel, int64_t pixel, Channels channels, int64_t pixels,
                   acc_t<T>* to, int64_t pitch) {
  constexpr int N = kLanes<acc_t<T>>;
  if (pixel == 1) {
    for (int64_t c = 0; c < channels.count; ++c) {
      convert_row<N>(from + c * channel, to + c * pitch, pixels);
    }
  } else if (channel == 1) {
    const int64_t needed = N - channels.count - channels.after;  // of those before, to be N
    const int64_t skip = channels.count >= N || needed <= 0 ? 0 : needed;
    for (int64_t i = 0; i * N < pixels; ++i) {
      for (int64_t j = 0; j * N < channels.count; ++j) {
        const int64_t p = square_at<N>(i, pixels), c = square_at<N>(j, channels.count);
        const bool enough = skip <= channels.before;
        gather_square(from + p * pixel + c - (enough ? skip : 0), pixel, enough ? skip : -1,
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
      convert_row<N>(from + c * pitch, to + c * channel, pixels);
    }
  } else if (channel == 1) {
    for (int64_t i = 0; i * N < pixels; ++i) {
      for (int64_t j = 0; j * N < channels; ++j) {
        const int64_t p = square_at<N>(i, pixels), c = square_at<N>(j, channels);
        scatter_square(from + c * pitch + p, pitch, to + p * pixel + c, pixel,
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
