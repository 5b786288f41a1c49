// Max pooling of rows of an image; see max_pool_plan.h. No include guard: see for_each_isa.h.

namespace ops::cpu::OPS_ISA {

// N elements that are STEP, or if that is 0 `step`, apart.
template <int N, int STEP, typename T, int... I>
inline Vec<acc_t<T>, N> load_apart(const T* p, int64_t step, std::integer_sequence<int, I...>) {
  if constexpr (STEP == 1 || N == 1) {
    return load<N>(p);
  } else if constexpr (STEP == 2) {  // the second vector ends where the last element is
    constexpr auto even = std::integer_sequence<int, (2 * I < N ? 2 * I : 2 * I + 1)...>{};
    return shuffle<acc_t<T>, N>(load<N>(p), load<N>(p + N - 1), even);
  } else {
    T lanes[N];
    for (int i = 0; i < N; ++i) {
      lanes[i] = p[i * step];
    }
    return load<N>(lanes);
  }
}

template <int N, typename T>
inline void store_apart(T* p, int64_t step, Vec<acc_t<T>, N> v) {
  T lanes[N];
  store<N>(lanes, v);
  for (int i = 0; i < N; ++i) {
    p[i * step] = lanes[i];
  }
}

// Stores a[0], b[0], a[1], b[1], …
template <int N, typename T, int... I>
inline void store_alternating(T* p, Vec<acc_t<T>, N> a, Vec<acc_t<T>, N> b,
                              std::integer_sequence<int, I...>) {
  using Low = std::integer_sequence<int, (I / 2 + I % 2 * N)...>;
  using High = std::integer_sequence<int, (N / 2 + I / 2 + I % 2 * N)...>;
  store<N>(p, shuffle<acc_t<T>, N>(a, b, Low{}));
  store<N>(p + N, shuffle<acc_t<T>, N>(a, b, High{}));
}

template <int N, typename A, typename I>
inline Vec<bits_t<A>, N> load_places(const I* p) {
  Vec<I, N> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(v, Vec<bits_t<A>, N>);
}

template <int N, typename I, typename Places>
inline void store_places(I* p, Places places) {
  const auto v = __builtin_convertvector(places, Vec<I, N>);
  __builtin_memcpy(p, &v, sizeof(v));
}

// Of equal elements the first counts; a NaN beats all, as in PyTorch.
template <int N, int STEP, typename T>
inline void take(const T* x, int64_t step, PoolTap tap, Vec<acc_t<T>, N>& best,
                 Vec<bits_t<acc_t<T>>, N>& places) {
  using B = bits_t<acc_t<T>>;
  const auto v = load_apart<N, STEP>(x + tap.offset, step, std::make_integer_sequence<int, N>{});
  const Vec<B, N> taken = (v > best) | (v != v);
  best = taken ? v : best;
  places = taken ? broadcast<B, N>(tap.place) : places;
}

// `run` outputs whose windows, of `count` taps or COUNT if that is not 0, begin `step` apart. The
// last vector overlaps the one before.
template <int N, int STEP, int COUNT, typename T, typename I>
void pool_run(const T* x, int64_t step, const PoolTap* taps, int64_t count, int64_t run, T* out,
              I* indices) {
  using B = bits_t<acc_t<T>>;
  if constexpr (N > 1) {
    if (run < N) {
      return pool_run<N / 2, STEP, COUNT>(x, step, taps, count, run, out, indices);
    }
  }
  for (int64_t i = 0; i < run; i += N) {
    i = i + N > run ? run - N : i;
    const T* from = x + i * step;
    auto best =
        load_apart<N, STEP>(from + taps[0].offset, step, std::make_integer_sequence<int, N>{});
    auto places = broadcast<B, N>(taps[0].place);
    if constexpr (COUNT > 0) {
      OPS_UNROLL
      for (int t = 1; t < COUNT; ++t) {
        take<N, STEP>(from, step, taps[t], best, places);
      }
    } else {
      for (int64_t t = 1; t < count; ++t) {
        take<N, STEP>(from, step, taps[t], best, places);
      }
    }
    store<N>(out + i, best);
    store_places<N>(indices + i, places);
  }
}

template <int STEP, typename T, typename I>
void pool(const T* x, int64_t step, const PoolTap* taps, int64_t count, int64_t run, T* out,
          I* indices) {
  constexpr int N = kLanes<acc_t<T>>;
  if (count == 4) {
    pool_run<N, STEP, 4>(x, step, taps, count, run, out, indices);
  } else if (count == 9) {
    pool_run<N, STEP, 9>(x, step, taps, count, run, out, indices);
  } else if (count > 0) {
    pool_run<N, STEP, 0>(x, step, taps, count, run, out, indices);
  } else {  // all padding
    for (int64_t i = 0; i < run; ++i) {
      out[i] = static_cast<T>(-__builtin_inf());
      indices[i] = 0;
    }
  }
}

// Stores where the maxima are at `tap`, and zeros elsewhere.
template <int N, int STEP, typename T>
inline void spread(Vec<acc_t<T>, N> grad, Vec<bits_t<acc_t<T>>, N> places, int64_t step,
                   const PoolTap* tap, T* out) {
  using B = bits_t<acc_t<T>>;
  const Vec<acc_t<T>, N> zero{};
  const auto chosen = places == broadcast<B, N>(tap->place) ? grad : zero;
  if constexpr (STEP == 2 && N > 1) {
    const auto next = places == broadcast<B, N>(tap[1].place) ? grad : zero;
    store_alternating<N>(out + tap->offset, chosen, next, std::make_integer_sequence<int, N>{});
  } else if constexpr (STEP > 0) {
    store<N>(out + tap->offset, chosen);
  } else {
    store_apart<N>(out + tap->offset, step, chosen);
  }
}

// The gradients of `run` outputs to their windows, which are as in pool_run; where STEP is 2, taps
// are two by two adjacent.
template <int N, int STEP, int COUNT, typename T, typename I>
void spread_run(const T* grad, const I* indices, int64_t step, const PoolTap* taps, int64_t count,
                int64_t run, T* out) {
  if constexpr (N > 1) {
    if (run < N) {
      return spread_run<N / 2, STEP, COUNT>(grad, indices, step, taps, count, run, out);
    }
  }
  constexpr int kTaps = STEP == 2 && N > 1 ? 2 : 1;  // at once
  for (int64_t i = 0; i < run; i += N) {
    i = i + N > run ? run - N : i;
    const auto v = load<N>(grad + i);
    const auto places = load_places<N, acc_t<T>>(indices + i);
    T* to = out + i * step;
    if constexpr (COUNT > 0) {
      OPS_UNROLL
      for (int t = 0; t < COUNT; t += kTaps) {
        spread<N, STEP>(v, places, step, taps + t, to);
      }
    } else {
      for (int64_t t = 0; t < count; t += kTaps) {
        spread<N, STEP>(v, places, step, taps + t, to);
      }
    }
  }
}

// Outputs that have the same taps: from `column` on, `length` of them.
struct PoolSpan {
  const PoolTap* taps;
  int64_t count, length;
};

// `window` is where taps are put together at the image's edge.
inline PoolSpan span_at(const MaxPoolPlan& p, int64_t row, int64_t column, PoolTap* window) {
  const MaxPoolGeometry& g = p.g;
  const TapRange rows = p.vertical.data()[row], columns = p.horizontal.data()[column];
  if (columns.end - columns.first == g.kernel_w) {
    const int64_t first = rows.first * g.kernel_w, end = rows.end * g.kernel_w;
    return {p.taps.data() + first, end - first, p.pixel == 1 ? p.end_whole - column : 1};
  }
  int64_t count = 0;
  for (int64_t i = rows.first; i < rows.end; ++i) {
    for (int64_t j = columns.first; j < columns.end; ++j) {
      window[count++] = p.taps.data()[i * g.kernel_w + j];
    }
  }
  return {window, count, 1};
}

// Rows of the output.
template <typename T, typename I>
void max_pool_rows(const MaxPoolPlan& p, const T* x, T* out, I* indices, int64_t begin, int64_t end,
                   PoolTap* window) {
  const MaxPoolGeometry& g = p.g;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t out_row = row % g.out_h;
    const T* image = x + row / g.out_h * p.image();
    for (int64_t column = 0; column < g.out_w;) {
      const auto [taps, count, length] = span_at(p, out_row, column, window);
      const int64_t run = length * p.pixel, step = p.pixel == 1 ? g.stride_w : 1;
      const int64_t at = (row * g.out_w + column) * p.pixel;
      const T* from =
          image + p.offset(out_row * g.stride_h - g.padding_h, column * g.stride_w - g.padding_w);
      if (step == 1) {
        pool<1>(from, step, taps, count, run, out + at, indices + at);
      } else if (step == 2) {
        pool<2>(from, step, taps, count, run, out + at, indices + at);
      } else {
        pool<0>(from, step, taps, count, run, out + at, indices + at);
      }
      column += length;
    }
  }
}

// The gradient of an input whose pixels are in one window at most, for rows of the output.
template <typename T, typename I>
void max_pool_spread_rows(const MaxPoolPlan& p, const T* grad, const I* indices, T* out,
                          int64_t begin, int64_t end, PoolTap* window) {
  constexpr int N = kLanes<acc_t<T>>;
  const MaxPoolGeometry& g = p.g;
  const bool pairs = p.pixel == 1 && g.kernel_w == 2 && g.stride_w == 2 && g.dilation_w == 1;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t out_row = row % g.out_h, first_row = out_row * g.stride_h - g.padding_h;
    T* image = out + row / g.out_h * p.image();
    if (!p.tiled) {
      const int64_t next_row = first_row + g.stride_h;
      const int64_t from = out_row > 0 ? first_row : 0;
      const int64_t to = out_row + 1 < g.out_h && next_row < g.h ? next_row : g.h;
      __builtin_memset(static_cast<void*>(image + p.offset(from, 0)), 0,
                       p.offset(to - from, 0) * sizeof(T));
    }
    for (int64_t column = 0; column < g.out_w;) {
      const auto [taps, count, length] = span_at(p, out_row, column, window);
      const int64_t run = length * p.pixel, step = p.pixel == 1 ? g.stride_w : 1;
      const int64_t at = (row * g.out_w + column) * p.pixel;
      T* to = image + p.offset(first_row, column * g.stride_w - g.padding_w);
      if (pairs && taps != window) {
        spread_run<N, 2, 0>(grad + at, indices + at, step, taps, count, run, to);
      } else if (step == 1 && count == 4) {
        spread_run<N, 1, 4>(grad + at, indices + at, step, taps, count, run, to);
      } else if (step == 1) {
        spread_run<N, 1, 0>(grad + at, indices + at, step, taps, count, run, to);
      } else {
        spread_run<N, 0, 0>(grad + at, indices + at, step, taps, count, run, to);
      }
      column += length;
    }
  }
}

}  // namespace ops::cpu::OPS_ISA
