// SIMD kernel of the weight and bias gradients; figure in weight_plan.h. No include guard.

namespace ops::cpu::OPS_ISA::depthwise_conv2d {

// Output rows accumulated together, all with the same taps; a single row, if sources are in the
// ring. Strides are in elements.
template <typename A>
struct JoinedRows {
  int64_t count;
  const A* grad;
  int64_t grad_pixel, grad_row;  // strides
  const A* source;
  int64_t source_pixel, source_row;  // strides, of the sources of adjacent outputs
};

// Accumulate grad_output · input in the sums of COUNT taps. At the edges, zeros stand for padding
// that is not in memory.
template <typename A>
struct AccumulateTaps {
  template <int COUNT>
  static void run(const Tap* taps, const TapOutputs* ranges, const JoinedRows<A>& rows,
                  const TapGroup& group, int64_t lane, A* sums) {
    constexpr int N = kLanes<A>;
    static constexpr A zeros[N] = {};
    const A* x[COUNT];
    Vec<A, N> sum[COUNT];
    const A* grad = rows.grad + lane;
    const int64_t grad_pixel = rows.grad_pixel, step = rows.source_pixel;
    OPS_UNROLL
    for (int t = 0; t < COUNT; ++t) {
      x[t] = rows.source + lane + taps[t].source;
      sum[t] = load<N>(sums + taps[t].weight);
    }
    const auto add_edge = [&](int64_t i) {
      const Vec<A, N> g = load<N>(grad + i * grad_pixel);
      OPS_UNROLL
      for (int t = 0; t < COUNT; ++t) {
        const bool valid = i >= ranges[t].begin && i < ranges[t].end;
        sum[t] += g * load<N>(valid ? x[t] + i * step : zeros);
      }
    };
    const int64_t inner_begin = group.inner_begin > group.begin ? group.inner_begin : group.begin;
    const int64_t inner_end = group.inner_end < group.end ? group.inner_end : group.end;
    for (int64_t row = 0; row < rows.count; ++row) {
      int64_t i = group.begin;
      for (; i < inner_begin && i < group.end; ++i) {
        add_edge(i);
      }
      for (; i < inner_end; ++i) {
        const Vec<A, N> g = load<N>(grad + i * grad_pixel);
        OPS_UNROLL
        for (int t = 0; t < COUNT; ++t) {
          sum[t] += g * load<N>(x[t] + i * step);
        }
      }
      for (; i < group.end; ++i) {
        add_edge(i);
      }
      grad += rows.grad_row;
      OPS_UNROLL
      for (int t = 0; t < COUNT; ++t) {
        x[t] += rows.source_row;
      }
    }
    OPS_UNROLL
    for (int t = 0; t < COUNT; ++t) {
      store<N>(sums + taps[t].weight, sum[t]);
    }
  }
};

// Add pixels [begin, end) of grad_output to `total` (bias gradient). Four accumulators hide the
// latency of additions.
template <typename A>
void accumulate_grad(const A* grad, int64_t pixel_stride, int64_t begin, int64_t end,
                     double* total) {
  constexpr int N = kLanes<A>;
  Vec<A, N> sum[4] = {};
  int64_t i = begin;
  for (; i + 4 <= end; i += 4) {
    for (int k = 0; k < 4; ++k) {
      sum[k] += load<N>(grad + (i + k) * pixel_stride);
    }
  }
  for (; i < end; ++i) {
    sum[0] += load<N>(grad + i * pixel_stride);
  }
  sum[0] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  for (int lane = 0; lane < N; ++lane) {
    total[lane] += sum[0][lane];
  }
}

// Add n sums to the totals and reset them.
template <typename A>
void flush_sums(A* __restrict__ sums, double* __restrict__ totals, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    totals[i] += sums[i];
    sums[i] = 0;
  }
}

// Accumulate output rows [begin, end) of the index [image group][row] in the totals of a channel
// group.
template <typename T>
void accumulate_weight_gradient(const WeightGradient<T>& p, int64_t group, int64_t begin,
                                int64_t end, WeightWorkspace<acc_t<T>>& workspace) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  const int64_t lane_count = p.lanes.count, stride = p.vertical.stride;
  const int64_t out_h = p.vertical.out_size, out_w = p.g.out_w;
  const int64_t taps = p.vertical.taps * p.g.kernel_w;
  const int64_t join_terms =
      p.pixel_stride * sizeof(A) % kCacheLine == 0 ? kJoinTerms : kUnalignedJoinTerms;
  int64_t terms = 0;  // since the last flush
  Ring<T> ring;
  LaneView<const T> view;
  JoinedRows<A> rows;
  rows.source_pixel = p.g.stride_w * p.pixel_stride;
  rows.source_row = stride * p.source_rows.size;
  int64_t active = lane_count;
  for (int64_t index = begin; index < end; index += rows.count) {
    const int64_t h = index % out_h;
    if (index == begin || h == 0) {
      view = lane_view(p.g, p.lanes, p.grad, index / out_h, group, false);
      active = active_lanes(p.lanes, view);
      if (p.x.data) {
        ring = {lane_view(p.g, p.lanes, p.x, index / out_h, group, true),
                workspace.ring() + p.left * lane_count, p.source_rows, 0};
        rows.source = ring.data;
        if constexpr (std::is_same_v<T, A>) {
          rows.source = p.in_place ? ring.view.base[0] : rows.source;
        }
      }
    }
    ValidRows valid{0, -1};
    rows.count = 1;
    if (p.x.data) {
      valid = workspace.find_rows(p.vertical, h, p.g.kernel_w * lane_count, p.source_rows);
      if (!p.in_place) {
        ring.gather(p.lanes, valid.last);
      }
      while (p.in_place && valid.count == p.vertical.taps && index + rows.count < end &&
             h + rows.count < out_h && rows.count * out_w < join_terms &&
             p.vertical.source(h + rows.count, p.vertical.taps - 1) >= 0) {
        ++rows.count;
      }
    }
    rows.grad = workspace.row();
    rows.grad_pixel = lane_count;
    rows.grad_row = view.row_stride;
    if constexpr (std::is_same_v<T, A>) {
      if (p.in_place || (view.pixel_stride && view.channels == lane_count)) {
        rows.grad = view.base[0] + h * view.row_stride;
        rows.grad_pixel = view.pixel_stride;
      }
    }
    if (rows.grad == workspace.row()) {
      gather_row(view, h, p.lanes, workspace.row());
    }
    for (int64_t from = 0; from < out_w; from += kFlushTerms) {
      const int64_t until = from + kFlushTerms < out_w ? from + kFlushTerms : out_w;
      workspace.find_tap_groups(p, valid.count, from, until);
      for (int64_t lane = 0; lane < active; lane += N) {
        const int64_t at = !p.in_place || lane + N <= p.pixel_stride ? lane : p.pixel_stride - N;
        for (const TapGroup& tap_group : workspace.tap_groups) {
          kernel_of<AccumulateTaps<A>, kMaxGroupTaps>(tap_group.count)(
              &workspace.taps[tap_group.first], &workspace.ranges[tap_group.first], rows, tap_group,
              at, workspace.sums() + lane);
        }
        for (int64_t row = 0; p.bias && row < rows.count; ++row) {
          accumulate_grad(rows.grad + at + row * view.row_stride, rows.grad_pixel, from, until,
                          &workspace.totals[taps * lane_count + lane]);
        }
      }
      terms += (until - from) * rows.count;
      if (terms >= kFlushTerms || (index + rows.count == end && until == out_w)) {
        flush_sums(workspace.sums(), workspace.totals, taps * lane_count);
        terms = 0;
      }
    }
  }
}

}  // namespace ops::cpu::OPS_ISA::depthwise_conv2d
