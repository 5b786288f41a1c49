// CUDA ncrelu: one elementwise kernel forward, one backward, for all layouts (HalvesLayout).
//
//   x [outer][inner]          out [outer][2][inner]
//   ┌───────────┐             ┌───────────┬───────────┐
//   │ row r     │ ──────────► │ max(x, 0) │ min(x, 0) │      signs: 2 bits an element
//   └───────────┘             └───────────┴───────────┘
//
//   block:   256 × kThreadVectors adjacent vectors of x
//   shared:  nothing; neighbouring threads combine their signs to bytes by shuffles
//   thread:  kThreadVectors vectors of V elements, all loaded before the first store
#include "core/cuda/common.cuh"
#include "core/cuda/divide.cuh"
#include "ncrelu/op.h"

namespace ops::cuda {
namespace {

constexpr int kThreads = 256;

// Vectors per thread: more if they are narrow, to keep enough bytes in flight.
template <int V, typename T>
constexpr int kThreadVectors = std::min<int>(4, kVectorBytes / (V * sizeof(T)));

// Offsets of the thread's k-th vector: `i` in the input, `positive` and `negative` in the output,
// whose row r starts at 2 r inner. Rows are whole numbers of vectors.
template <int V, typename Row>
struct VectorPosition {
  bool inside;
  int64_t i, positive, negative;

  __device__ VectorPosition(int k, int vectors_per_thread, int64_t vectors, int64_t inner,
                            const Row& row_of) {
    using Index = typename Row::Index;
    const Index vector =
        (static_cast<Index>(blockIdx.x) * vectors_per_thread + k) * kThreads + threadIdx.x;
    inside = vector < vectors;
    i = static_cast<int64_t>(vector) * V;
    positive = i + row_of(vector) * inner;
    negative = positive + inner;
  }
};

// Call f(k, position) for the vectors of the thread.
template <int V, typename T, typename Row, typename F>
__device__ void for_each_vector(int64_t vectors, int64_t inner, const Row& row_of, const F& f) {
  constexpr int kCount = kThreadVectors<V, T>;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    f(k, VectorPosition<V, Row>(k, kCount, vectors, inner, row_of));
  }
}

// Word in which signs are stored: 2 V bits of one thread, or a byte of 4 / V threads if V < 4.
template <int V>
using SignWord = std::conditional_t<V == 8, uint16_t, uint8_t>;

template <int V, typename T>
__device__ unsigned signs_of(const Vector<T, V>& value) {
  unsigned signs = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const acc_t<T> lane = static_cast<acc_t<T>>(value.lane[v]);
    signs |= (lane > 0 ? 1u : 0u) << 2 * v | (lane < 0 ? 2u : 0u) << 2 * v;
  }
  return signs;
}

// Store the signs of the vector at `i`. All threads of a warp must call it, with 0 if not `inside`.
template <int V>
__device__ void store_signs(uint8_t* to, uint64_t i, bool inside, unsigned signs) {
  if constexpr (V < kSignsPerByte) {
    signs <<= 2 * (i % kSignsPerByte);
#pragma unroll
    for (int other = 1; other < kSignsPerByte / V; other *= 2) {
      signs |= __shfl_xor_sync(~0u, signs, other);
    }
    inside &= i % kSignsPerByte == 0;
  }
  if (inside) {
    *reinterpret_cast<SignWord<V>*>(to + i / kSignsPerByte) = static_cast<SignWord<V>>(signs);
  }
}

// Return the signs of the vector at `i`: computed from the input.
template <int V, typename T>
__device__ unsigned load_signs(const T* x, uint64_t i) {
  return signs_of(load_vector<V>(x + i));
}

// The same, loaded from the saved signs.
template <int V, typename T>
__device__ unsigned load_signs(const uint8_t* signs, uint64_t i) {
  const unsigned bits = *reinterpret_cast<const SignWord<V>*>(signs + i / kSignsPerByte);
  return V < kSignsPerByte ? bits >> 2 * (i % kSignsPerByte) : bits;
}

// Signs: uint8_t*, or nullptr_t if they are not requested.
template <int V, typename Row, typename T, typename Signs>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* __restrict__ x, T* __restrict__ out, Signs signs, int64_t vectors,
                   int64_t inner, Row row_of) {
  Vector<T, V> value[kThreadVectors<V, T>];
  for_each_vector<V, T>(vectors, inner, row_of, [&](int k, const VectorPosition<V, Row>& at) {
    value[k] = at.inside ? load_vector<V>(x + at.i) : Vector<T, V>{};
  });
  for_each_vector<V, T>(vectors, inner, row_of, [&](int k, const VectorPosition<V, Row>& at) {
    if (at.inside) {
      Vector<T, V> positive, negative;
#pragma unroll
      for (int v = 0; v < V; ++v) {  // both halves propagate NaN, as torch.clamp does
        const acc_t<T> lane = static_cast<acc_t<T>>(value[k].lane[v]);
        positive.lane[v] = static_cast<T>(lane < 0 ? 0 : lane);
        negative.lane[v] = static_cast<T>(lane > 0 ? 0 : lane);
      }
      *reinterpret_cast<Vector<T, V>*>(out + at.positive) = positive;
      *reinterpret_cast<Vector<T, V>*>(out + at.negative) = negative;
    }
    if constexpr (std::is_pointer_v<Signs>) {
      store_signs<V>(signs, at.i, at.inside, signs_of(value[k]));
    }
  });
}

// out = g₊ [x > 0] + g₋ [x < 0]. `source`: the input or its signs.
template <int V, typename Row, typename T, typename Source>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* __restrict__ grad, const Source* __restrict__ source,
                    T* __restrict__ out, int64_t vectors, int64_t inner, Row row_of) {
  unsigned signs[kThreadVectors<V, T>];
  Vector<T, V> positive[kThreadVectors<V, T>], negative[kThreadVectors<V, T>];
  for_each_vector<V, T>(vectors, inner, row_of, [&](int k, const VectorPosition<V, Row>& at) {
    if (at.inside) {
      signs[k] = load_signs<V, T>(source, at.i);
      positive[k] = load_vector<V>(grad + at.positive);
      negative[k] = load_vector<V>(grad + at.negative);
    }
  });
  for_each_vector<V, T>(vectors, inner, row_of, [&](int k, const VectorPosition<V, Row>& at) {
    if (at.inside) {
      Vector<T, V> result;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const unsigned lane = signs[k] >> 2 * v;
        result.lane[v] = lane & 1   ? positive[k].lane[v]
                         : lane & 2 ? negative[k].lane[v]
                                    : static_cast<T>(0.0f);
      }
      *reinterpret_cast<Vector<T, V>*>(out + at.i) = result;
    }
  });
}

// Return the address in elements; vectors of V elements need a multiple of V.
template <typename T>
int64_t element_address(const T* p) {
  return reinterpret_cast<uintptr_t>(p) / sizeof(T);
}

int64_t element_address(const uint8_t* signs) {
  return kSignsPerByte * reinterpret_cast<uintptr_t>(signs);
}

int64_t element_address(std::nullptr_t) {
  return 0;
}

// Call f(Width<V>{}, vectors, row_of) with the widest vectors to which layout, pointers and saved
// signs (if `source` are signs) are aligned.
template <typename T, typename Source, typename F>
void dispatch_vectors(HalvesLayout layout, std::initializer_list<const void*> pointers,
                      Source source, const F& f) {
  dispatch_width<T>(pointers, {layout.inner, element_address(source)}, [&](auto v) {
    const int64_t row = layout.inner / v.value;
    const int64_t vectors = layout.outer * row;
    if (vectors < kMostFastDivided - kThreads * kThreadVectors<1, T>) {
      f(v, vectors, FastDivide(row));
    } else {
      f(v, vectors, Divide{row});
    }
  });
}

struct Loops {
  // `signs`: destination, or nullptr.
  template <typename T>
  static void forward(const Tensor& like, HalvesLayout layout, const T* x, T* out, uint8_t* signs) {
    const DeviceGuard guard(like.get_device_index());
    const auto launch = [&](auto to) {
      dispatch_vectors<T>(layout, {x, out}, to, [&](auto v, int64_t vectors, auto row_of) {
        const int64_t blocks = ceil_div(vectors, kThreads * kThreadVectors<v.value, T>);
        forward_kernel<v.value><<<blocks, kThreads, 0, current_stream(like)>>>(
            x, out, to, vectors, layout.inner, row_of);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
      });
    };
    signs ? launch(signs) : launch(nullptr);
  }

  // `source`: the input or its signs.
  template <typename T, typename Source>
  static void backward(const Tensor& like, HalvesLayout layout, const T* grad, const Source* source,
                       T* out) {
    const DeviceGuard guard(like.get_device_index());
    dispatch_vectors<T>(layout, {grad, out}, source, [&](auto v, int64_t vectors, auto row_of) {
      const int64_t blocks = ceil_div(vectors, kThreads * kThreadVectors<v.value, T>);
      backward_kernel<v.value><<<blocks, kThreads, 0, current_stream(like)>>>(
          grad, source, out, vectors, layout.inner, row_of);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("ncrelu", TORCH_BOX(&ncrelu<Loops>));
  m.impl("ncrelu_backward", TORCH_BOX(&ncrelu_backward<Loops>));
  m.impl("ncrelu_with_signs", TORCH_BOX(&ncrelu_with_signs<Loops>));
  m.impl("ncrelu_with_signs_backward", TORCH_BOX(&ncrelu_with_signs_backward<Loops>));
}

}  // namespace ops::cuda
