#include "ncrelu.h"

#include <algorithm>

namespace ops::cpu {
namespace {

constexpr int64_t kGrain = 16384;  // elements: less is not worth waking a thread for

struct Loops {
  template <typename T>
  static void forward(const Tensor&, HalvesLayout layout, const T* x, T* out) {
    rows(layout, [=](int64_t row, int64_t begin, int64_t end) {
      const T* in = x + row * layout.inner;
      T* positive = out + 2 * row * layout.inner;
      T* negative = positive + layout.inner;
      for (int64_t i = begin; i < end; ++i) {
        const acc_t<T> value = in[i];
        positive[i] = static_cast<T>(positive_part(value));
        negative[i] = static_cast<T>(negative_part(value));
      }
    });
  }

  template <typename T>
  static void backward(const Tensor&, HalvesLayout layout, const T* grad, const T* x, T* out) {
    rows(layout, [=](int64_t row, int64_t begin, int64_t end) {
      const T* in = x + row * layout.inner;
      const T* positive = grad + 2 * row * layout.inner;
      const T* negative = positive + layout.inner;
      for (int64_t i = begin; i < end; ++i) {
        out[row * layout.inner + i] = ncrelu_gradient<T>(in[i], positive[i], negative[i]);
      }
    });
  }

 private:
  // Calls f(row, begin, end) for stretches of rows that together cover all elements.
  template <typename F>
  static void rows(HalvesLayout layout, const F& f) {
    torch::stable::parallel_for(
        0, layout.outer * layout.inner, kGrain, [&](int64_t begin, int64_t end) {
          while (begin < end) {
            const int64_t row = begin / layout.inner;
            const int64_t start = begin % layout.inner;
            const int64_t stop = std::min(layout.inner, start + end - begin);
            f(row, start, stop);
            begin += stop - start;
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
