// Vectorised exp(x) − 1 and sigmoid. No include guard: see dispatch_isa.h.

namespace ops::cpu::OPS_ISA {

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
    const Vec<A, N> q = polynomial<E>(Simd<A, N>(r)).lanes;
    const Vec<A, N> power = power_of_two<E>(Simd<A, N>(shifted)).lanes;
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
