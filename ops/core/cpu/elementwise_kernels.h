// SIMD loop of elementwise operators. No include guard: see dispatch_isa.h.

namespace ops::cpu::OPS_ISA {

// Compute out[i] = f(in[i]...) for i < n, on vectors.
template <typename T, typename F, typename... In>
void map(T* out, int64_t n, const F& f, const In*... in) {
  constexpr int N = kLanes<acc_t<T>>;
  using V = Simd<acc_t<T>, N>;
  int64_t i = 0;
  for (; i + N <= n; i += N) {
    store<N>(out + i, f(V(load<N>(in + i))...).lanes);
  }
  if (i < n) {
    store_first<N>(out + i, f(V(load_first<N>(in + i, n - i))...).lanes, n - i);
  }
}

}  // namespace ops::cpu::OPS_ISA
