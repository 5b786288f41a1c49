// Ring of shared-memory buffers for asynchronous copies of contiguous spans of any size and
// alignment. Compute capability ≥ 9.0: thread 0 issues bulk copies (TMA). Below: all threads issue
// cp.async. All threads of a block must call every function together, except `load`.
#pragma once

#include "core/cuda/copy.cuh"

namespace ops::depthwise_conv2d {

using namespace ops::cuda;

constexpr int kGranule = 16;          // bytes: alignment and unit of copies
constexpr int kPrefetchDistance = 2;  // loads in flight while a buffer is computed

// Elements first[0 … size) of a tensor that ends at `end`. Copies start at the preceding 16-byte
// boundary, so in its buffer the span begins at offset skew().
template <typename T>
struct Span {
  T* first;
  int size;
  T* end;

  static constexpr int kLanes = kGranule / sizeof(T);

  __device__ int skew() const { return reinterpret_cast<uintptr_t>(first) % kGranule / sizeof(T); }
  // Granules to copy. A last one that extends beyond the tensor is not counted.
  __device__ int granules() const {
    const int64_t available = (end - (first - skew())) / kLanes;
    return min(static_cast<int64_t>((skew() + size + kLanes - 1) / kLanes), available);
  }
};

template <int kBuffers>
class RingBuffer {
 public:
  static constexpr int kBytes = round_up(kBuffers * sizeof(uint64_t), kGranule);

  // Initialise the barriers in kBytes bytes of shared memory.
  __device__ explicit RingBuffer(unsigned char* memory) : barriers_(shared_address(memory)) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      for (int i = 0; i < kBuffers; ++i) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier(i)) : "memory");
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
#endif
  }

  // Return whether this thread issues loads.
  __device__ bool issues_loads() const {
#if __CUDA_ARCH__ >= 900
    return threadIdx.x == 0;
#else
    return true;
#endif
  }

  // Start to load spans into the next buffer: load(valid, to, span, to, span). Not `valid`: advance
  // the ring without a copy. Call it from all threads that issue loads, after a __syncthreads that
  // follows the buffer's last use.
  template <typename... Pairs>
  __device__ void load(bool valid, const Pairs&... pairs) {
#if __CUDA_ARCH__ >= 900
    if (valid) {
      // This buffer's store must have completed; the newest store may be in flight.
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier(loads_)),
                   "r"(bytes(pairs...))
                   : "memory");
      copy(pairs...);
    }
    loads_ = (loads_ + 1) % kBuffers;
#else
    if (valid) {
      copy(pairs...);
    }
    commit_copies();
#endif
  }

  // Wait for the oldest load in flight.
  __device__ void wait() {
#if __CUDA_ARCH__ >= 900
    unsigned done;
    do {
      asm volatile(
          "{\n"
          ".reg .pred done;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done;\n"
          "}"
          : "=r"(done)
          : "r"(barrier(waits_)), "r"(phase_)
          : "memory");
    } while (!done);
    waits_ = (waits_ + 1) % kBuffers;
    phase_ ^= waits_ == 0;
#else
    wait_for_copies<kPrefetchDistance - 1>();
    __syncthreads();
#endif
  }

  // Start to store shared[skew … skew + size), just written by the threads, to first(). Whole
  // granules are copied in bulk; head and tail element by element.
  template <typename T, typename F>
  __device__ void store(const T* shared, int skew, int size, const F& first) {
    constexpr int kLanes = Span<T>::kLanes;
    const int end = skew + size;
    const int whole = (skew + kLanes - 1) / kLanes * kLanes;  // first element of the whole granules
    const int rest = max(whole, end / kLanes * kLanes);       // first element of the tail
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
      if (rest > whole) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                         first() - skew + whole),
                     "r"(shared_address(shared + whole)),
                     "r"(static_cast<unsigned>((rest - whole) * sizeof(T)))
                     : "memory");
      }
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
#else
    __syncthreads();
    for (int i = whole + threadIdx.x * kLanes; i < rest; i += blockDim.x * kLanes) {
      *reinterpret_cast<uint4*>(first() - skew + i) = *reinterpret_cast<const uint4*>(shared + i);
    }
#endif
    if (whole > skew || rest < end) {
      T* to = first() - skew;
      const int head = skew + threadIdx.x, tail = rest + threadIdx.x;
      if (head < min(whole, end)) {
        to[head] = shared[head];
      }
      if (tail < end) {
        to[tail] = shared[tail];
      }
    }
  }

  // Wait for all stores to have read shared memory. Call it before the block exits.
  __device__ void drain() {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
#endif
  }

 private:
  unsigned barriers_;
  int loads_ = 0, waits_ = 0;
  unsigned phase_ = 0;

  __device__ unsigned barrier(int i) const { return barriers_ + i * sizeof(uint64_t); }
  static __device__ unsigned bytes() { return 0; }
  template <typename T, typename... Pairs>
  static __device__ unsigned bytes(T*, const Span<const T>& span, const Pairs&... pairs) {
    return span.granules() * kGranule + bytes(pairs...);
  }

  // Issue the copies: thread 0 alone with TMA, else all threads.
  __device__ void copy() {}
  template <typename T, typename... Pairs>
  __device__ void copy(T* to, const Span<const T>& span, const Pairs&... pairs) {
    constexpr int kLanes = Span<T>::kLanes;
    const T* from = span.first - span.skew();
    const int whole = span.granules() * kLanes;
#if __CUDA_ARCH__ >= 900
    if (whole > 0) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(shared_address(to)),
          "l"(from), "r"(static_cast<unsigned>(whole * sizeof(T))), "r"(barrier(loads_))
          : "memory");
    }
#else
    for (int i = threadIdx.x * kLanes; i < whole; i += blockDim.x * kLanes) {
      copy_async<kGranule>(shared_address(to + i), from + i);
    }
#endif
    // Rest of the tensor's last granule: element by element.
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int i = whole; i < span.skew() + span.size; ++i) {
        to[i] = from[i];
      }
    }
    copy(pairs...);
  }
};

}  // namespace ops::depthwise_conv2d
