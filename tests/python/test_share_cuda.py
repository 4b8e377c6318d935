"""Tests of tensors on CUDA for another process, on a driver of host memory (tests/fakes/cuda/libcuda.c): the elements
on both sides, releases, messages of an untrusted sender, and what remains after the driver fails."""

import pytest

from stand_in import run
from tiers import both

SHARES = r'''
import pathlib, resource, signal, socket, struct, traceback
import sharing
from capi import Share, c_strides, check, shape_of
from sharing import COPY, GRANULE, HOST, LAYOUTS, LONG, gpu_message, ended, managed, send
from ctypes import c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p

GPU, OTHER = DLDevice(CUDA, 0), DLDevice(CUDA, 1)

class Properties(ctypes.Structure):
    _fields_ = [("type", c_uint), ("types", c_uint), ("where", c_uint), ("device", c_int), ("rest", c_void_p * 2)]

class Access(ctypes.Structure):
    _fields_ = [("where", c_uint), ("device", c_int), ("flags", c_uint)]

def the_driver():
    # Loads the driver of this process. Call it after a fork.
    global fake
    fake = driver()
    fake.fake_kind.argtypes = c_uint64, c_int
    fake.fake_use.argtypes = c_void_p, c_size_t, c_int, c_void_p
    for name in "cuMemUnmap", "cuMemAddressFree":
        getattr(fake, name).argtypes = c_uint64, c_size_t
    fake.cuMemMap.argtypes = c_uint64, c_size_t, c_size_t, c_uint64, c_uint64
    fake.cuMemSetAccess.argtypes = c_uint64, c_size_t, c_void_p, c_size_t
    fake.cuMemCreate.argtypes = c_void_p, c_size_t, c_void_p, c_uint64
    fake.cuMemAddressReserve.argtypes = c_void_p, c_size_t, c_size_t, c_uint64, c_uint64
    fake.cuMemRelease.argtypes = (c_uint64,)
    return fake

class Mapped:
    # Maps several allocations side by side, as PyTorch's expandable segments do.
    def __init__(self, sizes, device=0, types=1):
        address, handle, self.sizes = c_uint64(), c_uint64(), sizes
        held(1)  # loads the driver
        assert fake.cuMemAddressReserve(byref(address), sum(sizes), 0, 0, 0) == 0
        self.address = at = address.value
        for size in sizes:
            assert fake.cuMemCreate(byref(handle), size, byref(Properties(1, types, 1, device)), 0) == 0
            assert fake.cuMemMap(at, size, 0, handle.value, 0) == 0
            assert fake.cuMemRelease(handle.value) == 0
            at += size
        assert fake.cuMemSetAccess(self.address, sum(sizes), byref(Access(1, device, 3)), 1) == 0

    def free(self):
        at = self.address
        for size in self.sizes:
            assert fake.cuMemUnmap(at, size) == 0
            at += size
        assert fake.cuMemAddressFree(self.address, sum(self.sizes)) == 0

def over(address, array, device=0, dtype=None):
    # Returns the memory at an address, described as the array.
    described = capi.Tensor(array, dtype)
    dl = described.struct.dl_tensor
    dl.data, dl.device = address, DLDevice(CUDA, device)
    return described

def span(tensor):
    # Returns an array over the memory of a tensor's elements, as this process maps it.
    dl = tensor.contents.dl_tensor
    shape, itemsize = shape_of(tensor), dl.dtype.bits // 8
    its = dl.dtype.code, dl.dtype.bits
    dtype = next(np.dtype(d) for d, *known in capi.DTYPES.values() if tuple(known) == its)
    strides = [stride * itemsize for stride in dl.strides[: dl.ndim]] if dl.ndim else []
    low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides))
    high = itemsize + sum(max(0, (n - 1) * s) for n, s in zip(shape, strides))
    memory = (ctypes.c_uint8 * (high - low)).from_address(dl.data + low)
    return np.ndarray(shape, dtype, memory, -low, strides)

def not_sent(tensor, code, *words, flags=0):
    one, other = socket.socketpair()
    with one, other:
        lease = ctypes.POINTER(Share)()
        expect(lib.gc_share_send(managed(tensor), one.fileno(), flags, 0, byref(lease)), code, *words)
        assert not lease
        other.setblocking(False)
        try:
            assert not other.recv(1), "nothing was sent"
        except BlockingIOError:
            pass

def receive(at, device=GPU):
    return sharing.receive(at, device)

def refused(at, device=GPU):
    return sharing.refused(at, device)

def notify(to, text=b"."):
    to.sendall(text)

def await_text(at, text=b"."):
    assert at.recv(len(text), socket.MSG_WAITALL) == text

def descriptors():
    # Returns the open descriptors, to show which one is left.
    return sorted(str(path.readlink()) for path in pathlib.Path("/proc/self/fd").iterdir() if path.exists())

def in_use():
    return len(os.listdir("/proc/self/fd")), fake.fake_opened(), fake.fake_reservations(), fake.fake_physicals()

def two(here, there, environment={}):
    # Runs both functions, each in its own process with its own driver and one end of a socket pair.
    # `gate` is a second pair, for synchronization that no message interrupts.
    global gate
    pairs = socket.socketpair(), socket.socketpair()
    pid = os.fork()
    end, gate = (pair[not pid] for pair in pairs)
    for pair in pairs:
        pair[bool(pid)].close()
    signal.alarm(120)
    os.environ.update(environment if not pid else {})
    the_driver()
    try:
        (here if pid else there)(end)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)
    end.close(), gate.close()
    if not pid:
        sys.stderr.flush()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

'''


def shares(script, **environment):
    run(f"exec({SHARES!r})\n" + __import__("textwrap").dedent(script), **environment)


# The cases have each layout and each kind of memory; each kind has elements that are not contiguous, and no elements.
@pytest.mark.parametrize(
    "layout, memory",
    [("compact", "plain"), ("transposed", "mapped"), ("every other", "a copy"), ("reversed", "plain"), ("reversed", "a copy"),
     ("broadcast", "mapped"), ("broadcast", "a copy"), ("empty", "plain"), ("empty", "mapped"), ("empty", "a copy"),
     ("one element", "plain")],
)  # fmt: skip
def test_both_sides_see_the_same_elements(layout, memory):
    shares(f"""
    memory, view, flags = {memory!r}, LAYOUTS[{layout!r}], COPY if {memory!r} == "a copy" else 0
    whole = np.random.default_rng(3).integers(0, 255, (6, 7, 10)).astype("f8")
    sent, reached = view(whole), view(np.arange(whole.size).reshape(whole.shape)).reshape(-1)
    def here(end):
        if memory == "mapped":
            address = Mapped([GRANULE] * 2).address + GRANULE - 256  # the elements cross the boundary
        else:
            address = held(whole.nbytes).contents.dl_tensor.data
        ctypes.memmove(address, whole.ctypes.data, whole.nbytes)
        offset = sent.ctypes.data - whole.ctypes.data if sent.size else 0
        lease = send(over(address + offset, sent), end, flags)
        await_text(end, b"read")
        np.frombuffer((ctypes.c_uint8 * whole.nbytes).from_address(address), "f8")[:] = 77
        notify(end, b"written")
        await_text(end, b"written too")
        seen = np.frombuffer(ctypes.string_at(address, whole.nbytes), "f8")
        expected = np.full(whole.size, 77.0)
        if not flags:
            expected[reached] = 78
        np.testing.assert_array_equal(seen, expected)
        expect(lib.gc_share_wait(lease, 0), Status.TIMEOUT, "not released")
        notify(end)
        ended(lease)
    def there(end):
        tensor = receive(end, OTHER)
        dl = tensor.contents.dl_tensor
        assert (dl.device.device_type, dl.device.device_id, dl.byte_offset) == (CUDA, 1, 0)
        assert tuple(dl.shape[: dl.ndim]) == sent.shape
        strides = np.ascontiguousarray(sent).strides if flags else sent.strides
        assert [s * sent.itemsize for s in dl.strides[: dl.ndim]] == list(strides) or sent.size < 2
        assert bool(dl.data) == (sent.size > 0)
        if sent.size:
            np.testing.assert_array_equal(span(tensor), sent)
        notify(end, b"read")
        await_text(end, b"written")
        if sent.size:
            assert flags or (span(tensor) == 77).all()
            span(tensor)[...] = 78
        notify(end, b"written too")
        await_text(end)
        lib.gc_tensor_free(tensor)
        assert in_use()[1:] == (0, 0, 0)
    two(here, there)
    """)


def test_elements_of_less_than_a_byte_and_of_several_lanes():
    shares("""
    text = np.random.default_rng(4).integers(0, 255, 24).astype(np.uint8)
    cases = [(capi.DLDataType(1, 4, 1), (3, 5), None), (capi.DLDataType(2, 16, 3), (4,), None),
             (capi.DLDataType(1, 4, 1), (2, 2), (4, 1)), (capi.DLDataType(17, 4, 2), (9,), None)]
    def here(end):
        for dtype, shape, strides in cases:
            memory = on_gpu(text)
            view = memory.struct.dl_tensor
            view.dtype, view.ndim, view.shape = dtype, len(shape), int64s(shape)
            view.strides = strides and int64s(strides)
            ended(send(memory, end))
            if strides:
                not_sent(memory, Status.NOT_CONTIGUOUS, flags=COPY)
            else:
                ended(send(memory, end, COPY))
    def there(end):
        for dtype, shape, strides in cases:
            for _ in range(1 if strides else 2):
                tensor = receive(end)
                view = tensor.contents.dl_tensor
                assert (view.dtype.code, view.dtype.bits, view.dtype.lanes) == (dtype.code, dtype.bits, dtype.lanes)
                assert tuple(view.strides[: view.ndim]) == (strides or c_strides(shape))
                n_bytes = 4 if strides else -(-int(np.prod(shape)) * dtype.bits * dtype.lanes // 8)
                assert ctypes.string_at(view.data, n_bytes) == text[:n_bytes].tobytes()
                lib.gc_tensor_free(tensor)
    two(here, there)
    """)


@pytest.mark.parametrize("parts", [2, 253, 254, 600])
def test_a_tensor_over_many_allocations(parts):
    shares(f"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    step = GRANULE // 4
    def here(end):
        memory = Mapped([GRANULE] * {parts})
        whole = np.ndarray(({parts}, step), "i4", (ctypes.c_uint8 * sum(memory.sizes)).from_address(memory.address))
        whole[:, :2] = np.arange({parts})[:, None]
        before = in_use()
        tensor = over(memory.address + 4 * (step - 1), whole.reshape(-1)[step - 1 : -1])  # within allocations
        lease = send(tensor, end)
        ended(lease)
        assert in_use() == before
        assert (whole[:, 1] == np.arange({parts}) + 1000).all(), "the receiver has not written"
    def there(end):
        before = in_use()
        tensor = receive(end)
        elements = span(tensor)
        assert (elements[1::step] == np.arange(1, {parts})).all() and elements.size == {parts} * step - step
        elements[2::step] += 1000
        assert elements.base is not None
        second = tensor.contents.dl_tensor.data + 4 - 4 * (step - 1)
        fixed = np.ndarray((1,), "i4", (ctypes.c_uint8 * 4).from_address(second))
        fixed += 1000  # in the first allocation, in which the tensor begins
        lib.gc_tensor_free(tensor)
        assert in_use() == before
    two(here, there)
    """)


def test_more_allocations_than_a_message_can_list():
    shares("""
    the_driver()
    memory = Mapped([GRANULE] * 4097)
    whole = np.broadcast_to(np.uint8(0), (4097 * GRANULE,))
    tensor = over(memory.address, np.empty(1, np.uint8))
    tensor.struct.dl_tensor.shape = int64s((4097 * GRANULE,))
    before = in_use()
    not_sent(tensor, Status.SHARE, 4096, "GC_SHARE_COPY")
    assert in_use() == before
    """)


def test_memory_that_cannot_be_shared():
    shares("""
    the_driver()
    tensor = held(1000)
    address = tensor.contents.dl_tensor.data
    for kind, words in (1, "cuMemAllocAsync"), (2, "cuMemAllocManaged"), (3, "of the host"):
        fake.fake_kind(address, kind)
        not_sent(tensor, Status.SHARE, words, "GC_SHARE_COPY", "gc_tensor_empty")
    fake.fake_kind(address, 0)
    for types in 0, 8:
        memory = Mapped([GRANULE], types=types)
        not_sent(over(memory.address, np.ones(10)), Status.SHARE, f"{types:#x}", "POSIX", "GC_SHARE_COPY")
        memory.free()
    memory = Mapped([GRANULE])
    not_sent(over(memory.address + GRANULE - 8, np.ones(10)), Status.SHARE, "cuMemGetAddressRange")
    memory.free()
    not_sent(over(address + 1023, np.ones(2, np.uint8)), Status.INVALID_ARGUMENT, "1 bytes behind")
    elsewhere = np.ones(10)
    not_sent(over(elsewhere.ctypes.data, elsewhere), Status.INVALID_ARGUMENT, "not in memory of CUDA")
    not_sent(over(address, np.ones(10), 7), Status.UNSUPPORTED_DEVICE, "cuda:7", "2 devices")
    many = over(address, np.ones(1))
    view = many.struct.dl_tensor
    view.ndim, view.shape, view.strides = 65, int64s((1,) * 65), None
    not_sent(many, Status.INVALID_ARGUMENT, 65)
    before = fake.fake_in_use(0)
    lib.gc_tensor_free(tensor)
    check(lib.gc_trim(GPU))
    assert in_use()[1:] == (0, 0, 0)
    """)


def test_a_copy_exposes_nothing_else_and_outlives_the_original():
    shares("""
    def here(end):
        tensor = on_gpu(np.arange(1000, dtype="f4"))
        fake.fake_kind(tensor.struct.dl_tensor.data, 1)  # memory of a pool can be copied, too
        before = in_use()
        check(lib.gc_share_send(tensor.managed, end.fileno(), COPY, 0, None))
        assert in_use() == before
        np.frombuffer((ctypes.c_uint8 * 4000).from_address(tensor.struct.dl_tensor.data), "f4")[:] = 0
        await_text(end)
    def there(end):
        tensor = receive(end)
        memory = ctypes.string_at(tensor.contents.dl_tensor.data, GRANULE)
        assert (np.frombuffer(memory, "f4", 1000) == np.arange(1000)).all() and not any(memory[4000:])
        lib.gc_tensor_free(tensor)
        assert in_use()[1:] == (0, 0, 0)
        notify(end)
    two(here, there)
    """)


def test_memory_that_is_kept_is_freed_for_a_copy_and_for_a_codec():
    shares("""
        the_driver()
        import codecs_c
        one, other = socket.socketpair()
        lib.gc_tensor_free(held(5 << 20))  # kept, where there are 10 MiB
        tensor = held(3 << 20)
        assert fake.fake_in_use(0) >= 8 << 20
        lease = send(tensor, one, flags=COPY)
        lib.gc_share_free(lease)
        lib.gc_tensor_free(tensor)
        first, small = held(5 << 20), held(1)
        leases = send(first, one), send(small, one)
        other.recv(4096)  # without its descriptors, the copy is gone
        got = receive(other)
        lib.gc_share_free(leases[0])
        free_all([got, first])
        lib.gc_share_free(leases[1])  # finds that the first lease has ended: no process uses its memory any more
        options = codecs_c.options_of(codecs_c.model_of(codec=codecs_c.ONEBIT, segments=[1 << 21]), GPU)
        codec = ctypes.POINTER(capi.Codec)()
        check(lib.gc_codec_create(byref(options), byref(codec)))
        lib.gc_codec_free(codec)
        lib.gc_tensor_free(small)
    """, FAKE_MEMORY=10 << 20)


def test_both_sides_wait_for_unfinished_work():
    # The driver reports memory that is shared or unmapped while work on it is unfinished.
    shares("""
    def here(end):
        tensor = held(1000)
        mapped = Mapped([GRANULE])
        stream = fake.fake_stream(0)
        other = over(mapped.address, np.ones(9))
        for address, its in (tensor.contents.dl_tensor.data, tensor), (mapped.address, other):
            assert fake.fake_use(address, 72, 1, stream) == 0
            ended(send(its, end))
            assert fake.fake_use(address, 72, 1, stream) == 0
            ended(send(over(address, np.ones(9)), end, COPY))
    def there(end):
        for _ in range(4):
            tensor = receive(end)
            assert fake.fake_use(tensor.contents.dl_tensor.data, 72, 1, fake.fake_stream(0)) == 0
            lib.gc_tensor_free(tensor)
        assert in_use()[1:] == (0, 0, 0)
    two(here, there)
    """)


def test_a_device_of_another_type_or_a_missing_one():
    shares("""
    def here(end):
        mapped = Mapped([GRANULE] * 300)
        for tensor in held(100), over(mapped.address, np.ones(300 * GRANULE // 8)):
            for name in "INVALID_ARGUMENT", "UNSUPPORTED_DEVICE":
                lease = send(tensor, end)
                ended(lease, LONG, Status.SHARE, "GC_STATUS_" + name)
        lease = send(capi.Tensor(np.ones(3)), end)
        ended(lease, LONG, Status.SHARE, "GC_STATUS_INVALID_ARGUMENT")
    def there(end):
        for _ in range(2):
            expect(refused(end, HOST), Status.INVALID_ARGUMENT, "cpu", "CUDA")
            expect(refused(end, DLDevice(CUDA, 9)), Status.UNSUPPORTED_DEVICE, "cuda:9")
        expect(refused(end), Status.INVALID_ARGUMENT, "cuda:0", "cpu")
        assert in_use()[1:] == (0, 0, 0)
    two(here, there)
    """)


@pytest.mark.parametrize("environment", [{}, {"FAKE_PEERS": 0}], ids=str)
@pytest.mark.parametrize("first", [0, 1, 5])
def test_devices_with_other_numbers_in_the_receiver(first, environment):
    shares(f"""
    def here(end):
        mapped = Mapped([GRANULE] * 2, device=1)
        for tensor in held(100, 1), over(mapped.address, np.ones(9), 1):
            for _ in range(2):
                lease = send(tensor, end)
                status = lib.gc_share_wait(lease, LONG)
                assert status == 0 or "UNSUPPORTED_DEVICE" in last_error() or "GC_STATUS_SHARE" in last_error()
                lib.gc_share_free(lease)
    def there(end):
        for _ in range(2):
            for device in GPU, OTHER:
                is_its_own = {first} + device.device_id == 1
                if os.environ.get("FAKE_PEERS") and not is_its_own:
                    if {first} <= 1:
                        expect(refused(end, device), Status.UNSUPPORTED_DEVICE, "cuda:0", "cuda:1", "cannot reach")
                    else:
                        expect(refused(end, device), Status.SHARE, "may not be reached")
                    continue
                tensor = receive(end, device)
                dl = tensor.contents.dl_tensor
                assert dl.device.device_id == device.device_id
                assert fake.fake_use(dl.data, 72, 1, fake.fake_stream(device.device_id)) == 0, "not mapped here"
                lib.gc_tensor_free(tensor)
        assert in_use()[1:] == (0, 0, 0)
    two(here, there, dict(FAKE_FIRST="{first}"))
    """, **environment)


def test_an_allocation_is_opened_once():
    shares("""
    def here(end):
        memory = held(8000)
        address = memory.contents.dl_tensor.data
        leases = [send(over(address + 800 * k, np.ones(100)), end) for k in range(10)]
        for lease in leases:
            ended(lease)
        ended(send(memory, end))
        other = held(8000)
        ended(send(other, end))
    def there(end):
        tensors = [receive(end) for _ in range(10)]
        assert fake.fake_opened() == 1
        assert len({tensor.contents.dl_tensor.data - 800 * k for k, tensor in enumerate(tensors)}) == 1
        for tensor in tensors:
            assert fake.fake_opened() == 1
            lib.gc_tensor_free(tensor)
        for _ in range(2):
            assert fake.fake_opened() == 0
            lib.gc_tensor_free(receive(end))
        assert fake.fake_opened() == 0
    two(here, there)
    """)


def test_threads_that_open_and_release_the_same_allocation():
    shares("""
    def here(end):
        memory = held(8000)
        leases = [send(memory, end) for _ in range(100)]
        for lease in leases:
            ended(lease)
    def there(end):
        for _ in range(25):
            tensors = [receive(end) for _ in range(4)]
            capi.in_threads(4, lambda k: lib.gc_tensor_free(tensors[k]))
            assert fake.fake_opened() == 0
    two(here, there)
    """)


def test_memory_stays_until_the_receiver_releases_it_and_is_not_reused():
    shares("""
    def here(end):
        memory = held(1 << 20)
        address = memory.contents.dl_tensor.data
        (ctypes.c_uint8 * 100).from_address(address)[:] = bytes(range(100))
        leases = [send(memory, end) for _ in range(2)]
        await_text(end)
        lib.gc_tensor_free(memory)
        others = []
        def none_there():
            for _ in range(40):
                others.append(held(1 << 20))
                assert others[-1].contents.dl_tensor.data != address
            free_all(others)
            others.clear()
            check(lib.gc_trim(GPU))
        none_there()
        assert fake.fake_in_use(0) == 1 << 20
        notify(end)
        ended(leases[0])
        none_there()
        assert fake.fake_in_use(0) == 1 << 20, "the receiver still has one tensor"
        notify(end)
        check(lib.gc_share_wait(leases[1], LONG))
        assert fake.fake_in_use(0) == 0
        lib.gc_share_free(leases[1])
        # The sender releases the memory after the receiver has released it.
        memory = held(1 << 20)
        lease = send(memory, end)
        ended(lease)
        frees = fake.fake_frees()
        lib.gc_tensor_free(memory)
        lib.gc_tensor_free(held(1 << 20))
        assert fake.fake_allocations() == fake.fake_frees() + 1 and fake.fake_frees() > frees
    def there(end):
        tensors = [receive(end) for _ in range(2)]
        notify(end)
        for tensor in tensors:
            await_text(end)
            assert ctypes.string_at(tensor.contents.dl_tensor.data, 100) == bytes(range(100))
            lib.gc_tensor_free(tensor)
        lib.gc_tensor_free(receive(end))
    two(here, there)
    """)


def test_a_lease_that_is_refused_or_abandoned():
    shares("""
    def here(end):
        for asks in False, True:
            memory, lease = held(1 << 20), ctypes.POINTER(Share)()
            check(lib.gc_share_send(memory, end.fileno(), 0, 0, byref(lease) if asks else None))
            lib.gc_tensor_free(memory)
            lib.gc_share_free(lease)
            check(lib.gc_trim(GPU))
            notify(gate)
            await_text(gate)
        kept = held(10)
        ended(send(kept, end))  # this call finds the ended leases
        lib.gc_tensor_free(kept)
        check(lib.gc_trim(GPU))
        assert fake.fake_in_use(0) == 1 << 20, "memory that was sent without a lease stays"
    def there(end):
        for _ in range(2):
            await_text(gate)
            tensor = receive(end)
            assert len(ctypes.string_at(tensor.contents.dl_tensor.data, 1 << 20)) == 1 << 20
            lib.gc_tensor_free(tensor)
            notify(gate)
        lib.gc_tensor_free(receive(end))
    two(here, there)
    """)


def test_memory_of_another_allocator_is_not_freed():
    shares("""
    import ctypes
    def here(end):
        held(1)
        address = c_uint64()
        fake.fake_enter(0, 50)
        assert fake.cuMemAlloc_v2(byref(address), c_size_t(1000)) == 0
        lease = send(over(address.value, np.ones(100)), end)
        ended(lease)
        check(lib.gc_trim(GPU))
        assert ctypes.string_at(address.value, 1000) is not None
        assert fake.cuMemFree_v2(address) == 0
    def there(end):
        lib.gc_tensor_free(receive(end))
    two(here, there)
    """)


def test_a_tensor_that_is_sent_back_to_its_process():
    shares("""
    the_driver()
    one, other = socket.socketpair()
    memory, mapped = on_gpu(np.arange(100.0)), Mapped([GRANULE] * 2)
    before = in_use()
    for sent, array, flags in (
        (memory, np.arange(100.0), 0),
        (over(memory.struct.dl_tensor.data + 80, np.arange(100.0)[10:50:3]), np.arange(10, 50, 3.0), 0),
        (over(mapped.address, np.zeros(10)), np.zeros(10), 0), (memory, np.arange(100.0), COPY),
    ):
        lease = send(sent, one, flags)
        got = receive(other)
        np.testing.assert_array_equal(span(got), array)
        if not flags and sent.array is not mapped and sent.struct.dl_tensor.data != mapped.address:
            assert got.contents.dl_tensor.data == sent.struct.dl_tensor.data
        expect(lib.gc_share_wait(lease, 0), Status.TIMEOUT)
        assert fake.fake_use(got.contents.dl_tensor.data, 8, 1, fake.fake_stream(0)) == 0
        lib.gc_tensor_free(got)
        ended(lease, 0)
        assert in_use()[1:] == before[1:]
    lease = send(memory, one)
    expect(refused(other, OTHER), Status.UNSUPPORTED_DEVICE, "cuda:1", "process that has sent it")
    ended(lease, 0, Status.SHARE)
    # A message with another answer socket counts as foreign, even with the same bytes.
    lease = send(memory, one)
    text, numbers, *_ = socket.recv_fds(other, 10_000, 10)
    mine, theirs = socket.socketpair()
    socket.send_fds(one, [text], [theirs.fileno()])
    theirs.close()
    expect(refused(other), Status.SHARE, "cuIpcOpenMemHandle")
    # The sender releases the tensor before the receiver opens it.
    lib.gc_tensor_free(memory.memory)
    socket.send_fds(one, [text], numbers)
    os.close(numbers[0])
    got = receive(other)
    np.testing.assert_array_equal(span(got), np.arange(100.0))
    lib.gc_tensor_free(got)
    ended(lease, 0)
    check(lib.gc_trim(GPU))
    mine.close(), one.close(), other.close()
    mapped.free()
    assert in_use()[1:] == (0, 0, 0) and fake.fake_in_use(0) == 512, "only the tensor that Mapped has made is left"
    """)


def test_a_returned_tensor_with_an_answered_socket_counts_as_foreign():
    shares("""
    the_driver()
    one, other = socket.socketpair()
    memory = on_gpu(np.arange(100.0))
    lease = send(memory, one)
    text, numbers, *_ = socket.recv_fds(other, 10_000, 10)
    os.write(numbers[0], bytes([Status.OK]))
    socket.send_fds(one, [text], numbers)
    expect(refused(other), Status.SHARE, "cuIpcOpenMemHandle")
    os.close(numbers[0])
    ended(lease, 0)
    """)


def test_a_forged_answer_does_not_free_a_returned_tensor():
    shares("""
    the_driver()
    one, other = socket.socketpair()
    memory = held(1 << 20)
    address = memory.contents.dl_tensor.data
    ctypes.memset(address, 7, 1 << 20)
    lease = send(memory, one)
    text, numbers, *_ = socket.recv_fds(other, 10_000, 10)
    socket.send_fds(one, [text], numbers)
    got = receive(other)
    assert got.contents.dl_tensor.data == address
    os.write(numbers[0], bytes([Status.OK]))
    ended(lease, 0)
    lib.gc_tensor_free(memory)
    check(lib.gc_trim(GPU))
    others = [held(1 << 20) for _ in range(4)]
    assert address not in [tensor.contents.dl_tensor.data for tensor in others]
    assert ctypes.string_at(address, 1 << 20) == bytes([7]) * (1 << 20)
    free_all([*others, got])
    check(lib.gc_trim(GPU))
    assert fake.fake_in_use(0) == 0
    """)


def test_a_forked_child_closes_nothing():
    shares("""
    def here(end):
        memory = on_gpu(np.arange(10.0))
        mapped = Mapped([GRANULE])
        leases = [send(tensor, end) for tensor in (memory, over(mapped.address, np.ones(4)))]
        await_text(end)
        pid = os.fork()
        if not pid:
            free_all(leases)
            not_sent(memory, Status.CUDA, "NOT_INITIALIZED")
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        for lease in leases:
            expect(lib.gc_share_wait(lease, 0), Status.TIMEOUT)
        notify(end)
        for lease in leases:
            ended(lease)
    def there(end):
        tensors = [receive(end) for _ in range(2)]
        pid = os.fork()
        if not pid:
            free_all(tensors)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        notify(end)
        await_text(end)
        assert (span(tensors[0]) == np.arange(10)).all()
        free_all(tensors)
        assert in_use()[1:] == (0, 0, 0)
    two(here, there)
    """)


@pytest.mark.parametrize("when", ["before it has taken it", "while it has it"])
def test_a_receiver_that_dies(when):
    shares(f"""
    def here(end):
        mapped, leases = Mapped([GRANULE] * 3), []
        before = in_use()
        for tensor in held(1 << 20), over(mapped.address, np.ones(9)):
            lease = send(tensor, end)
            if isinstance(tensor, Managed):
                lib.gc_tensor_free(tensor)
            leases.append(lease)
        await_text(gate)
        for lease in leases:
            expect(lib.gc_share_wait(lease, 0), Status.TIMEOUT)
        notify(gate)
        for lease in leases:
            ended(lease, LONG, Status.SHARE, "ended without")
        assert in_use() == before and fake.fake_in_use(0) == 512
    def there(end):
        if {when!r} != "before it has taken it":
            tensors = [receive(end) for _ in range(2)]
        notify(gate)
        await_text(gate)
        os._exit(0)
    two(here, there)
    """)


def test_a_sender_that_dies():
    shares("""
    def here(end):
        os.waitpid(pid, 0)
    one, other = socket.socketpair()
    ready, go = os.pipe()
    pid = os.fork()
    if not pid:
        the_driver()
        mapped = Mapped([GRANULE])
        tensor = over(mapped.address, np.ones(9))
        send(tensor, one), send(held(100), one), send(tensor, one, COPY)
        os._exit(0)
    one.close()
    assert os.waitpid(pid, 0)[1] == 0
    the_driver()
    for k in range(3):
        if k == 1:  # the memory was freed
            expect(refused(other), Status.SHARE, "cuIpcOpenMemHandle", "may have ended")
        else:
            lib.gc_tensor_free(receive(other))
    expect(refused(other), Status.SHARE, "closed it")
    assert in_use()[1:] == (0, 0, 0)
    """)


# --- messages of an untrusted sender ----------------------------------------------------------------------------------

UNTRUSTED = r"""
def part(size=GRANULE, name="stand-in part 0 1"):
    file = os.memfd_create(name)
    os.truncate(file, size)
    return file

class UntrustedSender(sharing.UntrustedSender):
    def __enter__(self):
        self.before = in_use()
        return self

    def send(self, text, files=None):
        super().send(text, [part(), part()] if files is None else files)

    def __exit__(self, *_):
        closed = sum(end.fileno() < 0 for end in (self.at, self.end, self.mine, self.theirs))
        assert in_use() == (self.before[0] - closed, *self.before[1:]), descriptors()
        super().__exit__()

the_driver()
lib.gc_tensor_free(held(1))
"""

# These messages are wrong on CUDA alone; test_share.py has the others.
HOSTILE = [
    (dict(length=152 + 8 - 1), []),
    (dict(length=2**32 - 1), [2**32 - 1]),
    (dict(length=136 + 8 * 4097), []),
    (dict(ndim=3), []),
    (dict(device=10), [10]),
    (dict(device=-1), []),
    (dict(n_bytes=4 << 20 | 1), ["4194305 bytes", "2 parts"]),
    (dict(n_bytes=-1), ["-1 bytes"]),
    (dict(n_bytes=2**63 - 1), [2**63 - 1]),
    (dict(parts=(2 << 20, 0)), ["parts of other sizes"]),
    (dict(parts=(2**63, 2**63 + (4 << 20))), ["parts of other sizes"]),
    (dict(parts=(2**64 - 1, (4 << 20) + 1)), ["parts of other sizes"]),
    (dict(parts=(4 << 20, 4 << 20)), ["parts of other sizes"]),
    (dict(shape=(2**62,)), ["not within"]),
    (dict(shape=(2**20 + 1,)), ["not within", 4194304]),
    (dict(shape=(2**20,), offset=1), ["not within"]),
    (dict(offset=2**64 - 1), ["not within"]),
    (dict(offset=4194304 - 36), ["not within"]),
    (dict(strides=(-1,)), ["not within", "[-1]"]),
    (dict(strides=(-1,), offset=35), ["not within"]),
    (dict(strides=(2**63 - 1,)), ["not within"]),
    (dict(strides=(-(2**63),)), ["not within"]),
    (dict(shape=(2**32, 2**32), strides=(0, 0)), ["2^63"]),
    (dict(dtype=(1, 4, 1), offset=4194304 - 4), ["not within"]),
    (dict(shape=(0,)), ["no element"]),
]  # fmt: skip


def test_inconsistent_messages():
    shares(f"""
    exec({UNTRUSTED!r})
    for fields in dict(), dict(strides=(-1,), offset=36), dict(shape=(2**40,), strides=(0,)), dict(shape=(), strides=()):
        with UntrustedSender() as sender:
            sender.send(gpu_message(**fields))
            tensor = receive(sender.end)
            assert fake.fake_reservations() == 1
            lib.gc_tensor_free(tensor)
            assert sender.answer() == b"\\0"
    with UntrustedSender() as sender:
        sender.send(gpu_message(shape=(0,), n_bytes=0, parts=()), [])
        tensor = receive(sender.end)
        assert not tensor.contents.dl_tensor.data
        lib.gc_tensor_free(tensor)
        assert sender.answer() == b"\\0"
    calls = fake.fake_calls()
    for fields, words in {HOSTILE!r}:
        with UntrustedSender() as sender:
            sender.send(gpu_message(**fields))
            sender.at.close()
            status = refused(sender.end)
            assert status in (Status.CORRUPT, Status.SHARE), (fields, status, last_error())
            assert status == Status.CORRUPT or "closed it" in last_error(), fields
            assert all(str(word) in last_error() for word in words), (fields, last_error())
            assert sender.answer() == b""
    assert fake.fake_calls() == calls, "the driver was called"
    """)


def test_descriptors_and_handles_of_other_objects():
    shares(f"""
    exec({UNTRUSTED!r})
    for what, files, status, words in (
        ("none", lambda: [], Status.CORRUPT, ["1 descriptors", "3 expected"]),
        ("one", lambda: [part()], Status.CORRUPT, ["2 descriptors"]),
        ("three", lambda: [part() for _ in range(3)], Status.CORRUPT, ["4 descriptors"]),
        ("300", lambda: [part()] * 300, Status.CORRUPT, ["301 descriptors"]),
        ("5000", lambda: [part()] * 5000, Status.CORRUPT, ["4097 and more"]),
        ("files", lambda: [os.open("/dev/null", os.O_RDWR) for _ in range(2)], Status.SHARE, ["cuMemImport"]),
        ("sockets", lambda: [os.dup(sender.mine.fileno()) for _ in range(2)], Status.SHARE, ["cuMemImport"]),
        ("the second is none", lambda: [part(), part(name="file")], Status.SHARE, ["cuMemImport"]),
        ("smaller", lambda: [part(), part(GRANULE // 2)], Status.SHARE, ["cuMemMap"]),
    ):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if what == "5000":
            if hard < 12_000:
                continue
            resource.setrlimit(resource.RLIMIT_NOFILE, (12_000, hard))
        with UntrustedSender() as sender:
            sender.at.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            sender.send(gpu_message(), files())
            expect(refused(sender.end), status, *words)
            # The receiver answers only if the number of descriptors is right, because then the last one is a socket.
            assert sender.answer() == (bytes([status]) if status == Status.SHARE else b""), what
    for handle in b"", b"x" * 64, b"stand-in" + bytes(56), b"stand-in" + struct.pack("=iiiQQ", 1, 0, 0, 0, 100):
        with UntrustedSender() as sender:
            sender.send(gpu_message(parts=(), n_bytes=100, handle=handle), [])
            expect(refused(sender.end), Status.SHARE, "cuIpcOpenMemHandle", "100 bytes")
            assert sender.answer() == bytes([Status.SHARE])
    """)


def test_a_handle_of_less_memory_than_the_message_states():
    shares(f"""
    def here(end):
        lease = send(on_gpu(np.ones(100, "f4")), end)
        ended(lease, LONG, Status.SHARE, "GC_STATUS_CORRUPT")
        await_text(end)
    def there(end):
        exec({UNTRUSTED!r}, globals())
        text, files, *_ = socket.recv_fds(end, 10_000, 10)
        handle = text[32 + 16 + 8 : 32 + 16 + 8 + 64]
        with UntrustedSender() as sender:
            socket.send_fds(sender.at, [gpu_message(parts=(), n_bytes=1001, handle=handle, shape=(1,))], files)
            expect(refused(sender.end), Status.CORRUPT, 1001, "489 are not there")
        os.close(files[0])
        notify(end)
    two(here, there)
    """)


# --- a driver that fails ----------------------------------------------------------------------------------------------

EVERY_CALL = r"""
# No status reports a failure of these calls: they free something, or restore a context.
GIVES_BACK = ("cuMemUnmap", "cuMemAddressFree", "cuMemRelease", "cuIpcCloseMemHandle", "cuCtxPopCurrent_v2",
              "cuThreadExchangeStreamCaptureMode")
# If one of these fails in a release, the context counts as destroyed, together with the memory opened in it.
CONTEXT = "cuCtxGetId", "cuCtxGetCurrent", "cuCtxPushCurrent_v2"
# If one of these fails, the library could not wait for the work on the memory.
kept = []

def each_call(call, after):
    # Fails each driver call within a call in turn, and checks that the same resources are in use as before.
    before = in_use()
    for number in range(400):
        got, failed = failing(fake, number, CODE, call)
        if got:
            assert got in STATUSES, (failed, got, last_error())
            assert CODE in (2, 201) or failed.removesuffix("_v2") in last_error(), (failed, last_error())
        after(got, failed)
        stays = failed in GIVES_BACK or TRIED in ("release", "wait") and failed in CONTEXT or failed in kept
        now = in_use()
        assert now == before or stays, (failed, now, before, descriptors())
        before = now
        if not failed:
            assert number > 3, number
            return
    raise AssertionError("no end")

def here(end):
    mapped = Mapped([GRANULE] * 3)
    check(lib.gc_prepare(GPU))
    ended(send(on_gpu(np.ones(1)), end))
    def made():
        return held(5000) if KIND == "plain" else over(mapped.address + GRANULE - 8, np.ones(GRANULE // 8 + 2)).managed
    if TRIED == "send":
        lease = ctypes.POINTER(Share)()
        tensor = made()
        notify(gate, b"sent")
        ended(send(tensor, end, FLAGS))
        def after(got, failed):
            nonlocal lease
            if got:
                assert not lease
            else:
                notify(gate, b"sent")
                ended(lease)
                lease = ctypes.POINTER(Share)()
        each_call(lambda: lib.gc_share_send(tensor, end.fileno(), FLAGS, LONG, byref(lease)), after)
        notify(gate, b"done")
        return
    def sent():
        tensor = made()
        lease = send(tensor, end, FLAGS)
        notify(gate, b"sent")
        if KIND == "plain":
            lib.gc_tensor_free(tensor)
        return lease
    if TRIED == "wait":
        for number in range(60):
            lease = sent()
            await_text(gate)
            _, failed = failing(fake, number, CODE, lambda: check(lib.gc_share_wait(lease, LONG)))
            lib.gc_share_free(lease)
            if not failed:
                break
        assert not failed and number >= (KIND == "plain" and not FLAGS), number
        notify(gate, b"done")
        check(lib.gc_trim(GPU))
        assert fake.fake_in_use(0) == 1024, "unused memory is not freed"
        return
    while gate.recv(4, socket.MSG_WAITALL) == b"next":
        lease = sent()
        if TRIED == "release" and gate.recv(4, socket.MSG_WAITALL) == b"kept":
            expect(lib.gc_share_wait(lease, 0), Status.TIMEOUT, "not released")
        else:
            assert lib.gc_share_wait(lease, LONG) in (0, Status.SHARE), last_error()
        lib.gc_share_free(lease)

def there(end):
    held(1)
    lib.gc_tensor_free(receive(end))
    if TRIED in ("send", "wait"):
        while gate.recv(4, socket.MSG_WAITALL) == b"sent":
            lib.gc_tensor_free(receive(end))
            if TRIED == "wait":
                notify(gate)
        return
    out = Managed()
    def call():
        notify(gate, b"next")
        await_text(gate, b"sent")
        if TRIED == "receive":
            return lib.gc_share_receive(end.fileno(), GPU, LONG, byref(out))
        # The requested failure is for the release that follows.
        number = fake.fake_left()
        fake.fake_fail_call(-1, 0)
        out_of = receive(end)
        before = in_use()
        fake.fake_fail_call(number, CODE)
        lib.gc_tensor_free(out_of)
        # Memory whose work did not complete stays mapped, and its answer socket stays open.
        if in_use()[0] == before[0]:
            assert CODE != 700 and in_use() == before, (in_use(), before)
            kept.append(fake.fake_failed_call().decode())
            notify(gate, b"kept")
        else:
            notify(gate, b"free")
        return 0
    def after(got, failed):
        nonlocal out
        assert bool(out) == (not got and TRIED == "receive")
        lib.gc_tensor_free(out)
        out = Managed()
    each_call(call, after)
    notify(gate, b"done")
    assert bool(kept) == (TRIED == "release" and CODE != 700), kept

two(here, there)
"""


@pytest.mark.parametrize("tried", ["send", "wait", "receive", "release"])
@pytest.mark.parametrize(
    "kind, flags, code",
    both(
        quick=[("plain", 0, 2), ("plain", 0, 700), ("plain", 0, 123456), ("mapped", 0, 123456), ("plain", 1, 123456)],
        all=[(*memory, code) for memory in [("plain", 0), ("mapped", 0), ("plain", 1)] for code in (2, 700, 123456)],
    ),
)
def test_every_failed_driver_call_leaks_nothing(tried, kind, flags, code):
    statuses = {2: "(Status.OUT_OF_MEMORY,)", 700: "(Status.CONTEXT_LOST,)", 123456: "(Status.SHARE, Status.CUDA)"}[code]
    head = f"TRIED, KIND, FLAGS, CODE, STATUSES = {tried!r}, {kind!r}, {flags}, {code}, {statuses}\n"
    shares(head + EVERY_CALL)
