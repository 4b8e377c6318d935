"""Copies and casts on the device and from and to the host, against NumPy, torch, and the same library on the CPU."""

import ctypes
from ctypes import byref, c_size_t, c_uint, c_void_p

import numpy as np
import pytest

import capi
import driver
import gpu
import layouts
from capi import CPU, CUDA_HOST, DTYPES, FLOATS, INTEGERS, Status, check, lib
from layouts import Layout, assert_written, case, random_bytes, random_layout, random_shape
from test_copy import edges
from tiers import both

CASTS = ("bool", *INTEGERS, *FLOATS)
BLOCKS, CASES = gpu.sized(gpu=4, quick=1, all=4), gpu.sized(gpu=150, quick=40, all=60)

blocks = pytest.mark.parametrize("block", range(BLOCKS))


def of(dtype):
    return np.dtype(DTYPES[dtype][0])


def seeds(block):
    return range(block * CASES, (block + 1) * CASES)


class Host:
    """Memory of the host, pinned or not, like the memory of the device in gpu.Bench."""

    def __init__(self, kind, size):
        self.kind, self.size = kind, size
        if kind == "pinned":
            self.memory = driver.Memory(size, "pinned")
            self.address = self.memory.address
            self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))
        else:
            self.bytes = np.zeros(size, np.uint8)
            self.address = self.bytes.ctypes.data
        self.device = gpu.device(0, CUDA_HOST if kind == "pinned" else CPU)

    def free(self):
        if self.kind == "pinned":
            self.memory.free()


class Arena:
    def __init__(self, size, index=0):
        self.size, self.device = size, gpu.device(index)
        self.memory = driver.Memory(size)
        self.address = self.memory.address

    def resize(self, size):
        self.memory.resize(size)
        self.size, self.address = size, self.memory.address

    def free(self):
        self.memory.free()


def place(layout, buffer, side):
    """Returns the layout in a copy of its buffer on a side."""
    if isinstance(side, Arena):
        with driver.using(driver.primary(side.device.device_id)):
            if layouts.EXACT:
                side.resize(buffer.size)
            assert buffer.size <= side.size
            driver.upload(side.address, buffer)
    else:
        side.bytes[: buffer.size] = buffer
    return gpu.move(layout.describe(buffer), buffer.ctypes.data, side.address, side.device)


def download(side, size):
    if isinstance(side, Arena):
        with driver.using(driver.primary(side.device.device_id)):
            return driver.download(side.address, size)
    return side.bytes[:size].copy()


def expected_of(source, buffer, target):
    """Returns the target's elements by the same library on the CPU (tests/python/test_copy.py compares it with NumPy);
    without a cast they are the source's own."""
    array = source.carve(buffer)
    if source.dtype == target.dtype:
        return np.broadcast_to(array, target.shape)
    compact = np.empty(target.shape, of(target.dtype))
    src = source.describe(buffer)
    src.struct.dl_tensor.device = gpu.device(0, CPU)
    check(lib.gc_copy_into(src.view, capi.Tensor(compact, target.dtype).view, None))
    return compact


def copies(source, buffer, target, sides, stream):
    expected = expected_of(source, buffer, target)
    src = place(source, buffer, sides[0])
    before = target.buffer()
    dst = place(target, before, sides[1])
    check(lib.gc_copy_into(src.view, dst.view, stream))
    driver.wait_for(stream)
    assert_written(target, download(sides[1], before.size), expected)


def random_copy(rng):
    shape, dtypes = random_shape(rng), [str(rng.choice(CASTS)) for _ in range(2)]
    if rng.random() < 0.4:
        dtypes[1] = dtypes[0]
    source, target = random_layout(rng, dtypes[:1], shape), random_layout(rng, dtypes[1:], shape, writable=True)
    return source, random_bytes(rng, source), target


SIZE = 64 << 20


@pytest.fixture(scope="module")
def sides():
    driver.use(driver.primary())
    made = {"gpu": Arena(SIZE), "other": Arena(SIZE), "pinned": Host("pinned", SIZE), "pageable": Host("pageable", SIZE)}
    yield made
    for side in made.values():
        side.free()


# --- on one device, and with the host ---------------------------------------------------------------------------------


@blocks
@pytest.mark.parametrize(
    "names", [("gpu", "other"), ("pinned", "gpu"), ("gpu", "pinned"), ("pageable", "gpu"), ("gpu", "pageable")],
    ids=" to ".join,
)  # fmt: skip
def test_any_layout_and_any_cast_matches_the_cpu(sides, stream, names, block):
    for seed in seeds(block):
        source, buffer, target = random_copy(np.random.default_rng(seed))
        with case(seed=seed, source=source, target=target):
            copies(source, buffer, target, [sides[name] for name in names], stream)


SHAPES = gpu.sized(
    gpu=[(1, 70_001), (1, 1 << 20), (257, 4099), (1000, 1000), (4096, 513), (3, 5, 7, 11), (513, 2, 300)],
    quick=[(1, 5001), (65, 130), (3, 5, 7, 11)], all=[(1, 5001), (65, 130), (200, 17), (3, 5, 7, 11), (33, 2, 70)],
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_usual_layouts_are_copied_at_any_alignment(sides, stream, shape, dtype):
    ndim, rng = len(shape), np.random.default_rng(5)
    for order in (tuple(range(ndim)), tuple(reversed(range(ndim)))):
        for first, second in (0, 0), (1, 0), (0, 1), (3, 5), (16, 4):
            for step in 1, 2, -1:
                size = of(dtype).itemsize
                source = Layout(dtype, shape, order, (1,) * (ndim - 1) + (step,), shift=first * size)
                target = Layout(dtype, shape, shift=second * size)
                with case(source=source, target=target):
                    copies(source, random_bytes(rng, source), target, [sides["gpu"], sides["other"]], stream)


PAIRS = [(source, target) for source in CASTS for target in CASTS]


@pytest.mark.parametrize("source, target", both(
    quick=[pair for pair in PAIRS if {*pair} & {"bool", "bfloat16", "float64"}], all=PAIRS
))  # fmt: skip
def test_casts_of_edge_values_match_the_cpu(sides, stream, source, target):
    values = edges(source)
    values = np.resize(values, 48 * -(-values.size // 48))
    for shape, order in ((values.size,), (0,)), ((values.size // 48, 48), (1, 0)):
        layout = Layout(source, shape, order)
        buffer = layout.buffer()
        layout.carve(buffer).view(f"u{of(source).itemsize}")[...] = values.reshape(shape).view(f"u{of(source).itemsize}")
        copies(layout, buffer, Layout(target, shape), [sides["gpu"], sides["other"]], stream)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 31, 32])
def test_elements_of_any_size_are_copied_as_they_are(sides, stream, size):
    """Describes elements of `size` bytes, as lanes of 8 bits."""
    rng = np.random.default_rng(size)
    memory = rng.integers(0, 256, (37, 53, size), np.uint8)
    driver.upload(sides["gpu"].address, memory)
    driver.fill(sides["other"].address, 0, memory.size)
    tensors = []
    for side, shape, strides in (sides["gpu"], (53, 37), (1, 53)), (sides["other"], (53, 37), (37, 1)):
        tensor = gpu.at(side.address, shape, "uint8", strides=strides)
        tensor.struct.dl_tensor.dtype.lanes = size
        tensors.append(tensor)
    check(lib.gc_copy_into(tensors[0].view, tensors[1].view, stream))
    driver.wait_for(stream)
    found = driver.download(sides["other"].address, memory.size).reshape(53, 37, size)
    assert (found == memory.transpose(1, 0, 2)).all()


def test_large_pageable_copies_are_split(sides, stream):
    rng = np.random.default_rng(8)
    scale = gpu.sized(gpu=4, quick=1, all=1)  # factor of the sizes
    for source, target, shape, order in (
        ("uint8", "uint8", (scale * 11 << 20,), (0,)), ("float32", "bfloat16", (scale * 2 << 20,), (0,)),
        ("bfloat16", "float32", (scale * 2 << 20,), (0,)), ("float32", "float32", (scale * 700 + 1, 2503), (1, 0)),
        ("int16", "float32", (3, scale << 18, 2), (0, 2, 1)),
    ):  # fmt: skip
        source, target = Layout(source, shape, order, shift=4), Layout(target, shape)
        buffer = random_bytes(rng, source)
        for names in ("pageable", "gpu"), ("gpu", "pageable"):
            copies(source, buffer, target, [sides[name] for name in names], stream)


def test_an_empty_copy_writes_nothing(sides, stream):
    for name in "other", "pinned", "pageable":
        with driver.Stream() as own:
            src = gpu.at(0, (0, 5), "float32")
            dst = gpu.at(0, (0, 5), "bfloat16")
            dst.struct.dl_tensor.device = sides[name].device
            check(lib.gc_copy_into(src.view, dst.view, own.handle))


@pytest.mark.gpu
def test_pinned_memory_described_as_cpu_memory(sides, stream):
    layout = Layout("float32", (1000, 999), (1, 0))
    buffer = random_bytes(np.random.default_rng(1), layout)
    memory = np.zeros((buffer.size // 4096 + 2) * 4096, np.uint8)
    begin = -memory.ctypes.data % 4096
    size = (buffer.size // 4096 + 1) * 4096
    driver.call("cuMemHostRegister_v2", c_void_p(memory.ctypes.data + begin), c_size_t(size), c_uint(0))
    try:
        side = Host("pageable", 1)
        side.bytes, side.size = memory[begin:], size
        side.address = side.bytes.ctypes.data
        for target in Layout("float32", layout.shape), Layout("bfloat16", layout.shape):
            copies(layout, buffer, target, [side, sides["gpu"]], stream)
            copies(Layout("float32", layout.shape), buffer, Layout("float32", layout.shape), [sides["gpu"], side], stream)
    finally:
        driver.call("cuMemHostUnregister", c_void_p(memory.ctypes.data + begin))


# --- captures ---------------------------------------------------------------------------------------------------------

CAPTURED = {
    "bytes": (Layout("float32", (70_001,)), Layout("float32", (70_001,)), "gpu", "other"),
    "a cast": (Layout("float32", (70_001,)), Layout("bfloat16", (70_001,)), "gpu", "other"),
    "transposed": (Layout("float32", (301, 413), (1, 0)), Layout("float32", (301, 413)), "gpu", "other"),
    "from pinned": (Layout("float32", (70_001,)), Layout("float32", (70_001,)), "pinned", "gpu"),
    "to pinned, every other": (Layout("int16", (9001,), steps=(2,)), Layout("float64", (9001,)), "gpu", "pinned"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_copy_is_done_at_every_replay(sides, stream, name):
    source, target, *names = CAPTURED[name]
    source_side, target_side = (sides[name] for name in names)
    rng, before = np.random.default_rng(3), target.buffer()
    src, dst = place(source, random_bytes(rng, source), source_side), place(target, before, target_side)
    with driver.Graph(stream) as graph:
        check(lib.gc_copy_into(src.view, dst.view, stream))
    assert np.array_equal(download(target_side, before.size), before), "only captured"
    for _ in range(2):
        buffer = random_bytes(rng, source)
        place(source, buffer, source_side)
        graph.replay(stream)
        driver.wait_for(stream)
        assert_written(target, download(target_side, before.size), expected_of(source, buffer, target))
    graph.destroy()


@pytest.mark.gpu
@pytest.mark.parametrize("names", [("pageable", "gpu"), ("gpu", "pageable")], ids=" to ".join)
def test_pageable_memory_is_refused_in_a_capture_that_stays_valid(sides, stream, names):
    layout = Layout("float32", (5000,))
    buffer, before = random_bytes(np.random.default_rng(2), layout), layout.buffer()
    src, dst = place(layout, buffer, sides[names[0]]), place(layout, before, sides[names[1]])
    other = place(layout, before, sides["other"])
    with driver.Graph(stream) as graph:
        assert lib.gc_copy_into(src.view, dst.view, stream) == Status.INVALID_ARGUMENT
        assert "capture" in capi.last_error()
        if names[0] == "gpu":
            check(lib.gc_copy_into(src.view, other.view, stream))
    assert np.array_equal(download(sides[names[1]], before.size), before)
    if names[0] == "gpu":
        graph.replay(stream)
        driver.wait_for(stream)
        assert_written(layout, download(sides["other"], before.size), layout.carve(buffer))
    graph.destroy()


def test_a_copy_waits_only_for_its_stream(sides, gate, stream):
    layout = Layout("float32", (5000,))
    buffer, before = random_bytes(np.random.default_rng(2), layout), layout.buffer()
    src, dst = place(layout, buffer, sides["gpu"]), place(layout, before, sides["other"])
    check(lib.gc_copy_into(src.view, dst.view, stream))  # loads the kernels
    driver.wait_for(stream)
    driver.upload(sides["other"].address, before)
    with gate.closed(stream):
        for target in "bfloat16", "float32":
            check(lib.gc_copy_into(src.view, place(Layout(target, (5000,)), before[: before.size], sides["pinned"]).view, stream))
        check(lib.gc_copy_into(src.view, dst.view, stream))
        assert not driver.Event(stream).done()
    assert_written(layout, download(sides["other"], before.size), layout.carve(buffer))


# --- several devices --------------------------------------------------------------------------------------------------


@pytest.mark.two_devices
def test_between_devices_any_layout_and_any_cast_matches_the_cpu(stream):
    with driver.using(driver.primary(1)):
        there = Arena(SIZE, 1)
    here = Arena(SIZE)
    try:
        for seed in range(gpu.sized(gpu=300, quick=30, all=60)):
            source, buffer, target = random_copy(np.random.default_rng(seed))
            with case(seed=seed, source=source, target=target):
                copies(source, buffer, target, [there, here], stream)
        with driver.using(driver.primary(1)), driver.Stream() as other:
            for seed in range(gpu.sized(gpu=50, quick=10, all=20)):
                source, buffer, target = random_copy(np.random.default_rng(seed))
                with case(seed=seed, source=source, target=target):
                    copies(source, buffer, target, [here, there], other.handle)
    finally:
        here.free()
        with driver.using(driver.primary(1)):
            there.free()


# --- against torch, and larger than 32 bits can count -----------------------------------------------------------------


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    yield torch
    torch.cuda.empty_cache()


def described(tensor):
    names = {"torch.float32": "float32", "torch.bfloat16": "bfloat16", "torch.float16": "float16", "torch.uint8": "uint8",
             "torch.float64": "float64", "torch.int64": "int64"}
    found = gpu.at(tensor.data_ptr(), tuple(tensor.shape), names[str(tensor.dtype)], strides=tensor.stride())
    return found


def copied(src, dst):
    check(lib.gc_copy_into(described(src).view, described(dst).view, None))
    driver.synchronize()
    return dst


@pytest.fixture
def room(torch):
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free device memory")


def hashed(torch, first, count):
    index = torch.arange(first, first + count, device="cuda")
    return ((index * 0x9E3779B1 ^ index >> 7) >> 11 & 0xFF).to(torch.uint8)


def fill(torch, flat):
    for first in range(0, flat.numel(), 1 << 27):
        count = min(1 << 27, flat.numel() - first)
        flat[first : first + count] = hashed(torch, first, count).to(flat.dtype)


LARGE = 2**32 + 9001


@pytest.mark.gpu
def test_more_bytes_than_32_bits_count(torch, room):
    memory = torch.empty(LARGE + 1, dtype=torch.uint8, device="cuda")
    fill(torch, memory)
    for begin in 0, 1:
        found = copied(memory[begin : begin + LARGE], torch.zeros(LARGE, dtype=torch.uint8, device="cuda"))
        assert torch.equal(found, memory[begin : begin + LARGE])
        del found
    every = copied(memory[::2], torch.zeros(-(-(LARGE + 1) // 2), dtype=torch.uint8, device="cuda"))
    assert torch.equal(every, memory[::2])
    wide = copied(memory, torch.zeros(LARGE + 1, dtype=torch.bfloat16, device="cuda"))
    for first in range(0, LARGE, 1 << 28):
        assert torch.equal(wide[first : first + (1 << 28)], memory[first : first + (1 << 28)].to(torch.bfloat16))


@pytest.mark.gpu
def test_larger_matrices_than_32_bits_count(torch, room):
    matrix = torch.empty((65_601, 65_539), dtype=torch.uint8, device="cuda")
    fill(torch, matrix.view(-1))
    turned = copied(matrix.T, torch.zeros((65_539, 65_601), dtype=torch.uint8, device="cuda"))
    for first in range(0, 65_539, 4096):
        assert torch.equal(turned[first : first + 4096], matrix[:, first : first + 4096].T)


# --- new tensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["CPU", "CUDA"])
def test_a_compact_copy_is_made_on_a_device(sides, where):
    source = Layout("int16", (300, 7, 11), (2, 0, 1), (1, 2, -1), shift=2)
    buffer = random_bytes(np.random.default_rng(4), source)
    for name in "gpu", "pageable", "pinned":
        out = capi.Managed()
        src = place(source, buffer, sides[name])
        device = gpu.device(0, CPU if where == "CPU" else capi.CUDA)
        check(lib.gc_tensor_to_device(src.managed, device, byref(out)))
        found = capi.take(out) if where == "CPU" else gpu.take(out)
        assert np.array_equal(found, source.carve(buffer)) and not src.releases
