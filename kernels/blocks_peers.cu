// Encoding and reducing of blocks.cu, straight to the memory of the ranks that get the chunks: no copy of a payload is
// written, read and pushed. Kernels of their own, for what they ask of peers takes registers that those which write to
// one place need.
#include "blocks_once.cuh"
#include "blocks_twice.cuh"

BLOCKS_ENCODE(gc_blocks_encode_f32_peers, Float, false, AWAY, 3)
BLOCKS_ENCODE(gc_blocks_encode_f32_kept_peers, Float, true, AWAY, 2)
BLOCKS_ENCODE(gc_blocks_encode_16_peers, Half, false, AWAY, 3)
BLOCKS_ENCODE(gc_blocks_encode_16_kept_peers, Half, true, AWAY, 2)
BLOCKS_REDUCE(gc_blocks_reduce_peers, false, AWAY, 2)
BLOCKS_REDUCE(gc_blocks_reduce_kept_peers, true, AWAY, 2)
BLOCKS_ONCE(gc_blocks_once_f32, Float, 2)
BLOCKS_ONCE(gc_blocks_once_16, Half, 2)
