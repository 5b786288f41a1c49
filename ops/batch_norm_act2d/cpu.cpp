// CPU batch normalisation and activation: a deterministic two-stage reduction over runs of memory,
// then a pass over the same runs.
#include <array>
#include <numeric>
#include <vector>

#include "batch_norm_act2d/op.h"
#include "core/cpu/parallel.h"

#define OPS_KERNELS "batch_norm_act2d/cpu_kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::cpu {
namespace {

constexpr int64_t kRun = 32768;       // elements of a run, about
constexpr int64_t kMinWidth = 64;     // elements of a row, at least
constexpr int64_t kMaxWidth = 1024;   // elements of a row of several channels, at most
constexpr int64_t kMaxLanes = 16;     // of a vector
constexpr int64_t kFewElements = 64;  // of a channel, at most, for its first to be the sums' origin

// The unit of work: some channels of some images (NHWC: of some pixels).
struct Run {
  int64_t chunk;  // index: a range of images, or a piece of a plane
  int64_t channel, channels;
  int64_t offset, length;       // of the first sequence of adjacent elements
  int64_t repetitions, stride;  // number of sequences, elements between their starts
  int64_t count;                // elements of each channel

  // Call f(offset) for each sequence of adjacent elements.
  template <typename F>
  void for_each_sequence(const F& f) const {
    for (int64_t i = 0; i < repetitions; ++i) {
      f(offset + i * stride);
    }
  }
};

// Division of a tensor into runs. It depends on the shape alone: results do not depend on threads.
//
//            groups of channels                   a row of per-channel arguments
//          ┌─────────┬─────────┬───┐              ┌────────────────────────────────┐
//   images │   run   │   run   │run│ chunk 0      │ c0 c0 c0 c1 c1 c1 c2 c2 c2 …   │ small planes
//          ├─────────┼─────────┼───┤              │ c0 c1 c2 c0 c1 c2 c0 c1 c2 …   │ NHWC
//   images │   run   │   run   │run│ chunk 1 …    └────────────────────────────────┘
//          └─────────┴─────────┴───┘
struct Runs {
  NormLayout layout;
  bool nchw;
  int64_t plane;     // elements of a channel in a row: a small plane of NCHW, or 1
  int64_t channels;  // of a run, at most
  int64_t width;     // elements of a row: channels × plane, times a power of two
  int64_t piece;     // elements of a piece of a plane, at most
  int64_t pieces;    // of a plane
  int64_t images;    // of a run, at most
  int64_t chunks, groups;

  explicit Runs(NormLayout layout) : layout(layout), nchw(layout.inner > 1) {
    plane = nchw && layout.inner <= kMaxWidth / 2 ? layout.inner : 1;
    channels = nchw && plane == 1 ? 1 : std::min(layout.channels, kMaxWidth / plane);
    width = channels * plane;
    if (width < kMinWidth) {
      width *= kMaxLanes / std::gcd(width, kMaxLanes);  // whole vectors
      while (width < kMinWidth) {
        width *= 2;
      }
    }
    piece = std::min(layout.inner, kRun);
    pieces = (layout.inner + piece - 1) / piece;
    images = std::max<int64_t>(1, kRun / (channels * layout.inner));
    chunks = (layout.outer + images - 1) / images * pieces;
    groups = (layout.channels + channels - 1) / channels;
  }

  Run at(int64_t run) const {
    const int64_t chunk = run / groups, channel = run % groups * channels;
    const int64_t image = chunk / pieces * images, begin = chunk % pieces * piece;
    const int64_t n = std::min(images, layout.outer - image);
    const int64_t c = std::min(channels, layout.channels - channel);
    const int64_t length = std::min(piece, layout.inner - begin);
    const int64_t offset = (image * layout.channels + channel) * layout.inner + begin;
    if (!nchw && groups == 1) {  // the pixels are adjacent
      return {chunk, channel, c, offset, n * c, 1, 0, n};
    }
    return {chunk, channel, c, offset, c * length, n, layout.channels * layout.inner, n * length};
  }

  // Return the offsets of the first channel's first, middle and last element.
  std::array<int64_t, 3> samples(const Run& run) const {
    const int64_t row = run.channels * plane, images = run.repetitions - 1;
    const int64_t rows = run.length / row - 1, pixels = plane - 1;
    const auto at = [&](int64_t n) {  // n halves of the way
      return run.offset + images * n / 2 * run.stride + rows * n / 2 * row + pixels * n / 2;
    };
    return {at(0), at(1), at(2)};
  }

  // Return the number of elements of each channel in a chunk.
  int64_t count(int64_t chunk) const { return at(chunk * groups).count; }

  template <typename A, typename F>
  void for_each(std::initializer_list<const A*> arguments, const F& f) const;
};

// Rows of one thread, padded to whole vectors.
template <typename A>
class Rows {
 public:
  Rows(const Runs& runs, size_t count)
      : runs_(runs), size_(runs.width + kMaxLanes), memory_(count * size_) {}

  A* operator[](size_t i) { return memory_.data() + i * size_; }

  // Fill row i with value(c) of each channel c of `channels`.
  template <typename F>
  void repeat(size_t i, int64_t channels, const F& value) {
    A* row = (*this)[i];
    for (int64_t c = 0; c < channels; ++c) {
      row[c * runs_.plane] = value(c);
    }
    for (int64_t c = 0; runs_.plane > 1 && c < channels; ++c) {
      std::fill_n(row + c * runs_.plane, runs_.plane, row[c * runs_.plane]);
    }
    for (int64_t k = channels * runs_.plane; k < runs_.width; ++k) {
      row[k] = row[k - channels * runs_.plane];
    }
  }

  void clear(size_t i) { std::fill_n((*this)[i], size_, A(0)); }

  // Add up the columns of each channel of row i; return the sums of the channels.
  const A* fold(size_t i) {
    A* row = (*this)[i];
    const int64_t columns = runs_.channels * runs_.plane;
    for (int64_t half = runs_.width / 2; half >= columns; half /= 2) {
      for (int64_t k = 0; k < half; ++k) {
        row[k] += row[k + half];
      }
    }
    for (int64_t c = 0; runs_.plane > 1 && c < runs_.channels; ++c) {
      row[c] = std::accumulate(row + c * runs_.plane, row + (c + 1) * runs_.plane, A(0));
    }
    return row;
  }

 private:
  const Runs& runs_;
  int64_t size_;
  std::vector<A> memory_;
};

// Call f(run, rows) for each run, in several threads. The first rows are the arguments [C],
// followed by three scratch rows.
template <typename A, typename F>
void Runs::for_each(std::initializer_list<const A*> arguments, const F& f) const {
  const int64_t grain = kRun / (count(0) * channels) + 1;
  parallel_for(0, chunks * groups, grain, [&](int64_t begin, int64_t end) {
    Rows<A> rows(*this, arguments.size() + 3);
    for (int64_t i = begin; i < end; ++i) {
      const Run run = at(i);
      if (groups > 1 || i == begin) {
        size_t row = 0;
        for (const A* argument : arguments) {
          rows.repeat(row++, run.channels, [&](int64_t c) { return argument[run.channel + c]; });
        }
      }
      f(run, rows);
    }
  });
}

using Sums = std::array<double, 3>;

// Two values of each chunk and channel.
template <typename A>
struct Partials {
  int64_t channels;
  std::vector<A> first, second;

  explicit Partials(const Runs& runs)
      : channels(runs.layout.channels), first(runs.chunks * channels), second(first.size()) {}

  int64_t at(const Run& run) const { return run.chunk * channels + run.channel; }

  // Call add(sums, chunk, first, second, origin) for each chunk of a channel, then
  // finish(channel, sums, origin); `origin` is the first value of the first chunk, or 0.
  template <typename Add, typename Finish>
  void combine(const Runs& runs, const Add& add, const Finish& finish) const {
    parallel_for(0, channels, kRun / runs.chunks + 1, [&](int64_t begin, int64_t end) {
      std::vector<Sums> sums(end - begin);
      for (int64_t chunk = 0; chunk < runs.chunks; ++chunk) {
        for (int64_t c = begin; c < end; ++c) {
          const int64_t i = chunk * channels + c;
          add(sums[c - begin], chunk, first[i], second[i], finite_or_zero(first[c]));
        }
      }
      for (int64_t c = begin; c < end; ++c) {
        finish(c, sums[c - begin], finite_or_zero(first[c]));
      }
    });
  }
};

// Coefficients of each channel: z = (x − mean) scale + bias.
template <typename A>
struct Coefficients {
  std::vector<A> scale, bias;

  explicit Coefficients(const Channels<A>& from, int64_t channels)
      : scale(from.rstd, from.rstd + channels), bias(channels) {
    for (int64_t c = 0; c < channels; ++c) {
      scale[c] *= from.weight ? from.weight[c] : A(1);
      bias[c] = from.bias ? from.bias[c] : A(0);
    }
  }
};

struct Backend {
  template <typename T, typename A, typename F>
  static void forward(const Tensor&, NormLayout layout, const T* x, const Statistics<A>& statistics,
                      const Channels<A>& channels, const F& f, T* out) {
    const Runs runs(layout);
    Partials<A> partials(runs);  // mean and Σ (x − mean)²
    runs.for_each<A>({}, [&](const Run& run, Rows<A>& rows) {
      const auto at = runs.samples(run);
      rows.repeat(0, run.channels, [&](int64_t c) {
        const T* from = x + c * runs.plane;
        const A first = from[at[0]];
        const A origin =
            run.count <= kFewElements ? first : median<A>(first, from[at[1]], from[at[2]]);
        return finite_or_zero(origin) * A(kDeviationUnit);
      });
      rows.clear(1);
      rows.clear(2);
      run.for_each_sequence([&](int64_t i) {
        OPS_CALL(statistics(x + i, run.length, runs.width, rows[0], rows[1], rows[2]));
      });
      const A *sum = rows.fold(1), *square = rows.fold(2), n = static_cast<A>(run.count);
      for (int64_t c = 0, to = partials.at(run); c < run.channels; ++c, ++to) {
        const Moments<A> moments(rows[0][c * runs.plane], sum[c], square[c], n);
        partials.first[to] = moments.mean;
        partials.second[to] = moments.squares;
      }
    });
    const double n = static_cast<double>(layout.count());
    partials.combine(
        runs,
        [&](Sums& sums, int64_t chunk, double mean, double squares, double origin) {
          const double m = static_cast<double>(runs.count(chunk)), d = mean - origin;
          sums = {sums[0] + m * d, sums[1] + m * d * d, sums[2] + squares};
        },
        [&](int64_t c, const Sums& sums, double origin) {  // Chan, Golub, LeVeque
          const double shift = sums[0] / n;
          statistics.store(c, origin + shift, sums[2] + central_squares(sums[0], shift, sums[1]));
        });
    const Coefficients<A> with(channels, layout.channels);
    const A *mean = channels.mean, *scale = with.scale.data(), *bias = with.bias.data();
    runs.for_each<A>({mean, scale, bias}, [&](const Run& run, Rows<A>& rows) {
      run.for_each_sequence([&](int64_t i) {
        OPS_CALL(normalise(x + i, run.length, runs.width, {rows[0], rows[1], rows[2]}, f, out + i));
      });
    });
  }

  // `out` may be null: no gradient of the input.
  template <typename T, typename A, typename F>
  static void backward(const Tensor&, NormLayout layout, const T* grad, const T* x,
                       const Channels<A>& channels, const F& f, T* out, A* grad_weight,
                       A* grad_bias) {
    const Runs runs(layout);
    Partials<A> partials(runs);  // Σ g and Σ g (x − mean)
    const Coefficients<A> with(channels, layout.channels);
    const A *mean = channels.mean, *scale = with.scale.data(), *bias = with.bias.data();
    runs.for_each<A>({mean, scale, bias}, [&](const Run& run, Rows<A>& rows) {
      rows.clear(3);
      rows.clear(4);
      run.for_each_sequence([&](int64_t i) {
        OPS_CALL(gradients(grad + i, x + i, run.length, runs.width, {rows[0], rows[1], rows[2]}, f,
                           rows[3], rows[4]));
      });
      std::copy_n(rows.fold(3), run.channels, partials.first.data() + partials.at(run));
      std::copy_n(rows.fold(4), run.channels, partials.second.data() + partials.at(run));
    });
    std::vector<A> offsets(layout.channels), slopes(layout.channels);
    partials.combine(
        runs,
        [](Sums& sums, int64_t, double sum, double product, double) {
          sums = {sums[0] + sum, sums[1] + product, 0};
        },
        [&](int64_t c, const Sums& sums, double) {
          grad_bias[c] = static_cast<A>(sums[0]);
          grad_weight[c] = weight_gradient(sums[0], sums[1], channels.rstd[c]);
          const A factor = scale[c] / static_cast<A>(layout.count());
          offsets[c] = factor * grad_bias[c];
          slopes[c] = factor * (grad_weight[c] * channels.rstd[c]);
        });
    if (out == nullptr) {
      return;
    }
    const A *offset = offsets.data(), *slope = slopes.data();
    runs.for_each<A>({mean, scale, bias, offset, slope}, [&](const Run& run, Rows<A>& rows) {
      run.for_each_sequence([&](int64_t i) {
        OPS_CALL(input_gradient(grad + i, x + i, run.length, runs.width,
                                {rows[0], rows[1], rows[2]}, f, rows[3], rows[4], out + i));
      });
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def(
      "batch_norm_act2d(Tensor input, Tensor? weight, Tensor? bias, int activation, float eps, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum) -> "
      "(Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "batch_norm_act2d_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor? bias, "
      "Tensor mean, Tensor rstd, int activation, float eps, bool[3] output_mask) -> "
      "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  m.impl("batch_norm_act2d", TORCH_BOX(&batch_norm_act2d<Backend>));
  m.impl("batch_norm_act2d_backward", TORCH_BOX(&batch_norm_act2d_backward<Backend>));
}

}  // namespace ops::cpu
