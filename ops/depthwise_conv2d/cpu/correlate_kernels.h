// The convolution and its input gradient on vectors; see plan.h. No include guard: see
// core/cpu/dispatch_isa.h.

namespace ops::cpu::OPS_ISA {

// What is about to be touched, on its way to the second-level cache: sources of the next output row
// and the outputs of the next block, which processors do not guess while lanes are the inner loop.
template <typename A>
struct Ahead {
  const A* source;      // the first of so many rows
  int64_t rows, pixel;  // and from one pixel to the next
  int64_t row;          // from one row to the next
  bool out;

  // Not inlined it would be left out: to GCC a function that only prefetches has no effect.
  template <int R>
  __attribute__((always_inline)) void fetch(int64_t at, int64_t step, const A* out_at,
                                            int64_t out_step) const {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t p = 0; p < step; p += pixel) {
        OPS_UNROLL
        for (int r = 0; r < R; ++r) {
          __builtin_prefetch(source + at + i * row + p + r * step, 0, 2);
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

// A vector that is used several times. Compilers would rather load it each time, in the same
// instruction that uses it: no slower where two loads go with two multiply-adds a cycle.
template <int TIMES, typename A>
inline Vec<A, kLanes<A>> load_once(const A* from) {
  Vec<A, kLanes<A>> x = load<kLanes<A>>(from);
#if OPS_VECTOR_BYTES == 64
  if constexpr (TIMES > 1) {
    asm("" : "+v"(x));
  }
#endif
  return x;
}

// Adds TAPS taps to R sums of V vectors. Their sources lie `step` apart, so most are each other's.
template <int TAPS, int R, int V, typename A>
inline void add_taps(Vec<A, kLanes<A>> (&sum)[R][V], const Tap* taps, const A* weight,
                     const A* source, int64_t step) {
  constexpr int N = kLanes<A>;
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
  for (int p = 0; p < R + TAPS - 1; ++p) {
    OPS_UNROLL
    for (int v = 0; v < V; ++v) {
      const Vec<A, N> x = load_once<TAPS>(source + p * step + v * N);
      OPS_UNROLL
      for (int t = 0; t < TAPS; ++t) {
        if (p - t >= 0 && p - t < R) {
          sum[p - t][v] += tap[t][v] * x;
        }
      }
    }
  }
}

// R outputs, V vectors of lanes at a time, their sums in registers over all taps. ADJACENT outputs
// take adjacent sources, which saves address arithmetic.
template <int V, bool ADJACENT, typename A>
struct CorrelateBlock {
  template <int R>
  static void run(const Block& block, const Columns& columns, const Tap* rows, int64_t num_rows,
                  int64_t lanes, const A* source, const A* weight, const A* bias, A* out,
                  int64_t out_pixel, Ahead<A> ahead) {
    constexpr int N = kLanes<A>;
    const int64_t step = ADJACENT ? N : columns.source_step;
    const int64_t out_step = columns.out_step * out_pixel;
    const Tap *begin = columns.taps.data() + block.tap_begin,
              *end = columns.taps.data() + block.tap_end;
    source += block.source;
    out += block.out * out_pixel;
    for (int64_t next = 0; next < lanes; next += V * N) {
      const int64_t lane = next + V * N <= lanes ? next : lanes - V * N;  // overlaps those before
      if (next * sizeof(A) % kLine == 0) {
        ahead.template fetch<R>(block.source + lane, step, out + lane, out_step);
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
        const A* row = source + rows[i].source + lane;
        const A* row_weight = weight + rows[i].weight + lane;
        const Tap* tap = begin;
        if constexpr (V == 1) {  // else registers hold no more than one
          for (; block.shared && end - tap >= 3; tap += 3) {
            add_taps<3>(sum, tap, row_weight, row, step);
          }
          if (block.shared && end - tap == 2) {
            add_taps<2>(sum, tap, row_weight, row, step);
            tap = end;
          }
        }
        for (; tap < end; ++tap) {
          add_taps<1>(sum, tap, row_weight, row, step);
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

template <typename A>
auto correlate_for(const Columns& columns, int64_t vectors, int64_t outputs) {
  if constexpr (kSpecialised<A>) {
    if (vectors == 2) {
      return kernel_of<CorrelateBlock<2, false, A>, kMostOutputs / 2>(outputs);
    }
    if (columns.source_step == kLanes<A>) {
      return kernel_of<CorrelateBlock<1, true, A>, kMostOutputs>(outputs);
    }
  }
  return kernel_of<CorrelateBlock<1, false, A>, kMostOutputs>(outputs);
}

// Output rows `begin` to `end`, counted over groups of images, groups of channels and rows.
template <typename T>
void correlate(const Correlation<T>& c, int64_t begin, int64_t end,
               Workspace<acc_t<T>>& workspace) {
  using A = acc_t<T>;
  const int64_t lanes = c.lanes.lanes;
  const Columns& columns = c.columns;
  const Axis& vertical = c.lanes.bands.axis;
  const int64_t out_h = vertical.out_size, groups = c.lanes.channel_groups;
  Ring<T> ring;
  Place<T> place;
  int64_t used = lanes;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t h = index % out_h, group = index / out_h % groups;
    if (index == begin || h == 0) {
      const int64_t images = index / out_h / groups;
      ring = {source_place(c.g, c.lanes, c.source, images, group),
              workspace.ring() + columns.left * lanes, c.source_rows, 0};
      place = out_place(c.g, c.lanes, c.out, images, group);
      used = lanes_in_use(c.lanes, place);
    }
    const TapRows rows = workspace.find_rows(vertical, h, c.g.kernel_w * lanes, c.source_rows);
    const A* source = nullptr;
    A* out = nullptr;
    int64_t out_pixel = lanes;
    Ahead<A> ahead{nullptr, 0, lanes, 0, false};
    if constexpr (std::is_same_v<T, A>) {
      if (c.direct) {
        source = ring.place.start[0];
        const int64_t next = rows.last + 1, left = ring.place.ahead - next;
        const int64_t most = vertical.transposed ? 1 : vertical.stride;
        ahead = {source + next * c.source_rows.size, left < most ? left : most, lanes,
                 c.source_rows.size, false};
      }
      if (place.pixel && place.channels == lanes) {  // blocks can write to memory themselves
        out = place.start[0] + h * place.row;
        out_pixel = place.pixel;
        ahead.out = place.ahead > 0;
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
    const A* weight = c.weight + group * c.g.kernel_h * c.g.kernel_w * lanes;
    const A* bias = c.bias + group * lanes;
    for (const Block& block : columns.blocks) {
      const auto run = correlate_for<A>(columns, c.vectors, block.outputs);
      run(block, columns, workspace.rows.data(), rows.count, used, source, weight, bias, out,
          out_pixel, ahead);
    }
    if (scattered) {
      scatter_row(out, c.lanes, place, h);
    }
  }
}

}  // namespace ops::cpu::OPS_ISA
