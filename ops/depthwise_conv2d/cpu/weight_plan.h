// How the CPU computes the weight and bias gradients: a tap's is the sum, over all pixels of all
// images, of grad_output times the input that it meets there; see plan.h.
#pragma once

#include "depthwise_conv2d/cpu/plan.h"

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
  Axis horizontal;
  Lanes lanes;
  Axis vertical;  // of a band
  std::vector<Column> columns;
  bool direct;          // sources stay in the image, where a pixel has all channels as lanes
  bool mixed;           // all columns' taps are summed together, and meet zeros beside the source
  int64_t left;         // zeros before the source, in pixels
  int64_t pixel;        // elements of a source's
  int64_t last_vector;  // its first lane, where it overlaps the one before
  SourceRows source_rows;

  WeightGradient(const DepthwiseGeometry& g, const T* grad, const T* x, bool bias, int64_t lanes_,
                 bool direct)
      : g(g),
        grad(grad),
        x(x),
        bias(bias),
        horizontal(horizontal_axis(g, false)),
        lanes(g, vertical_axis(g, false), lanes_),
        vertical(lanes.bands.axis),
        direct(direct),
        pixel(direct ? g.c : lanes_),
        last_vector(lanes_ - (direct ? vector_bytes() / sizeof(acc_t<T>) : 0)) {
    const int64_t stride = g.stride_w;
    for (int64_t tap = 0; tap < g.kernel_w; ++tap) {
      const int64_t source = tap * g.dilation_w - g.padding_w;
      const int64_t begin = source < 0 ? (-source + stride - 1) / stride : 0;
      const int64_t end = source < g.w ? (g.w - 1 - source) / stride + 1 : 0;
      columns.push_back({source, begin, std::min(end, g.out_w)});
    }
    const int64_t last = columns.back().source + (g.out_w - 1) * stride;
    const bool much = std::max(g.padding_w, last - g.w) > g.w + 64;  // beside the source
    mixed = !direct && !much;
    left = mixed ? g.padding_w : 0;
    source_rows = {direct ? g.h : vertical.span(),
                   (left + (mixed ? std::max(g.w, last + 1) : g.w)) * pixel};
  }

  // Where a lane's sums lie.
  int64_t slot(int64_t lane) const { return lane < last_vector ? lane : lane + lanes.lanes - g.c; }

  Place<const T> x_place(int64_t image_group, int64_t group) const {
    return source_place(g, lanes, input_images(g, x), image_group, group);
  }
  Place<const T> grad_place(int64_t image_group, int64_t group) const {
    return out_place(g, lanes, dense_images(g, grad, g.out_h, g.out_w), image_group, group);
  }
};

// Besides, sums, and where their totals go: [tap, and the bias behind them][lane].
template <typename A>
class WeightWorkspace : public Workspace<A> {
 public:
  std::vector<Tap> taps;
  std::vector<Meeting> meetings;
  double* totals;

  template <typename T>
  WeightWorkspace(const WeightGradient<T>& p, double* totals)
      : Workspace<A>(p.vertical.taps, p.direct ? 0 : p.source_rows.count * p.source_rows.size,
                     p.direct ? 0 : p.horizontal.out_size * p.lanes.lanes),
        totals(totals),
        sums_((p.vertical.taps * p.horizontal.taps + 1) * p.lanes.lanes) {}

  A* sums() { return sums_.data(); }

  // Lists what is to be summed over pixels `from` to `until` of an output row that meets num_rows
  // rows of the kernel.
  template <typename T>
  void find_meetings(const WeightGradient<T>& p, int64_t num_rows, int64_t from, int64_t until) {
    if (num_rows != num_rows_ || from != from_) {
      list_meetings(p, num_rows, from, until);
    }
    for (size_t i = 0; i < terms_.size(); ++i) {
      const Tap& row = this->rows[terms_[i].row];
      taps[i] = {row.weight + terms_[i].column * p.lanes.lanes,
                 row.source + p.columns[terms_[i].column].source * p.pixel};
    }
  }

 private:
  // A tap, and the pixels of grad_output that meet it.
  struct Term {
    int64_t row, column, begin, end;
  };

  // Most rows meet what the one before them met. Unless columns are mixed, pixels that meet the
  // same ones are summed together. Neighbours meet the same pixels, so columns are the outer loop.
  template <typename T>
  void list_meetings(const WeightGradient<T>& p, int64_t num_rows, int64_t from, int64_t until) {
    num_rows_ = num_rows;
    from_ = from;
    meetings.clear();
    terms_.clear();
    if (p.mixed) {
      list_meetings_between(p, num_rows, from, until);
    } else {
      std::vector<int64_t> cuts{from, until};
      for (const auto& column : p.columns) {
        cuts.push_back(std::clamp(column.begin, from, until));
        cuts.push_back(std::clamp(column.end, from, until));
      }
      std::sort(cuts.begin(), cuts.end());
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        list_meetings_between(p, num_rows, cuts[i], cuts[i + 1]);
      }
    }
    taps.resize(terms_.size());
  }

  template <typename T>
  void list_meetings_between(const WeightGradient<T>& p, int64_t num_rows, int64_t from,
                             int64_t until) {
    const int64_t before = terms_.size();
    for (size_t column = 0; column < p.columns.size(); ++column) {
      const int64_t begin = std::max(p.columns[column].begin, from);
      const int64_t end = std::min(p.columns[column].end, until);
      for (int64_t row = 0; row < num_rows && begin < end; ++row) {
        terms_.push_back({row, static_cast<int64_t>(column), begin, end});
      }
    }
    const int64_t listed = terms_.size() - before, parts = (listed + kMostTaps - 1) / kMostTaps;
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t first = before + listed * i / parts, past = before + listed * (i + 1) / parts;
      Meeting meeting{first, past - first, until, from};
      for (int64_t k = first; k < past; ++k) {
        meeting.begin = std::min(meeting.begin, terms_[k].begin);
        meeting.end = std::max(meeting.end, terms_[k].end);
      }
      meetings.push_back(meeting);
    }
  }

  std::vector<A> sums_;
  std::vector<Term> terms_;
  int64_t num_rows_ = -1, from_ = -1;  // of what is listed
};

}  // namespace ops::cpu
