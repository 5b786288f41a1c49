// Vector kernels of CPU global average pooling. No include guard: see core/cpu/dispatch_isa.h.
//
//   NCHW: sum_contiguous                      NHWC: add_rows
//   ┌───────────────────────────────┐         ┌──────────────┐ pixel 0
//   │ 4 vectors of adjacent pixels, │         │ c0 c1 c2 …   │ pixel 1    4 pixels at a time onto
//   │ one sum each ─► sum_lanes     │         │              │ …       ─► sums[channel] in L1
//   └───────────────────────────────┘         └──────────────┘
//
//   thread:  a range of splits (cpu.cpp)
//   lanes:   adjacent pixels (NCHW), adjacent channels (NHWC)

namespace ops::cpu::OPS_ISA::global_avg_pool2d {

using namespace ops::global_avg_pool2d;

// Load the N elements before `end` and zero all but the last n < N.
template <int N, typename T>
inline Vec<acc_t<T>, N> load_last(const T* end, int64_t n) {
  using Lanes = Vec<bits_t<acc_t<T>>, N>;
  Lanes lane;
  for (int i = 0; i < N; ++i) {
    lane[i] = i;
  }
  const Vec<acc_t<T>, N> all = load<N>(end - N);
  return lane < Lanes{} + static_cast<bits_t<acc_t<T>>>(N - n) ? Vec<acc_t<T>, N>{} : all;
}

// Permute: result[i] = v[i ^ S].
template <typename A, int N, int S, int... I>
inline Vec<A, N> swap_lanes(Vec<A, N> v, std::integer_sequence<int, I...>) {
  return shuffle<A, N>(v, v, std::integer_sequence<int, (I ^ S)...>{});
}

template <typename A, int N, int S = N / 2>
inline A sum_lanes(Vec<A, N> v) {
  if constexpr (S > 0) {
    v += swap_lanes<A, N, S>(v, std::make_integer_sequence<int, N>{});
    return sum_lanes<A, N, S / 2>(v);
  }
  return v[0];
}

// Return the sum of n elements; the order depends on n alone.
template <typename T>
acc_t<T> sum_contiguous(const T* x, int64_t n) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  Vec<A, N> a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * N <= n; i += 4 * N) {
    a += load<N>(x + i);
    b += load<N>(x + i + N);
    c += load<N>(x + i + 2 * N);
    d += load<N>(x + i + 3 * N);
  }
  for (; i + N <= n; i += N) {
    a += load<N>(x + i);
  }
  if (i < n) {
    b += n < N ? load_first<N>(x, n) : load_last<N>(x + n, n - i);
  }
  return sum_lanes<A, N>((a + b) + (c + d));
}

// out[p] = Σ x[p, i] / length for planes [begin, end)
template <typename T>
void average_planes(const T* x, int64_t begin, int64_t end, int64_t length, T* out) {
  using A = acc_t<T>;
  for (int64_t p = begin; p < end; ++p) {
    store<1>(out + p, Vec<A, 1>{sum_contiguous(x + p * length, length) / A(length)});
  }
}

// sums[k] += x[row, k] over all rows, `width` elements each.
template <typename T>
void add_rows(const T* x, int64_t rows, int64_t width, acc_t<T>* sums) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4, x += 4 * width) {
    const T *b = x + width, *c = b + width, *d = c + width;
    int64_t k = 0;
    for (; k + N <= width; k += N) {
      const Vec<A, N> four = (load<N>(x + k) + load<N>(b + k)) + (load<N>(c + k) + load<N>(d + k));
      store<N>(sums + k, load<N>(sums + k) + four);
    }
    if (const int64_t rest = width - k; rest > 0) {
      const Vec<A, N> four = (load_first<N>(x + k, rest) + load_first<N>(b + k, rest)) +
                             (load_first<N>(c + k, rest) + load_first<N>(d + k, rest));
      store_first<N>(sums + k, load_first<N>(sums + k, rest) + four, rest);
    }
  }
  for (; row < rows; ++row, x += width) {
    for (int64_t k = 0; k < width; ++k) {
      sums[k] += x[k];
    }
  }
}

constexpr int64_t kMaxFolded = 128;  // elements per row

// sums[k] = Σ x[row, k]. Short rows that are not whole vectors are folded into one wide row.
template <typename T>
void sum_rows(const T* x, int64_t rows, int64_t width, acc_t<T>* sums) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  if (width == 1) {
    *sums = sum_contiguous(x, rows);
    return;
  }
  __builtin_memset(sums, 0, width * sizeof(A));
  const int64_t divisor = width & -width;  // largest power of two that divides width
  const int64_t fold = divisor < N ? N / divisor : 1;
  if (fold == 1 || width > kMaxFolded) {
    add_rows(x, rows, width, sums);
    return;
  }
  A wide[kMaxFolded * N];
  __builtin_memset(wide, 0, fold * width * sizeof(A));
  const int64_t folded = rows / fold;
  add_rows(x, folded, fold * width, wide);
  add_rows(wide, fold, width, sums);
  add_rows(x + folded * fold * width, rows - folded * fold, width, sums);
}

// Call f(i, o, first row, rows) for splits i in [begin, end).
template <typename F>
inline void for_each_split(const Splits& s, int64_t begin, int64_t end, const F& f) {
  int64_t o = begin / s.count, first = begin % s.count * s.rows;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t rest = s.layout.length - first, rows = s.rows < rest ? s.rows : rest;
    f(i, o, first, rows);
    first += rows;
    if (first == s.layout.length) {
      first = 0;
      ++o;
    }
  }
}

// sums[i, k] = Σ x[o, row, k] over the rows of split i
template <typename T>
void sum_splits(const Splits& s, int64_t begin, int64_t end, const T* x, acc_t<T>* sums) {
  const auto [outer, length, inner] = s.layout;
  for_each_split(s, begin, end, [=](int64_t i, int64_t o, int64_t first, int64_t rows) {
    sum_rows(x + (o * length + first) * inner, rows, inner, sums + i * inner);
  });
}

// out[k] = Σ sums[split, k] / length
template <typename From, typename T>
void average(const From* sums, int64_t splits, int64_t width, int64_t length, T* out) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  for (int64_t k = 0; k < width; k += N) {
    Vec<A, N> sum{};
    for (int64_t split = 0; split < splits; ++split) {
      sum += load_first<N>(sums + split * width + k, width - k);
    }
    store_first<N>(out + k, sum / A(length), width - k);
  }
}

// Fill out[period, n) periodically: out[i] = out[i − period].
template <typename T>
void repeat_period(T* out, int64_t period, int64_t n) {
  // Copy from this far back: no load waits for store forwarding, and the source is in the L1 cache.
  constexpr int64_t kDistance = 6144 / sizeof(T);
  int64_t done = period;
  while (done < n && done < kDistance) {
    const int64_t more = done < n - done ? done : n - done;
    __builtin_memcpy(out + done, out, more * sizeof(T));
    done += more;
  }
  constexpr int64_t N = OPS_VECTOR_BYTES / sizeof(T);
  const int64_t back = done;  // a multiple of the period
  for (; done + N <= n; done += N) {
    const auto bytes = load_bytes<Vec<char, OPS_VECTOR_BYTES>>(out + done - back);
    __builtin_memcpy(out + done, &bytes, sizeof(bytes));
  }
  __builtin_memcpy(out + done, out + done - back, (n - done) * sizeof(T));
}

template <typename T>
void fill(T* out, int64_t n, acc_t<T> value) {
  constexpr int N = kLanes<acc_t<T>>;
  const auto values = broadcast<acc_t<T>, N>(value);
  for (int64_t i = 0; i + N <= n; i += N) {
    store<N>(out + i, values);
  }
  if (n >= N) {
    store<N>(out + n - N, values);  // overlaps
  } else {
    store_first<N>(out, values, n);
  }
}

// out[o, row, k] = grad[o, k] / length over the rows of each split
template <typename T>
void broadcast_splits(const Splits& s, int64_t begin, int64_t end, const T* grad, T* out) {
  const auto [outer, length, inner] = s.layout;
  for_each_split(s, begin, end, [=](int64_t, int64_t o, int64_t first, int64_t rows) {
    T* to = out + (o * length + first) * inner;
    if (inner == 1) {
      fill(to, rows, acc_t<T>(grad[o]) / acc_t<T>(length));
    } else if (rows > 0) {
      average(grad + o * inner, 1, inner, length, to);
      repeat_period(to, inner, rows * inner);
    }
  });
}

}  // namespace ops::cpu::OPS_ISA::global_avg_pool2d
