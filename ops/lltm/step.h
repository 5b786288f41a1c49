// Elementwise step of the LLTM after the matrix products: forward, backward, scan over all steps.
// No include guard: compiled for each instruction set (cpu_kernels.h) and for CUDA (cuda/step.cuh),
// with their Exponential of a number or vector V, and position `at`, which loads and stores V.
//
//   products [N, 3S]: a row                                   state [N, S]
//   ┌─────────┬─────────┬─────────┐   bias, σ, elu, tanh      ┌─────────┐
//   │ input   │ output  │candidate│ ────────────────────────► │ cell, h │
//   └─────────┴─────────┴─────────┘                           └─────────┘

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
OPS_FORMULA auto read(const StateInput<T>& values, const At& at) {
  using V = decltype(at.load(values.tensor));
  const int64_t i = at.state_offset();
  return values.tensor    ? at.load(values.tensor + i)
         : values.carried ? at.load(values.carried + i)
                          : V{};
}

template <typename T, typename At, typename V>
OPS_FORMULA void write(const StateOutput<T>& result, const At& at, V value) {
  if (result.tensor) {
    at.store(result.tensor + at.state_offset(), value);
  } else if (result.carried) {
    at.store(result.carried + at.state_offset(), value);
  }
}

// Return the bias of a gate: 0 input, 1 output, 2 candidate.
template <typename Step, typename At>
OPS_FORMULA auto bias_of(const Step& s, const At& at, int gate) {
  using V = decltype(at.load(s.bias));
  return s.bias ? at.load(s.bias + gate * at.state + at.column) : V{};
}

// Return a gate before its activation.
template <typename Step, typename At>
OPS_FORMULA auto gate_of(const Step& s, const At& at, int gate) {
  return at.load(s.products + at.gates_offset() + gate * at.state) + bias_of(s, at, gate);
}

template <typename T, typename O, typename At>
OPS_FORMULA void run(const Forward<T, O>& s, const Sizes&, const At& at) {
  for (int gate = 0; s.recurrent && gate < 3; ++gate) {
    const int64_t i = at.gates_offset() + gate * at.state;
    at.store(s.products + i, at.load(s.products + i) + at.load(s.recurrent + i));
  }
  const Sigmoid in(gate_of(s, at, 0)), out(gate_of(s, at, 1));
  const auto cell = read(s.old_cell, at) + Elu(gate_of(s, at, 2)).value * in.value;
  const auto h = Tanh(cell).value * out.value;
  T* new_h = s.new_h + at.state_offset();
  write(s.new_cell, at, cell);
  at.store(new_h, h);
  if (s.last_h) {
    at.store(s.last_h + at.state_offset(), h);
  }
  if (s.operand) {  // rounded to the dtype of new_h
    at.store(s.operand + at.state_offset(), at.load(new_h));
  }
}

template <typename T, typename O, typename At>
OPS_FORMULA void run(const Backward<T, O>& s, const Sizes&, const At& at) {
  const Sigmoid in(gate_of(s, at, 0)), out(gate_of(s, at, 1));
  const Elu candidate(gate_of(s, at, 2));
  const Tanh cell(read(s.old_cell, at) + candidate.value * in.value);
  auto grad_h = read(s.grad_h, at);
  if (s.grad_output) {
    grad_h += at.load(s.grad_output + at.state_offset());
  }
  const auto grad_cell = read(s.grad_cell, at) + grad_h * out.value * cell.slope;
  write(s.grad_old_cell, at, grad_cell);
  if (s.grad_gates) {
    O* grad = s.grad_gates + at.gates_offset();
    at.store(grad, grad_cell * candidate.value * in.slope);
    at.store(grad + at.state, grad_h * cell.value * out.slope);
    at.store(grad + 2 * at.state, grad_cell * in.value * candidate.slope);
  }
}

// All steps in one call: elements are independent.
template <typename T, typename At>
OPS_FORMULA void run(const Scan<T>& s, const Sizes& sizes, const At& at) {
  const int64_t elements = sizes.batch * sizes.state;
  const auto input_bias = bias_of(s, at, 0), candidate_bias = bias_of(s, at, 2);
  const auto* products = s.products + at.gates_offset();
  auto cell = at.load(s.first_cell + at.state_offset());
#ifdef __CUDACC__
#pragma unroll 8
#endif
  for (int64_t t = 0; t < sizes.steps - 1; ++t) {
    const Sigmoid in(at.load_constant(products + 3 * t * elements) + input_bias);
    const auto candidate = at.load_constant(products + 3 * t * elements + 2 * at.state);
    cell += Elu(candidate + candidate_bias).value * in.value;
    at.store(s.cells + t * elements + at.state_offset(), cell);
  }
}
