"""Device memory for the codecs of tests/python/codecs_c.py."""

import ctypes

import numpy as np

import capi
import driver
import gpu


class Card:
    """A piece of device memory out of which operands are cut, one after the other. With `exact` each has an allocation of
    its own that ends with it, for compute-sanitizer."""

    device = gpu.device()

    def __init__(self, size=64 << 20, exact=False):
        self.memory, self.used, self.exact = driver.Memory(size), 0, exact
        self.allocated = []

    def start_again(self):
        """What was put is not used any more."""
        self.used = 0
        for memory in self.allocated:
            memory.free()
        self.allocated.clear()

    def put(self, array, dtype=None, aligned=True):
        shift = 0 if aligned else array.itemsize
        if self.exact:
            memory = driver.Memory(max(1, shift + array.nbytes))
            self.allocated.append(memory)
            address = memory.address + shift
        else:
            address = self.memory.address + self.used + shift
            self.used += -(-(shift + array.nbytes + 64) // 256) * 256
            assert self.used <= self.memory.size
        if array.nbytes:
            driver.upload(address, np.ascontiguousarray(array))
        return gpu.at(address, array.shape, dtype or array.dtype.name)

    def get(self, tensor):
        view = tensor.struct.dl_tensor
        shape = tuple(view.shape[: view.ndim])
        dtype = next(
            np.dtype(d) for d, code, bits in capi.DTYPES.values() if (code, bits) == (view.dtype.code, view.dtype.bits)
        )
        count = int(np.prod(shape, dtype=np.int64))
        if count == 0:
            return np.empty(shape, dtype)
        driver.synchronize()
        return driver.download(view.data, count * dtype.itemsize).view(dtype).reshape(shape)
