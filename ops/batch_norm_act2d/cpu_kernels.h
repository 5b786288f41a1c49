// Vector loops of CPU batch normalisation. No include guard: see core/cpu/dispatch_isa.h.
//
//   a run of n elements, as rows of `width`            per-channel arguments
//   ┌────────────────────────────┐ row 0              ┌────────────────────────────┐
//   │ c0 c1 … c0 c1 … c0 c1 …    │ row 1 …            │ c0 c1 … c0 c1 … c0 c1 …    │ (cpu.cpp)
//   └────────────────────────────┘ (last row shorter) └────────────────────────────┘
//
//   thread:  one run: pixels (NHWC), or a piece of a plane (NCHW)
//   lanes:   adjacent elements; sums of each column in L1. Rows of arguments and sums are padded to
//            whole vectors, `pitch` elements apart.

namespace ops::cpu::OPS_ISA::batch_norm_act2d {

// Load the n ≤ N lanes of a vector, the others zero. If n is constant, there is no branch.
template <int N, typename T>
OPS_FORMULA Simd<acc_t<T>, N> load_lanes(const T* p, int64_t n) {
  return n == N ? load<N>(p) : load_first<N>(p, n);
}

// Add R rows to two sums of n ≤ N columns.
template <int R, typename F, typename A, typename... T>
OPS_FORMULA void reduce_columns(const F& f, const A* arguments, A* sums, int64_t pitch,
                                int64_t stride, int64_t n, const T*... in) {
  constexpr int N = kLanes<A>;
  using V = Simd<A, N>;
  V a[F::kArguments], first = load<N>(sums), second = load<N>(sums + pitch);
  for (int i = 0; i < F::kArguments; ++i) {
    a[i] = load_lanes<N>(arguments + i * pitch, n);  // lanes beyond n add 0
  }
  OPS_UNROLL
  for (int r = 0; r < R; ++r) {
    f.add(a, first, second, load_lanes<N>(in + r * stride, n)...);
  }
  store<N>(sums, first.lanes);
  store<N>(sums + pitch, second.lanes);
}

// Add R rows to two sums of each column. Arguments by value: stores may alias a lambda's captures.
template <int R, typename F, typename A, typename... T>
inline void reduce_rows(const F& f, const A* arguments, A* sums, int64_t pitch, int64_t stride,
                        int64_t columns, const T*... in) {
  constexpr int N = kLanes<A>;
  int64_t k = 0;
  for (; k + N <= columns; k += N) {
    reduce_columns<R>(f, arguments + k, sums + k, pitch, stride, N, (in + k)...);
  }
  if (k < columns) {
    reduce_columns<R>(f, arguments + k, sums + k, pitch, stride, columns - k, (in + k)...);
  }
}

// Compute n ≤ N columns of R rows of `out`.
template <int R, typename F, typename A, typename T, typename... In>
OPS_FORMULA void map_columns(const F& f, const A* arguments, int64_t pitch, int64_t stride,
                             int64_t n, T* out, const In*... in) {
  constexpr int N = kLanes<A>;
  using V = Simd<A, N>;
  V a[F::kArguments];
  for (int i = 0; i < F::kArguments; ++i) {
    a[i] = load<N>(arguments + i * pitch);
  }
  OPS_UNROLL
  for (int r = 0; r < R; ++r) {
    const V y = f(a, load_lanes<N>(in + r * stride, n)...);
    n == N ? store<N>(out + r * stride, y.lanes) : store_first<N>(out + r * stride, y.lanes, n);
  }
}

// Compute R rows of `out`.
template <int R, typename F, typename A, typename T, typename... In>
inline void map_rows(const F& f, const A* arguments, int64_t pitch, int64_t stride, int64_t columns,
                     T* out, const In*... in) {
  constexpr int N = kLanes<A>;
  int64_t k = 0;
  for (; k + N <= columns; k += N) {
    map_columns<R>(f, arguments + k, pitch, stride, N, out + k, (in + k)...);
  }
  if (k < columns) {
    map_columns<R>(f, arguments + k, pitch, stride, columns - k, out + k, (in + k)...);
  }
}

// Call f(R, stride, columns, offset) for groups of R rows: kAdjacent rows of a sequence of n
// elements, or four sequences if they are not longer than a row; the rest one by one.
template <int kAdjacent, typename F>
inline void for_each_rows(int64_t width, int64_t n, int64_t repetitions, int64_t stride,
                          const F& f) {
  const auto call = [&](auto group, int64_t rows, int64_t step, int64_t columns, int64_t at) {
    constexpr int R = group.value;
    for (; rows >= R; rows -= R, at += R * step) {
      f(group, step, columns, at);
    }
    for (; rows > 0; --rows, at += step) {
      f(std::integral_constant<int, 1>{}, step, columns, at);
    }
  };
  if (n <= width) {
    return call(std::integral_constant<int, 4>{}, repetitions, stride, n, 0);
  }
  const int64_t rows = n / width, rest = n % width;
  for (int64_t i = 0, at = 0; i < repetitions; ++i, at += stride) {
    call(std::integral_constant<int, kAdjacent>{}, rows, width, width, at);
    call(std::integral_constant<int, 1>{}, rest > 0, 0, rest, at + rows * width);
  }
}

// Add a run of `repetitions` sequences of n elements.
template <typename F, typename A, typename... T>
void reduce(const F& f, const A* arguments, A* sums, int64_t pitch, int64_t width, int64_t n,
            int64_t repetitions, int64_t stride, const T*... in) {
  for_each_rows<4>(
      width, n, repetitions, stride, [&](auto rows, int64_t step, int64_t columns, int64_t at) {
        reduce_rows<rows.value>(f, arguments, sums, pitch, step, columns, (in + at)...);
      });
}

// Compute a run of `out`: `repetitions` sequences of n elements. Adjacent rows one by one: stores
// to several at once are slow.
template <typename F, typename A, typename T, typename... In>
void map(const F& f, const A* arguments, int64_t pitch, int64_t width, int64_t n,
         int64_t repetitions, int64_t stride, T* out, const In*... in) {
  for_each_rows<1>(
      width, n, repetitions, stride, [&](auto rows, int64_t step, int64_t columns, int64_t at) {
        map_rows<rows.value>(f, arguments, pitch, step, columns, out + at, (in + at)...);
      });
}

}  // namespace ops::cpu::OPS_ISA::batch_norm_act2d
