// Vector kernels of CPU global average pooling. No include guard: see core/cpu/dispatch_isa.h.
//
//   NCHW: sum_contiguous                      NHWC: add_rows
//   ┌───────────────────────────────┐         ┌──────────────┐ pixel 0
//   │ 4 vectors of adjacent pixels, │         │ c0 c1 c2 …   │ pixel 1    4 pixels at a time onto
//   │ one sum each ─► sum_lanes     │         │              │ …       ─► sums[channel] in L1
//   └───────────────────────────────┘         └──────────────┘
//
//   thread:  whole images, or a split of one (cpu.cpp)
//   lanes:   adjacent pixels (NCHW), adjacent channels (NHWC)

namespace ops::cpu::OPS_ISA::global_avg_pool2d {

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

template <typename A, int N>
inline A sum_lanes(Vec<A, N> v) {
  if constexpr (N > 1) {
    struct Halves {
      Vec<A, N / 2> low, high;
    };
    const auto halves = bit_cast<Halves>(v);
    return sum_lanes<A, N / 2>(halves.low + halves.high);
  }
  return v[0];
}

// Return the sum of n elements; the order depends on n alone.
template <typename T>
acc_t<T> sum_contiguous(const T* x, int64_t n) {
  constexpr int N = kLanes<acc_t<T>>;
  Vec<acc_t<T>, N> sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * N <= n; i += 4 * N) {
    OPS_UNROLL
    for (int k = 0; k < 4; ++k) {
      sums[k] += load<N>(x + i + k * N);
    }
  }
  for (; i + N <= n; i += N) {
    sums[0] += load<N>(x + i);
  }
  if (i < n) {
    sums[1] += n < N ? load_first<N>(x, n) : load_last<N>(x + n, n - i);
  }
  return sum_lanes<acc_t<T>, N>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// sums[k] += Σ x[row, k] over ROWS rows of `width` elements.
template <int ROWS, typename T>
inline void add_rows(const T* x, int64_t width, acc_t<T>* sums) {
  constexpr int N = kLanes<acc_t<T>>;
  const auto add = [=](auto n, int64_t k) {
    auto sum = load<n.value>(x + k);
    OPS_UNROLL
    for (int row = 1; row < ROWS; ++row) {
      sum += load<n.value>(x + row * width + k);
    }
    store<n.value>(sums + k, load<n.value>(sums + k) + sum);
  };
  int64_t k = 0;
  for (; k + N <= width; k += N) {
    add(std::integral_constant<int, N>{}, k);
  }
  for (; k < width; ++k) {
    add(std::integral_constant<int, 1>{}, k);
  }
}

template <typename T>
void add_rows(const T* x, int64_t rows, int64_t width, acc_t<T>* sums) {
  for (; rows >= 4; rows -= 4, x += 4 * width) {
    add_rows<4>(x, width, sums);
  }
  for (; rows > 0; --rows, x += width) {
    add_rows<1>(x, width, sums);
  }
}

constexpr int64_t kMaxFolded = 128;  // elements per row

// sums[k] = Σ x[row, k]. Short rows that are not whole vectors are folded into one wide row.
template <typename T>
void sum_rows(const T* x, int64_t rows, int64_t width, acc_t<T>* sums) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  __builtin_memset(sums, 0, width * sizeof(A));
  const int64_t divisor = width & -width;  // largest power of two that divides width
  if (divisor < N && width <= kMaxFolded) {
    const int64_t fold = N / divisor, folded = rows / fold;
    A wide[kMaxFolded * N];
    __builtin_memset(wide, 0, fold * width * sizeof(A));
    add_rows(x, folded, fold * width, wide);
    add_rows(wide, fold, width, sums);
    x += folded * fold * width;
    rows -= folded * fold;
  }
  add_rows(x, rows, width, sums);
}

// sums[o, k] = Σ x[o, row, k]
template <typename T>
void sum_images(const T* x, int64_t outer, int64_t rows, int64_t inner, acc_t<T>* sums) {
  if (inner == 1) {
    for (int64_t o = 0; o < outer; ++o) {
      sums[o] = sum_contiguous(x + o * rows, rows);
    }
    return;
  }
  for (int64_t o = 0; o < outer; ++o) {
    sum_rows(x + o * rows * inner, rows, inner, sums + o * inner);
  }
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

// out[i] = out[i − period] for i in [period, n): double the filled part, from 12 KB on copy its
// first 6 KB or more. They are in the L1 cache, and no load waits for store forwarding.
template <typename T>
void repeat_period(T* out, int64_t period, int64_t n) {
  constexpr int64_t kBlock = 12288 / sizeof(T);
  for (int64_t done = period, block = period; done < n; done += block) {
    block = done < kBlock ? done : block;  // whole periods
    __builtin_memcpy(out + done, out, (block < n - done ? block : n - done) * sizeof(T));
  }
}

// out[o, row, k] = grad[o, k] / length
template <typename T>
void broadcast_images(const T* grad, int64_t outer, int64_t rows, int64_t inner, int64_t length,
                      T* out) {
  if (inner == 1) {
    for (int64_t o = 0; o < outer; ++o) {
      T value;
      store<1>(&value, Vec<acc_t<T>, 1>{grad[o] / acc_t<T>(length)});
      for (int64_t row = 0; row < rows; ++row) {
        out[o * rows + row] = value;
      }
    }
    return;
  }
  for (int64_t o = 0; o < outer; ++o) {
    T* image = out + o * rows * inner;
    average(grad + o * inner, 1, inner, length, image);
    repeat_period(image, inner, rows * inner);
  }
}

}  // namespace ops::cpu::OPS_ISA::global_avg_pool2d
