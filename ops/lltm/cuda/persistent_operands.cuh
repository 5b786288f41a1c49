// Operands of persistent_mma.cuh: weights in registers, 8 rows of the batch in shared memory.
//
//   weights, 16 features       rows of the batch (columns of the right operand)
//   ┌───────────────────┐      ┌──────────┐
//   │ g      2 tiles    │      │ row g    │   lane 4 g + t: columns 8 t … 8 t + 7 of every 32,
//   │ g + 8  (32 cols)  │  ×   │ 32 cols  │   for two products of 16 columns each
//   └───────────────────┘      └──────────┘
#pragma once

#include "core/cuda/mma.cuh"
#include "lltm/cuda/persistent.cuh"

namespace ops::cuda {

// Right operand of the products, [8 rows of the batch][16 · kTiles], in 16-byte chunks; the order
// of the chunks of a row avoids bank conflicts.
template <int kTiles>
struct SharedRows {
  uint4 chunks[kMmaRows][2 * kTiles];

  static __device__ int place(int row, int chunk) {
    return chunk ^ (((row ^ (row >> 1)) & 1) << 2) ^ ((row >> 2) << 1);
  }
  __device__ void store(int row, int pair, unsigned value) {
    reinterpret_cast<unsigned*>(&chunks[row][place(row, pair / 4)])[pair % 4] = value;
  }
  __device__ uint4 load(int row, int chunk) const { return chunks[row][place(row, chunk)]; }
};

// Two adjacent elements. `aligned`: to 4 bytes.
template <typename T>
__device__ unsigned load_pair(const T* from, bool aligned) {
  if (aligned) {
    return *reinterpret_cast<const unsigned*>(from);
  }
  const auto* bits = reinterpret_cast<const unsigned short*>(from);
  return bits[0] | bits[1] << 16;
}

// Left operand: 16 features × 16 · kTiles columns of weights, for one warp. Row g is feature 2 g,
// row g + 8 feature 2 g + 1; a lane has 8 consecutive columns of two tiles, in the order of
// SharedRows.
template <typename T, int kTiles>
struct Weights {
  static constexpr int kColumns = 16 * kTiles, kPitch = kColumns + 8;
  using Stage = T[16][kPitch];

  unsigned tiles[kTiles][4];

  // Load from rows of features or, transposed, of columns, `wide` elements apart. `aligned`: rows
  // are aligned to pairs.
  template <bool kTransposed>
  __device__ void load(Stage& stage, const T* from, int64_t wide, int columns, bool aligned) {
    const Lane lane;
    constexpr int kPairs = kTransposed ? 8 : kColumns / 2;  // in a row
    unsigned loaded[kColumns / 4];                          // all in flight
    const auto each = [&](const auto& f) {
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        const int at = 32 * i + threadIdx.x % 32;
        f(loaded[i], at / kPairs, at % kPairs);
      }
    };
    each([&](unsigned& value, int row, int pair) {
      const bool valid = (kTransposed ? row : 2 * pair) < columns;
      value = valid ? load_pair(from + row * wide + 2 * pair, aligned) : 0;
    });
    __syncwarp();
    each([&](unsigned& value, int row, int pair) {
      const T(&both)[2] = reinterpret_cast<const T(&)[2]>(value);
      if constexpr (kTransposed) {
        stage[2 * pair][row] = both[0];
        stage[2 * pair + 1][row] = both[1];
      } else {
        *reinterpret_cast<unsigned*>(&stage[row][2 * pair]) = value;
      }
    });
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const auto bits =
            *reinterpret_cast<const uint4*>(&stage[2 * lane.g + row][32 * j + 8 * lane.t]);
        tiles[2 * j][row] = bits.x;
        tiles[2 * j][row + 2] = bits.y;
        tiles[2 * j + 1][row] = bits.z;
        tiles[2 * j + 1][row + 2] = bits.w;
      }
    }
  }

  // sums += product with a tile of columns
  __device__ void multiply(float (&sums)[4], int tile, unsigned low, unsigned high) const {
    const unsigned right[2] = {low, high};
    const auto& a = tiles[tile];
    Packed<T>::mma(sums, sums, a[0], a[1], a[2], a[3], right);
  }
};

// sums[gate] += weights[gate] · right, in two independent chains of products per gate
template <typename T, int kTiles>
__device__ void multiply_gates(float (&sums)[3][4], const Weights<T, kTiles> (&weights)[3],
                               const SharedRows<kTiles>& right) {
  const Lane lane;
  float odd[3][4] = {};
#pragma unroll
  for (int j = 0; j < kTiles / 2; ++j) {
    const uint4 columns = right.load(lane.g, 4 * j + lane.t);
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      weights[gate].multiply(sums[gate], 2 * j, columns.x, columns.y);
      weights[gate].multiply(odd[gate], 2 * j + 1, columns.z, columns.w);
    }
  }
#pragma unroll
  for (int i = 0; i < 12; ++i) {
    sums[i / 4][i % 4] += odd[i / 4][i % 4];
  }
}

// sums = Σ weights[gate] · right[gate], in four independent chains of products
template <typename T, int kTiles>
__device__ void multiply_gates(float (&sums)[4], const Weights<T, kTiles> (&weights)[3],
                               const SharedRows<kTiles> (&right)[3]) {
  const Lane lane;
  float chains[4][4] = {};
#pragma unroll
  for (int i = 0; i < 3 * kTiles / 2; ++i) {
    const int j = i / 3, gate = i % 3, chain = 2 * (i % 2);
    const uint4 columns = right[gate].load(lane.g, 4 * j + lane.t);
    weights[gate].multiply(chains[chain], 2 * j, columns.x, columns.y);
    weights[gate].multiply(chains[chain + 1], 2 * j + 1, columns.z, columns.w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sums[i] = (chains[0][i] + chains[1][i]) + (chains[2][i] + chains[3][i]);
  }
}

}  // namespace ops::cuda
