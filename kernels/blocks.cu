// Kernels of the block codecs. docs/NUMERICS.md 11 defines what they compute; src/codec/cuda/ launches them.
//
// Segments are cut into tiles and units as in onebit.cu. A warp has all elements of its blocks, so a call is one
// launch: it writes scales, codes and errors. The last thread block to finish writes all headers, because only then is
// it known if anything was not finite.
#include "blocks_decode.cuh"
#include "blocks_encode.cuh"
#include "blocks_lanes.cuh"
#include "blocks_reduce.cuh"

BLOCKS_DECODE(gc_blocks_decode_u32, unsigned, false, 3)
BLOCKS_DECODE(gc_blocks_decode_u16, unsigned short, false, 4)
BLOCKS_DECODE(gc_blocks_decode_add, unsigned, true, 3)
BLOCKS_ENCODE(gc_blocks_encode_f32, Float, false, HERE, 4)
BLOCKS_ENCODE(gc_blocks_encode_f32_kept, Float, true, HERE, 2)
BLOCKS_ENCODE(gc_blocks_encode_16, Half, false, HERE, 4)
BLOCKS_ENCODE(gc_blocks_encode_16_kept, Half, true, HERE, 2)
BLOCKS_REDUCE(gc_blocks_reduce, false, HERE, 3)
BLOCKS_REDUCE(gc_blocks_reduce_kept, true, HERE, 2)
