/* Uses the library from C++ without linking against it: gradcodec/loader.h, and owners for loaded objects.
 *
 *   g++ -std=c++17 -Wall -Wextra -pedantic -Iinclude examples_cpp/dlopen.cpp -o dlopen
 *   ./dlopen target/release/libgradcodec.so.0
 *
 * No -lgradcodec; before glibc 2.34 -ldl. Without an argument it loads the library that is installed. */

#include <gradcodec/loader.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>

/* Returns the functions of gradcodec.h, under their names; loads the library on first use. */
static const gc_api_t &gradcodec(const char *path = nullptr)
{
    static const gc_api_t loaded = [path] {
        gc_api_t api;
        char why[256];
        if (gc_load(path, &api, why, sizeof why) != GC_STATUS_OK)
            throw std::runtime_error(why);
        return api;
    }();
    return loaded;
}

static void must(gc_status_t status)
{
    if (status != GC_STATUS_OK)
        throw std::runtime_error(gradcodec().gc_last_error());
}

struct Free {
    void operator()(DLManagedTensor *tensor) const { gradcodec().gc_tensor_free(tensor); }
};
using Tensor = std::unique_ptr<DLManagedTensor, Free>;

int main(int argc, char **argv)
try {
    std::cout << "loaded: version " << gradcodec(argc > 1 ? argv[1] : nullptr).gc_version_string() << "\n";

    bool truth[20] = {1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0};
    int64_t shape[] = {20};
    const DLManagedTensor source = {{truth, {kDLCPU, 0}, 1, {kDLBool, 8, 1}, shape, nullptr, 0}, nullptr, nullptr};
    DLManagedTensor *out = nullptr;
    must(gradcodec().gc_pack_bits(&source, GC_AXIS_NONE, GC_BIT_ORDER_BIG, &out));
    const Tensor packed(out);

    const bool same = packed->dl_tensor.shape[0] == 3 && std::memcmp(packed->dl_tensor.data, "\x81\xd0\x20", 3) == 0;
    std::cout << (same ? "packed as expected" : "WRONG: packed otherwise") << "\n";
    return same ? EXIT_SUCCESS : EXIT_FAILURE;
} catch (const std::exception &error) {
    std::cerr << error.what() << "\n";
    return EXIT_FAILURE;
}
