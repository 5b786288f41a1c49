// Vector kernels of CPU batch normalisation. No include guard: see core/cpu/dispatch_isa.h.
//
//   a run of n elements, as rows of `width`            per-channel arguments
//   ┌────────────────────────────┐ row 0              ┌────────────────────────────┐
//   │ c0 c1 … c0 c1 … c0 c1 …    │ row 1 …            │ c0 c1 … c0 c1 … c0 c1 …    │ (cpu.cpp)
//   └────────────────────────────┘ (last row shorter) └────────────────────────────┘
//
//   thread:  one run: pixels (NHWC), or a piece of a plane (NCHW)
//   lanes:   adjacent elements; sums of each column in L1. Arguments are padded to whole vectors.

#include "core/cpu/vec_exp.h"

namespace ops::cpu::OPS_ISA {

template <int N, typename A>
inline Vec<A, N> value(const Clamp<A>& f, Vec<A, N> z) {
  return clamp<A, N>(z, f.low, f.high);
}

template <int N, typename A>
inline Vec<A, N> gradient(const Clamp<A>& f, Vec<A, N> g, Vec<A, N> z) {
  return ((z <= f.low) | (z >= f.high)) ? Vec<A, N>{} : g;
}

template <int N, typename A>
inline Vec<A, N> value(const Silu<A>&, Vec<A, N> z) {
  return z * Sigmoid<A, N>(z).value;
}

template <int N, typename A>
inline Vec<A, N> gradient(const Silu<A>&, Vec<A, N> g, Vec<A, N> z) {
  const Sigmoid<A, N> s(z);
  return g * (s.value + z * s.slope);
}

template <int N, typename A>
inline Vec<A, N> value(const Hardswish<A>&, Vec<A, N> z) {
  return z * clamp<A, N>(z + A(3), A(0), A(6)) * A(1.0 / 6.0);
}

template <int N, typename A>
inline Vec<A, N> gradient(const Hardswish<A>&, Vec<A, N> g, Vec<A, N> z) {
  const Vec<A, N> inside = z < A(3) ? g * (z * A(1.0 / 3.0) + A(0.5)) : g;
  return z <= A(-3) ? Vec<A, N>{} : inside;
}

// sum += d kSumUnit and square += d², d = x kDeviationUnit − origin, for R rows.
template <int R, typename T, typename A = acc_t<T>>
inline void add_statistics(const T* x, int64_t stride, int64_t width, const A* origin, A* sum,
                           A* square) {
  constexpr int N = kLanes<A>;
  for (int64_t k = 0; k < width; k += N) {
    const int64_t n = width - k;
    const Vec<A, N> o = load_first<N>(origin + k, n);  // lanes beyond n add 0
    Vec<A, N> s = load<N>(sum + k), q = load<N>(square + k);
    OPS_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec<A, N> d = load_first<N>(x + r * stride + k, n) * A(kDeviationUnit) - o;
      s += d * A(kSumUnit);
      q += d * d;
    }
    store<N>(sum + k, s);
    store<N>(square + k, q);
  }
}

constexpr int kRows = 4;

template <typename T>
void statistics(const T* x, int64_t n, int64_t width, const acc_t<T>* origin, acc_t<T>* sum,
                acc_t<T>* square) {
  for (; n >= kRows * width; n -= kRows * width, x += kRows * width) {
    add_statistics<kRows>(x, width, width, origin, sum, square);
  }
  for (; n > 0; n -= width, x += width) {
    add_statistics<1>(x, width, n < width ? n : width, origin, sum, square);
  }
}

// z = (x − mean) scale + bias, with arguments of `width` elements.
template <typename A>
struct Affine {
  const A *mean, *scale, *bias;
};

// out = f(z)
template <typename T, typename F, typename A = acc_t<T>>
void normalise(const T* x, int64_t n, int64_t width, const Affine<A>& affine, const F& f, T* out) {
  constexpr int N = kLanes<A>;
  for (; n > 0; n -= width, x += width, out += width) {
    const int64_t row = n < width ? n : width;
    for (int64_t k = 0; k < row; k += N) {
      const int64_t m = row - k;
      const Vec<A, N> d = load_first<N>(x + k, m) - load<N>(affine.mean + k);
      const Vec<A, N> z = d * load<N>(affine.scale + k) + load<N>(affine.bias + k);
      store_first<N>(out + k, value<N>(f, z), m);
    }
  }
}

// sum += g and product += g (x − mean), for R rows; g is the gradient before the activation.
template <int R, typename T, typename F, typename A = acc_t<T>>
inline void add_gradients(const T* grad, const T* x, int64_t stride, int64_t width,
                          const Affine<A>& affine, const F& f, A* sum, A* product) {
  constexpr int N = kLanes<A>;
  for (int64_t k = 0; k < width; k += N) {
    const int64_t n = width - k;
    const Vec<A, N> mean = load<N>(affine.mean + k);
    const Vec<A, N> scale = load<N>(affine.scale + k);
    const Vec<A, N> bias = load<N>(affine.bias + k);
    Vec<A, N> s = load<N>(sum + k), p = load<N>(product + k);
    OPS_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec<A, N> d = load_first<N>(x + r * stride + k, n) - mean;
      const Vec<A, N> g = gradient<N>(f, load_first<N>(grad + r * stride + k, n), d * scale + bias);
      s += g;
      p += g * d;
    }
    store<N>(sum + k, s);
    store<N>(product + k, p);
  }
}

template <typename T, typename F, typename A = acc_t<T>>
void gradients(const T* grad, const T* x, int64_t n, int64_t width, const Affine<A>& affine,
               const F& f, A* sum, A* product) {
  const int64_t rows = kRows * width;
  for (; n >= rows; n -= rows, x += rows, grad += rows) {
    add_gradients<kRows>(grad, x, width, width, affine, f, sum, product);
  }
  for (; n > 0; n -= width, x += width, grad += width) {
    add_gradients<1>(grad, x, width, n < width ? n : width, affine, f, sum, product);
  }
}

// out = scale g − offset − (x − mean) slope
template <typename T, typename F, typename A = acc_t<T>>
void input_gradient(const T* grad, const T* x, int64_t n, int64_t width, const Affine<A>& affine,
                    const F& f, const A* offset, const A* slope, T* out) {
  constexpr int N = kLanes<A>;
  for (; n > 0; n -= width, x += width, grad += width, out += width) {
    const int64_t row = n < width ? n : width;
    for (int64_t k = 0; k < row; k += N) {
      const int64_t m = row - k;
      const Vec<A, N> scale = load<N>(affine.scale + k);
      const Vec<A, N> d = load_first<N>(x + k, m) - load<N>(affine.mean + k);
      const Vec<A, N> z = d * scale + load<N>(affine.bias + k);
      const Vec<A, N> g = gradient<N>(f, load_first<N>(grad + k, m), z);
      store_first<N>(out + k, scale * g - load<N>(offset + k) - d * load<N>(slope + k), m);
    }
  }
}

}  // namespace ops::cpu::OPS_ISA
