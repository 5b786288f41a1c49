// Vector kernels of CPU max pooling; see plan.h. No include guard: see core/cpu/dispatch_isa.h.

namespace ops::cpu::OPS_ISA::max_pool2d {

using namespace ops::max_pool2d;

// Load N elements at stride STEP (0: run-time `step`).
template <int N, int STEP, typename T, int... I>
inline Vec<acc_t<T>, N> load_strided(const T* p, int64_t step, std::integer_sequence<int, I...>) {
  if constexpr (STEP == 1 || N == 1) {
    return load<N>(p);
  } else if constexpr (STEP == 2) {  // the second load ends at the last element
    constexpr auto even = std::integer_sequence<int, (2 * I < N ? 2 * I : 2 * I + 1)...>{};
    return shuffle<acc_t<T>, N>(load<N>(p), load<N>(p + N - 1), even);
  } else {
    // Insert 16-bit values into a register: a wide load after narrow stores stalls (no forwarding).
    using Lane = std::conditional_t<sizeof(T) == 2, int16_t, T>;
    std::conditional_t<sizeof(T) == 2, Vec<Lane, N>, Lane[N]> lanes;
    for (int i = 0; i < N; ++i) {
      Lane lane;
      __builtin_memcpy(&lane, &p[i * step], sizeof(T));
      lanes[i] = lane;  // Clang: vector elements have no address
    }
    return load<N>(reinterpret_cast<const T*>(&lanes));
  }
}

// Store a[0], b[0], a[1], b[1], …
template <int N, typename T, int... I>
inline void store_interleaved(T* p, Vec<acc_t<T>, N> a, Vec<acc_t<T>, N> b,
                              std::integer_sequence<int, I...>) {
  using Low = std::integer_sequence<int, (I / 2 + I % 2 * N)...>;
  using High = std::integer_sequence<int, (N / 2 + I / 2 + I % 2 * N)...>;
  store<N>(p, shuffle<acc_t<T>, N>(a, b, Low{}));
  store<N>(p + N, shuffle<acc_t<T>, N>(a, b, High{}));
}

template <int N, typename A, typename I>
inline Vec<bits_t<A>, N> load_taps(const I* p) {
#if OPS_VECTOR_BYTES >= 32  // GCC 12 converts fewer than 16 bytes one by one
  if constexpr (sizeof(I) == 1 && sizeof(A) == 4 && N == 8) {
    return bit_cast<Vec<int32_t, 8>>(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  } else if constexpr (sizeof(I) == 1 && sizeof(A) == 4 && N == 4) {
    const auto bytes = _mm_cvtsi32_si128(bit_cast<int32_t>(load_bytes<Vec<uint8_t, 4>>(p)));
    return bit_cast<Vec<int32_t, 4>>(_mm_cvtepu8_epi32(bytes));
  }
#endif
  return __builtin_convertvector(load_bytes<Vec<I, N>>(p), Vec<bits_t<A>, N>);
}

// Update maximum and tap. As in PyTorch: the first of equal elements wins, the last NaN wins.
template <int N, int STEP, typename T>
inline void update_max(const T* x, int64_t step, int64_t tap, Vec<acc_t<T>, N>& best,
                       Vec<bits_t<acc_t<T>>, N>& taps) {
  using B = bits_t<acc_t<T>>;
  const auto v = load_strided<N, STEP>(x, step, std::make_integer_sequence<int, N>{});
  if constexpr (N == 1) {  // scalar code compiles better
    if (v[0] > best[0] || v[0] != v[0]) {
      best = v;
      taps[0] = tap;
    }
    return;
  }
  const Vec<B, N> greater = (v > best) | (v != v);
  best = greater ? v : best;
  taps = greater ? broadcast<B, N>(tap) : taps;
}

// Pool `run` outputs whose windows are `step` elements apart: full K×K windows, or the taps of
// `window` if K is 0. The last vector overlaps the one before. noinline avoids register spills.
template <int N, int STEP, int K, typename T, typename Indices>
__attribute__((noinline)) void pool_vectors(const Plan& p, const T* x, int64_t step,
                                            const Window& window, int64_t run, T* out,
                                            Indices indices) {
  using A = acc_t<T>;
  // Local copies: byte stores alias everything.
  const auto [rows, columns] = window;
  const int64_t row_step = p.row_step, column_step = p.column_step, kernel_w = p.g.kernel_w;
  const int64_t first = rows.first * row_step + columns.first * column_step;
  for (int64_t i = 0; i < run; i += N) {
    i = i + N > run ? run - N : i;
    const T* from = x + i * step;
    auto best = load_strided<N, STEP>(from + first, step, std::make_integer_sequence<int, N>{});
    auto taps = broadcast<bits_t<A>, N>(rows.first * kernel_w + columns.first);
    if constexpr (K > 0) {
      OPS_UNROLL
      for (int tap = 1; tap < K * K; ++tap) {
        const T* tap_at = from + tap / K * row_step + tap % K * column_step;
        update_max<N, STEP>(tap_at, step, tap, best, taps);
      }
    } else {
      for (int64_t row = rows.first; row < rows.end; ++row) {
        for (int64_t column = columns.first; column < columns.end; ++column) {
          const T* tap_at = from + row * row_step + column * column_step;
          update_max<N, STEP>(tap_at, step, row * kernel_w + column, best, taps);
        }
      }
    }
    store<N>(out + i, best);
    if constexpr (std::is_pointer_v<Indices>) {
      const auto argmax = __builtin_convertvector(taps, Vec<std::remove_pointer_t<Indices>, N>);
      __builtin_memcpy(indices + i, &argmax, sizeof(argmax));
    }
  }
}

// Pool in the widest vectors that fit the run.
template <int N, int STEP, int K, typename T, typename Indices>
inline void pool_run(const Plan& p, const T* x, int64_t step, const Window& window, int64_t run,
                     T* out, Indices indices) {
  if constexpr (N > 1) {
    if (run < N) {
      return pool_run<N / 2, STEP, K>(p, x, step, window, run, out, indices);
    }
  }
  pool_vectors<N, STEP, K>(p, x, step, window, run, out, indices);
}

template <int STEP, typename T, typename Indices>
void pool(const Plan& p, const T* x, int64_t step, const Window& window, int64_t run, T* out,
          Indices indices) {
  constexpr int N = kLanes<acc_t<T>>;
  if constexpr (kSpecialised<acc_t<T>> && !std::is_same_v<Indices, int64_t*>) {
    if (p.is_full(window, 2)) {
      return pool_run<N, STEP, 2>(p, x, step, window, run, out, indices);
    }
    if (p.is_full(window, 3)) {
      return pool_run<N, STEP, 3>(p, x, step, window, run, out, indices);
    }
  }
  if (!window.empty()) {
    return pool_run<N, STEP, 0>(p, x, step, window, run, out, indices);
  }
  for (int64_t i = 0; i < run; ++i) {  // all padding
    out[i] = static_cast<T>(-__builtin_inf());
    if constexpr (std::is_pointer_v<Indices>) {
      indices[i] = static_cast<std::remove_pointer_t<Indices>>(kNoTap);
    }
  }
}

// Store the gradient where `tap` is the maximum, zeros elsewhere. STEP 2: interleave the next tap.
template <int N, int STEP, typename T>
inline void unpool(Vec<acc_t<T>, N> grad, Vec<bits_t<acc_t<T>>, N> taps, int64_t tap, T* out) {
  using B = bits_t<acc_t<T>>;
  const Vec<acc_t<T>, N> zero{};
  const auto chosen = taps == broadcast<B, N>(tap) ? grad : zero;
  if constexpr (STEP == 2 && N > 1) {
    const auto next = taps == broadcast<B, N>(tap + 1) ? grad : zero;
    store_interleaved<N>(out, chosen, next, std::make_integer_sequence<int, N>{});
  } else {
    store<N>(out, chosen);
  }
}

// Unpool the gradients of `run` outputs to their windows: K and `window` as in pool_vectors. STEP:
// elements between adjacent outputs, 2 only for full windows two pixels wide.
template <int N, int STEP, int K, typename T, typename I>
void unpool_run(const Plan& p, const T* grad, const I* indices, const Window& window, int64_t run,
                T* out) {
  if constexpr (N > 1) {
    if (run < N) {
      return unpool_run<N / 2, STEP, K>(p, grad, indices, window, run, out);
    }
  }
  constexpr int kPixels = STEP == 2 && N > 1 ? 2 : 1;  // per store
  const auto [rows, columns] = window;
  const int64_t row_step = p.row_step, column_step = p.column_step, kernel_w = p.g.kernel_w;
  for (int64_t i = 0; i < run; i += N) {
    i = i + N > run ? run - N : i;
    const auto v = load<N>(grad + i);
    const auto taps = load_taps<N, acc_t<T>>(indices + i);
    T* to = out + i * STEP;
    if constexpr (K > 0) {
      OPS_UNROLL
      for (int tap = 0; tap < K * K; tap += kPixels) {
        T* tap_at = to + tap / K * row_step + tap % K * column_step;
        unpool<N, STEP>(v, taps, tap, tap_at);
      }
    } else {
      for (int64_t row = rows.first; row < rows.end; ++row) {
        for (int64_t column = columns.first; column < columns.end; column += kPixels) {
          T* tap_at = to + row * row_step + column * column_step;
          unpool<N, STEP>(v, taps, row * kernel_w + column, tap_at);
        }
      }
    }
  }
}

// Forward of output rows [begin, end), counted over images.
template <typename T, typename Indices>
void forward_rows(const Plan& p, const T* x, T* out, Indices indices, int64_t begin, int64_t end) {
  const Geometry& g = p.g;
  out += begin * g.out_w * p.pixel;
  indices += begin * g.out_w * p.pixel;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t out_row = row % g.out_h;
    const T* image = x + row / g.out_h * p.image_size();
    for (int64_t column = 0; column < g.out_w;) {
      const Window window = p.window(out_row, column);
      const int64_t length = p.run_length(window, column);
      const int64_t run = length * p.pixel, step = p.pixel == 1 ? g.stride_w : 1;
      const T* from =
          image + p.offset(out_row * g.stride_h - g.padding_h, column * g.stride_w - g.padding_w);
      if (step == 1) {
        pool<1>(p, from, step, window, run, out, indices);
      } else if (step == 2) {
        pool<2>(p, from, step, window, run, out, indices);
      } else {
        pool<0>(p, from, step, window, run, out, indices);
      }
      out += run;
      indices += run;
      column += length;
    }
  }
}

// Backward of disjoint windows, for output rows [begin, end).
template <typename T, typename I>
void backward_rows(const Plan& p, const T* grad, const I* indices, T* out, int64_t begin,
                   int64_t end) {
  constexpr int N = kLanes<acc_t<T>>;
  const Geometry& g = p.g;
  grad += begin * g.out_w * p.pixel;
  indices += begin * g.out_w * p.pixel;
  T* image = out + begin / g.out_h * p.image_size();
  int64_t out_row = begin % g.out_h;
  for (int64_t row = begin; row < end; ++row, ++out_row) {
    if (out_row == g.out_h) {
      out_row = 0;
      image += p.image_size();
    }
    const int64_t first_row = out_row * g.stride_h - g.padding_h;
    if (!p.tiled) {
      const int64_t next_row = first_row + g.stride_h;
      const int64_t from = out_row > 0 ? first_row : 0;
      const int64_t to = out_row + 1 < g.out_h && next_row < g.h ? next_row : g.h;
      __builtin_memset(static_cast<void*>(image + p.offset(from, 0)), 0,
                       p.offset(to - from, 0) * sizeof(T));
    }
    for (int64_t column = 0; column < g.out_w;) {
      const Window window = p.window(out_row, column);
      const int64_t length = p.run_length(window, column), run = length * p.pixel;
      T* to = image + p.offset(first_row, column * g.stride_w - g.padding_w);
      const bool full = sizeof(I) == 1 && p.is_full(window, 2);
      if (!p.pairs) {
        full ? unpool_run<N, 1, 2>(p, grad, indices, window, run, to)
             : unpool_run<N, 1, 0>(p, grad, indices, window, run, to);
      } else if (p.is_full(window.columns)) {
        full ? unpool_run<N, 2, 2>(p, grad, indices, window, run, to)
             : unpool_run<N, 2, 0>(p, grad, indices, window, run, to);
      } else {  // cut at the left or right edge: one output
        unpool_run<1, 1, 0>(p, grad, indices, window, run, to);
      }
      grad += run;
      indices += run;
      column += length;
    }
  }
}

}  // namespace ops::cpu::OPS_ISA::max_pool2d
