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
  // `in` are the inputs after x. `out` may be null: reduction only.
  template <typename T, typename Reduce, typename Map, typename... In>
  static void run(const Tensor& like, Layout layout, const Reduce& reduce, const Map& map, T* out,
                  const T* x, const In*... in) {
    using A = acc_t<T>;
    const DeviceGuard guard(like.get_device_index());
    const cudaStream_t stream = current_stream(like);
    dispatch_grids<T>(layout, {out, x, in...}, [&](const auto& g, const auto& map_grid) {
      using G = std::decay_t<decltype(g)>;
      const G whole(layout, 1);
      const int64_t bytes = (1 + sizeof...(In)) * sizeof(T) * G::V * whole.rows * whole.columns;
      if (layout.inner > 1 && whole.chunks == 1 && bytes <= kSmallBytes) {
        return launch_kernel(channel_kernel<G, T, Reduce, Map, In...>, whole.blocks(), G::kThreads,
                             0, stream, whole, reduce, map, layout.count(), out, x, in...);
      }
      const Tensor memory =
          empty(like, {2, g.chunks, g.channels}, accumulator_dtype(like.scalar_type()));
      A* partials = memory.mutable_data_ptr<A>();
      launch_kernel(reduce_kernel<G, T, Reduce, In...>, g.blocks(), G::kThreads, 0, stream, g,
                    reduce, partials, x, in...);
      launch_dependent(finish_kernel<Reduce, A>, ceil_div(g.channels, kFinishChannels),
                       dim3(kFinishChannels, kFinishLines), stream, reduce,
                       static_cast<const A*>(partials), g.chunks, g.channels,
                       g.chunk * (G::V / G::kChannels), layout.count());
      if (out != nullptr) {
        launch_dependent(map_kernel<G, T, Map, T, In...>, map_grid.blocks(), G::kThreads, stream,
                         map_grid, map, out, x, in...);
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
