// CUDA ncrelu: one kernel for all layouts and both directions; a pass loads and stores a vector of
// the input and its two halves (figure in op.h).
//
//   block:   256 × kThreadVectors adjacent vectors of the input
//   shared:  nothing; neighbouring threads combine their signs to bytes by shuffles
//   thread:  kThreadVectors vectors of V elements, all loaded before the first store
#include "core/cuda/common.cuh"
#include "core/cuda/divide.cuh"
#include "ncrelu/op.h"

namespace ops::ncrelu {
namespace {

using namespace cuda;

constexpr int kThreads = 256;

// Vectors per thread: more if they are narrow, to keep enough bytes in flight.
template <int V, typename T>
constexpr int kThreadVectors = std::min<int>(4, kVectorBytes / (V * sizeof(T)));

// Offsets of a vector of the input, and of its halves in the output.
struct Position {
  bool inside;
  int64_t i, positive, negative;
};

// Word in which signs are stored: 2 V bits of one thread, or a byte of 4 / V threads if V < 4.
template <int V>
using SignWord = std::conditional_t<V == 8, uint16_t, uint8_t>;

template <typename T>
struct Forward {
  const T* from;
  T* to;
  uint8_t* signs;  // or nullptr

  template <int V>
  using Loaded = Vector<T, V>;

  template <int V>
  __device__ Loaded<V> load(const Position& at) const {
    return load_vector<V>(from + at.i);
  }

  // Store a vector, if it is inside, and its signs. All threads of a warp must call it.
  template <int V>
  __device__ void store(const Position& at, const Loaded<V>& x) const {
    if (at.inside) {
      Vector<T, V> positive, negative;
#pragma unroll
      for (int v = 0; v < V; ++v) {  // both halves propagate NaN, as torch.clamp does
        const acc_t<T> lane = static_cast<acc_t<T>>(x.lane[v]);
        positive.lane[v] = static_cast<T>(lane < 0 ? 0 : lane);
        negative.lane[v] = static_cast<T>(lane > 0 ? 0 : lane);
      }
      *reinterpret_cast<Vector<T, V>*>(to + at.positive) = positive;
      *reinterpret_cast<Vector<T, V>*>(to + at.negative) = negative;
    }
    if (!signs) {
      return;
    }
    unsigned bits = 0;
    bool stores = at.inside;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const acc_t<T> lane = static_cast<acc_t<T>>(x.lane[v]);
      bits |= (lane > 0 ? 1u : 0u) << 2 * v | (lane < 0 ? 2u : 0u) << 2 * v;
    }
    if constexpr (V < kSignsPerByte) {
      bits <<= 2 * (at.i % kSignsPerByte);
#pragma unroll
      for (int other = 1; other < kSignsPerByte / V; other *= 2) {
        bits |= __shfl_xor_sync(~0u, bits, other);
      }
      stores &= at.i % kSignsPerByte == 0;
    }
    if (stores) {
      *reinterpret_cast<SignWord<V>*>(signs + at.i / kSignsPerByte) =
          static_cast<SignWord<V>>(bits);
    }
  }
};

// out = g₊ [x > 0] + g₋ [x < 0]
template <typename T>
struct Backward {
  const T* from;
  T* to;
  const uint8_t* signs;

  template <int V>
  struct Loaded {
    unsigned signs;
    Vector<T, V> positive, negative;
  };

  template <int V>
  __device__ Loaded<V> load(const Position& at) const {
    const unsigned bits = *reinterpret_cast<const SignWord<V>*>(signs + at.i / kSignsPerByte);
    return {V < kSignsPerByte ? bits >> 2 * (at.i % kSignsPerByte) : bits,
            load_vector<V>(from + at.positive), load_vector<V>(from + at.negative)};
  }

  template <int V>
  __device__ void store(const Position& at, const Loaded<V>& x) const {
    Vector<T, V> result;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const unsigned lane = x.signs >> 2 * v;
      result.lane[v] = lane & 1   ? x.positive.lane[v]
                       : lane & 2 ? x.negative.lane[v]
                                  : static_cast<T>(0.0f);
    }
    if (at.inside) {
      *reinterpret_cast<Vector<T, V>*>(to + at.i) = result;
    }
  }
};

// Rows are whole numbers of vectors; row_of(vector) is a division by that number.
template <int V, int kVectors, typename Pass, typename Row>
__global__ void __launch_bounds__(kThreads)
    kernel(Pass pass, int64_t vectors, int64_t inner, Row row_of) {
  using Index = typename Row::Index;
  const auto position = [&](int k) -> Position {
    const Index vector = (static_cast<Index>(blockIdx.x) * kVectors + k) * kThreads + threadIdx.x;
    const int64_t i = static_cast<int64_t>(vector) * V, positive = i + row_of(vector) * inner;
    return {vector < vectors, i, positive, positive + inner};
  };
  typename Pass::template Loaded<V> loaded[kVectors] = {};
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (const Position at = position(k); at.inside) {
      loaded[k] = pass.template load<V>(at);
    }
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    pass.template store<V>(position(k), loaded[k]);
  }
}

// Run a pass in the widest vectors to which rows, pointers and signs are aligned.
template <typename T, template <typename> typename Pass>
void run(const Tensor& like, int64_t inner, const Pass<T>& pass) {
  const DeviceGuard guard(like.get_device_index());
  const int64_t signs = kSignsPerByte * reinterpret_cast<uintptr_t>(pass.signs);  // in elements
  dispatch_width<T>({pass.from, pass.to}, {inner, signs}, [&](auto v) {
    constexpr int V = v.value, kVectors = kThreadVectors<V, T>;
    const int64_t vectors = like.numel() / V, blocks = ceil_div(vectors, kThreads * kVectors);
    const auto launch = [&](auto row_of) {
      launch_kernel(kernel<V, kVectors, Pass<T>, decltype(row_of)>, blocks, kThreads, 0,
                    current_stream(like), pass, vectors, inner, row_of);
    };
    const bool fast = blocks * kThreads * kVectors < kMostFastDivided;
    fast ? launch(FastDivide(inner / V)) : launch(Divide(inner / V));
  });
}

struct Loops {
  template <typename T>
  static void forward(const Tensor& like, int64_t inner, const T* x, T* out, uint8_t* signs) {
    run<T>(like, inner, Forward<T>{x, out, signs});
  }

  template <typename T>
  static void backward(const Tensor& like, int64_t inner, const T* grad, const uint8_t* signs,
                       T* out) {
    run<T>(like, inner, Backward<T>{grad, out, signs});
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("ncrelu", TORCH_BOX(&ncrelu<Loops>));
  m.impl("ncrelu_with_signs", TORCH_BOX(&ncrelu_with_signs<Loops>));
  m.impl("ncrelu_with_signs_backward", TORCH_BOX(&ncrelu_with_signs_backward<Loops>));
}

}  // namespace ops::ncrelu
