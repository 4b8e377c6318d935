/* Passes tensors between gradcodec.hpp and tvm-ffi, both ways, in both forms: the same memory, released once. */

#include <gradcodec/gradcodec.hpp>

#include <tvm/ffi/container/tensor.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

static void hold(const char *what, bool holds)
{
    std::printf("%s%s\n", holds ? "" : "WRONG: not true that ", what);
    if (!holds)
        std::exit(EXIT_FAILURE);
}

static void counts(void *releases) { ++*static_cast<int *>(releases); }

int main()
{
    uint8_t mask[2][12] = {{1, 0, 1}, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}};
    int releases = 0;
    const auto ours = [&] {
        return gradcodec::tensor_from_pointer(mask, gradcodec::cpu, gradcodec::dtype<uint8_t>(), {2, 12}, nullptr,
                                              counts, &releases);
    };
    {
        const auto theirs = tvm::ffi::Tensor::FromDLPack(ours().release());
        hold("our tensor is theirs", theirs.data_ptr() == mask && theirs.ndim() == 2 && theirs.size(1) == 12);
        gradcodec::Tensor back(theirs.ToDLPack());
        hold("and ours again", back->data == mask);
        const gradcodec::Tensor packed = gradcodec::pack_bits(back);
        const uint8_t *bytes = packed.data<uint8_t>();
        hold("packed as it should be", packed->shape[0] == 3 && bytes[0] == 0xa0 && bytes[1] == 0 && bytes[2] == 1);
        hold("not released yet", releases == 0);
    }
    hold("released once", releases == 1);
    {
        gradcodec::VersionedTensor versioned = gradcodec::tensor_to_versioned(ours());
        const auto theirs = tvm::ffi::Tensor::FromDLPackVersioned(versioned.release());
        hold("our versioned tensor is theirs", theirs.data_ptr() == mask);
        gradcodec::VersionedTensor back(theirs.ToDLPackVersioned());
        hold("and ours again, as a legacy one, too", gradcodec::tensor_from_versioned(std::move(back))->data == mask);
    }
    hold("released once", releases == 2);
    return EXIT_SUCCESS;
}
