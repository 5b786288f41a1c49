// nhwc_mma: NHWC, 16 bits, matrix units (mma.sync).
//
//      image [H, W, C]      shared: [row, col, 16 ch]      shared: 16 feature maps
//      ┌─────────┐  async   ┌────────────┐   transpose    ┌────┐┌────┐      Toeplitz products
//      │ tile    │ ───────► │ as loaded  │ ─────────────► │ c0 ││ c1 │ …  ► of mma_tile.cuh,
//      └─────────┘  copies  └────────────┘                └────┘└────┘      transposed back
//
//   block:   tiles of kTileChannels channels: rows of one image, or several small images
//   shared:  the tile transposed, and the next tile as loaded (in flight)
//   thread:  4 accumulators per product; a warp has 2 channels, 16 rows × up to 56 columns of each
//
// Weight gradient (figure in mma_weight_gradient.cuh)
//   block:   a split of the tiles of a chunk of channels
//   shared:  inputs and grad_output, transposed and (next tile) as loaded; at the end the sums
//   thread:  4 accumulators per filter column and channel, over all tiles
#include "depthwise_conv2d/cuda/families.cuh"
#include "depthwise_conv2d/cuda/mma_weight_gradient.cuh"
#include "depthwise_conv2d/cuda/nhwc_mma.cuh"
#include "depthwise_conv2d/cuda/two_stage_reduction.cuh"

namespace ops::cuda {
namespace {

// Zero the maps once; nothing is written to the padding later.
__device__ inline void clear_maps(unsigned* maps, int words) {
  for (int i = threadIdx.x; i < words / 4; i += kNhwcMmaThreads) {
    reinterpret_cast<uint4*>(maps)[i] = {};
  }
}

// Load four 8 × 8 matrices. Lane 8 m + i passes the address of row i of matrix m.
__device__ inline void load_matrices(const unsigned* row, unsigned& m0, unsigned& m1, unsigned& m2,
                                     unsigned& m3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
}

// Load two 8 × 8 matrices; the addresses of lanes 16 to 31 are ignored.
__device__ inline void load_matrices(const unsigned* row, unsigned& m0, unsigned& m1) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(m0), "=r"(m1)
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
}

// kColumns: maximum output width.
template <typename Axis, int kColumns, typename T>
__global__ void __launch_bounds__(kNhwcMmaThreads, kNhwcMmaBlocks)
    nhwc_mma_kernel(NhwcMmaParams params, bool flip, const T* __restrict__ in,
                    const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out) {
  constexpr int kWidth = Axis::kTaps, kTaps = kWidth * kWidth;
  constexpr int kRows = 16, kProducts = kColumns / 8;
  constexpr int kPitch = TransposedLayout<kColumns>::kPitch;
  extern __shared__ __align__(16) unsigned char memory[];
  uint4* staged = reinterpret_cast<uint4*>(memory);
  unsigned* maps = reinterpret_cast<unsigned*>(memory + params.in.bytes);
  const BlockWork work(params);
  const TileImages<kColumns, const T> inputs(params, params.in, work, in);
  const TileImages<kColumns, T> outputs(params, params.out, work, out);
  TileIterator<Axis, kRows> tiles(params, work);
  const auto load = [&](const auto& it) {
    if (it.valid()) {
      const ImageTile s = it.tile();
      inputs.load(staged, s.image, s.images, s.stage.in_row, s.stage.in_rows);
    }
    __pipeline_commit();
  };
  load(tiles);
  const Lane lane;
  const int start_w = params.map.start_w;
  const int warp_channel = threadIdx.x / 32 * kWarpChannels;
  T* filters = reinterpret_cast<T*>(maps);
  for (int i = threadIdx.x; i < work.channel_count * kTaps; i += kNhwcMmaThreads) {
    filters[i] = weight[work.first_channel * kTaps + i];
  }
  __syncthreads();
  ToeplitzFilter<kWidth, T> matrices[kWarpChannels];
  float initial[kWarpChannels];
#pragma unroll
  for (int c = 0; c < kWarpChannels; ++c) {
    matrices[c].load(filters + (warp_channel + c) * kTaps, flip, start_w & 1);
    const int channel = min(work.first_channel + warp_channel + c, params.channels - 1);
    initial[c] = bias ? static_cast<float>(bias[channel]) : 0.0f;
  }
  __syncthreads();
  clear_maps(maps, inputs.map(0, params.group));

  while (tiles.valid()) {
    const ImageTile s = tiles.tile();
    const int first_row = params.map.start_h + s.stage.out_row;  // row of the maps
    __pipeline_wait_prior(0);
    __syncthreads();
    inputs.transpose(staged, maps, s.images, s.stage.in_row, s.stage.in_rows, first_row);
    __syncthreads();
    tiles.advance();
    load(tiles);
#pragma unroll
    for (int c = 0; c < kWarpChannels; ++c) {
      for (int image = 0; image < s.images && warp_channel + c < work.channel_count; ++image) {
        unsigned* map = maps + inputs.map(warp_channel + c, image);
#pragma unroll 1
        for (int row = 0; row < s.stage.out_rows; row += kRows) {
          float sum[kProducts][4];
          const unsigned* words =
              map + (row + threadIdx.x % 16) * kPitch + threadIdx.x % 32 / 16 * 4;
          using ColumnBlocks = unsigned[kProducts + 1];
          gemm(sum, initial[c], matrices[c], [&](int a, ColumnBlocks& upper, ColumnBlocks& lower) {
#pragma unroll
            for (int p = 0; p < kProducts; p += 2) {
              load_matrices(words + a * kPitch + 4 * p, upper[p], lower[p], upper[p + 1],
                            lower[p + 1]);
            }
            if (kProducts % 2 == 0) {
              load_matrices(words + a * kPitch + 4 * kProducts, upper[kProducts], lower[kProducts]);
            }
          });
          recompute_nan(sum, [&](int r, int col) {
            const T* pixels = reinterpret_cast<const T*>(map + params.in.left - first_row * kPitch);
            return initial[c] + exact_output<kWidth>(
                                    pixels, 2 * kPitch, params.in.h, params.in.w,
                                    first_row + row + lane.g + r, start_w + 2 * lane.t + col,
                                    weight + (work.first_channel + warp_channel + c) * kTaps, flip);
          });
          __syncwarp();
          // Overwrite inputs that no later rows read.
          unsigned* to = map + (row + lane.g) * kPitch + params.out.left + lane.t;
#pragma unroll
          for (int n = 0; n < kProducts; ++n) {
            if (2 * lane.t + 8 * n < params.out.w) {
              to[4 * n] = Packed<T>::pack(sum[n][0], sum[n][1]);
              to[4 * n + 8 * kPitch] = Packed<T>::pack(sum[n][2], sum[n][3]);
            }
          }
        }
      }
    }
    __syncthreads();
    outputs.store(maps, s.image, s.images, s.stage.out_row, s.stage.out_rows);
  }
}

template <typename Axis, int kColumns, typename T>
__global__ void __launch_bounds__(kNhwcMmaThreads, kNhwcMmaBlocks)
    nhwc_mma_weight_gradient_kernel(NhwcMmaParams params, const T* __restrict__ x,
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
    __pipeline_commit();
  };
  load(tiles);
  clear_maps(maps, inputs.map(0, params.group) + outputs.map(0, params.group));
  const Lane lane;
  Diagonals sums[kWarpChannels];
  const int warp_channel = threadIdx.x / 32 * kWarpChannels;
  while (tiles.valid()) {
    const ImageTile s = tiles.tile();
    __pipeline_wait_prior(0);
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
          // The last product may read the next channel's words, which zeros of grad_output
          // multiply.
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

// Call f(axis, kColumns) for the geometries with a kernel: stride 1, dilation 1, from kMinTaps on.
// FMAs are faster for smaller filters.
template <int kMinTaps, typename F>
bool dispatch_nhwc_mma(const DepthwiseGeometry& g, int64_t columns,
                       std::initializer_list<const void*> pointers, const F& f) {
  if (g.c % kVectorChannels != 0 || !are_aligned(pointers, sizeof(uint4))) {
    return false;
  }
  return dispatch_direct(g, [&](auto axis) {
    using Axis = decltype(axis);
    if constexpr (Axis::kTaps >= kMinTaps && Axis::inputs(8) == 7 + Axis::kTaps) {
      if (columns <= 16) return f(axis, Width<16>{});
      if (columns <= 32) return f(axis, Width<32>{});
      if (columns <= 56) return f(axis, Width<56>{});
    }
    return false;
  });
}

// Output widths up to which half of a tile is empty, and up to which nhwc_mma is always faster.
constexpr int64_t kNarrow = 8, kWide = 16;

// Return whether nhwc_mma is faster than nhwc_ring, nhwc_stream and direct_l1, measured on an H200.
bool is_faster(const DepthwiseGeometry& g, int64_t columns) {
  const int64_t elements = elements_per_sm(g);
  const bool large = g.kernel_h > 5;
  if (columns <= kNarrow) {
    return elements <= (large ? 36'000 : 5'000);
  }
  return columns <= kWide || elements >= (large ? 300 : 500) * columns;
}

constexpr int64_t kMinGradientElements = 5'000;  // per SM

}  // namespace

template <typename T>
bool nhwc_mma(const Convolution<T>& c) {
  if (c.transposed || !is_faster(c.g, c.out.w)) {
    return false;
  }
  return dispatch_nhwc_mma<5>(c.g, c.out.w, {c.in.data, c.out.data}, [&](auto axis, auto columns) {
    using Axis = decltype(axis);
    constexpr int kColumns = columns.value;
    const auto plan = plan_nhwc_mma<Axis, 16, kColumns>(c.g.n, c.g.c, c.in.h, c.in.w, c.out.h,
                                                        c.out.w, c.padding_h, c.padding_w, false);
    if (plan) {
      c.launch(nhwc_mma_kernel<Axis, kColumns, T>, plan->blocks(), kNhwcMmaThreads, plan->shared,
               plan->params, c.flip, c.in.data, c.weight, c.bias, c.out.data);
    }
    return plan.has_value();
  });
}

template <typename T>
bool nhwc_mma_weight_gradient(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  if (elements_per_sm(g) <= kMinGradientElements) {
    return false;
  }
  return dispatch_nhwc_mma<7>(g, g.out_w, {c.x, c.grad}, [&](auto axis, auto columns) {
    using Axis = decltype(axis);
    using Diagonals = DiagonalSums<Axis::kTaps, T>;
    constexpr int kColumns = columns.value;
    const auto plan = plan_nhwc_mma<Axis, Diagonals::kRows, kColumns>(
        g.n, g.c, g.h, g.w, g.out_h, g.out_w, g.padding_h, g.padding_w, true);
    if (!plan || g.padding_w % 2 != Diagonals::kOdd) {
      return false;
    }
    two_stage_reduction(c, plan->splits, [&](const WeightReduction<T>& reduction) {
      launch_kernel(nhwc_mma_weight_gradient_kernel<Axis, kColumns, T>, plan->blocks(),
                    kNhwcMmaThreads,
                    std::max(plan->shared, sizeof(float) * Diagonals::shared_floats(kTileChannels)),
                    c.stream, plan->params, c.x, c.grad, reduction);
    });
    return true;
  });
}

template bool nhwc_mma(const Convolution<Half>&);
template bool nhwc_mma(const Convolution<BFloat16>&);
template bool nhwc_mma_weight_gradient(const WeightGradient<Half>&);
template bool nhwc_mma_weight_gradient(const WeightGradient<BFloat16>&);

}  // namespace ops::cuda
