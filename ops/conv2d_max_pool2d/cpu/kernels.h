// SIMD kernels of the gradients; layouts in plan.h. No include guard: see core/cpu/dispatch_isa.h.

namespace ops::cpu::OPS_ISA {

// Vectors of at most 256 bits: rows are unaligned, and nearly every 512-bit access would cross a
// cache line. kTapVectors: number of accumulators.
constexpr int kTapLanes = OPS_VECTOR_BYTES < 32 ? 4 : 8;
constexpr int kTapVectors = OPS_VECTOR_BYTES == 64 ? 24 : OPS_VECTOR_BYTES == 32 ? 12 : 16;

// target[row][lane] += Σ factor · source[offset + row][lane] over the terms.
template <int VECTORS>
struct Gather {
  template <int ROWS>
  static void run(const Term* terms, const Term* end, const float* source, int64_t source_row,
                  float* target, int64_t target_row) {
    constexpr int N = kTapLanes;
    Vec<float, N> sum[ROWS][VECTORS] = {};
    for (; terms != end; ++terms) {
      const float* from = source + terms->offset;
      OPS_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        OPS_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
          sum[r][v] += terms->factor * load<N>(from + r * source_row + v * N);
        }
      }
    }
    OPS_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      OPS_UNROLL
      for (int v = 0; v < VECTORS; ++v) {
        float* to = target + r * target_row + v * N;
        store<N>(to, load<N>(to) + sum[r][v]);
      }
    }
  }
};

// target[offset + row][lane] += factor · source[row][lane] for each term.
template <int VECTORS>
struct Scatter {
  template <int ROWS>
  static void run(const Term* terms, const Term* end, const float* source, int64_t source_row,
                  float* target, int64_t target_row) {
    constexpr int N = kTapLanes;
    Vec<float, N> x[ROWS][VECTORS];
    OPS_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      OPS_UNROLL
      for (int v = 0; v < VECTORS; ++v) {
        x[r][v] = load<N>(source + r * source_row + v * N);
      }
    }
    for (; terms != end; ++terms) {
      OPS_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        OPS_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
          float* to = target + terms->offset + r * target_row + v * N;
          store<N>(to, load<N>(to) + terms->factor * x[r][v]);
        }
      }
    }
  }
};

// Run Kernel on `rows` rows, as many at a time as fit in registers.
template <template <int> class Kernel>
struct EachRow {
  template <int VECTORS>
  static void run(int64_t rows, const Term* terms, const Term* end, const float* source,
                  int64_t source_row, float* target, int64_t target_row) {
    constexpr int at_once = kTapVectors / VECTORS < 7 ? kTapVectors / VECTORS : 7;
    for (int64_t r = 0; r < rows; r += at_once) {
      kernel_of<Kernel<VECTORS>, at_once>(rows - r)(terms, end, source + r * source_row, source_row,
                                                    target + r * target_row, target_row);
    }
  }
};

// Add an image's gradients to grad_weight [co][kh][tap_row] (null: not needed) and grad_bias, and
// store its grad_input. `x` and `grad` are packed images, zero in the padding of `x`.
inline void backward_image(const GradientPlan& p, int64_t n, float* x, float* grad, Term* terms,
                           float* grad_weight, float* grad_bias) {
  const auto gather = kernel_of<EachRow<Gather>, kMaxTapRow / kTapLanes>(p.tap_row / kTapLanes);
  const auto scatter = kernel_of<EachRow<Scatter>, kMaxTapRow / kTapLanes>(p.tap_row / kTapLanes);
  // Call copy(offset in the image, offset in the packed image) for each row of pixels.
  const auto each_row = [&](const auto& copy) {
    for (int64_t c = 0; c < (p.channels_last ? 1 : p.in_c); ++c) {
      for (int64_t h = 0; h < p.conv.h; ++h) {
        copy(n * p.image.n + c * p.image.c + h * p.image.h, p.padding + h * p.row + c);
      }
    }
  };
  const size_t row_bytes = p.conv.w * p.in_c * sizeof(float);
  if (grad_weight) {
    each_row([&](int64_t from, int64_t to) {
      if (p.channels_last) {
        __builtin_memcpy(x + to, p.x + from, row_bytes);
        return;
      }
      for (int64_t w = 0; w < p.conv.w; ++w) {
        x[to + w * p.in_c] = p.x[from + w];
      }
    });
  }
  if (p.grad_input) {
    __builtin_memset(grad, 0, p.packed_size() * sizeof(float));
  }
  const PooledPixel* windows = p.windows.data();
  const int64_t window_count = p.windows.size();
  const int32_t* taps = p.taps.data();
  for (int64_t c = 0; c < p.out_c; ++c) {
    const int64_t plane = n * p.pooled.n + c * p.pooled.c;
    Term* end = terms;
    float sum = 0;
    for (int64_t i = 0; i < window_count; ++i) {
      const int64_t at = plane + windows[i].source;
      const int32_t tap = taps[p.indices[at]];
      const float factor = tap < 0 ? 0 : p.grad[at];
      *end = {factor, windows[i].offset + tap};
      end += (bit_cast<uint32_t>(factor) << 1) != 0;  // no branch; NaN is a term
      sum += factor;
    }
    grad_bias[c] += sum;
    if (grad_weight) {
      gather(p.conv.kernel_h, terms, end, x, p.row, grad_weight + c * p.filter(), p.tap_row);
    }
    const float* weight = p.weight + c * p.filter();
    if (p.grad_input && sum - sum == 0) {
      scatter(p.conv.kernel_h, terms, end, weight, p.tap_row, grad, p.row);
    } else if (p.grad_input) {  // an infinite factor times the padding of `weight` is NaN
      for (const Term* term = terms; term != end; ++term) {
        for (int64_t r = 0; r < p.conv.kernel_h; ++r) {
          for (int64_t i = 0; i < p.conv.kernel_w * p.in_c; ++i) {
            grad[term->offset + r * p.row + i] += term->factor * weight[r * p.tap_row + i];
          }
        }
      }
    }
  }
  if (p.grad_input) {
    each_row([&](int64_t to, int64_t from) {
      if (p.channels_last) {
        __builtin_memcpy(p.grad_input + to, grad + from, row_bytes);
        return;
      }
      for (int64_t w = 0; w < p.conv.w; ++w) {
        p.grad_input[to + w] = grad[from + w * p.in_c];
      }
    });
  }
}

}  // namespace ops::cpu::OPS_ISA
