// ncrelu on vectors. No include guard: see for_each_isa.h.

namespace ops::cpu::OPS_ISA {

// Both keep NaN, as torch.clamp does.
template <typename A, int N>
inline Vec<A, N> positive_part(Vec<A, N> x) {
  return x < A(0) ? Vec<A, N>{} : x;
}

template <typename A, int N>
inline Vec<A, N> negative_part(Vec<A, N> x) {
  return x > A(0) ? Vec<A, N>{} : x;
}

// g₊ [x > 0] + g₋ [x < 0]
template <typename A, int N>
inline Vec<A, N> join(Vec<A, N> x, Vec<A, N> positive, Vec<A, N> negative) {
  return x > A(0) ? positive : (x < A(0) ? negative : Vec<A, N>{});
}

// A stretch of one row. The last vector ends where the stretch does and overlaps the one before.
template <typename T>
void ncrelu_stretch(const T* x, T* positive, T* negative, int64_t n) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  for (int64_t i = 0; i < n; i += N) {
    const int64_t at = i + N <= n ? i : n - N;
    const Vec<A, N> v = load<N>(x + at);
    store<N>(positive + at, positive_part<A, N>(v));
    store<N>(negative + at, negative_part<A, N>(v));
  }
}

template <typename T>
void ncrelu_backward_stretch(const T* x, const T* positive, const T* negative, T* out, int64_t n) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  for (int64_t i = 0; i < n; i += N) {
    const int64_t at = i + N <= n ? i : n - N;
    store<N>(out + at, join<A, N>(load<N>(x + at), load<N>(positive + at), load<N>(negative + at)));
  }
}

// Short rows. The last vector of a row runs over its end, into what is written after it; where
// nothing is, at the very end, single elements.
template <typename T>
void ncrelu_short_rows(const T* x, T* out, int64_t rows, int64_t inner) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  for (; rows * inner >= inner + N; --rows, x += inner, out += 2 * inner) {
    for (int64_t i = 0; i < inner; i += N) {
      store<N>(out + i, positive_part<A, N>(load<N>(x + i)));
    }
    for (int64_t i = 0; i < inner; i += N) {
      store<N>(out + inner + i, negative_part<A, N>(load<N>(x + i)));
    }
  }
  for (; rows > 0; --rows, x += inner, out += 2 * inner) {
    for (int64_t i = 0; i < inner; ++i) {
      store<1>(out + i, positive_part<A, 1>(load<1>(x + i)));
      store<1>(out + inner + i, negative_part<A, 1>(load<1>(x + i)));
    }
  }
}

template <typename T>
void ncrelu_backward_short_rows(const T* x, const T* grad, T* out, int64_t rows, int64_t inner) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  for (; rows * inner >= inner + N; --rows, x += inner, grad += 2 * inner, out += inner) {
    for (int64_t i = 0; i < inner; i += N) {
      store<N>(out + i, join<A, N>(load<N>(x + i), load<N>(grad + i), load<N>(grad + inner + i)));
    }
  }
  for (; rows > 0; --rows, x += inner, grad += 2 * inner, out += inner) {
    for (int64_t i = 0; i < inner; ++i) {
      store<1>(out + i, join<A, 1>(load<1>(x + i), load<1>(grad + i), load<1>(grad + inner + i)));
    }
  }
}

}  // namespace ops::cpu::OPS_ISA
