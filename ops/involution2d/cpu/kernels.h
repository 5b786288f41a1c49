// Vector kernels of the CPU involution; see plan.h. No include guard: see core/cpu/dispatch_isa.h.

namespace ops::cpu::OPS_ISA::involution2d {

using namespace ops::involution2d;

// Return the start of the i-th block of N that cover [0, n), n ≥ N; the last block overlaps.
template <int N>
int64_t block_start(int64_t i, int64_t n) {
  return i * N + N <= n ? i * N : n - N;
}

// Transpose a matrix in registers, in blocks of N×N, or smaller ones if it has fewer rows or
// columns. `from` has adjacent columns, `to` adjacent rows; strides are those of the others.
template <int N, typename From, typename To>
void transpose_matrix(const From* from, int64_t from_row, int64_t rows, int64_t columns, To* to,
                      int64_t to_column) {
  if constexpr (N > 1) {
    if (rows < N || columns < N) {
      return transpose_matrix<N / 2>(from, from_row, rows, columns, to, to_column);
    }
  }
  for (int64_t i = 0; i * N < rows; ++i) {
    for (int64_t j = 0; j * N < columns; ++j) {
      const int64_t row = block_start<N>(i, rows), column = block_start<N>(j, columns);
      Vec<acc_t<From>, N> v[N];
      OPS_UNROLL
      for (int r = 0; r < N; ++r) {
        v[r] = load<N>(from + (row + r) * from_row + column);
      }
      transpose<acc_t<From>, N>(v);
      OPS_UNROLL
      for (int c = 0; c < N; ++c) {
        store<N>(to + (column + c) * to_column + row, v[c]);
      }
    }
  }
}

// Strides of an image or a buffer.
struct PixelStrides {
  int64_t channel, pixel;
};

// Copy `pixels` pixels of `channels` channels. Pixels or channels are adjacent in one of the two.
template <typename From, typename To>
void copy_pixels(const From* from, PixelStrides in, To* to, PixelStrides out, int64_t channels,
                 int64_t pixels) {
  constexpr int N = kLanes<acc_t<From>>;
  if (in.pixel == 1 && out.pixel == 1) {
    for (int64_t c = 0; c < channels; ++c) {
      convert_row(from + c * in.channel, to + c * out.channel, pixels);
    }
  } else if (in.channel == 1) {
    transpose_matrix<N>(from, in.pixel, pixels, channels, to, out.channel);
  } else if (out.channel == 1) {
    transpose_matrix<N>(from, in.channel, channels, pixels, to, out.pixel);
  } else {
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t p = 0; p < pixels; ++p) {
        to[c * out.channel + p * out.pixel] = static_cast<To>(from[c * in.channel + p * in.pixel]);
      }
    }
  }
}

// Vectors of pixels per register tile of R channels or taps: R · kVectors sums hide FMA latency.
template <int R>
constexpr int kVectors = R > 4   ? 1
                         : R > 2 ? 2
                                 : 4;

// Offsets of the terms of R sums. Forward, input gradient: R channels, summed over the taps.
struct TapTerms {
  const TapOffsets* taps;
  int64_t pitch, width;  // channel strides: of the source, of factor and out

  int64_t factor(int64_t tap) const { return taps[tap].factor; }
  int64_t source(int64_t tap, int r) const { return taps[tap].source + r * pitch; }
  int64_t out(int r) const { return r * width; }
};

// Weight gradient: R taps, summed over the channels.
struct ChannelTerms {
  const TapOffsets* taps;
  int64_t pitch, width;

  int64_t factor(int64_t channel) const { return channel * width; }
  int64_t source(int64_t channel, int r) const { return taps[r].source + channel * pitch; }
  int64_t out(int r) const { return taps[r].factor; }
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

// Copy the rows up to `last` that are not in the ring yet, of one group of one image.
template <typename T>
void fill_ring(RowRing<acc_t<T>>& ring, int64_t last, const T* group,
               const GroupedImage<const T>& image, const std::vector<PixelPhase>& phases) {
  const ImageStrides& strides = image.strides;
  if (ring.next_row <= last - ring.rows) {
    ring.next_row = last - ring.rows + 1;
  }
  for (; ring.next_row <= last; ++ring.next_row) {
    for (const PixelPhase& pixels : phases) {
      copy_pixels(group + ring.next_row * strides.h + pixels.first * strides.w,
                  {strides.c, pixels.step * strides.w},
                  ring.data + ring.next_row % ring.rows * ring.row + pixels.start,
                  {ring.channel, 1}, image.channels, pixels.count);
    }
  }
}

// Compute `outputs` of a row from the buffers.
template <typename T>
void compute_row(const Plan<T>& p, Workspace<acc_t<T>>& w, int64_t taps) {
  using A = acc_t<T>;
  const bool over_channels = p.pass == Pass::backward_weight;
  const int64_t sums = over_channels ? taps : p.out.channels, width = p.row.out_width;
  const int64_t tiles = (sums + kMaxSums - 1) / kMaxSums;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t first = sums * i / tiles, count = sums * (i + 1) / tiles - first;
    if (over_channels) {
      kernel_of<RowLoop<ChannelTerms, A>, kMaxSums>(count)(
          {&w.taps[first], w.source.channel, width}, p.factor.channels, w.factor.data,
          w.source.data, w.out);
    } else {
      kernel_of<RowLoop<TapTerms, A>, kMaxSums>(count)(
          {w.taps.data(), w.source.channel, width}, taps, w.factor.data,
          w.source.data + first * w.source.channel, w.out + first * width);
    }
  }
}

// Compute rows [begin, end) of a pass, counted over images, groups, rows.
template <typename T>
void involve(const Plan<T>& p, int64_t begin, int64_t end, Workspace<acc_t<T>>& workspace) {
  const int64_t rows = p.vertical.out_size, groups = p.g.groups;
  const ImageStrides& strides = p.out.strides;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t h = index % rows, n = index / rows / groups, group = index / rows % groups;
    if (h == 0) {
      workspace.source.next_row = workspace.factor.next_row = 0;
    }
    int64_t last = -1;  // source row
    for (int64_t a = 0; a < p.vertical.taps; ++a) {
      const int64_t at = p.vertical.source(h, a);
      last = at > last ? at : last;
    }
    fill_ring(workspace.source, last, p.source.at(n, group), p.source, p.row.sources);
    fill_ring(workspace.factor, p.transposed() ? last : h, p.factor.at(n, group), p.factor,
              p.factor_pixels);
    for (const PhaseRows::Outputs& outputs : p.row.outputs) {
      compute_row(p, workspace, workspace.list_taps(p, outputs, h));
      const PixelPhase& pixels = outputs.pixels;
      copy_pixels(workspace.out, {p.row.out_width, 1},
                  p.out.at(n, group) + h * strides.h + pixels.first * strides.w,
                  {strides.c, pixels.step * strides.w}, p.out.channels, pixels.count);
    }
  }
}

}  // namespace ops::cpu::OPS_ISA::involution2d
