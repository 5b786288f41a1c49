// How the CPU pools: which pixels of the image a window takes.
//
// An image is rows of pixels, of C adjacent elements in channels-last memory and of one in planes.
// Vectors hold adjacent channels, or adjacent outputs of a row.
#pragma once

#include <vector>

#include "core/cpu/axis.h"
#include "max_pool2d/op.h"

namespace ops::cpu {

// The taps that lie in the image, along one axis.
struct TapRange {
  int64_t first, end;
};

struct PoolWindow {
  TapRange rows, columns;

  bool empty() const { return rows.first >= rows.end || columns.first >= columns.end; }
};

struct MaxPoolPlan {
  MaxPoolGeometry g;
  int64_t pixel;                               // elements
  std::vector<TapRange> vertical, horizontal;  // of each row and column of the output
  int64_t end_whole;                           // columns: those beyond are cut at the right
  int64_t row_step, column_step;               // from tap to tap
  bool disjoint;                               // no pixel is in two windows,
  bool tiled;                                  // and each in one
  bool wide;                                   // places are int64, not bytes

  explicit MaxPoolPlan(const MaxPoolGeometry& g)
      : g(g),
        pixel(g.channels_last ? g.c : 1),
        vertical(tap_ranges(vertical_axis(g, /*transposed=*/false))),
        horizontal(tap_ranges(horizontal_axis(g, /*transposed=*/false))),
        end_whole(g.out_w),
        row_step(offset(g.dilation_h, 0)),
        column_step(offset(0, g.dilation_w)),
        disjoint((g.kernel_h - 1) * g.dilation_h < g.stride_h &&
                 (g.kernel_w - 1) * g.dilation_w < g.stride_w),
        tiled(g.kernel_h == g.stride_h && g.kernel_w == g.stride_w &&
              g.h + g.padding_h <= g.out_h * g.stride_h &&
              g.w + g.padding_w <= g.out_w * g.stride_w),
        wide(g.index_type() == ScalarType::Long) {
    while (end_whole > 0 && horizontal[end_whole - 1].end < g.kernel_w) {
      --end_whole;
    }
  }

  int64_t offset(int64_t row, int64_t column) const { return (row * g.w + column) * pixel; }
  int64_t run() const { return pixel == 1 ? g.out_w : pixel; }  // adjacent elements of the output

  PoolWindow window(int64_t row, int64_t column) const {
    return {vertical[row], horizontal[column]};
  }
  bool is_whole(TapRange columns) const { return columns.end - columns.first == g.kernel_w; }
  bool is_whole(const PoolWindow& window, int64_t side) const {
    return g.kernel_h == side && g.kernel_w == side && is_whole(window.columns) &&
           window.rows.end - window.rows.first == side;
  }
  // How many outputs from `column` on, adjacent in memory, have the same taps.
  int64_t alike(const PoolWindow& window, int64_t column) const {
    return pixel == 1 && is_whole(window.columns) ? end_whole - column : 1;
  }

  int64_t images() const { return g.channels_last ? g.n : g.n * g.c; }
  int64_t image() const { return offset(g.h, 0); }

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

}  // namespace ops::cpu
