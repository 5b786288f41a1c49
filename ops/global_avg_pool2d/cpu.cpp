// CPU global average pooling: a two-stage reduction over splits of the length; backward broadcasts
// to the same splits.
#include "core/cpu/parallel.h"
#include "global_avg_pool2d/op.h"

namespace ops::global_avg_pool2d {

constexpr int64_t kSplit = 32768;  // elements per split and thread, minimum

// Partition of the length. It depends on the shape alone: results do not depend on threads.
struct Splits {
  PoolLayout layout;
  int64_t rows;   // per split: of `inner` elements
  int64_t count;  // splits per outer index

  explicit Splits(PoolLayout layout)
      : layout(layout),
        rows(std::max<int64_t>(1, kSplit / layout.inner)),
        count(std::max<int64_t>(1, (layout.length + rows - 1) / rows)) {}

  // Call f(begin, end) for ranges of splits, in parallel.
  template <typename F>
  void for_each_range(const F& f) const {
    const int64_t size = std::min(rows, layout.length) * layout.inner;
    cpu::parallel_for(0, layout.outer * count, kSplit / std::max<int64_t>(1, size) + 1, f);
  }
};

}  // namespace ops::global_avg_pool2d

#define OPS_KERNELS "global_avg_pool2d/cpu_kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::global_avg_pool2d {
namespace {

struct Loops {
  template <typename T>
  static void forward(const Tensor& like, PoolLayout layout, const T* x, T* out) {
    using A = acc_t<T>;
    const Splits splits(layout);
    if (layout.inner == 1 && splits.count == 1) {
      return splits.for_each_range([&](int64_t begin, int64_t end) {
        OPS_CALL(global_avg_pool2d::average_planes(x, begin, end, layout.length, out));
      });
    }
    Tensor memory = empty(like, {layout.outer * splits.count * layout.inner},
                          accumulator_dtype(like.scalar_type()));
    A* sums = memory.mutable_data_ptr<A>();
    splits.for_each_range([&](int64_t begin, int64_t end) {
      OPS_CALL(global_avg_pool2d::sum_splits(splits, begin, end, x, sums));
    });
    if (splits.count == 1) {  // all outputs in one call
      OPS_CALL(
          global_avg_pool2d::average(sums, 1, layout.outer * layout.inner, layout.length, out));
      return;
    }
    for (int64_t o = 0; o < layout.outer; ++o, sums += splits.count * layout.inner) {
      OPS_CALL(global_avg_pool2d::average(sums, splits.count, layout.inner, layout.length,
                                          out + o * layout.inner));
    }
  }

  template <typename T>
  static void backward(const Tensor&, PoolLayout layout, const T* grad, T* out) {
    const Splits splits(layout);
    splits.for_each_range([&](int64_t begin, int64_t end) {
      OPS_CALL(global_avg_pool2d::broadcast_splits(splits, begin, end, grad, out));
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def("global_avg_pool2d(Tensor input) -> Tensor");
  m.def(
      "global_avg_pool2d_backward(Tensor grad_output, SymInt height, SymInt width, "
      "bool channels_last) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  m.impl("global_avg_pool2d", TORCH_BOX(&forward<Loops>));
  m.impl("global_avg_pool2d_backward", TORCH_BOX(&backward<Loops>));
}

}  // namespace ops::global_avg_pool2d
