"""Copies on GPUs, with their kernels, on a driver that runs these on the host.

A copy on a GPU has to write the same bytes as a copy on the CPU (which test_copy.py compares with NumPy): under the
elements, between them and around them.
"""

import pytest

from stand_in import run
from tiers import both, each_code

WORK = r"""
fake = driver()
capi.check(lib.gc_prepare(DLDevice(CUDA, 0)))
fake.fake_enter(0, 100)
DTYPES = ("bool", *capi.INTEGERS, *capi.FLOATS)
from layouts import MARGIN, Layout, move, random_bytes, random_layout, random_shape

def at(layout, address, device=DLDevice(1, 0)):
    buffer = layout.buffer()
    return move(layout.describe(buffer), buffer.ctypes.data, address, device)

CPU, HOST = DLDevice(1, 0), DLDevice(3, 0)

def gpu(index):
    return DLDevice(CUDA, index)

class Memory:
    # Holds bytes in pageable, pinned or GPU memory.
    def __init__(self, device, contents):
        self.device, self.size = device, contents.size
        if device.device_type == CUDA:
            self.tensor = held(contents.size, device.device_id)
            self.address = self.tensor.contents.dl_tensor.data
        elif device.device_type == 3:
            place = ctypes.c_void_p()
            assert fake.cuMemHostAlloc(byref(place), ctypes.c_size_t(contents.size), 1) == 0
            self.address = place.value
        else:
            self.array = np.empty(contents.size, np.uint8)
            self.address = self.array.ctypes.data
        ctypes.memmove(self.address, contents.ctypes.data, contents.size)

    def read(self):
        return np.frombuffer(ctypes.string_at(self.address, self.size), np.uint8)

    def free(self):
        if self.device.device_type == CUDA:
            lib.gc_tensor_free(self.tensor)
        elif self.device.device_type == 3:
            fake.cuMemFreeHost(ctypes.c_void_p(self.address))

def copies_as_on_the_cpu(rng, source, target, source_device, target_device, stream=None):
    contents, before = random_bytes(rng, source), random_bytes(rng, target)
    expected, src = before.copy(), Memory(source_device, contents)
    made, wanted = at(source, contents.ctypes.data), at(target, expected.ctypes.data)
    capi.check(lib.gc_copy_into(made.view, wanted.view, None))
    dst = Memory(target_device, before)
    there, here = at(source, src.address, source_device), at(target, dst.address, target_device)
    capi.check(lib.gc_copy_into(there.view, here.view, stream))
    fake.fake_finish()
    found, kernel = dst.read(), fake.fake_last_launch().decode()
    wrong = np.flatnonzero(found != expected)
    first = f"the first at {wrong[0]} of {found.size}" if wrong.size else ""
    assert wrong.size == 0, f"{kernel}: {source} to {target}: {wrong.size} bytes differ, {first}"
    src.free(), dst.free()
    return kernel
"""


def work(script, **environment):
    return run("WORK = r'''" + WORK + "'''\nexec(WORK)\n" + __import__("textwrap").dedent(script), **environment)


def test_usual_layouts_use_their_special_kernels():
    work("""
        rng = np.random.default_rng(1)
        casts = [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"), ("float16", "float32"),
                 ("float64", "float32"), ("float32", "float64")]
        short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
        def kernel(source, target, shape, order=(0, 1), shifts=(0, 0), steps=(1, 1), row=0):
            size = np.dtype(capi.DTYPES[source][0]).itemsize
            out = np.dtype(capi.DTYPES[target][0]).itemsize
            return copies_as_on_the_cpu(
                rng, Layout(source, shape, order, steps, shifts[0] * size, row=row),
                Layout(target, shape, (0, 1), (1, 1), shifts[1] * out), gpu(0), gpu(0),
            )
        for source, target in casts:
            name = f"gc_cast_rows_{short[source]}_{short[target]}"
            for shape in (1, 5000), (1, 5001), (37, 700), (300, 9), (1, 1):
                for shifts, row in ((0, 0), 0), ((1, 0), 1), ((0, 1), 4), ((3, 2), 0), ((5, 5), 1):
                    assert kernel(source, target, shape, shifts=shifts, row=row) == name
            if "float64" not in (source, target):
                for shape in (64, 64), (65, 130), (17, 200):
                    for shifts in (0, 0), (1, 0), (0, 1), (1, 1):
                        assert kernel(source, target, shape, (1, 0), shifts) == name.replace("rows", "transposed")
        for dtype, bits in ("uint8", 8), ("bfloat16", 16), ("float32", 32), ("float64", 64):
            for shape in (128, 128), (65, 130), (200, 17), (131, 257):
                for shifts, row in ((0, 0), 1), ((1, 0), 0), ((0, 1), 4), ((2, 1), 1), ((0, 3), 0):
                    assert kernel(dtype, dtype, shape, (1, 0), shifts, row=row) == f"gc_copy_transposed_u{bits}"
            rows = "gc_copy_rows" + (f"_u{bits}" if bits >= 32 else "")
            if bits < 32:  # the driver copies bytes that lie alike within words
                for shifts in (1, 0), (0, 3):
                    assert kernel(dtype, dtype, (1, 20000), shifts=shifts) == "gc_copy_rows"
            assert kernel(dtype, dtype, (30, 130), row=1) == rows
            apart = f"gc_copy_gathered_u{bits}" if bits < 32 else "gc_copy_general"
            for steps in (1, 2), (1, 3):
                assert kernel(dtype, dtype, (30, 130), steps=steps) == apart
            assert kernel(dtype, dtype, (30, 130), steps=(1, -1)) == f"gc_copy_gathered_u{bits}"  # short rows
            assert kernel(dtype, dtype, (3, 600), steps=(1, -1)) == apart
            # Channels of pixels, last to first and back: words of the target, wherever it begins.
            for shape, order in ((3, 130), (1, 0)), ((130, 3), (1, 0)), ((5, 3, 70), (0, 2, 1)), ((5, 70, 3), (0, 2, 1)):
                for shifts in (0, 0), (1, 0), (0, 1), (2, 3):
                    layouts = Layout(dtype, shape, order, (1,) * len(shape), shifts[0] * bits // 8), Layout(
                        dtype, shape, tuple(range(len(shape))), (1,) * len(shape), shifts[1] * bits // 8
                    )
                    assert copies_as_on_the_cpu(rng, *layouts, gpu(0), gpu(0)) == f"gc_copy_gathered_u{bits}"
        assert kernel("int64", "float16", (70, 33), (1, 0)) == "gc_cast_transposed"
        assert kernel("int64", "float16", (70, 33)) == "gc_cast_general"
        for shifts in (0, 0), (1, 0), (0, 1), (5, 2):
            for row in 0, 1:
                assert kernel("uint8", "int16", (70, 333), shifts=shifts, row=row) == "gc_cast_rows"
                assert kernel("int32", "bool", (70, 333), shifts=shifts, row=row) == "gc_cast_rows"
    """)


def test_copies_without_peer_access_match_the_cpu():
    work(f"""
        for seed in range({both(quick=20, all=60)}):
            rng = np.random.default_rng(1000 + seed)
            shape = random_shape(rng)
            dtypes = [str(rng.choice(DTYPES)) for _ in range(2)]
            if rng.random() < 0.5:
                dtypes[1] = dtypes[0]
            source, target = (random_layout(rng, [dtype], shape, writable=k == 1) for k, dtype in enumerate(dtypes))
            copies_as_on_the_cpu(rng, source, target, gpu(1), gpu(0))
    """, FAKE_PEERS=0)


@pytest.mark.parametrize("places, dtypes", [
    ("CPU, gpu(0)", "float32 bfloat16"), ("gpu(0), CPU", "uint8 uint8"), ("gpu(0), CPU", "float32 bfloat16"),
    ("gpu(1), gpu(0)", "uint8 uint8"),
])  # fmt: skip
def test_a_staging_buffer_is_reused_after_its_copy_is_done(places, dtypes):
    # The copy takes five pieces. The driver does nothing before it is waited for.
    work(f"""
        rng, (source, target) = np.random.default_rng(6), {dtypes!r}.split()
        shape = (17 << 20) // np.dtype(capi.DTYPES[target][0]).itemsize, 1
        layouts = [Layout(dtype, shape, (0, 1), (1, 1), 0) for dtype in (source, target)]
        contents, before = (random_bytes(rng, layout) for layout in layouts)
        expected = before.copy()
        capi.check(lib.gc_copy_into(at(layouts[0], contents.ctypes.data).view,
                                    at(layouts[1], expected.ctypes.data).view, None))
        (from_, to), stream = ({places}), ctypes.c_void_p(fake.fake_stream_here())
        src, dst = Memory(from_, contents), Memory(to, before)
        fake.fake_late(1)
        capi.check(lib.gc_copy_into(at(layouts[0], src.address, from_).view, at(layouts[1], dst.address, to).view, stream))
        assert (dst.read() == expected).all()
        fake.fake_late(0)
    """, FAKE_PEERS=0)


def test_contexts_in_turn_keep_a_staging_buffer_each():
    work("""
        pinned, values = [], capi.Tensor(np.arange(1000, dtype="f4"))
        for context in [101, 102] * 3:
            fake.fake_enter(0, context)
            tensor = held(4000)
            capi.check(lib.gc_copy_into(values.view, like(tensor, values.array).view, None))
            lib.gc_tensor_free(tensor)
            fake.fake_leave()
            pinned.append(fake.fake_pinned())
        assert pinned == [1, 2, 2, 2, 2, 2], pinned
    """)


COPIES = {
    "bytes": ("float32", "float32", "gpu(0)", "gpu(0)", 1),
    "a cast": ("float32", "bfloat16", "gpu(0)", "gpu(0)", 1),
    "from pageable": ("float32", "bfloat16", "CPU", "gpu(0)", 1),
    "to pageable": ("float32", "float32", "gpu(0)", "CPU", 1),
    "from pinned": ("float32", "float32", "HOST", "gpu(0)", 1),
    "between GPUs": ("float32", "float32", "gpu(1)", "gpu(0)", 1),
    "between GPUs, a cast": ("float32", "bfloat16", "gpu(1)", "gpu(0)", 1),
    "between GPUs that do not reach each other, a cast": ("float32", "bfloat16", "gpu(1)", "gpu(0)", 0),
}

# Copies on one device, with memory that is staged, and with two contexts.
FEW = ["bytes", "from pageable", "between GPUs, a cast"]

PREPARED = """
def prepared(source, target, places, n=5000):
    fake.fake_leave()
    enter_primary(fake)
    rng = np.random.default_rng(3)
    layouts = [Layout(dtype, (n,), (0,), (1,), 0) for dtype in (source, target)]
    memories = [Memory(place, random_bytes(rng, layout)) for place, layout in zip(places, layouts)]
    src, dst = (at(layout, memory.address, place) for layout, memory, place in zip(layouts, memories, places))
    expected = memories[1].read().copy()
    contents = memories[0].read()
    made, wanted = (at(layout, array.ctypes.data) for layout, array in zip(layouts, (contents, expected)))
    capi.check(lib.gc_copy_into(made.view, wanted.view, None))
    return memories, src, dst, expected
"""


@pytest.mark.parametrize("name, code", [(name, code) for name, code, _ in each_code(COPIES, few=FEW)])
def test_every_call_of_the_driver_may_fail_in_a_copy(name, code):
    source, target, *places, peers = COPIES[name]
    work(f"""
        exec({PREPARED!r})
        memories, src, dst, expected = prepared({source!r}, {target!r}, ({places[0]}, {places[1]}))
        copy = lambda: lib.gc_copy_into(src.view, dst.view, None)
        status = {{2: Status.OUT_OF_MEMORY, 700: Status.CONTEXT_LOST}}.get({code}, Status.CUDA)
        capi.check(lib.gc_prepare(gpu(1)))
        failed_calls = set()
        for fresh in True, False:  # first calls, and calls after the first
            for number in range(100):
                if fresh:
                    capi.check(lib.gc_trim(gpu(0)))
                fake.fake_finish()
                pinned, events, depth = fake.fake_pinned(), fake.fake_events(), fake.fake_depth()
                # If a call cannot leave a context, the driver reports later calls in the wrong context.
                stderr = os.dup(2)
                if not {peers}:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                got, failed = failing(fake, number, {code}, copy)
                os.dup2(stderr, 2)
                make_good(fake, failed)
                assert (fake.fake_depth(), fake.fake_capture_mode()) == (depth, 0), failed
                if not failed:
                    assert got == 0, last_error()
                    break
                failed_calls.add(failed)
                if got and "Pop" not in failed:
                    named = failed.removesuffix("_v2") in last_error() or {code} == 2
                    assert got == status and named, (failed, got, last_error())
                elif not got:
                    # These failures are no errors: the driver does not own the memory, no context is current, or no
                    # status can be returned.
                    unchecked = (
                        "cuPointerGetAttribute", "cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode",
                        "cuMemFreeHost", "cuEventDestroy_v2",
                    )
                    assert failed in unchecked or (failed, {code}) == ("cuCtxGetId", 201), failed + " is not checked"
                capi.check(copy())
                fake.fake_finish()
                assert (memories[1].read() == expected).all(), failed
            assert 0 < number < 99, number
        assert "cuStreamIsCapturing" in failed_calls or "pageable" not in {name!r}
    """, FAKE_PEERS=peers)


@pytest.mark.parametrize("name", COPIES)
def test_waiting_copies_are_refused_in_a_capture_without_effect(name):
    source, target, *places, peers = COPIES[name]
    waits = "pageable" in name or not peers
    work(f"""
        exec({PREPARED!r})
        memories, src, dst, expected = prepared({source!r}, {target!r}, ({places[0]}, {places[1]}))
        before = memories[1].read().copy()
        stream = ctypes.c_void_p(fake.fake_stream(0))
        capi.check(lib.gc_prepare(gpu(0)))
        fake.fake_capture(1)
        launches, pinned, waited = fake.fake_launches(), fake.fake_pinned(), fake.fake_waits()
        got = lib.gc_copy_into(src.view, dst.view, stream)
        if {waits}:
            expect(got, Status.INVALID_ARGUMENT, "stream", "capture")
            assert (fake.fake_launches(), fake.fake_pinned()) == (launches, pinned)
            assert (memories[1].read() == before).all()
        else:
            assert got == 0, last_error()
            assert (memories[1].read() == expected).all()
        assert fake.fake_waits() == waited, "a call in a capture has waited"
    """, FAKE_PEERS=peers)


def test_memory_of_the_cpu_that_is_pinned_is_not_staged():
    work("""
        rng = np.random.default_rng(2)
        layout, narrow = Layout("float32", (5000,), (0,), (1,), 0), Layout("bfloat16", (5000,), (0,), (1,), 0)
        contents = random_bytes(rng, layout)
        memory, there = Memory(HOST, contents), Memory(gpu(0), np.zeros(contents.size, np.uint8))
        pinned, waits = fake.fake_pinned(), fake.fake_waits()
        for target in layout, narrow:
            on_host, on_device = at(layout, memory.address, CPU), at(target, there.address, gpu(0))
            capi.check(lib.gc_copy_into(on_host.view, on_device.view, None))
            capi.check(lib.gc_copy_into(on_device.view, on_host.view, None))
        assert fake.fake_pinned() == pinned and fake.fake_waits() >= waits + 4
    """)


@pytest.mark.parametrize("hole", [0, 4096])
def test_memory_of_the_cpu_that_is_pinned_in_two_pieces_is_staged(hole):
    work(f"""
        layout = Layout("float32", (5000,), (0,), (1,), 0)
        contents = random_bytes(np.random.default_rng(2), layout)
        memory, there = Memory(CPU, contents), Memory(gpu(0), np.zeros(contents.size, np.uint8))
        half = contents.size // 2
        for begin, end in (0, half), (half + {hole}, contents.size):
            fake.fake_register(ctypes.c_void_p(memory.address + begin), ctypes.c_size_t(end - begin))
        pinned = fake.fake_pinned()
        capi.check(lib.gc_copy_into(at(layout, memory.address, CPU).view, at(layout, there.address, gpu(0)).view, None))
        assert fake.fake_pinned() == pinned + 1, "two registrations pin the ends, so the copy must stage"
        margin = slice(MARGIN, contents.size - MARGIN)
        assert (there.read()[margin] == contents[margin]).all()
    """)


@pytest.mark.parametrize("unknown", ["", "cuPointerGetAttribute=1"])
@pytest.mark.parametrize("kind", [0, 1])
def test_a_kernel_reads_memory_of_another_gpu_only_with_peer_access(kind, unknown):
    work(f"""
        rng = np.random.default_rng(4)
        source, target = Layout("float32", (3000,), (0,), (1,), 0), Layout("bfloat16", (3000,), (0,), (1,), 0)
        contents, before = (random_bytes(rng, layout) for layout in (source, target))
        expected = before.copy()
        copy = lambda src, dst, stream=None: lib.gc_copy_into(at(source, *src).view, at(target, *dst).view, stream)
        capi.check(copy((contents.ctypes.data,), (expected.ctypes.data,)))
        enter_primary(fake)
        src, dst = Memory(gpu(1), contents), Memory(gpu(0), before)
        there, here = (src.address, gpu(1)), (dst.address, gpu(0))
        fake.fake_kind(ctypes.c_uint64(src.address), {kind})
        fake.fake_finish()
        capi.check(lib.gc_prepare(gpu(0))), capi.check(lib.gc_prepare(gpu(1)))
        fail(**dict([{unknown!r}.split("=")] if {unknown!r} else ()))
        staged = bool({kind} or {unknown!r})
        # In a capture, no part of a staged copy is enqueued.
        stream, launches, pinned = ctypes.c_void_p(fake.fake_stream(0)), fake.fake_launches(), fake.fake_pinned()
        fake.fake_capture(1)
        status = copy(there, here, stream)
        fake.fake_capture(0)
        if staged:
            expect(status, Status.INVALID_ARGUMENT, "stream", "capture")
            assert (fake.fake_launches(), fake.fake_pinned()) == (launches, pinned)
            assert (dst.read() == before).all()
        else:
            assert status == 0, last_error()
        fake.fake_finish()
        # This work on the legacy stream of the source's GPU is unrelated to the copy.
        other = Memory(gpu(1), contents)
        enter_primary(fake, 1)
        assert fake.fake_use(ctypes.c_void_p(other.address), ctypes.c_size_t(1), 1, None) == 0
        assert fake.cuCtxPopCurrent_v2(byref(ctypes.c_void_p())) == 0
        launches = fake.fake_launches()
        capi.check(copy(there, here, stream))
        assert fake.fake_pending() == (1 if staged else 3), "a staged copy is pending, or unrelated work is not"
        assert fake.fake_launches() == launches + 1
        assert fake.fake_pinned() == pinned + staged
        assert (dst.read() == expected).all()
    """)


def test_a_failed_compact_copy_leaks_no_memory_on_any_device():
    work("""
        enter_primary(fake)
        matrix = np.arange(300, dtype="f4").reshape(20, 15)
        for source in CPU, gpu(0):
            src = capi.Tensor(matrix.T) if source is CPU else on_gpu(matrix)
            if source is not CPU:
                src = like(src.memory, matrix.T)
            in_use = [fake.fake_in_use(k) for k in range(2)]
            for device in CPU, gpu(0), gpu(1):
                for number in range(100):
                    out = Managed()
                    fake.fake_finish()
                    if source is not CPU:  # the source is still written on its legacy stream
                        begin = src.memory.contents.dl_tensor.data
                        assert fake.fake_use(ctypes.c_void_p(begin), ctypes.c_size_t(1200), 1, None) == 0
                    copy = lambda: lib.gc_tensor_to_device(src.managed, device, byref(out))
                    status, failed = failing(fake, number, 999, copy)
                    make_good(fake, failed)
                    if status:
                        assert not out, failed
                    else:
                        # If a context could not be left, the call waited for the legacy stream of another context.
                        assert fake.fake_pending() == 0 or "Pop" in failed, f"{failed}: not done when the call returned"
                        view = out.contents.dl_tensor
                        found, wanted = ((place.device_type, place.device_id) for place in (view.device, device))
                        assert found == wanted
                        assert (from_gpu(out, (15, 20), "f4") == matrix.T).all(), failed
                        lib.gc_tensor_free(out)
                    for k in range(2):
                        capi.check(lib.gc_trim(gpu(k)))
                        assert fake.fake_in_use(k) == in_use[k], failed
                    if not failed:
                        break
                else:
                    raise AssertionError("it never ends")
        assert fake.fake_pinned() == 0
    """)
