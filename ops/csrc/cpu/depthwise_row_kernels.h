// Rows of images from memory to vectors and back; see depthwise_plan.h. No include guard: see
// for_each_isa.h.

namespace ops::cpu::OPS_ISA {

// Converts `channels` of each of n pixels, at most two vectors.
template <int N, typename From, typename To>
void convert_pixels(const From* from, int64_t from_pixel, To* to, int64_t to_pixel,
                    int64_t channels, int64_t n) {
  if (channels == N) {
    for (int64_t i = 0; i < n; ++i) {
      store<N>(to + i * to_pixel, load<N>(from + i * from_pixel));
    }
    return;
  }
  if (channels == 2 * N) {
    for (int64_t i = 0; i < n; ++i) {
      store<N>(to + i * to_pixel, load<N>(from + i * from_pixel));
      store<N>(to + i * to_pixel + N, load<N>(from + i * from_pixel + N));
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    convert_some<N>(from + i * from_pixel, to + i * to_pixel, channels);
  }
}

// A row of an image, if it is one of those, on its way to the second-level cache: processors do
// not guess pixels that lie far apart. Inline, because to GCC a function that only prefetches has
// no effect.
template <typename T>
__attribute__((always_inline)) inline void fetch_row(const Place<const T>& place, int64_t image,
                                                     int64_t h) {
  const T* row = place.start[image] + h * place.row;
  for (int64_t w = 0; h < place.ahead && w < place.width; ++w) {
    __builtin_prefetch(row + w * place.pixel, 0, 2);
  }
}

// One row to [pixel][lane]; idle lanes are zero, as they are in `to` at first.
template <typename T>
void gather_row(const Place<const T>& place, int64_t h, const Lanes& lanes, acc_t<T>* to) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  if (place.starts < (place.pixel ? lanes.images : lanes.images * lanes.channels)) {
    __builtin_memset(to, 0, place.width * lanes.lanes * sizeof(A));
  }
  if (place.pixel) {
    for (int64_t i = 0; i < place.starts; ++i) {
      const T* from = place.start[i] + h * place.row;
      A* lane = to + i * lanes.channels;
      fetch_row(place, i, h + 1);
      convert_pixels<N>(from, place.pixel, lane, lanes.lanes, place.channels, place.width);
    }
    return;
  }
  for (int64_t l = 0; place.width < N && l < place.starts; ++l) {
    convert_pixels<1>(place.start[l] + h * place.row, 1, to + l, N, 1, place.width);
  }
  for (int64_t i = 0; place.width >= N && i < place.width; i += N) {
    const int64_t at = i + N <= place.width ? i : place.width - N;  // overlaps the one before
    Vec<A, N> v[N];
    OPS_UNROLL
    for (int l = 0; l < N; ++l) {
      v[l] = l < place.starts ? load<N>(place.start[l] + h * place.row + at) : Vec<A, N>{};
    }
    transpose<A, N>(v);
    OPS_UNROLL
    for (int p = 0; p < N; ++p) {
      store<N>(to + (at + p) * N, v[p]);
    }
  }
}

// One row from [pixel][lane].
template <typename T>
void scatter_row(const acc_t<T>* from, const Lanes& lanes, const Place<T>& place, int64_t h) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  if (place.pixel) {
    for (int64_t i = 0; i < place.starts; ++i) {
      T* to = place.start[i] + h * place.row;
      const A* lane = from + i * lanes.channels;
      convert_pixels<N>(lane, lanes.lanes, to, place.pixel, place.channels, place.width);
    }
    return;
  }
  for (int64_t l = 0; place.width < N && l < place.starts; ++l) {
    convert_pixels<1>(from + l, N, place.start[l] + h * place.row, 1, 1, place.width);
  }
  for (int64_t i = 0; place.width >= N && i < place.width; i += N) {
    const int64_t at = i + N <= place.width ? i : place.width - N;
    Vec<A, N> v[N];
    OPS_UNROLL
    for (int p = 0; p < N; ++p) {
      v[p] = load<N>(from + (at + p) * N);
    }
    transpose<A, N>(v);
    OPS_UNROLL
    for (int l = 0; l < N; ++l) {
      if (l < place.starts) {
        store<N>(place.start[l] + h * place.row + at, v[l]);
      }
    }
  }
}

// Rows of a source, the last that were gathered: row h is at h modulo their number.
template <typename T>
struct Ring {
  Place<const T> place;
  acc_t<T>* data;  // behind the left padding
  SourceRows rows;
  int64_t next;  // the first row that is still to be gathered

  void gather(const Lanes& lanes, int64_t last) {
    for (next = next > last - rows.count ? next : last - rows.count + 1; next <= last; ++next) {
      gather_row(place, next, lanes, data + next % rows.count * rows.size);
    }
  }
};

}  // namespace ops::cpu::OPS_ISA
