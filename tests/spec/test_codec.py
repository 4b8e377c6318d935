"""Tests of codecs on the CPU and on the device against docs/NUMERICS.md in NumPy: all give the same bytes. Streams,
graphs and contexts are tested on the device alone."""

import copy
import ctypes
import os

import numpy as np
import pytest

import block_cases
import capi
import driver
import gpu
import layouts
from block_cases import NAMES
from block_model import INT4, INT8, MXFP4, MXFP8
from capi import CUDA_HOST, Status
from codec_model import CORRUPT, NONFINITE, ONEBIT, SIGN, TRANSACTIONAL
from codecs_c import (
    Checked, Host, Refused, call, gradient, invalid_payloads, one_case, random_block_options, random_options,
    same, views,
)  # fmt: skip
from tiers import both

SEED = int(os.environ.get("CODEC_SEED", "0"))
# Random cases of each family: on the CPU, and on the device.
CPU_CASES = int(os.environ.get("CODEC_CASES", both(quick=40, all=3000)))
CASES = int(os.environ.get("CODEC_CASES", gpu.sized(gpu=300, quick=60, all=1000)))
MOST = gpu.sized(gpu=1_000_000, quick=20_000, all=20_000)  # elements


@pytest.mark.parametrize("options", [random_options, random_block_options], ids=["bits", "blocks"])
def test_random_codecs_match_the_specification(place, options):
    is_host = isinstance(place, Host)
    cases, most = (CPU_CASES, 100_000) if is_host else (CASES, MOST)
    if options is random_block_options:  # test_block_codecs has more of these
        cases = max(1, cases * 2 // 3)
    print(f"CODEC_SEED={SEED}, {cases} cases")
    for seed in range(SEED, SEED + cases):
        if not is_host:
            place.start_again()
        with layouts.case(seed=seed):
            one_case(place, seed, 3000 if seed % 10 else most if seed % 100 == 50 else min(most, 100_000), options)


ON_BOTH = [(place, name) for place in ("cpu", "cuda") for name in block_cases.CASES]
# On the CPU a case runs with two of the five codecs, and the next case with two others.
FEW = [(place, name) for k, (place, name) in enumerate(ON_BOTH) if place == "cuda" or (k - k // 5) % 5 in (0, 2)]


@pytest.mark.parametrize("place, name", both(quick=FEW, all=ON_BOTH), indirect=["place"])
def test_block_codecs(place, name):
    block_cases.CASES[name](place)


@pytest.mark.parametrize("kind", [ONEBIT, SIGN])
def test_invalid_payloads_are_reported_and_not_decoded(place, kind):
    invalid_payloads(place, kind)


@pytest.mark.parametrize("kind", [ONEBIT, *NAMES])
def test_a_state_is_refused_during_a_pending_step_and_kept_later(place, kind):
    """Checks that a state is refused while a reduce is pending; later it stays, for any step pending before."""
    with Checked(place, codec=kind, segments=[100], nonfinite=TRANSACTIONAL, server=0) as codec:
        payload = codec.encode([np.arange(-30, 70, dtype="f4")])
        codec.commit()
        state, halves = place.put(codec.state()), copy.deepcopy((codec.model.worker, codec.model.reducer))
        codec.reduce(payload[:1])
        try:
            call("gc_codec_state_in", codec.handle, state.view, None)
            raise AssertionError("a state was taken while a step was pending")
        except Refused as refusal:
            assert refusal.status == Status.INVALID_ARGUMENT, capi.last_error()
        codec.commit()
        codec.compare_all()
        call("gc_codec_state_in", codec.handle, state.view, None)
        codec.model.worker, codec.model.reducer = halves
        codec.commit()  # no step is pending
        codec.compare_all()
        codec.reduce(payload[:1])
        codec.commit()
        codec.compare_all()


def test_a_skip_scalar_other_than_0_takes_a_step_back(place):
    """Checks that any scalar but 0 takes a step back: -0.0 is 0, and 256 is not, though its lowest byte is."""
    for skip in (np.bool_(0), np.bool_(1), np.int32(0), np.int32(256), np.int32(-(2**31)), np.float32(0.0),
                 np.float32(-0.0), np.float32(1e-45), np.float32(np.nan)):  # fmt: skip
        for kind in (ONEBIT, *NAMES):
            with Checked(place, codec=kind, segments=[10], nonfinite=TRANSACTIONAL) as codec:
                codec.encode([np.arange(10, dtype="f4")])
                codec.commit(skip)
                codec.compare_all()


@pytest.fixture
def arena(memory):
    memory.start_again()
    return memory


@pytest.mark.parametrize("kind", [ONEBIT, *NAMES])
def test_states_move_from_the_device_to_the_cpu_and_back(arena, kind):
    rng = np.random.default_rng(1)
    options = dict(codec=kind, segments=[70_000, 3], n_chunks=2, server=1)
    with Checked(arena, **options) as there, Checked(Host(), **options) as here:
        for step in range(6):
            gradients = [gradient(rng, n, "float32", False) for n in options["segments"]]
            one, other = (there, here) if step % 2 else (here, there)
            payload = one.encode(gradients)
            one.reduce(np.stack([payload[1]] * 3))
            state = one.state()
            call("gc_codec_state_in", other.handle, other.place.put(state).view, None)
            other.model.worker, other.model.reducer = one.model.worker, one.model.reducer
            other.state()
            other.errors()


def test_a_state_of_another_codec_is_flagged_and_changes_nothing(arena):
    with Checked(arena, codec=ONEBIT, segments=[100]) as codec:
        codec.encode([np.ones(100, "f4")])
        state = codec.state()
        for at in [*range(56), 64 + 3]:
            changed = state.copy()
            changed[at] ^= 0x80
            call("gc_codec_state_in", codec.handle, arena.put(changed).view, None)
            codec.model.note(CORRUPT)
            codec.flags()
        codec.state()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [ONEBIT, INT8, MXFP4])
def test_each_replay_of_a_captured_step_counts_as_a_call(arena, stream, kind):
    """Captures encode, decode, reduce and commit in one graph, and replays it 100 times: the state is on the device."""
    rng = np.random.default_rng(9)
    options = dict(codec=kind, segments=[50_001, 0, 1000], n_chunks=2, server=0, nonfinite=TRANSACTIONAL)
    g = [gradient(rng, n, "float32", False) for n in options["segments"]]
    with Checked(arena, **options) as codec:
        put = [arena.put(x) for x in g]
        payload = arena.put(np.zeros((2, codec.model.stride), np.uint8))
        dst = arena.put(np.zeros(codec.model.stride, np.uint8))
        values = [arena.put(np.zeros(n, "f4")) for n in options["segments"]]
        chunks = gpu.at(payload.struct.dl_tensor.data, (1, codec.model.stride))
        driver.synchronize()
        with driver.Graph(stream) as graph:
            call("gc_codec_encode", codec.handle, views(put), 3, None, None, payload.view, stream)
            call("gc_codec_decode", codec.handle, payload.view, 1, None, 0, views(values), 3, stream)
            call("gc_codec_reduce", codec.handle, 0, chunks.view, dst.view, stream)
            call("gc_codec_commit", codec.handle, None, stream)
        for _ in range(100):
            graph.replay(stream)
            sent = codec.model.encode(g).reshape(2, -1)
            decoded = codec.model.decode(sent.reshape(-1))
            reduced = codec.model.reduce(sent[:1])
            codec.model.commit()
        driver.wait_for(stream)
        same(arena.get(payload), sent, "payload")
        same(arena.get(dst), reduced, "reduced chunk")
        for one, expected in zip(values, decoded):
            same(arena.get(one), expected, "values")
        codec.compare_all()
        graph.destroy()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [ONEBIT, MXFP8])
def test_a_decode_waits_for_earlier_work_on_its_stream(arena, stream, kind):
    """Tests launches that may begin early, behind a copy and behind a kernel, in a graph and without one."""
    rng, n = np.random.default_rng(10), 3_000_001
    with Checked(arena, codec=kind, segments=[n], n_chunks=1) as codec:
        sent = [arena.put(np.zeros(codec.model.stride, np.uint8)) for _ in range(2)]
        for one in sent:
            g = arena.put(rng.standard_normal(n, np.float32))
            call("gc_codec_encode", codec.handle, views([g]), 1, None, None, one.view, stream)
        payload, values = arena.put(np.zeros(codec.model.stride, np.uint8)), arena.put(np.zeros(n, "f4"))
        driver.wait_for(stream)
        expected = [codec.model.decode(arena.get(one))[0] for one in sent]

        def decode_behind(one):
            driver.copy(payload.struct.dl_tensor.data, one.struct.dl_tensor.data, codec.model.stride, stream)
            call("gc_codec_decode", codec.handle, payload.view, 1, None, 0, views([values]), 1, stream)

        graphs = []
        for one in sent:
            with driver.Graph(stream) as graph:
                decode_behind(one)
            graphs.append(graph)
        for turn in range(20):
            one = turn % 2
            graphs[one].replay(stream) if turn < 10 else decode_behind(sent[one])
            driver.wait_for(stream)
            same(arena.get(values), expected[one], f"turn {turn}")
        for graph in graphs:
            graph.destroy()


def test_flags_and_scales_are_written_to_pinned_memory(arena, stream):
    with Checked(arena, codec=ONEBIT, segments=[10, 0]) as codec, driver.Memory(64, "pinned") as memory:
        codec.encode([np.full(10, np.nan, "f4"), np.zeros(0, "f4")])
        driver.synchronize()
        flags, scales = (
            gpu.at(memory.address, (1,), "uint32", kind=CUDA_HOST), gpu.at(memory.address + 8, (2,), "float32", kind=CUDA_HOST)
        )  # fmt: skip
        call("gc_codec_flags", codec.handle, flags.view, stream)
        call("gc_codec_scales", codec.handle, scales.view, stream)
        driver.wait_for(stream)
        found = np.frombuffer((ctypes.c_char * 16).from_address(memory.address), np.uint8)
        assert found[:4].view(np.uint32)[0] == NONFINITE
        same(found[8:16].view("f4"), np.array(codec.model.last_scales, "f4"), "scales")
        on_host = capi.Tensor(np.zeros(1, np.uint32))
        with pytest.raises(Refused) as refusal:
            call("gc_codec_flags", codec.handle, on_host.view, stream)
        assert refusal.value.status == Status.INVALID_ARGUMENT


def test_a_codec_stays_in_its_context(arena):
    with Checked(arena, codec=ONEBIT, segments=[1000]) as codec:
        g = arena.put(np.ones(1000, "f4"))
        payload = arena.put(np.zeros(codec.model.stride, np.uint8))
        with driver.own_context():
            with driver.Stream() as foreign, pytest.raises(Refused) as refusal:
                call("gc_codec_encode", codec.handle, views([g]), 1, None, None, payload.view, foreign.handle)
            assert refusal.value.status == Status.INVALID_ARGUMENT
            # NULL is the codec's own stream, for any current context.
            call("gc_codec_encode", codec.handle, views([g]), 1, None, None, payload.view, None)
        driver.synchronize()
        same(arena.get(payload).reshape(-1), codec.model.encode([np.ones(1000, "f4")]), "payload")


def launched():
    """Returns the number of launches on the stand-in driver, else 0."""
    return driver.raw("fake_launches") if driver.IS_STAND_IN else 0


# A launch takes the addresses of 448 segments (MOST_ADDRESSES in kernels/state.cuh).
@pytest.mark.parametrize("count", gpu.sized(gpu=[1000], quick=[449], all=[448, 449, 897, 1000]))
@pytest.mark.parametrize("kind", [ONEBIT, INT4])
def test_more_segments_than_one_launch_can_address(place, kind, count):
    rng = np.random.default_rng(6)
    segments = [int(n) for n in rng.integers(0, gpu.sized(gpu=3000, quick=30, all=30), count)]
    with Checked(place, codec=kind, segments=segments, n_chunks=3, server=2) as codec:
        launches = [launched()]
        payload = codec.encode([gradient(rng, n, "float32", False) for n in segments])
        launches.append(launched())
        codec.decode(payload, "bfloat16")
        launches.append(launched())
        codec.reduce(np.stack([payload[2]] * 2))
        codec.compare_all()
    if launches[0] != launches[2]:
        expected = 1 + -(-count // 448)  # ONEBIT makes its scales by another launch
        assert np.diff(launches).tolist() == [expected + (kind == ONEBIT), expected]
