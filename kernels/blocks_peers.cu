// Encode and reduce kernels of blocks.cu that write directly to the memory of the ranks that get the chunks: no copy of
// a payload is written, read and pushed. They are separate kernels, because the addresses of peers take registers that
// kernels with one destination need.
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
