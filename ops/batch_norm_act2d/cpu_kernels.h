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

// Load the n ≤ N elements of a vector; kWhole: n = N, without a branch.
template <int N, bool kWhole, typename T>
inline Simd<acc_t<T>, N> load_some(const T* p, int64_t n) {
  if constexpr (kWhole) {
    return load<N>(p);
  } else {
    return load_first<N>(p, n);
  }
}

// Add R rows to two sums of n ≤ N columns.
template <int R, bool kWhole, typename F, typename A, typename... T>
inline void reduce_columns(const F& f, const A* arguments, A* sums, int64_t pitch, int64_t stride,
                           int64_t n, const T*... in) {
  constexpr int N = kLanes<A>;
  using V = Simd<A, N>;
  V a[F::kArguments], first = load<N>(sums), second = load<N>(sums + pitch);
  for (int i = 0; i < F::kArguments; ++i) {
    a[i] = load_some<N, kWhole>(arguments + i * pitch, n);  // lanes beyond n add 0
  }
  OPS_UNROLL
  for (int r = 0; r < R; ++r) {
    f.add(a, first, second, load_some<N, kWhole>(in + r * stride, n)...);
  }
  store<N>(sums, first.lanes);
  store<N>(sums + pitch, second.lanes);
}

// Add R rows to two sums of each column.
template <int R, typename F, typename A, typename... T>
inline void reduce_rows(const F& f, const A* arguments, A* sums, int64_t pitch, int64_t stride,
                        int64_t width, const T*... in) {
  constexpr int N = kLanes<A>;
  int64_t k = 0;
  for (; k + N <= width; k += N) {
    reduce_columns<R, true>(f, arguments + k, sums + k, pitch, stride, N, (in + k)...);
  }
  if (k < width) {
    reduce_columns<R, false>(f, arguments + k, sums + k, pitch, stride, width - k, (in + k)...);
  }
}

// Add a run of n elements.
template <typename F, typename A, typename... T>
void reduce(const F& f, const A* arguments, A* sums, int64_t pitch, int64_t width, int64_t n,
            const T*... in) {
  constexpr int kRows = 4;
  for (; n >= kRows * width; n -= kRows * width, ((in += kRows * width), ...)) {
    reduce_rows<kRows>(f, arguments, sums, pitch, width, width, in...);
  }
  for (; n > 0; n -= width, ((in += width), ...)) {
    reduce_rows<1>(f, arguments, sums, pitch, width, n < width ? n : width, in...);
  }
}

// Compute n ≤ N elements of `out`.
template <bool kWhole, typename F, typename A, typename T, typename... In>
inline void map_columns(const F& f, const A* arguments, int64_t pitch, int64_t n, T* out,
                        const In*... in) {
  constexpr int N = kLanes<A>;
  Simd<A, N> a[F::kArguments];
  for (int i = 0; i < F::kArguments; ++i) {
    a[i] = load<N>(arguments + i * pitch);
  }
  store_first<N>(out, f(a, load_some<N, kWhole>(in, n)...).lanes, kWhole ? N : n);
}

// Compute a run of n elements of `out`.
template <typename F, typename A, typename T, typename... In>
void map(const F& f, const A* arguments, int64_t pitch, int64_t width, int64_t n, T* out,
         const In*... in) {
  constexpr int N = kLanes<A>;
  for (; n > 0; n -= width, out += width, ((in += width), ...)) {
    const int64_t row = n < width ? n : width;
    int64_t k = 0;
    for (; k + N <= row; k += N) {
      map_columns<true>(f, arguments + k, pitch, N, out + k, (in + k)...);
    }
    if (k < row) {
      map_columns<false>(f, arguments + k, pitch, row - k, out + k, (in + k)...);
    }
  }
}

}  // namespace ops::cpu::OPS_ISA::batch_norm_act2d
