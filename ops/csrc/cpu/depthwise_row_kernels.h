// Rows of images from memory to vectors and back; see depthwise_plan.h. No include guard: see
// for_each_isa.h.

namespace ops::cpu::OPS_ISA {

// The place of the i-th vector of `n` elements; the last one overlaps the one before.
inline int64_t vector_at(int64_t i, int64_t lanes, int64_t n) {
  return i + lanes <= n || n < lanes ? i : n - lanes;
}

// Converts `channels` of each of n pixels, at most N.
template <int N, typename From, typename To>
void convert_pixels(const From* from, int64_t from_pixel, To* to, int64_t to_pixel,
                    int64_t channels, int64_t n) {
  if (channels == N) {
    for (int64_t i = 0; i < n; ++i) {
      store<N>(to + i * to_pixel, load<N>(from + i * from_pixel));
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    convert_some<N / 2>(from + i * from_pixel, to + i * to_pixel, channels);
  }
}

// One row to [pixel][lane]; idle lanes are zero, as they are in `to` at first.
template <typename T>
void gather_row(const Place<const T>& place, int64_t h, const Lanes& lanes, acc_t<T>* to) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  if (place.pixel) {
    if (place.starts < lanes.images) {
      __builtin_memset(to, 0, place.width * N * sizeof(A));
    }
    for (int64_t i = 0; i < place.starts; ++i) {
      const T* from = place.start[i] + h * place.row;
      A* lane = to + i * lanes.channels;
      convert_pixels<N>(from, place.pixel, lane, N, place.channels, place.width);
    }
    return;
  }
  const int64_t pixels = place.width < N ? place.width : N;
  for (int64_t i = 0; i < place.width; i += N) {
    const int64_t at = vector_at(i, N, place.width);
    Vec<A, N> v[N];
    OPS_UNROLL
    for (int l = 0; l < N; ++l) {
      v[l] = Vec<A, N>{};
      if (l < place.starts) {
        const T* from = place.start[l] + h * place.row + at;
        v[l] = pixels < N ? load_some<N>(from, pixels) : load<N>(from);
      }
    }
    transpose<A, N>(v);
    OPS_UNROLL
    for (int p = 0; p < N; ++p) {
      if (p < pixels) {
        store<N>(to + (at + p) * N, v[p]);
      }
    }
  }
}

// One row from [pixel][lane], which has N pixels at least.
template <typename T>
void scatter_row(const acc_t<T>* from, const Lanes& lanes, const Place<T>& place, int64_t h) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  if (place.pixel) {
    for (int64_t i = 0; i < place.starts; ++i) {
      T* to = place.start[i] + h * place.row;
      const A* lane = from + i * lanes.channels;
      convert_pixels<N>(lane, N, to, place.pixel, place.channels, place.width);
    }
    return;
  }
  for (int64_t i = 0; i < place.width; i += N) {
    const int64_t at = vector_at(i, N, place.width);
    Vec<A, N> v[N];
    OPS_UNROLL
    for (int p = 0; p < N; ++p) {
      v[p] = load<N>(from + (at + p) * N);
    }
    transpose<A, N>(v);
    OPS_UNROLL
    for (int l = 0; l < N; ++l) {
      if (l < place.starts) {
        T* to = place.start[l] + h * place.row + at;
        if (place.width < N) {
          store_some<N>(to, v[l], place.width);
        } else {
          store<N>(to, v[l]);
        }
      }
    }
  }
}

// Rows of a source, the last that were gathered: row h is at h modulo their number.
template <typename T>
struct Ring {
  Place<const T> place;
  acc_t<T>* data;  // behind the left padding
  int64_t rows, row_size;
  int64_t next;  // the first row that is still to be gathered

  void gather(const Lanes& lanes, int64_t last) {
    for (next = next > last - rows ? next : last - rows + 1; next <= last; ++next) {
      gather_row(place, next, lanes, data + next % rows * row_size);
    }
  }
};

}  // namespace ops::cpu::OPS_ISA
