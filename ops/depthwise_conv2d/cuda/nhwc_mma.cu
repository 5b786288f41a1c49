// nhwc_mma: 16-bit channels-last images by matrix units.
//
//      image [H, W, C]      shared: [row, col, 16 ch]      shared: 16 feature maps
//      ┌─────────┐  async   ┌────────────┐   transpose    ┌────┐┌────┐      Toeplitz products
//      │ tile    │ ───────► │ as loaded  │ ─────────────► │ c0 ││ c1 │ …  ► of mma_tile.cuh,
//      └─────────┘  copies  └────────────┘                └────┘└────┘      transposed back
//
//   block:   tiles of kTileChannels channels: rows of one image, or several small images
//   shared:  the tile as loaded (the next one arrives meanwhile) and transposed
//   thread:  a warp has kWarpChannels channels: 16 rows × up to 56 columns, 4 sums a product
//
// Weight gradient: a warp keeps the diagonals of input × grad_output products, one sum a tap.
#include "depthwise_conv2d/cuda/families.cuh"
#include "depthwise_conv2d/cuda/mma_weight_gradient.cuh"
#include "depthwise_conv2d/cuda/nhwc_mma.cuh"
#include "depthwise_conv2d/cuda/two_stage_reduction.cuh"

namespace ops::cuda {
namespace {

// Clears maps, once: what lies around an image stays zero.
__device__ inline void clear_maps(unsigned* maps, int words) {
  for (int i = threadIdx.x; i < words / 4; i += kNhwcMmaThreads) {
    reinterpret_cast<uint4*>(maps)[i] = {};
  }
}

// Four matrices of 8 × 8 elements, of which lane 8 m + i names row i of the m-th.
__device__ inline void load_matrices(const unsigned* row, unsigned& m0, unsigned& m1, unsigned& m2,
                                     unsigned& m3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
}

// Two such matrices; addresses of lanes 16 to 31 are ignored.
__device__ inline void load_matrices(const unsigned* row, unsigned& m0, unsigned& m1) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(m0), "=r"(m1)
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
}

// kColumns: the most that a row of outputs has.
template <typename Axis, int kColumns, typename T>
__global__ void __launch_bounds__(kNhwcMmaThreads, kNhwcMmaBlocks)
    nhwc_mma_kernel(NhwcMmaParams params, bool flip, const T* __restrict__ in,
                    const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out) {
  constexpr int kWidth = Axis::kTaps, kTaps = kWidth * kWidth;
  constexpr int kRows = 16, kProducts = kColumns / 8;
  constexpr int kLine = TransposedLines<kColumns>::kLine;
  extern __shared__ __align__(16) unsigned char memory[];
  uint4* staged = reinterpret_cast<uint4*>(memory);
  unsigned* maps = reinterpret_cast<unsigned*>(memory + params.in.bytes);
  const BlockWork place(params);
  const TileImages<kColumns, const T> inputs(params, params.in, place, in);
  const TileImages<kColumns, T> outputs(params, params.out, place, out);
  TileIterator<Axis, kRows> walk(params, place);
  const auto load = [&](const auto& there) {
    if (there.any()) {
      const ImageTile s = there.tile();
      inputs.load(staged, s.image, s.images, s.range.in_row, s.range.in_rows);
    }
    __pipeline_commit();
  };
  load(walk);
  const Lane lane;
  const int start_w = params.map.start_w;
  const int own = threadIdx.x / 32 * kWarpChannels;
  T* filters = reinterpret_cast<T*>(maps);
  for (int i = threadIdx.x; i < place.present * kTaps; i += kNhwcMmaThreads) {
    filters[i] = weight[place.first * kTaps + i];
  }
  __syncthreads();
  ToeplitzFilter<kWidth, T> matrices[kWarpChannels];
  float initial[kWarpChannels];
#pragma unroll
  for (int c = 0; c < kWarpChannels; ++c) {
    matrices[c].load(filters + (own + c) * kTaps, flip, start_w & 1);
    const int channel = min(place.first + own + c, params.channels - 1);
    initial[c] = bias ? static_cast<float>(bias[channel]) : 0.0f;
  }
  __syncthreads();
  clear_maps(maps, inputs.map(0, params.group));

  while (walk.any()) {
    const ImageTile s = walk.tile();
    const int first = params.map.start_h + s.range.out_row;  // row of the maps
    __pipeline_wait_prior(0);
    __syncthreads();
    inputs.turn(staged, maps, s.images, s.range.in_row, s.range.in_rows, first);
    __syncthreads();
    walk.advance();
    load(walk);
#pragma unroll
    for (int c = 0; c < kWarpChannels; ++c) {
      for (int image = 0; image < s.images && own + c < place.present; ++image) {
        unsigned* map = maps + inputs.map(own + c, image);
#pragma unroll 1
        for (int row = 0; row < s.range.out_rows; row += kRows) {
          float sum[kProducts][4];
          const unsigned* words =
              map + (row + threadIdx.x % 16) * kLine + threadIdx.x % 32 / 16 * 4;
          using Pieces = unsigned[kProducts + 1];
          multiply(sum, initial[c], matrices[c], [&](int a, Pieces& upper, Pieces& lower) {
#pragma unroll
            for (int p = 0; p < kProducts; p += 2) {
              load_matrices(words + a * kLine + 4 * p, upper[p], lower[p], upper[p + 1],
                            lower[p + 1]);
            }
            if (kProducts % 2 == 0) {
              load_matrices(words + a * kLine + 4 * kProducts, upper[kProducts], lower[kProducts]);
            }
          });
          recompute_nan(sum, [&](int r, int col) {
            const T* positions = reinterpret_cast<const T*>(map + params.in.left - first * kLine);
            return initial[c] +
                   exact_output<kWidth>(positions, 2 * kLine, params.in.h, params.in.w,
                                        first + row + lane.g + r, start_w + 2 * lane.t + col,
                                        weight + (place.first + own + c) * kTaps, flip);
          });
          __syncwarp();
          // Overwrites inputs that no later tile reads.
          unsigned* to = map + (row + lane.g) * kLine + params.out.left + lane.t;
#pragma unroll
          for (int n = 0; n < kProducts; ++n) {
            if (2 * lane.t + 8 * n < params.out.w) {
              to[4 * n] = Packed<T>::pack(sum[n][0], sum[n][1]);
              to[4 * n + 8 * kLine] = Packed<T>::pack(sum[n][2], sum[n][3]);
            }
          }
        }
      }
    }
    __syncthreads();
    outputs.store(maps, s.image, s.images, s.range.out_row, s.range.out_rows);
  }
}

// Block (split, chunk of channels) goes through its part of the tiles.
template <typename Axis, int kColumns, typename T>
__global__ void __launch_bounds__(kNhwcMmaThreads, kNhwcMmaBlocks)
    nhwc_mma_weight_gradient_kernel(NhwcMmaParams params, const T* __restrict__ x,
                                    const T* __restrict__ grad, WeightReduction<T> reduction) {
  using Sums = DiagonalSums<Axis::kTaps, T>;
  constexpr int kLine = TransposedLines<kColumns>::kLine;
  extern __shared__ __align__(16) unsigned char memory[];
  uint4* staged = reinterpret_cast<uint4*>(memory);
  uint4* staged_grad = reinterpret_cast<uint4*>(memory + params.in.bytes);
  unsigned* maps = reinterpret_cast<unsigned*>(memory + params.in.bytes + params.out.bytes);
  const BlockWork place(params);
  const TileImages<kColumns, const T> inputs(params, params.in, place, x);
  const TileImages<kColumns, const T> outputs(params, params.out, place, grad);
  unsigned* grads = maps + inputs.map(0, params.group);
  TileIterator<Axis, Sums::kRows> walk(params, place);
  const auto load = [&](const auto& there) {
    if (there.any()) {
      const ImageTile s = there.tile();
      inputs.load(staged, s.image, s.images, s.range.in_row, s.range.in_rows);
      outputs.load(staged_grad, s.image, s.images, s.range.out_row, s.range.out_rows);
    }
    __pipeline_commit();
  };
  load(walk);
  clear_maps(maps, inputs.map(0, params.group) + outputs.map(0, params.group));
  const Lane lane;
  Sums sums[kWarpChannels];
  const int own = threadIdx.x / 32 * kWarpChannels;
  while (walk.any()) {
    const ImageTile s = walk.tile();
    __pipeline_wait_prior(0);
    __syncthreads();
    inputs.turn(staged, maps, s.images, s.range.in_row, s.range.in_rows,
                params.map.start_h + s.range.out_row);
    outputs.turn(staged_grad, grads, s.images, s.range.out_row, s.range.out_rows, s.range.out_row);
    __syncthreads();
    walk.advance();
    load(walk);
#pragma unroll
    for (int c = 0; c < kWarpChannels; ++c) {
      for (int image = 0; image < s.images && own + c < place.present; ++image) {
        for (int row = 0; row < s.range.out_rows; row += Sums::kRows) {
          const int at = (row + lane.g) * kLine + lane.t;
          const unsigned* words = maps + inputs.map(own + c, image) + at;
          const unsigned* of_grad = grads + outputs.map(own + c, image) + at;
          // The last product may read another channel's words: they meet zeros of grad_output.
#pragma unroll 1
          for (int col = 0; col < params.out.w; col += 16, words += 8, of_grad += 8) {
            unsigned window[4][Sums::kWords];
#pragma unroll
            for (int j = 0; j < Sums::kWords; ++j) {
              window[0][j] = words[j];
              window[1][j] = words[j + 8 * kLine];
              window[2][j] = words[j + 4];
              window[3][j] = words[j + 4 + 8 * kLine];
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
    sums[c].leave(shared, own + c);
  }
  __syncthreads();
  BlockSums<T> to(reduction, place.split, place.first);
  Sums::add_up(shared, 1, place.present, [&](int i, float sum) { to.put(i, sum); });
}

// f(axis, columns) where matrix units compute channels-last images with so many columns of outputs.
template <typename F>
bool dispatch_nhwc_mma(const DepthwiseGeometry& g, int64_t columns,
                       std::initializer_list<const void*> pointers, const F& f) {
  if (g.c % kUnitChannels != 0 || !are_aligned(pointers, sizeof(uint4))) {
    return false;
  }
  return dispatch_direct(g, [&](auto axis) {
    using Axis = decltype(axis);
    // Neither strides nor dilation; 3×3 filters are faster tap by tap.
    if constexpr (Axis::kTaps > 3 && Axis::inputs(8) == 7 + Axis::kTaps) {
      if (columns <= 16) return f(axis, Width<16>{});
      if (columns <= 32) return f(axis, Width<32>{});
      if (columns <= 56) return f(axis, Width<56>{});
    }
    return false;
  });
}

// Columns of outputs up to which half of a tile is empty, and up to which tiles are always worth
// it.
constexpr int64_t kNarrow = 8, kWide = 16;

// Whether nhwc_stream and direct_l1 are slower: measured on an H200.
bool is_worth(const DepthwiseGeometry& g, int64_t columns) {
  const int64_t elements = elements_per_sm(g);
  const bool large = g.kernel_h > 5;
  if (columns <= kNarrow) {
    return elements <= (large ? 36'000 : 5'000);
  }
  return columns <= kWide || elements >= (large ? 300 : 500) * columns;
}

bool is_worth_for_weights(const DepthwiseGeometry& g) {
  const int64_t elements = elements_per_sm(g);
  return elements > 5'000 && (g.kernel_h > 5 || g.out_w > kNarrow || elements <= 18'000);
}

}  // namespace

template <typename T>
bool nhwc_mma(const Convolution<T>& c) {
  if (c.transposed || !is_worth(c.g, c.out.w)) {
    return false;
  }
  return dispatch_nhwc_mma(c.g, c.out.w, {c.in.data, c.out.data}, [&](auto axis, auto columns) {
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
  if (!is_worth_for_weights(g)) {
    return false;
  }
  return dispatch_nhwc_mma(g, g.out_w, {c.x, c.grad}, [&](auto axis, auto columns) {
    using Axis = decltype(axis);
    using Sums = DiagonalSums<Axis::kTaps, T>;
    constexpr int kColumns = columns.value;
    const auto plan = plan_nhwc_mma<Axis, Sums::kRows, kColumns>(
        g.n, g.c, g.h, g.w, g.out_h, g.out_w, g.padding_h, g.padding_w, true);
    if (!plan || g.padding_w % 2 != Sums::kOdd) {
      return false;
    }
    two_stage_reduction(c, plan->splits, [&](const WeightReduction<T>& reduction) {
      launch_kernel(nhwc_mma_weight_gradient_kernel<Axis, kColumns, T>, plan->blocks(),
                    kNhwcMmaThreads,
                    std::max(plan->shared, sizeof(float) * Sums::floats(kTileChannels)), c.stream,
                    plan->params, c.x, c.grad, reduction);
    });
    return true;
  });
}

template bool nhwc_mma(const Convolution<Half>&);
template bool nhwc_mma(const Convolution<BFloat16>&);
template bool nhwc_mma_weight_gradient(const WeightGradient<Half>&);
template bool nhwc_mma_weight_gradient(const WeightGradient<BFloat16>&);

}  // namespace ops::cuda
