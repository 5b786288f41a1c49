// Elementwise step of the LLTM after the matrix products: forward and backward.
// No include guard: compiled for each instruction set (cpu_kernels.h) and for CUDA (cuda/step.cuh).
// V is a number or vector; Exponential and the position `at`, which loads and stores V, are theirs.
//
//   saved [N, 4S]: a row                                                   h [N, S]
//   ┌─────────┬─────────┬─────────┬─────────┐   bias, σ, elu, tanh         ┌─────────┐
//   │ input   │ output  │candidate│ cell    │ ───────────────────────────► │ h       │
//   └─────────┴─────────┴─────────┴─────────┘                              └─────────┘

// Activations and their derivatives, without cancellation.

template <typename V>
struct Sigmoid {
  V value, slope;

  OPS_FORMULA explicit Sigmoid(V x) {
    const V e = Exponential<V>(x < 0 ? x : -x).exp;
    const V inverse = 1 / (e + 1), small = e * inverse;
    value = x < 0 ? small : inverse;
    slope = small * inverse;
  }
};

template <typename V>
struct Elu {
  V value, slope;

  OPS_FORMULA explicit Elu(V x) {
    const Exponential<V> e(x > 0 ? V{} : x);
    value = x > 0 ? x : e.minus_one;
    slope = e.exp;  // 1 where x > 0
  }
};

template <typename V>
struct Tanh {
  V value, slope;

  OPS_FORMULA explicit Tanh(V x) {
    const Exponential<V> e((x < 0 ? x : -x) * 2);
    const V inverse = 1 / (e.minus_one + 2);
    const V size = e.minus_one * inverse;  // −tanh |x|
    value = x < 0 ? size : -size;
    slope = e.exp * inverse * inverse * 4;
  }
};

template <typename T, typename At>
OPS_FORMULA auto load_or_zero(const T* values, int64_t offset, const At& at) {
  using V = decltype(at.load(values));
  return values ? at.load(values + offset) : V{};
}

// Return a gate before its activation: 0 input, 1 output, 2 candidate.
template <typename Step, typename At>
OPS_FORMULA auto gate_of(const Step& s, const At& at, int gate) {
  return at.load(s.saved + at.saved(gate)) + load_or_zero(s.bias, gate * at.state + at.column, at);
}

template <typename T, typename O, typename At>
OPS_FORMULA void run(const Forward<T, O>& s, const At& at) {
  for (int gate = 0; s.recurrent && gate < 3; ++gate) {
    acc_t<T>* product = s.saved + at.saved(gate);
    at.store(product, at.load(product) + at.load(s.recurrent + at.gate(gate)));
  }
  const Sigmoid in(gate_of(s, at, 0)), out(gate_of(s, at, 1));
  const auto old_cell =
      s.first_cell ? at.load(s.first_cell + at.state_offset()) : at.load(s.before + at.saved(3));
  const auto cell = old_cell + Elu(gate_of(s, at, 2)).value * in.value;
  const auto h = Tanh(cell).value * out.value;
  T* new_h = s.new_h + at.state_offset();
  at.store(s.saved + at.saved(3), cell);
  at.store(new_h, h);
  if (s.last_cell) {
    at.store(s.last_cell + at.state_offset(), cell);
  }
  if (s.last_h) {
    at.store(s.last_h + at.state_offset(), h);
  }
  if (s.operand) {  // rounded to the dtype of new_h
    at.store(s.operand + at.state_offset(), at.load(new_h));
  }
}

template <typename T, typename O, typename At>
OPS_FORMULA void run(const Backward<T, O>& s, const At& at) {
  const Sigmoid in(gate_of(s, at, 0)), out(gate_of(s, at, 1));
  const Elu candidate(gate_of(s, at, 2));
  const Tanh cell(at.load(s.saved + at.saved(3)));
  const int64_t i = at.state_offset();
  const auto grad_h = load_or_zero(s.grad_h, i, at) + load_or_zero(s.grad_output, i, at);
  const auto grad_cell = load_or_zero(s.grad_cell, i, at) + grad_h * out.value * cell.slope;
  if (s.grad_old_cell) {
    at.store(s.grad_old_cell + i, grad_cell);
  }
  if (s.grad_gates) {
    at.store(s.grad_gates + at.gate(0), grad_cell * candidate.value * in.slope);
    at.store(s.grad_gates + at.gate(1), grad_h * cell.value * out.slope);
    at.store(s.grad_gates + at.gate(2), grad_cell * in.value * candidate.slope);
  }
}
