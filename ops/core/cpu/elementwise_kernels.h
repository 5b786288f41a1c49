// The loop of an elementwise operator. No include guard: see dispatch_isa.h.

namespace ops::cpu::OPS_ISA {

// An operator specialises this: how its functor F computes on vectors,
// template <typename A, int N> static Vec<A, N> apply(Vec<A, N>...).
template <typename F>
struct OnVectors;

// out[i] = F(in[i]...)
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
