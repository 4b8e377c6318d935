/* Kernels compiled at run time: elementwise operations, and a softmax over the last axis from two reductions and two of
 * these. Without a GPU they are only compiled, for compute capability 9.0; without NVRTC nothing is compiled.
 *
 *   gcc -std=c99 -Wall -Wextra -pedantic -Iinclude examples_c/kernels.c -Ltarget/release -lgradcodec -lm -o kernels
 *   LD_LIBRARY_PATH=target/release ./kernels */
#include <gradcodec.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void must(gc_status_t status) {
    if (status != GC_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", gc_status_name(status), gc_last_error());
        exit(1);
    }
}

/* Returns a float32 tensor over memory of this program, or a copy of it on the GPU. */
static DLManagedTensor *tensor(float *data, int32_t ndim, const int64_t *shape, DLDevice device) {
    DLDevice cpu = {kDLCPU, 0};
    DLDataType float32 = {kDLFloat, 32, 1};
    DLManagedTensor *here, *there;
    must(gc_tensor_from_pointer(data, cpu, float32, ndim, shape, NULL, NULL, NULL, &here));
    if (device.device_type == kDLCPU)
        return here;
    must(gc_tensor_to_device(here, device, &there));
    gc_tensor_free(here);
    return there;
}

static gc_kernel_t *reduction(const char *name, const char *map, const char *reduce, const char *identity) {
    gc_reduction_options_t options = {.struct_size = sizeof options, .name = name, .inputs = "T x", .outputs = "T y",
                                      .map = map, .reduce = reduce, .post_map = "y = a", .identity = identity};
    gc_kernel_t *kernel;
    must(gc_reduction_create(&options, &kernel));
    return kernel;
}

static gc_kernel_t *elementwise(const char *name, const char *inputs, const char *operation) {
    gc_elementwise_options_t options = {
        .struct_size = sizeof options, .name = name, .inputs = inputs, .outputs = "T y", .operation = operation};
    gc_kernel_t *kernel;
    must(gc_elementwise_create(&options, &kernel));
    return kernel;
}

enum { ROWS = 3, COLUMNS = 5 };

int main(void) {
    DLDevice cpu = {kDLCPU, 0}, gpu = {kDLCUDA, 0}, device = gc_prepare(gpu) == GC_STATUS_OK ? gpu : cpu;
    int has_card = device.device_type == kDLCUDA;
    int64_t shape[] = {ROWS, COLUMNS}, of_rows[] = {ROWS, 1};
    float x[ROWS * COLUMNS], y[ROWS * COLUMNS] = {0}, row[ROWS] = {0};
    for (int i = 0; i < ROWS * COLUMNS; i++)
        x[i] = (float)(i * 7 % 11);

    gc_kernel_t *most = reduction("row_max", "x", "a > b ? a : b", NULL), *sum = reduction("row_sum", "x", "a + b", "0");
    gc_kernel_t *shifted = elementwise("exp_shifted", "T x, T most", "y = exp(x - most)");
    gc_kernel_t *divided = elementwise("divide", "T x, T sum", "y = x / sum");

    DLManagedTensor *in = tensor(x, 2, shape, device), *out = tensor(y, 2, shape, device);
    DLManagedTensor *of_row = tensor(row, 2, of_rows, device);
    const DLTensor *whole[] = {&in->dl_tensor}, *exponents[] = {&out->dl_tensor, &of_row->dl_tensor};
    const DLTensor *less[] = {&in->dl_tensor, &of_row->dl_tensor};
    DLTensor *results = &out->dl_tensor, *rows = &of_row->dl_tensor;
    int32_t axis = -1;
    gc_run_options_t along = {.struct_size = sizeof along, .flags = GC_RUN_KEEPDIMS, .axes = &axis, .n_axes = 1};

    if (!has_card)
        along.capability = 90; /* compute capability 9.0 */
    gc_status_t status = gc_kernel_prepare(most, whole, 1, &rows, 1, &along, NULL);
    if (status == GC_STATUS_NVRTC_UNAVAILABLE) {
        printf("nothing compiled: %s\n", gc_last_error());
    } else if (!has_card) {
        must(status);
        printf("no GPU: compiled for compute capability 9.0\n");
    } else {
        must(status);
        must(gc_kernel_run(most, whole, 1, &rows, 1, &along, NULL));
        must(gc_kernel_run(shifted, less, 2, &results, 1, NULL, NULL));
        must(gc_kernel_run(sum, exponents, 1, &rows, 1, &along, NULL));
        must(gc_kernel_run(divided, exponents, 2, &results, 1, NULL, NULL)); /* in place */
        DLManagedTensor *back;
        must(gc_tensor_to_device(out, cpu, &back));
        const float *softmax = back->dl_tensor.data;
        for (int r = 0; r < ROWS; r++) {
            double all = 0;
            for (int c = 0; c < COLUMNS; c++)
                all += exp(x[r * COLUMNS + c]);
            for (int c = 0; c < COLUMNS; c++) {
                if (fabs(softmax[r * COLUMNS + c] - exp(x[r * COLUMNS + c]) / all) > 1e-6) {
                    fprintf(stderr, "softmax is wrong at %d, %d: %g\n", r, c, softmax[r * COLUMNS + c]);
                    return 1;
                }
            }
        }
        gc_tensor_free(back);
        printf("softmax of %d x %d, as it should be\n", ROWS, COLUMNS);
    }
    gc_tensor_free(in), gc_tensor_free(out), gc_tensor_free(of_row);
    gc_kernel_free(most), gc_kernel_free(sum), gc_kernel_free(shifted), gc_kernel_free(divided);
    return 0;
}
