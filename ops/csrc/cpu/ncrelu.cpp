#include "ncrelu.h"

#define OPS_KERNELS "ncrelu_kernels.h"
#include "for_each_isa.h"

namespace ops::cpu {
namespace {

constexpr int64_t kGrain = 32768;  // elements: less is not worth waking a thread for
constexpr int64_t kVector = 16;    // elements of the widest vector: a shorter row is a short one

struct Loops {
  template <typename T>
  static void forward(const Tensor&, HalvesLayout layout, const T* x, T* out) {
    const int64_t inner = layout.inner;
    if (inner < kVector) {
      short_rows(layout, [=](int64_t row, int64_t count) {
        OPS_CALL(ncrelu_short_rows(x + row * inner, out + 2 * row * inner, count, inner));
      });
    } else {
      stretches(layout, [=](int64_t row, int64_t start, int64_t count) {
        T* positive = out + 2 * row * inner + start;
        OPS_CALL(ncrelu_stretch(x + row * inner + start, positive, positive + inner, count));
      });
    }
  }

  template <typename T>
  static void backward(const Tensor&, HalvesLayout layout, const T* grad, const T* x, T* out) {
    const int64_t inner = layout.inner;
    if (inner < kVector) {
      short_rows(layout, [=](int64_t row, int64_t count) {
        OPS_CALL(ncrelu_backward_short_rows(x + row * inner, grad + 2 * row * inner,
                                            out + row * inner, count, inner));
      });
    } else {
      stretches(layout, [=](int64_t row, int64_t start, int64_t count) {
        const T* positive = grad + 2 * row * inner + start;
        const int64_t at = row * inner + start;
        OPS_CALL(ncrelu_backward_stretch(x + at, positive, positive + inner, out + at, count));
      });
    }
  }

 private:
  // Calls f(row, count) for groups of rows that together cover all.
  template <typename F>
  static void short_rows(HalvesLayout layout, const F& f) {
    torch::stable::parallel_for(0, layout.outer, kGrain / layout.inner,
                                [&](int64_t begin, int64_t end) { f(begin, end - begin); });
  }

  // Calls f(row, start, count) for stretches of rows that together cover all
  // elements, each at least a vector long: threads share rows in whole vectors.
  template <typename F>
  static void stretches(HalvesLayout layout, const F& f) {
    const int64_t pieces = layout.inner / kVector;  // of a row; the last takes what is left over
    torch::stable::parallel_for(
        0, layout.outer * pieces, kGrain / kVector, [&](int64_t begin, int64_t end) {
          while (begin < end) {
            const int64_t row = begin / pieces;
            const int64_t first = begin % pieces;
            const int64_t last = std::min(pieces, first + end - begin);
            const int64_t stop = last == pieces ? layout.inner : last * kVector;
            f(row, first * kVector, stop - first * kVector);
            begin += last - first;
          }
        });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def("ncrelu(Tensor input, int dim) -> Tensor");
  m.def("ncrelu_backward(Tensor grad_output, Tensor input, int dim) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  m.impl("ncrelu", TORCH_BOX(&ncrelu<Loops>));
  m.impl("ncrelu_backward", TORCH_BOX(&ncrelu_backward<Loops>));
}

}  // namespace ops::cpu
