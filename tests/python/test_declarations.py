"""python/gradcodec declares the functions of the library as tests/abi/functions.h promises them."""

import ctypes
import pathlib
import sys

import capi

sys.path.append(str(pathlib.Path(__file__).parents[2] / "python"))
from gradcodec import GradCodec  # noqa: E402 the path comes first
from gradcodec import _abi as client  # noqa: E402

NUMBERS = "gc_comm_rank", "gc_comm_world_size", "gc_allreduce_exchanges", "gc_codec_exchanges"  # an int32 that is no status


def test_the_client_declares_every_function_as_it_was_promised():
    structs = (
        client.Device, client.DType, client.DLTensor, client.Managed, client.Versioned, client.KernelShape,
        client.CodecOptions, client.CodecHandle, client.Transport, client.NcclOptions, client.PeersOptions, client.CommHandle, client.AllReduceHandle, client.Part,
        client.ShareHandle, client.KernelHandle, client.ElementwiseOptions, client.ReductionOptions, client.RunOptions,
    )  # fmt: skip
    promised = capi.signatures(structs, ctypes.c_void_p)
    assert client.FUNCTIONS == {name: (result, arguments) for name, (result, *arguments) in promised.items()}
    library = GradCodec()
    for name, (result, *_) in promised.items():
        is_status = result is ctypes.c_int32 and name not in NUMBERS
        assert getattr(library.lib, name).restype == (library._check if is_status else result), name
