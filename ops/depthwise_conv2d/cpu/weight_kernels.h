// The weight and bias gradients on vectors; see plan.h. No include guard: see
// core/cpu/dispatch_isa.h.

namespace ops::cpu::OPS_ISA {

// A row of grad_output, and from one of its pixels to the next.
template <typename A>
struct GradRow {
  const A* data;
  int64_t pixel;
};

// Adds to the sums of COUNT taps: grad_output · input, over pixels `begin` to `end` of a row.
template <typename A>
struct AddProducts {
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
      const Vec<A, N> g = load<N>(grad.data + i * grad.pixel);
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

// Adds pixels `begin` to `end` to a total, in four parts: an addition takes several cycles.
template <typename A>
void add_all(GradRow<A> grad, int64_t begin, int64_t end, double* total) {
  constexpr int N = kLanes<A>;
  Vec<A, N> sum[4] = {};
  int64_t i = begin;
  for (; i + 4 <= end; i += 4) {
    for (int k = 0; k < 4; ++k) {
      sum[k] += load<N>(grad.data + (i + k) * grad.pixel);
    }
  }
  for (; i < end; ++i) {
    sum[0] += load<N>(grad.data + i * grad.pixel);
  }
  sum[0] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  for (int lane = 0; lane < N; ++lane) {
    total[lane] += sum[0][lane];
  }
}

// From sums to totals, and zeros into the sums.
template <typename A>
void move_sums(A* __restrict__ sums, double* __restrict__ totals, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    totals[i] += sums[i];
    sums[i] = 0;
  }
}

// Adds to a group's totals what output rows `begin` to `end`, counted over groups of images and
// rows, make.
template <typename T>
void sum_weights(const WeightGradient<T>& p, int64_t group, int64_t begin, int64_t end,
                 WeightWorkspace<acc_t<T>>& workspace) {
  using A = acc_t<T>;
  constexpr int N = kLanes<A>;
  const int64_t lanes = p.lanes.lanes;
  const int64_t out_h = p.vertical.out_size, out_w = p.horizontal.out_size;
  const int64_t taps = p.vertical.taps * p.horizontal.taps;
  int64_t terms = 0;  // in each sum
  Ring<T> ring;
  Place<const T> place;
  const A* source = nullptr;
  int64_t used = lanes;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t h = index % out_h;
    if (index == begin || h == 0) {
      place = p.grad_place(index / out_h, group);
      used = lanes_in_use(p.lanes, place);
      if (p.x) {
        ring = {p.x_place(index / out_h, group), workspace.ring() + p.left * lanes, p.source_rows,
                0};
        source = ring.data;
        if constexpr (std::is_same_v<T, A>) {
          source = p.direct ? ring.place.start[0] : source;
        }
      }
    }
    TapRows rows{0, -1};
    if (p.x) {
      rows = workspace.find_rows(p.vertical, h, p.horizontal.taps * lanes, p.source_rows);
      if (p.direct) {
        for (int64_t i = 1; i <= p.vertical.stride; ++i) {
          fetch_row(ring.place, 0, rows.last + i);
        }
      } else {
        ring.gather(p.lanes, rows.last);
      }
    }
    GradRow<A> grad{workspace.row(), lanes};
    if constexpr (std::is_same_v<T, A>) {
      if (p.direct || (place.pixel && place.channels == lanes)) {
        grad = {place.start[0] + h * place.row, place.pixel};
        fetch_row(place, 0, h + 1);
      }
    }
    if (grad.data == workspace.row()) {
      gather_row(place, h, p.lanes, workspace.row());
    }
    for (int64_t from = 0; from < out_w; from += kMostTerms) {
      const int64_t until = from + kMostTerms < out_w ? from + kMostTerms : out_w;
      workspace.find_meetings(p, rows.count, from, until);
      for (int64_t lane = 0; lane < used; lane += N) {
        const int64_t at = !p.direct || lane + N <= p.pixel ? lane : p.pixel - N;
        const GradRow<A> part{grad.data + at, grad.pixel};
        for (const Meeting& m : workspace.meetings) {
          kernel_of<AddProducts<A>, kMostTaps>(m.count)(&workspace.taps[m.first], part, source + at,
                                                        p.horizontal.stride * p.pixel, m.begin,
                                                        m.end, workspace.sums() + lane);
        }
        if (p.bias) {
          add_all(part, from, until, &workspace.totals[taps * lanes + lane]);
        }
      }
      terms += until - from;
      if (terms >= kMostTerms || (index + 1 == end && until == out_w)) {
        move_sums(workspace.sums(), workspace.totals, taps * lanes);
        terms = 0;
      }
    }
  }
}

}  // namespace ops::cpu::OPS_ISA
