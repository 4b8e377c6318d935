/* Included before the source of a kernel that is compiled for the host (libnvrtc_gcc.c). */
#include <math.h>

#define _GC_INT64 long
#define kernel _gc_kernel
#include "../cuda/device.h"
#undef kernel
#define __align__(n) __attribute__((aligned(n)))
#define __noinline__ __attribute__((noinline))
