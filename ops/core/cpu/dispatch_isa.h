// Compile the header OPS_KERNELS once per instruction set, into the namespaces ops::cpu::baseline,
// avx2 and avx512, with vec.h at that vector width. OPS_CALL selects the namespace at run time.
//
//     #define OPS_KERNELS "x_kernels.h"
//     #include "core/cpu/dispatch_isa.h"
//     ... OPS_CALL(x_forward(in, out, n));
//
// Kernels may call only each other, vec.h and simd.h. The linker keeps one copy of an inline
// function used by several instruction sets (std::min, a lambda), perhaps one that the processor
// cannot run.

#include "core/cpu/isa.h"
#include "core/cpu/simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define OPS_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define OPS_BEGIN_TARGET(isa) \
  OPS_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define OPS_END_TARGET OPS_PRAGMA(clang attribute pop)
#define OPS_UNROLL OPS_PRAGMA(unroll)
#else
#define OPS_BEGIN_TARGET(isa) OPS_PRAGMA(GCC push_options) OPS_PRAGMA(GCC target(isa))
#define OPS_END_TARGET OPS_PRAGMA(GCC pop_options)
#define OPS_UNROLL OPS_PRAGMA(GCC unroll 64)
#endif

#define OPS_ISA baseline
#define OPS_VECTOR_BYTES 16
#include "core/cpu/vec.h"
#include OPS_KERNELS
#undef OPS_ISA
#undef OPS_VECTOR_BYTES

#if defined(__x86_64__)

OPS_BEGIN_TARGET("avx2,fma,f16c")
#define OPS_ISA avx2
#define OPS_VECTOR_BYTES 32
#include "core/cpu/vec.h"
#include OPS_KERNELS
#undef OPS_ISA
#undef OPS_VECTOR_BYTES
OPS_END_TARGET

OPS_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define OPS_ISA avx512
#define OPS_VECTOR_BYTES 64
#include "core/cpu/vec.h"
#include OPS_KERNELS
#undef OPS_ISA
#undef OPS_VECTOR_BYTES
OPS_END_TARGET

#define OPS_CALL(...)                                                             \
  (::ops::cpu::isa() == ::ops::cpu::Isa::avx512 ? ::ops::cpu::avx512::__VA_ARGS__ \
   : ::ops::cpu::isa() == ::ops::cpu::Isa::avx2 ? ::ops::cpu::avx2::__VA_ARGS__   \
                                                : ::ops::cpu::baseline::__VA_ARGS__)

#else

#define OPS_CALL(...) ::ops::cpu::baseline::__VA_ARGS__

#endif

#undef OPS_KERNELS
