"""A short program for compute-sanitizer: every kernel, on alignments and strides that lead to all its paths.

    compute-sanitizer python3 tests/spec/sanitize.py [wild | race]

`wild` and `race` have a defect each, which the tools must find. Every operand has an allocation of its own that ends
with it, so that one byte beyond is an error. Results are compared with NumPy, too.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

import numpy as np  # noqa: E402 the path comes first

import capi  # noqa: E402
import driver  # noqa: E402
import gpu  # noqa: E402
import layouts  # noqa: E402
import kernels  # noqa: E402
from arena import Arena  # noqa: E402
from block_model import INT4, INT8  # noqa: E402
from codec_model import ONEBIT, SIGN  # noqa: E402
from codecs_c import invalid_payloads, one_case, random_block_options, random_options  # noqa: E402
from comms import CheckedRanks, Nodes, World  # noqa: E402
from capi import AXIS_NONE, BIG, DTYPES, FLOATS, LITTLE, Managed, byref, check, lib  # noqa: E402
from layouts import Layout, case, chunk_rows, truth_of, unpackbits  # noqa: E402
from models import SIGNED, UNPACKED, majority, scaled_signs  # noqa: E402

# Two threads of different warps use the same place of shared memory without synchronization.
RACE = b"""
.version 6.4
.target sm_70
.address_size 64

.visible .entry race(.param .u64 out)
{
    .reg .u64 %rd<4>;
    .reg .u32 %r<8>;
    .shared .align 4 .b8 shared[512];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, shared;
    shl.b32 %r3, %r1, 2;
    add.u32 %r4, %r2, %r3;
    st.shared.u32 [%r4], %r1;
    xor.b32 %r5, %r3, 256;
    add.u32 %r6, %r2, %r5;
    ld.shared.u32 %r7, [%r6];
    ld.param.u64 %rd1, [out];
    cvt.u64.u32 %rd2, %r3;
    add.u64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r7;
    ret;
}
"""


NVRTC_UNAVAILABLE = 25


class Operand:
    """An array in an allocation that ends with it, and begins `shift` bytes before it."""

    def __init__(self, layout, buffer):
        self.layout, self.buffer = layout, buffer
        inner = buffer[layouts.MARGIN : buffer.size - layouts.MARGIN]
        self.size = inner.size
        self.memory = driver.Memory(max(1, self.size))
        driver.upload(self.memory.address, inner)
        host = buffer.ctypes.data + layouts.MARGIN
        self.tensor = gpu.move(layout.describe(buffer), host, self.memory.address)

    def found(self):
        buffer = self.layout.buffer()
        buffer[layouts.MARGIN : layouts.MARGIN + self.size] = driver.download(self.memory.address, self.size)
        return buffer

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.memory.free()


class Bench(layouts.HostBench):
    """Calls on operands that each have their own memory."""

    def into(self, function, source, source_buffer, *between, target):
        with Operand(source, source_buffer) as src, Operand(target, target.buffer()) as dst:
            check(function(src.tensor.view, *between, dst.tensor.view, None))
            return dst.found()


def into(function, source, buffer, *between, target, expected):
    with case(function=function.__name__, source=source, target=target):
        layouts.assert_written(target, Bench().into(function, source, buffer, *between, target=target), expected)


def both_ways(line, rows_shift, order, rng):
    layouts.both_ways(Bench(), line, 3, order, rng, row_shift=rows_shift)


def signs(line, rows_shift, order, rng):
    """Unpacks without scales, with one, and with one per chunk."""
    count = int(np.prod(line.shape, dtype=np.int64))
    rows = Layout("uint8", (3, capi.chunk_bytes(count, 3)), shift=rows_shift)
    buffer = layouts.random_bytes(rng, rows)
    bits = unpackbits(rows.carve(buffer), AXIS_NONE, count, order)
    for values in (None, [1.5], [0.5, -3.0, 1e6]) if line.dtype in FLOATS else (None,):
        each = np.float32(1) if values is None else np.array(values, np.float32)
        with driver.Memory(12) as memory:
            driver.upload(memory.address, np.resize(each, 3).astype(np.float32).view(np.uint8))
            scales = None if values is None else gpu.at(memory.address, (len(values),), "float32").view
            spread = np.repeat(each, 8 * rows.shape[1])[:count] if np.size(each) > 1 else each
            expected = scaled_signs(bits, line.dtype, spread).reshape(line.shape)
            into(lib.gc_unpack_signs_into, rows, buffer, scales, order, target=line, expected=expected)


def votes(voters, size, shift, rng):
    rows, target = Layout("uint8", (voters, size), shift=shift), Layout("uint8", (size,), shift=shift // 2)
    buffer = layouts.random_bytes(rng, rows)
    into(lib.gc_vote_signs_into, rows, buffer, 7, target=target, expected=majority(rows.carve(buffer), 7))


def along(shape, axis, dtype, rng):
    elements = Layout(dtype, shape)
    buffer = layouts.random_truth(rng, elements)
    packed = np.packbits(truth_of(elements.carve(buffer)), axis=layouts.numpy_axis(axis))
    rows = Layout("uint8", packed.shape, shift=1)
    into(lib.gc_pack_bits_into, elements, buffer, axis, BIG, target=rows, expected=packed)
    buffer = layouts.random_bytes(rng, rows)
    count = int(np.prod(shape)) if axis == AXIS_NONE else shape[axis]
    bits = unpackbits(rows.carve(buffer), axis, count).reshape(shape if axis != AXIS_NONE else (count,))
    target = Layout(dtype, bits.shape)
    expected = layouts.zeros_and_ones(bits, dtype)
    into(lib.gc_unpack_bits_into, rows, buffer, axis, BIG, target=target, expected=expected)


def copied(source, target, rng):
    """Copies on the device, and compares with a copy by the library on the CPU."""
    buffer = layouts.random_bytes(rng, source)
    src, expected = source.describe(buffer), np.empty(target.shape, target.numpy)
    src.struct.dl_tensor.device = gpu.device(0, capi.CPU)
    check(lib.gc_copy_into(src.view, capi.Tensor(expected, target.dtype).view, None))
    into(lib.gc_copy_into, source, buffer, target=target, expected=expected)


def copies(rng):
    usual = [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"), ("float16", "float32"),
             ("float64", "float32"), ("float32", "float64"), ("int64", "float16"), ("float64", "uint8")]  # fmt: skip
    for source, target in [(dtype, dtype) for dtype in ("uint8", "int16", "float32", "float64")] + usual:
        sizes = [np.dtype(DTYPES[dtype][0]).itemsize for dtype in (source, target)]
        for shape in (1,), (4099,), (20_000,), (37, 131), (130, 67):
            order = tuple(range(len(shape)))
            for first, second in (0, 0), (1, 0), (0, 1), (3, 2):
                shifts = dict(shift=first * sizes[0]), dict(shift=second * sizes[1])
                for layout in {order, order[::-1]}:
                    copied(Layout(source, shape, layout, **shifts[0]), Layout(target, shape, **shifts[1]), rng)
                steps = (1,) * (len(shape) - 1) + (-2,)
                copied(Layout(source, shape, order, steps, **shifts[0]), Layout(target, shape, **shifts[1]), rng)


def everything():
    rng = np.random.default_rng(1)
    copies(rng)
    for dtype in UNPACKED:
        for count, shift, rows_shift in (
            (1, 0, 0), (130, 1, 0), (8193, 0, 3), (20_000, 8, 1), (20_011, 3, 7), (20_003, 16, 16),
        ):  # fmt: skip
            both_ways(Layout(dtype, (count,), shift=shift), rows_shift, LITTLE if shift % 2 else BIG, rng)
        for more in (
            dict(shape=(67, 131), order=(1, 0)),
            dict(shape=(67, 131), steps=(-1, 1)),
            dict(shape=(3001,), steps=(2,), shift=1),
            dict(shape=(33, 65), steps=(1, -3), shift=2),
            dict(shape=(9, 33, 35), order=(2, 0, 1)),
            dict(shape=(2, 3) * 4, order=(1, 3, 5, 7, 0, 2, 4, 6)),
        ):
            both_ways(Layout(dtype, **more), 1, BIG, rng)
    for dtype in SIGNED:
        for count, shift, rows_shift in ((1, 0, 0), (8193, 0, 3), (20_011, 3, 7), (20_003, 16, 16)):
            signs(Layout(dtype, (count,), shift=shift), rows_shift, LITTLE if shift % 2 else BIG, rng)
        for more in (dict(shape=(67, 131), order=(1, 0)), dict(shape=(3001,), steps=(2,), shift=1)):
            signs(Layout(dtype, **more), 1, BIG, rng)
    for voters in 1, 2, 7, 16, 30, 31, 100:
        for size, shift in ((1, 0), (61, 1), (4096, 0), (20_000, 16), (20_003, 3)):
            votes(voters, size, shift, rng)
    for dtype in "bool", "int32", "uint64":
        for shape in (257, 33), (33, 257), (7, 40, 65):
            for axis in (AXIS_NONE, *range(len(shape))):
                along(shape, axis, dtype, rng)

    # Run the simple tier, with memory that is used again.
    truth = rng.random(30_001) < 0.5
    with driver.Memory(truth.size) as memory:
        driver.upload(memory.address, truth)
        for _ in range(4):
            chunks, out = capi.pack_chunks(gpu.at(memory.address, truth.shape, "bool"), 3), Managed()
            check(lib.gc_unpack_chunks(capi.managed_array(chunks), 3, truth.size, byref(out)))
            np.testing.assert_array_equal(gpu.take(out), truth)
            np.testing.assert_array_equal(np.stack([gpu.take(c) for c in chunks]), chunk_rows(truth, 3))
    check(lib.gc_trim(gpu.device()))
    codecs()
    group()
    peers()
    compiled()


def wild():
    """Promises twice the memory that exists in a descriptor, so that our kernel reads beyond it."""
    size = 4 << 20
    with driver.Memory(size) as one, driver.Memory(size) as other:
        # The source is after the target, because a source that overlaps the target would be refused.
        target, source = sorted([one.address, other.address])
        driver.fill(source, 1, size)
        src, dst = gpu.at(source, (2 * size,), "bool"), gpu.at(target, (1, size // 4))
        check(lib.gc_pack_chunks_into(src.view, BIG, dst.view, None))
        driver.raw("cuCtxSynchronize")


def race():
    function = driver.kernel(driver.load(RACE), "race")
    with driver.Memory(512) as memory:
        driver.launch(function, 1, 128, None, driver.c_uint64(memory.address))
        driver.synchronize()


def codecs():
    """Runs every kernel of the codecs, on operands that end with their memory."""
    arena = Arena(1 << 20, exact=True)
    for seed in range(40):
        for options in random_options, random_block_options:
            with case(seed=seed):
                one_case(arena, seed, 30_000, options)
                arena.start_again()
    for kind in ONEBIT, SIGN:
        invalid_payloads(arena, kind)
        arena.start_again()


class OnGpu(World):
    """World whose threads have the GPU's context: the tool reports a query without a current one as an error."""

    def each(self, function):
        def on_gpu(rank):
            driver.use(driver.primary(0))
            return function(rank)

        return World.each(self, on_gpu)


class NodesOnGpu(Nodes):
    each, level = OnGpu.each, OnGpu


def group():
    """Runs an all-reduce, and its halves with shards that end with their memory, aligned and not."""
    arena, rng = Arena(1 << 20, exact=True), np.random.default_rng(5)
    for kind, size, segments in (
        (ONEBIT, 1, [8192, 3, 1030]), (ONEBIT, 3, [20_003]), (SIGN, 2, [9000, 0, 5]), (INT8, 1, [8192, 3, 1030]),
        (INT4, 3, [20_003, 5]),
    ):  # fmt: skip
        error = None if kind == SIGN else "float32"
        with OnGpu(size) as world, CheckedRanks(world, arena, codec=kind, segments=segments, error=error) as ranks:
            for step in range(3):
                gradients = [[rng.standard_normal(n).astype("f4") for n in segments] for _ in range(size)]
                shards = ranks.reduce_scatter(gradients, aligned=step != 1)
                ranks.all_gather([np.float32(-0.1) * shard for shard in shards], aligned=step != 1)
                ranks.run(gradients)
                ranks.errors()
        arena.start_again()


def peers():
    """Runs ranks that write to each other's memory, on one level and within the nodes of two levels."""
    arena, rng = Arena(1 << 20, exact=True), np.random.default_rng(6)
    for make, signs in (lambda: OnGpu(4, "peers"), [SIGN]), (lambda: NodesOnGpu([2, 2], "peers", "group"), []):
        for kind in ONEBIT, *signs, INT8:
            segments, error = [20_003, 0, 5], None if kind == SIGN else "float32"
            with make() as world, CheckedRanks(world, arena, codec=kind, segments=segments, error=error) as ranks:
                for step in range(3):
                    gradients = [[rng.standard_normal(n).astype("f4") for n in segments] for _ in range(world.size)]
                    if step == 1:
                        ranks.all_gather(ranks.reduce_scatter(gradients))
                    else:
                        ranks.run(gradients)
                ranks.errors()
            arena.start_again()


VIEWS = (
    lambda x: x, lambda x: x[:, :-1], lambda x: x.T, lambda x: x[::-1, ::3], lambda x: x[:, :1], lambda x: x[:0],
)  # fmt: skip


def compiled():
    """Runs kernels compiled at run time: elements and sums, in vectors, one by one, in nested loops, at any byte."""
    memories, rng = [], np.random.default_rng(7)

    def put(array, view=lambda x: x, off=0):
        memory = driver.Memory(off + max(1, array.nbytes))
        memories.append(memory)
        driver.upload(memory.address + off, array)
        seen = view(array)
        tensor = kernels.on_gpu(seen)
        tensor.struct.dl_tensor.data = memory.address + off + seen.ctypes.data - array.ctypes.data
        return tensor, seen

    def run(kernel, inputs, out, off, **options):
        z, _ = put(np.zeros_like(out), off=off)
        bytes_ = kernel.workspace_bytes(inputs, [z], **options)
        workspace = put(np.zeros(bytes_, "u1"))[0] if bytes_ else None
        try:
            kernel(inputs, [z], workspace=workspace, **options)
        except kernels.Refused as refused:
            if refused.status == NVRTC_UNAVAILABLE:
                sys.exit(f"compiled kernels were NOT RUN, because {refused.message}")
            raise
        driver.synchronize()
        found = driver.download(memories[-1 - bool(bytes_)].address + off, out.nbytes).view(out.dtype)
        np.testing.assert_array_equal(found.reshape(out.shape), out)

    add = kernels.elementwise("T x, T y", "T z", "z = x + y", "add")
    total = kernels.reduction("T x, T y", "float32 z", "x + y", "a + b", "z = a", "0", "total")
    for dtype in "f4", "f2":
        for number, view in enumerate(VIEWS):
            for off in 0, 1:
                with case(dtype=dtype, view=number, off=off):
                    x, a = put(rng.integers(-2, 3, (65, 1027 if number else 1032)).astype(dtype), view, off)
                    y, b = put(rng.integers(-2, 3, a.shape[1]).astype(dtype), off=off)
                    run(add, [x, y], np.ascontiguousarray(a + b), off)
                    for axes in None, 0, 1:
                        run(total, [x, y], np.asarray((a + b).astype("f4").sum(axis=axes)), off, axes=axes)
                while memories:
                    memories.pop().free()


def main():
    if not driver.device_count():
        sys.exit("no CUDA device")
    driver.use(driver.primary())
    {"wild": wild, "race": race, "everything": everything}[sys.argv[1] if len(sys.argv) > 1 else "everything"]()
    print("done")


if __name__ == "__main__":
    main()
