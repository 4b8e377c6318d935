"""Runs scripts against the fake CUDA driver tests/fakes/cuda/libcuda.c, each script in its own process."""

import atexit
import functools
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parents[1] / "python"  # holds the modules that the scripts import
DRIVERS = os.environ.get("GRADCODEC_DRIVERS")

PRELUDE = r'''
import ctypes, os, sys
from ctypes import byref
import numpy as np
import capi
from capi import CUDA, CUDA_MANAGED, DLDevice, Managed, Status, dldtype, expect, free_all, int64s, last_error, lib

def driver():
    fake = ctypes.CDLL("libcuda.so.1")
    fake.fake_in_use.restype = ctypes.c_size_t
    for name in "calls", "launches", "allocations", "frees", "waits":
        getattr(fake, "fake_" + name).restype = ctypes.c_ulonglong
    fake.fake_left.restype = ctypes.c_long
    fake.fake_last_launch.restype = fake.fake_failed_call.restype = ctypes.c_char_p
    fake.fake_enter.restype = fake.fake_stream.restype = fake.fake_stream_here.restype = ctypes.c_void_p
    fake.fake_recorded.restype = ctypes.c_void_p
    fake.fake_fail_call.argtypes = ctypes.c_long, ctypes.c_int
    fake.fake_enter.argtypes = ctypes.c_int, ctypes.c_ulonglong
    return fake

def fail(**failures):
    os.environ["FAKE_FAILURES"] = " ".join(f"{name}={code}" for name, code in failures.items())

def failing(fake, number, code, call):
    """Fails driver call `number` within a call. Returns the call's result and the name of the failed driver call."""
    fake.fake_fail_call(number, code)
    got = call()
    failed = fake.fake_failed_call().decode()
    fake.fake_fail_call(-1, 0)
    return got, failed

def make_good(fake, failed):
    """Leaves a context, or a capture mode, that the library failed to leave."""
    if "Pop" in failed:
        fake.cuCtxPopCurrent_v2(byref(ctypes.c_void_p()))
    elif "Exchange" in failed:
        fake.cuThreadExchangeStreamCaptureMode(byref(ctypes.c_int(0)))

def enter_primary(fake, device=0):
    """Makes the primary context current on this thread, as CUDA's runtime does."""
    context = ctypes.c_void_p()
    assert fake.cuDevicePrimaryCtxRetain(byref(context), 70 + device) == 0 and fake.cuCtxPushCurrent_v2(context) == 0

def empty(n_bytes, device=0):
    out = Managed()
    status = lib.gc_tensor_empty(DLDevice(CUDA, device), dldtype("uint8"), 1, int64s((n_bytes,)), byref(out))
    return status, out

def held(n_bytes, device=0):
    status, out = empty(n_bytes, device)
    assert status == 0, last_error()
    return out

def on_gpu(array, device=0, code=None):
    """Returns a compact tensor of the library on a GPU of the stand-in, with the elements of the array."""
    tensor = held(max(1, array.nbytes), device)
    compact = np.ascontiguousarray(array)
    ctypes.memmove(tensor.contents.dl_tensor.data, compact.ctypes.data, array.nbytes)
    return like(tensor, array, code)

def like(tensor, array, code=None):
    """Returns the memory of a tensor, described with the shape, strides and dtype of the array."""
    described = capi.Tensor(array)
    described.memory = tensor  # the caller releases it
    dl = described.struct.dl_tensor
    dl.data, dl.device = tensor.contents.dl_tensor.data, tensor.contents.dl_tensor.device
    dl.dtype.code = dl.dtype.code if code is None else code
    return described

def from_gpu(tensor, shape, dtype):
    """Returns the elements of a tensor on a GPU as an array."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(tensor.contents.dl_tensor.data, count), dtype).reshape(shape)

def pack(src):
    out = Managed()
    return lib.gc_pack_chunks(src, 1, byref(out)), out

def view(tensor, shape):
    view = capi.DLTensor.from_buffer_copy(tensor.contents.dl_tensor)
    view.ndim, view.shape, view.strides = len(shape), int64s(shape), None
    return view
'''


# Source of the server process. It imports NumPy, which is slow, but not this library. It forks for each script, returns
# the exit status and the output, and exits when its standard input closes.
SERVER = r"""
import ctypes, numpy, os, pickle, sys, tempfile
while True:
    try:
        script, environment = pickle.load(sys.stdin.buffer)
    except EOFError:
        os._exit(0)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            for number, file in enumerate([open(os.devnull), out, errors]):
                os.dup2(file.fileno(), number)
            os.environ.clear()
            os.environ.update(environment)
            break
        _, status = os.waitpid(child, 0)
        printed = []
        for file in out, errors:
            file.seek(0)
            printed.append(file.read().decode())
        pickle.dump((os.waitstatus_to_exitcode(status), *printed), sys.stdout.buffer)
        sys.stdout.buffer.flush()
sys.stdin = open(0)
exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})
"""


@functools.cache
def server(folders, process):
    """Starts a server that loads libraries from `folders` first. `process`: pid of the caller; each needs its own."""
    environment = {**os.environ, "LD_LIBRARY_PATH": folders, "PYTHONPATH": str(HERE)}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    started = subprocess.Popen([sys.executable, "-c", SERVER], env=environment, **pipes)
    atexit.register(started.stdin.close)
    return started


def run(script, driver="driver", **environment):
    """Runs a script with the fake driver in folder `driver`; fails if the script fails. Returns the output."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("CUDA")},
        "LD_LIBRARY_PATH": str(Path(DRIVERS) / driver),
        "PYTHONPATH": str(HERE),
        **{name: str(value) for name, value in environment.items()},
    }
    its = server(environment["LD_LIBRARY_PATH"], os.getpid())
    pickle.dump((PRELUDE + textwrap.dedent(script), environment), its.stdin)
    its.stdin.flush()
    code, printed, errors = pickle.load(its.stdout)
    assert (code, errors) == (0, ""), errors
    return printed
