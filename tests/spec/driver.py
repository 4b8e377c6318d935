"""The CUDA driver through ctypes: memory, streams, contexts, graphs, and a gate that holds a stream back.

The tests call the driver themselves, so they read the current context, pending work and free memory without a framework
and without the library under test. The driver is the machine's, or the stand-in (tests/fakes/cuda/libcuda.c) if
GRADCODEC_DRIVERS names the folder of its builds. Memory, streams and contexts work on both; graphs, the gate, managed
memory and the count of free bytes need a GPU.
"""

import contextlib
import ctypes
import os
import pathlib
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

import numpy as np

LEGACY, PER_THREAD = 1, 2  # stream handles that the driver accepts; NULL is also the legacy stream
NON_BLOCKING = 1
NOT_READY = 600
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # modes of a capture
NODE_KERNEL, NODE_COPY, NODE_SET = 0, 1, 2

STAND_INS = os.environ.get("GRADCODEC_DRIVERS")
IS_STAND_IN = bool(STAND_INS)

if IS_STAND_IN:
    # The library under test finds this file, loaded by its path, by name. Child processes search LD_LIBRARY_PATH.
    os.environ["LD_LIBRARY_PATH"] = str(pathlib.Path(STAND_INS) / "driver")
    library = ctypes.CDLL(str(pathlib.Path(STAND_INS) / "driver/libcuda.so.1"))
else:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        library = None


class DriverError(Exception):
    pass


def raw(name, *arguments):
    """Returns the driver's status as a number."""
    return getattr(library, name)(*arguments)


def error_name(code):
    name = c_char_p()
    library.cuGetErrorName(code, byref(name))
    return (name.value or b"?").decode()


def call(name, *arguments):
    code = raw(name, *arguments)
    if code:
        raise DriverError(f"{name}: {error_name(code)}")


def device_count():
    """Returns the number of devices: 0 also without a driver, or with one that finds no device."""
    count = c_int()
    if library is None or raw("cuInit", 0) or raw("cuDeviceGetCount", byref(count)):
        return 0
    return count.value


def handle_of(device):
    """Returns the driver's handle of a device by its number. On the stand-in they differ."""
    handle = c_int()
    call("cuDeviceGet", byref(handle), device)
    return handle.value


def name(device=0):
    text = ctypes.create_string_buffer(100)
    call("cuDeviceGetName", text, len(text), handle_of(device))
    return text.value.decode()


def attribute(which, device=0):
    value = c_int()
    call("cuDeviceGetAttribute", byref(value), which, handle_of(device))
    return value.value


def compute_capability(device=0):
    return 10 * attribute(75, device) + attribute(76, device)


def supports_managed_memory(device=0):
    return bool(attribute(83, device))


# --- contexts ---------------------------------------------------------------------------------------------------------

_primary = {}


def primary(device=0):
    """Returns the device's primary context, retained until the process ends."""
    if device not in _primary:
        context = c_void_p()
        call("cuDevicePrimaryCtxRetain", byref(context), handle_of(device))
        _primary[device] = context.value
    return _primary[device]


def current():
    """Returns the calling thread's context, or None."""
    context = c_void_p()
    call("cuCtxGetCurrent", byref(context))
    return context.value


def use(context):
    """Makes a context the current one in place of the one before. None: only removes the one before."""
    if current():
        call("cuCtxPopCurrent_v2", byref(c_void_p()))
    if context:
        call("cuCtxPushCurrent_v2", c_void_p(context))


@contextlib.contextmanager
def using(context):
    """Makes a context, or None, the current one within a `with`."""
    before = current()
    use(context)
    try:
        yield
    finally:
        use(before)


@contextlib.contextmanager
def own_context(device=0):
    """Makes a context beside the primary one; it is current inside, and destroyed after."""
    before = current()
    context = c_void_p()
    call("cuCtxCreate_v2", byref(context), 0, handle_of(device))
    try:
        yield context.value
    finally:
        call("cuCtxDestroy_v2", context)
        use(before)


def synchronize():
    call("cuCtxSynchronize")


# --- memory -----------------------------------------------------------------------------------------------------------


def free_bytes(of=0):
    free_and_total = c_size_t(), c_size_t()
    call("cuMemGetInfo_v2", *map(byref, free_and_total))
    return free_and_total[of].value


def total_bytes():
    return free_bytes(1)


class Memory:
    """Device memory of the current context; `kind`: "device", "managed", or "pinned", which is the host's."""

    def __init__(self, size, kind="device"):
        self.size, self.kind = size, kind
        address = c_uint64()
        if kind == "device":
            call("cuMemAlloc_v2", byref(address), c_size_t(size))
        elif kind == "managed":
            call("cuMemAllocManaged", byref(address), c_size_t(size), 1)
        else:
            call("cuMemHostAlloc", byref(address), c_size_t(size), 3)
        self.address = address.value

    def resize(self, size):
        """Allocates anew; the contents are lost."""
        self.free()
        self.__init__(size, self.kind)

    def free(self):
        if self.address:
            function = "cuMemFreeHost" if self.kind == "pinned" else "cuMemFree_v2"
            call(function, c_uint64(self.address))
            self.address = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free()


def upload(address, array):
    """Copies an array's bytes. The copy is complete for every stream when it returns."""
    array = np.ascontiguousarray(array)
    if array.nbytes:
        call("cuMemcpyHtoD_v2", c_uint64(address), c_void_p(array.ctypes.data), c_size_t(array.nbytes))
        wait_for(None)


def download(address, size):
    """Returns `size` bytes, after all work that was enqueued on the legacy stream."""
    array = np.empty(size, np.uint8)
    if size:
        call("cuMemcpyDtoH_v2", c_void_p(array.ctypes.data), c_uint64(address), c_size_t(size))
        wait_for(None)
    return array


def fill(address, byte, size):
    """Fills memory. The fill is complete for every stream when it returns."""
    if size:
        call("cuMemsetD8Async", c_uint64(address), ctypes.c_ubyte(byte), c_size_t(size), None)
        wait_for(None)


def copy(to, source, size, stream):
    """Enqueues a copy on the stream, from device to device."""
    if size:
        call("cuMemcpyAsync", c_uint64(to), c_uint64(source), c_size_t(size), c_void_p(stream))


# --- streams and events -----------------------------------------------------------------------------------------------


class Ordered:
    """Device memory, allocated and freed in the order of a stream: the next allocation may have the same memory."""

    def __init__(self, size, stream):
        address = c_uint64()
        call("cuMemAllocAsync", byref(address), c_size_t(size), c_void_p(stream))
        self.address, self.size, self.stream = address.value, size, stream

    def fill(self, byte):
        call("cuMemsetD8Async", c_uint64(self.address), ctypes.c_ubyte(byte), c_size_t(self.size), c_void_p(self.stream))

    def free(self):
        call("cuMemFreeAsync", c_uint64(self.address), c_void_p(self.stream))


def ipc_handle(address):
    """Returns a handle for other processes."""
    handle = (ctypes.c_char * 64)()
    call("cuIpcGetMemHandle", handle, c_uint64(address))
    return bytes(handle)


class IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


def ipc_open(handle):
    """Returns the address here of another process's memory, which is mapped until this process ends."""
    address, lazily_enable_peer_access = c_uint64(), 1
    call("cuIpcOpenMemHandle_v2", byref(address), IpcHandle.from_buffer_copy(handle), c_uint(lazily_enable_peer_access))
    return address.value


class Stream:
    """A stream of the current context, non-blocking unless asked otherwise."""

    def __init__(self, flags=NON_BLOCKING):
        stream = c_void_p()
        call("cuStreamCreate", byref(stream), flags)
        self.handle = stream.value

    def synchronize(self):
        call("cuStreamSynchronize", c_void_p(self.handle))

    def destroy(self):
        if self.handle:
            call("cuStreamDestroy_v2", c_void_p(self.handle))
            self.handle = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.destroy()


def wait_for(stream):
    call("cuStreamSynchronize", c_void_p(stream))


class Event:
    """Event behind the work that was enqueued on the stream so far."""

    def __init__(self, stream):
        event = c_void_p()
        call("cuEventCreate", byref(event), 2)
        self.handle = event.value
        call("cuEventRecord", c_void_p(self.handle), c_void_p(stream))

    def done(self):
        code = raw("cuEventQuery", c_void_p(self.handle))
        if code not in (0, NOT_READY):
            raise DriverError(f"cuEventQuery: {error_name(code)}")
        return code == 0


# --- kernels ----------------------------------------------------------------------------------------------------------

# gate: runs until the flag is set, or for a number of nanoseconds. wild: writes to an invalid address.
PTX = b"""
.version 6.4
.target sm_70
.address_size 64

.visible .entry gate(.param .u64 flag, .param .u64 limit)
{
    .reg .u64 %rd<6>;
    .reg .u32 %r<2>;
    .reg .pred %p<3>;
    ld.param.u64 %rd1, [flag];
    ld.param.u64 %rd2, [limit];
    mov.u64 %rd3, %globaltimer;
LOOP:
    ld.volatile.u32 %r1, [%rd1];
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    mov.u64 %rd4, %globaltimer;
    sub.u64 %rd5, %rd4, %rd3;
    setp.lt.u64 %p2, %rd5, %rd2;
    @%p2 bra LOOP;
DONE:
    ret;
}

.visible .entry wild()
{
    .reg .u64 %rd<2>;
    .reg .u32 %r<2>;
    mov.u64 %rd1, 64;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""


def load(image):
    """Loads a module into the current context, from PTX or a fatbin as bytes."""
    module = c_void_p()
    call("cuModuleLoadData", byref(module), c_char_p(image))
    return module.value


def kernel(module, name):
    function = c_void_p()
    call("cuModuleGetFunction", byref(function), c_void_p(module), name.encode())
    return function.value


def launch(function, blocks, threads, stream, *arguments):
    """Launches a function with `arguments`, which are ctypes values."""
    pointers = (c_void_p * max(1, len(arguments)))(*(ctypes.addressof(a) for a in arguments))
    none = c_void_p()
    shape = (*(c_uint(n) for n in (blocks, 1, 1)), *(c_uint(n) for n in (threads, 1, 1)), c_uint(0))
    call("cuLaunchKernel", c_void_p(function), *shape, c_void_p(stream), pointers, none)


class Gate:
    """Holds streams of the current context back until it is opened; or for `seconds`, so that nothing hangs for ever.

    Loaded and run once on creation: a first launch behind a closed gate could wait for it.
    """

    def __init__(self, seconds=20):
        self.limit = int(seconds * 1e9)
        self.function = kernel(load(PTX), "gate")
        self.memory = Memory(4096, "pinned")
        self.flag = c_uint.from_address(self.memory.address)
        self.open()
        launch(self.function, 1, 1, LEGACY, c_uint64(self.memory.address), c_uint64(self.limit))
        synchronize()

    def close(self, stream, seconds=None):
        """Makes work wait that is enqueued on the stream from here on. Call it only when nothing waits any more."""
        self.flag.value = 0
        limit = self.limit if seconds is None else int(seconds * 1e9)
        launch(self.function, 1, 1, stream, c_uint64(self.memory.address), c_uint64(limit))

    def open(self):
        self.flag.value = 1

    @contextlib.contextmanager
    def closed(self, stream, seconds=None):
        self.close(stream, seconds)
        try:
            yield
        finally:
            self.open()
            wait_for(stream)


# --- graphs -----------------------------------------------------------------------------------------------------------


class Graph:
    """Graph of the work that `with Graph(stream) as graph:` captures on the stream."""

    def __init__(self, stream, mode=THREAD_LOCAL):
        self.stream, self.mode = stream, mode

    def __enter__(self):
        call("cuStreamBeginCapture_v2", c_void_p(self.stream), c_int(self.mode))
        return self

    def __exit__(self, kind, *_):
        graph, executable = c_void_p(), c_void_p()
        code = raw("cuStreamEndCapture", c_void_p(self.stream), byref(graph))
        if kind is not None:
            return
        if code:
            raise DriverError(f"cuStreamEndCapture: {error_name(code)}")
        self.graph = graph.value
        call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
        self.executable = executable.value

    def nodes(self):
        """Returns the kinds of the nodes."""
        count = c_size_t()
        call("cuGraphGetNodes", c_void_p(self.graph), None, byref(count))
        nodes = (c_void_p * max(1, count.value))()
        if count.value:
            call("cuGraphGetNodes", c_void_p(self.graph), nodes, byref(count))
        kinds = []
        for node in nodes[: count.value]:
            kind = c_int()
            call("cuGraphNodeGetType", c_void_p(node), byref(kind))
            kinds.append(kind.value)
        return kinds

    def replay(self, stream):
        call("cuGraphLaunch", c_void_p(self.executable), c_void_p(stream))

    def destroy(self):
        call("cuGraphExecDestroy", c_void_p(self.executable))
        call("cuGraphDestroy", c_void_p(self.graph))
