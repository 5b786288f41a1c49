// Shared by the nhwc_ring kernels: register shapes, sequence of steps, launch plan.
#pragma once

#include <optional>

#include "depthwise_conv2d/cuda/families.cuh"

namespace ops::depthwise_conv2d {

// A block has (lanes, groups) threads: lanes for adjacent vectors of channels, groups for adjacent
// tiles of output columns. The output rows of all images form one sequence of steps, of which a
// block computes `share`. A step reads input rows and, after the warm-up, completes output rows.
struct RingParams {
  int in_h, in_w, out_h, out_w;
  int start_h, start_w;  // input coordinates of the first output's window
  int in_cols;           // input columns of a block
  int channels;
  int chunks;       // ranges of channels, one per block
  int steps;        // steps per image
  int share;        // steps per block
  int all_steps;    // steps of all images
  int copy_bytes;   // per asynchronous copy: 16 or 4
  bool streaming;   // load with the evict-first policy (weight gradient)
  bool shifted;     // 16-bit pixels may begin in the middle of a 4-byte word (nhwc_ring_memory.cuh)
  int pitch_bytes;  // shared memory of a pixel: the block's channels, and 4 bytes if shifted
  int ring_bytes;   // shared memory of the stages and of the zero row after them
};

// Register shape of a thread: kCols columns of V channels, and kPending output rows that still need
// input rows. Copies run kDepth steps ahead. Registers suffice for kBlocks blocks of kThreads
// threads per SM. A step of a TransposedAxis reads one input row and completes two output rows.
template <typename ShapeAxis, int V, int kTileCols, int kStepsAhead, int kBlockThreads,
          int kBlocksPerSm = 2>
struct RingShape {
  using Axis = ShapeAxis;
  static constexpr int kTaps = Axis::kTaps, kChannels = V, kCols = kTileCols;
  static constexpr int kDepth = kStepsAhead, kThreads = kBlockThreads, kBlocks = kBlocksPerSm;
  static constexpr int kInCols = Axis::inputs(kCols);
  static constexpr int kStepOut = Axis::kTransposed ? 2 : 1;
  static constexpr int kStepIn = Axis::step(kStepOut);
  static constexpr int kWindow = Axis::inputs(kStepOut);  // input rows of a step's output rows

  // Return the tap row with which pending output row m reads input row r of the step, or −1. Rows
  // 0 … kStepOut − 1 complete: input row r is row kWindow − kStepIn + r of their window.
  static constexpr int tap(int m, int r) { return Axis::tap(m, kWindow - kStepIn + r); }

  // Return the number of output rows, from the oldest to the newest, that read a step's input rows,
  // rounded up to whole steps.
  static constexpr int pending() {
    int rows = 0;
    for (int m = 0; m < kTaps * 4; ++m) {  // an upper bound for every axis
      for (int r = 0; r < kStepIn; ++r) {
        rows = tap(m, r) >= 0 ? m + 1 : rows;
      }
    }
    return round_up(rows, kStepOut);
  }
  static constexpr int kPending = pending();
  // Steps before the first one that completes output rows.
  static constexpr int kWarmUp = kPending / kStepOut - 1;

  // Skip input rows outside the image, and pending rows outside the block's share of it
  // (RingCursor::computes). A branch per row pays only if warm-ups are long.
  static constexpr bool kSkipsRows = kWarmUp >= 4;

  // kPeriod steps are unrolled. A few pending rows rotate through the register rows without copies.
  // For more, the code would be too long: two steps are unrolled, the second with kStepOut spare
  // register rows, then end_period moves all rows down.
  static constexpr bool kRotates = kPending <= 3 * kStepOut;
  static constexpr int kPeriod = kRotates ? kPending / kStepOut : 2;
  static constexpr int kRegisterRows = kRotates ? kPending : kPending + (kPeriod - 1) * kStepOut;
  // Return the register row of pending row m in step u of a period.
  static __device__ constexpr int row(int u, int m) { return (u * kStepOut + m) % kRegisterRows; }

  // Move the rows down by a period (rotating rows: by nothing).
  static __device__ void end_period(float (&rows)[kRegisterRows][kCols][V]) {
    constexpr int kBy = kPeriod * kStepOut;
#pragma unroll
    for (int i = 0; i < (kRegisterRows - kBy) * kCols * V; ++i) {
      const int m = i / (kCols * V), j = i / V % kCols;
      rows[m][j][i % V] = rows[m + kBy][j][i % V];
    }
  }
};

// Steps copied ahead: 2 where a step copies two input rows, and for filters larger than 3×3, which
// are bound by multiply-adds; else 4 in 16 bits, 3 in float32.
template <typename Axis, typename T>
constexpr int kRingDepth = (!Axis::kTransposed && Axis::kStride == 2) || Axis::kTaps > 3 ? 2
                           : sizeof(T) == 2                                              ? 4
                                                                                         : 3;

// Position in a block's sequence of steps. The block's share of each image begins with kWarmUp
// steps that complete no output rows (step < first).
template <typename Shape>
struct RingCursor {
  const RingParams& params;
  int end;  // of the block, in steps of all images
  int image, step;
  int first, last;  // steps of the image that complete rows: [first, last); last ≤ 0: none is left

  __device__ RingCursor(const RingParams& p, int begin)
      : params(p), end(min(begin + p.share, p.all_steps)), image(begin / p.steps) {
    enter(begin - image * p.steps);
  }
  // Begin an image at its step `at`, with the warm-up.
  __device__ void enter(int at) {
    first = at, step = at - Shape::kWarmUp;
    last = min(params.steps, end - image * params.steps);
  }
  __device__ bool valid() const { return last > 0; }
  // Advance; return whether the next step is of another image.
  __device__ bool next() {
    if (++step < last) {
      return false;
    }
    ++image;
    enter(0);
    return true;
  }
  // First input row that the step adds.
  __device__ int in_row() const {
    return params.start_h + step * Shape::kStepIn + Shape::kWindow - Shape::kStepIn;
  }
  __device__ bool is_input_row(int y) const { return is_inside(y, params.in_h); }
  // First of the kStepOut output rows that become pending in this step.
  __device__ int newest() const { return (step + Shape::kWarmUp) * Shape::kStepOut; }
  // Return whether the block completes row newest() + m; else the factor's row is zeros.
  __device__ bool has_newest(int m) const {
    return step + Shape::kWarmUp < last && (Shape::kStepOut == 1 || newest() + m < params.out_h);
  }
  // Return whether the block completes pending row m.
  __device__ bool computes(int m) const {
    const int at = step + m / Shape::kStepOut;
    return at >= first && at < last;
  }
};

struct RingPlan {
  RingParams params;
  dim3 grid, block;
  size_t shared;

  int64_t splits() const { return int64_t{grid.x} / params.chunks * grid.y; }  // weight gradient
};

// Partition the images into blocks; return nullopt if no shape of a block fits. A stage of the ring
// has kStepIn input rows and, for the weight gradient, kFactorRows rows of `factor` (RingPass), as
// wide as the tile. The sums of the weight gradient overwrite the stages. filter_bytes: shared
// memory for filters, per lane.
template <typename Shape, int kFactorRows, typename T>
std::optional<RingPlan> plan_ring(const Convolution<T>& c, const T* factor, int filter_bytes) {
  using Axis = typename Shape::Axis;
  constexpr int64_t kPixel = Shape::kChannels * sizeof(T);           // bytes of a thread's pixel
  constexpr int64_t kSector = 32, kLine = 128;                       // bytes of memory transactions
  constexpr int64_t kWarps = Shape::kBlocks * Shape::kThreads / 32;  // per SM, by registers
  constexpr double kEnough = 0.75;  // fraction of kWarps that hides the latency
  // Candidates tried per loop (groups, chunks), and the cost of starting a block in steps.
  constexpr int64_t kTries = 8, kPerBlock = 3;
  const int64_t channels = c.g.c, out_h = c.out.h, out_w = c.out.w;
  const auto aligned = [&](int64_t bytes) {  // copies and stores
    return channels * static_cast<int64_t>(sizeof(T)) % bytes == 0 &&
           are_aligned({c.in.data, c.out.data, factor}, bytes);
  };
  const int64_t copy_bytes = aligned(kVectorBytes) ? kVectorBytes : 4;
  const bool shifted = kPixel == 2 && !aligned(copy_bytes);
  const int64_t all_steps = c.g.n * ceil_div(out_h, Shape::kStepOut);
  if (!(shifted || aligned(std::max(copy_bytes, kPixel))) || all_steps >= int64_t{1} << 30) {
    return std::nullopt;
  }

  // Choose the shape of a block. Cost: warps of all blocks × (1 for the output + reads per input
  // column) × waste of memory transactions × shortage of resident warps.
  const Device device;
  const int64_t vectors = ceil_div(channels, Shape::kChannels);
  const int64_t across = ceil_div(out_w, Shape::kCols);
  const int64_t multiple = std::max<int64_t>(1, copy_bytes / kPixel);  // lanes per copy
  const int64_t min_tiles = ceil_div(across * multiple, Shape::kThreads);
  struct BlockShape {
    int64_t groups, lanes, chunks, in_cols, pitch_bytes, ring_bytes, shared;
    int64_t resident;  // blocks per SM
  };
  Cheapest<BlockShape> shapes;
  // Each try has fewer groups per block. Many blocks of few columns are slow for shifted pixels.
  const int64_t min_groups = shifted ? ceil_div(across, min_tiles + kTries - 1) : 1;
  int64_t groups = 0;
  for (int64_t i = 0; i < kTries && groups != min_groups; ++i) {
    const int64_t tiles = i == 0 ? min_tiles : ceil_div(across, groups - 1);
    groups = ceil_div(across, tiles);
    const int64_t in_cols = Axis::inputs(groups * Shape::kCols);
    const int64_t stage = Shape::kStepIn * in_cols + kFactorRows * groups * Shape::kCols;  // pixels
    const double reads = static_cast<double>(in_cols) / Axis::step(groups * Shape::kCols);
    const int64_t min_chunks = ceil_div(vectors, Shape::kThreads / groups / multiple * multiple);
    for (int64_t n = min_chunks; n < min_chunks + kTries; ++n) {
      const int64_t lanes = ceil_div(ceil_div(vectors, n), multiple) * multiple;
      const int64_t bytes = lanes * kPixel + (shifted ? 4 : 0);
      const int64_t chunks = ceil_div(vectors, lanes);
      // The zero row follows the stages; threads read it in place of rows outside the image.
      const int64_t zeros = std::max(in_cols, kFactorRows ? groups * Shape::kCols : 0);
      const int64_t ring = ((Shape::kDepth + 1) * stage + zeros) * bytes;
      const int64_t ring_bytes = ceil_div(ring, kVectorBytes) * kVectorBytes;
      const int64_t shared = ring_bytes + lanes * filter_bytes;
      const int64_t warps = ceil_div(lanes * groups, 32);
      const int64_t resident = std::min(kWarps / warps, device.blocks_per_sm(shared));
      // RingRows needs a thread for each copy of a pixel. One group is too few in float32 with two
      // channels per thread and copies of 4 bytes.
      const bool copies_pixels = bytes <= lanes * groups * copy_bytes;
      if (resident == 0 || shared > static_cast<int64_t>(device.block_shared) || !copies_pixels) {
        continue;
      }
      // Waste: lines and sectors that two chunks share. The factors are estimates.
      const bool partial = sizeof(T) == 4 && bytes < 2 * kSector && !aligned(kSector);
      const double waste = lanes >= vectors || bytes % kLine == 0 ? 1
                           : partial                              ? 1 + double{kSector} / bytes
                           : bytes % (2 * kSector) == 0           ? 1.1
                           : bytes % kSector == 0                 ? 1.25
                                                                  : 1.5;
      const double shortage = static_cast<double>(kWarps) / (resident * warps);
      shapes.offer(
          {groups, lanes, chunks, in_cols, bytes, ring_bytes, shared, resident},
          chunks * tiles * warps * (1 + reads) * waste * std::max(1.0, shortage * kEnough));
    }
  }
  if (!shapes.best()) {
    return std::nullopt;
  }
  const BlockShape& shape = *shapes.best();
  RingPlan plan{};
  plan.block = dim3(shape.lanes, shape.groups);
  plan.shared = shape.shared;
  RingParams& params = plan.params;
  params.chunks = shape.chunks, params.in_cols = shape.in_cols;
  params.ring_bytes = shape.ring_bytes, params.pitch_bytes = shape.pitch_bytes;
  params.in_h = c.in.h, params.in_w = c.in.w, params.out_h = out_h, params.out_w = out_w;
  params.start_h = Axis::start(c.padding_h), params.start_w = Axis::start(c.padding_w);
  params.channels = channels;
  params.steps = ceil_div(out_h, Shape::kStepOut), params.all_steps = all_steps;
  params.copy_bytes = copy_bytes, params.shifted = shifted;
  const int64_t blocks = params.chunks * ceil_div(across, plan.block.y);
  // A block costs kPerBlock steps more, and about two warm-ups: it begins and ends within images.
  const int64_t warm_up = Shape::kSkipsRows ? Shape::kWarmUp / 2 : Shape::kWarmUp;
  const int64_t splits = choose_splits(all_steps, blocks, shape.resident * device.multiprocessors,
                                       kPerBlock + 2 * warm_up);
  params.share = ceil_div(all_steps, splits);
  plan.grid = dim3(blocks, ceil_div(all_steps, params.share));
  if (kFactorRows > 0) {
    constexpr int kSums = (Shape::kTaps * Shape::kTaps + 1) * Shape::kChannels;
    const size_t sums = reduction_elements(plan.block.x, plan.block.y, kSums);
    plan.shared = std::max(plan.shared, sizeof(float) * sums);
  }
  const bool fits = plan.grid.y < 65536 && plan.shared <= device.block_shared;
  return fits ? std::optional(plan) : std::nullopt;
}

}  // namespace ops::depthwise_conv2d
