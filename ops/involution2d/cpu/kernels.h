// Vector kernels of the CPU involution; see plan.h. No include guard: see core/cpu/dispatch_isa.h.

#include "involution2d/cpu/copy_kernels.h"

namespace ops::cpu::OPS_ISA {

// Vectors of pixels per register tile of R channels or taps: R · kVectors sums hide FMA latency.
template <int R>
constexpr int kVectors = R > 4   ? 1
                         : R > 2 ? 2
                                 : 4;

// Offsets of the terms of R sums. Forward, input gradient: R channels, summed over the taps.
struct TapTerms {
  const TapOffsets* taps;
  int64_t pitch, width;  // channel strides: of the source, of factor and out

  int64_t factor(int64_t tap) const { return taps[tap].weight; }
  int64_t source(int64_t tap, int r) const { return taps[tap].source + r * pitch; }
  int64_t out(int r) const { return r * width; }
};

// Weight gradient: R taps, summed over the channels.
struct ChannelTerms {
  const TapOffsets* taps;
  int64_t pitch, width;

  int64_t factor(int64_t channel) const { return channel * width; }
  int64_t source(int64_t channel, int r) const { return taps[r].source + channel * pitch; }
  int64_t out(int r) const { return taps[r].weight; }
};

// Register tile of R sums × P vectors of pixels: accumulate factor · source over the terms.
template <int R, int P, typename Terms, typename A>
void sum_terms(const Terms& terms, int64_t count, const A* factor, const A* source, A* out) {
  constexpr int N = kLanes<A>;
  Vec<A, N> sum[R][P] = {};
  for (int64_t t = 0; t < count; ++t) {
    const A* f = factor + terms.factor(t);
    Vec<A, N> v[P];
    OPS_UNROLL
    for (int p = 0; p < P; ++p) {
      v[p] = load<N>(f + p * N);
    }
    OPS_UNROLL
    for (int r = 0; r < R; ++r) {
      OPS_UNROLL
      for (int p = 0; p < P; ++p) {
        sum[r][p] += v[p] * load<N>(source + terms.source(t, r) + p * N);
      }
    }
  }
  OPS_UNROLL
  for (int r = 0; r < R; ++r) {
    OPS_UNROLL
    for (int p = 0; p < P; ++p) {
      store<N>(out + terms.out(r) + p * N, sum[r][p]);
    }
  }
}

// Run register tiles along a row; the last vector may exceed it.
template <typename Terms, typename A>
struct RowLoop {
  template <int R>
  static void run(const Terms& terms, int64_t count, const A* factor, const A* source, A* out) {
    constexpr int N = kLanes<A>, P = kVectors<R>;
    int64_t i = 0;
    for (; P > 1 && i + (P - 1) * N < terms.width; i += P * N) {
      sum_terms<R, P>(terms, count, factor + i, source + i, out + i);
    }
    for (; i < terms.width; i += N) {
      sum_terms<R, 1>(terms, count, factor + i, source + i, out + i);
    }
  }
};

// Pointers to one group of one image, and the state of its ring buffer.
template <typename T>
struct GroupCursor {
  const T *source, *factor;
  T* out;
  int64_t group;
  int64_t next_row = 0;  // first source row that is not in the ring

  GroupCursor(const InvolutionPlan<T>& p, int64_t index) : group(index % p.g.groups) {
    const int64_t n = index / p.g.groups;
    source = p.source + n * p.source_strides.n + group * p.source_channels * p.source_strides.c;
    factor = p.factor + n * p.factor_strides.n + group * p.factor_channels * p.factor_strides.c;
    out = p.out + n * p.out_strides.n + group * p.out_channels * p.out_strides.c;
  }

  // Return the range of channels [first, first + count) of the group, which has `channels`.
  ChannelRange channels(const InvolutionPlan<T>& p, int64_t channels, int64_t first,
                        int64_t count) const {
    const int64_t before = group * channels + first;
    return {before, count, p.g.groups * channels - before - count};
  }

  // Copy the source rows that output row h reads to the ring, unless they are there.
  void fill_ring(const InvolutionPlan<T>& p, int64_t h, InvolutionWorkspace<acc_t<T>>& workspace) {
    const int64_t rows = workspace.ring_rows;
    int64_t last = -1;
    for (int64_t a = 0; a < p.vertical.taps; ++a) {
      const int64_t at = p.vertical.source(h, a);
      last = at > last ? at : last;
    }
    for (next_row = next_row > last - rows ? next_row : last - rows + 1; next_row <= last;
         ++next_row) {
      for (const PixelPhase& pixels : p.row.sources) {
        const T* from = source + next_row * p.source_strides.h + pixels.first * p.source_strides.w;
        A* to = workspace.ring + next_row % rows * p.row.width + pixels.start;
        gather_pixels(from, p.source_strides.c, pixels.step * p.source_strides.w,
                      channels(p, p.source_channels, 0, p.source_channels), pixels.count, to,
                      workspace.pitch);
      }
    }
  }

 private:
  using A = acc_t<T>;
};

// Compute outputs or input gradients of rows [begin, end), counted over images, groups, rows.
template <typename T>
void involve(const InvolutionPlan<T>& p, int64_t begin, int64_t end,
             InvolutionWorkspace<acc_t<T>>& workspace) {
  using A = acc_t<T>;
  const int64_t rows = p.vertical.out_size, taps_w = p.horizontal.taps, channels = p.out_channels;
  const ImageStrides& in = p.factor_strides;
  GroupCursor<T> group(p, begin / rows);
  for (int64_t index = begin; index < end; ++index) {
    const int64_t h = index % rows;
    if (h == 0) {
      group = GroupCursor<T>(p, index / rows);
    }
    group.fill_ring(p, h, workspace);
    if (!p.vertical.transposed) {
      gather_pixels(group.factor + h * in.h, in.c, in.w,
                    group.channels(p, p.factor_channels, 0, p.factor_channels),
                    p.horizontal.out_size, workspace.weights, p.weight_width);
    }
    for (int64_t a = 0; p.vertical.transposed && a < p.vertical.taps; ++a) {
      const int64_t at = p.vertical.source(h, a);
      if (at >= 0) {
        gather_pixels(group.factor + at * in.h + a * taps_w * in.c, in.c, in.w,
                      group.channels(p, p.factor_channels, a * taps_w, taps_w),
                      p.horizontal.source_size,
                      workspace.weights + a * taps_w * p.weight_width + p.row.sources[0].start,
                      p.weight_width);
      }
    }
    for (const PhasePlan::Outputs& outputs : p.row.outputs) {
      const int64_t count = workspace.list_taps(p, outputs, h);
      const int64_t chunks = (channels + kMaxSums - 1) / kMaxSums;
      for (int64_t i = 0; i < chunks; ++i) {
        const int64_t first = channels * i / chunks, past = channels * (i + 1) / chunks;
        kernel_of<RowLoop<TapTerms, A>, kMaxSums>(past - first)(
            {workspace.taps.data(), workspace.pitch, p.row.out_width}, count, workspace.weights,
            workspace.ring + first * workspace.pitch, workspace.rows + first * p.row.out_width);
      }
      const PixelPhase& pixels = outputs.pixels;
      T* to = group.out + h * p.out_strides.h + pixels.first * p.out_strides.w;
      scatter_pixels(workspace.rows, p.row.out_width, to, p.out_strides.c,
                     pixels.step * p.out_strides.w, channels, pixels.count);
    }
  }
}

// Compute the weight gradient of rows [begin, end).
template <typename T>
void involve_weight(const InvolutionPlan<T>& p, int64_t begin, int64_t end,
                    InvolutionWorkspace<acc_t<T>>& workspace) {
  using A = acc_t<T>;
  const int64_t rows = p.vertical.out_size, width = p.row.out_width;
  GroupCursor<T> group(p, begin / rows);
  for (int64_t index = begin; index < end; ++index) {
    const int64_t h = index % rows;
    if (h == 0) {
      group = GroupCursor<T>(p, index / rows);
    }
    group.fill_ring(p, h, workspace);
    gather_pixels(group.factor + h * p.factor_strides.h, p.factor_strides.c, p.factor_strides.w,
                  group.channels(p, p.factor_channels, 0, p.factor_channels), p.horizontal.out_size,
                  workspace.rows, width);
    const int64_t count = workspace.list_taps(p, p.row.outputs[0], h);
    const int64_t chunks = (count + kMaxSums - 1) / kMaxSums;
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t first = count * i / chunks, past = count * (i + 1) / chunks;
      kernel_of<RowLoop<ChannelTerms, A>, kMaxSums>(past - first)(
          {&workspace.taps[first], workspace.pitch, width}, p.factor_channels, workspace.rows,
          workspace.ring, workspace.weights);
    }
    scatter_pixels(workspace.weights, width, group.out + h * p.out_strides.h, p.out_strides.c,
                   p.out_strides.w, p.out_channels, p.horizontal.out_size);
  }
}

}  // namespace ops::cpu::OPS_ISA
