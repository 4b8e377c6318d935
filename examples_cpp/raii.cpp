/* gradcodec.hpp: owners, views, exceptions. Packs booleans and signs to bits; a tensor keeps its memory alive.
 *
 *   g++ -std=c++17 -Wall -Wextra -pedantic -Iinclude examples_cpp/raii.cpp -Ltarget/release -lgradcodec -o raii
 *   LD_LIBRARY_PATH=target/release ./raii */

#include <gradcodec/gradcodec.hpp>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string_view>
#include <vector>

static void hold(std::string_view what, bool holds)
{
    std::cout << (holds ? "" : "WRONG: not true that ") << what << "\n";
    if (!holds)
        std::exit(EXIT_FAILURE);
}

int main()
{
    using gradcodec::view;

    /* 20 bits fill 3 bytes, so each of two chunks has 2. A view takes the dtype from the pointer's type. */
    const bool truth[20] = {1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0};
    const auto chunks = gradcodec::pack_chunks<2>(view(truth));
    hold("chunk 0 is 81 d0", chunks[0].data<uint8_t>()[0] == 0x81 && chunks[0].data<uint8_t>()[1] == 0xd0);
    hold("chunk 1 is 20 00", chunks[1].data<uint8_t>()[0] == 0x20 && chunks[1].data<uint8_t>()[1] == 0x00);

    const gradcodec::Tensor unpacked = gradcodec::unpack_chunks(chunks, 20);
    hold("unpacked it is what it was", std::equal(truth, truth + 20, unpacked.data<bool>()));

    /* Packs and unpacks signs in the caller's memory, without allocations. The gradient is read by columns. */
    const float gradient[2][3] = {{1, -2, 0}, {-4, 5, -6}};
    uint8_t packed[1][1];
    gradcodec::pack_signs_into(view(&gradient[0][0], {3, 2}, {1, 3}), GC_BIT_ORDER_BIG, view(&packed[0][0], {1, 1}));
    hold("the signs of 1 -4 -2 5 0 -6 are 1 0 0 1 1 0", packed[0][0] == 0b10011000);

    std::vector<double> signs(6);
    gradcodec::unpack_chunks_into(view(&packed[0][0], {1, 1}), GC_BIT_ORDER_BIG, view(signs));
    hold("as doubles, too", signs == std::vector<double>{1, 0, 0, 1, 1, 0});

    /* An error is an exception with a status and a message. */
    try {
        gradcodec::pack_bits(view(&gradient[0][0], {6}));
        hold("floats are refused as booleans", false);
    } catch (const gradcodec::Error &error) {
        std::cout << error.name() << ": " << error.what() << "\n";
        hold("floats are refused as booleans", error.status() == GC_STATUS_UNSUPPORTED_DTYPE);
    }

    /* Hands a tensor that keeps a vector alive to another library: release() gives away the DLPack struct, and that
     * library calls its deleter. Here this program does. */
    auto mask = std::make_shared<std::vector<uint8_t>>(1000, uint8_t{1});
    const std::weak_ptr watched = mask;
    const uint8_t *memory = mask->data();
    gradcodec::Tensor tensor = gradcodec::tensor_keeping(mask, view(*mask));
    mask.reset();
    hold("the tensor keeps the vector", !watched.expired() && tensor.data<uint8_t>() == memory);
    DLManagedTensor *given = tensor.release();
    given->deleter(given);
    hold("and lets it go", watched.expired());
    return EXIT_SUCCESS;
}
