// Rows of images from memory to vectors and back; see plan.h. No include guard: see
// core/cpu/dispatch_isa.h.

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

// Pixels of channels that are rows of memory, to [pixel][lane]: squares of M lanes and as many
// pixels, or fewer where rows are shorter. The last square overlaps the one before it. Meanwhile
// the same pixels of the next group are on their way: its rows are too short and too many to guess.
template <int M, typename T>
void gather_lanes(const Place<const T>& place, int64_t h, uint32_t present, acc_t<T>* to) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  if constexpr (M > 1) {
    if (place.width < M) {
      return gather_lanes<M / 2>(place, h, present, to);
    }
  }
  for (int64_t first = 0; first < place.starts; first += M) {
    for (int64_t i = 0; i < place.width; i += M) {
      const int64_t at = i + M <= place.width ? i : place.width - M;
      Vec<A, M> v[M];
      OPS_UNROLL
      for (int l = 0; l < M; ++l) {
        v[l] = Vec<A, M>{};
        if (present >> (first + l) & 1) {
          const T* row = place.start[first + l] + h * place.row + at;
          v[l] = load<M>(row);
          __builtin_prefetch(row + place.next, 0, 2);
        }
      }
      transpose<A, M>(v);
      OPS_UNROLL
      for (int p = 0; p < M; ++p) {
        store<M>(to + (at + p) * N + first, v[p]);
      }
    }
  }
}

// And back.
template <int M, typename T>
void scatter_lanes(const acc_t<T>* from, const Place<T>& place, int64_t h, uint32_t present) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  if constexpr (M > 1) {
    if (place.width < M) {
      return scatter_lanes<M / 2>(from, place, h, present);
    }
  }
  for (int64_t first = 0; first < place.starts; first += M) {
    for (int64_t i = 0; i < place.width; i += M) {
      const int64_t at = i + M <= place.width ? i : place.width - M;
      Vec<A, M> v[M];
      OPS_UNROLL
      for (int p = 0; p < M; ++p) {
        v[p] = load<M>(from + (at + p) * N + first);
      }
      transpose<A, M>(v);
      OPS_UNROLL
      for (int l = 0; l < M; ++l) {
        if (present >> (first + l) & 1) {
          store<M>(place.start[first + l] + h * place.row + at, v[l]);
        }
      }
    }
  }
}

// One row to [pixel][lane]; idle lanes are zero, as they are in `to` at first.
template <typename T>
void gather_row(const Place<const T>& place, int64_t h, const Lanes& lanes, acc_t<T>* to) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  const uint32_t present = place.present(h);
  if (__builtin_popcount(present) < (place.pixel ? lanes.images : lanes.images * lanes.channels)) {
    __builtin_memset(to, 0, place.width * lanes.lanes * sizeof(A));
  }
  if (!place.pixel) {
    return gather_lanes<N>(place, h, present, to);
  }
  for (int64_t i = 0; i < place.starts; ++i) {
    if (!(present >> i & 1)) {
      continue;
    }
    const T* from = place.start[i] + h * place.row;
    A* lane = to + i * lanes.channels;
    fetch_row(place, i, h + 1);
    convert_pixels<N>(from, place.pixel, lane, lanes.lanes, place.channels, place.width);
  }
}

// One row from [pixel][lane].
template <typename T>
void scatter_row(const acc_t<T>* from, const Lanes& lanes, const Place<T>& place, int64_t h) {
  constexpr int N = kLanes<acc_t<T>>;
  const uint32_t present = place.present(h);
  if (!place.pixel) {
    return scatter_lanes<N>(from, place, h, present);
  }
  for (int64_t i = 0; i < place.starts; ++i) {
    if (present >> i & 1) {
      convert_pixels<N>(from + i * lanes.channels, lanes.lanes, place.start[i] + h * place.row,
                        place.pixel, place.channels, place.width);
    }
  }
}

// Lanes up to the last vector that is not idle: the last group may have fewer channels or images.
template <typename T>
int64_t lanes_in_use(const Lanes& lanes, const Place<T>& place) {
  constexpr int N = kLanes<acc_t<T>>;
  const int64_t used = (place.starts - 1) * lanes.channels + place.channels;
  const int64_t rounded = (used + N - 1) / N * N;
  return place.pixel && rounded < lanes.lanes ? rounded : lanes.lanes;
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
