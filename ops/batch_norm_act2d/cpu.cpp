// CPU batch normalisation and activation: a deterministic two-stage reduction over runs of memory,
// then a pass over the same runs.
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
      return {chunk, channel, c, offset, n * c, 1, 0};
    }
    return {chunk, channel, c, offset, c * length, n, layout.channels * layout.inner};
  }
};

// Rows of one thread, padded to whole vectors: kArguments rows of arguments, and two of sums.
template <int kArguments, typename A>
struct Rows {
  const Runs& runs;
  int64_t pitch = runs.width + kMaxLanes;
  std::vector<A> memory = std::vector<A>((kArguments + 2) * pitch);

  A* arguments() { return memory.data(); }
  A* sums() { return memory.data() + kArguments * pitch; }

  // Fill the rows of arguments with those of the channels of a run.
  template <typename Stage>
  void fill(const Run& run, const Stage& stage) {
    const int64_t columns = run.channels * runs.plane;
    for (int64_t c = 0; c < run.channels; ++c) {
      A values[kArguments];
      stage.load(run.channel + c, values);
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

// Call f(run, rows) for each run, in several threads. The rows have the arguments of the stage.
template <typename A, typename Stage, typename F>
void for_each_run(const Runs& runs, const Stage& stage, const F& f) {
  const Run first = runs.at(0);
  const int64_t grain = kRun / (first.length * first.repetitions) + 1;
  cpu::parallel_for(0, runs.chunks * runs.groups, grain, [&](int64_t begin, int64_t end) {
    Rows<Stage::kArguments, A> rows{runs};
    for (int64_t i = begin; i < end; ++i) {
      const Run run = runs.at(i);
      if (runs.groups > 1 || i == begin) {
        rows.fill(run, stage);
      }
      f(run, rows);
    }
  });
}

struct Backend {
  // `in` are the inputs. `out` may be null: reduction only.
  template <typename T, typename Reduce, typename Map, typename... In>
  static void run(const Tensor&, Layout layout, const Reduce& reduce, const Map& map, T* out,
                  const In*... in) {
    using A = acc_t<T>;
    const Runs runs(layout);
    const int64_t channels = layout.channels;
    std::vector<Sums<A>> partials(runs.chunks * channels);
    for_each_run<A>(runs, reduce, [&](const Run& run, auto& rows) {
      std::fill_n(rows.sums(), 2 * rows.pitch, A(0));
      OPS_CALL(batch_norm_act2d::reduce(reduce, rows.arguments(), rows.sums(), rows.pitch,
                                        runs.width, run.length, run.repetitions, run.stride,
                                        (in + run.offset)...));
      const A *first = rows.fold(rows.sums()), *second = rows.fold(rows.sums() + rows.pitch);
      for (int64_t c = 0; c < run.channels; ++c) {
        partials[run.chunk * channels + run.channel + c] = {first[c], second[c]};
      }
    });
    cpu::parallel_for(0, channels, kRun / runs.chunks + 1, [&](int64_t begin, int64_t end) {
      std::vector<Sums<double>> sums(end - begin);
      for (int64_t chunk = 0; chunk < runs.chunks; ++chunk) {
        for (int64_t c = begin; c < end; ++c) {
          sums[c - begin] += partials[chunk * channels + c];
        }
      }
      for (int64_t c = begin; c < end; ++c) {
        reduce(c, sums[c - begin]);
      }
    });
    if (out == nullptr) {
      return;
    }
    for_each_run<A>(runs, map, [&](const Run& run, auto& rows) {
      OPS_CALL(batch_norm_act2d::map(map, rows.arguments(), rows.pitch, runs.width, run.length,
                                     run.repetitions, run.stride, out + run.offset,
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
