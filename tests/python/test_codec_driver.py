"""Tests of codecs on the stand-in driver: their calls of the driver, and failures of these calls. tests/spec tests the
results."""

import pytest

from stand_in import run
from tiers import CODES, each_code

PLACE = """
import codec_model, codecs_c
from codec_model import CORRUPT, MEAN, NONFINITE, ONEBIT, RMS, SIGN, TAKEN_BACK, TRANSACTIONAL, ZERO, narrow, widen
from codecs_c import Checked, Refused, call, gradient, invalid_payloads, one_case, or_null, same, views

fake = driver()
fake.fake_enter(0, 100)

class Place:
    # Allocates arrays on a device of the stand-in driver. No call may write after the end of an array.
    device, behind = DLDevice(CUDA, 0), 64

    def __init__(self, gpu=0):
        self.owners, self.device = [], DLDevice(CUDA, gpu)

    def release(self):
        # Frees all arrays.
        while self.owners:
            lib.gc_tensor_free(self.owners.pop())

    def allocate(self, n_bytes):
        self.owners.append(held(n_bytes, self.device.device_id))
        return self.owners[-1].contents.dl_tensor.data

    def put(self, array, dtype=None, aligned=True):
        shift = 0 if aligned else array.itemsize * next(codecs_c.OFFSETS)
        address = self.allocate(max(1, array.nbytes + shift + self.behind))
        described = capi.Tensor(np.empty((), array.dtype), dtype)
        view = described.struct.dl_tensor
        view.data, view.device, view.ndim = address + shift, self.device, array.ndim
        view.shape, view.strides = int64s(array.shape), None
        described.what = array
        ctypes.memmove(view.data, np.ascontiguousarray(array).ctypes.data, array.nbytes)
        ctypes.memset(view.data + array.nbytes, 0xA5, self.behind)
        return described

    def get(self, tensor):
        fake.fake_finish()
        array = tensor.what
        text = ctypes.string_at(tensor.struct.dl_tensor.data, array.nbytes + self.behind)
        assert text[array.nbytes:] == self.behind * bytes([0xA5]), "a call has written after the end of the array"
        return np.frombuffer(text[:array.nbytes], array.dtype).reshape(array.shape)
"""


def run_codec(script, **environment):
    run(f"exec({PLACE!r})\n" + script, **environment)


@pytest.mark.parametrize("kind", [1, 5])
def test_no_call_allocates_frees_or_waits(kind):
    run_codec(f"""
place = Place()
with Checked(place, codec={kind}, segments=[3000, 0, 5], n_chunks=2, server=0, nonfinite=TRANSACTIONAL) as codec:
    g = [place.put(np.ones(n, "f4")) for n in (3000, 0, 5)]
    payload = place.put(np.zeros((2, codec.model.stride), np.uint8))
    chunks, dst = place.put(np.zeros((1, codec.model.stride), np.uint8)), place.put(np.zeros(codec.model.stride, np.uint8))
    state, flags = place.put(np.zeros(lib.gc_codec_state_bytes(codec.handle), np.uint8)), place.put(np.zeros(1, np.uint32))
    before, launches = (fake.fake_allocations(), fake.fake_frees(), fake.fake_waits()), fake.fake_launches()
    for _ in range(3):
        call("gc_codec_encode", codec.handle, views(g), 3, None, None, payload.view, None)
        call("gc_codec_decode", codec.handle, payload.view, 1, None, 0, views(g), 3, None)
        call("gc_codec_reduce", codec.handle, 0, chunks.view, dst.view, None)
        # Each call is one launch for any segments. ONEBIT computes its scales by a second launch.
        assert fake.fake_launches() - launches == (3 if {kind} > 2 else 5)
        call("gc_codec_commit", codec.handle, None, None)
        call("gc_codec_flags", codec.handle, flags.view, None)
        call("gc_codec_state_out", codec.handle, state.view, None)
        call("gc_codec_state_in", codec.handle, state.view, None)
        call("gc_codec_reset", codec.handle, None)
        launches = fake.fake_launches()
    assert (fake.fake_allocations(), fake.fake_frees(), fake.fake_waits()) == before
""")


def test_memory_is_freed_in_its_context_unless_the_context_is_destroyed():
    # The library enters the primary context to free memory. It does not enter another context, which may be destroyed.
    run_codec("""
place = Place()
for of_its_own in False, True:
    if not of_its_own:
        fake.fake_leave()
    with Checked(place, codec=ONEBIT, segments=[100_000]) as codec:
        assert fake.fake_in_use(0) > 400_000
        fake.fake_enter(0, 200)
    fake.fake_leave()
    assert (fake.fake_in_use(0) > 400_000) == of_its_own
    assert fake.fake_capture_mode() == 0
    if not of_its_own:
        fake.fake_enter(0, 100)
""")


@pytest.mark.parametrize("kind", [1, 6])
def test_every_call_of_the_driver_may_fail_when_a_codec_is_made(kind):
    run_codec(f"""
from codecs_c import options_of

new_handle = lambda: lib.gc_codec_create.argtypes[1]._type_()
model = codecs_c.model_of(codec={kind}, segments=[3000, 5], n_chunks=2, server=0, nonfinite=TRANSACTIONAL)
options, handle = options_of(model, Place.device), new_handle()
call("gc_codec_create", byref(options), byref(handle))
lib.gc_codec_free(handle)
in_use, depth = fake.fake_in_use(0), fake.fake_depth()
for at in range(200):
    handle = new_handle()
    status, failed = failing(fake, at, 999, lambda: lib.gc_codec_create(byref(options), byref(handle)))
    make_good(fake, failed)
    assert (fake.fake_depth(), fake.fake_capture_mode()) == (depth, 0), failed
    if not failed:
        assert status == 0
        lib.gc_codec_free(handle)
        break
    if status == 0:  # the failed call restores the capture mode of the thread
        assert failed == "cuThreadExchangeStreamCaptureMode"
        lib.gc_codec_free(handle)
    else:
        assert status == Status.CUDA and not handle, (failed, status)
        assert failed.split("_v2")[0] in last_error(), (failed, last_error())
    assert fake.fake_in_use(0) == in_use, failed
else:
    raise AssertionError("it never ends")
""")


# Each call on a codec has a function that makes it, and one that applies it to the model and returns the expected
# contents of each array. `m` has the arrays of the call.
CALLS = """
import types

SEGMENTS = [7] * (15 if NAME == "encode" else 2) + [1500, 0]  # more segments than one launch of encode can address
GRADIENTS = [np.linspace(-1, 2, n, dtype="f4") for n in SEGMENTS]
N = len(SEGMENTS)

def take_state_in(model, m):
    model.worker, model.reducer = m.saved

def take_errors_in(model, m):
    model.take_errors(0, m.worker.what)
    model.take_errors(1, m.server.what)

def take_flags(model, m):
    flags, model.flags = model.flags, 0
    return {"flags": np.array([flags], np.uint32)}

CALLS = {
    "encode": (lambda c, m: lib.gc_codec_encode(c, views(m.g), N, None, None, m.payload.view, m.stream),
               lambda model, m: {"payload": model.encode(GRADIENTS)}),
    "decode": (lambda c, m: lib.gc_codec_decode(c, m.sent.view, 3, None, 0, views(m.values), N, m.stream),
               lambda model, m: {"values": model.decode(m.sent.what, divisor=3)}),
    "reduce": (lambda c, m: lib.gc_codec_reduce(c, 1, m.chunks.view, m.dst.view, m.stream),
               lambda model, m: {"dst": model.reduce(m.chunks.what)}),
    "flags": (lambda c, m: lib.gc_codec_flags(c, m.flags.view, m.stream), take_flags),
    "scales": (lambda c, m: lib.gc_codec_scales(c, m.scales.view, m.stream),
               lambda model, m: {"scales": np.array(model.last_scales, "f4")}),
    "commit": (lambda c, m: lib.gc_codec_commit(c, None, m.stream), lambda model, m: model.commit(False)),
    "rollback": (lambda c, m: lib.gc_codec_rollback(c, m.stream), lambda model, m: model.commit(True)),
    "reset": (lambda c, m: lib.gc_codec_reset(c, m.stream), lambda model, m: model.reset()),
    "state_out": (lambda c, m: lib.gc_codec_state_out(c, m.state.view, m.stream),
                  lambda model, m: {"state": model.state()}),
    "state_in": (lambda c, m: lib.gc_codec_state_in(c, m.kept.view, m.stream), take_state_in),
    "errors_out": (lambda c, m: lib.gc_codec_errors_out(c, m.worker.view, m.server.view, m.stream),
                   lambda model, m: {"worker": model.errors(0), "server": model.errors(1)}),
    "errors_in": (lambda c, m: lib.gc_codec_errors_in(c, m.worker.view, m.server.view, m.stream), take_errors_in),
}
# Number of launches after which a failing launch leaves a state that is neither old nor new. For encode they are the
# addresses and encode, for state_in the check and the worker's half, for errors_in the worker's half. Block codecs
# encode and reduce by one launch.
TORN = {"state_in": 2, "errors_in": 1} | ({"encode": 2, "reduce": 1} if KIND == ONEBIT else {})

def prepared(name, place):
    # Returns a codec with data in every part of its state, and the arrays for the calls.
    policy = TRANSACTIONAL if name in ("commit", "rollback") else codec_model.PROPAGATE
    raw = {} if KIND == ONEBIT else {"raw": [n % 3 == 0 for n in SEGMENTS]}
    codec = Checked(place, codec=KIND, **raw, segments=SEGMENTS, n_chunks=2, server=1, nonfinite=policy)
    m = types.SimpleNamespace()
    sent = codec.encode(GRADIENTS)
    codec.reduce(sent[1:2])
    if policy == TRANSACTIONAL:
        codec.commit()
        codec.encode(GRADIENTS)  # begins a pending step
        m.state = m.kept = None
    else:
        kept = codec.state()
        m.saved = codec.model.worker, codec.model.reducer
        m.state, m.kept = place.put(np.zeros_like(kept)), place.put(kept)
        codec.encode(GRADIENTS)
    rng = np.random.default_rng(5)
    floats = lambda n: place.put(rng.standard_normal(n).astype("f4"))
    m.sent, m.payload, m.chunks = place.put(sent), place.put(np.zeros_like(sent)), place.put(sent[1:2])
    m.dst, m.flags, m.scales = place.put(np.zeros_like(sent[0])), place.put(np.zeros(1, np.uint32)), floats(N)
    m.g, m.values = [place.put(g) for g in GRADIENTS], [floats(n) for n in SEGMENTS]
    m.worker, m.server = floats(sum(SEGMENTS)), floats(codec.model.errors(1).size)
    return codec, m

def compare(codec, m, written):
    for what, expected in (written or {}).items():
        there = getattr(m, what)
        if what == "values":
            for one, e in zip(there, expected):
                same(codec.place.get(one), e, what)
        else:
            same(codec.place.get(there).reshape(-1), np.asarray(expected).reshape(-1), what)
    codec.compare_all()
"""


NAMES = [
    "encode", "decode", "reduce", "flags", "scales", "commit", "rollback", "reset", "state_out", "state_in", "errors_out",
    "errors_in",
]  # fmt: skip


# A failure of encode, reduce, state_in or errors_in poisons the codec. commit only launches, and state_out copies.
# A block codec runs only the calls that differ from ONEBIT's.
@pytest.mark.parametrize(
    "name, code, status, kind",
    [(*one, 1) for one in each_code(NAMES, few=["encode", "reduce", "state_in", "errors_in", "commit", "state_out"])]
    + [(*one, 6) for one in each_code(["encode", "decode", "reduce", "errors_in"], few=["reduce"])],
)
def test_every_call_of_the_driver_may_fail_in_a_call_on_a_codec(name, code, status, kind):
    """Checks that the state is unchanged and a second call works, or that every call but a reset reports an error."""
    run_codec(f"""
KIND, NAME, CODE, STATUS = {kind}, {name!r}, {code}, Status.{status}
exec({CALLS!r})
assert [*CALLS] == {NAMES}
if KIND != ONEBIT:
    del CALLS["scales"]  # refused before anything else
place = Place()
stream_at_home = fake.fake_stream_here()
torn_ones, calls = set(), 0

def one_failure(name, number, stream, abroad):
    # Returns False if the call makes fewer driver calls.
    make, apply = CALLS[name]
    codec, m = prepared(name, place)
    m.stream = None if stream is None else ctypes.c_void_p(stream)
    fake.fake_finish()
    with codec:
        if abroad:
            fake.fake_enter(0, 200)
        held = lambda: (fake.fake_allocations(), fake.fake_frees(), fake.fake_in_use(0), fake.fake_depth())
        before, launches = held(), fake.fake_launches()
        got, failed = failing(fake, number, CODE, lambda: make(codec.handle, m))
        launches = fake.fake_launches() - launches
        make_good(fake, failed)
        assert (held(), fake.fake_capture_mode()) == (before, 0), failed
        if got:
            assert got == STATUS and failed.removesuffix("_v2") in last_error(), (failed, got, last_error())
        else:
            # 201 is also how a driver says that no context is current.
            assert "Pop" in failed or not failed or (CODE, failed) == (201, "cuCtxGetId"), failed + " is not checked"
        torn = bool(failed) and launches == TORN.get(name)
        if got and torn and "Pop" not in failed:
            torn_ones.add(name)
            for other, (make_other, _) in CALLS.items():
                if other not in ("commit", "rollback", "reset"):
                    expect(make_other(codec.handle, m), Status.CUDA, "gc_codec_reset")
            assert CALLS["reset"][0](codec.handle, m) == 0, last_error()
            codec.model.reset()
        if got:
            assert make(codec.handle, m) == 0, (failed, last_error())
        fake.fake_finish()
        if abroad:
            fake.fake_leave()
        compare(codec, m, apply(codec.model, m))
    place.release()
    return bool(failed)

for stream, abroad in (None, False), (None, True), (stream_at_home, True):
    for number in range(50):
        try:
            if not one_failure(NAME, number, stream, abroad):
                break
        except Exception as error:
            raise AssertionError(f"call {{number}}, stream {{stream}}, abroad {{abroad}}") from error
    assert 1 < number < 49, number
assert torn_ones == {{NAME}} & set(TORN), torn_ones
""")


@pytest.mark.parametrize("code", [code for code, _ in CODES])
def test_every_call_of_the_driver_may_fail_when_a_codec_is_freed(code):
    run_codec(f"""
place = Place()
for abroad in False, True:
    for number in range(50):
        if abroad:  # the codec belongs to the primary context
            fake.fake_leave()
        codec = Checked(place, codec=ONEBIT, segments=[100_000], server=0)
        if abroad:
            fake.fake_enter(0, 200)
        in_use, depth = fake.fake_in_use(0), fake.fake_depth()
        _, failed = failing(fake, number, {code}, lambda: lib.gc_codec_free(codec.handle))
        freed = in_use - fake.fake_in_use(0)
        make_good(fake, failed)
        # Without a context, or in a capture of another thread, no memory can be freed. Otherwise all is freed.
        assert freed > 800_000 or failed and freed == 0, (failed, freed)
        assert freed or failed in ("cuCtxGetId", "cuCtxPushCurrent_v2", "cuThreadExchangeStreamCaptureMode",
                                   "cuMemFree_v2"), failed
        assert (fake.fake_depth(), fake.fake_capture_mode()) == (depth, 0), failed
        if abroad:
            fake.fake_leave()
            fake.fake_enter(0, 100)
        if not failed:
            break
    assert 3 < number < 49, number
""")


def test_a_decode_checks_both_headers_of_a_unit_in_two_chunks():
    """Changes a byte of the header of one chunk. Units have 1024 elements; chunks have 1504, or 1536."""
    run_codec("""
place, x = Place(), np.random.default_rng(1).standard_normal(3000).astype("f4")
for kind in 3, 4, 5, 6, 7:
    with Checked(place, codec=kind, segments=[x.size], error=None, n_chunks=2) as codec:
        sound = np.array(codec.encode([x]))
        for chunk in 0, 1:
            payload = sound.copy()
            payload[chunk, 4] ^= 0x40
            for add in False, True:
                codec.decode(payload, add=add)
place.release()
""")
