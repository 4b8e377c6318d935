"""Frameworks, each with the few operations that tests need; and a tensor made by hand, whose releases are counted."""

import ctypes
import functools
import pathlib

import numpy as np
import pytest

import gradcodec as client
from gradcodec import CPU, CUDA, DTYPES, Device, DType, GradCodec, GradCodecError
from gradcodec._abi import LEGACY, DLTensor, Managed, Versioned

ROOT = pathlib.Path(__file__).resolve().parents[3]
gradcodec = GradCodec()


@functools.cache
def has_cuda():
    try:
        gradcodec.prepare((CUDA, 0))
    except GradCodecError:
        return False
    return True


class NumPy:
    writes = True

    def __init__(self):
        self.module, self.device = np, (CPU, 0)

    def array(self, values):
        return np.array(values)

    def take(self, tensor):
        return self.module.from_dlpack(tensor)

    def address(self, array):
        return array.ctypes.data

    def numpy(self, array):
        return np.asarray(array)

    def __repr__(self):
        return f"{type(self).__name__}, {'CUDA' if self.device[0] == CUDA else 'CPU'}"


class Torch(NumPy):
    def __init__(self, device=(CPU, 0)):
        import torch

        self.module, self.device = torch, device

    def array(self, values):
        return self.module.from_numpy(np.array(values)).to("cuda" if self.device[0] == CUDA else "cpu")

    def address(self, array):
        return array.data_ptr()

    def numpy(self, array):
        return array.cpu().numpy()


class Jax(NumPy):
    writes = False

    def __init__(self, device=(CPU, 0)):
        import jax

        self.module, self.device = jax, device

    def array(self, values):
        return self.module.device_put(
            np.array(values), self.module.devices("cuda" if self.device[0] == CUDA else "cpu")[0]
        )

    def take(self, tensor):
        return self.module.dlpack.from_dlpack(tensor)

    def address(self, array):
        return array.unsafe_buffer_pointer()


class CuPy(NumPy):
    def __init__(self, device):
        self.module, self.device = pytest.importorskip("cupy"), device

    def array(self, values):
        return self.module.asarray(values)

    def address(self, array):
        return array.data.ptr

    def numpy(self, array):
        return self.module.asnumpy(array)


def frameworks(*kinds, device=None):
    """Returns a parameter: NumPy, PyTorch and JAX, and with a CUDA device PyTorch, JAX and CuPy on that."""
    cases = [(NumPy,), (Torch,), (Jax,), (Torch, (CUDA, 0)), (Jax, (CUDA, 0)), (CuPy, (CUDA, 0))]
    cases = [case for case in cases if not kinds or case[0] in kinds]
    cases = [case for case in cases if device is None or (len(case) > 1) == (device == CUDA)]
    names = [f"{kind.__name__.lower()}-{'cuda' if where else 'cpu'}" for kind, *where in cases]
    # The fixture of that name is in conftest.py.
    return pytest.mark.parametrize("framework", cases, ids=names, indirect=True)


class Made:
    """A tensor over a NumPy array, made by hand with any fields; `releases` counts its deleter's calls."""

    def __init__(self, array, *, name=LEGACY, dtype=None, version=(1, 0), flags=0):
        self.array, self.name, self.releases = array, name, []
        shape, strides = (
            (ctypes.c_int64 * array.ndim)(*s) for s in (array.shape, (s // array.itemsize for s in array.strides))
        )
        dtype = DType(*DTYPES[dtype or array.dtype.name])
        view = DLTensor(array.ctypes.data, Device(CPU, 0), array.ndim, dtype, shape, strides, 0)
        self._deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self.releases.append(1))
        deleter = ctypes.cast(self._deleter, ctypes.c_void_p)
        self._kept = shape, strides
        self.struct = (
            Managed(view, None, deleter) if name == LEGACY else Versioned(version, None, deleter, flags, view)
        )

    def capsule(self):
        destructor = ctypes.cast(gradcodec.lib.gc_capsule_destructor, ctypes.c_void_p)
        return client._abi._python.PyCapsule_New(ctypes.addressof(self.struct), self.name, destructor)


class Exporter:
    """An exporter of DLPack 1.0 with a Made's capsule, new in every call."""

    def __init__(self, made):
        self.made, self.requests = made, []

    def __dlpack__(self, **requests):
        self.requests.append(requests)
        return self.made.capsule()

    def __dlpack_device__(self):
        return CPU, 0


class OldExporter(Exporter):
    """An exporter from before DLPack 1.0."""

    def __dlpack__(self, stream=None):
        return self.made.capsule()


class Lent:
    """Memory lent to the library; `releases` holds the context of every call of the release function."""

    def __init__(self, array):
        self.array, self.releases = array, []
        self.callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.releases.append)

    def tensor(self, dtype=None):
        shape = (ctypes.c_int64 * self.array.ndim)(*self.array.shape)
        return gradcodec.make(
            gradcodec.lib.gc_tensor_from_pointer, self.array.ctypes.data, Device(CPU, 0),
            DType(*DTYPES[dtype or self.array.dtype.name]), self.array.ndim, shape, None,
            ctypes.cast(self.callback, ctypes.c_void_p), 42,
        )  # fmt: skip


def chunk_rows(truth, n_chunks, order="big"):
    """Returns the chunks that the header's formula gives."""
    packed = np.packbits(truth, bitorder=order)
    size = -(-packed.size // n_chunks)
    rows = np.zeros(n_chunks * size, np.uint8)
    rows[: packed.size] = packed
    return rows.reshape(n_chunks, size)
