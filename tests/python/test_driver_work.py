"""Tests of bits and signs on the stand-in driver, in which any call of the driver fails."""

import pytest

from stand_in import run
from tiers import TIER, each_code


def test_work_of_more_blocks_than_a_launch_can_have_is_refused():
    run("""
        fake = driver()
        byte = on_gpu(np.ones(1, np.uint8))
        # The source broadcasts one byte. The library believes the size of the output, which does not exist.
        n = 2**48
        src = byte.struct
        src.dl_tensor.ndim, src.dl_tensor.shape, src.dl_tensor.strides = 1, int64s((n,)), int64s((0,))
        dst = on_gpu(np.ones((1, 1), np.uint8))
        dst.struct.dl_tensor.data = 2**50
        dst.struct.dl_tensor.shape, dst.struct.dl_tensor.strides = int64s((1, n // 8)), None
        status = lib.gc_pack_chunks_into(byref(src.dl_tensor), 0, dst.view, None)
        # A block has 4096 bytes.
        expect(status, Status.SIZE_OVERFLOW, 2**33, 2**31 - 1)
        assert fake.fake_launches() == 0
    """)


EVERY_CALL = """
import traceback
cuda = DLDevice(CUDA, 0)
mask = np.random.default_rng(1).integers(0, 2, 320).astype(np.uint8)
bits = np.packbits(mask)

def pack_chunks(fake, sources):
    # A refused call must not write to `out`.
    out = (Managed * 4)()
    status = lib.gc_pack_chunks(sources["mask"].managed, 4, out)
    if status:
        assert not any(out), "untouched"
        return status
    found = np.concatenate([from_gpu(tensor, (10,), np.uint8) for tensor in out])
    assert (found == bits).all(), "the call succeeded with wrong bits"
    free_all(out)
    return 0

def pack_signs_into(fake, sources):
    dst = sources["dst"]
    status = lib.gc_pack_signs_into(sources["signs"].view, 0, dst.view, sources["stream"])
    assert status or (from_gpu(dst.memory, (40,), np.uint8) == bits).all()
    fake.fake_finish()
    return status

CALLS = {
    "gc_prepare": lambda fake, sources: lib.gc_prepare(cuda),
    "gc_trim": lambda fake, sources: lib.gc_trim(cuda),
    "gc_pack_chunks": pack_chunks,
    "gc_pack_signs_into": pack_signs_into,
}

def child(name, number, code, status):
    # Runs in its own process, so that first-use work happens here. The exit status is the result.
    fake, sources = driver(), {}
    if name.startswith("gc_pack"):
        sources = {
            "mask": on_gpu(mask), "signs": on_gpu(np.where(mask, 1, -1).astype("f4")),
            "dst": on_gpu(np.zeros((1, 40), np.uint8)), "stream": ctypes.c_void_p(fake.fake_stream(0)),
        }
    if name == "gc_trim" or number % 2:
        tensors = [held(300) for _ in range(40)]  # enough blocks for a fence
        free_all(tensors)
    call = CALLS[name]
    got, failed = failing(fake, number, code, lambda: call(fake, sources))
    if not failed:
        assert got == 0, last_error()
        return 1  # the call makes fewer driver calls
    if got:
        expected = Status.DRIVER_UNAVAILABLE if failed in ("cuInit", "cuDriverGetVersion") else status
        # If the library retries, the message may name another driver call.
        assert got == expected, (failed, got, last_error())
        assert code in (2, 201) or failed.removesuffix("_v2") in last_error(), (failed, last_error())
    else:
        assert code in (2, 201) or "Pop" in failed or "Exchange" in failed, f"{failed} is not checked"
    if not ("Pop" in failed or "Exchange" in failed):
        assert (fake.fake_depth(), fake.fake_capture_mode()) == (0, 0), failed
        assert call(fake, sources) == 0, (failed, last_error())
        for source in sources.values():
            if isinstance(source, capi.Tensor):
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

STEP = 7 if TIER == "quick" else 1  # step between the failing calls, from the 40th on


# A function of each class: allocates and waits; works on given memory and does not wait; prepares; frees memory.
FUNCTIONS = ["gc_pack_chunks", "gc_pack_signs_into", "gc_prepare", "gc_trim"]


@pytest.mark.parametrize("function, code, status", each_code(FUNCTIONS, FUNCTIONS))
def test_after_every_failed_driver_call_the_next_call_works(function, code, status):
    run(f"NAME, CODE, STATUS, STEP = {function!r}, {code}, Status.{status}, {STEP}\n" + EVERY_CALL)
