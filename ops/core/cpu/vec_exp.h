// Vectorised exp, accurate to 1 ULP, and sigmoid. No include guard: see dispatch_isa.h.

namespace ops::cpu::OPS_ISA {

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

// Return 2^n, given n + shifter.
template <typename A, int N>
inline Vec<A, N> power_of_two(Vec<A, N> shifted) {
  using E = ExpTerms<A>;
  return bit_cast<Vec<A, N>>((bit_cast<Vec<bits_t<A>, N>>(shifted) + E::bias) << E::mantissa);
}

// Return e^x. NaN propagates; small results are denormal before they underflow to 0.
template <typename A, int N>
inline Vec<A, N> exp(Vec<A, N> x) {
  using E = ExpTerms<A>;
  x = clamp<A, N>(x, E::low, E::high);
  const Vec<A, N> n = (x * E::per_ln2 + E::shifter) - E::shifter;
  const Vec<A, N> r = (x - n * E::ln2) - n * E::ln2_rest;
  const Vec<A, N> q = polynomial<A, N>(E::q, r);
  const Vec<A, N> power = (q * r * r + r) + A(1);
  // 2^n as two factors: at the limits n exceeds the exponent range.
  const Vec<A, N> half = n * A(0.5) + E::shifter;
  const Vec<A, N> rest = (n - (half - E::shifter)) + E::shifter;
  return power * power_of_two<A, N>(half) * power_of_two<A, N>(rest);
}

// exp(x) and exp(x) − 1 for x ≤ 0, both without cancellation: 2^n + 2^n (e^r − 1).
// Propagates NaN. Constructors are always_inline: GCC passes vectors to calls in memory.
template <typename A, int N>
struct Exponential {
  Vec<A, N> exp, minus_one;

  [[gnu::always_inline]] explicit Exponential(Vec<A, N> x) {
    using E = ExpTerms<A>;
    constexpr A least = -(E::bias + A(0.25)) * E::ln2;  // n = −bias: 2^n is 0
    x = x < least ? broadcast<A, N>(least) : x;
    const Vec<A, N> shifted = x * E::per_ln2 + E::shifter;
    const Vec<A, N> n = shifted - E::shifter;
    const Vec<A, N> r = (x - n * E::ln2) - n * E::ln2_rest;
    const Vec<A, N> q = polynomial<A, N>(E::q, r);
    const Vec<A, N> power = power_of_two<A, N>(shifted);
    const Vec<A, N> rest = power * (q * r * r + r);
    exp = power + rest;
    minus_one = (power - A(1)) + rest;
  }
};

// σ(x) and σ(x) (1 − σ(x)).
template <typename A, int N>
struct Sigmoid {
  Vec<A, N> value, slope;

  [[gnu::always_inline]] explicit Sigmoid(Vec<A, N> x) {
    const Vec<A, N> e = Exponential<A, N>(x < 0 ? x : -x).exp;
    const Vec<A, N> inverse = A(1) / (e + A(1));
    const Vec<A, N> small = e * inverse;
    value = x < 0 ? small : inverse;
    slope = small * inverse;
  }
};

}  // namespace ops::cpu::OPS_ISA
