// A step of the LLTM on vectors. No include guard: see core/cpu/dispatch_isa.h.

#include "core/cpu/vec_exp.h"

namespace ops::cpu::OPS_ISA {

// These are inlined by order: of so many copies GCC would make calls, with vectors in memory.

// exp(x) and exp(x) − 1 for x ≤ 0, each to its own last digits: 2^n + 2^n (e^r − 1), see
// core/cpu/vec_exp.h. A NaN stays one.
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

// elu(x) and elu'(x).
template <typename A, int N>
struct Elu {
  Vec<A, N> value, slope;

  [[gnu::always_inline]] explicit Elu(Vec<A, N> x) {
    const Exponential<A, N> e(x > 0 ? Vec<A, N>{} : x);
    value = x > 0 ? x : e.minus_one;
    slope = e.exp;  // 1 where x > 0
  }
};

// tanh(x) and tanh'(x) = 1 − tanh²(x).
template <typename A, int N>
struct Tanh {
  Vec<A, N> value, slope;

  [[gnu::always_inline]] explicit Tanh(Vec<A, N> x) {
    const Exponential<A, N> e((x < 0 ? x : -x) * A(2));
    const Vec<A, N> inverse = A(1) / (e.minus_one + A(2));
    const Vec<A, N> size = e.minus_one * inverse;  // −tanh |x|
    value = x < 0 ? size : -size;
    slope = e.exp * inverse * inverse * A(4);
  }
};

// N elements, or the first n of them.
template <bool kWhole, int N, typename T>
inline Vec<acc_t<T>, N> read(const T* p, int64_t n) {
  return kWhole ? load<N>(p) : load_some<N>(p, n);
}

template <bool kWhole, int N, typename T>
inline void write(T* p, Vec<acc_t<T>, N> v, int64_t n) {
  if (kWhole) {
    store<N>(p, v);
  } else {
    store_some<N>(p, v, n);
  }
}

template <bool kWhole, int N, typename T>
inline Vec<acc_t<T>, N> read(const LltmValues<T>& values, int64_t i, int64_t n) {
  return values.outside   ? read<kWhole, N>(values.outside + i, n)
         : values.carried ? read<kWhole, N>(values.carried + i, n)
                          : Vec<acc_t<T>, N>{};
}

template <bool kWhole, int N, typename T>
inline void write(const LltmResult<T>& result, int64_t i, Vec<acc_t<T>, N> v, int64_t n) {
  if (result.outside) {
    write<kWhole, N>(result.outside + i, v, n);
  } else if (result.carried) {
    write<kWhole, N>(result.carried + i, v, n);
  }
}

// N features of a row from `column` on, or the first n of them.
struct LltmPlace {
  int64_t state, row, column, n;

  int64_t in_state() const { return row * state + column; }
  int64_t in_gates() const { return 3 * row * state + column; }
};

// A gate before its function; they are counted input, output, candidate.
template <bool kWhole, int N, typename Step>
inline auto read_gate(const Step& s, const LltmPlace& at, int gate) {
  const int64_t before = gate * at.state;
  const auto x = read<kWhole, N>(s.products + at.in_gates() + before, at.n);
  return s.bias ? x + read<kWhole, N>(s.bias + at.column + before, at.n) : x;
}

template <bool kWhole, int N, typename T, typename O>
[[gnu::always_inline]] inline void step(const LltmForward<T, O>& s, const LltmPlace& at) {
  using A = acc_t<T>;
  const int64_t i = at.in_state(), n = at.n;
  const Sigmoid<A, N> in(read_gate<kWhole, N>(s, at, 0));
  const Elu<A, N> candidate(read_gate<kWhole, N>(s, at, 2));
  const Vec<A, N> cell = read<kWhole, N>(s.old_cell, i, n) + candidate.value * in.value;
  write<kWhole, N>(s.new_cell, i, cell, n);
  if (!s.new_h) {
    return;
  }
  const Sigmoid<A, N> out(read_gate<kWhole, N>(s, at, 1));
  const Vec<A, N> h = Tanh<A, N>(cell).value * out.value;
  write<kWhole, N>(s.new_h + i, h, n);
  if (s.last_h) {
    write<kWhole, N>(s.last_h + i, h, n);
  }
  if (s.factor) {  // as it is rounded in new_h
    write<kWhole, N>(s.factor + i, read<kWhole, N>(s.new_h + i, n), n);
  }
}

template <bool kWhole, int N, typename T, typename O>
[[gnu::always_inline]] inline void step(const LltmBackward<T, O>& s, const LltmPlace& at) {
  using A = acc_t<T>;
  const int64_t i = at.in_state(), n = at.n;
  const Sigmoid<A, N> in(read_gate<kWhole, N>(s, at, 0)), out(read_gate<kWhole, N>(s, at, 1));
  const Elu<A, N> candidate(read_gate<kWhole, N>(s, at, 2));
  const Tanh<A, N> cell(read<kWhole, N>(s.old_cell, i, n) + candidate.value * in.value);
  Vec<A, N> grad_h = read<kWhole, N>(s.grad_h, i, n);
  if (s.grad_output) {
    grad_h = grad_h + read<kWhole, N>(s.grad_output + i, n);
  }
  const Vec<A, N> grad_cell = read<kWhole, N>(s.grad_cell, i, n) + grad_h * out.value * cell.slope;
  write<kWhole, N>(s.grad_old_cell, i, grad_cell, n);
  if (s.grad_gates) {
    O* grad = s.grad_gates + at.in_gates();
    write<kWhole, N>(grad, grad_cell * candidate.value * in.slope, n);
    write<kWhole, N>(grad + at.state, grad_h * cell.value * out.slope, n);
    write<kWhole, N>(grad + 2 * at.state, grad_cell * in.value * candidate.slope, n);
  }
}

// A step, forward or backward, for the rows [begin, end).
template <typename T, typename Step>
void lltm_rows(const Step& s, int64_t state, int64_t begin, int64_t end) {
  constexpr int N = kLanes<acc_t<T>>;
  for (int64_t row = begin; row < end; ++row) {
    int64_t column = 0;
    for (; column + N <= state; column += N) {
      step<true, N>(s, {state, row, column, N});
    }
    if (column < state) {
      step<false, N>(s, {state, row, column, state - column});
    }
  }
}

// sums[j] = Σ x[i, j] over the rows, for columns [begin, end). Blocks of rows are added up first:
// the order, and so the result, does not depend on the range.
template <typename A>
void sum_rows(const A* x, int64_t count, int64_t columns, int64_t begin, int64_t end, A* sums) {
  constexpr int N = kLanes<A>;
  constexpr int64_t kBlock = 64;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t last = count - first < kBlock ? count : first + kBlock;
    for (int64_t column = begin; column < end; column += N) {
      const int64_t n = end - column < N ? end - column : N;
      Vec<A, N> total{};
      for (int64_t row = first; row < last; ++row) {
        const A* p = x + row * columns + column;
        total = total + (n == N ? load<N>(p) : load_some<N>(p, n));
      }
      if (first) {
        total = total + (n == N ? load<N>(sums + column) : load_some<N>(sums + column, n));
      }
      store_some<N>(sums + column, total, n);
    }
  }
}

}  // namespace ops::cpu::OPS_ISA
