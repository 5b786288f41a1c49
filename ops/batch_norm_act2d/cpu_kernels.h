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

// Add R rows to two sums of each column.
template <int R, typename F, typename A, typename... T>
inline void reduce_rows(const F& f, const A* arguments, A* sums, int64_t pitch, int64_t stride,
                        int64_t width, const T*... in) {
  constexpr int N = kLanes<A>;
  using V = Simd<A, N>;
  for (int64_t k = 0; k < width; k += N) {
    const int64_t n = width - k;
    V a[F::kArguments], first = load<N>(sums + k), second = load<N>(sums + pitch + k);
    for (int i = 0; i < F::kArguments; ++i) {
      a[i] = load_first<N>(arguments + i * pitch + k, n);  // lanes beyond n add 0
    }
    OPS_UNROLL
    for (int r = 0; r < R; ++r) {
      f.add(a, first, second, V(load_first<N>(in + r * stride + k, n))...);
    }
    store<N>(sums + k, first.lanes);
    store<N>(sums + pitch + k, second.lanes);
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

// Compute a run of n elements of `out`.
template <typename F, typename A, typename T, typename... In>
void map(const F& f, const A* arguments, int64_t pitch, int64_t width, int64_t n, T* out,
         const In*... in) {
  constexpr int N = kLanes<A>;
  using V = Simd<A, N>;
  for (; n > 0; n -= width, out += width, ((in += width), ...)) {
    const int64_t row = n < width ? n : width;
    for (int64_t k = 0; k < row; k += N) {
      V a[F::kArguments];
      for (int i = 0; i < F::kArguments; ++i) {
        a[i] = load<N>(arguments + i * pitch + k);
      }
      store_first<N>(out + k, f(a, V(load_first<N>(in + k, row - k))...).lanes, row - k);
    }
  }
}

}  // namespace ops::cpu::OPS_ISA::batch_norm_act2d
