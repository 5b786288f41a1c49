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

constexpr int kMaxSums = 8;  // in registers

// Vectors of pixels per register tile of R sums: R · kVectors sums hide FMA latency.
template <int R>
constexpr int kVectors = R > 4   ? 1
                         : R > 2 ? 2
                                 : 4;

// Register tile of R sums × P vectors of pixels: accumulate factor · source over the terms.
template <int R, int P, typename A>
void sum_terms(const Offsets* terms, int64_t count, const Offsets* sums, const A* factor,
               const A* source, A* out) {
  constexpr int N = kLanes<A>;
  const A* from[R];
  OPS_UNROLL
  for (int r = 0; r < R; ++r) {
    from[r] = source + sums[r].source;
  }
  Vec<A, N> sum[R][P] = {};
  for (const Offsets* term = terms; term != terms + count; ++term) {
    Vec<A, N> v[P];
    OPS_UNROLL
    for (int p = 0; p < P; ++p) {
      v[p] = load<N>(factor + term->other + p * N);
    }
    OPS_UNROLL
    for (int r = 0; r < R; ++r) {
      OPS_UNROLL
      for (int p = 0; p < P; ++p) {
        sum[r][p] += v[p] * load<N>(from[r] + term->source + p * N);
      }
    }
  }
  OPS_UNROLL
  for (int r = 0; r < R; ++r) {
    OPS_UNROLL
    for (int p = 0; p < P; ++p) {
      store<N>(out + sums[r].other + p * N, sum[r][p]);
    }
  }
}

// Run register tiles along a row of `width` pixels; the last vector may exceed it.
template <typename A>
struct RowLoop {
  template <int R>
  static void run(const Offsets* terms, int64_t count, const Offsets* sums, int64_t width,
                  const A* factor, const A* source, A* out) {
    constexpr int N = kLanes<A>, P = kVectors<R>;
    int64_t i = 0;
    for (; P > 1 && i + (P - 1) * N < width; i += P * N) {
      sum_terms<R, P>(terms, count, sums, factor + i, source + i, out + i);
    }
    for (; i < width; i += N) {
      sum_terms<R, 1>(terms, count, sums, factor + i, source + i, out + i);
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

// Compute a phase of a row of outputs from the buffers, given the number of its taps.
template <typename T>
void compute_row(const Plan<T>& p, const Workspace<acc_t<T>>& w, int64_t taps) {
  const Offsets *terms = &w.taps[0], *sums = &w.channels[0];
  int64_t term_count = taps, sum_count = p.source.channels;
  if (p.pass == Pass::backward_weight) {
    terms = &w.channels[0], sums = &w.taps[0];
    term_count = p.source.channels, sum_count = taps;
  }
  const int64_t tiles = (sum_count + kMaxSums - 1) / kMaxSums;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t first = sum_count * i / tiles, count = sum_count * (i + 1) / tiles - first;
    kernel_of<RowLoop<acc_t<T>>, kMaxSums>(count)(terms, term_count, sums + first, p.row.out_width,
                                                  w.factor.data, w.source.data, w.out);
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
    for (size_t phase = 0; phase < p.row.outputs.size(); ++phase) {
      const PixelPhase& pixels = p.row.outputs[phase];
      compute_row(p, workspace, workspace.list_taps(p, p.row.taps[phase], h));
      copy_pixels(workspace.out, {p.row.out_width, 1},
                  p.out.at(n, group) + h * strides.h + pixels.first * strides.w,
                  {strides.c, pixels.step * strides.w}, p.out.channels, pixels.count);
    }
  }
}

}  // namespace ops::cpu::OPS_ISA::involution2d
