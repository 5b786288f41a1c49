// CPU max pooling: the taps of each window that lie in the image.
//
//   NCHW: adjacent outputs                        NHWC: adjacent channels
//   ┌──┬──┬──┬──┬──┬──┐                           ┌────┬────┬────┬───
//   │a0│b0│a1│b1│a2│b2│  tap 0: (a0, a1, a2)      │ c0 │ c1 │ c2 │ …    tap 0: (c0, c1, c2, …)
//   └──┴──┴──┴──┴──┴──┘  tap 1: (b0, b1, b2)      └────┴────┴────┴───
//
//   thread:  a range of output rows; backward by scattering: a range of images
//   lanes:   adjacent outputs of a row with the same taps in the image (NCHW), or channels (NHWC)
#pragma once

#include <vector>

#include "core/axis.h"
#include "max_pool2d/op.h"

namespace ops::max_pool2d {

// Taps [first, end) of a window that lie in the image, along one axis.
struct TapRange {
  int64_t first, end;
};

struct Window {
  TapRange rows, columns;

  bool empty() const { return rows.first >= rows.end || columns.first >= columns.end; }
};

struct Plan {
  Geometry g;
  int64_t pixel;                               // elements per pixel: C (NHWC) or 1 (NCHW)
  std::vector<TapRange> vertical, horizontal;  // per output row and column
  int64_t end_full;               // first output column whose window is cut at the right edge
  int64_t row_step, column_step;  // elements between taps
  bool disjoint;                  // no pixel is in two windows
  bool tiled;                     // each pixel is in exactly one window
  bool pairs;                     // NCHW, windows are adjacent pairs of columns

  explicit Plan(const Geometry& g)
      : g(g),
        pixel(g.channels_last ? g.c : 1),
        vertical(tap_ranges(vertical_axis(g, /*transposed=*/false))),
        horizontal(tap_ranges(horizontal_axis(g, /*transposed=*/false))),
        end_full(g.out_w),
        row_step(offset(g.dilation_h, 0)),
        column_step(offset(0, g.dilation_w)),
        disjoint((g.kernel_h - 1) * g.dilation_h < g.stride_h &&
                 (g.kernel_w - 1) * g.dilation_w < g.stride_w),
        tiled(g.kernel_h == g.stride_h && g.kernel_w == g.stride_w &&
              g.h + g.padding_h <= g.out_h * g.stride_h &&
              g.w + g.padding_w <= g.out_w * g.stride_w),
        pairs(pixel == 1 && g.kernel_w == 2 && g.stride_w == 2 && g.dilation_w == 1) {
    while (end_full > 0 && horizontal[end_full - 1].end < g.kernel_w) {
      --end_full;
    }
  }

  int64_t offset(int64_t row, int64_t column) const { return (row * g.w + column) * pixel; }
  int64_t run() const { return pixel == 1 ? g.out_w : pixel; }  // outputs computed together

  Window window(int64_t row, int64_t column) const { return {vertical[row], horizontal[column]}; }
  bool is_full(TapRange columns) const { return columns.end - columns.first == g.kernel_w; }
  bool is_full(const Window& window, int64_t side) const {
    return g.kernel_h == side && g.kernel_w == side && is_full(window.columns) &&
           window.rows.end - window.rows.first == side;
  }
  // Return the number of adjacent outputs from `column` on with the same taps.
  int64_t run_length(const Window& window, int64_t column) const {
    return pixel == 1 && is_full(window.columns) ? end_full - column : 1;
  }

  int64_t images() const { return g.channels_last ? g.n : g.n * g.c; }
  int64_t image_size() const { return offset(g.h, 0); }

 private:
  static std::vector<TapRange> tap_ranges(const Axis& axis) {
    std::vector<TapRange> ranges(axis.out_size);
    for (int64_t out = 0; out < axis.out_size; ++out) {
      const int64_t start = out * axis.stride - axis.padding;
      const auto taps_before = [&](int64_t at) {
        const int64_t distance = std::max<int64_t>(0, at - start);
        return std::min(axis.taps, (distance + axis.dilation - 1) / axis.dilation);
      };
      ranges[out] = {taps_before(0), taps_before(axis.source_size)};
    }
    return ranges;
  }
};

}  // namespace ops::max_pool2d
