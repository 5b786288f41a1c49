#include "global_avg_pool2d/op.h"

#define OPS_KERNELS "global_avg_pool2d/cpu_kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::cpu {
namespace {

constexpr int64_t kPart = 32768;  // elements: less is not worth waking a thread for

// Each [length, inner] is cut into parts that threads take: the shape alone says where.
struct Parts {
  int64_t rows;   // of a part
  int64_t count;  // of parts

  explicit Parts(PoolLayout layout)
      : rows(std::max<int64_t>(1, kPart / layout.inner)),
        count(std::max<int64_t>(1, (layout.length + rows - 1) / rows)) {}

  // Whether there are planes, each of them a part.
  bool planes(PoolLayout layout) const { return layout.inner == 1 && count == 1; }

  // Calls f(index, o, first row, rows) for every part of every [length, inner].
  template <typename F>
  void for_each(PoolLayout layout, const F& f) const {
    const int64_t size = std::min(rows, layout.length) * layout.inner;
    torch::stable::parallel_for(0, layout.outer * count, kPart / std::max<int64_t>(1, size) + 1,
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

// Calls f(first plane, end) for all.
template <typename F>
void for_each_plane(PoolLayout layout, const F& f) {
  const int64_t grain = kPart / std::max<int64_t>(1, layout.length) + 1;
  torch::stable::parallel_for(0, layout.outer, grain, f);
}

struct Loops {
  template <typename T>
  static void forward(const Tensor& like, PoolLayout layout, const T* x, T* out) {
    using A = acc_t<T>;
    const Parts parts(layout);
    if (parts.planes(layout)) {
      return for_each_plane(layout, [&](int64_t begin, int64_t end) {
        OPS_CALL(
            average_planes(x + begin * layout.length, end - begin, layout.length, out + begin));
      });
    }
    const ScalarType type = std::is_same_v<A, double> ? ScalarType::Double : ScalarType::Float;
    Tensor memory = empty(like, {layout.outer * parts.count * layout.inner}, type);
    A* sums = memory.mutable_data_ptr<A>();
    parts.for_each(layout, [&](int64_t i, int64_t o, int64_t first, int64_t rows) {
      const T* from = x + (o * layout.length + first) * layout.inner;
      OPS_CALL(sum_rows(from, rows, layout.inner, sums + i * layout.inner));
    });
    if (parts.count == 1) {  // all outputs in one go
      OPS_CALL(average(sums, 1, layout.outer * layout.inner, layout.length, out));
      return;
    }
    for (int64_t o = 0; o < layout.outer; ++o, sums += parts.count * layout.inner) {
      OPS_CALL(average(sums, parts.count, layout.inner, layout.length, out + o * layout.inner));
    }
  }

  template <typename T>
  static void backward(const Tensor&, PoolLayout layout, const T* grad, T* out) {
    const Parts parts(layout);
    if (parts.planes(layout)) {
      return for_each_plane(layout, [&](int64_t begin, int64_t end) {
        T* to = out + begin * layout.length;
        OPS_CALL(spread_planes(grad + begin, end - begin, layout.length, to));
      });
    }
    parts.for_each(layout, [&](int64_t, int64_t o, int64_t first, int64_t rows) {
      T* to = out + (o * layout.length + first) * layout.inner;
      OPS_CALL(spread(grad + o * layout.inner, rows, layout.inner, layout.length, to));
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
