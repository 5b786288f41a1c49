// Weight gradient of nhwc_mma: tiles transposed to feature maps, then the products of
// mma_weight_gradient.cuh (figure there).
//
//      image [H, W, C]      shared: [row, col, 16 ch]      shared: 16 feature maps
//      ┌─────────┐  async   ┌────────────┐   transpose    ┌────┐┌────┐
//      │ tile    │ ───────► │ as loaded  │ ─────────────► │ c0 ││ c1 │ …  ► products
//      └─────────┘  copies  └────────────┘                └────┘└────┘
//
//   block:   a split of the tiles of kTileChannels channels: rows of one image, or several images
//   shared:  inputs and grad_output, transposed and (next tile) as loaded; at the end the sums
//   thread:  4 accumulators per filter column and channel, over all tiles; a warp has 2 channels
#include "depthwise_conv2d/cuda/families.cuh"
#include "depthwise_conv2d/cuda/pixels/transposed_tile.cuh"
#include "depthwise_conv2d/cuda/planes/mma_weight_gradient.cuh"
#include "depthwise_conv2d/cuda/taps.cuh"
#include "depthwise_conv2d/cuda/weight_reduction.cuh"

namespace ops::cuda {
namespace {

// Zero the maps once: their left and right padding stays zero.
__device__ inline void clear_maps(unsigned* maps, int words) {
  for (int i = threadIdx.x; i < words / 4; i += kTransposeThreads) {
    reinterpret_cast<uint4*>(maps)[i] = {};
  }
}

template <typename Axis, int kColumns, typename T>
__global__ void __launch_bounds__(kTransposeThreads, kTransposeBlocks)
    nhwc_mma_weight_gradient_kernel(TransposedParams params, const T* __restrict__ x,
                                    const T* __restrict__ grad, WeightReduction<T> reduction) {
  using Diagonals = DiagonalSums<Axis::kTaps, T>;
  constexpr int kPitch = TransposedLayout<kColumns>::kPitch;
  extern __shared__ __align__(16) unsigned char memory[];
  uint4* staged = reinterpret_cast<uint4*>(memory);
  uint4* staged_grad = reinterpret_cast<uint4*>(memory + params.in.bytes);
  unsigned* maps = reinterpret_cast<unsigned*>(memory + params.in.bytes + params.out.bytes);
  const BlockWork work(params);
  const TileImages<kColumns, const T> inputs(params, params.in, work, x);
  const TileImages<kColumns, const T> outputs(params, params.out, work, grad);
  unsigned* grads = maps + inputs.map(0, params.group);
  TileIterator<Axis, Diagonals::kRows> tiles(params, work);
  const auto load = [&](const auto& it) {
    if (it.valid()) {
      const ImageTile s = it.tile();
      inputs.load(staged, s.image, s.images, s.stage.in_row, s.stage.in_rows);
      outputs.load(staged_grad, s.image, s.images, s.stage.out_row, s.stage.out_rows);
    }
    commit_copies();
  };
  load(tiles);
  clear_maps(maps, inputs.map(0, params.group) + outputs.map(0, params.group));
  const Lane lane;
  Diagonals sums[kWarpChannels];
  const int warp_channel = threadIdx.x / 32 * kWarpChannels;
  while (tiles.valid()) {
    const ImageTile s = tiles.tile();
    wait_for_copies<0>();
    __syncthreads();
    inputs.transpose(staged, maps, s.images, s.stage.in_row, s.stage.in_rows,
                     params.map.start_h + s.stage.out_row);
    outputs.transpose(staged_grad, grads, s.images, s.stage.out_row, s.stage.out_rows,
                      s.stage.out_row);
    __syncthreads();
    tiles.advance();
    load(tiles);
#pragma unroll
    for (int c = 0; c < kWarpChannels; ++c) {
      for (int image = 0; image < s.images && warp_channel + c < work.channel_count; ++image) {
        for (int row = 0; row < s.stage.out_rows; row += Diagonals::kRows) {
          const int at = (row + lane.g) * kPitch + lane.t;
          const unsigned* words = maps + inputs.map(warp_channel + c, image) + at;
          const unsigned* of_grad = grads + outputs.map(warp_channel + c, image) + at;
#pragma unroll 1
          for (int col = 0; col < params.out.w; col += 16, words += 8, of_grad += 8) {
            unsigned window[4][Diagonals::kWords];
#pragma unroll
            for (int j = 0; j < Diagonals::kWords; ++j) {
              window[0][j] = words[j];
              window[1][j] = words[j + 8 * kPitch];
              window[2][j] = words[j + 4];
              window[3][j] = words[j + 4 + 8 * kPitch];
            }
            sums[c].add(window, {of_grad[0], of_grad[4]});
          }
        }
      }
    }
  }
  trigger_dependent_launch();
  __syncthreads();
  float* shared = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int c = 0; c < kWarpChannels; ++c) {
    sums[c].store_partial(shared, warp_channel + c);
  }
  __syncthreads();
  BlockSums<T> to(reduction, work.split, work.first_channel);
  Diagonals::reduce_tiles(shared, 1, work.channel_count, [&](int i, float sum) { to.put(i, sum); });
}

constexpr int64_t kMinGradientElements = 5'000;  // per SM

}  // namespace

template <typename T>
bool nhwc_mma_weight_gradient(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  if (g.c % kVectorChannels != 0 || !are_aligned({c.x, c.grad}, sizeof(uint4)) ||
      elements_per_sm(g) <= kMinGradientElements) {
    return false;
  }
  const auto run = [&](auto axis, auto columns) {
    using Axis = decltype(axis);
    using Diagonals = DiagonalSums<Axis::kTaps, T>;
    constexpr int kColumns = decltype(columns)::value;
    const auto plan = plan_transposed_tiles<Axis, Diagonals::kRows, kColumns>(g);
    if (!plan || g.padding_w % 2 != Diagonals::kOdd) {
      return false;
    }
    reduce_weights(c, plan->splits, [&](const WeightReduction<T>& reduction) {
      launch_kernel(nhwc_mma_weight_gradient_kernel<Axis, kColumns, T>, plan->blocks(),
                    kTransposeThreads,
                    std::max(plan->shared, sizeof(float) * Diagonals::shared_floats(kTileChannels)),
                    c.stream, plan->params, c.x, c.grad, reduction);
    });
    return true;
  };
  return dispatch_forward_axis(g, [&](auto axis) {
    if constexpr (std::is_same_v<decltype(axis), ForwardAxis<7, 1, 1>>) {
      if (g.out_w <= 16) return run(axis, Width<16>{});
      if (g.out_w <= 32) return run(axis, Width<32>{});
      if (g.out_w <= 64) return run(axis, Width<64>{});
    }
    return false;
  });
}

template bool nhwc_mma_weight_gradient(const WeightGradient<Half>&);
template bool nhwc_mma_weight_gradient(const WeightGradient<BFloat16>&);

}  // namespace ops::cuda
