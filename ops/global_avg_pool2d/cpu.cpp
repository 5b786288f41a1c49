// CPU global average pooling: NCHW planes one by one; NHWC images and large planes as a two-stage
// reduction over splits of the length.
#include "core/cpu/parallel.h"
#include "global_avg_pool2d/op.h"

#define OPS_KERNELS "global_avg_pool2d/cpu_kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::cpu {
namespace {

constexpr int64_t kSplit = 32768;  // elements per split and thread, minimum

// Partition of the length. It depends on the shape alone: results do not depend on threads.
struct Splits {
  int64_t rows;   // per split
  int64_t count;  // splits per outer index

  explicit Splits(PoolLayout layout)
      : rows(std::max<int64_t>(1, kSplit / layout.inner)),
        count(std::max<int64_t>(1, (layout.length + rows - 1) / rows)) {}

  // Return whether the layout is NCHW and a plane is one split.
  bool per_plane(PoolLayout layout) const { return layout.inner == 1 && count == 1; }

  // Call f(index, o, first row, rows) for every split of every [length, inner].
  template <typename F>
  void for_each(PoolLayout layout, const F& f) const {
    const int64_t size = std::min(rows, layout.length) * layout.inner;
    parallel_for(0, layout.outer * count, kSplit / std::max<int64_t>(1, size) + 1,
                 [&](int64_t begin, int64_t end) {
                   int64_t o = begin / count;
                   int64_t first = begin % count * rows;
                   for (int64_t i = begin; i < end; ++i) {
                     f(i, o, first, std::min(rows, layout.length - first));
                     first += rows;
                     if (first >= layout.length) {
                       first = 0;
                       ++o;
                     }
                   }
                 });
  }
};

// Call f(begin, end) for ranges of planes.
template <typename F>
void for_each_plane(PoolLayout layout, const F& f) {
  const int64_t grain = kSplit / std::max<int64_t>(1, layout.length) + 1;
  parallel_for(0, layout.outer, grain, f);
}

struct Loops {
  template <typename T>
  static void forward(const Tensor& like, PoolLayout layout, const T* x, T* out) {
    using A = acc_t<T>;
    const Splits splits(layout);
    if (splits.per_plane(layout)) {
      return for_each_plane(layout, [&](int64_t begin, int64_t end) {
        OPS_CALL(
            average_planes(x + begin * layout.length, end - begin, layout.length, out + begin));
      });
    }
    Tensor memory = empty(like, {layout.outer * splits.count * layout.inner},
                          accumulator_dtype(like.scalar_type()));
    A* sums = memory.mutable_data_ptr<A>();
    splits.for_each(layout, [&](int64_t i, int64_t o, int64_t first, int64_t rows) {
      const T* from = x + (o * layout.length + first) * layout.inner;
      OPS_CALL(sum_rows(from, rows, layout.inner, sums + i * layout.inner));
    });
    if (splits.count == 1) {  // all outputs in one call
      OPS_CALL(average(sums, 1, layout.outer * layout.inner, layout.length, out));
      return;
    }
    for (int64_t o = 0; o < layout.outer; ++o, sums += splits.count * layout.inner) {
      OPS_CALL(average(sums, splits.count, layout.inner, layout.length, out + o * layout.inner));
    }
  }

  template <typename T>
  static void backward(const Tensor&, PoolLayout layout, const T* grad, T* out) {
    const Splits splits(layout);
    if (splits.per_plane(layout)) {
      return for_each_plane(layout, [&](int64_t begin, int64_t end) {
        T* to = out + begin * layout.length;
        OPS_CALL(broadcast_planes(grad + begin, end - begin, layout.length, to));
      });
    }
    splits.for_each(layout, [&](int64_t, int64_t o, int64_t first, int64_t rows) {
      T* to = out + (o * layout.length + first) * layout.inner;
      OPS_CALL(broadcast(grad + o * layout.inner, rows, layout.inner, layout.length, to));
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
  m.impl("global_avg_pool2d", TORCH_BOX(&global_avg_pool2d<Loops>));
  m.impl("global_avg_pool2d_backward", TORCH_BOX(&global_avg_pool2d_backward<Loops>));
}

}  // namespace ops::cpu
