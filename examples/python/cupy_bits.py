"""GradCodec with CuPy: arrays in and out by DLPack, and any array by `__cuda_array_interface__`.

    PYTHONPATH=python python3 examples/python/cupy_bits.py

Without a GPU, shows NumPy's `__array_interface__`, the equivalent for host memory.
"""

from ctypes import c_int64

import numpy as np
from gradcodec import CPU, CUDA, DTYPES, Device, DType, GradCodec


def from_interface(gradcodec, array):
    """Returns a tensor over the memory of an array, which must stay alive. For Numba, RMM and others without DLPack.

    The simple tier reads the tensor on the legacy default stream, which must wait for writes on other streams.
    """
    on_cuda = hasattr(array, "__cuda_array_interface__")
    interface = array.__cuda_array_interface__ if on_cuda else array.__array_interface__
    dtype, shape = np.dtype(interface["typestr"]), interface["shape"]
    strides = interface.get("strides")  # in bytes; None for C order
    if strides is not None:
        strides = (c_int64 * len(shape))(*(step // dtype.itemsize for step in strides))
    return gradcodec.make(
        gradcodec.lib.gc_tensor_from_pointer, interface["data"][0],
        Device(CUDA, array.device.id) if on_cuda else Device(CPU, 0), DType(*DTYPES[dtype.name]),
        len(shape), (c_int64 * len(shape))(*shape), strides, None, None,
    )  # fmt: skip


def show(gradcodec, xp):
    values = xp.arange(1000).reshape(25, 40) % 3  # int64
    expected = np.packbits(np.array(values.tolist()).T != 0)
    tensor = from_interface(gradcodec, values.T)
    assert tensor.shape == (40, 25)
    chunk = gradcodec.pack_chunks(tensor, 1)[0]
    address, bits = chunk.address, xp.from_dlpack(chunk)
    print(f"{xp.__name__}: {values.dtype} by its address, packed to {bits.nbytes} bytes")
    assert bits.tolist() == expected.tolist()
    assert (bits.data.ptr if xp.__name__ == "cupy" else bits.ctypes.data) == address, "not copied"


def show_capsules(gradcodec, cupy):
    gradient = cupy.random.default_rng(1).standard_normal((25, 40), cupy.float32)
    chunks = [cupy.from_dlpack(chunk) for chunk in gradcodec.pack_chunks(gradient >= 0, 4)]
    expected = cupy.packbits(gradient >= 0)
    print(f"cupy: {gradient.nbytes} bytes of gradient, {len(chunks)} chunks of {chunks[0].nbytes} bytes")
    assert bool((cupy.concatenate(chunks)[:125] == expected).all())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        bits, signs = cupy.empty((4, 32), cupy.uint8), cupy.empty_like(gradient)
        gradcodec.pack_signs_into(gradient, bits, stream=stream)
        gradcodec.unpack_chunks_into(bits, signs, stream=stream)
        good = bool((signs == (gradient >= 0)).all())
    print(f"cupy: signs packed and unpacked on a stream: {good}")
    assert good and bool((bits == cupy.stack(chunks)).all())


def main():
    gradcodec = GradCodec()
    show(gradcodec, np)
    try:
        import cupy
    except ImportError:
        print("SKIPPED: no CuPy here, so CUDA was not shown")
        raise SystemExit
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        print("SKIPPED: no CUDA device, so CUDA was not shown")
        raise SystemExit
    show(gradcodec, cupy)
    show_capsules(gradcodec, cupy)


if __name__ == "__main__":
    main()
