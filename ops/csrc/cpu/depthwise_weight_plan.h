// How the CPU computes the weight and bias gradients: a tap's is the sum, over all pixels of all
// images, of grad_output times the input that it meets there; see depthwise_plan.h.
#pragma once

#include "depthwise_plan.h"

namespace ops::cpu {

constexpr int64_t kMostTaps = 10;    // whose sums fit into registers, beside as many addresses
constexpr int64_t kMostTerms = 128;  // in a sum, before it is added to a total in double

// Taps that are summed together, over pixels `begin` to `end` of an output row.
struct Meeting {
  int64_t first, count;
  int64_t begin, end;
};

template <typename T>
struct WeightGradient {
  // A kernel column: where it finds the source of output 0, in pixels, and the outputs that meet
  // it.
  struct Column {
    int64_t source, begin, end;
  };

  const DepthwiseGeometry& g;
  const T *grad, *x;  // x may be null, for the bias gradient alone
  bool bias;
  Axis vertical, horizontal;
  Lanes lanes;
  int64_t slab;  // groups of channels that a thread takes along a row together
  std::vector<Column> columns;
  bool mixed;  // taps of several columns are summed together, and meet zeros beside the source
  int64_t left, width;  // zeros before the source, and all that taps read, in pixels

  WeightGradient(const DepthwiseGeometry& g, const T* grad, const T* x, bool bias, int64_t lanes_,
                 int64_t slab)
      : g(g),
        grad(grad),
        x(x),
        bias(bias),
        vertical(vertical_axis(g, false)),
        horizontal(horizontal_axis(g, false)),
        lanes(g, lanes_),
        slab(slab) {
    const int64_t stride = g.stride_w;
    for (int64_t tap = 0; tap < g.kernel_w; ++tap) {
      const int64_t source = tap * g.dilation_w - g.padding_w;
      const int64_t begin = source < 0 ? (-source + stride - 1) / stride : 0;
      const int64_t end = source < g.w ? (g.w - 1 - source) / stride + 1 : 0;
      columns.push_back({source, begin, std::min(end, g.out_w)});
    }
    const int64_t last = columns.back().source + (g.out_w - 1) * stride;
    mixed = std::max(g.padding_w, last - g.w) <= g.w + 64;  // else there is too much beside it
    left = mixed ? g.padding_w : 0;
    width = left + (mixed ? std::max(g.w, last + 1) : g.w);
  }

  Place<const T> x_place(int64_t image_group, int64_t group) const {
    return place(g, lanes, x, g.h, g.w, image_group, group);
  }
  Place<const T> grad_place(int64_t image_group, int64_t group) const {
    return place(g, lanes, grad, g.out_h, g.out_w, image_group, group);
  }
};

// Besides, sums and totals [group][tap, and the bias behind them][lane].
template <typename A>
class WeightWorkspace : public Workspace<A> {
 public:
  std::vector<Tap> taps;
  std::vector<Meeting> meetings;
  std::vector<double> totals;

  template <typename T>
  explicit WeightWorkspace(const WeightGradient<T>& p)
      : Workspace<A>(p.slab, p.vertical.taps, p.vertical.span(), p.width * p.lanes.lanes,
                     p.horizontal.out_size * p.lanes.lanes),
        taps(p.vertical.taps * p.horizontal.taps),
        totals(p.slab * (taps.size() + 1) * p.lanes.lanes),
        sums_size_((taps.size() + 1) * p.lanes.lanes),
        sums_(totals.size()) {}

  A* sums(int64_t group) { return sums_.data() + group * sums_size_; }

  // Lists what is to be summed over pixels `from` to `until` of an output row that meets num_rows
  // rows of the kernel. Neighbours meet the same pixels, so columns are the outer loop.
  template <typename T>
  void find_meetings(const WeightGradient<T>& p, int64_t num_rows, int64_t from, int64_t until) {
    const int64_t lanes = p.lanes.lanes;
    int64_t count = 0;
    meetings.clear();
    begins_.clear();
    ends_.clear();
    for (size_t tap = 0; tap < p.columns.size(); ++tap) {
      const auto& column = p.columns[tap];
      const int64_t begin = std::max(column.begin, from), end = std::min(column.end, until);
      for (int64_t i = 0; i < num_rows && begin < end; ++i) {
        const Tap& row = this->rows[i];
        taps[begins_.size()] = {row.weight + static_cast<int64_t>(tap) * lanes,
                                row.source + column.source * lanes};
        begins_.push_back(begin);
        ends_.push_back(end);
      }
      const int64_t listed = begins_.size();
      if (!p.mixed || tap + 1 == p.columns.size()) {
        const int64_t parts = (listed - count + kMostTaps - 1) / kMostTaps;
        for (int64_t i = 0; i < parts; ++i) {
          const int64_t first = count + (listed - count) * i / parts;
          const int64_t end = count + (listed - count) * (i + 1) / parts;
          meetings.push_back({first, end - first,
                              *std::min_element(&begins_[first], &begins_[first] + (end - first)),
                              *std::max_element(&ends_[first], &ends_[first] + (end - first))});
        }
        count = listed;
      }
    }
  }

 private:
  int64_t sums_size_;
  std::vector<A> sums_;
  std::vector<int64_t> begins_, ends_;
};

}  // namespace ops::cpu
