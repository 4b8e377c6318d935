"""Compressed all-reduce of gradients: 1 to 16 bits per element, on CPU and CUDA.

This is the Python client. It needs Python 3.10, the library, and nothing else.

    gradcodec = GradCodec()  # or GradCodec("/path/to/libgradcodec.so.0")
    chunks = gradcodec.pack_chunks(positive, 4)  # of any array that has __dlpack__
    arrays = [numpy.from_dlpack(chunk) for chunk in chunks]  # or torch's; nothing is copied
    gradcodec.pack_signs_into(gradient, bits)  # dst second, defaults behind it

encode() and decode() of this module need no GradCodec: they find the library themselves, and return arrays of NumPy.

gradcodec.h documents what functions do, take and refuse. `stream`: None for the current stream of the first array whose
framework gives it (PyTorch, CuPy), or the legacy stream if none does; 1 for the legacy stream, 2 the per-thread one, a
handle, or an object that has one as `cuda_stream` (torch) or `ptr` (CuPy). The stream waits for the work that
frameworks have enqueued on the tensors; keep the tensors until it is done. JAX's arrays are immutable without a flag:
do not write to them. Outputs that require grad are refused where PyTorch records gradients.

An object that owns memory has close(), which may be called twice, and is a context manager; otherwise the memory is
released with the object. An error is a GradCodecError with a Status, or, for an unfit argument, Python's usual one.
"""

from ._abi import (
    ADD, AXIS_NONE, BF16, BIG, COUNT_ALL, CPU, CUDA, CUDA_HOST, CUDA_MANAGED, DTYPES, INT4, INT8, LITTLE, MEAN, MXFP4,
    MXFP8, ONEBIT, PROPAGATE, RMS, SET, SIGN, TRANSACTIONAL, ZERO, DType, Device,
)
from ._codecs import Codec
from ._comms import AllReduce, Communicator, Exchanger
from ._errors import GradCodecError, Status
from ._kernels import Kernel
from ._library import GradCodec
from ._share import Share
from ._single import decode, encode
from ._tensors import Array, Tensor

__version__ = "0.1.0"  # of this package; GradCodec.version is the library's

__all__ = [
    "encode", "decode", "GradCodec", "Codec", "Communicator", "AllReduce", "Kernel", "Share", "Tensor", "Array",
    "GradCodecError", "Status", "DType", "Device", "Exchanger", "ADD", "AXIS_NONE", "BF16", "BIG", "COUNT_ALL", "CPU",
    "CUDA", "CUDA_HOST", "CUDA_MANAGED", "DTYPES", "INT4", "INT8", "LITTLE", "MEAN", "MXFP4", "MXFP8", "ONEBIT",
    "PROPAGATE", "RMS", "SET", "SIGN", "TRANSACTIONAL", "ZERO", "__version__",
]  # fmt: skip

# Their public names, for messages and pickles.
for _each in (decode, encode, AllReduce, Array, Codec, Communicator, GradCodec, GradCodecError, Kernel, Share, Status, Tensor):
    _each.__module__ = __name__
