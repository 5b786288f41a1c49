// Kernels with sums in registers, whose number the compiler must know. No include guard: see
// dispatch_isa.h.

namespace ops::cpu::OPS_ISA {

// Kernel::run<n>, for n from 1 to MOST.
template <typename Kernel, int MOST>
auto kernel_of(int64_t n) {
  if constexpr (MOST > 1) {
    if (n < MOST) {
      return kernel_of<Kernel, MOST - 1>(n);
    }
  }
  return &Kernel::template run<MOST>;
}

}  // namespace ops::cpu::OPS_ISA
