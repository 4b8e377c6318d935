"""GradCodec from Python through cffi: all declarations come from gradcodec.cdef.h.

    python3 examples/python/cffi_bits.py

loads the installed libgradcodec.so.0, or the file GRADCODEC_LIBRARY, and reads gradcodec.cdef.h in the folder
GRADCODEC_INCLUDE, or else in ../../include. Needs cffi and NumPy.
"""

import os
from pathlib import Path

import cffi
import numpy as np

INCLUDE = os.environ.get("GRADCODEC_INCLUDE", Path(__file__).resolve().parents[2] / "include")
ffi = cffi.FFI()
ffi.cdef(Path(INCLUDE, "gradcodec.cdef.h").read_text())
lib = ffi.dlopen(os.environ.get("GRADCODEC_LIBRARY", "libgradcodec.so.0"))

DTYPE_CODES = {"b": lib.kDLBool, "i": lib.kDLInt, "u": lib.kDLUInt, "f": lib.kDLFloat}


class View:
    """Describes a C-contiguous array for the library, without a copy.

    This object keeps everything alive that `tensor` points to: cffi frees what no variable references.
    """

    def __init__(self, array, writable=False):
        self.memory = ffi.from_buffer(array, require_writable=writable)
        self.shape = ffi.new("int64_t[]", array.shape)
        dtype = DTYPE_CODES[array.dtype.kind], array.itemsize * 8, 1
        cpu = lib.kDLCPU, 0
        self.tensor = ffi.new("DLTensor *", [self.memory, cpu, array.ndim, dtype, self.shape, ffi.NULL, 0])


def check(status):
    if status != lib.GC_STATUS_OK:
        raise RuntimeError(ffi.string(lib.gc_last_error()).decode())


def pack_chunks(array, n_chunks, order=lib.GC_BIT_ORDER_BIG):
    """Packs truth to bits, in `n_chunks` rows; packs the signs of floats."""
    packed = np.empty((n_chunks, lib.gc_chunk_bytes(array.size, n_chunks)), np.uint8)
    source, target = View(array), View(packed, writable=True)
    pack = lib.gc_pack_signs_into if array.dtype.kind == "f" else lib.gc_pack_chunks_into
    check(pack(source.tensor, order, target.tensor, ffi.NULL))
    return packed


def main():
    assert lib.gc_version() >> 16 == lib.GRADCODEC_VERSION_MAJOR
    gradient = np.random.default_rng(1).standard_normal((25, 40), np.float32)
    positive = gradient >= 0

    chunks = pack_chunks(positive, 4)  # 1000 bits are 125 bytes: in 4 chunks of 32 the last 3 are zero
    print(f"{ffi.string(lib.gc_version_string()).decode()}: {positive.nbytes} bytes of bool in {chunks.nbytes}")
    assert chunks.tobytes() == np.packbits(positive).tobytes() + bytes(3)
    assert np.array_equal(pack_chunks(gradient, 4), chunks)
    little = pack_chunks(positive, 1, lib.GC_BIT_ORDER_LITTLE)
    assert little.tobytes() == np.packbits(positive, bitorder="little").tobytes()

    back = np.empty_like(positive)
    bits, target = View(little[0]), View(back.reshape(-1), writable=True)
    check(lib.gc_unpack_bits_into(bits.tensor, lib.GC_AXIS_NONE, lib.GC_BIT_ORDER_LITTLE, target.tensor, ffi.NULL))
    print(f"unpacked, as it was: {np.array_equal(back, positive)}")
    assert np.array_equal(back, positive)

    source, small = View(positive), View(np.empty((4, 31), np.uint8), writable=True)
    status = lib.gc_pack_chunks_into(source.tensor, lib.GC_BIT_ORDER_BIG, small.tensor, ffi.NULL)
    print(f"refused: {ffi.string(lib.gc_last_error()).decode()}")
    assert status == lib.GC_STATUS_SHAPE_MISMATCH


if __name__ == "__main__":
    main()
