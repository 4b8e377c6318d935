// The block codecs: docs/NUMERICS.md 11 says what is computed, src/backend/cuda/codec/ how it is launched.
//
// Segments are cut into tiles and units as those of onebit.cu. A warp has all elements of its blocks, so that a call is one
// launch: it writes scales, codes and errors, and the block that comes last of all the headers, for only then is it known
// whether anything was not finite.
#include "blocks_decode.cuh"
#include "blocks_encode.cuh"
#include "blocks_reduce.cuh"
