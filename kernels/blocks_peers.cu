// Encoding and reducing of blocks.cu, straight to the memory of the ranks that get the chunks: no copy of a payload is
// written, read and pushed. Kernels of their own, for what they ask of peers takes registers that those which write to
// one place need.
#include "blocks_encode.cuh"
#include "blocks_reduce.cuh"

BLOCKS_ENCODE(gc_blocks_encode_f32_peers, Float, false, true, 3)
BLOCKS_ENCODE(gc_blocks_encode_f32_kept_peers, Float, true, true, 2)
BLOCKS_ENCODE(gc_blocks_encode_16_peers, Half, false, true, 3)
BLOCKS_ENCODE(gc_blocks_encode_16_kept_peers, Half, true, true, 2)
BLOCKS_REDUCE(gc_blocks_reduce_peers, false, true, 2)
BLOCKS_REDUCE(gc_blocks_reduce_kept_peers, true, true, 2)
