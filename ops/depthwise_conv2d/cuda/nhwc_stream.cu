// nhwc_stream: NHWC, 7×7 with stride 1, forward and input gradient. These are bound by
// multiply-adds: each thread copies its own input rows, halo included, so that no thread waits for
// another.
//
//      input rows, top to bottom       pending outputs (registers)
//      ┌──────────┐                    ┌──────────┐ row r     complete: stored
//      │ row y    │ ── each tap row ─► │ partly   │ row r + 1
//      │ row y+1 …│ (copies in flight) │ summed   │ row r + 2 …
//      └──────────┘                    └──────────┘
//
//   block:   a segment of rows, at adjacent column tiles and channels, of one or several images
//   shared:  the filters; a ring buffer of input rows per thread
//   thread:  a tile of 7 columns of 2 channels; adds each input row to 7 pending output rows
#include "depthwise_conv2d/cuda/families.cuh"

namespace ops::cuda {
namespace {

using Window = Direct<7, 1, 1>;
constexpr int kTaps = Window::kTaps, V = 2, kCols = 7, kInCols = Window::inputs(kCols);
constexpr int kPending = kTaps, kWarmUp = kPending - 1;  // steps before the first complete row
constexpr int kPeriod = 2;  // steps that are unrolled; then the pending rows move down
constexpr int kThreads = 128, kBlocks = 3, kMaxLanes = 32;
constexpr int kPrefetch = 2, kRingRows = kPrefetch + 1;  // rows copied ahead; rows of the ring

// A block has (lanes, groups, images) threads: lanes for adjacent vectors of V channels, groups for
// adjacent column tiles. It computes one segment of output rows of its images, from top to bottom.
struct StreamParams {
  int in_h, in_w, out_h, out_w;
  int start_h, start_w;  // input coordinates of the first output's window
  int tiles_w;           // blocks across an image
  int segments;          // blocks down an image
  int steps;             // per segment, of one output row
  int images;
  int channels;
};

// A thread's column tile and its V channels.
struct StreamPosition {
  int tile, segment;
  int64_t n;
  int first_channel;  // of the block
  int channel;        // of the thread
  int channels;       // of the image
  bool valid;

  __device__ explicit StreamPosition(const StreamParams& params)
      : tile(blockIdx.x % params.tiles_w),
        segment(blockIdx.x / params.tiles_w % params.segments),
        n(static_cast<int64_t>(blockIdx.x) / params.tiles_w / params.segments * blockDim.z +
          threadIdx.z),
        first_channel(blockIdx.y * blockDim.x * V),
        channel(first_channel + threadIdx.x * V),
        channels(params.channels),
        valid(n < params.images && channel < channels) {}
};

// Return a mask with bit i set if column first + i is inside the image.
template <int kColumns>
__device__ unsigned column_mask(int first, int width) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    bits |= is_inside(first + i, width) ? 1u << i : 0u;
  }
  return bits;
}

// A thread's ring of input rows in shared memory, filled kPrefetch rows ahead by cp.async. No other
// thread reads it, so it needs no __syncthreads. Columns outside column_mask read as zero.
template <typename T>
class RowReader {
  using Bits = typename BitsOf<V * sizeof(T)>::type;

 public:
  static constexpr size_t kBytes = kRingRows * kInCols * sizeof(Bits) * kThreads;  // per block

  __device__ RowReader(const StreamPosition& at, unsigned char* memory, unsigned column_mask)
      : at_(at), column_mask_(column_mask) {
    ring_ = reinterpret_cast<Bits*>(memory) + flat_thread();
    for (int i = 0; i < kRingRows * kInCols; ++i) {
      ring_[i * kThreads] = {};
    }
  }

  // Start to copy a row to ring slot `row`. `position`: address of the thread's first channel.
  __device__ void fetch(const T* position, int row) {
#pragma unroll
    for (int i = 0; i < kInCols; ++i, position += at_.channels) {
      if (column_mask_ & 1u << i) {
        const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(slot(row, i)));
        copy_async<sizeof(Bits)>(to, position);
      }
    }
  }

  __device__ void read(int row, float (&x)[kInCols][V]) const {
    Bits bits[kInCols];
#pragma unroll
    for (int i = 0; i < kInCols; ++i) {
      bits[i] = *slot(row, i);
    }
    widen<T>(bits, x);
  }

 private:
  const StreamPosition& at_;
  unsigned column_mask_;
  Bits* ring_;

  __device__ Bits* slot(int row, int i) const { return ring_ + (row * kInCols + i) * kThreads; }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    nhwc_stream_kernel(StreamParams params, bool flip, const T* __restrict__ in,
                       const T* __restrict__ weight, const T* __restrict__ bias,
                       T* __restrict__ out) {
  extern __shared__ __align__(16) unsigned char memory[];
  float* weights = reinterpret_cast<float*>(memory);  // [tap][kPitch]
  const StreamPosition at(params);
  constexpr int kPitch = kMaxLanes * V;
  if (threadIdx.z == 0) {
    for (int tap = threadIdx.y; tap < kTaps * kTaps; tap += blockDim.y) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int c = at.channel + v;
        weights[(flip ? kTaps * kTaps - 1 - tap : tap) * kPitch + threadIdx.x * V + v] =
            c < params.channels ? static_cast<float>(weight[c * kTaps * kTaps + tap]) : 0.0f;
      }
    }
  }
  __syncthreads();
  if (!at.valid) {
    return;
  }
  const float* w = weights + threadIdx.x * V;
  const int w0 = (at.tile * blockDim.y + threadIdx.y) * kCols, in_w0 = params.start_w + w0;
  const int h0 = at.segment * params.steps;
  const int last_step = min(params.steps, params.out_h - h0);  // the first step is −kWarmUp
  int y = params.start_h + h0;
  const int end_y = min(params.in_h, y + last_step + kWarmUp);
  const unsigned out_mask = column_mask<kCols>(w0, params.out_w);
  RowReader<T> rows(at, memory + sizeof(float) * kTaps * kTaps * kPitch,
                    column_mask<kInCols>(in_w0, params.in_w));
  const int64_t in_row = static_cast<int64_t>(params.in_w) * params.channels;
  const int64_t out_row = static_cast<int64_t>(params.out_w) * params.channels;
  in += (at.n * params.in_h + y) * in_row + static_cast<int64_t>(in_w0) * params.channels +
        at.channel;
  out += (at.n * params.out_h + h0 - kWarmUp) * out_row +
         static_cast<int64_t>(w0) * params.channels + at.channel;
  const auto is_input_row = [&](int row) { return row >= 0 && row < end_y; };
  for (int i = 0; i < kPrefetch; ++i) {
    if (is_input_row(y + i)) {
      rows.fetch(in + i * in_row, i);
    }
    commit_copies();
  }

  float initial[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    initial[v] = bias ? static_cast<float>(bias[at.channel + v]) : 0.0f;
  }
  using Tap = Vector<float, V>;
  // In step u of a period, the pending rows are sum[u … u + kPending).
  float sum[kPending + kPeriod - 1][kCols][V] = {};
  int row = 0;  // ring slot to read
#pragma unroll 1
  for (int first = -kWarmUp; first < last_step; first += kPeriod) {
#pragma unroll
    for (int u = 0; u < kPeriod; ++u) {
      const int step = first + u;
      if (step >= last_step) {
        return;
      }
      auto& pending = reinterpret_cast<float (&)[kPending][kCols][V]>(sum[u]);
#pragma unroll
      for (int i = 0; i < kCols * V; ++i) {
        pending[kPending - 1][i / V % kCols][i % V] = initial[i % V];
      }
      wait_for_copies<kPrefetch - 1>();
      const bool has_row = is_input_row(y);
      float x[kInCols][V];
      if (has_row) {
        rows.read(row, x);
      }
      if (is_input_row(y + kPrefetch)) {
        rows.fetch(in + kPrefetch * in_row, (row + kPrefetch) % kRingRows);
      }
      commit_copies();
      row = (row + 1) % kRingRows;
      ++y, in += in_row;
      if (has_row) {
#pragma unroll
        for (int m = 0; m < kPending; ++m) {
          const int a = kPending - 1 - m;  // tap row with which pending row m reads the input row
#pragma unroll
          for (int b = 0; b < kTaps; ++b) {
            const Tap tap = *reinterpret_cast<const Tap*>(w + (a * kTaps + b) * kPitch);
#pragma unroll
            for (int j = 0; j < kCols; ++j) {
#pragma unroll
              for (int v = 0; v < V; ++v) {
                pending[m][j][v] += tap.lane[v] * x[j + b][v];
              }
            }
          }
        }
      }
      const bool complete = step >= 0 && h0 + step < params.out_h;
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        if (complete && out_mask & 1u << j) {
          store_vector(out + j * params.channels, pending[0][j]);
        }
      }
      out += out_row;
    }
#pragma unroll
    for (int m = 0; m + kPeriod < kPending + kPeriod - 1; ++m) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          sum[m][j][v] = sum[m + kPeriod][j][v];
        }
      }
    }
  }
}

}  // namespace

template <typename T>
bool nhwc_stream(const Convolution<T>& c) {
  const DepthwiseGeometry& g = c.g;
  const bool matches = g.kernel_h == 7 && g.kernel_w == 7 && g.stride_h == 1 && g.stride_w == 1 &&
                       g.dilation_h == 1 && g.dilation_w == 1;
  if (!matches || g.c < kMinChannels || g.c % V != 0 ||
      !are_aligned({c.in.data, c.out.data}, V * sizeof(T))) {
    return false;
  }
  StreamParams params{};
  params.in_h = c.in.h, params.in_w = c.in.w, params.out_h = c.out.h, params.out_w = c.out.w;
  params.start_h = Window::start(c.padding_h);
  params.start_w = Window::start(c.padding_w);
  params.images = g.n;
  params.channels = g.c;
  // Choose the number of lanes that needs the fewest warps; fill the block with column tiles, then
  // images.
  const int64_t vectors = ceil_div(g.c, V), across = ceil_div(c.out.w, kCols);
  int64_t chunks = 0, min_warps = 0;
  dim3 block;
  for (int64_t n = ceil_div(vectors, kMaxLanes); n <= ceil_div(vectors, kMaxLanes / 4); ++n) {
    const int lanes = ceil_div(vectors, n);
    const int64_t tiles = ceil_div(across, kThreads / lanes);
    const int groups = ceil_div(across, tiles);
    const int z = std::min<int64_t>({kThreads / (lanes * groups), 64, g.n});
    const int64_t warps =
        n * tiles * ceil_div(g.n, z) * ceil_div(static_cast<int64_t>(lanes) * groups * z, 32);
    if (chunks == 0 || warps < min_warps) {
      chunks = n, min_warps = warps, params.tiles_w = tiles;
      block = dim3(lanes, groups, z);
    }
  }
  // Choose the length of segments: long ones repeat fewer warm-up steps, short ones fill the GPU.
  const int64_t columns = ceil_div(g.n, block.z) * params.tiles_w;
  const int warps = ceil_div(block.x * block.y * block.z, 32);
  const int resident_blocks = kBlocks * kThreads / 32 / warps * Device().multiprocessors;
  params.segments = best_split(c.out.h, columns * chunks, resident_blocks, kWarmUp + 2);
  params.steps = ceil_div(c.out.h, params.segments);
  params.segments = ceil_div(c.out.h, params.steps);
  constexpr size_t kFilters = sizeof(float) * kTaps * kTaps * kMaxLanes * V;
  c.launch(nhwc_stream_kernel<T>, dim3(columns * params.segments, chunks), block,
           kFilters + RowReader<T>::kBytes, params, c.flip, c.in.data, c.weight, c.bias,
           c.out.data);
  return true;
}

template bool nhwc_stream(const Convolution<float>&);
template bool nhwc_stream(const Convolution<Half>&);
template bool nhwc_stream(const Convolution<BFloat16>&);

}  // namespace ops::cuda
