// Loads and stores of the FMA kernels.
#pragma once

#include <cuda_fp16.h>

#include "depthwise_conv1d/cuda/problem.cuh"

namespace ops::depthwise_conv1d {

constexpr int kGroup = 4;  // elements of a vector along T or C, taps of a group

// Return the address modulo `elements` elements.
template <typename T>
__device__ int misalignment(const T* data, int elements) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(data) / sizeof(T) % elements);
}

template <typename T>
constexpr int kVector = kVectorBytes / sizeof(T);  // elements of an aligned vector

// Return whether all rows of a and b have the same address modulo kVectorBytes.
template <typename T, typename U>
bool are_equally_aligned(const Rows<T>& a, const Rows<U>& b) {
  const auto address = [](const void* data) { return reinterpret_cast<uintptr_t>(data); };
  return (address(a.data) - address(b.data)) % kVectorBytes == 0 &&
         (a.n_stride - b.n_stride) % kVector<T> == 0 && (a.c_stride - b.c_stride) % kVector<T> == 0;
}

// Return whether all rows begin at a multiple of kVectorBytes.
template <typename T>
bool are_rows_aligned(const Rows<T>& rows) {
  return are_equally_aligned(rows, Rows<T>{});
}

// Rows of inputs, outputs and gradients: any; equally aligned, so that shifts of causal
// convolutions are known at compile time; or all aligned to kVectorBytes.
enum class Alignment { kAny, kEqual, kVector };

// Call launch with a constant. float32 gains nothing from kEqual.
template <typename T, typename F>
void dispatch_alignment(bool equal, bool aligned, const F& launch) {
  if (equal && aligned) {
    return launch(std::integral_constant<Alignment, Alignment::kVector>{});
  }
  if constexpr (sizeof(T) == 2) {
    if (equal) {
      return launch(std::integral_constant<Alignment, Alignment::kEqual>{});
    }
  }
  launch(std::integral_constant<Alignment, Alignment::kAny>{});
}

// kCount adjacent elements of a row from any address on, loaded in aligned vectors. kShift: the
// first element's place in its vector if it is known, which saves shifts; otherwise -1.
template <typename T, int kCount, int kShift = -1>
class Window {
  using Element = std::conditional_t<sizeof(T) == 2, unsigned short, unsigned>;
  static constexpr int V = kVector<T>, kPerWord = 4 / sizeof(T);
  static constexpr int kVectors = (kCount + (kShift < 0 ? V - 1 : kShift) + V - 1) / V;
  static constexpr int kWords = 4 * kVectors;

 public:
  // Start to load row[at], …; zeros outside the row.
  __device__ __forceinline__ void load(const T* row, int at, int size) {
    shift_ = kShift < 0 ? (misalignment(row, V) + at) & (V - 1) : kShift;
    at -= shift_;
    const Element* const from = reinterpret_cast<const Element*>(row) + at;
    const int last = shift_ + kCount;  // vectors from here on are not needed
    if (at >= 0 && at + (last + V - 1) / V * V <= size) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (i * V < last) {
          load_vector(from + i * V, i);
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int first = at + i * V;
      if (kPerWord == 2 && first >= 0 && first + V <= size) {
        load_vector(from + i * V, i);
        continue;
      }
#pragma unroll
      for (int w = 4 * i; w < 4 * (i + 1); ++w) {
        word_[w] = 0;
#pragma unroll
        for (int j = w * kPerWord; j < (w + 1) * kPerWord; ++j) {
          if (is_inside(at + j, size)) {
            word_[w] |= static_cast<unsigned>(from[j]) << (j % kPerWord * 16);
          }
        }
      }
    }
  }

  // Convert the elements to float32. Shifts words of 32 bits, then elements of 16 bits.
  __device__ __forceinline__ void widen_to(float (&to)[kCount]) {
    constexpr int kFirst = kShift < 0 ? 0 : kShift;
    if constexpr (kShift < 0) {
      if (kPerWord == 2 && shift_ & 4) {
        shift<2>(0x7654);
      }
      if (shift_ & 2) {
        shift<2 / kPerWord>(0x7654);
      }
      if (shift_ & 1) {
        shift<1>(kPerWord == 2 ? 0x5432 : 0x7654);
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      to[i] = unpack(word_[(kFirst + i) / kPerWord], (kFirst + i) % kPerWord);
    }
  }

 private:
  // Load the words of vector i. In assembly, because nvcc loads three words in two instructions if
  // the fourth is not needed.
  __device__ __forceinline__ void load_vector(const Element* from, int i) {
    asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(word_[4 * i]), "=r"(word_[4 * i + 1]), "=r"(word_[4 * i + 2]), "=r"(word_[4 * i + 3])
        : "l"(from));
  }

  // Replace each word by bytes of it and of the one kWordsAhead after it. __byte_perm is in
  // assembly, because nvcc turns selections of whole words into loads from local memory.
  template <int kWordsAhead>
  __device__ __forceinline__ void shift(unsigned selector) {
#pragma unroll
    for (int i = 0; i + kWordsAhead < kWords; ++i) {
      asm("prmt.b32 %0, %1, %2, %3;"
          : "=r"(word_[i])
          : "r"(word_[i]), "r"(word_[i + kWordsAhead]), "r"(selector));
    }
  }

  static __device__ float unpack(unsigned word, int half) {
    if constexpr (std::is_same_v<T, float>) {
      return __uint_as_float(word);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      return __uint_as_float(half ? word & 0xffff0000u : word << 16);
    } else {
      return __half2float(__ushort_as_half(half ? word >> 16 : word & 0xffff));
    }
  }

  unsigned word_[kWords] = {};
  int shift_;  // the first element's place in the first vector
};

// Load kCount elements from row[at] on. kInside: all are inside the row and aligned to a group;
// otherwise those outside are zeros.
template <bool kInside, int kCount, typename T>
__device__ __forceinline__ void load(const T* row, int at, int size, float* to) {
#pragma unroll
  for (int i = 0; i < kCount; i += kGroup) {
    if constexpr (kInside) {
      const auto lanes = load_vector<kGroup>(row + at + i);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        to[i + j] = static_cast<float>(lanes.lane[j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        to[i + j] = is_inside(at + i + j, size) ? static_cast<float>(row[at + i + j]) : 0.0f;
      }
    }
  }
}

// Store those of kCount elements that are inside the row, from row[at] on, at an aligned address.
template <int kCount, typename T>
__device__ __forceinline__ void store(T* row, int at, int size, const float (&from)[kCount]) {
  constexpr int V = std::min(kCount, kVector<T>);
  if (at >= 0 && at + kCount <= size) {
#pragma unroll
    for (int i = 0; i < kCount; i += V) {
      store_vector(row + at + i, reinterpret_cast<const float (&)[V]>(from[i]));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (is_inside(at + i, size)) {
        row[at + i] = static_cast<T>(from[i]);
      }
    }
  }
}

// Elements of V adjacent channels at positions first, first + step, …; zeros outside the tensor.
template <typename T, int V>
class ChannelStream {
  using Bits = typename BitsOf<V * sizeof(T)>::type;

 public:
  // channel: at position 0.
  __device__ ChannelStream(const T* channel, int64_t stride, int first, int step, int size)
      : from_(channel + first * stride),
        stride_(step * stride),
        position_(first),
        step_(step),
        size_(size) {}

  // Start to load the next kCount positions.
  template <int kCount>
  __device__ __forceinline__ void load(Bits (&to)[kCount]) {
    if (position_ >= 0 && position_ + (kCount - 1) * step_ < size_) {
#pragma unroll
      for (int i = 0; i < kCount; ++i, from_ += stride_) {
        to[i] = *reinterpret_cast<const Bits*>(from_);
      }
      position_ += kCount * step_;
    } else {
      load_checked(to);
    }
  }

  // The same with a check of each position, in fewer registers.
  template <int kCount>
  __device__ __forceinline__ void load_checked(Bits (&to)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i, from_ += stride_, position_ += step_) {
      to[i] = Bits{};
      if (is_inside(position_, size_)) {
        to[i] = *reinterpret_cast<const Bits*>(from_);
      }
    }
  }

 private:
  const T* from_;
  const int64_t stride_;
  int position_;
  const int step_, size_;
};

// Convert kCount loaded vectors to x[first], x[first + 1], …
template <typename T, int V, typename Bits, int kCount, int kAll>
__device__ __forceinline__ void widen_to(float (&x)[kAll][V], int first,
                                         const Bits (&bits)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const auto& lanes = reinterpret_cast<const Vector<T, V>&>(bits[i]);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      x[first + i][v] = static_cast<float>(lanes.lane[v]);
    }
  }
}

// Slide a window by kGroup positions.
template <int V, int kAll>
__device__ __forceinline__ void slide(float (&x)[kAll][V]) {
#pragma unroll
  for (int i = 0; i + kGroup < kAll; ++i) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      x[i][v] = x[i + kGroup][v];
    }
  }
}

// Filters of K taps and biases of V channels from `channel` on.
template <int K, int V>
struct ShortFilter {
  float w[K][V], bias[V];

  template <typename T>
  __device__ ShortFilter(const T* weight, const T* biases, int64_t channel, bool flip) {
#pragma unroll
    for (int v = 0; v < V; ++v, ++channel) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        w[k][v] = static_cast<float>(weight[channel * K + (flip ? K - 1 - k : k)]);
      }
      bias[v] = biases ? static_cast<float>(biases[channel]) : 0.0f;
    }
  }
};

// Outputs per thread of a short filter along T: whole vectors, at least the halo.
template <typename T, int K>
constexpr int kPlaneOutputs = round_up(std::max(K - 1, kVector<T>), kVector<T>);

// Return f(taps) for filters of 2 to 7 taps, stride 1, else false.
template <typename P, typename F>
bool dispatch_short(const P& p, const F& f) {
  switch (p.is_tileable() ? p.taps : 0) {
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    case 6: return f(std::integral_constant<int, 6>{});
    case 7: return f(std::integral_constant<int, 7>{});
    default: return false;
  }
}

}  // namespace ops::depthwise_conv1d
