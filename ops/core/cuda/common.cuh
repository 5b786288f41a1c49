// CUDA helpers: device attributes, launches, vectorised loads, integer arithmetic.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "core/layout.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#error "the CUDA kernels need compute capability 7.0 or newer: set TORCH_CUDA_ARCH_LIST"
#endif

namespace ops::cuda {

using torch::stable::accelerator::DeviceGuard;

inline cudaStream_t current_stream(const Tensor& x) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Attributes of the current device. Memory sizes are in bytes.
struct Device {
  int multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  int64_t cache = attribute(cudaDevAttrL2CacheSize);
  size_t shared = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  size_t block_shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);

  // Return the blocks whose shared memory fits an SM. CUDA reserves 1 KB more for each.
  int64_t blocks_per_sm(size_t shared_per_block) const {
    return shared / (shared_per_block + 1024);
  }

  static int attribute(cudaDeviceAttr which) {
    int device = 0, value = 0;
    STD_CUDA_CHECK(cudaGetDevice(&device));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
    return value;
  }
};

// Return whether the current device has mma.m16n8k16 for float16 and bfloat16.
inline bool has_mma() {
  return Device::attribute(cudaDevAttrComputeCapabilityMajor) >= 8;
}

constexpr size_t kSharedBytes = 48 * 1024;       // per block without opt-in
constexpr size_t kStaticSharedBytes = 8 * 1024;  // of it for static arrays, at most

// Launch with `shared` bytes of dynamic shared memory; opt in where a block may exceed 48 KB.
template <typename Kernel, typename... Args>
void launch_kernel(Kernel kernel, dim3 blocks, dim3 threads, size_t shared, cudaStream_t stream,
                   Args... args) {
  if (shared > kSharedBytes - kStaticSharedBytes) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared)));
  }
  kernel<<<blocks, threads, shared, stream>>>(args...);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Launch with programmatic dependent launch: the kernel may start once all blocks of the previous
// kernel in the stream have exited or called trigger_dependent_launch. It must call
// wait_for_previous_kernel before it reads that kernel's results. An ordinary launch below compute
// capability 9.0.
template <typename Kernel, typename... Args>
void launch_dependent(Kernel kernel, dim3 blocks, dim3 threads, cudaStream_t stream, Args... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = Device::attribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? 1 : 0;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

__device__ inline void trigger_dependent_launch() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

constexpr int kWarp = 32;  // threads

// Return the index of the thread in its block.
__device__ inline int flat_thread() {
  return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
}

// N elements, aligned for one vectorised load or store.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T lane[N];
};

// Integer type of kBytes bytes, for vectorised loads and stores.
template <int kBytes>
struct BitsOf {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  using type = std::conditional_t<
      kBytes == 1, unsigned char,
      std::conditional_t<kBytes == 2, unsigned short,
                         std::conditional_t<kBytes == 4, unsigned,
                                            std::conditional_t<kBytes == 8, uint2, uint4>>>>;
};

constexpr int kVectorBytes = 16;

// Load V elements with one instruction. The load is of an integer type, because nvcc splits loads
// of structs of 16-bit classes.
template <int V, typename T>
__device__ Vector<T, V> load_vector(const T* from) {
  using Bits = typename BitsOf<V * sizeof(T)>::type;
  const Bits bits = *reinterpret_cast<const Bits*>(from);
  return reinterpret_cast<const Vector<T, V>&>(bits);
}

// Store V elements with one instruction, for the same reason.
template <typename T, int V>
__device__ void store_vector(T* to, const Vector<T, V>& vector) {
  using Bits = typename BitsOf<V * sizeof(T)>::type;
  *reinterpret_cast<Bits*>(to) = reinterpret_cast<const Bits&>(vector);
}

// Return element i of loaded bits (see load_vector) as float32. bfloat16: in one instruction.
template <typename T, typename Bits>
__device__ float to_float(const Bits& bits, int i) {
  if constexpr (std::is_same_v<T, BFloat16> && sizeof(Bits) >= sizeof(unsigned)) {
    const unsigned pair = reinterpret_cast<const unsigned*>(&bits)[i / 2];
    return __uint_as_float(i % 2 ? pair & 0xffff0000 : pair << 16);
  } else {
    return static_cast<float>(reinterpret_cast<const T*>(&bits)[i]);
  }
}

// Convert kCols loaded vectors of V channels.
template <typename T, typename Bits, int kCols, int V>
__device__ void widen(const Bits (&bits)[kCols], float (&x)[kCols][V]) {
#pragma unroll
  for (int i = 0; i < kCols * V; ++i) {
    x[i / V][i % V] = to_float<T>(bits[i / V], i % V);
  }
}

// Round V values and store them with one instruction.
template <int V, typename T, typename Acc>
__device__ void store_vector(T* to, const Acc (&x)[V]) {
  Vector<T, V> lanes;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    lanes.lane[v] = static_cast<T>(x[v]);
  }
  store_vector(to, lanes);
}

inline bool are_aligned(std::initializer_list<const void*> pointers, size_t bytes) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; });
}

template <int V>
using Width = std::integral_constant<int, V>;

// Return f(Width<V>{}) with the largest vector width V (in elements, a power of two, by default at
// most 16 bytes) to which all pointers are aligned and that divides all extents (in elements).
template <typename T, int V = kVectorBytes / sizeof(T), typename F>
auto dispatch_width(std::initializer_list<const void*> pointers,
                    std::initializer_list<int64_t> extents, const F& f) {
  if constexpr (V > 1) {
    bool fits = are_aligned(pointers, V * sizeof(T));
    for (int64_t n : extents) {
      fits &= n % V == 0;
    }
    if (!fits) {
      return dispatch_width<T, V / 2>(pointers, extents, f);
    }
  }
  return f(Width<V>{});
}

constexpr int round_up(int a, int b) {
  return (a + b - 1) / b * b;
}

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Return 0 ≤ i < extent, in one comparison.
__device__ inline bool is_inside(int i, int extent) {
  return static_cast<unsigned>(i) < static_cast<unsigned>(extent);
}
__device__ inline bool is_inside(int64_t i, int64_t extent) {
  return static_cast<uint64_t>(i) < static_cast<uint64_t>(extent);
}

}  // namespace ops::cuda
