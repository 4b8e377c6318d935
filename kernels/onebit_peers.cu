// ONEBIT over other GPUs' memory, where a small call is one launch. What is longer takes the kernels of onebit.cu, which
// write to other ranks, too.
#include "onebit_twice.cuh"
