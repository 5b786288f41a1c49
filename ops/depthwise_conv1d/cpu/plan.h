// CPU depthwise_conv1d: plan of a pass along T. Each pass is a sum of shifted sources,
//
//   out[F·o + f] = Σ w[tap] · source[S·(o + shift) + phase]       (taps of output phase f)
//
// Forward: F = 1, S = stride. Input gradient: F = stride, S = 1. A unit of work is a chunk of the
// outputs o of one channel, or of a group of channels (Lanes::channels):
//
//   source ── gather ──► tile [phase][o][channel] in float, zeros for padding
//                          │  w[tap] · tile[o + shift] on SIMD vectors of
//                          ▼  adjacent outputs or of channels
//                        registers ── bias, SiLU ──► out
//
// A unit of dense float rows that reads no padding reads its source in place.
#pragma once

#include <algorithm>
#include <vector>

#include "core/axis.h"
#include "core/cpu/isa.h"
#include "depthwise_conv1d/op.h"

namespace ops::depthwise_conv1d {

constexpr int64_t kRowChunk = 2048, kChannelChunk = 64;  // outputs of a unit
// Bytes of the channels of a unit: for filters of more than kLongFilter taps, whose tile would
// exceed the L1 cache, and others.
constexpr int64_t kLongFilter = 32, kLongGroupBytes = 128, kGroupBytes = 256;
constexpr int64_t kShortRow = 32;  // steps; channels of shorter rows are computed together

// Assignment of SIMD lanes: to channels, or to adjacent outputs of one channel.
struct Lanes {
  int64_t vector;      // of a SIMD vector
  bool channels;       // channels-last but for a few channels; also planes of short rows
  int64_t tile, sums;  // of a step of a tile and of a tap's weights; of a tap's sums
  int64_t groups;      // of channels

  template <typename A>
  Lanes(const Geometry& g, A) : vector(cpu::vector_bytes() / sizeof(A)) {
    const int64_t most = (g.taps > kLongFilter ? kLongGroupBytes : kGroupBytes) / sizeof(A);
    channels =
        g.channels_last ? g.c > vector / 4 : g.c > vector / 2 && g.t + g.out_t <= 2 * kShortRow;
    tile = channels ? std::min((g.c + vector - 1) / vector * vector, most) : 1;
    sums = channels ? tile : vector;
    groups = (g.c + tile - 1) / tile;
  }
};

struct Tap {
  int64_t index, phase, shift;  // phase: index in Pass::source_phases
};

struct OutputPhase {
  int64_t offset;  // outputs offset, offset + F, …
  std::vector<Tap> taps;
};

struct Pass {
  int64_t source_size, source_step, out_size, out_step;  // steps: S, F
  std::vector<int64_t> source_phases;                    // those that taps read
  std::vector<OutputPhase> phases;                       // input gradient: those that have taps
  int64_t first = 0, last = 0;                           // shift, of all taps
  int64_t chunk, chunks;                                 // outputs of a unit; units of a row

  Pass(const Geometry& g, const Lanes& lanes, bool input_gradient) {
    const Axis axis(input_gradient, g.t, g.out_t, g.taps, g.stride, g.padding, g.dilation);
    source_size = axis.source_size, source_step = input_gradient ? 1 : g.stride;
    out_size = axis.out_size, out_step = input_gradient ? g.stride : 1;
    if (!input_gradient) {
      phases.push_back({0, {}});
    }
    for (int64_t k = 0; k < g.taps; ++k) {
      auto [phase, shift] = axis.phase_shift(k);
      if (phase >= g.t) {
        continue;  // connects padding only
      }
      shift = input_gradient ? -shift : shift;
      first = source_phases.empty() ? shift : std::min(first, shift);
      last = source_phases.empty() ? shift : std::max(last, shift);
      const int64_t source = index_of(source_phases, input_gradient ? 0 : phase);
      phase_at(input_gradient ? phase : 0).taps.push_back({k, source, shift});
    }
    // A unit gathers at most twice the outputs that it computes.
    const int64_t outputs = (out_size - 1) / out_step + 1;
    chunk = std::max(lanes.channels ? kChannelChunk : kRowChunk, last - first);
    chunk = std::min(chunk, outputs);
    chunks = (outputs + chunk - 1) / chunk;
  }

 private:
  OutputPhase& phase_at(int64_t offset) {
    const auto found = std::find_if(phases.begin(), phases.end(),
                                    [&](const OutputPhase& p) { return p.offset == offset; });
    return found != phases.end() ? *found : phases.emplace_back(OutputPhase{offset, {}});
  }

  static int64_t index_of(std::vector<int64_t>& values, int64_t value) {
    const int64_t index = std::find(values.begin(), values.end(), value) - values.begin();
    if (index == static_cast<int64_t>(values.size())) {
      values.push_back(value);
    }
    return index;
  }
};

// Offsets of a tap, in elements of the tile, and of the weights or sums.
struct TapOffset {
  int64_t source, weight;
};

// Taps of a chunk that read any source, and the window of each source phase that they read.
struct Chunk {
  int64_t index = -1, begin, low, width;  // first output; first element and size of the window
  std::vector<TapOffset> taps;            // of all output phases
  std::vector<size_t> tap_ends;           // of each output phase

  // Move to chunk `to`; `weight_lanes`: those of a tap in TapOffset::weight.
  void move_to(int64_t to, const Pass& p, const Lanes& lanes, int64_t weight_lanes) {
    if (to == index) {
      return;
    }
    index = to, begin = index * p.chunk;
    taps.clear(), tap_ends.clear();
    // A tap that reads any source starts after −chunk and ends before source_size + chunk.
    low = std::max(begin + p.first, -p.chunk);
    width = std::min(begin + p.last, p.source_size) + p.chunk - low;
    width = std::max<int64_t>(width, 0) + (lanes.tile == 1 ? lanes.vector : 0);
    for (const OutputPhase& phase : p.phases) {
      for (const Tap& tap : phase.taps) {
        const int64_t at = begin + tap.shift;
        if (at + p.chunk > 0 && at * p.source_step + p.source_phases[tap.phase] < p.source_size) {
          taps.push_back({(tap.phase * width + at - low) * lanes.tile, tap.index * weight_lanes});
        }
      }
      tap_ends.push_back(taps.size());
    }
  }

  // Return the number of outputs of a phase; at most 0: none.
  int64_t outputs(const Pass& p, const OutputPhase& phase) const {
    return std::min(p.chunk, (p.out_size - 1 - phase.offset) / p.out_step + 1 - begin);
  }
};

// Arguments of the kernel `gather`: the window [low, low + width) of source phases.
template <typename T>
struct Source {
  const T* data;
  int64_t size, step, channel_step;  // steps; elements from one step, or channel, to the next
  int64_t channels;
  int64_t low, width;
  const std::vector<int64_t>& phases;
  int64_t phase_step;  // steps from one of a phase to the next
};

// Arguments of the kernel `correlate`.
template <typename T>
struct Outputs {
  using A = acc_t<T>;
  const A *tile, *weight, *bias;
  int64_t lanes, channels;  // of a step of the tile; of the output
  bool silu;
  const A* grad;  // tile of the gradient of silu: multiply it with silu'; or nullptr
  int64_t out_step;
  const TapOffset *taps = nullptr, *taps_end = nullptr;
  int64_t steps = 0;
  T* out = nullptr;
};

// Arguments of the kernel `accumulate`.
template <typename A>
struct Products {
  const A *tile, *grad;
  int64_t lanes, steps, rest;  // rest: outputs of a last vector that is not whole
  const TapOffset* taps;
  int64_t count;          // of taps
  double *totals, *bias;  // [tap][lane], [lane] or nullptr
};

}  // namespace ops::depthwise_conv1d
