// SIMD kernels of depthwise_conv1d; figure in plan.h. No include guard.

namespace ops::cpu::OPS_ISA::depthwise_conv1d {

using namespace ops::depthwise_conv1d;

constexpr int kRows = 8;      // accumulators of a block of outputs
constexpr int kTapGroup = 8;  // of a group of taps

// Copy a window of the source to a tile [phase][step][lane], with zeros for steps that it lacks.
template <typename T>
void gather(const Source<T>& s, int64_t lanes, acc_t<T>* tile) {
  using A = acc_t<T>;
  for (const int64_t phase : s.phases) {
    const int64_t size = (s.size - 1 - phase) / s.phase_step + 1 - s.low;
    const int64_t begin = s.low >= 0 ? 0 : -s.low < s.width ? -s.low : s.width;
    const int64_t end = size < begin ? begin : size < s.width ? size : s.width;
    const T* from = s.data + (phase + (s.low + begin) * s.phase_step) * s.step;
    const int64_t step = s.phase_step * s.step;
    A* to = tile + begin * lanes;
    __builtin_memset(tile, 0, begin * lanes * sizeof(A));
    if (lanes == 1 && step == 1) {
      convert_row(from, to, end - begin);
    } else if (lanes > 1 && s.channel_step == 1) {
      for (int64_t i = begin; i < end; ++i, from += step, to += lanes) {
        convert_row(from, to, s.channels);
      }
    } else {
      for (int64_t c = 0; c < s.channels; ++c) {
        for (int64_t i = 0; i < end - begin; ++i) {
          to[i * lanes + c] = from[i * step + c * s.channel_step];
        }
      }
    }
    __builtin_memset(tile + end * lanes, 0, (s.width - end) * lanes * sizeof(A));
    tile += s.width * lanes;
  }
}

// Return silu(z), or with `grad` its gradient, g · silu'(z) = g · (s + z s (1 − s)), s = σ(z). With
// e = exp(−z): s = 1 / (1 + e) and 1 − s = e s, without cancellation near s = 1.
template <typename A, int N>
inline Vec<A, N> activate(Simd<A, N> z, const A* grad) {
  using V = Simd<A, N>;
  const V e = exp_of_multiple<std::ratio<-1>>(z);
  if (!grad) {
    return (z / (V(1) + e)).lanes;
  }
  const V s = V(1) / (V(1) + e), rest = select(s > V(0), e * s, V(1));  // not ∞ · 0
  return (V(load<N>(grad)) * (s + z * s * rest)).lanes;
}

template <bool CHANNELS, typename A>
inline Vec<A, kLanes<A>> load_parameter(const A* p, int64_t lane) {
  return CHANNELS ? load<kLanes<A>>(p + lane) : broadcast<A, kLanes<A>>(*p);
}

// Accumulate as many blocks of TAPS · N taps with adjacent sources as there are from `tap` on;
// return the next tap. Taps N apart share loads: what one reads for vector r + 1, the next reads
// for r.
template <int TAPS, int N, int R, typename A>
inline const TapOffset* add_spaced_taps(Vec<A, N> (&sum)[R], const TapOffset* tap,
                                        const TapOffset* end, const A* weight, const A* tile) {
  for (; end - tap >= TAPS * N; tap += TAPS * N) {
    const int64_t step = tap[1].source - tap[0].source;  // −1: input gradient
    if ((step != 1 && step != -1) ||
        tap[TAPS * N - 1].source - tap[0].source != (TAPS * N - 1) * step) {
      break;
    }
    for (int i = 0; i < N; ++i) {
      const auto* const first = tap + i + (step > 0 ? 0 : (TAPS - 1) * N);
      Vec<A, N> w[TAPS];
      OPS_UNROLL
      for (int t = 0; t < TAPS; ++t) {
        w[t] = broadcast<A, N>(weight[first[t * N * step].weight]);
      }
      OPS_UNROLL
      for (int p = 0; p < R + TAPS - 1; ++p) {
        const Vec<A, N> x = load<N>(tile + first->source + p * N);
        OPS_UNROLL
        for (int t = 0; t < TAPS; ++t) {
          if (p >= t && p - t < R) {
            sum[p - t] += w[t] * x;
          }
        }
      }
    }
  }
  return tap;
}

// Compute R vectors of outputs: of adjacent ones, or (CHANNELS) one of the channels of each.
template <typename T, bool CHANNELS>
struct CorrelateBlock {
  template <int R>
  static void run(const Outputs<T>& o, int64_t at, int64_t lane) {
    using A = acc_t<T>;
    constexpr int N = kLanes<A>;
    const int64_t step = CHANNELS ? o.lanes : N, out_step = CHANNELS ? o.out_step : N;
    const A* tile = o.tile + at * step + lane;
    Vec<A, N> sum[R];
    OPS_UNROLL
    for (int r = 0; r < R; ++r) {
      sum[r] = load_parameter<CHANNELS>(o.bias, lane);
    }
    const auto* tap = o.taps;
    if constexpr (!CHANNELS && R > 1) {
      tap = add_spaced_taps<4, N, R>(sum, tap, o.taps_end, o.weight, tile);
      tap = add_spaced_taps<2, N, R>(sum, tap, o.taps_end, o.weight, tile);
    }
    for (; tap < o.taps_end; ++tap) {
      const Vec<A, N> w = load_parameter<CHANNELS>(o.weight + tap->weight, lane);
      OPS_UNROLL
      for (int r = 0; r < R; ++r) {
        sum[r] += w * load<N>(tile + tap->source + r * step);
      }
    }
    OPS_UNROLL
    for (int r = 0; r < R; ++r) {
      const int64_t offset = (at + r) * out_step + lane;
      if (o.silu) {
        sum[r] = activate<A, N>(sum[r], o.grad ? o.grad + (at + r) * step + lane : nullptr);
      }
      store_first<N>(o.out + offset, sum[r], CHANNELS ? o.channels - lane : o.steps - offset);
    }
  }
};

template <bool CHANNELS, typename T>
void correlate(const Outputs<T>& o) {
  constexpr int N = kLanes<acc_t<T>>;
  const int64_t vectors = CHANNELS ? o.steps : (o.steps + N - 1) / N;
  for (int64_t at = 0; at < vectors; at += kRows) {
    const auto run =
        kernel_of<CorrelateBlock<T, CHANNELS>, kRows>(vectors - at < kRows ? vectors - at : kRows);
    for (int64_t lane = 0; lane < o.channels; lane += N) {
      run(o, at, lane);
    }
  }
}

// Return a mask of the first n lanes.
template <typename A, int N>
inline auto first_lanes(int64_t n) {
  Vec<A, N> index;
  OPS_UNROLL
  for (int i = 0; i < N; ++i) {
    index[i] = i;
  }
  return index < broadcast<A, N>(n);
}

template <typename A, int N>
inline void add_to(double* totals, Vec<A, N> sum) {
  store<N>(totals, load<N>(totals) + __builtin_convertvector(sum, Vec<double, N>));
}

// Add the products of gradients and shifted sources to the totals of TAPS taps.
template <typename A>
struct AccumulateTaps {
  template <int TAPS>
  static void run(const Products<A>& p, const TapOffset* taps, int64_t lane, double* bias) {
    constexpr int N = kLanes<A>;
    Vec<A, N> sum[TAPS] = {}, sum_grad = {};
    const A *tile = p.tile + lane, *grad = p.grad + lane;
    for (int64_t i = 0; i < p.steps; ++i, tile += p.lanes, grad += p.lanes) {
      const Vec<A, N> g = load<N>(grad);
      sum_grad += g;
      OPS_UNROLL
      for (int t = 0; t < TAPS; ++t) {
        sum[t] += g * load<N>(tile + taps[t].source);
      }
    }
    if (p.rest > 0) {
      const Vec<A, N> g = load_first<N>(grad, p.rest);
      sum_grad += g;
      OPS_UNROLL
      for (int t = 0; t < TAPS; ++t) {  // 0 · 0, not 0 · ∞, where no output is
        const Vec<A, N> x = load<N>(tile + taps[t].source);
        sum[t] += g * (first_lanes<A, N>(p.rest) ? x : Vec<A, N>{});
      }
    }
    OPS_UNROLL
    for (int t = 0; t < TAPS; ++t) {
      add_to<A, N>(p.totals + taps[t].weight + lane, sum[t]);
    }
    if (bias) {
      add_to<A, N>(bias + lane, sum_grad);
    }
  }
};

template <typename A>
void accumulate(const Products<A>& p) {
  const int64_t parts = p.count > kTapGroup ? (p.count + kTapGroup - 1) / kTapGroup : 1;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = p.count * part / parts, count = p.count * (part + 1) / parts - first;
    const auto run = count > 0 ? kernel_of<AccumulateTaps<A>, kTapGroup>(count)
                               : &AccumulateTaps<A>::template run<0>;
    for (int64_t lane = 0; lane < p.lanes; lane += kLanes<A>) {
      run(p, p.taps + first, lane, part > 0 ? nullptr : p.bias);
    }
  }
}

}  // namespace ops::cpu::OPS_ISA::depthwise_conv1d
