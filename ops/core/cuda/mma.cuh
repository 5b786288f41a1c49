// Matrix products of 16-bit elements by a warp, dense (16 × 16 and 16 × 8) and sparse (16 × 32 and
// 32 × 8).
//
// Fragments of mma.m16n8k16 in lane 4 g + t: accumulators of rows g, g + 8 and columns 2 t, 2 t +
// 1; left operand of rows g, g + 8, right operand of column g, both at k = 2 t, 2 t + 1, 2 t + 8,
// 2 t + 9.
//
// mma.sp.m16n8k32: the left operand stores two of four adjacent elements, those at k = 4 t … 4 t +
// 3 of rows g, g + 8, then at k = 16 + 4 t …; right operand of column g at k = 2 t, 2 t + 1, and 8,
// 16 and 24 further. `positions`: of the stored pairs of a row, 2 bits an element; row g + 8 in the
// upper half.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/cuda/common.cuh"

namespace ops::cuda {

struct Lane {  // groupID and threadID_in_group of the PTX documentation
  int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
};

// Run a matrix instruction for elements of type T.
#if __CUDA_ARCH__ >= 800
#define OPS_MMA(instruction, operands, ...)                        \
  if constexpr (kHalf) {                                           \
    asm(instruction ".f32.f16.f16.f32 " operands : __VA_ARGS__);   \
  } else {                                                         \
    asm(instruction ".f32.bf16.bf16.f32 " operands : __VA_ARGS__); \
  }
#else
#define OPS_MMA(...) __trap()  // see has_mma
#endif

// Pairs of 16-bit elements in 32-bit words.
template <typename T>
struct Packed {
  static constexpr bool kHalf = std::is_same_v<T, Half>;
  static constexpr unsigned kOnes = kHalf ? 0x3c003c00 : 0x3f803f80;

  static __device__ unsigned pack(float low, float high) {
    if constexpr (kHalf) {
      const __half2 both = __floats2half2_rn(low, high);
      return reinterpret_cast<const unsigned&>(both);
    } else {
      const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
      return reinterpret_cast<const unsigned&>(both);
    }
  }
  // Compute result = sum + left · right.
  static __device__ void mma(float (&result)[4], const float (&sum)[4], unsigned l0, unsigned l1,
                             unsigned l2, unsigned l3, const unsigned (&right)[2]) {
    OPS_MMA("mma.sync.aligned.m16n8k16.row.col",
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};", "=f"(result[0]),
            "=f"(result[1]), "=f"(result[2]), "=f"(result[3]) : "r"(l0), "r"(l1), "r"(l2), "r"(l3),
            "r"(right[0]), "r"(right[1]), "f"(sum[0]), "f"(sum[1]), "f"(sum[2]), "f"(sum[3]));
  }
  // Compute sum += left · right, sparse.
  static __device__ void mma_sparse(float (&sum)[4], unsigned l0, unsigned l1, unsigned l2,
                                    unsigned l3, const unsigned (&right)[4], unsigned positions) {
    OPS_MMA("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col",
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0;",
            "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(l0), "r"(l1), "r"(l2),
            "r"(l3), "r"(right[0]), "r"(right[1]), "r"(right[2]), "r"(right[3]), "r"(positions));
  }
};
#undef OPS_MMA

}  // namespace ops::cuda
