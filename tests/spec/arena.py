"""Device memory for the codecs of tests/python/codecs_c.py."""

import numpy as np

import capi
import driver
import gpu
import layouts

BEHIND = 64  # bytes after each operand, which no call may write


class Arena:
    """A piece of device memory from which operands are cut, one after the other. With `exact` each has an allocation of
    its own that ends with it, for compute-sanitizer and AddressSanitizer."""

    def __init__(self, size=64 << 20, exact=False, index=0):
        self.device = gpu.device(index)
        self.memory, self.used, self.behind, self.allocated = None, 0, 0 if exact else BEHIND, []
        if not exact:
            self.memory = driver.Memory(size)

    def start_again(self):
        """Releases the memory of all operands."""
        self.used = 0
        for memory in self.allocated:
            memory.free()
        self.allocated.clear()

    def free(self):
        self.start_again()
        if self.memory:
            self.memory.free()

    def cut(self, n_bytes):
        """Returns the address of `n_bytes` bytes."""
        if not self.memory:
            self.allocated.append(driver.Memory(n_bytes))
            return self.allocated[-1].address
        address = self.memory.address + self.used
        self.used += -(-n_bytes // 256) * 256
        assert self.used <= self.memory.size
        return address

    def put(self, array, dtype=None, aligned=True):
        shift = 0 if aligned else array.itemsize
        address = self.cut(max(1, shift + array.nbytes + self.behind)) + shift
        pattern = np.full(self.behind, layouts.PATTERN, np.uint8)
        driver.upload(address, np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8), pattern]))
        return gpu.at(address, array.shape, dtype or array.dtype.name, index=self.device.device_id)

    def get(self, tensor):
        view = tensor.struct.dl_tensor
        shape = tuple(view.shape[: view.ndim])
        dtype = next(
            np.dtype(d) for d, code, bits in capi.DTYPES.values() if (code, bits) == (view.dtype.code, view.dtype.bits)
        )
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        driver.synchronize()
        found = driver.download(view.data, size + self.behind)
        assert (found[size:] == layouts.PATTERN).all(), "a call has written after the end of the operand"
        return found[:size].view(dtype).reshape(shape)
