// CPU batch normalisation and activation: a deterministic two-stage reduction over runs of memory,
// then a pass over the same runs.
#include <array>
#include <numeric>
#include <vector>

#include "batch_norm_act2d/op.h"
#include "core/cpu/parallel.h"

#define OPS_KERNELS "batch_norm_act2d/cpu_kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::batch_norm_act2d {
namespace {

constexpr int64_t kRun = 32768;      // elements of a run, about
constexpr int64_t kMinWidth = 64;    // elements of a row, at least
constexpr int64_t kMaxWidth = 1024;  // elements of a row of several channels, at most
constexpr int64_t kMaxLanes = 16;    // of a vector

// The unit of work: some channels of some images (NHWC: of some pixels).
struct Run {
  int64_t chunk;  // index: a range of images, or a piece of a plane
  int64_t channel, channels;
  int64_t offset, length;       // of the first sequence of adjacent elements
  int64_t repetitions, stride;  // number of sequences, elements between their starts
  int64_t count;                // elements of each channel
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
  Layout layout;
  bool nchw;
  int64_t plane;     // elements of a channel in a row: a small plane of NCHW, or 1
  int64_t channels;  // of a run, at most
  int64_t width;     // elements of a row: channels × plane, times a power of two
  int64_t piece;     // elements of a piece of a plane, at most
  int64_t pieces;    // of a plane
  int64_t images;    // of a run, at most
  int64_t chunks, groups;

  explicit Runs(Layout layout) : layout(layout), nchw(layout.inner > 1) {
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
};

// Rows of one thread, padded to whole vectors: kArguments rows of arguments, and two of sums.
template <int kArguments, typename A>
struct Rows {
  const Runs& runs;
  int64_t pitch = runs.width + kMaxLanes;
  std::vector<A> memory = std::vector<A>((kArguments + 2) * pitch);

  A* arguments() { return memory.data(); }
  A* sums() { return memory.data() + kArguments * pitch; }

  // Fill the rows of arguments: load(c, a) returns those of channel c of a run.
  template <typename Load>
  void fill(int64_t channels, const Load& load) {
    const int64_t columns = channels * runs.plane;
    for (int64_t c = 0; c < channels; ++c) {
      A values[kArguments];
      load(c, values);
      for (int i = 0; i < kArguments; ++i) {
        std::fill_n(arguments() + i * pitch + c * runs.plane, runs.plane, values[i]);
      }
    }
    for (int i = 0; i < kArguments; ++i) {
      A* row = arguments() + i * pitch;
      for (int64_t k = columns; k < runs.width; ++k) {
        row[k] = row[k - columns];
      }
    }
  }

  // Add up the columns of each channel in a row of sums; return the sums of the channels.
  const A* fold(A* row) const {
    const int64_t columns = runs.channels * runs.plane;
    for (int64_t half = runs.width / 2; half >= columns; half /= 2) {
      for (int64_t k = 0; k < half; ++k) {
        row[k] += row[k + half];
      }
    }
    for (int64_t c = 0; runs.plane > 1 && c < runs.channels; ++c) {
      row[c] = std::accumulate(row + c * runs.plane, row + (c + 1) * runs.plane, A(0));
    }
    return row;
  }
};

// Call f(run, rows) for each run, in several threads. load(run) returns the function that fills the
// rows of arguments; they depend on the channels alone unless `sampled`.
template <int kArguments, typename A, typename Load, typename F>
void for_each_run(const Runs& runs, bool sampled, const Load& load, const F& f) {
  const int64_t grain = kRun / (runs.count(0) * runs.channels) + 1;
  cpu::parallel_for(0, runs.chunks * runs.groups, grain, [&](int64_t begin, int64_t end) {
    Rows<kArguments, A> rows{runs};
    for (int64_t i = begin; i < end; ++i) {
      const Run run = runs.at(i);
      if (sampled || runs.groups > 1 || i == begin) {
        rows.fill(run.channels, load(run));
      }
      f(run, rows);
    }
  });
}

struct Backend {
  // `in` are the inputs after x. `out` may be null: reduction only.
  template <typename T, typename Reduce, typename Map, typename... In>
  static void run(const Tensor&, Layout layout, const Reduce& reduce, const Map& map, T* out,
                  const T* x, const In*... in) {
    using A = acc_t<T>;
    const Runs runs(layout);
    const int64_t all = layout.channels, size = runs.chunks * all;
    std::vector<A> partials(2 * size);
    const auto load_sampled = [&](const Run& run) {
      return [&, at = runs.samples(run)](int64_t c, A* arguments) {
        const T* from = x + c * runs.plane;
        const A sample[] = {from[at[0]], from[at[1]], from[at[2]]};
        reduce.load(run.channel + c, sample, arguments);
      };
    };
    for_each_run<Reduce::kArguments, A>(
        runs, Reduce::kSampled, load_sampled, [&](const Run& run, auto& rows) {
          std::fill_n(rows.sums(), 2 * rows.pitch, A(0));
          OPS_CALL(batch_norm_act2d::reduce(reduce, rows.arguments(), rows.sums(), rows.pitch,
                                            runs.width, run.length, run.repetitions, run.stride,
                                            x + run.offset, (in + run.offset)...));
          const A *first = rows.fold(rows.sums()), *second = rows.fold(rows.sums() + rows.pitch);
          for (int64_t c = 0; c < run.channels; ++c) {
            A* to = partials.data() + run.chunk * all + run.channel + c;
            to[0] = first[c];
            to[size] = second[c];
            reduce.finish_chunk(rows.arguments() + c * runs.plane, to[0], to[size],
                                static_cast<A>(run.count));
          }
        });
    cpu::parallel_for(0, all, kRun / runs.chunks + 1, [&](int64_t begin, int64_t end) {
      std::vector<Sums> sums(end - begin);
      const auto origin = [&](int64_t c) { return finite_or_zero<double>(partials[c]); };
      for (int64_t chunk = 0; chunk < runs.chunks; ++chunk) {
        const double count = static_cast<double>(runs.count(chunk));
        for (int64_t c = begin; c < end; ++c) {
          const int64_t i = chunk * all + c;
          reduce.combine(sums[c - begin], count, partials[i], partials[size + i], origin(c));
        }
      }
      for (int64_t c = begin; c < end; ++c) {
        reduce.store(c, sums[c - begin], origin(c));
      }
    });
    if (out == nullptr) {
      return;
    }
    const auto load = [&](const Run& run) {
      return [&](int64_t c, A* arguments) { map.load(run.channel + c, arguments); };
    };
    for_each_run<Map::kArguments, A>(runs, false, load, [&](const Run& run, auto& rows) {
      OPS_CALL(batch_norm_act2d::map(map, rows.arguments(), rows.pitch, runs.width, run.length,
                                     run.repetitions, run.stride, out + run.offset, x + run.offset,
                                     (in + run.offset)...));
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
  m.impl("batch_norm_act2d", TORCH_BOX(&forward<Backend>));
  m.impl("batch_norm_act2d_backward", TORCH_BOX(&backward<Backend>));
}

}  // namespace ops::batch_norm_act2d
