// CPU depthwise convolution: plan of the weight and bias gradients. Lanes and ring are those of
// plan.h; grad_weight[tap] is the sum of grad_output · input over all pixels of all images.
//
//      grad_output row  │ g0 │ g1 │ … │           sums of ≤ 10 taps      totals
//                         ×    ×         FMA      ┌─────────┐  flush    ┌──────────────────┐
//      source rows      │ x0 │ x1 │ … │ ───────►  │ float   │ ────────► │ double           │
//      (ring, one per tap row)                    └─────────┘ 256 terms │ [tap, bias][lane]│
//                                                  registers            └──────────────────┘
//   thread:  a range of output rows of one channel group; ranges are reduced in order
#pragma once

#include "depthwise_conv2d/cpu/plan.h"

namespace ops::depthwise_conv2d {

constexpr int64_t kMaxGroupTaps = 10;  // accumulators and source pointers fit in registers
constexpr int64_t kFlushTerms = 256;   // terms after which sums are flushed to double
// In place: terms up to which output rows are accumulated together, for pixels aligned to cache
// lines and for others. More rows would exceed the L1 cache.
constexpr int64_t kJoinTerms = 64, kUnalignedJoinTerms = 16;
// Rows in the ring are zero-padded if each side needs at most the pixels of a row plus this.
constexpr int64_t kPaddingAllowance = 64;

// A tap (row and column of the filter) and the pixels of grad_output with a valid source.
struct TapOutputs {
  int64_t row, column, begin, end;
};

// Taps accumulated together over pixels [begin, end) of an output row. All taps have a source in
// memory, valid or zero, for pixels [inner_begin, inner_end).
struct TapGroup {
  int64_t first, count;  // taps
  int64_t begin, end, inner_begin, inner_end;
};

template <typename T>
struct WeightGradient {
  // A filter column: source pixel of output 0, and the outputs [begin, end) with a valid source.
  struct Column {
    int64_t source, begin, end;
  };

  const Geometry& g;
  ImageTensor<const T> grad, x;  // x.data is null for the bias gradient alone
  bool bias;
  LaneLayout lanes;
  Axis vertical;  // of a band
  std::vector<Column> columns;
  bool in_place;         // read sources in place (channels-last); lanes are all channels of a pixel
  bool padded;           // zeros on both sides of a source row are in memory
  int64_t left;          // zero pixels before a source row
  int64_t pixel_stride;  // of the source, in elements
  int64_t last_vector;   // in place: where the sums of the last vector start
  SourceRows source_rows;

  WeightGradient(const Geometry& g, const T* grad, const T* x, bool bias, int64_t lane_count,
                 bool in_place)
      : g(g),
        grad(dense_tensor(g, grad, g.out_h, g.out_w)),
        x(input_tensor(g, x)),
        bias(bias),
        lanes(g, vertical_axis(g, false), lane_count),
        vertical(lanes.bands.axis),
        in_place(in_place),
        pixel_stride(in_place ? g.c : lane_count),
        last_vector(lane_count - (in_place ? cpu::vector_bytes() / sizeof(acc_t<T>) : 0)) {
    const int64_t stride = g.stride_w;
    for (int64_t tap = 0; tap < g.kernel_w; ++tap) {
      const int64_t source = tap * g.dilation_w - g.padding_w;
      const int64_t begin = source < 0 ? (-source + stride - 1) / stride : 0;
      const int64_t end = source < g.w ? (g.w - 1 - source) / stride + 1 : 0;
      columns.push_back({source, begin, std::min(end, g.out_w)});
    }
    const int64_t last = columns.back().source + (g.out_w - 1) * stride;
    padded = !in_place && std::max(g.padding_w, last - g.w) <= g.w + kPaddingAllowance;
    left = padded ? g.padding_w : 0;
    const int64_t width = left + (padded ? std::max(g.w, last + 1) : g.w);
    source_rows = {in_place ? g.h : vertical.span(), width * pixel_stride};
  }

  // Return the index of a lane's sum. In place, the last vector overlaps: it loads channels from
  // C − N on, but its sums start at the last multiple of N below C.
  int64_t sum_index(int64_t lane) const {
    return lane < last_vector ? lane : lane + lanes.count - g.c;
  }
};

// Buffers of a thread: those of Workspace, float sums, and a pointer to the double totals. Both are
// [tap 0, …, last tap, bias][lane].
template <typename A>
class WeightWorkspace : public Workspace<A> {
 public:
  std::vector<Tap> taps;
  std::vector<TapOutputs> ranges;  // of the taps
  std::vector<TapGroup> tap_groups;
  double* totals;

  template <typename T>
  WeightWorkspace(const WeightGradient<T>& p, double* totals)
      : Workspace<A>(p.vertical.taps, p.in_place ? 0 : p.source_rows.count * p.source_rows.size,
                     p.in_place ? 0 : p.g.out_w * p.lanes.count),
        totals(totals),
        sums_((p.vertical.taps * p.g.kernel_w + 1) * p.lanes.count) {}

  A* sums() { return sums_.data(); }

  // List the taps and tap groups for pixels [from, until) of an output row with num_rows valid
  // filter rows.
  template <typename T>
  void find_tap_groups(const WeightGradient<T>& p, int64_t num_rows, int64_t from, int64_t until) {
    if (num_rows != num_rows_ || from != from_) {
      num_rows_ = num_rows;
      from_ = from;
      list_tap_groups(p, until);
    }
    for (size_t i = 0; i < ranges.size(); ++i) {
      const Tap& row = this->filter_rows[ranges[i].row];
      taps[i] = {row.weight + ranges[i].column * p.lanes.count,
                 row.source + p.columns[ranges[i].column].source * p.pixel_stride};
    }
  }

 private:
  template <typename T>
  void list_tap_groups(const WeightGradient<T>& p, int64_t until) {
    tap_groups.clear();
    ranges.clear();
    for (size_t column = 0; column < p.columns.size(); ++column) {
      const int64_t begin = std::max(p.columns[column].begin, from_);
      const int64_t end = std::min(p.columns[column].end, until);
      for (int64_t row = 0; row < num_rows_ && begin < end; ++row) {
        ranges.push_back({row, static_cast<int64_t>(column), begin, end});
      }
    }
    const int64_t count = ranges.size(), parts = (count + kMaxGroupTaps - 1) / kMaxGroupTaps;
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t first = count * i / parts, end = count * (i + 1) / parts;
      TapGroup group{first, end - first, until, from_, from_, until};
      for (int64_t k = first; k < end; ++k) {
        group.begin = std::min(group.begin, ranges[k].begin);
        group.end = std::max(group.end, ranges[k].end);
        if (!p.padded) {
          group.inner_begin = std::max(group.inner_begin, ranges[k].begin);
          group.inner_end = std::min(group.inner_end, ranges[k].end);
        }
      }
      tap_groups.push_back(group);
    }
    taps.resize(count);
  }

  std::vector<A> sums_;
  int64_t num_rows_ = -1, from_ = -1;  // arguments of the last find_tap_groups
};

}  // namespace ops::depthwise_conv2d
