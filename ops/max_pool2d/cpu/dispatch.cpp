// CPU max pooling: forward by rows; backward by rows for disjoint windows of channels-last images
// or of two columns, otherwise by images.
#include "core/cpu/parallel.h"
#include "max_pool2d/cpu/plan.h"
#include "max_pool2d/op.h"
#define OPS_KERNELS "max_pool2d/cpu/kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::max_pool2d {
namespace {

constexpr int64_t kGrain = 32768;  // elements per thread, minimum
constexpr int64_t kBlock = 4096;   // pixels scattered to before the next are zeroed: L1 cache
// Minimum adjacent outputs; below, scalar scatter is faster. Padded: two windows a row are cut.
constexpr int64_t kMinRun = 8, kMinPaddedRun = 64;

// Scatter-add the output gradients of adjacent images to the maxima. offset_of(tap): elements from
// the window's first pixel. noinline: all values of the inner loop stay in registers.
template <typename T, typename I, typename Sum, typename OffsetOf>
__attribute__((noinline)) void scatter_add(const Plan& p, OffsetOf offset_of, int64_t images,
                                           const T* grad, const I* indices, Sum* sums) {
  const Geometry& g = p.g;
  const uint64_t size = p.image_size();
  const int64_t run = p.run(), runs = g.out_w * p.pixel / run;  // per row
  const int64_t step = p.pixel == 1 ? g.stride_w : 1;
  const int64_t run_step = p.offset(0, g.stride_w), row_step = p.offset(g.stride_h, 0);
  const int64_t start = -p.offset(g.padding_h, g.padding_w), rows = g.out_h;
  std::fill_n(sums, images * size, Sum(0));
  for (Sum* end = sums + images * size; sums != end; sums += size) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < runs; ++i) {
        int64_t first = start + row * row_step + i * run_step;
        for (const T* last = grad + run; grad != last; ++grad, ++indices, first += step) {
          const uint64_t at = first + offset_of(*indices);
          if (at < size) {  // not kNoTap, nor an index that is not of max_pool2d
            sums[at] += static_cast<Sum>(*grad);
          }
        }
      }
    }
  }
}

template <typename T, typename I>
void scatter_add_images(const Plan& p, const T* grad, const I* indices, T* out) {
  using A = acc_t<T>;
  const auto compute_offset = [&](int64_t tap) {
    constexpr int64_t kOutside = int64_t{1} << 62;
    const int64_t row = tap / p.g.kernel_w, column = tap % p.g.kernel_w;
    const bool valid = tap >= 0 && tap < p.g.taps();
    return valid ? row * p.row_step + column * p.column_step : kOutside;
  };
  int64_t table[kByteTaps];
  for (int64_t tap = 0; tap < kByteTaps; ++tap) {
    table[tap] = compute_offset(tap);
  }
  const auto offset_of = [compute_offset, offsets = &table[0]](I tap) {
    return sizeof(I) == 1 ? offsets[tap] : compute_offset(tap);
  };
  const int64_t size = p.image_size(), out_size = p.g.out_h * p.g.out_w * p.pixel;
  const int64_t block = std::max<int64_t>(1, kBlock / size);
  cpu::parallel_for(0, p.images(), kGrain / size + 1, [&](int64_t begin, int64_t end) {
    const bool in_place = std::is_same_v<A, T> || p.disjoint;  // no rounding of partial sums
    std::vector<A> sums(in_place ? 0 : block * size);
    for (int64_t i = begin; i < end; i += block) {
      const int64_t images = std::min(block, end - i);
      const T* from = grad + i * out_size;
      const I* taps = indices + i * out_size;
      if (in_place) {
        scatter_add(p, offset_of, images, from, taps, out + i * size);
      } else {
        scatter_add(p, offset_of, images, from, taps, sums.data());
        OPS_CALL(convert_row(sums.data(), out + i * size, images * size));
      }
    }
  });
}

struct Kernels {
  template <typename T, typename Indices>
  static void forward(const Tensor&, const Geometry& g, const T* x, T* out, Indices indices) {
    const Plan p(g);
    const int64_t grain = kGrain / (g.out_w * p.pixel * g.taps()) + 1;
    cpu::parallel_for(0, p.images() * g.out_h, grain, [&](int64_t begin, int64_t end) {
      OPS_CALL(max_pool2d::forward_rows(p, x, out, indices, begin, end));
    });
  }

  template <typename T, typename I>
  static void backward(const Tensor&, const Geometry& g, const T* grad, const I* indices, T* out) {
    const Plan p(g);
    const int64_t min_run = p.pairs && g.padding_w > 0 ? kMinPaddedRun : kMinRun;
    const bool vectors = p.disjoint && p.run() >= min_run && (p.pixel > 1 || p.pairs);
    if (!vectors) {
      return scatter_add_images(p, grad, indices, out);
    }
    const int64_t grain = kGrain / (g.w * p.pixel * g.stride_h) + 1;
    cpu::parallel_for(0, p.images() * g.out_h, grain, [&](int64_t begin, int64_t end) {
      OPS_CALL(max_pool2d::backward_rows(p, grad, indices, out, begin, end));
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def(
      "max_pool2d(Tensor input, int[2] kernel_size, int[2] stride, int[2] padding, "
      "int[2] dilation, bool ceil_mode) -> Tensor");
  m.def(
      "max_pool2d_with_indices(Tensor input, int[2] kernel_size, int[2] stride, int[2] padding, "
      "int[2] dilation, bool ceil_mode) -> (Tensor output, Tensor indices)");
  m.def(
      "max_pool2d_with_indices_backward(Tensor grad_output, Tensor indices, int[2] kernel_size, "
      "int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode, SymInt height, "
      "SymInt width, bool channels_last) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  using Both = std::tuple<Tensor, Tensor>;
  m.impl("max_pool2d", TORCH_BOX((&forward<Kernels, Tensor>)));
  m.impl("max_pool2d_with_indices", TORCH_BOX((&forward<Kernels, Both>)));
  m.impl("max_pool2d_with_indices_backward", TORCH_BOX(&backward<Kernels>));
}

}  // namespace ops::max_pool2d
