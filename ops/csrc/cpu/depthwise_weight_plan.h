// How the CPU computes the weight and bias gradients: a tap's is the sum, over all pixels of all
// images, of grad_output times the input that it meets there; see depthwise_plan.h.
#pragma once

#include "depthwise_plan.h"

namespace ops::cpu {

constexpr int64_t kMostTaps = 10;    // whose sums fit into registers, beside as many addresses
constexpr int64_t kMostTerms = 256;  // in a sum, before it is added to a total in double

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
  std::vector<Column> columns;
  bool mixed;    // taps of several columns are summed together, and meet zeros beside the source
  int64_t left;  // zeros before the source, in pixels
  SourceRows source_rows;

  WeightGradient(const DepthwiseGeometry& g, const T* grad, const T* x, bool bias, int64_t lanes_)
      : g(g),
        grad(grad),
        x(x),
        bias(bias),
        vertical(vertical_axis(g, false)),
        horizontal(horizontal_axis(g, false)),
        lanes(g, lanes_) {
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
    source_rows = {vertical.span(), (left + (mixed ? std::max(g.w, last + 1) : g.w)) * lanes.lanes};
  }

  Place<const T> x_place(int64_t image_group, int64_t group) const {
    return place(g, lanes, input_images(g, x), image_group, group);
  }
  Place<const T> grad_place(int64_t image_group, int64_t group) const {
    return place(g, lanes, dense_images(g, grad, g.out_h, g.out_w), image_group, group);
  }
};

// Besides, sums and totals [tap, and the bias behind them][lane].
template <typename A>
class WeightWorkspace : public Workspace<A> {
 public:
  std::vector<Tap> taps;
  std::vector<Meeting> meetings;
  std::vector<double> totals;

  template <typename T>
  explicit WeightWorkspace(const WeightGradient<T>& p)
      : Workspace<A>(p.vertical.taps, p.source_rows.count * p.source_rows.size,
                     p.horizontal.out_size * p.lanes.lanes),
        taps(p.vertical.taps * p.horizontal.taps),
        totals((taps.size() + 1) * p.lanes.lanes),
        sums_(totals.size()) {}

  A* sums() { return sums_.data(); }

  // Lists what is to be summed over pixels `from` to `until` of an output row that meets num_rows
  // rows of the kernel.
  template <typename T>
  void find_meetings(const WeightGradient<T>& p, int64_t num_rows, int64_t from, int64_t until) {
    if (num_rows != num_rows_ || from != from_) {
      list_meetings(p, num_rows, from, until);
    }
    const int64_t lanes = p.lanes.lanes;
    for (size_t i = 0; i < terms_.size(); ++i) {
      const Tap& row = this->rows[terms_[i].row];
      taps[i] = {row.weight + terms_[i].column * lanes,
                 row.source + p.columns[terms_[i].column].source * lanes};
    }
  }

 private:
  // A tap, and the pixels of grad_output that meet it.
  struct Term {
    int64_t row, column, begin, end;
  };

  // Most rows meet what the one before them met. Neighbours meet the same pixels, so columns are
  // the outer loop.
  template <typename T>
  void list_meetings(const WeightGradient<T>& p, int64_t num_rows, int64_t from, int64_t until) {
    num_rows_ = num_rows;
    from_ = from;
    meetings.clear();
    terms_.clear();
    int64_t count = 0;
    for (size_t column = 0; column < p.columns.size(); ++column) {
      const int64_t begin = std::max(p.columns[column].begin, from);
      const int64_t end = std::min(p.columns[column].end, until);
      for (int64_t row = 0; row < num_rows && begin < end; ++row) {
        terms_.push_back({row, static_cast<int64_t>(column), begin, end});
      }
      const int64_t listed = terms_.size();
      if (!p.mixed || column + 1 == p.columns.size()) {
        const int64_t parts = (listed - count + kMostTaps - 1) / kMostTaps;
        for (int64_t i = 0; i < parts; ++i) {
          const int64_t first = count + (listed - count) * i / parts;
          const int64_t past = count + (listed - count) * (i + 1) / parts;
          Meeting meeting{first, past - first, until, from};
          for (int64_t k = first; k < past; ++k) {
            meeting.begin = std::min(meeting.begin, terms_[k].begin);
            meeting.end = std::max(meeting.end, terms_[k].end);
          }
          meetings.push_back(meeting);
        }
        count = listed;
      }
    }
  }

  std::vector<A> sums_;
  std::vector<Term> terms_;
  int64_t num_rows_ = -1, from_ = -1;  // of what is listed
};

}  // namespace ops::cpu
