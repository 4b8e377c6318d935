/* Kernels compiled at run time, through gradcodec.hpp: CuPy's first example, and an optimizer step with momentum in
 * place. Without a GPU they are only compiled, for compute capability 9.0; without NVRTC nothing is compiled.
 *
 *   g++ -std=c++17 -Wall -Wextra -pedantic -Iinclude examples_cpp/kernels.cpp -Ltarget/release -lgradcodec -o kernels
 *   LD_LIBRARY_PATH=target/release ./kernels */

#include <gradcodec/gradcodec.hpp>

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <string_view>
#include <vector>

using gradcodec::Tensor, gradcodec::view;

static void hold(std::string_view what, bool holds)
{
    std::cout << (holds ? "" : "WRONG: not true that ") << what << "\n";
    if (!holds)
        std::exit(EXIT_FAILURE);
}

static bool is_near(const Tensor &tensor, const std::vector<float> &expected)
{
    const Tensor here = gradcodec::tensor_to_device(tensor, {kDLCPU, 0});
    for (std::size_t i = 0; i < expected.size(); i++)
        if (!(std::fabs(here.data<float>()[i] - expected[i]) <= 1e-6f))
            return false;
    return true;
}

int main()
{
    gc_elementwise_options_t texts{};
    texts.name = "my_kernel", texts.inputs = "float32 x, float32 y", texts.outputs = "float32 z";
    texts.operation = "if (x - 2 > y) { z = x * y; } else { z = x + y; }";
    gradcodec::Kernel first = gradcodec::elementwise_create(texts);

    /* Takes one pass over memory: the outputs w and v are also read. */
    texts.name = "momentum", texts.inputs = "T g, T lr, T mu", texts.outputs = "T w, T v";
    texts.operation = "v = mu * v + g; w -= lr * v";
    gradcodec::Kernel momentum = gradcodec::elementwise_create(texts);

    const float x[] = {1, 2, 3, 4, 5, 6}, y[] = {0, 1, 2}, zeros[6] = {};
    const double lr = 0.1, mu = 0.9; /* cast to the type of T */
    const auto of_lr = gradcodec::scalar(lr), of_mu = gradcodec::scalar(mu);

    bool has_gpu = true;
    try {
        gradcodec::prepare({kDLCUDA, 0});
    } catch (const gradcodec::Error &error) {
        std::cout << "no GPU is used: " << error.what() << "\n";
        has_gpu = false;
    }
    if (!has_gpu) {
        gc_run_options_t there{};
        there.capability = 90;
        float out[6], velocity[6];
        try {
            gradcodec::kernel_prepare(first, {view(x, {2, 3}), view(y, {3})}, {view(out, {2, 3})}, there);
            gradcodec::kernel_prepare(momentum, {view(x, {6}), of_lr, of_mu}, {view(out, {6}), view(velocity, {6})}, there);
            std::cout << "compiled for compute capability 9.0\n";
        } catch (const gradcodec::Error &error) {
            if (error.status() != GC_STATUS_NVRTC_UNAVAILABLE)
                throw;
            std::cout << "SKIPPED: " << error.what() << "\n";
        }
        return EXIT_SUCCESS;
    }

    const DLDevice gpu = {kDLCUDA, 0};
    const auto put = [&](const auto &from) { return gradcodec::tensor_to_device(from, gpu); };
    Tensor z = put(view(zeros, {2, 3}));
    const Tensor on_gpu[] = {put(view(x, {2, 3})), put(view(y, {3}))};
    gradcodec::kernel_run(first, {on_gpu[0], on_gpu[1]}, {z});
    hold("z is x + y, or x * y where x - 2 > y", is_near(z, {1, 3, 5, 0, 5, 12}));

    const float weights[] = {1, 1, 1, 1, 1, 1};
    Tensor w = put(view(weights)), v = put(view(zeros)), g = put(view(x));
    for (int step = 0; step < 2; step++)
        gradcodec::kernel_run(momentum, {g, of_lr, of_mu}, {w, v});
    std::vector<float> expected;
    for (float gradient : x)
        expected.push_back(1 - 0.1f * gradient - 0.1f * (0.9f * gradient + gradient));
    hold("two steps with momentum", is_near(w, expected));
    return EXIT_SUCCESS;
}
