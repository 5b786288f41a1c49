// All SIMD kernels of depthwise convolution. No include guard: see core/cpu/dispatch_isa.h.

#include "depthwise_conv2d/cpu/row_kernels.h"
// After row_kernels.h, which these use.
#include "depthwise_conv2d/cpu/correlate_kernels.h"
#include "depthwise_conv2d/cpu/weight_kernels.h"
