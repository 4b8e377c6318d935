"""Bits and signs on the stand-in driver: what becomes of a call when any call of the driver fails."""

import pytest

from stand_in import run
from tiers import TIER, each_code


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

for number in [*range(40), *range(40, 1000, STEP)]:
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
    "gc_pack_signs", "gc_unpack_signs", "gc_unpack_signs_into", "gc_vote_signs_into",
]  # fmt: skip

STEP = 7 if TIER == "quick" else 1  # of the calls from the 40th on


# One of each class: allocates and waits; works where it is told to and does not wait; prepares; gives memory back.
FEW = ["gc_pack_chunks", "gc_pack_signs_into", "gc_prepare", "gc_trim"]


@pytest.mark.parametrize("function, code, status", each_code(FUNCTIONS, FEW))
def test_every_call_of_the_driver_fails_in_turn_and_the_next_call_works(function, code, status):
    run(f"NAME, CODE, STATUS, STEP = {function!r}, {code}, Status.{status}, {STEP}\n" + EVERY_CALL)
