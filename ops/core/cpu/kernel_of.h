// Dispatch of a run-time count to a template argument. No include guard: see dispatch_isa.h.

namespace ops::cpu::OPS_ISA {

// Return &Kernel::run<n>; 1 ≤ n ≤ MAX.
template <typename Kernel, int MAX>
auto kernel_of(int64_t n) {
  if constexpr (MAX > 1) {
    if (n < MAX) {
      return kernel_of<Kernel, MAX - 1>(n);
    }
  }
  return &Kernel::template run<MAX>;
}

}  // namespace ops::cpu::OPS_ISA
