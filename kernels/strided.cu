// Packing and unpacking bits of the usual layouts that are not contiguous, for the library alone: a kernel for each
// class and each size of an element. What fits none of them goes to the general kernels of bits.cu; which goes where is
// said in src/backend/cuda/strided.rs.
#include "columns.cuh"
#include "rows.cuh"

// `blocks`: so many at least on a multiprocessor, which bounds the registers of a thread. With fewer registers the
// compiler has fewer loads under way at once.
#define STRIDED(name, core, T, blocks) \
    extern "C" __global__ void __launch_bounds__(BLOCK, blocks) name(const __grid_constant__ gc_tiles tiles) { \
        core<T>(tiles); \
    }
STRIDED(gc_pack_columns_u8, pack_tile_of_columns, unsigned char, 3)
STRIDED(gc_pack_columns_u16, pack_tile_of_columns, unsigned short, 3)
STRIDED(gc_pack_columns_u32, pack_tile_of_columns, unsigned, 3)
STRIDED(gc_pack_columns_u64, pack_tile_of_columns, u64, 3)
STRIDED(gc_pack_transposed_u8, pack_transposed_tile, unsigned char, 3)
STRIDED(gc_pack_transposed_u16, pack_transposed_tile, unsigned short, 3)
STRIDED(gc_pack_transposed_u32, pack_transposed_tile, unsigned, 3)
STRIDED(gc_pack_transposed_u64, pack_transposed_tile, u64, 3)
STRIDED(gc_unpack_columns_u8, unpack_tile_of_columns, unsigned char, 4)
STRIDED(gc_unpack_columns_u16, unpack_tile_of_columns, unsigned short, 4)
STRIDED(gc_unpack_columns_u32, unpack_tile_of_columns, unsigned, 4)
STRIDED(gc_unpack_columns_u64, unpack_tile_of_columns, u64, 4)
STRIDED(gc_unpack_transposed_u8, unpack_transposed_tile, unsigned char, 4)
STRIDED(gc_unpack_transposed_u16, unpack_transposed_tile, unsigned short, 4)
STRIDED(gc_unpack_transposed_u32, unpack_transposed_tile, unsigned, 4)
STRIDED(gc_unpack_transposed_u64, unpack_transposed_tile, u64, 4)
STRIDED(gc_pack_rows_u8, pack_tile_of_rows, unsigned char, 4)
STRIDED(gc_pack_rows_u16, pack_tile_of_rows, unsigned short, 4)
STRIDED(gc_pack_rows_u32, pack_tile_of_rows, unsigned, 4)
STRIDED(gc_pack_rows_u64, pack_tile_of_rows, u64, 4)
STRIDED(gc_unpack_rows_u8, unpack_tile_of_rows, unsigned char, 4)
STRIDED(gc_unpack_rows_u16, unpack_tile_of_rows, unsigned short, 4)
STRIDED(gc_unpack_rows_u32, unpack_tile_of_rows, unsigned, 4)
STRIDED(gc_unpack_rows_u64, unpack_tile_of_rows, u64, 4)
STRIDED(gc_pack_steps_u8, pack_tile_of_steps, unsigned char, 4)
STRIDED(gc_pack_steps_u16, pack_tile_of_steps, unsigned short, 4)
STRIDED(gc_pack_steps_u32, pack_tile_of_steps, unsigned, 4)
STRIDED(gc_pack_steps_u64, pack_tile_of_steps, u64, 4)
STRIDED(gc_unpack_steps_u8, unpack_tile_of_steps, unsigned char, 4)
STRIDED(gc_unpack_steps_u16, unpack_tile_of_steps, unsigned short, 4)
STRIDED(gc_unpack_steps_u32, unpack_tile_of_steps, unsigned, 4)
STRIDED(gc_unpack_steps_u64, unpack_tile_of_steps, u64, 4)
