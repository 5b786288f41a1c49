// Vector kernels of an LLTM step. No include guard: see core/cpu/dispatch_isa.h.
//
//   thread:  a range of rows of the batch
//   lanes:   adjacent features

namespace ops::cpu::OPS_ISA::lltm {

using namespace ops::lltm;

// exp(x) and exp(x) − 1 for x ≤ 0, both without cancellation: 2^n + 2^n (e^r − 1). NaN propagates.
template <typename V>
struct Exponential {
  V exp, minus_one;

  OPS_FORMULA explicit Exponential(V x) {
    using A = std::decay_t<decltype(x[0])>;
    using E = ExpTerms<A>;
    using S = Simd<A, sizeof(V) / sizeof(A)>;
    constexpr A least = -(E::bias + A(0.25)) * E::ln2;  // n = −bias: 2^n is 0
    x = x < least ? least - V{} : x;
    const V shifted = x * E::per_ln2 + E::shifter;
    const V n = shifted - E::shifter;
    const V r = (x - n * E::ln2) - n * E::ln2_rest;
    const V power = power_of_two<E>(S(shifted)).lanes;
    const V rest = power * (polynomial<E>(S(r)).lanes * r * r + r);
    exp = power + rest;
    minus_one = (power - A(1)) + rest;
  }
};

// N features of a row, of which min(n, N) exist.
template <int N>
struct VectorPosition : Position {
  int64_t n;

  template <typename T>
  OPS_FORMULA Vec<acc_t<T>, N> load(const T* p) const {
    return load_first<N>(p, n);
  }
  template <typename T, typename V>
  OPS_FORMULA void store(T* p, V v) const {
    store_first<N>(p, v, n);
  }
};

#include "lltm/step.h"

// Run a forward or backward step for rows [begin, end).
template <typename Step>
void run_rows(const Step& s, const Sizes& sizes, int64_t begin, int64_t end) {
  constexpr int N = kLanes<typename Step::A>;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t column = 0; column < sizes.state; column += N) {
      run(s, VectorPosition<N>{{sizes.state, row, column}, sizes.state - column});
    }
  }
}

// sums[j] = Σ x[i, j] for columns [begin, end), in blocks of rows: the order of additions does not
// depend on the range.
template <typename A>
void sum_rows(const A* x, int64_t count, int64_t columns, int64_t begin, int64_t end, A* sums) {
  constexpr int N = kLanes<A>;
  constexpr int64_t kBlock = 64;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t last = count - first < kBlock ? count : first + kBlock;
    for (int64_t column = begin; column < end; column += N) {
      const int64_t n = end - column;
      Vec<A, N> total{};
      for (int64_t row = first; row < last; ++row) {
        total = total + load_first<N>(x + row * columns + column, n);
      }
      if (first) {
        total = total + load_first<N>(sums + column, n);
      }
      store_first<N>(sums + column, total, n);
    }
  }
}

}  // namespace ops::cpu::OPS_ISA::lltm
