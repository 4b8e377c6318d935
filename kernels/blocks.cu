// The block codecs: docs/NUMERICS.md 11 says what is computed, src/codec/cuda/ how it is launched.
//
// Segments are cut into tiles and units as those of onebit.cu. A warp has all elements of its blocks, so that a call is
// one launch: it writes scales, codes and errors, and the block that comes last of all the headers, for only then is it
// known whether anything was not finite.
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
