// The CPU's depthwise kernels. No include guard: see for_each_isa.h.

#include "depthwise_row_kernels.h"
#include "kernel_of.h"
// The others are made of these.
#include "depthwise_correlate_kernels.h"
#include "depthwise_weight_kernels.h"
