// Vector kernels of an LLTM step. No include guard: see core/cpu/dispatch_isa.h.
//
//   products [N, 3S]: a row               lanes: adjacent features        state [N, S]
//   ┌─────────┬─────────┬─────────┐       σ, elu, tanh in registers       ┌─────────┐
//   │ input   │ output  │candidate│ ────────────────────────────────────► │ cell, h │
//   └─────────┴─────────┴─────────┘                                       └─────────┘
//
//   thread:  a range of rows of the batch

#include "core/cpu/vec_exp.h"

namespace ops::cpu::OPS_ISA {

// always_inline: GCC would otherwise call these functions and pass vectors in memory.

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

template <int N, typename T>
inline Vec<acc_t<T>, N> read(const StateInput<T>& values, int64_t i, int64_t n) {
  return values.tensor    ? load_first<N>(values.tensor + i, n)
         : values.carried ? load_first<N>(values.carried + i, n)
                          : Vec<acc_t<T>, N>{};
}

template <int N, typename T>
inline void write(const StateOutput<T>& result, int64_t i, Vec<acc_t<T>, N> v, int64_t n) {
  if (result.tensor) {
    store_first<N>(result.tensor + i, v, n);
  } else if (result.carried) {
    store_first<N>(result.carried + i, v, n);
  }
}

// N features of a row from `column` on, of which min(n, N) exist.
struct VectorPosition {
  int64_t state, row, column, n;

  int64_t state_offset() const { return row * state + column; }
  int64_t gates_offset() const { return 3 * row * state + column; }
};

// Return a gate before its activation: 0 input, 1 output, 2 candidate.
template <int N, typename Step>
inline auto read_gate(const Step& s, const VectorPosition& at, int gate) {
  const int64_t before = gate * at.state;
  const auto x = load_first<N>(s.products + at.gates_offset() + before, at.n);
  return s.bias ? x + load_first<N>(s.bias + at.column + before, at.n) : x;
}

template <int N, typename T, typename O>
[[gnu::always_inline]] inline void run(const LltmForward<T, O>& s, const LltmSizes& sizes,
                                       const VectorPosition& at) {
  using A = acc_t<T>;
  const int64_t i = at.state_offset(), n = at.n;
  const Sigmoid<A, N> in(read_gate<N>(s, at, 0)), out(read_gate<N>(s, at, 1));
  const Vec<A, N> cell =
      read<N>(s.old_cell, i, n) + Elu<A, N>(read_gate<N>(s, at, 2)).value * in.value;
  const Vec<A, N> h = Tanh<A, N>(cell).value * out.value;
  write<N>(s.new_cell, i, cell, n);
  store_first<N>(s.new_h + i, h, n);
  if (s.last_h) {
    store_first<N>(s.last_h + i, h, n);
  }
  if (s.operand) {  // rounded to the dtype of new_h
    store_first<N>(s.operand + i, load_first<N>(s.new_h + i, n), n);
  }
}

template <int N, typename T, typename O>
[[gnu::always_inline]] inline void run(const LltmBackward<T, O>& s, const LltmSizes& sizes,
                                       const VectorPosition& at) {
  using A = acc_t<T>;
  const int64_t i = at.state_offset(), n = at.n;
  const Sigmoid<A, N> in(read_gate<N>(s, at, 0)), out(read_gate<N>(s, at, 1));
  const Elu<A, N> candidate(read_gate<N>(s, at, 2));
  const Tanh<A, N> cell(read<N>(s.old_cell, i, n) + candidate.value * in.value);
  Vec<A, N> grad_h = read<N>(s.grad_h, i, n);
  if (s.grad_output) {
    grad_h = grad_h + load_first<N>(s.grad_output + i, n);
  }
  const Vec<A, N> grad_cell = read<N>(s.grad_cell, i, n) + grad_h * out.value * cell.slope;
  write<N>(s.grad_old_cell, i, grad_cell, n);
  if (s.grad_gates) {
    O* grad = s.grad_gates + at.gates_offset();
    store_first<N>(grad, grad_cell * candidate.value * in.slope, n);
    store_first<N>(grad + at.state, grad_h * cell.value * out.slope, n);
    store_first<N>(grad + 2 * at.state, grad_cell * in.value * candidate.slope, n);
  }
}

template <int N, typename T>
[[gnu::always_inline]] inline void run(LltmScan<T> s, const LltmSizes& sizes,
                                       const VectorPosition& at) {
  using A = acc_t<T>;
  const int64_t elements = sizes.batch * sizes.state;
  Vec<A, N> cell = load_first<N>(s.first_cell + at.state_offset(), at.n);
  for (int64_t t = 0; t < sizes.steps - 1; ++t) {
    const Sigmoid<A, N> in(read_gate<N>(s, at, 0));
    cell = cell + Elu<A, N>(read_gate<N>(s, at, 2)).value * in.value;
    store_first<N>(s.cells + at.state_offset(), cell, at.n);
    s.products += 3 * elements;
    s.cells += elements;
  }
}

// Run a forward step, a backward step or a scan for rows [begin, end).
template <typename Step>
void lltm_rows(const Step& s, const LltmSizes& sizes, int64_t begin, int64_t end) {
  constexpr int N = kLanes<typename Step::A>;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t column = 0; column < sizes.state; column += N) {
      run<N>(s, sizes, {sizes.state, row, column, sizes.state - column});
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

}  // namespace ops::cpu::OPS_ISA
