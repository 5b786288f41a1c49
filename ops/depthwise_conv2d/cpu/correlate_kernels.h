// SIMD kernel of the forward pass and the input gradient; figure in plan.h. No include guard.

namespace ops::cpu::OPS_ISA::depthwise_conv2d {

// Prefetch to the L2 cache: sources of the next output row and outputs of the next block. With
// lanes as the inner loop the access pattern defeats the hardware prefetcher.
template <typename T>
struct Prefetch {
  const T* source;  // first of num_rows rows
  int64_t num_rows;
  int64_t pixel_stride, row_stride;  // of the source
  bool out;                          // prefetch outputs, too

  // always_inline: GCC treats a function that only prefetches as pure and drops the call.
  template <int R>
  __attribute__((always_inline)) void issue(int64_t at, int64_t step, const T* out_at,
                                            int64_t out_step) const {
    for (int64_t i = 0; i < num_rows; ++i) {
      for (int64_t p = 0; p < step; p += pixel_stride) {
        OPS_UNROLL
        for (int r = 0; r < R; ++r) {
          __builtin_prefetch(source + at + i * row_stride + p + r * step, 0, 2);
        }
      }
    }
    if (out) {
      OPS_UNROLL
      for (int r = 0; r < R; ++r) {
        __builtin_prefetch(out_at + (R + r) * out_step, 1, 2);
      }
    }
  }
};

// Load a vector that TIMES multiply-adds use. With AVX-512, keep it in a register: compilers repeat
// the load as a memory operand of each FMA. Two FMAs per cycle then need both load ports, and loads
// that cross cache lines occupy a port twice.
template <int TIMES, typename T>
inline Vec<acc_t<T>, kLanes<acc_t<T>>> load_once(const T* from) {
  auto x = load<kLanes<acc_t<T>>>(from);
#if OPS_VECTOR_BYTES == 64
  if constexpr (TIMES > 1) {
    asm("" : "+v"(x));
  }
#endif
  return x;
}

// Accumulate TAPS adjacent taps in R × V vectors. Source p serves tap t of output p − t, so
// R + TAPS − 1 sources, `step` elements apart, are loaded once.
// pads_first, pads_last: the first or last source is padding.
template <int TAPS, bool IN_PLACE, int R, int V, typename T, typename A = acc_t<T>>
inline void add_taps(Vec<A, kLanes<A>> (&sum)[R][V], const Tap* taps, const A* weight,
                     const T* source, int64_t step, bool pads_first, bool pads_last) {
  constexpr int N = kLanes<A>, SOURCES = R + TAPS - 1;
  static constexpr T zeros[V * N] = {};
  Vec<A, N> tap[TAPS][V];
  OPS_UNROLL
  for (int t = 0; t < TAPS; ++t) {
    OPS_UNROLL
    for (int v = 0; v < V; ++v) {
      tap[t][v] = load<N>(weight + taps[t].weight + v * N);
    }
  }
  source += taps[0].source;
  OPS_UNROLL
  for (int p = 0; p < SOURCES; ++p) {
    if (IN_PLACE && p > 0 && p % 4 == 0) {
      source += 4 * step;
      asm("" : "+r"(source));  // else compilers emit one chain of additions
    }
    const bool pads = (p == 0 && pads_first) || (p == SOURCES - 1 && pads_last);
    const T* from = pads ? zeros : source + (IN_PLACE ? p % 4 : p) * step;
    OPS_UNROLL
    for (int v = 0; v < V; ++v) {
      const Vec<A, N> x = load_once<TAPS>(from + v * N);
      OPS_UNROLL
      for (int t = 0; t < TAPS; ++t) {
        if (p >= t && p - t < R) {
          sum[p - t][v] += tap[t][v] * x;
        }
      }
    }
  }
}

// Compute a register block: R outputs, V vectors of lanes at a time, accumulated over all taps.
// IN_PLACE: sources may be padding that is not in memory. T: type of sources and outputs.
template <int V, bool IN_PLACE, typename T>
struct CorrelateBlock {
  using A = acc_t<T>;

  template <int R>
  static void run(const Block& block, const RowPlan& row_plan, const Tap* filter_rows,
                  int64_t num_rows, int64_t lanes, const T* source, const A* weight, const A* bias,
                  T* out, int64_t out_pixel_stride, Prefetch<T> prefetch) {
    constexpr int N = kLanes<A>;
    const int64_t step = row_plan.source_step;
    const bool pads_first = IN_PLACE && block.pads_first, pads_last = IN_PLACE && block.pads_last;
    const int64_t out_step = row_plan.out_step * out_pixel_stride;
    const Tap *begin = row_plan.taps.data() + block.tap_begin,
              *end = row_plan.taps.data() + block.tap_end;
    source += block.source;
    out += block.out * out_pixel_stride;
    for (int64_t next = 0; next < lanes; next += V * N) {
      const int64_t lane = next + V * N <= lanes ? next : lanes - V * N;  // the last may overlap
      if (next * sizeof(T) % kCacheLine == 0) {
        prefetch.template issue<R>(block.source + lane, step, out + lane, out_step);
      }
      Vec<A, N> sum[R][V];
      OPS_UNROLL
      for (int r = 0; r < R; ++r) {
        OPS_UNROLL
        for (int v = 0; v < V; ++v) {
          sum[r][v] = load<N>(bias + lane + v * N);
        }
      }
      for (int64_t i = 0; i < num_rows; ++i) {
        const T* row = source + filter_rows[i].source + lane;
        const A* row_weight = weight + filter_rows[i].weight + lane;
        const Tap* tap = begin;
        if constexpr (V == 1) {  // V = 2: registers for one tap only
          for (; block.shared && end - tap >= 3; tap += 3) {
            add_taps<3, IN_PLACE>(sum, tap, row_weight, row, step, tap == begin && pads_first,
                                  tap + 3 == end && pads_last);
          }
          if (block.shared && end - tap == 2) {
            add_taps<2, IN_PLACE>(sum, tap, row_weight, row, step, tap == begin && pads_first,
                                  pads_last);
            tap = end;
          }
        }
        for (; tap < end; ++tap) {
          if (pads_first || pads_last) {
            add_taps<1, IN_PLACE>(sum, tap, row_weight, row, step, tap == begin && pads_first,
                                  tap + 1 == end && pads_last);
          } else {
            add_taps<1, false>(sum, tap, row_weight, row, step, false, false);
          }
        }
      }
      OPS_UNROLL
      for (int r = 0; r < R; ++r) {
        OPS_UNROLL
        for (int v = 0; v < V; ++v) {
          store<N>(out + r * out_step + lane + v * N, sum[r][v]);
        }
      }
    }
  }
};

template <typename T>
auto select_correlate(const RowPlan& row_plan, int64_t vectors, int64_t outputs) {
  if constexpr (kSpecialised<T>) {
    if (vectors == 2) {
      return kernel_of<CorrelateBlock<2, true, T>, kMaxOutputs / 2>(outputs);
    }
    if (!row_plan.extra_in_place) {
      return kernel_of<CorrelateBlock<1, false, T>, kMaxOutputs>(outputs);
    }
  }
  return kernel_of<CorrelateBlock<1, true, T>, kMaxOutputs>(outputs);
}

// Compute output rows [begin, end) of the index [image group][channel group][row].
template <typename T>
void correlate(const Correlation<T>& c, int64_t begin, int64_t end,
               Workspace<acc_t<T>>& workspace) {
  using A = acc_t<T>;
  const int64_t lane_count = c.lanes.count;
  const RowPlan& row_plan = c.row_plan;
  const Axis& vertical = c.lanes.bands.axis;
  const int64_t out_h = vertical.out_size, groups = c.lanes.channel_groups;
  Ring<T> ring;
  LaneView<T> view;
  int64_t active = lane_count;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t h = index % out_h, group = index / out_h % groups;
    if (index == begin || h == 0) {
      const int64_t images = index / out_h / groups;
      ring = {lane_view(c.g, c.lanes, c.source, images, group, true),
              workspace.ring() + row_plan.left * lane_count, c.source_rows, 0};
      view = lane_view(c.g, c.lanes, c.out, images, group, false);
      active = active_lanes(c.lanes, view);
    }
    const ValidRows valid =
        workspace.find_rows(vertical, h, c.g.kernel_w * lane_count, c.source_rows);
    const A* weight = c.weight + group * c.g.kernel_h * c.g.kernel_w * lane_count;
    const A* bias = c.bias + group * lane_count;
    const auto run_blocks = [&](const auto* source, auto* out, int64_t out_pixel_stride,
                                const auto& prefetch) {
      using S = std::remove_reference_t<decltype(*out)>;
      for (const Block& block : row_plan.blocks) {
        const auto run = select_correlate<S>(row_plan, c.vectors, block.outputs);
        run(block, row_plan, workspace.filter_rows.data(), valid.count, active, source, weight,
            bias, out, out_pixel_stride, prefetch);
      }
    };
    // Blocks that store to the image.
    const bool to_image = view.pixel_stride && view.channels == lane_count;
    T* const image_row = view.base[0] + h * view.row_stride;
    const bool prefetch_out = to_image && view.prefetch_rows > 0;
    if constexpr (kReadsInPlace<T>) {
      if (c.in_place) {
        const T* const source = ring.view.base[0];
        const int64_t next = valid.last + 1, left = ring.view.prefetch_rows - next;
        const int64_t most = vertical.transposed ? 1 : vertical.stride;
        run_blocks(source, image_row, view.pixel_stride,
                   Prefetch<T>{source + next * c.source_rows.size, left < most ? left : most,
                               lane_count, c.source_rows.size, prefetch_out});
        continue;
      }
    }
    ring.gather(c.lanes, valid.last);
    const A* const source = ring.data;
    if constexpr (std::is_same_v<T, A>) {
      if (to_image) {
        run_blocks(source, image_row, view.pixel_stride,
                   Prefetch<T>{nullptr, 0, lane_count, 0, prefetch_out});
        continue;
      }
    }
    run_blocks(source, workspace.row(), lane_count, Prefetch<A>{nullptr, 0, lane_count, 0, false});
    scatter_row(workspace.row(), c.lanes, view, h);
  }
}

}  // namespace ops::cpu::OPS_ISA::depthwise_conv2d
