// The convolution and its input gradient on vectors; see depthwise_plan.h. No include guard: see
// for_each_isa.h.

namespace ops::cpu::OPS_ISA {

// R outputs, V vectors of lanes at a time, their sums in registers over all taps. STEP is
// source_step / (V N), or 0 for any.
template <int V, int STEP, typename A>
struct CorrelateBlock {
  template <int R>
  static void run(const Block& block, const Columns& columns, const Tap* rows, int64_t num_rows,
                  int64_t lanes, const A* source, const A* weight, const A* bias, A* out,
                  int64_t out_pixel) {
    constexpr int N = kLanes<A>;
    const int64_t step = STEP ? STEP * V * N : columns.source_step;
    const Tap* taps = columns.taps.data();
    source += block.source;
    out += block.out * out_pixel;
    for (int64_t next = 0; next < lanes; next += V * N) {
      const int64_t lane = next + V * N <= lanes ? next : lanes - V * N;  // overlaps those before
      Vec<A, N> sum[R][V];
      OPS_UNROLL
      for (int r = 0; r < R; ++r) {
        OPS_UNROLL
        for (int v = 0; v < V; ++v) {
          sum[r][v] = load<N>(bias + lane + v * N);
        }
      }
      for (int64_t i = 0; i < num_rows; ++i) {
        const A* row = source + rows[i].source + lane;
        const A* row_weight = weight + rows[i].weight + lane;
        for (int64_t t = block.tap_begin; t < block.tap_end; ++t) {
          Vec<A, N> tap[V];
          OPS_UNROLL
          for (int v = 0; v < V; ++v) {
            tap[v] = load<N>(row_weight + taps[t].weight + v * N);
          }
          const A* at = row + taps[t].source;
          OPS_UNROLL
          for (int r = 0; r < R; ++r) {
            OPS_UNROLL
            for (int v = 0; v < V; ++v) {
              sum[r][v] += tap[v] * load<N>(at + r * step + v * N);
            }
          }
        }
      }
      OPS_UNROLL
      for (int r = 0; r < R; ++r) {
        OPS_UNROLL
        for (int v = 0; v < V; ++v) {
          store<N>(out + r * columns.out_step * out_pixel + lane + v * N, sum[r][v]);
        }
      }
    }
  }
};

template <int V, typename A>
auto correlate_for(const Columns& columns, int64_t outputs) {
  constexpr int N = V * kLanes<A>;
  constexpr int MOST = kMostOutputs / V;
  return columns.source_step == N       ? kernel_of<CorrelateBlock<V, 1, A>, MOST>(outputs)
         : columns.source_step == 2 * N ? kernel_of<CorrelateBlock<V, 2, A>, MOST>(outputs)
                                        : kernel_of<CorrelateBlock<V, 0, A>, MOST>(outputs);
}

// Output rows `begin` to `end`, counted over groups of images, groups of channels and rows.
template <typename T>
void correlate(const Correlation<T>& c, int64_t begin, int64_t end,
               Workspace<acc_t<T>>& workspace) {
  using A = acc_t<T>;
  const int64_t lanes = c.lanes.lanes;
  const Columns& columns = c.columns;
  const int64_t out_h = c.vertical.out_size, groups = c.lanes.channel_groups;
  Ring<T> ring;
  Place<T> place;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t h = index % out_h, group = index / out_h % groups;
    if (index == begin || h == 0) {
      const int64_t images = index / out_h / groups;
      ring = {c.source_place(images, group), workspace.ring() + columns.left * lanes, c.source_rows,
              0};
      place = c.out_place(images, group);
    }
    const TapRows rows =
        workspace.find_rows(c.vertical, h, c.horizontal.taps * lanes, c.source_rows);
    const A* source = nullptr;
    A* out = nullptr;
    int64_t out_pixel = lanes;
    if constexpr (std::is_same_v<T, A>) {
      if (c.direct) {
        source = ring.place.start[0];
      }
      if (place.pixel && place.channels == lanes) {  // blocks can write to memory themselves
        out = place.start[0] + h * place.row;
        out_pixel = place.pixel;
      }
    }
    if (!source) {
      ring.gather(c.lanes, rows.last);
      source = ring.data;
    }
    const bool scattered = !out;
    if (scattered) {
      out = workspace.row();
    }
    const A* weight = c.weight + group * c.vertical.taps * c.horizontal.taps * lanes;
    const A* bias = c.bias + group * lanes;
    for (const Block& block : columns.blocks) {
      const auto run = lanes == kLanes<A> ? correlate_for<1, A>(columns, block.outputs)
                                          : correlate_for<2, A>(columns, block.outputs);
      run(block, columns, workspace.rows.data(), rows.count, lanes, source, weight, bias, out,
          out_pixel);
    }
    if (scattered) {
      scatter_row(out, c.lanes, place, h);
    }
  }
}

}  // namespace ops::cpu::OPS_ISA
