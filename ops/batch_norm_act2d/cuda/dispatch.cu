// CUDA batch normalisation and activation: grids and launches (kernels.cuh).
#include "batch_norm_act2d/cuda/kernels.cuh"
#include "batch_norm_act2d/op.h"

namespace ops::batch_norm_act2d {
namespace {

// Call f(reduce, map), the grids of both kernels, with the widest vectors to which pointers and
// layout are aligned: up to four elements in NHWC, up to 16 bytes in NCHW. The blocks of reduce run
// at once, those of map in many waves, so that no multiprocessor waits for the slowest.
template <typename T, typename F>
void dispatch_grids(Layout layout, std::initializer_list<const void*> pointers, const F& f) {
  constexpr int kWidest = sizeof(T) == 8 ? 1 : kVectorBytes / sizeof(T);
  const auto call = [&](auto v, auto nhwc) {
    using G = Grid<v.value, nhwc.value>;
    f(G(layout, G::kBlocks), G(layout, 32 * G::kBlocks));
  };
  if (layout.inner == 1) {
    dispatch_width<T, std::min(4, kWidest)>(pointers, {layout.channels},
                                            [&](auto v) { call(v, std::true_type{}); });
  } else {
    dispatch_width<T, kWidest>(pointers, {layout.inner},
                               [&](auto v) { call(v, std::false_type{}); });
  }
}

// NCHW: most bytes of a channel's inputs that one block reduces and maps. It reads them again from
// the cache.
constexpr int64_t kSmallBytes = 224 * 1024;

struct Backend {
  // `in` are the inputs. `out` may be null: reduction only.
  template <typename T, typename Reduce, typename Map, typename... In>
  static void run(const Tensor& like, Layout layout, const Reduce& reduce, const Map& map, T* out,
                  const In*... in) {
    using A = acc_t<T>;
    check(layout.channels <= std::numeric_limits<int>::max(), "batch_norm_act2d: on CUDA, input ",
          "must have fewer than 2^31 channels, got ", layout.channels);
    const DeviceGuard guard(like.get_device_index());
    const cudaStream_t stream = current_stream(like);
    dispatch_grids<T>(layout, {out, in...}, [&](const auto& g, const auto& map_grid) {
      using G = std::decay_t<decltype(g)>;
      const G whole(layout, 1);
      const int64_t bytes = sizeof...(In) * sizeof(T) * G::V * whole.rows * whole.columns;
      if (layout.inner > 1 && whole.chunks == 1 && bytes <= kSmallBytes) {
        return launch_kernel(channel_kernel<G, T, Reduce, Map, In...>, whole.blocks(), G::kThreads,
                             0, stream, whole, reduce, map, out, in...);
      }
      const Tensor memory =
          empty(like, {g.chunks, g.channels, 2}, accumulator_dtype(like.scalar_type()));
      const auto partials = reinterpret_cast<Sums<A>*>(memory.mutable_data_ptr<A>());
      launch_kernel(reduce_kernel<A, G, Reduce, In...>, g.blocks(), G::kThreads, 0, stream, g,
                    reduce, partials, in...);
      second_stage<Sums<A>, Reduce, Sums<double>>(partials, g.chunks, g.channels, reduce, stream);
      if (out != nullptr) {
        launch_dependent(map_kernel<G, T, Map, In...>, map_grid.blocks(), G::kThreads, stream,
                         map_grid, map, out, in...);
      }
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("batch_norm_act2d", TORCH_BOX(&forward<Backend>));
  m.impl("batch_norm_act2d_backward", TORCH_BOX(&backward<Backend>));
}

}  // namespace ops::batch_norm_act2d
