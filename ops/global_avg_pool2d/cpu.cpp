// CPU global average pooling: a two-stage reduction over splits of the length; backward broadcasts
// to the same splits.
#include "core/cpu/parallel.h"
#include "global_avg_pool2d/op.h"

namespace ops::global_avg_pool2d {

constexpr int64_t kSplit = 32768;  // elements per split and thread, minimum

// Partition of the length. It depends on the shape alone: results do not depend on threads.
struct Splits {
  Layout layout;
  int64_t rows;   // per split: of `inner` elements
  int64_t count;  // splits per outer index

  explicit Splits(const Layout& layout)
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

struct Forward {
  template <typename T>
  static void run(const Tensor&, const Layout& layout, const T* x, T* out) {
    const auto [outer, length, inner] = layout;
    const Splits splits(layout);
    if (inner == 1 && splits.count == 1) {
      return splits.for_each_range([&](int64_t begin, int64_t end) {
        OPS_CALL(global_avg_pool2d::average_planes(x, begin, end, layout.length, out));
      });
    }
    std::vector<acc_t<T>> sums(outer * splits.count * inner);
    splits.for_each_range([&](int64_t begin, int64_t end) {
      OPS_CALL(global_avg_pool2d::sum_splits(splits, begin, end, x, sums.data()));
    });
    OPS_CALL(global_avg_pool2d::average(sums.data(), outer, splits.count, inner, length, out));
  }
};

struct Backward {
  template <typename T>
  static void run(const Tensor&, const Layout& layout, const T* grad, T* out) {
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
  m.impl("global_avg_pool2d", TORCH_BOX(&forward<Forward>));
  m.impl("global_avg_pool2d_backward", TORCH_BOX(&backward<Backward>));
}

}  // namespace ops::global_avg_pool2d
