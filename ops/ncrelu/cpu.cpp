// CPU ncrelu: ranges of rows over threads; kernels for long and short rows in cpu_kernels.h.
#include "core/cpu/parallel.h"
#include "ncrelu/op.h"

#define OPS_KERNELS "ncrelu/cpu_kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::cpu {
namespace {

constexpr int64_t kGrain = 32768;  // elements per thread, minimum
constexpr int64_t kBlock = 2048;   // elements that fit the L1 cache with their outputs
constexpr int64_t kVector = 16;    // elements of the widest vector; minimum of a long row

struct Loops {
  // `signs`: destination, or nullptr (as a type: no signs).
  template <typename T, typename Signs>
  static void forward(const Tensor&, HalvesLayout layout, const T* x, T* out, Signs signs) {
    const int64_t inner = layout.inner, block = round_up(kBlock, unit(inner));
    ranges(layout, [=](int64_t begin, int64_t end) {
      if (inner >= kVector && inner % kSignsPerByte == 0) {
        OPS_CALL(ncrelu_long_rows(x, out, signs, begin, end, inner));
        return;
      }
      // Rows whose signs are not whole bytes: second pass over a block in the L1 cache.
      for (int64_t stop; begin < end; begin = stop) {
        stop = std::min(begin + block, end);
        if (inner < kVector) {
          OPS_CALL(ncrelu_short_rows(x, out, begin, stop, inner));
        } else {
          OPS_CALL(ncrelu_long_rows(x, out, nullptr, begin, stop, inner));
        }
        if constexpr (std::is_pointer_v<Signs>) {
          OPS_CALL(ncrelu_signs(x, signs, begin, stop));
        }
      }
    });
  }

  // `source`: the input or its signs.
  template <typename T, typename Source>
  static void backward(const Tensor&, HalvesLayout layout, const T* grad, const Source* source,
                       T* out) {
    const int64_t inner = layout.inner;
    ranges(layout, [=](int64_t begin, int64_t end) {
      if (inner < kVector) {
        OPS_CALL(ncrelu_backward_short_rows(source, grad, out, begin, end, inner));
      } else {
        OPS_CALL(ncrelu_backward_long_rows(source, grad, out, begin, end, inner));
      }
    });
  }

 private:
  // Return the granularity of ranges (elements): whole short rows, whole bytes of signs.
  static int64_t unit(int64_t inner) { return inner < kVector ? kSignsPerByte * inner : kVector; }

  static int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

  // Call f(begin, end) for ranges of whole units that cover all elements, in parallel.
  template <typename F>
  static void ranges(HalvesLayout layout, const F& f) {
    const int64_t size = unit(layout.inner), elements = layout.elements();
    parallel_for(
        0, round_up(elements, size) / size, kGrain / size,
        [&](int64_t begin, int64_t end) { f(begin * size, std::min(end * size, elements)); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def("ncrelu(Tensor input, int dim) -> Tensor");
  m.def("ncrelu_backward(Tensor grad_output, Tensor input, int dim) -> Tensor");
  m.def("ncrelu_with_signs(Tensor input, int dim) -> (Tensor output, Tensor signs)");
  m.def(
      "ncrelu_with_signs_backward(Tensor grad_output, Tensor signs, int dim, bool channels_last) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  m.impl("ncrelu", TORCH_BOX(&ncrelu<Loops>));
  m.impl("ncrelu_backward", TORCH_BOX(&ncrelu_backward<Loops>));
  m.impl("ncrelu_with_signs", TORCH_BOX(&ncrelu_with_signs<Loops>));
  m.impl("ncrelu_with_signs_backward", TORCH_BOX(&ncrelu_with_signs_backward<Loops>));
}

}  // namespace ops::cpu
