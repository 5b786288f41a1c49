// CPU involution: one kernel for every geometry, dtype and layout; see plan.h.
#include "core/cpu/parallel.h"
#include "involution2d/cpu/plan.h"
#include "involution2d/op.h"
#define OPS_KERNELS "involution2d/cpu/kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::involution2d {
namespace {

constexpr int64_t kGrain = 200000;  // multiply-adds per thread, minimum

struct Kernels {
  // Rows are independent: results do not depend on the number of threads.
  template <typename T>
  static void run(const Tensor&, const Geometry& g, Pass pass, const T* source, const T* factor,
                  T* out) {
    using A = acc_t<T>;
    const Plan<T> p(g, pass, cpu::vector_bytes() / sizeof(A), source, factor, out);
    const int64_t rows = p.vertical.out_size;
    const int64_t row_work = rows > 0 ? p.horizontal.out_size * g.taps() * g.group_channels() : 1;
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, row_work));
    const auto work = [&](int64_t begin, int64_t end) {
      Workspace<A> workspace(p);
      OPS_CALL(involution2d::involve(p, begin, end, workspace));
    };
    cpu::parallel_for(0, g.n * g.groups * rows, grain, work);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def(
      "involution2d(Tensor input, Tensor weight, int[2] stride, int[2] padding, int[2] dilation) "
      "-> Tensor");
  m.def(
      "involution2d_backward(Tensor grad_output, Tensor input, Tensor weight, int[2] stride, "
      "int[2] padding, int[2] dilation, bool[2] output_mask) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  m.impl("involution2d", TORCH_BOX(&forward<Kernels>));
  m.impl("involution2d_backward", TORCH_BOX(&backward<Kernels>));
}

}  // namespace ops::involution2d
