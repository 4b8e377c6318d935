// Copies and casts of any layout. Only the library launches these kernels; src/copy/cuda/launch.rs selects one.
//
// Each kernel reads and writes an element once: it moves the two sizes together, and otherwise only what lies in the
// same 32 bytes as an element. Whole vectors are written at aligned addresses. Reads are at aligned addresses too,
// never before the first byte of the source or after its last.
#include "copy_rows.cuh"
#include "copy_transposed.cuh"
#include "copy_general.cuh"
#include "copy_gather.cuh"

#define COPY(name, core, blocks) \
    extern "C" __global__ void __launch_bounds__(COPY_THREADS, blocks) name(const __grid_constant__ gc_copy copy) { \
        core(copy); \
    }

// ---- Rows that are contiguous on both sides. Each lane has vectors of up to 16 bytes on the wider side.
COPY(gc_copy_rows, copy_rows, 3)
COPY(gc_copy_rows_u32, cast_rows<Same<unsigned>>, 4)
COPY(gc_copy_rows_u64, cast_rows<Same<u64>>, 4)
COPY(gc_cast_rows_f32_bf16, cast_rows<F32ToBF16>, 4)
COPY(gc_cast_rows_f32_f16, cast_rows<F32ToF16>, 4)
COPY(gc_cast_rows_bf16_f32, cast_rows<BF16ToF32>, 4)
COPY(gc_cast_rows_f16_f32, cast_rows<F16ToF32>, 4)
COPY(gc_cast_rows_f64_f32, cast_rows<F64ToF32>, 4)
COPY(gc_cast_rows_f32_f64, cast_rows<F32ToF64>, 4)
COPY(gc_cast_rows, cast_rows_any, 4)

// ---- Transposed: contiguous along x in the target, along y in the source. A thread block transposes a tile in shared
// memory
COPY(gc_copy_transposed_u8, copy_transposed<1>, 1)
COPY(gc_copy_transposed_u16, copy_transposed<2>, 1)
COPY(gc_copy_transposed_u32, copy_transposed<4>, 1)
COPY(gc_copy_transposed_u64, copy_transposed<8>, 1)
COPY(gc_copy_transposed_u128, copy_transposed<16>, 1)
COPY(gc_cast_transposed_f32_bf16, cast_transposed<F32ToBF16>, 1)
COPY(gc_cast_transposed_f32_f16, cast_transposed<F32ToF16>, 1)
COPY(gc_cast_transposed_bf16_f32, cast_transposed<BF16ToF32>, 1)
COPY(gc_cast_transposed_f16_f32, cast_transposed<F16ToF32>, 1)
COPY(gc_cast_transposed, cast_transposed_any, 1)

// ---- Contiguous only in the target. Each lane has words of it, or larger single elements
COPY(gc_copy_gathered_u8, copy_gathered<unsigned char>, 4)
COPY(gc_copy_gathered_u16, copy_gathered<unsigned short>, 4)
COPY(gc_copy_gathered_u32, copy_gathered<unsigned>, 4)
COPY(gc_copy_gathered_u64, copy_gathered<u64>, 4)

// ---- Any strides. Each lane has single elements, side by side along x
COPY(gc_copy_general, copy_general, 4)
COPY(gc_cast_general, cast_general, 4)
