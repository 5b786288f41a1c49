// CPU ncrelu: blocks of elements over threads.
#include "core/cpu/parallel.h"
#include "ncrelu/op.h"

namespace ops::ncrelu {

constexpr int64_t kBlock = 2048;  // elements that fit the L1 cache with their outputs, about
constexpr int64_t kMaxBlock = kSignsPerByte * kBlock;

}  // namespace ops::ncrelu

#define OPS_KERNELS "ncrelu/cpu_kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::ncrelu {
namespace {

constexpr int64_t kGrain = 32768;  // elements per thread, minimum

// Call f(begin, end) for blocks of elements, in parallel: whole rows if they are short, so that
// rows of less than a vector are whole, and whole bytes of signs.
template <typename F>
void for_each_block(int64_t elements, int64_t inner, const F& f) {
  const int64_t unit = inner < kBlock ? kSignsPerByte * inner : kBlock;
  const int64_t block = (kBlock + unit - 1) / unit * unit;
  cpu::parallel_for(0, (elements + block - 1) / block, kGrain / block + 1,
                    [&](int64_t begin, int64_t end) {
                      for (int64_t i = begin; i < end; ++i) {
                        f(i * block, std::min((i + 1) * block, elements));
                      }
                    });
}

struct Loops {
  // `signs`: destination, or nullptr.
  template <typename T>
  static void forward(const Tensor& like, int64_t inner, const T* x, T* out, uint8_t* signs) {
    for_each_block(like.numel(), inner, [=](int64_t begin, int64_t end) {
      if (signs) {
        OPS_CALL(ncrelu::split<true>(x, out, signs, begin, end, inner));
      } else {
        OPS_CALL(ncrelu::split<false>(x, out, signs, begin, end, inner));
      }
    });
  }

  template <typename T>
  static void backward(const Tensor& like, int64_t inner, const T* grad, const uint8_t* signs,
                       T* out) {
    for_each_block(like.numel(), inner, [=](int64_t begin, int64_t end) {
      OPS_CALL(ncrelu::merge(grad, signs, out, begin, end, inner));
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def("ncrelu(Tensor input, int dim) -> Tensor");
  m.def("ncrelu_with_signs(Tensor input, int dim) -> (Tensor output, Tensor signs)");
  m.def(
      "ncrelu_with_signs_backward(Tensor grad_output, Tensor signs, int dim, bool channels_last) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  m.impl("ncrelu", TORCH_BOX(&ncrelu<Loops>));
  m.impl("ncrelu_with_signs", TORCH_BOX(&ncrelu_with_signs<Loops>));
  m.impl("ncrelu_with_signs_backward", TORCH_BOX(&ncrelu_with_signs_backward<Loops>));
}

}  // namespace ops::ncrelu
