"""CUDA's way through the library, down to the arguments of the launches, on a driver that does the kernels' work on the host.

What is computed is compared with NumPy; what is asked for and is not there is refused by the stand-in, as by a GPU.
"""

import textwrap

import pytest

from stand_in import run
from tiers import each_code

# Arrays by name: what to pack, whose layout says which kernels it goes to.
LAYOUTS = {
    "contiguous": "noise(1003)",
    "one element off": "noise(1004)[1:]",
    "one byte off": "one_byte_off(noise(1003))",
    "empty": "noise(0)",
    "every other": "noise(801)[::2]",
    "reversed": "noise(801)[::-1]",
    "transposed": "noise(24 * 40).reshape(24, 40).T",
    "transposed, large": "noise(264 * 80).reshape(264, 80).T",
    "transposed, zeros behind": "noise(272 * 80).reshape(272, 80).T",
    "transposed, short rows": "noise(10 * 400).reshape(10, 400).T",
    "permuted, rows that share bytes": "noise(61 * 9 * 83).reshape(61, 9, 83).transpose(2, 1, 0)",
    "transposed, rows that share bytes": "noise(263 * 73).reshape(263, 73).T",
    "steps": "noise(3 * 2001).reshape(3, 2001)[:, ::-2]",
    "permuted": "noise(7 * 8 * 9).reshape(7, 8, 9).transpose(2, 0, 1)",
    "rows of a wider matrix": "noise(30 * 41).reshape(30, 41)[:, 3:36]",
    "one value": "np.broadcast_to(noise(1), (5, 40))",
}

WORK = """
fake = driver()
fake.fake_enter(0, 100)

def noise(count):
    values = np.random.default_rng(7).integers(0, 3, count)
    if dtype == "f4":
        return (values - 1).astype("f4")
    return values.astype(dtype)

def one_byte_off(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)
    memory[1:] = array.view(np.uint8)
    return memory[1:].view(array.dtype)

def of_layout(array):
    # The array with the memory it is a view of, on the card.
    base = array
    while base.base is not None:
        base = base.base
    tensor = held(max(1, base.nbytes))
    ctypes.memmove(tensor.contents.dl_tensor.data, base.ctypes.data, base.nbytes)
    described = like(tensor, array)
    described.struct.dl_tensor.data += array.ctypes.data - base.ctypes.data if array.size else 0
    return described
"""


def run_work(script, **names):
    """A script with these names beside the driver."""
    names = "\n".join(f"{name} = {value!r}" for name, value in names.items())
    run(f"{names}\nexec({WORK!r})\n" + textwrap.dedent(script))


def run_layouts(script, layouts=LAYOUTS, **names):
    """For the array of each of these layouts."""
    run_work(f"""
for layout, text in {({name: LAYOUTS[name] for name in layouts})!r}.items():
    array = eval(text)
    try:
        exec({textwrap.dedent(script)!r})
    except BaseException as error:
        raise AssertionError(layout) from error
""", **names)


@pytest.mark.parametrize("dtype", ["?", "i2", "u4", "i8", "f4"])
def test_what_is_packed_and_unpacked_is_numpys(dtype):
    script = """
        bits = ~(array < 0) if dtype == "f4" else array != 0
        n, n_chunks = array.size, 3
        rows = -(-(-(-n // 8)) // n_chunks)
        src = of_layout(array)
        for order, name in (0, "big"), (1, "little"):
            packed = np.zeros(n_chunks * rows, np.uint8)
            expected = np.packbits(bits.reshape(-1), bitorder=name)
            packed[: expected.size] = expected
            dst = on_card(np.full((n_chunks, rows), 0xAA, np.uint8))
            function = lib.gc_pack_signs_into if dtype == "f4" else lib.gc_pack_chunks_into
            capi.check(function(src.view, order, dst.view, None))
            assert (from_card(dst.memory, (packed.size,), np.uint8) == packed).all()
            back = of_layout(array)  # the same layout, overwritten
            if layout != "one value":
                capi.check(lib.gc_unpack_chunks_into(dst.view, order, back.view, None))
                unpacked = np.empty(n, array.dtype)
                compact = on_card(unpacked)
                capi.check(lib.gc_unpack_chunks_into(dst.view, order, compact.view, None))
                assert (from_card(compact.memory, (n,), array.dtype) == bits.reshape(-1)).all()
                again = on_card(np.zeros((n_chunks, rows), np.uint8))
                if dtype != "f4":
                    capi.check(lib.gc_pack_chunks_into(back.view, order, again.view, None))
                    assert (from_card(again.memory, (packed.size,), np.uint8) == packed).all()
    """
    run_layouts(script, dtype=dtype)


# Shapes in memory whose tiles are of several kinds: words of four bools, lines that are not a multiple of four, more
# lines than a tile has, long lines, and narrow ones.
AXIS_SHAPES = [(5, 16, 11), (3, 41, 152), (2, 9, 301), (70, 2, 40), (1, 3000, 3), (4, 5, 700)]


@pytest.mark.parametrize("dtype", ["?", "i4", "i8"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("order", ["", ".transpose(2, 1, 0)", "[:, ::-1]"])
def test_an_axis_is_packed_and_unpacked_as_numpy_does(axis, order, dtype):
    script = f"""
        for shape in {AXIS_SHAPES}:
            array = noise(int(np.prod(shape))).reshape(shape){order}
            axis = {axis}
            expected = np.packbits(array, axis=axis)
            out = Managed()
            capi.check(lib.gc_pack_bits(of_layout(array).managed, axis, 0, byref(out)))
            assert (from_card(out, expected.shape, np.uint8) == expected).all(), shape
            capi.check(lib.gc_unpack_bits(out, axis, array.shape[axis], 0, byref(out)))
            assert (from_card(out, array.shape, np.uint8) == (array != 0)).all(), shape
    """
    run_work(script, dtype=dtype)


def test_chunks_on_a_card_are_unpacked_whatever_lies_behind_them():
    script = """
        memory = np.random.default_rng(3).integers(0, 256, 100, np.uint8)
        tensor = held(100)
        ctypes.memmove(tensor.contents.dl_tensor.data, memory.ctypes.data, 100)
        # Two that lie one behind the other; then one that begins where they end, but takes every other byte.
        parts = memory[0:20], memory[20:40], memory[40:80:2]
        chunks = [like(tensor, part) for part in parts]
        for chunk, start in zip(chunks, (0, 20, 40)):
            chunk.struct.dl_tensor.data = tensor.contents.dl_tensor.data + start
        out = Managed()
        launches = fake.fake_launches()
        capi.check(lib.gc_unpack_chunks(capi.managed_array(chunks), 3, 480, byref(out)))
        assert (from_card(out, (480,), np.uint8) == np.unpackbits(np.concatenate(parts))).all()
        assert fake.fake_launches() - launches == 2, "the first two are one"
    """
    run_work(script, dtype="u1")


@pytest.mark.parametrize("dtype, n_scales", [("i1", 0), ("i2", 0), ("f4", 0), ("f4", 1), ("f4", 3), ("f8", 3)])
def test_signs_on_a_card_are_unpacked_to_scales_and_minus_them(dtype, n_scales):
    script = """
        n, n_chunks = array.size, 3
        rows = -(-(-(-n // 8)) // n_chunks)
        packed = np.random.default_rng(2).integers(0, 256, (n_chunks, rows), np.uint8)
        values = np.array([0.5, -0.0, 3.25], "f4")[:n_scales]
        src, dst, scales = on_card(packed), of_layout(array), on_card(values) if n_scales else None
        for order, name in (0, "big"), (1, "little"):
            capi.check(lib.gc_unpack_signs_into(src.view, scales and scales.view, order, dst.view, None))
            bits = np.unpackbits(packed.reshape(-1), bitorder=name)[:n].astype(bool)
            each = np.repeat(values, 8 * rows)[:n] if n_scales == 3 else values[0] if n_scales else np.float32(1)
            expected = np.where(bits, each, -each).astype(dtype)
            # Read back through the layout: the memory as it is now, seen as the array.
            base = array
            while base.base is not None:
                base = base.base
            found = from_card(dst.memory, (base.nbytes,), np.uint8)
            offset = array.ctypes.data - base.ctypes.data if n else 0
            seen = np.ndarray(array.shape, array.dtype, found.tobytes(), offset, array.strides)
            assert (np.ascontiguousarray(seen).reshape(-1).view("u1") == expected.view("u1")).all()
    """
    run_layouts(script, [name for name in LAYOUTS if name != "one value"], dtype=dtype, n_scales=n_scales)


@pytest.mark.parametrize("voters", [1, 2, 5, 30, 31, 64])
def test_a_vote_on_a_card_is_what_more_than_half_have(voters):
    script = f"""
        from models import majority
        rows = np.random.default_rng(5).integers(0, 256, ({voters}, 77), np.uint8)
        src, dst = on_card(rows), on_card(np.zeros(77, np.uint8))
        for turn in (0, 3, 2**64 - 1):
            capi.check(lib.gc_vote_signs_into(src.view, turn, dst.view, None))
            assert (from_card(dst.memory, (77,), np.uint8) == majority(rows, turn)).all()
        assert fake.fake_last_launch().decode() == ("gc_vote_few" if {voters} <= 30 else "gc_vote_many")
    """
    run_work(script, dtype="u1")


def test_work_of_more_blocks_than_a_launch_can_have_is_refused():
    script = """
        fake = driver()
        byte = on_card(np.ones(1, np.uint8))
        # Nothing so large is there: a tensor whose elements are all the same byte, and room that is believed.
        n = 2**48
        src = byte.struct
        src.dl_tensor.ndim, src.dl_tensor.shape, src.dl_tensor.strides = 1, int64s((n,)), int64s((0,))
        dst = on_card(np.ones((1, 1), np.uint8))
        dst.struct.dl_tensor.data = 2**50
        dst.struct.dl_tensor.shape, dst.struct.dl_tensor.strides = int64s((1, n // 8)), None
        status = lib.gc_pack_chunks_into(byref(src.dl_tensor), 0, dst.view, None)
        # A block has 4096 bytes.
        expect(status, Status.SIZE_OVERFLOW, 2**33, 2**31 - 1)
        assert fake.fake_launches() == 0
    """
    run(script)


EVERY_CALL = """
import traceback
cuda, u1 = DLDevice(CUDA, 0), dldtype("uint8")
mask = np.random.default_rng(1).integers(0, 2, 320).astype(np.uint8)
bits = np.packbits(mask)

def results(count, function, expected):
    # A simple-tier call: new tensors, or the place untouched.
    def call(fake, sources):
        out = (Managed * count)()
        status = function(sources, out)
        if status:
            assert not any(out), "untouched"
            return status
        found = [capi.shape_of(tensor) for tensor in out]
        values = np.concatenate([from_card(tensor, shape, np.uint8).reshape(-1) for tensor, shape in zip(out, found)])
        assert expected is None or (values == expected).all(), "success, and something else"
        for tensor in out:
            lib.gc_tensor_free(tensor)
        return 0
    return call

def into(function, expected):
    def call(fake, sources):
        dst = sources["dst of " + str(expected.size)]
        status = function(sources, dst)
        assert status or (from_card(dst.memory, (expected.size,), np.uint8) == expected).all()
        fake.fake_finish()
        return status
    return call

import codec_model
grad, carried = np.random.default_rng(2).standard_normal((2, 320)).astype("f4")
packed_signs, scale_of_c, error_after = codec_model.plain(grad, carried, codec_model.RMS, "float32")
packed_signs = np.packbits(packed_signs)

def carry(sources):
    ctypes.memmove(sources["error"].memory.contents.dl_tensor.data, carried.ctypes.data, carried.nbytes)

def error_is(sources, expected):
    now = from_card(sources["error"].memory, expected.shape, "f4")
    return now.tobytes() == expected.tobytes()

def compress(sources, out):
    carry(sources)
    scale = ctypes.c_float(7)
    status = lib.gc_onebit_compress(sources["grad"].managed, sources["error"].managed, 4, out, byref(scale))
    assert scale.value == (7 if status else scale_of_c), (status, scale)
    # When the error is on its way, only the wait for it is left; if that fails, nothing is known of it.
    waited = status and last_error().startswith("cuStreamSynchronize")
    assert error_is(sources, carried if status else error_after) or waited, ("the error", status, last_error())
    return status

def decompress(sources, out):
    # Two chunks, the halves of the bits.
    halves = [like(sources["bits"].memory, bits[:20]), like(sources["bits"].memory, bits[20:])]
    halves[1].struct.dl_tensor.data += 20
    scales = (ctypes.c_float * 2)(0.5, -3)
    status = lib.gc_onebit_decompress(capi.managed_array(halves), 2, scales, 320, dldtype("float16"), out)
    ctypes.memset(scales, 0xFF, 8)
    assert status or from_card(out[0], (320,), "f2").tobytes() == halves_scaled.tobytes(), "success, and something else"
    return status

def compress_into(sources, dst):
    carry(sources)
    status = lib.gc_onebit_compress_into(
        sources["grad"].view, sources["error"].view, 0, dst.view, sources["scale"].view, sources["workspace"].view,
        sources["stream"],
    )
    assert error_is(sources, carried if status else error_after), ("the error", status, last_error())
    assert status or from_card(sources["scale"].memory, (1,), "f4")[0] == scale_of_c
    return status

halves_scaled = np.where(mask, 1, -1).astype("f2") * np.repeat([0.5, -3], 160).astype("f2")

def nothing(function):
    return lambda fake, sources: function(sources)

CALLS = {
    "gc_prepare": nothing(lambda s: lib.gc_prepare(cuda)),
    "gc_trim": nothing(lambda s: lib.gc_trim(cuda)),
    "gc_tensor_empty": results(1, lambda s, out: lib.gc_tensor_empty(cuda, u1, 1, int64s([320]), out), None),
    "gc_pack_chunks": results(4, lambda s, out: lib.gc_pack_chunks(s["mask"].managed, 4, out), bits),
    "gc_unpack_chunks": results(1, lambda s, out: lib.gc_unpack_chunks(capi.managed_array([s["bits"]]), 1, 320, out), mask),
    "gc_pack_bits": results(1, lambda s, out: lib.gc_pack_bits(s["mask"].managed, 0, 0, out), bits),
    "gc_unpack_bits": results(1, lambda s, out: lib.gc_unpack_bits(s["bits"].managed, 0, 320, 0, out), mask),
    "gc_pack_chunks_into": into(lambda s, dst: lib.gc_pack_chunks_into(s["mask"].view, 0, dst.view, None), bits),
    "gc_pack_signs_into": into(lambda s, dst: lib.gc_pack_signs_into(s["signs"].view, 0, dst.view, s["stream"]), bits),
    "gc_unpack_chunks_into": into(lambda s, dst: lib.gc_unpack_chunks_into(s["row"].view, 0, dst.view, s["stream"]), mask),
    "gc_pack_signs": results(4, lambda s, out: lib.gc_pack_signs(s["signs"].managed, 4, out), bits),
    "gc_unpack_signs": results(
        1, lambda s, out: lib.gc_unpack_signs(capi.managed_array([s["bits"]]), 1, 320, dldtype("int8"), out),
        np.where(mask, 1, 255).astype(np.uint8),
    ),
    "gc_unpack_signs_into": into(
        lambda s, dst: lib.gc_unpack_signs_into(s["row"].view, None, 0, s["int8"].view, s["stream"]),
        np.where(mask, 1, 255).astype(np.uint8),
    ),
    "gc_vote_signs_into": into(
        lambda s, dst: lib.gc_vote_signs_into(s["row"].view, 0, s["flat"].view, s["stream"]), bits
    ),
    "gc_onebit_compress": results(4, compress, packed_signs),
    "gc_onebit_decompress": results(1, decompress, None),
    "gc_onebit_compress_into": into(compress_into, packed_signs),
    "gc_pack_bits_into": into(lambda s, dst: lib.gc_pack_bits_into(s["mask"].view, 0, 0, s["flat"].view, None), bits),
    "gc_unpack_bits_into": into(lambda s, dst: lib.gc_unpack_bits_into(s["bits"].view, 0, 0, dst.view, None), mask),
}

def child(name, number, code, status):
    # In a process of its own, so that what is done once is done here; the exit status tells what came of it.
    fake = driver()
    sources = {}
    if name not in ("gc_prepare", "gc_tensor_empty", "gc_trim"):
        sources = {
            "mask": on_card(mask), "bits": on_card(bits), "row": on_card(bits.reshape(1, -1)),
            "signs": on_card(np.where(mask, 1, -1).astype("f4")),
            "dst of 40": on_card(np.zeros((1, 40), np.uint8)), "dst of 320": on_card(np.zeros(320, np.uint8)),
            "grad": on_card(grad), "error": on_card(carried), "scale": on_card(np.zeros(1, "f4")),
            "workspace": on_card(np.zeros(lib.gc_onebit_workspace_bytes(320), np.uint8)),
            "stream": ctypes.c_void_p(fake.fake_stream(0)),
        }
        sources["flat"] = like(sources["dst of 40"].memory, np.zeros(40, np.uint8))
        sources["int8"] = like(sources["dst of 320"].memory, np.zeros(320, np.int8))
    if name == "gc_trim" or number % 2:
        tensors = [held(300) for _ in range(40)]  # enough to be worth a fence
        for tensor in tensors:
            lib.gc_tensor_free(tensor)
    call, streams = CALLS[name], fake.fake_streams()
    fake.fake_fail_call(number, code)
    got = call(fake, sources)
    failed = fake.fake_failed_call().decode()
    fake.fake_fail_call(-1, 0)
    if not failed:
        assert got == 0, last_error()
        return 1  # fewer calls than that
    if got:
        expected = Status.DRIVER_UNAVAILABLE if failed in ("cuInit", "cuDriverGetVersion") else status
        # A second chance, where there is one: the sentence is then of another call.
        assert got == expected, (failed, got, last_error())
        assert code in (2, 201) or failed.removesuffix("_v2") in last_error(), (failed, last_error())
    else:
        # A stream that cannot be given back is left, and nobody told.
        left = fake.fake_streams() > streams and failed in ("cuCtxGetId", "cuStreamDestroy_v2")
        assert left or code in (2, 201) or "Pop" in failed or "Exchange" in failed, f"{failed} is not checked"
    if not ("Pop" in failed or "Exchange" in failed):
        assert (fake.fake_depth(), fake.fake_capture_mode()) == (0, 0), failed
        assert call(fake, sources) == 0, (failed, last_error())
        for source in sources.values():
            if isinstance(source, capi.Tensor) and source not in (sources["flat"], sources["int8"]):
                lib.gc_tensor_free(source.memory)
        capi.check(lib.gc_trim(cuda))
        assert fake.fake_in_use(0) == 0, failed
    return 0

for number in range(1000):
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(child(NAME, number, CODE, STATUS))
        except BaseException:
            print(f"{NAME}, call {number}:", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(2)
    outcome = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert outcome in (0, 1), (NAME, number, outcome)
    if outcome == 1:
        break
assert 5 < number < 999, number
"""

FUNCTIONS = [
    "gc_prepare", "gc_trim", "gc_tensor_empty", "gc_pack_chunks", "gc_unpack_chunks", "gc_pack_bits", "gc_unpack_bits",
    "gc_pack_chunks_into", "gc_pack_signs_into", "gc_unpack_chunks_into", "gc_pack_bits_into", "gc_unpack_bits_into",
    "gc_pack_signs", "gc_unpack_signs", "gc_unpack_signs_into", "gc_vote_signs_into", "gc_onebit_compress",
    "gc_onebit_compress_into", "gc_onebit_decompress",
]  # fmt: skip


# One of each class: prepares; allocates and waits; works where it is told to and does not wait; gives memory back.
FEW = ["gc_pack_chunks", "gc_onebit_compress_into"]


@pytest.mark.parametrize("function, code, status", each_code(FUNCTIONS, FEW))
def test_every_call_of_the_driver_fails_in_turn_and_the_next_call_works(function, code, status):
    run(f"NAME, CODE, STATUS = {function!r}, {code}, Status.{status}\n" + EVERY_CALL)
