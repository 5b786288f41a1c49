// direct_l1 and direct_l1_runtime, weight and bias gradient: stage 1 of a two-stage reduction.
//
//      grad_output             input                       sums
//      ┌───────────┐          ┌─────────────────┐         ┌───────┐
//      │ g g g g   │   × each │ x   x   x       │   ──►   │ taps  │  + block, + splits
//      │           │          │ x   x   x  taps │         │       │
//      └───────────┘          └─────────────────┘         └───────┘
//
//   block:   taps of lanes × V channels, over a range of the outputs: one split
//   shared:  partial sums of threads, for the reduction over the block
//   thread:  one sum per tap and the bias, accumulated over every groups-th tile of outputs
//
// direct_l1: all taps; tiles of 1 row × 4 or 8 columns. direct_l1_runtime: kTile × kTile taps; one
// output.
#include "depthwise_conv2d/cuda/general/direct.cuh"

namespace ops::depthwise_conv2d {
namespace {

template <typename AxisMap, int kTileCols>
struct CompiledGradientTile {
  using Map = AxisMap;
  using Axis = CompiledAxis<Map>;
  static constexpr int kImages = 1, kRows = 1, kCols = kTileCols, kChannels = 1;
  static constexpr int kTaps = Map::kTaps * Map::kTaps;
  static constexpr int kUnroll = 1;    // tiles per iteration
  static constexpr int kResident = 0;  // blocks per SM, at least; 0: chosen by the compiler

  template <typename Params>
  __device__ CompiledGradientTile(const Params&, int, int) {}

  // Return the tap of sum `slot`, −1 for none.
  __device__ int tap(int slot) const { return slot; }

  template <typename Params, typename T>
  __device__ void accumulate(const Params& params, int tile, int, const T* in, const T* grad,
                             float (&sum)[kTaps + 1][1]) const {
    const auto at = params.first(tile);
    float g[kCols][1];
    load_row(grad + params.out.offset(at), true, at.col, params.cols.out, params.out.w, g);
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      sum[kTaps][0] += g[j][0];
    }
    for_each_product(params, at, in, [&](int, int j, int tap, const float (&x)[1]) {
      sum[tap][0] += g[j][0] * x[0];
    });
  }
};

// The bound on blocks per SM leaves enough registers to load all inputs of an iteration at once.
template <int kTile, int V, typename Index>
struct RuntimeGradientTile {
  using Axis = RuntimeAxis<Index>;
  static constexpr int kImages = 1, kRows = 1, kCols = 1, kChannels = V;
  static constexpr int kTaps = kTile * kTile, kResident = 2;
  static constexpr int kUnroll = kTile == 1 ? 4 : kTile == 2 ? 2 : 1;

  int taps, width;     // of the filter
  int a, b;            // first tap
  int tile_h, tile_w;  // taps within the filter; none if only the bias gradient is wanted

  template <typename Params>
  __device__ RuntimeGradientTile(const Params& params, int tile, int taps)
      : taps(taps), width(params.cols.taps) {
    const int tiles_w = (width + kTile - 1) / kTile;
    a = tile / tiles_w * kTile, b = tile % tiles_w * kTile;
    tile_h = taps > 0 ? min(kTile, static_cast<int>(params.rows.taps) - a) : 0;
    tile_w = min(kTile, width - b);
  }

  __device__ int tap(int slot) const {
    if (slot == kTaps) {
      return a == 0 && b == 0 ? taps : -1;
    }
    const int h = slot / kTile, w = slot % kTile;
    return h < tile_h && w < tile_w ? (a + h) * width + b + w : -1;
  }

  template <typename Params, typename T, typename Acc>
  __device__ void accumulate(const Params& params, Index first, Index end, const T* in,
                             const T* grad, Acc (&sum)[kTaps + 1][V]) const {
    const Axis &rows = params.rows, &cols = params.cols;
    const Index next_h = rows.dilation * params.in.h, next_w = cols.dilation * params.in.w;
    // Zero outside the image: 0 times a non-finite gradient is NaN.
    Vector<T, V> g[kUnroll] = {}, value[kUnroll][kTaps] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Index output = first + u * params.threads.groups;
      const auto at = params.first(output);
      const Index y = at.row * rows.stride + a * rows.dilation - rows.padding;
      const Index x = at.col * cols.stride + b * cols.dilation - cols.padding;
      const T* from = in + params.in.offset({at.image, y, x});
      if (output < end) {
        g[u] = load_vector<V>(grad + params.out.offset(at));
      }
#pragma unroll
      for (int h = 0; h < kTile; ++h) {
        const bool row_inside =
            output < end && h < tile_h && is_inside(y + h * rows.dilation, rows.in);
#pragma unroll
        for (int w = 0; w < kTile; ++w) {
          if (row_inside && w < tile_w && is_inside(x + w * cols.dilation, cols.in)) {
            value[u][h * kTile + w] = load_vector<V>(from + h * next_h + w * next_w);
          }
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kUnroll * V; ++v) {
      const Acc gradient = static_cast<Acc>(g[v / V].lane[v % V]);
      sum[kTaps][v % V] += gradient;
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        sum[k][v % V] += gradient * static_cast<Acc>(value[v / V][k].lane[v % V]);
      }
    }
  }
};

// Grid (chunk of channels and tile of taps, split).
template <typename Tile, typename T>
__global__ void __launch_bounds__(kDirectThreads, Tile::kResident)
    direct_weight_gradient_kernel(DirectParams<Tile> params, const T* __restrict__ in,
                                  const T* __restrict__ grad, WeightReduction<T> reduction) {
  using Acc = acc_t<T>;
  using Index = typename DirectParams<Tile>::Index;
  constexpr int kSums = Tile::kTaps + 1, V = Tile::kChannels;
  extern __shared__ __align__(16) unsigned char memory[];
  Acc* sums = reinterpret_cast<Acc*>(memory);
  const DirectThreads& threads = params.threads;
  const int chunks = params.chunks;
  const Tile tile(params, blockIdx.x / chunks, reduction.taps);
  const int first = blockIdx.x % chunks * threads.lanes * V;
  const int channel = first + threads.lane() * V;
  const Index begin = blockIdx.y * params.share, end = min(begin + params.share, params.tiles);
  in += channel * static_cast<int64_t>(params.in.c);
  grad += channel * static_cast<int64_t>(params.out.c);
  Acc sum[kSums][V] = {};
#pragma unroll 1
  for (Index i = begin + threads.group(); channel < params.channels && i < end;
       i += Tile::kUnroll * threads.groups) {
    tile.accumulate(params, i, end, in, grad, sum);
  }
  int group = threads.group(), groups = threads.groups;
  if (!threads.channels_last) {  // all threads of a warp have the same channel
    reduce_warp(sum);
    group = group % kWarp == 0 ? group / kWarp : groups;
    groups /= kWarp;
  }
  reduce_block(sum, sums, threads.lane(), threads.lanes, group, groups);
  const int channels = min(threads.lanes * V, static_cast<int>(params.channels) - first);
  for (int i = flat_thread(); i < channels * kSums; i += blockDim.x * blockDim.y) {
    if (const int tap = tile.tap(i % kSums); tap >= 0) {
      reduction.put(blockIdx.y, first, i / kSums * (reduction.taps + 1) + tap, sums[i]);
    }
  }
}

template <typename Tile, typename T>
void launch_tiles(const WeightGradient<T>& c, DirectParams<Tile>& params, int64_t most_splits,
                  int64_t tap_tiles) {
  const DirectThreads& threads = params.threads;
  const int64_t splits = params.divide(most_splits);
  const int groups = threads.channels_last ? threads.groups : threads.groups / kWarp;
  const size_t shared = sizeof(acc_t<T>) * reduction_elements(threads.lanes, groups,
                                                              (Tile::kTaps + 1) * Tile::kChannels);
  reduce_weights(c, splits, [&](const WeightReduction<T>& reduction) {
    launch_kernel(direct_weight_gradient_kernel<Tile, T>, dim3(params.chunks * tap_tiles, splits),
                  threads.block(), shared, c.stream, params, c.x, c.grad, reduction);
  });
}

// Division of a run-time filter into tiles of side × side taps, and of the outputs into splits.
struct TapTiles {
  int64_t tiles, splits;
  int64_t cost;  // estimated, in multiply-adds of a thread

  template <typename Params>
  TapTiles(const Params& params, bool weight, int side)
      : tiles(weight ? ceil_div(params.rows.taps, side) * ceil_div(params.cols.taps, side) : 1) {
    // Measured on an H200: index arithmetic costs kIndices taps, the block reduction kReduction
    // outputs; up to `few` outputs per thread, a single split is faster than a second stage.
    constexpr int64_t kIndices = 6, kReduction = 8;
    const int64_t few = side == 1 ? 16 : 4, resident = 4 * Device().multiprocessors;
    const int64_t turns = ceil_div(params.tiles, params.threads.groups);
    const int64_t blocks = params.chunks * tiles;
    splits = turns <= few ? 1 : choose_splits(turns, blocks, resident, kReduction);
    cost = ceil_div(blocks * splits, resident) * (ceil_div(turns, splits) + kReduction) *
           (side * side + kIndices);
  }
};

template <int kTile, int V, typename Index>
DirectParams<RuntimeGradientTile<kTile, V, Index>> runtime_params(const Geometry& g) {
  return {g, RuntimeAxis<Index>(vertical_axis(g, false)),
          RuntimeAxis<Index>(horizontal_axis(g, false)), runtime_lanes(g)};
}

template <int kTile, int V, typename Index, typename T>
void launch_runtime(const WeightGradient<T>& c,
                    DirectParams<RuntimeGradientTile<kTile, V, Index>> params) {
  const TapTiles plan(params, c.grad_weight, kTile);
  launch_tiles(c, params, plan.splits, plan.tiles);
}

// Launch with the tile of the least cost.
template <int V, typename T>
void launch_cheapest(const WeightGradient<T>& c) {
  const auto params = runtime_params<1, V, int>(c.g);
  const int largest = std::min(V == 1 ? 4 : 3, std::max(params.rows.taps, params.cols.taps));
  Cheapest<int> sides;
  for (int side = 1; side <= largest; ++side) {
    sides.offer(side, TapTiles(params, c.grad_weight, side).cost);
  }
  switch (*sides.best()) {
    case 1: return launch_runtime(c, params);
    case 2: return launch_runtime(c, runtime_params<2, V, int>(c.g));
    case 3: return launch_runtime(c, runtime_params<3, V, int>(c.g));
    default: return launch_runtime(c, runtime_params<V == 1 ? 4 : 3, V, int>(c.g));
  }
}

}  // namespace

template <typename T>
bool direct_l1_weight_gradient(const WeightGradient<T>& c) {
  return dispatch_forward_axis(c.g, [&](auto map) {
    using Map = decltype(map);
    constexpr bool kBits16Stride2 = Map::kStride == 2 && sizeof(T) == 2;
    constexpr int kCols = kBits16Stride2 ? 4 : 8;
    constexpr int64_t kBlocks =  // per SM
        kBits16Stride2                         ? 4
        : Map::kTaps == 3 && Map::kStride == 1 ? 8
                                               : 2;
    const Geometry& g = c.g;
    DirectParams<CompiledGradientTile<Map, kCols>> params(
        g, {g.h, g.out_h, g.padding_h}, {g.w, g.out_w, g.padding_w}, g.channels_last ? 128 : 1);
    launch_tiles(c, params, kBlocks * Device().multiprocessors / params.chunks, 1);
    return true;
  });
}

template <typename T>
void direct_l1_runtime_weight_gradient(const WeightGradient<T>& c) {
  const Geometry& g = c.g;
  if (fits_32_bits(g)) {
    constexpr int kMaxChannels = sizeof(T) == 2 ? 2 : 1;  // per vector
    return dispatch_width<T, kMaxChannels>({c.x, c.grad}, {g.channels_last ? g.c : 1},
                                           [&](auto v) { launch_cheapest<v.value>(c); });
  }
  // Channels are independent: run as many at once as the indices of the sums allow.
  const int64_t taps = g.kernel_h * g.kernel_w, most = kMostSums / (taps + 1);
  check(most > 0, "depthwise_conv2d_backward: on CUDA, weight must have less than 2^30 taps, got ",
        taps);
  const auto all = runtime_params<1, 1, int64_t>(g);
  for (int64_t first = 0; first < g.c; first += most) {
    Geometry some = g;
    some.c = std::min(most, g.c - first);
    auto params = runtime_params<1, 1, int64_t>(some);
    params.in = all.in, params.out = all.out;
    launch_runtime(
        WeightGradient<T>{some, c.like, c.x + first * all.in.c, c.grad + first * all.out.c,
                          c.grad_weight ? c.grad_weight + first * taps : nullptr,
                          c.grad_bias ? c.grad_bias + first : nullptr, c.stream, c.dry_run},
        params);
  }
}

template bool direct_l1_weight_gradient(const WeightGradient<float>&);
template bool direct_l1_weight_gradient(const WeightGradient<Half>&);
template bool direct_l1_weight_gradient(const WeightGradient<BFloat16>&);
template void direct_l1_runtime_weight_gradient(const WeightGradient<double>&);
template void direct_l1_runtime_weight_gradient(const WeightGradient<float>&);
template void direct_l1_runtime_weight_gradient(const WeightGradient<Half>&);
template void direct_l1_runtime_weight_gradient(const WeightGradient<BFloat16>&);

}  // namespace ops::depthwise_conv2d
