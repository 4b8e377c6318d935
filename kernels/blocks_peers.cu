// Encode and reduce kernels of blocks.cu that write directly to the memory of the ranks that get the chunks: no copy of
// a payload is written, read and pushed. They are separate kernels, because the addresses of peers take registers that
// kernels with one destination need.
#include "blocks_one_shot.cuh"
#include "blocks_two_shot.cuh"

BLOCKS_ENCODE(gc_blocks_encode_f32_peers, Float, false, AWAY, 3)
BLOCKS_ENCODE(gc_blocks_encode_f32_kept_peers, Float, true, AWAY, 2)
BLOCKS_ENCODE(gc_blocks_encode_16_peers, Half, false, AWAY, 3)
BLOCKS_ENCODE(gc_blocks_encode_16_kept_peers, Half, true, AWAY, 2)
BLOCKS_REDUCE(gc_blocks_reduce_peers, false, AWAY, 2)
BLOCKS_REDUCE(gc_blocks_reduce_kept_peers, true, AWAY, 2)
BLOCKS_ONE_SHOT(gc_blocks_one_shot_f32, Float, 2)
BLOCKS_ONE_SHOT(gc_blocks_one_shot_16, Half, 2)
