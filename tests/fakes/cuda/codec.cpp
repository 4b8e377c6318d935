// Kernels for the driver without a card (libcuda.c): those of kernels/onebit.cu and copy.cu themselves, lane by lane.
#include "../../emulator/device.h"

#include "../../../kernels/copy.cu"
#include "../../../kernels/onebit.cu"

#include <mutex>
#include <string>
#include <unordered_map>

struct Kernel {
    std::function<void(void *)> run;
    size_t bytes; // of its argument
};
template <typename Call>
static Kernel kernel_of(void (*kernel)(Call)) {
    return {[kernel](void *call) { kernel(*static_cast<const Call *>(call)); }, sizeof(Call)};
}
#define KERNEL(name) {#name, kernel_of(name)}

static const Kernel *kernel_named(const char *name) {
    static const std::unordered_map<std::string, Kernel> kernels = {
        KERNEL(gc_onebit_encode_f32_f32), KERNEL(gc_onebit_encode_f32_bf16), KERNEL(gc_onebit_encode_f32),
        KERNEL(gc_onebit_encode_16_f32), KERNEL(gc_onebit_encode_16_bf16), KERNEL(gc_onebit_encode_16),
        KERNEL(gc_onebit_decode_u32), KERNEL(gc_onebit_decode_u16), KERNEL(gc_onebit_decode_add),
        KERNEL(gc_onebit_reduce_f32), KERNEL(gc_onebit_reduce_bf16), KERNEL(gc_onebit_reduce),
        KERNEL(gc_onebit_compress_f32_f32), KERNEL(gc_onebit_compress_f32_bf16), KERNEL(gc_onebit_compress_f32),
        KERNEL(gc_onebit_compress_16_f32), KERNEL(gc_onebit_compress_16_bf16), KERNEL(gc_onebit_compress_16),
        KERNEL(gc_onebit_compress_scale),
        KERNEL(gc_onebit_compress_errors_f32_f32), KERNEL(gc_onebit_compress_errors_f32_bf16),
        KERNEL(gc_onebit_compress_errors_16_f32), KERNEL(gc_onebit_compress_errors_16_bf16),
        KERNEL(gc_onebit_commit), KERNEL(gc_onebit_reset), KERNEL(gc_onebit_state_out), KERNEL(gc_onebit_check_state),
        KERNEL(gc_onebit_state_in), KERNEL(gc_onebit_errors_in), KERNEL(gc_onebit_errors_out), KERNEL(gc_onebit_addresses),
        KERNEL(gc_onebit_finish), KERNEL(gc_onebit_refuse), KERNEL(gc_onebit_mean),
        KERNEL(gc_copy_rows_u32), KERNEL(gc_copy_rows_u64), KERNEL(gc_cast_rows),
        KERNEL(gc_copy_rows), KERNEL(gc_cast_rows_f32_bf16), KERNEL(gc_cast_rows_f32_f16), KERNEL(gc_cast_rows_bf16_f32),
        KERNEL(gc_cast_rows_f16_f32), KERNEL(gc_cast_rows_f64_f32), KERNEL(gc_cast_rows_f32_f64),
        KERNEL(gc_copy_transposed_u8), KERNEL(gc_copy_transposed_u16), KERNEL(gc_copy_transposed_u32),
        KERNEL(gc_copy_transposed_u64), KERNEL(gc_copy_transposed_u128), KERNEL(gc_cast_transposed),
        KERNEL(gc_cast_transposed_f32_bf16), KERNEL(gc_cast_transposed_f32_f16),
        KERNEL(gc_cast_transposed_bf16_f32), KERNEL(gc_cast_transposed_f16_f32),
        KERNEL(gc_copy_gathered_u8), KERNEL(gc_copy_gathered_u16), KERNEL(gc_copy_gathered_u32),
        KERNEL(gc_copy_gathered_u64), KERNEL(gc_copy_general), KERNEL(gc_cast_general),
    };
    const auto found = kernels.find(name);
    return found == kernels.end() ? nullptr : &found->second;
}

/* Bytes of the argument of a kernel of these families; 0 if there is none of that name. */
extern "C" size_t bytes_of_emulated_kernel(const char *name);
extern "C" size_t bytes_of_emulated_kernel(const char *name) {
    const Kernel *kernel = kernel_named(name);
    return kernel ? kernel->bytes : 0;
}

/* Runs one: 0; 1 if there is none of that name. */
extern "C" int run_emulated_kernel(const char *name, unsigned blocks, unsigned threads, void **arguments);
extern "C" int run_emulated_kernel(const char *name, unsigned blocks, unsigned threads, void **arguments) {
    static std::mutex running_now;
    const Kernel *kernel = kernel_named(name);
    if (!kernel) return 1;
    const std::lock_guard<std::mutex> alone(running_now);
    launch(blocks, threads, [&] { kernel->run(arguments[0]); });
    return 0;
}
