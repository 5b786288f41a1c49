// CPU global average pooling: a two-stage reduction over splits of the length; backward broadcasts
// to the same splits.
#include "core/cpu/parallel.h"
#include "global_avg_pool2d/op.h"

#define OPS_KERNELS "global_avg_pool2d/cpu_kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::global_avg_pool2d {
namespace {

constexpr int64_t kSplit = 32768;  // elements per split and thread, minimum

// Partition of the length. It depends on the shape alone: results do not depend on threads.
struct Splits {
  PoolLayout layout;
  int64_t rows;   // per split, maximum
  int64_t count;  // splits per outer index

  explicit Splits(PoolLayout layout)
      : layout(layout),
        rows(std::max<int64_t>(1, std::min(layout.length, kSplit / layout.inner))),
        count(std::max<int64_t>(1, (layout.length + rows - 1) / rows)) {}

  // Call f(split, outer index, how many, first row, rows) in parallel: for several outer indices at
  // once if they are not split.
  template <typename F>
  void for_each(const F& f) const {
    const int64_t grain = kSplit / (rows * layout.inner) + 1;
    cpu::parallel_for(0, layout.outer * count, grain, [&](int64_t begin, int64_t end) {
      if (count == 1) {
        return f(begin, begin, end - begin, 0, layout.length);
      }
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i % count * rows;
        f(i, i / count, 1, row, std::min(rows, layout.length - row));
      }
    });
  }
};

struct Loops {
  template <typename T>
  static void forward(const Tensor& like, PoolLayout layout, const T* x, T* out) {
    const int64_t outer = layout.outer, length = layout.length, inner = layout.inner;
    const Splits splits(layout);
    Tensor memory =
        empty(like, {outer * splits.count * inner}, accumulator_dtype(like.scalar_type()));
    acc_t<T>* sums = memory.mutable_data_ptr<acc_t<T>>();
    splits.for_each([=](int64_t split, int64_t o, int64_t n, int64_t row, int64_t rows) {
      OPS_CALL(global_avg_pool2d::sum_images(x + (o * length + row) * inner, n, rows, inner,
                                             sums + split * inner));
    });
    // Without splits, average all outputs in one call.
    const int64_t calls = splits.count == 1 ? 1 : outer, width = outer * inner / calls;
    for (int64_t i = 0; i < calls; ++i, sums += splits.count * width) {
      OPS_CALL(global_avg_pool2d::average(sums, splits.count, width, length, out + i * width));
    }
  }

  template <typename T>
  static void backward(const Tensor&, PoolLayout layout, const T* grad, T* out) {
    Splits(layout).for_each([=](int64_t, int64_t o, int64_t n, int64_t row, int64_t rows) {
      const auto [outer, length, inner] = layout;
      OPS_CALL(global_avg_pool2d::broadcast_images(grad + o * inner, n, rows, inner, length,
                                                   out + (o * length + row) * inner));
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
