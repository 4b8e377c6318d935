"""Tests of codecs on the CPU alone, beside those of tests/spec for all devices; and refusals."""

import json
import pathlib
import re
import struct
import threading
from ctypes import POINTER, byref

import numpy as np
import pytest

import capi
import codec_model
import golden
from capi import Status, Tensor, in_threads, lib, says
from block_model import INT4, INT8
from codec_model import MEAN, NONFINITE, ONEBIT, SIGN, TRANSACTIONAL, ZERO
from tiers import both
from codecs_c import Checked, Host, Refused, call, gradient, model_of, options_of, same, views

HOST = Host()


def test_the_example_by_hand():
    """Reads the example of section 10 from the page."""
    page = pathlib.Path(__file__).parents[2].joinpath("docs", "NUMERICS.md").read_text()
    page = page.split("\n## 10. ")[1].split("\n## ")[0]
    lines = re.findall(r"^    ((?:[0-9a-f]{2} +){15}[0-9a-f]{2})(?: |$)", page, re.M)
    expected = bytes.fromhex("".join(lines))
    with Checked(HOST, codec=ONEBIT, segments=[2]) as codec:
        assert codec.encode([np.array([1, -7], "f4")]).tobytes() == expected
        second = codec.encode([np.array([2, 4], "f4")]).tobytes()
        assert (struct.unpack_from("<f", second, 64)[0], second[80]) == (2.0, 0x40)
        codec.errors()


def test_sums_of_units_are_added_in_the_order_of_the_specification():
    # The sum of 1 and 2^-24 lies between two float32. 2^-53 is lost beside it; two of them, added before, are not.
    units, rng, scales = 256, np.random.default_rng(5), set()
    for trial in range(25):
        g = np.zeros((units, 1024), np.float32)
        g[rng.choice(units, 4, replace=False), rng.integers(0, 1024, 4)] = 1, 2.0**-24, 2.0**-53, 2.0**-53
        expected = codec_model.scale_of(g.reshape(-1), MEAN)
        with Checked(HOST, codec=ONEBIT, segments=[g.size], error=None, scale=MEAN) as codec:
            payload = codec.encode([g.reshape(-1)])
        same(payload[0, 64:68], np.array([expected], np.float32).view(np.uint8), f"scale of trial {trial}")
        scales.add(expected)
    assert len(scales) == 2, "one of the two outcomes never happened"


# --- payloads and states of other senders -----------------------------------------------------------------------------


def test_scales_that_are_not_finite_are_decoded_and_flagged():
    with Checked(HOST, codec=ONEBIT, segments=[9]) as codec:
        payload = codec.encode([np.ones(9, "f4")])
        for value in [np.inf, np.nan, -np.nan]:
            changed = payload.copy()
            changed[0, 64:68] = np.array([value], "f4").view(np.uint8)
            for dtype in ("float32", "float16", "bfloat16"):
                codec.decode(changed, dtype)
                assert codec.flags() == NONFINITE


def test_states_of_another_codec_are_refused():
    with Checked(HOST, codec=ONEBIT, segments=[100]) as codec:
        codec.encode([np.ones(100, "f4")])
        state = codec.state()
        for at in [*range(56), 64 + 3]:
            changed = state.copy()
            changed[at] ^= 0x80
            with pytest.raises(Refused) as refusal:
                call("gc_codec_state_in", codec.handle, HOST.put(changed).view, None)
            assert refusal.value.status == Status.CORRUPT, at
        codec.state()
        changed = state.copy()
        changed[256 + 400 :] = 0xFF  # padding is never read as an error
        call("gc_codec_state_in", codec.handle, HOST.put(changed).view, None)
        codec.encode([np.full(100, 2, "f4")])
        codec.compare_all()


def numbers_of(model):
    """Returns the place and dtype of each number of a state that may be non-finite with PROPAGATE alone."""
    scales = [(64 + 4 * i, "f4") for i, n in enumerate(model.segments) if n]
    kept = (64 + 4 * len(model.segments) + 255) // 256 * 256
    return scales + [(kept, "f4"), (kept + 4 * (model.segments[0] - 1), "f4")]


@pytest.mark.parametrize("policy", [0, ZERO, TRANSACTIONAL])
def test_a_transactional_state_with_non_finite_scales_is_refused(policy):
    with Checked(HOST, codec=ONEBIT, segments=[100, 0, 3], nonfinite=policy) as codec:
        codec.encode([np.ones(n, "f4") for n in (100, 0, 3)])
        if policy == TRANSACTIONAL:
            codec.commit()
        state = codec.state()
        for at, dtype in numbers_of(codec.model):
            for number in (np.inf, np.nan, -np.nan):
                changed = state.copy()
                changed[at : at + 4] = np.array([number], dtype).view(np.uint8)
                status = lib.gc_codec_state_in(codec.handle, HOST.put(changed).view, None)
                assert status == (0 if policy == 0 else Status.CORRUPT), (at, number)
            call("gc_codec_state_in", codec.handle, HOST.put(state).view, None)
        changed = state.copy()
        changed[64 + 4 : 64 + 8] = np.array([1], "f4").view(np.uint8)  # the scale of a segment without elements
        assert lib.gc_codec_state_in(codec.handle, HOST.put(changed).view, None) == Status.CORRUPT
        assert says(capi.last_error(), "segment 1")
        codec.flags()
        codec.state()


def test_a_state_of_sign_has_scales_of_1_and_0():
    with Checked(HOST, codec=SIGN, error=None, segments=[100, 7]) as codec:
        state = codec.state()
        for number, status in [(1, 0), (0, 0), (2, Status.CORRUPT), (-0.0, Status.CORRUPT), (np.nan, Status.CORRUPT)]:
            changed = state.copy()
            changed[64 : 64 + 4] = np.array([number], "f4").view(np.uint8)
            assert lib.gc_codec_state_in(codec.handle, HOST.put(changed).view, None) == status, number


def test_a_reduce_of_a_corrupt_chunk_begins_a_step():
    """Checks this on the CPU, as on a GPU, whose host cannot find out what the GPU will read."""
    with Checked(HOST, codec=ONEBIT, segments=[100], nonfinite=TRANSACTIONAL, server=0) as codec:
        payload = codec.encode([np.ones(100, "f4")])
        codec.commit()
        state = codec.state()
        chunks, dst = HOST.put(payload.copy()), HOST.put(np.zeros(payload.size, np.uint8))
        chunks.array[0, 0] ^= 1
        for end in ("commit", "rollback"):
            assert lib.gc_codec_reduce(codec.handle, 0, chunks.view, dst.view, None) == Status.CORRUPT
            kept = HOST.put(np.zeros(state.size, np.uint8))
            assert lib.gc_codec_state_out(codec.handle, kept.view, None) == Status.INVALID_ARGUMENT
            assert says(capi.last_error(), "pending")
            call(f"gc_codec_{end}", codec.handle, *([None] if end == "commit" else []), None)
            call("gc_codec_state_out", codec.handle, kept.view, None)
            same(HOST.get(kept), state, "state")


@pytest.mark.parametrize("place", [0, 50, 99])
def test_values_that_share_a_byte_are_found_in_any_order(place):
    count, rng = 100, np.random.default_rng(place)
    with Checked(HOST, codec=ONEBIT, segments=[8] * count) as codec:
        payload = HOST.put(codec.encode([np.ones(8, "f4")] * count))
        memory = np.zeros((count, 8), np.float32)
        order = rng.permutation(count)
        values = [Tensor(memory[index]) for index in order]
        call("gc_codec_decode", codec.handle, payload.view, 1, None, 0, views(values), count, None)
        assert (memory == 1).all()
        other = (place + 1) % count
        place, other = min(place, other), max(place, other)
        shared = memory.reshape(-1)[8 * order[place] + 7 :][:8] if order[place] < count - 1 else memory[order[place]]
        values[other] = Tensor(shared)
        status = lib.gc_codec_decode(codec.handle, payload.view, 1, None, 0, views(values), count, None)
        assert status == Status.INVALID_ARGUMENT and says(capi.last_error(), f"values[{other}]", f"values[{place}]", "intersect")


# Place of a byte in a payload of 100, 0 and 100 elements in two chunks, its new value, and words of the refusal.
CHANGES = [
    (0, ord("X"), "magic"), (3, 0, "magic"), (4, 2, "version 0x1"), (5, 1, "version"),
    (6, 2, "codec GC_CODEC_ONEBIT expected, got GC_CODEC_SIGN"), (6, 9, "codec 0x1 expected, got 0x9"),
    (8, 1, "dtype of values 0"), (9, 1, "dtype of results"), (10, 1, "scale rule"), (11, 1, "reduction 0x0"), (12, 1, "block"),
    (16, 3, "number of chunks 0x2"), (20, 7, "chunk number"), (24, 9, "number of segments 0x3"), (28, 1, "flags"),
    (28, 4, "flags"), (31, 0x80, "flags"), (32, 9, "number of elements"), (47, 0xFF, "number of bytes"), (48, 0, "digest"),
    (56, 1, "last field"), (67, 0xBF, "scale -"), (68, 1, "scale 0"), (71, 0x80, "scale 0"),
]  # fmt: skip


@pytest.mark.parametrize("at, byte, words", CHANGES)
def test_a_refused_chunk_is_named_with_the_reason(at, byte, words):
    with Checked(HOST, codec=ONEBIT, segments=[100, 0, 100], n_chunks=2, server=0) as codec:
        payload = codec.encode([gradient(np.random.default_rng(9), n, "float32", False) for n in (100, 0, 100)])
        for chunk in (0,) if at == 67 else (0, 1):  # the second chunk holds none of the first segment
            bad = payload.copy()
            bad[chunk, at] = byte
            codec.decode(bad)
            assert f"payload: chunk {chunk}: {words}" in capi.last_error()
        bad = np.stack([payload[0]] * 3)
        bad[1, at] = byte
        codec.reduce(bad)
        assert f"chunks[1]: {words}" in capi.last_error()
        codec.compare_all()


@pytest.mark.parametrize("n_chunks", [1, 2])
def test_a_payload_of_another_length_is_refused_by_the_name_of_its_codec(n_chunks):
    with (
        Checked(HOST, codec=INT8, segments=[2000], n_chunks=n_chunks) as codec,
        Checked(HOST, codec=INT4, segments=[2000], n_chunks=n_chunks) as other,
    ):
        payload = other.encode([np.ones(2000, "f4")]).reshape(-1)
        values = HOST.put(np.full(2000, 5, "f4"))
        expected = lib.gc_codec_payload_bytes(codec.handle)

        def refuse(payload, *words):
            refused(Status.SHAPE_MISMATCH, ["payload", expected, payload.array.size, *words], "gc_codec_decode",
                    codec.handle, payload.view, 1, None, 0, views([values]), 1, None)  # fmt: skip
            assert (values.array == 5).all()

        refuse(HOST.put(payload), "bytes of GC_CODEC_INT8 expected", "bytes of GC_CODEC_INT4")
        for at in 0, 4, 7:  # magic, version, codec: the payload may be anything
            changed = payload.copy()
            changed[at] ^= 0x80
            refuse(HOST.put(changed), f"{expected} elements expected")
        refuse(HOST.put(payload[:63]), f"{expected} elements expected")
        refuse(HOST.put(payload.view(np.int8)), f"{expected} elements expected")


# --- golden -----------------------------------------------------------------------------------------------------------

GOLDEN = json.loads(pathlib.Path(__file__).with_name("golden_codecs.json").read_text())["cases"]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: str(case["options"]))
def test_payloads_and_states_of_version_1_are_read(case):
    """Reads results that the model wrote once: every later version reads what one version has sent or saved."""
    def floats(text):
        return np.frombuffer(bytes.fromhex(text), np.float32)

    model = model_of(**case["options"])
    handle = POINTER(capi.Codec)()
    call("gc_codec_create", byref(options_of(model, HOST.device)), byref(handle))
    payload = HOST.put(np.frombuffer(bytes.fromhex(case["payload"]), np.uint8))
    values = [HOST.put(np.full(n, 7, np.float32)) for n in model.segments]
    call("gc_codec_decode", handle, payload.view, 1, None, 0, views(values), len(values), None)
    for one, expected in zip(values, case["values"]):
        same(one.array, floats(expected), "values")

    state = np.zeros(case["state_bytes"], np.uint8)
    head, kept = (np.frombuffer(bytes.fromhex(case[part]), np.uint8) for part in ("state", "kept"))
    state[: head.size] = head
    state[head.size :][: kept.size] = kept
    call("gc_codec_state_in", handle, HOST.put(state).view, None)
    errors = [HOST.put(np.full(floats(e).size, 7, np.float32)) for e in case["errors"]]
    call("gc_codec_errors_out", handle, errors[0].view, errors[1].view if errors[1:] else None, None)
    for one, expected in zip(errors, case["errors"]):
        same(one.array, floats(expected), "errors")
    lib.gc_codec_free(handle)


def test_the_golden_results_match_the_model_and_the_library():
    """Compares some cases; tests/golden.rs replays the whole file."""
    of_file = [("case" + part).splitlines() for part in ("\n" + golden.PATH.read_text()).split("\ncase")[1:]]
    assert len(of_file) == golden.CASES
    for seed in both(quick=range(7, 15), all=range(golden.CASES)):  # cases before 7 are large
        assert golden.Script(seed).lines == of_file[seed], f"case {seed}: golden.py writes the file anew"


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(status, words, name, *arguments):
    with pytest.raises(Refused) as refusal:
        call(name, *arguments)
    assert refusal.value.status == status and says(capi.last_error(), *words), capi.last_error()


def test_a_state_is_not_read_while_a_step_is_pending():
    with Checked(HOST, codec=ONEBIT, segments=[10], nonfinite=TRANSACTIONAL) as codec:
        state = HOST.put(codec.state())
        codec.encode([np.ones(10, "f4")])
        errors = HOST.put(np.zeros(10, "f4"))
        for name, arguments in [
            ("gc_codec_state_out", [state.view]), ("gc_codec_state_in", [state.view]),
            ("gc_codec_errors_out", [errors.view, None]), ("gc_codec_errors_in", [errors.view, None]),
        ]:  # fmt: skip
            refused(Status.INVALID_ARGUMENT, ["pending"], name, codec.handle, *arguments, None)
        codec.commit()
        codec.compare_all()


def test_a_second_thread_in_a_codec_is_refused():
    """Checks that each call succeeds or returns BUSY, and that the codec is usable afterwards."""
    n = 1 << 20
    with Checked(HOST, codec=ONEBIT, segments=[n]) as codec:
        g = HOST.put(np.ones(n, "f4"))
        statuses, begin = [], threading.Barrier(2)

        def work(_):
            payload = HOST.put(np.zeros(lib.gc_codec_payload_bytes(codec.handle), np.uint8))
            begin.wait()
            for _ in range(50):
                status = lib.gc_codec_encode(codec.handle, views([g]), 1, None, None, payload.view, None)
                statuses.append(status)

        in_threads(2, work)
        assert set(statuses) == {Status.OK, Status.BUSY}, set(statuses)
        codec.reset()
        codec.encode([np.ones(n, "f4")])
