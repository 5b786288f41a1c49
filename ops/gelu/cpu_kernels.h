// Vector kernels of gelu. No include guard: see core/cpu/dispatch_isa.h.

#include "core/cpu/elementwise_kernels.h"

namespace ops::cpu::OPS_ISA {

// Constants of exp(−1.702 x) = 2^t = 2^n 2^r with t = c x, n = round(t), |r| ≤ 1/2. Two terms of c
// make r exact. Adding `shifter` rounds t and leaves n in the low bits of the sum; shifted into the
// exponent they give 2^(n − 1), so the polynomial is 2 · 2^r. At the limits of x, 2^(n − 1) is
// infinite and 0.
template <typename A>
struct Exp;

template <>
struct Exp<float> {
  static constexpr float c = -0x1.3a4cbep+1f, c_rest = 0x1.c08ecap-26f;
  static constexpr float shifter = 0x1.8p+23f;
  static constexpr float least = -52.5f, most = 51.3f;  // t from 128.9 to −126
  static constexpr int mantissa = 23, bias = 126;
  static constexpr float polynomial[] = {2.f,          1.3862944f,   0.48045295f,   0.11100665f,
                                         0.019236874f, 0.002679775f, 0.00030706724f};
};

template <>
struct Exp<double> {
  static constexpr double c = -0x1.3a4cbdc7ee26bp+1, c_rest = -0x1.68797025e71e1p-54;
  static constexpr double shifter = 0x1.8p+52;
  static constexpr double least = -417.4, most = 416.2;  // t from 1024.9 to −1022
  static constexpr int64_t mantissa = 52, bias = 1022;
  static constexpr double polynomial[] = {
      // Taylor's
      0x1.0000000000000p+1,  0x1.62e42fefa39efp+0,  0x1.ebfbdff82c58fp-2,  0x1.c6b08d704a0c0p-4,
      0x1.3b2ab6fba4e77p-6,  0x1.5d87fe78a6731p-9,  0x1.430912f86c787p-12, 0x1.ffcbfc588b0c7p-16,
      0x1.62c0223a5c824p-19, 0x1.b5253d395e7c4p-23, 0x1.e4cf5158b8ecap-27, 0x1.e8cac7351bb25p-31,
      0x1.c3bd650fc2986p-35, 0x1.816193166d0f9p-39};
};

template <typename A, int N>
inline Vec<A, N> exp_minus(Vec<A, N> x) {
  using E = Exp<A>;
  using Bits = Vec<bits_t<A>, N>;
  x = clamp<A, N>(x, E::least, E::most);
  const Vec<A, N> shifted = x * E::c + E::shifter;
  const Vec<A, N> n = shifted - E::shifter;
  const Vec<A, N> r = x * E::c_rest + (x * E::c - n);
  const Bits exponent = bit_cast<Bits>(shifted) + E::bias;
  return polynomial<A, N>(E::polynomial, r) * bit_cast<Vec<A, N>>(exponent << E::mantissa);
}

template <>
struct OnVectors<GeluForward> {
  template <typename A, int N>
  static Vec<A, N> apply(Vec<A, N> x) {
    return x / (exp_minus<A, N>(x) + A(1));
  }
};

// With e = exp(−1.702 x): s = 1 / (1 + e), 1 − s = e s, without cancellation near s = 1.
template <>
struct OnVectors<GeluBackward> {
  template <typename A, int N>
  static Vec<A, N> apply(Vec<A, N> grad_output, Vec<A, N> x) {
    constexpr A largest = sizeof(A) == 8 ? A(0x1.fffffffffffffp+1023) : A(0x1.fffffep+127);
    const Vec<A, N> e = exp_minus<A, N>(x);
    const Vec<A, N> s = A(1) / (e + A(1));
    const Vec<A, N> rest = (e < largest ? e : broadcast<A, N>(largest)) * s;  // not ∞ · 0
    return grad_output * (s * (x * rest * A(1.702) + A(1)));
  }
};

}  // namespace ops::cpu::OPS_ISA
