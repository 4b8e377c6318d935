"""Kernels that are compiled at run time, on NumPy's memory, which the stand-in driver takes for a device's."""

import ctypes
import hashlib
import os
from ctypes import POINTER, byref, c_char_p, c_int32
from pathlib import Path

import numpy as np

import capi
from capi import CUDA, ElementwiseOptions, Kernel, ReductionOptions, RunOptions, Tensor, View, last_error, lib

KEEPDIMS, NO_DISK = 1, 2


class Refused(Exception):
    """A status that is not OK, with the last error."""

    def __init__(self, status):
        super().__init__(f"{status}: {last_error()}")
        self.status, self.message = status, last_error()


def check(status):
    if status != 0:
        raise Refused(status)


def on_gpu(array, **how):
    """Returns a GPU's tensor over the array's memory. A Tensor (a scalar, for example) is returned unchanged."""
    if isinstance(array, Tensor):
        return array
    tensor = Tensor(np.asarray(array), **how)
    tensor.struct.dl_tensor.device.device_type = CUDA
    return tensor


def of_cupy(array):
    """Returns a tensor over an array of CuPy's, with its strides."""
    tensor = Tensor.__new__(Tensor)
    tensor.array = array
    dl = capi.DLTensor(
        array.data.ptr, capi.DLDevice(CUDA, array.device.id), array.ndim, capi.dldtype(array.dtype.name),
        capi.int64s(array.shape), capi.int64s([step // array.itemsize for step in array.strides]), 0,
    )  # fmt: skip
    tensor.struct = capi.DLManagedTensor(dl)
    return tensor


def scalar(value, dtype):
    return Tensor(np.array(value, dtype))


def bfloat16(array):
    """Returns the patterns of the array, rounded to bfloat16, to nearest even."""
    bits = np.asarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(patterns):
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def views(tensors):
    return (View * max(1, len(tensors)))(*(tensor.view for tensor in tensors))


class Compiled:
    def __init__(self, options_type, create, flags=0, options=(), **texts):
        given = options_type(ctypes.sizeof(options_type), flags)
        for name, text in texts.items():
            setattr(given, name, text.encode() if isinstance(text, str) else text)
        given.options, given.n_options = (c_char_p * max(1, len(options)))(*(o.encode() for o in options)), len(options)
        self.handle = POINTER(Kernel)()
        check(create(byref(given), byref(self.handle)))

    def options(self, size=0, axes=None, keepdims=False, workspace=None, capability=0):
        axes = (axes,) if isinstance(axes, int) else axes
        values = None if axes is None else (c_int32 * max(1, len(axes)))(*axes)
        options = RunOptions(ctypes.sizeof(RunOptions), KEEPDIMS * keepdims, size, values, len(axes or ()))
        options.workspace = workspace.view if workspace is not None else None
        options.capability, options.kept = capability, values
        return options

    def arguments(self, inputs, outputs, options):
        inputs, outputs = [on_gpu(x) for x in inputs], [on_gpu(x) for x in outputs]
        self.kept = inputs, outputs, options
        return self.handle, views(inputs), len(inputs), views(outputs), len(outputs), byref(options)

    def __call__(self, inputs, outputs, stream=None, **options):
        workspace = options.pop("workspace", None)
        given = self.options(workspace=workspace, **options)
        bytes_ = lib.gc_kernel_workspace_bytes(*self.arguments(inputs, outputs, given))
        if workspace is None and bytes_ > 0:  # a refusal here is repeated below
            memory = np.full(bytes_ + 16, 0xA5, np.uint8)
            start = -memory.ctypes.data % 16
            given.workspace = (kept := on_gpu(memory[start : start + bytes_])).view
            self.memory = kept
        check(lib.gc_kernel_run(*self.arguments(inputs, outputs, given), stream))
        return outputs[0]

    def prepare(self, inputs, outputs, stream=None, **options):
        check(lib.gc_kernel_prepare(*self.arguments(inputs, outputs, self.options(**options)), stream))

    def workspace_bytes(self, inputs, outputs, **options):
        (ignored := on_gpu(np.zeros(1))).struct.dl_tensor.data = None
        bytes_ = lib.gc_kernel_workspace_bytes(*self.arguments(inputs, outputs, self.options(workspace=ignored, **options)))
        if bytes_ < 0:
            raise Refused(-1)
        return bytes_

    def log(self):
        log = c_char_p()
        check(lib.gc_kernel_log(self.handle, byref(log)))
        return log.value.decode()

    def free(self):
        lib.gc_kernel_free(self.handle)


def codes():
    """Returns the code in each file of the cache of kernels, the latest last."""
    files = sorted(Path(os.environ["GRADCODEC_CACHE_DIR"]).glob("*.kernel"), key=lambda path: path.stat().st_mtime_ns)
    return [code_of(path.read_bytes()) for path in files]


def code_of(file):
    """Returns the code in a file of the cache, whose format src/jit/cache.rs describes."""
    assert file.startswith(b"gcdisk06") and hashlib.sha256(file[:-32]).digest() == file[-32:]
    log_bytes = int.from_bytes(file[48:56], "little")
    return file[56 + log_bytes : -32]


def elementwise(inputs, outputs, operation, name="kernel", **more):
    return Compiled(ElementwiseOptions, lib.gc_elementwise_create, inputs=inputs, outputs=outputs, operation=operation,
                    name=name, **more)  # fmt: skip


def reduction(inputs, outputs, map, reduce, post_map, identity=None, name="kernel", **more):
    if identity is not None:
        more["identity"] = identity
    return Compiled(ReductionOptions, lib.gc_reduction_create, inputs=inputs, outputs=outputs, map=map, reduce=reduce,
                    post_map=post_map, name=name, **more)  # fmt: skip
