// The convolution and its input gradient on vectors; see depthwise_plan.h. No include guard: see
// for_each_isa.h.

namespace ops::cpu::OPS_ISA {

// R outputs, their sums in registers over all taps. STEP is source_step / N, or 0 for any.
template <int STEP, typename A>
struct CorrelateBlock {
  template <int R>
  static void run(const Block& block, const Columns& columns, const Tap* rows, int64_t num_rows,
                  const A* source, const A* weight, const A* bias, A* out, int64_t out_pixel) {
    constexpr int N = kLanes<A>;
    const int64_t step = STEP ? STEP * N : columns.source_step;
    const Tap* taps = columns.taps.data();
    Vec<A, N> sum[R];
    OPS_UNROLL
    for (int r = 0; r < R; ++r) {
      sum[r] = load<N>(bias);
    }
    for (int64_t i = 0; i < num_rows; ++i) {
      const A* row = source + rows[i].source + block.source;
      const A* row_weight = weight + rows[i].weight;
      for (int64_t t = block.tap_begin; t < block.tap_end; ++t) {
        const Vec<A, N> tap = load<N>(row_weight + taps[t].weight);
        const A* at = row + taps[t].source;
        OPS_UNROLL
        for (int r = 0; r < R; ++r) {
          sum[r] += tap * load<N>(at + r * step);
        }
      }
    }
    OPS_UNROLL
    for (int r = 0; r < R; ++r) {
      store<N>(out + (block.out + r * columns.out_step) * out_pixel, sum[r]);
    }
  }
};

template <int STEP, typename A>
auto correlate_for(int64_t outputs) {
  return kernel_of<CorrelateBlock<STEP, A>, kMostOutputs>(outputs);
}

// Output rows `begin` to `end`, counted over groups of images, slabs of channels and rows.
template <typename T>
void correlate(const Correlation<T>& c, int64_t begin, int64_t end,
               Workspace<acc_t<T>>& workspace) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  const Columns& columns = c.columns;
  const int64_t out_h = c.vertical.out_size, groups = c.lanes.channel_groups;
  const int64_t slabs = (groups + c.slab - 1) / c.slab;
  Ring<T> rings[kMostSlab];
  Place<T> outs[kMostSlab];
  for (int64_t index = begin; index < end; ++index) {
    const int64_t h = index % out_h, slab = index / out_h % slabs;
    const int64_t first_group = slab * c.slab;
    const int64_t num_groups = slab + 1 < slabs ? c.slab : groups - first_group;
    if (index == begin || h == 0) {
      const int64_t images = index / out_h / slabs;
      for (int64_t k = 0; k < num_groups; ++k) {
        rings[k] = {c.source_place(images, first_group + k), workspace.ring(k) + columns.left * N,
                    workspace.ring_rows(), workspace.source_row(), 0};
        outs[k] = c.out_place(images, first_group + k);
      }
    }
    const TapRows rows = workspace.find_rows(c.vertical, h, c.horizontal.taps * N);
    for (int64_t k = 0; k < num_groups; ++k) {
      rings[k].gather(c.lanes, rows.last);
      const A* weight = c.weight + (first_group + k) * c.vertical.taps * c.horizontal.taps * N;
      const A* bias = c.bias + (first_group + k) * N;
      A* out = workspace.row(0);
      int64_t out_pixel = N;
      bool direct = false;  // whether blocks can write to memory themselves
      if constexpr (std::is_same_v<T, A>) {
        if (outs[k].pixel && outs[k].channels == N) {
          direct = true;
          out = outs[k].start[0] + h * outs[k].row;
          out_pixel = outs[k].pixel;
        }
      }
      for (const Block& block : columns.blocks) {
        const auto run = columns.source_step == N       ? correlate_for<1, A>(block.outputs)
                         : columns.source_step == 2 * N ? correlate_for<2, A>(block.outputs)
                                                        : correlate_for<0, A>(block.outputs);
        run(block, columns, workspace.rows.data(), rows.count, rings[k].data, weight, bias, out,
            out_pixel);
      }
      if (!direct) {
        scatter_row(out, c.lanes, outs[k], h);
      }
    }
  }
}

}  // namespace ops::cpu::OPS_ISA
