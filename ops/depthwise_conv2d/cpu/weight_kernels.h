// SIMD kernel of the weight and bias gradients; figure in weight_plan.h. No include guard.

namespace ops::cpu::OPS_ISA {

// A row of grad_output. The stride is in elements.
template <typename A>
struct GradRow {
  const A* data;
  int64_t pixel_stride;
};

// Accumulate grad_output · input over pixels [begin, end) of a row in the sums of COUNT taps.
template <typename A>
struct AccumulateTaps {
  template <int COUNT>
  static void run(const Tap* taps, GradRow<A> grad, const A* source, int64_t step, int64_t begin,
                  int64_t end, A* sums) {
    constexpr int N = kLanes<A>;
    const A* x[COUNT];
    Vec<A, N> sum[COUNT];
    OPS_UNROLL
    for (int t = 0; t < COUNT; ++t) {
      x[t] = source + taps[t].source;
      sum[t] = load<N>(sums + taps[t].weight);
    }
    for (int64_t i = begin; i < end; ++i) {
      const Vec<A, N> g = load<N>(grad.data + i * grad.pixel_stride);
      OPS_UNROLL
      for (int t = 0; t < COUNT; ++t) {
        sum[t] += g * load<N>(x[t] + i * step);
      }
    }
    OPS_UNROLL
    for (int t = 0; t < COUNT; ++t) {
      store<N>(sums + taps[t].weight, sum[t]);
    }
  }
};

// Output rows accumulated together; sources are read in place. All rows have the same taps. Strides
// are in elements.
template <typename A>
struct JoinedRows {
  int64_t count;
  GradRow<A> grad;  // first row
  int64_t grad_row;
  const A* source;
  int64_t step, source_row;  // between sources of adjacent pixels and rows
};

// Accumulate grad_output · input of several rows in the sums of COUNT taps. Padding is not in
// memory: zeros stand for it at the edges.
template <typename A>
struct AccumulateRows {
  template <int COUNT>
  static void run(const Tap* taps, const TapOutputs* ranges, const JoinedRows<A>& joined,
                  const TapGroup& group, int64_t lane, A* sums) {
    constexpr int N = kLanes<A>;
    static constexpr A zeros[N] = {};
    const A* x[COUNT];
    Vec<A, N> sum[COUNT];
    GradRow<A> grad{joined.grad.data + lane, joined.grad.pixel_stride};
    const int64_t step = joined.step;
    OPS_UNROLL
    for (int t = 0; t < COUNT; ++t) {
      x[t] = joined.source + lane + taps[t].source;
      sum[t] = load<N>(sums + taps[t].weight);
    }
    const auto add_edge = [&](int64_t i) {
      const Vec<A, N> g = load<N>(grad.data + i * grad.pixel_stride);
      OPS_UNROLL
      for (int t = 0; t < COUNT; ++t) {
        const bool valid = i >= ranges[t].begin && i < ranges[t].end;
        sum[t] += g * load<N>(valid ? x[t] + i * step : zeros);
      }
    };
    for (int64_t row = 0; row < joined.count; ++row) {
      int64_t i = group.begin;
      for (; i < group.inner_begin && i < group.end; ++i) {
        add_edge(i);
      }
      for (; i < group.inner_end; ++i) {
        const Vec<A, N> g = load<N>(grad.data + i * grad.pixel_stride);
        OPS_UNROLL
        for (int t = 0; t < COUNT; ++t) {
          sum[t] += g * load<N>(x[t] + i * step);
        }
      }
      for (; i < group.end; ++i) {
        add_edge(i);
      }
      grad.data += joined.grad_row;
      OPS_UNROLL
      for (int t = 0; t < COUNT; ++t) {
        x[t] += joined.source_row;
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
void accumulate_grad(GradRow<A> grad, int64_t begin, int64_t end, double* total) {
  constexpr int N = kLanes<A>;
  Vec<A, N> sum[4] = {};
  int64_t i = begin;
  for (; i + 4 <= end; i += 4) {
    for (int k = 0; k < 4; ++k) {
      sum[k] += load<N>(grad.data + (i + k) * grad.pixel_stride);
    }
  }
  for (; i < end; ++i) {
    sum[0] += load<N>(grad.data + i * grad.pixel_stride);
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
  const int64_t lane_count = p.lanes.count;
  const int64_t out_h = p.vertical.out_size, out_w = p.horizontal.out_size;
  const int64_t taps = p.vertical.taps * p.horizontal.taps;
  const int64_t join_terms =
      p.pixel_stride * sizeof(A) % kCacheLine == 0 ? kJoinTerms : kUnalignedJoinTerms;
  int64_t terms = 0;  // since the last flush
  Ring<T> ring;
  LaneView<const T> view;
  const A* source = nullptr;
  int64_t active = lane_count;
  int64_t count;  // output rows accumulated together
  for (int64_t index = begin; index < end; index += count) {
    const int64_t h = index % out_h;
    if (index == begin || h == 0) {
      view = out_view(p.g, p.lanes, p.grad, index / out_h, group);
      active = active_lanes(p.lanes, view);
      if (p.x.data) {
        ring = {source_view(p.g, p.lanes, p.x, index / out_h, group),
                workspace.ring() + p.left * lane_count, p.source_rows, 0};
        source = ring.data;
        if constexpr (std::is_same_v<T, A>) {
          source = p.direct ? ring.view.base[0] : source;
        }
      }
    }
    ValidRows valid{0, -1};
    count = 1;
    if (p.x.data) {
      valid = workspace.find_rows(p.vertical, h, p.horizontal.taps * lane_count, p.source_rows);
      if (p.direct) {
        while (valid.count == p.vertical.taps && index + count < end && h + count < out_h &&
               count * out_w < join_terms &&
               p.vertical.source(h + count, p.vertical.taps - 1) >= 0) {
          ++count;
        }
      } else {
        ring.gather(p.lanes, valid.last);
      }
    }
    GradRow<A> grad{workspace.row(), lane_count};
    if constexpr (std::is_same_v<T, A>) {
      if (p.direct || (view.pixel_stride && view.channels == lane_count)) {
        grad = {view.base[0] + h * view.row_stride, view.pixel_stride};
        if (!p.direct) {
          prefetch_row(view, 0, h + 1);
        }
      }
    }
    if (grad.data == workspace.row()) {
      gather_row(view, h, p.lanes, workspace.row());
    }
    const int64_t step = p.horizontal.stride * p.pixel_stride;
    const JoinedRows<A> joined{count,  grad, view.row_stride,
                               source, step, p.vertical.stride * p.source_rows.size};
    for (int64_t from = 0; from < out_w; from += kFlushTerms) {
      const int64_t until = from + kFlushTerms < out_w ? from + kFlushTerms : out_w;
      workspace.find_tap_groups(p, valid.count, from, until);
      for (int64_t lane = 0; lane < active; lane += N) {
        const int64_t at = !p.direct || lane + N <= p.pixel_stride ? lane : p.pixel_stride - N;
        const GradRow<A> part{grad.data + at, grad.pixel_stride};
        const bool prefetch = lane == 0 || (p.prefetch_lanes && lane * sizeof(A) % kCacheLine == 0);
        if (p.direct && from == 0 && prefetch) {
          const int64_t last = valid.last + (count - 1) * p.vertical.stride;
          for (int64_t i = 1; i <= count * p.vertical.stride; ++i) {
            prefetch_row(ring.view, 0, last + i, lane);
          }
          for (int64_t i = 0; i < count; ++i) {
            prefetch_row(view, 0, h + count + i, lane);
          }
        }
        for (const TapGroup& tap_group : workspace.tap_groups) {
          if (p.direct) {
            kernel_of<AccumulateRows<A>, kMaxGroupTaps>(tap_group.count)(
                &workspace.taps[tap_group.first], &workspace.ranges[tap_group.first], joined,
                tap_group, at, workspace.sums() + lane);
            continue;
          }
          kernel_of<AccumulateTaps<A>, kMaxGroupTaps>(tap_group.count)(
              &workspace.taps[tap_group.first], part, source + at, step, tap_group.begin,
              tap_group.end, workspace.sums() + lane);
        }
        for (int64_t row = 0; p.bias && row < count; ++row) {
          accumulate_grad(GradRow<A>{part.data + row * view.row_stride, part.pixel_stride}, from,
                          until, &workspace.totals[taps * lane_count + lane]);
        }
      }
      terms += (until - from) * count;
      if (terms >= kFlushTerms || (index + count == end && until == out_w)) {
        flush_sums(workspace.sums(), workspace.totals, taps * lane_count);
        terms = 0;
      }
    }
  }
}

}  // namespace ops::cpu::OPS_ISA
