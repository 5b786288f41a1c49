// channels: [N, T, C] in float32, stride 1, dilation 1.
//
//   block:   32 channels × 256 outputs
//   shared:  rows of inputs, transposed from [T][C]; the outputs overwrite them; filters in groups
//            of 4 taps
//   thread:  8 adjacent outputs of one channel at a time; a window of inputs slides by a group
#include "depthwise_conv1d/cuda/stage.cuh"

namespace ops::depthwise_conv1d {
namespace {

constexpr int kBlockChannels = 32, kQuads = kBlockChannels / 4,
              kRowsPerWarp = kBlockChannels / kWarps;

// Place of vector i of a row in shared memory: rows of different quads of channels have different
// banks, so that a transposed vector is written and read without conflicts.
__device__ inline int placed(int i, int quad) {
  return swizzled(i) ^ quad;
}

// pitch: elements from row to row, a multiple of 32.
__global__ void __launch_bounds__(kStageThreads)
    channels_kernel(const Convolution<float> p, int groups, int pitch, int tiles) {
  extern __shared__ float4 staged[];  // rows, then filters
  float* const rows = reinterpret_cast<float*>(staged);
  float* const filters = rows + kBlockChannels * pitch;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int channels = p.c, in_t = p.in_t, out_t = p.out_t, taps = p.taps;
  const unsigned blocks = (channels + kBlockChannels - 1) / kBlockChannels,
                 tile = blockIdx.x / blocks;
  const int image = tile / tiles, t0 = (tile - image * tiles) * kTileOutputs;
  const int first_channel = (blockIdx.x - tile * blocks) * kBlockChannels;
  // The thread's part of a transposition: a vector of 4 channels at positions step, step + 32, …
  const int quad = threadIdx.x % kQuads, step = threadIdx.x / kQuads;
  const int quad_channel = first_channel + 4 * quad;
  const auto element = [&](int j, int i) -> float& {
    return rows[(4 * quad + j) * pitch + placed(i / kGroup, quad) * kGroup + i % kGroup];
  };
  const float* const in = p.in.row(image, quad_channel);
  const int start = t0 - static_cast<int>(p.padding);
  const int size = quad_channel < channels ? in_t : 0;
#pragma unroll 4
  for (int i = step; i < kTileOutputs + groups * kGroup; i += kStageThreads / kQuads) {
    float4 four = {};
    if (is_inside(start + i, size)) {
      four = *reinterpret_cast<const float4*>(in + (start + i) * p.in.t_stride);
    }
    element(0, i) = four.x, element(1, i) = four.y;
    element(2, i) = four.z, element(3, i) = four.w;
  }
  for (int i = threadIdx.x; i < kBlockChannels * groups * kGroup; i += kStageThreads) {
    const int row = i / (groups * kGroup), k = i - row * groups * kGroup;
    const bool is_tap = k < taps && first_channel + row < channels;
    filters[i] = is_tap ? p.weight[(first_channel + row) * p.taps + p.tap(k)] : 0.0f;
  }
  __syncthreads();
#pragma unroll 1
  for (int r = 0; r < kRowsPerWarp; ++r) {
    const int row = warp * kRowsPerWarp + r, channel = first_channel + row;
    if (channel >= channels) {
      break;
    }
    float4* const x = reinterpret_cast<float4*>(rows + row * pitch);
    const float4* const filter = reinterpret_cast<const float4*>(filters) + row * groups;
    const int vector = lane * kOutputs / kGroup, t = t0 + lane * kOutputs;
    float sum[kOutputs];
    convolve_window(filter, groups, p.bias_of(channel), sum,
                    [&](int i) { return x[placed(vector + i, row / 4)]; });
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      sum[i] = p.without_nan(sum[i], image, channel, t + i);
    }
    __syncwarp();  // all inputs of the row have been read
    x[placed(vector, row / 4)] = {sum[0], sum[1], sum[2], sum[3]};
    x[placed(vector + 1, row / 4)] = {sum[4], sum[5], sum[6], sum[7]};
  }
  __syncthreads();
  const int last = quad_channel < channels ? min(kTileOutputs, out_t - t0) : 0;
#pragma unroll 2
  for (int i = step; i < last; i += kStageThreads / kQuads) {
    const int64_t offset = p.out.row(image, quad_channel) - p.out.data + (t0 + i) * p.out.t_stride;
    Vector<float, 4> grad{};
    if (p.grad) {
      grad = load_vector<4>(p.grad + offset);
    }
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      y[j] = p.activate(element(j, i), grad.lane[j]);
    }
    store_vector(p.out.data + offset, y);
  }
}

}  // namespace

bool channels(const Convolution<float>& p, const Run& run) {
  const int64_t groups = ceil_div(p.taps, kGroup), tiles = ceil_div(p.out_t, kTileOutputs);
  const int64_t pitch = ceil_div(kTileOutputs + groups * kGroup, 32) * 32;
  const int64_t blocks = p.n * tiles * ceil_div(p.c, kBlockChannels);
  const size_t bytes = kBlockChannels * (pitch + groups * kGroup) * sizeof(float);
  if (!has_vectors(p, {p.out.data, p.grad ? p.grad : p.out.data}) ||
      bytes > Device().block_shared || blocks >= int64_t{1} << 31) {
    return false;
  }
  launch_kernel(channels_kernel, blocks, kStageThreads, bytes, run.stream, p,
                static_cast<int>(groups), static_cast<int>(pitch), static_cast<int>(tiles));
  return true;
}

}  // namespace ops::depthwise_conv1d
