// The CPU's depthwise kernels. No include guard: see core/cpu/dispatch_isa.h.

#include "core/cpu/kernel_of.h"
#include "depthwise_conv2d/cpu/row_kernels.h"
// The others are made of these.
#include "depthwise_conv2d/cpu/correlate_kernels.h"
#include "depthwise_conv2d/cpu/weight_kernels.h"
