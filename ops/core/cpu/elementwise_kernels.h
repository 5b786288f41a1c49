// SIMD loop of elementwise operators. No include guard: see dispatch_isa.h.

namespace ops::cpu::OPS_ISA {

// SIMD version of the functor F. Each operator specialises it with
// template <typename A, int N> static Vec<A, N> apply(Vec<A, N>...).
template <typename F>
struct OnVectors;

// Compute out[i] = F(in[i]...) for i < n.
template <typename F, typename T, typename... In>
void map(T* out, int64_t n, const In*... in) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  int64_t i = 0;
  for (; i + N <= n; i += N) {
    store<N>(out + i, OnVectors<F>::template apply<A, N>(load<N>(in + i)...));
  }
  if (i < n) {
    store_some<N>(out + i, OnVectors<F>::template apply<A, N>(load_some<N>(in + i, n - i)...),
                  n - i);
  }
}

}  // namespace ops::cpu::OPS_ISA
