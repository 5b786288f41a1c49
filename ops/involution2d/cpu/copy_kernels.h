// Copies of image rows, in any layout, to and from buffers [channel][pixel] of acc_t<T>; see
// plan.h. No include guard: see core/cpu/dispatch_isa.h.

namespace ops::cpu::OPS_ISA {

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

}  // namespace ops::cpu::OPS_ISA
