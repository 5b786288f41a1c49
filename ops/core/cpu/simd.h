// A SIMD vector with the operators of a floating-point number: a formula over T takes both.
//
// All functions are inlined into the kernel that calls them, and compiled for its instruction set
// (see dispatch_isa.h). Only `clamp` has a special case, for AVX.
#pragma once

#include <iterator>

#include "core/dtype.h"

#if defined(__x86_64__)
#include <immintrin.h>  // declares the builtin functions, too
#endif

namespace ops::cpu {

template <typename A, int N>
struct vector_of {
  typedef A type __attribute__((vector_size(N * sizeof(A))));
};
template <typename A, int N>
using Vec = typename vector_of<A, N>::type;

template <typename A, int N>
struct Simd {
  using Lanes = Vec<A, N>;
  using Mask = decltype(Lanes{} < Lanes{});  // integers as wide as A

  Lanes lanes;

  Simd() = default;
  OPS_FORMULA Simd(Lanes x) : lanes(x) {}
  OPS_FORMULA Simd(A x) : lanes(x - Lanes{}) {}  // of a constant: others pass through memory

  OPS_FORMULA friend Simd operator-(Simd a) { return -a.lanes; }
  OPS_FORMULA friend Simd operator+(Simd a, Simd b) { return a.lanes + b.lanes; }
  OPS_FORMULA friend Simd operator-(Simd a, Simd b) { return a.lanes - b.lanes; }
  OPS_FORMULA friend Simd operator*(Simd a, Simd b) { return a.lanes * b.lanes; }
  OPS_FORMULA friend Simd operator/(Simd a, Simd b) { return a.lanes / b.lanes; }
  OPS_FORMULA friend Mask operator<(Simd a, Simd b) { return a.lanes < b.lanes; }
  OPS_FORMULA friend Mask operator>(Simd a, Simd b) { return a.lanes > b.lanes; }
  OPS_FORMULA friend Mask operator<=(Simd a, Simd b) { return a.lanes <= b.lanes; }
  OPS_FORMULA friend Mask operator>=(Simd a, Simd b) { return a.lanes >= b.lanes; }

  // Clamp x to [low, high]; NaN propagates.
  OPS_FORMULA friend Simd clamp(Simd x, Simd low, Simd high) {
#if defined(__x86_64__) && !defined(__clang__)
    if constexpr (sizeof(Lanes) == 32 && sizeof(A) == 4) {  // GCC compares and blends otherwise
      // min and max return the second operand if either is NaN.
      return __builtin_ia32_minps256(high.lanes, __builtin_ia32_maxps256(low.lanes, x.lanes));
    }
#endif
    x = select(x < low, low, x);
    return select(x > high, high, x);
  }

  // Return a where the mask is set, else b.
  OPS_FORMULA friend Simd select(Mask mask, Simd a, Simd b) { return mask ? a.lanes : b.lanes; }
};

// e^x = 2^n e^r with n = round(x / ln 2) and |r| ≤ ln 2 / 2. e^r = 1 + r + r² q(r), where q is a
// Chebyshev interpolation on that interval. Cody-Waite: ln 2 is split so that n · ln2 is exact.
// Adding `shifter` rounds to n and leaves n in the low mantissa bits. x is clamped to [low, high]:
// e^x is 0 below and infinite above.
template <typename A>
struct ExpTerms;

template <>
struct ExpTerms<float> {
  static constexpr float per_ln2 = 0x1.715476p+0f, ln2 = 0x1.62e4p-1f, ln2_rest = 0x1.7f7d1cp-20f;
  static constexpr float shifter = 0x1.8p+23f;
  static constexpr float low = -104.f, high = 89.f;
  static constexpr int mantissa = 23, bias = 127;
  static constexpr float q[] = {0.5f, 0.16666576f, 0.041666552f, 0.008363233f, 0.001392625f};
};

template <>
struct ExpTerms<double> {
  static constexpr double per_ln2 = 0x1.71547652b82fep+0, ln2 = 0x1.62e42fefap-1;
  static constexpr double ln2_rest = 0x1.cf79abc9e3b3ap-40;
  static constexpr double shifter = 0x1.8p+52;
  static constexpr double low = -746.0, high = 710.0;
  static constexpr int64_t mantissa = 52, bias = 1023;
  static constexpr double q[] = {
      0x1.0000000000001p-1,  0x1.5555555555556p-3,  0x1.5555555553d37p-5,  0x1.11111111109a6p-7,
      0x1.6c16c1789d1d7p-10, 0x1.a01a01a7cebcdp-13, 0x1.a019b8ca26fcfp-16, 0x1.71de0d85293b8p-19,
      0x1.2891d4ffbb0f9p-22, 0x1.af390ba7e6f47p-26};
};

// Return 2^(n + E::bias − B), where B is the exponent bias of A, given n + shifter.
template <typename E, typename A, int N>
OPS_FORMULA Simd<A, N> power_of_two(Simd<A, N> shifted) {
  using Bits = typename Simd<A, N>::Mask;
  return reinterpret_cast<typename Simd<A, N>::Lanes>(
      (reinterpret_cast<Bits>(shifted.lanes) + E::bias) << E::mantissa);
}

// Return Σ E::q[k] x^(k − FIRST) over k ≥ FIRST (Horner).
template <typename E, int FIRST = 0, typename T>
OPS_FORMULA T polynomial(T x) {
  if constexpr (FIRST + 1 < std::size(E::q)) {
    return polynomial<E, FIRST + 1>(x) * x + T(E::q[FIRST]);
  } else {
    return E::q[FIRST];
  }
}

// Return e^x, accurate to 1 ULP. NaN propagates; small results are denormal before they underflow
// to 0.
template <typename A, int N>
OPS_FORMULA Simd<A, N> exp(Simd<A, N> x) {
  using T = Simd<A, N>;
  using E = ExpTerms<A>;
  x = clamp(x, T(E::low), T(E::high));
  const T n = (x * E::per_ln2 + E::shifter) - E::shifter;
  const T r = (x - n * E::ln2) - n * E::ln2_rest;
  const T power = (polynomial<E>(r) * r * r + r) + A(1);
  // 2^n as two factors: at the limits n exceeds the exponent range.
  const T half = n * A(0.5) + E::shifter;
  const T rest = (n - (half - E::shifter)) + E::shifter;
  return power * power_of_two<E>(half) * power_of_two<E>(rest);
}

// e^y = 2^t = 2^n 2^r with t = y / ln 2, n = round(t), |r| ≤ 1/2. The bias makes 2^(n − 1) of n, so
// q is the polynomial of 2 · 2^r. At the limits of y, 2^(n − 1) is 0 and infinite.
struct FlushedExpTerms : ExpTerms<float> {
  static constexpr double low = -87.3, high = 89.3;  // t from −125.9 to 128.8
  static constexpr int bias = 126;
  static constexpr float q[] = {2.f,          1.3862944f,   0.48045295f,   0.11100665f,
                                0.019236874f, 0.002679775f, 0.00030706724f};
};

// Return e^(F x) for a std::ratio F. float: in fewer operations than exp(F x); NaN propagates,
// results below 2^−125.5 are 0.
template <typename F, int N>
OPS_FORMULA Simd<float, N> exp_of_multiple(Simd<float, N> x) {
  using T = Simd<float, N>;
  using E = FlushedExpTerms;
  constexpr double factor = static_cast<double>(F::num) / F::den;
  constexpr double per_ln2 = factor * ExpTerms<double>::per_ln2;
  constexpr float c = per_ln2, c_rest = per_ln2 - c;  // two terms make r exact
  constexpr float low = (factor < 0 ? E::high : E::low) / factor;
  constexpr float high = (factor < 0 ? E::low : E::high) / factor;
  x = clamp(x, T(low), T(high));
  const T shifted = x * c + E::shifter;
  const T n = shifted - E::shifter;
  const T r = x * c_rest + (x * c - n);
  return polynomial<E>(r) * power_of_two<E>(shifted);
}

template <typename F, int N>
OPS_FORMULA Simd<double, N> exp_of_multiple(Simd<double, N> x) {
  return exp(Simd<double, N>(static_cast<double>(F::num) / F::den) * x);
}

}  // namespace ops::cpu
