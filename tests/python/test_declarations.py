"""python/gradcodec declares the functions of the library as tests/abi/functions.h promises them."""

import ctypes
import pathlib
import sys

import capi

sys.path.append(str(pathlib.Path(__file__).parents[2] / "python"))
from gradcodec import GradCodec  # noqa: E402 the path comes first
from gradcodec import _abi as client  # noqa: E402

# What it does without, and why.
WITHOUT = {
    "gc_version": "gc_version_string says it",
    "gc_status_name": "the sentence of an error says more; its status is a number",
    "gc_tensor_free": "capsules release tensors, through gc_capsule_destructor",
    "gc_tensor_free_versioned": "likewise",
    "gc_capsule_destructor": "never called from Python: it is the destructor of capsules, by its address",
}


def test_the_client_declares_every_function_as_it_was_promised():
    structs = (
        client.Device, client.DType, client.DLTensor, client.Managed, client.Versioned, client.KernelShape,
        client.CodecOptions, client.CodecHandle, client.Transport, client.NcclOptions, client.PeersOptions, client.CommHandle, client.AllReduceHandle,
        client.ShareHandle, client.KernelHandle, client.ElementwiseOptions, client.ReductionOptions, client.RunOptions,
    )  # fmt: skip
    promised = capi.signatures(structs, ctypes.c_void_p).items()
    assert client.SIGNATURES == {name: arguments for name, (_, *arguments) in promised if name not in WITHOUT}
    library = GradCodec()
    for name, (result, *_) in promised:
        if name not in WITHOUT:
            expected = library._check if result is ctypes.c_int32 else result
            assert getattr(library.lib, name).restype == expected, name
