/* Error feedback inside custom CUDA C++ kernels: an optimizer step writes bits and a scale to be sent, and another
 * kernel applies what was received. So compression needs no extra pass over memory.
 *
 *   nvcc -std=c++17 -arch=native -Iinclude examples_cpp/momentum.cu -Ltarget/release -lgradcodec -o momentum
 *   LD_LIBRARY_PATH=target/release ./momentum
 *
 * The program checks that the results are bit-identical to a codec's. They differ with --use_fast_math, which flushes
 * denormals to zero. examples/python/cupy_kernels.py is the CuPy version. */

#include <gradcodec/device.cuh>
#include <gradcodec/gradcodec.hpp>

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <random>
#include <stdexcept>
#include <vector>

constexpr unsigned THREADS = 256; /* of a thread block: whole warps */

/* ---- the kernels ------------------------------------------------------------------------------------------------- */

/* Updates the momentum and stores its signs. A warp takes a unit of 1024 elements, 32 adjacent ones at a time. `kept`
 * and `*scale`: results of the previous step, zeros at first. `sums` receives the sum of each unit's squares. */
__global__ void momentum(const float *gradient, float *velocity, float *kept, const float *scale, unsigned char *bits,
                         double *sums, uint64_t n)
{
    const unsigned lane = threadIdx.x % gradcodec::WARP;
    const uint64_t unit = (uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) / gradcodec::WARP;
    const float s = *scale;
    gradcodec::UnitSum<1> sum;
#pragma unroll
    for (unsigned k = 0; k < gradcodec::UNIT / gradcodec::WARP; k++) {
        const uint64_t i = unit * gradcodec::UNIT + k * gradcodec::WARP + lane;
        float c = 0;
        if (i < n) {
            velocity[i] = 0.9f * velocity[i] + 0.1f * gradient[i];
            kept[i] = c = gradcodec::canonical(gradcodec::feedback(velocity[i], kept[i], s, 1, 1, 1));
        }
        /* Outside the condition, because all lanes of a warp must take part. */
        gradcodec::store_bit(bits, i, n, gradcodec::sign(c), gradcodec::ORDER_BIG);
        sum.add(k, 0, __fmul_rn(c, c));
    }
    const float all = sum.of_warp(lane);
    if (lane == 0 && unit * gradcodec::UNIT < n)
        sums[unit] = all;
}

/* Computes the scale, the root of the mean square. Adds neighbours, then neighbouring sums, until one is left, as
 * docs/NUMERICS.md prescribes. One thread block is enough: there are 1024 times fewer sums than elements. */
__global__ void finish(double *sums, uint64_t units, uint64_t n, float *scale)
{
    for (uint64_t distance = 1; distance < units; distance *= 2) {
        for (uint64_t i = 2 * distance * threadIdx.x; i + distance < units; i += 2 * distance * blockDim.x)
            sums[i] += sums[i + distance];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        *scale = gradcodec::canonical(static_cast<float>(sqrt(sums[0] / static_cast<double>(n))));
}

/* Adds the received values, +scale or -scale, times -rate to the weights. */
__global__ void descend(const unsigned char *bits, const float *scale, float rate, float *weight, uint64_t n)
{
    const uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < n) {
        const bool bit = gradcodec::load_bit(bits, i, gradcodec::ORDER_BIG);
        weight[i] = __fadd_rn(weight[i], gradcodec::signed_scale(bit, __fmul_rn(*scale, -rate)));
    }
}

/* ---- the comparison ---------------------------------------------------------------------------------------------- */

static void must(cudaError_t error)
{
    if (error != cudaSuccess)
        throw std::runtime_error(cudaGetErrorString(error));
}

static unsigned blocks(uint64_t elements, uint64_t of_a_block)
{
    return static_cast<unsigned>((elements + of_a_block - 1) / of_a_block);
}

/* Allocates memory on the device, zero at first, with an owner and aligned as payloads must be. */
static gradcodec::Tensor zeros(DLDataType dtype, int64_t n)
{
    gradcodec::Tensor tensor = gradcodec::tensor_empty(gradcodec::cuda(0), dtype, {n});
    must(cudaMemset(tensor.data<void>(), 0, static_cast<size_t>(n) * dtype.bits / 8));
    return tensor;
}

static bool same(const void *one, const void *other, size_t bytes)
{
    std::vector<char> ours(bytes), theirs(bytes);
    must(cudaMemcpy(ours.data(), one, bytes, cudaMemcpyDefault));
    must(cudaMemcpy(theirs.data(), other, bytes, cudaMemcpyDefault));
    return std::memcmp(ours.data(), theirs.data(), bytes) == 0;
}

/* Runs three steps of these kernels and of a codec on one stream. Returns true if the results are identical. */
static bool compare(uint64_t n, cudaStream_t stream)
{
    const auto length = static_cast<int64_t>(n), bytes = gradcodec::chunk_bytes(length, 1);
    const DLDataType f32 = gradcodec::dtype<float>(), u8 = gradcodec::dtype<uint8_t>();
    const uint64_t units = (n + gradcodec::UNIT - 1) / gradcodec::UNIT;
    const float rate = 0.3f;

    const auto gradient = zeros(f32, length), velocity = zeros(f32, length), kept = zeros(f32, length);
    const auto bits = zeros(u8, bytes), sums = zeros(gradcodec::dtype<double>(), static_cast<int64_t>(units));
    const auto scale = zeros(f32, 1), weight = zeros(f32, length);

    gc_codec_options_t options{};
    options.codec = GC_CODEC_ONEBIT;
    options.device = gradcodec::cuda(0);
    options.n_elements = length;
    gradcodec::Codec codec = gradcodec::codec_create(options);
    const auto payload = zeros(u8, gradcodec::codec_payload_bytes(codec));
    const auto codec_scale = zeros(f32, 1), factor = zeros(f32, 1), codec_weight = zeros(f32, length);
    const float minus_rate = -rate;
    must(cudaMemcpy(factor.data<float>(), &minus_rate, sizeof minus_rate, cudaMemcpyHostToDevice));

    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    bool good = true;
    for (int step = 0; step < 3; step++) {
        for (float &value : values)
            value = normal(random);
        must(cudaMemcpyAsync(gradient.data<float>(), values.data(), n * sizeof(float), cudaMemcpyHostToDevice, stream));

        momentum<<<blocks(n, uint64_t{gradcodec::UNIT} * THREADS / gradcodec::WARP), THREADS, 0, stream>>>(
            gradient.data<float>(), velocity.data<float>(), kept.data<float>(), scale.data<float>(),
            bits.data<uint8_t>(), sums.data<double>(), n);
        finish<<<1, THREADS, 0, stream>>>(sums.data<double>(), units, n, scale.data<float>());
        /* A program would send bits and scale here, and receive those of other ranks. */
        descend<<<blocks(n, THREADS), THREADS, 0, stream>>>(bits.data<uint8_t>(), scale.data<float>(), rate,
                                                            weight.data<float>(), n);
        must(cudaGetLastError());

        gradcodec::codec_encode(codec, {velocity}, nullptr, nullptr, payload, stream);
        gradcodec::codec_scales(codec, codec_scale, stream);
        gradcodec::codec_decode(codec, payload, 1, factor, GC_DECODE_ADD, {codec_weight}, stream);
        must(cudaStreamSynchronize(stream));

        const auto size = static_cast<size_t>(bytes);
        good = good && same(bits.data<uint8_t>(), payload.data<uint8_t>() + 80, size) && /* behind header and scale */
               same(scale.data<float>(), codec_scale.data<float>(), sizeof(float)) &&
               same(weight.data<float>(), codec_weight.data<float>(), n * sizeof(float));
    }
    return good;
}

int main()
try {
    int devices = 0;
    const cudaError_t found = cudaGetDeviceCount(&devices);
    if (found == cudaErrorNoDevice || found == cudaErrorInsufficientDriver) {
        std::cout << "SKIPPED: no kernel was launched: " << cudaGetErrorString(found) << "\n";
        return EXIT_SUCCESS;
    }
    must(found);
    cudaStream_t stream;
    must(cudaStreamCreate(&stream));
    bool good = true;
    for (const uint64_t n : {uint64_t{1}, uint64_t{1000}, uint64_t{1000003}}) {
        const bool as_the_library = compare(n, stream);
        std::cout << (as_the_library ? "" : "WRONG: not true that ") << "a step with " << n
                  << " elements leaves the bits, the scale and the weights of a codec, to the last bit\n";
        good = good && as_the_library;
    }
    must(cudaStreamDestroy(stream));
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
} catch (const std::exception &error) {
    std::cerr << "momentum: " << error.what() << "\n";
    return EXIT_FAILURE;
}
