"""Codecs on the device against docs/NUMERICS.md in NumPy, as tests/python/test_codec.py does for the CPU: so the two have
the same bytes. And what only a device has: streams, graphs, contexts."""

import ctypes
import os
from ctypes import POINTER, byref

import numpy as np
import pytest

import block_cases
import capi
import codec_model
import driver
import gpu
from capi import CUDA_HOST, Status, lib
from codec_model import CORRUPT, MEAN, NONFINITE, ONEBIT, RMS, SIGN, TRANSACTIONAL, narrow, widen
from card import Card
from models import scaled_signs
from block_model import INT4, INT8, MXFP4, MXFP8
from codecs_c import (
    Checked, Host, Refused, call, gradient, one_case, options_of, or_null, random_block_options, same, strangers, views,
)  # fmt: skip
from tiers import both

CASES = int(os.environ.get("CODEC_CASES", "300"))
SEED = int(os.environ.get("CODEC_SEED", "0"))


@pytest.fixture(scope="module")
def card():
    driver.use(driver.primary())
    return Card()


@pytest.fixture(autouse=True)
def start_again(card):
    card.start_again()


def test_random_codecs_do_what_the_specification_says(card):
    print(f"CODEC_SEED={SEED}, {CASES} cases")
    for seed in range(SEED, SEED + CASES):
        card.start_again()
        try:
            one_case(card, seed, 3000 if seed % 10 else (1_000_000 if seed % 100 == 50 else 100_000))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_random_block_codecs_do_what_the_specification_says(card):
    """And so the same as the CPU, which is held to it by the same cases."""
    for seed in range(SEED, SEED + both(quick=100, all=1000)):
        card.start_again()
        most = 3000 if seed % 10 else (1_000_000 if seed % 100 == 50 else 100_000)
        try:
            one_case(card, seed, most, random_block_options)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("name", block_cases.CASES)
def test_block_codecs(card, name):
    block_cases.CASES[name](card)


@pytest.mark.parametrize("kind", [ONEBIT, SIGN])
def test_what_a_stranger_sends_is_flagged_and_zeros_written(card, kind):
    strangers(card, kind)


@pytest.mark.parametrize("kind", [ONEBIT, *block_cases.NAMES])
def test_states_go_from_the_device_to_the_cpu_and_back(card, kind):
    rng = np.random.default_rng(1)
    options = dict(codec=kind, segments=[70_000, 3], n_chunks=2, server=1)
    with Checked(card, **options) as there, Checked(Host(), **options) as here:
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


def test_a_state_of_another_codec_is_flagged_and_changes_nothing(card):
    with Checked(card, codec=ONEBIT, segments=[100]) as codec:
        codec.encode([np.ones(100, "f4")])
        state = codec.state()
        for at in [*range(56), 64 + 3]:
            changed = state.copy()
            changed[at] ^= 0x80
            call("gc_codec_state_in", codec.handle, card.put(changed).view, None)
            codec.model.note(CORRUPT)
            codec.flags()
        codec.state()


@pytest.mark.parametrize("e_dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("g_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rule", [RMS, MEAN])
def test_the_plain_form_does_what_the_specification_says(card, rule, g_dtype, e_dtype):
    rng = np.random.default_rng(7)
    for n in [0, 1, 7, 8, 9, 1023, 1024, 1025, 8192, 65536, 65537, 100_003, 1_000_003]:
        for special in (False, True):
            card.start_again()
            g = gradient(rng, n, g_dtype, special)
            e = None if e_dtype is None else narrow(rng.standard_normal(n).astype(np.float32), e_dtype)
            n_chunks = int(rng.integers(1, 5))
            grad = card.put(g, "bfloat16" if g_dtype == "bfloat16" else None, aligned=n % 2 == 0)
            error = None if e is None else card.put(e, "bfloat16" if e_dtype == "bfloat16" else None, aligned=n % 3 == 0)
            dst = card.put(np.full((n_chunks, capi.chunk_bytes(n, n_chunks)), 0x5A, np.uint8), aligned=n % 5 != 0)
            scale = card.put(np.full(1, 7, np.float32))
            workspace = card.put(np.full(lib.gc_onebit_workspace_bytes(n), 0x5A, np.uint8))
            call("gc_onebit_compress_into", grad.view, or_null(error), rule, dst.view, scale.view, workspace.view, None)
            bits, s, new = codec_model.plain(
                widen(g, g_dtype), None if e is None else widen(e, e_dtype), rule, e_dtype
            )
            expected = np.zeros(n_chunks * capi.chunk_bytes(n, n_chunks), np.uint8)
            packed = np.packbits(bits)
            expected[: packed.size] = packed
            same(card.get(dst).reshape(-1), expected, f"chunks of {n}")
            same(card.get(scale), np.array([s], np.float32), f"scale of {n}")
            if e is not None:
                same(card.get(error), narrow(new, e_dtype) if np.isfinite(s) else e, f"error of {n}")


def test_the_plain_form_allocates_its_chunks(card):
    rng = np.random.default_rng(3)
    g, e = rng.standard_normal((2, 1001)).astype(np.float32)
    bits, s, new = codec_model.plain(g, e, RMS, "float32")
    grad, error = card.put(g), card.put(e)
    out, scale = (capi.Managed * 3)(), ctypes.c_float(7)
    gpu.check(lib.gc_onebit_compress(grad.managed, error.managed, 3, out, byref(scale)))
    same(np.concatenate([gpu.take(chunk) for chunk in out]), np.packbits(bits), "chunks")
    assert scale.value == s
    same(card.get(error), new, "error")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_chunks_are_decompressed_with_a_scale_each(card, dtype):
    rng = np.random.default_rng(4)
    special = np.array([1e-45, 65519, 65520, -0.0, np.inf, -np.nan, 1.5, -3e-8], np.float32)
    for n in [0, 1, 9, 400, 65_537, 1_000_003]:
        for n_chunks in (1, 3, special.size):
            card.start_again()
            bits = rng.integers(0, 256, (n_chunks, capi.chunk_bytes(n, n_chunks)), np.uint8)
            scales = rng.permutation(special)[:n_chunks]
            chunks = [card.put(row, aligned=n % 2 == 0) for row in bits]
            out, of_chunks = capi.Managed(), (ctypes.c_float * n_chunks).from_buffer_copy(scales)
            gpu.check(lib.gc_onebit_decompress(
                capi.managed_array(chunks), n_chunks, of_chunks, n, capi.dldtype(dtype), byref(out)
            ))  # fmt: skip
            ctypes.memset(of_chunks, 0xFF, 4 * n_chunks)  # nobody reads them any more
            expected = scaled_signs(
                np.unpackbits(bits.reshape(-1))[:n], dtype, np.repeat(scales, 8 * bits.shape[1])[:n]
            )
            same(gpu.take(out), expected, f"{n} in {n_chunks} chunks")


@pytest.mark.parametrize("kind", [ONEBIT, INT8, MXFP4])
def test_a_captured_step_replayed_is_as_many_calls(card, stream, kind):
    """Encode, decode, reduce and commit in one graph, 100 times: the state counts on the device."""
    rng = np.random.default_rng(9)
    options = dict(codec=kind, segments=[50_001, 0, 1000], n_chunks=2, server=0, nonfinite=TRANSACTIONAL)
    g = [gradient(rng, n, "float32", False) for n in options["segments"]]
    with Checked(card, **options) as codec:
        put = [card.put(x) for x in g]
        payload = card.put(np.zeros((2, codec.model.stride), np.uint8))
        dst = card.put(np.zeros(codec.model.stride, np.uint8))
        values = [card.put(np.zeros(n, "f4")) for n in options["segments"]]
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
        same(card.get(payload), sent, "payload")
        same(card.get(dst), reduced, "reduced chunk")
        for one, expected in zip(values, decoded):
            same(card.get(one), expected, "values")
        codec.compare_all()
        graph.destroy()


@pytest.mark.parametrize("kind", [ONEBIT, MXFP8])
def test_a_decode_waits_for_whatever_is_ahead_of_it(card, stream, kind):
    """Launches that may begin early, behind a copy and behind a kernel, in a graph and without one."""
    rng, n = np.random.default_rng(10), 3_000_001
    with Checked(card, codec=kind, segments=[n], n_chunks=1) as codec:
        sent = [card.put(np.zeros(codec.model.stride, np.uint8)) for _ in range(2)]
        for one in sent:
            g = card.put(rng.standard_normal(n, np.float32))
            call("gc_codec_encode", codec.handle, views([g]), 1, None, None, one.view, stream)
        payload, values = card.put(np.zeros(codec.model.stride, np.uint8)), card.put(np.zeros(n, "f4"))
        driver.wait_for(stream)
        expected = [codec.model.decode(card.get(one))[0] for one in sent]

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
            same(card.get(values), expected[one], f"turn {turn}")
        for graph in graphs:
            graph.destroy()


def test_flags_and_scales_go_to_pinned_memory(card, stream):
    with Checked(card, codec=ONEBIT, segments=[10, 0]) as codec, driver.Memory(64, "pinned") as memory:
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


def test_a_codec_keeps_to_its_context(card):
    with Checked(card, codec=ONEBIT, segments=[1000]) as codec:
        g = card.put(np.ones(1000, "f4"))
        payload = card.put(np.zeros(codec.model.stride, np.uint8))
        with driver.own_context():
            with driver.Stream() as foreign, pytest.raises(Refused) as refusal:
                call("gc_codec_encode", codec.handle, views([g]), 1, None, None, payload.view, foreign.handle)
            assert refusal.value.status == Status.INVALID_ARGUMENT
            # NULL is the codec's own stream, whatever is current.
            call("gc_codec_encode", codec.handle, views([g]), 1, None, None, payload.view, None)
        driver.synchronize()
        same(card.get(payload).reshape(-1), codec.model.encode([np.ones(1000, "f4")]), "payload")


@pytest.mark.parametrize("kind", [ONEBIT, INT4])
def test_five_hundred_segments_are_more_than_one_launch(card, kind):
    rng = np.random.default_rng(6)
    segments = [int(n) for n in rng.integers(0, 3000, 1000)]
    with Checked(card, codec=kind, segments=segments, n_chunks=3, server=2) as codec:
        for _ in range(2):
            card.start_again()
            payload = codec.encode([gradient(rng, n, "float32", False) for n in segments])
            codec.decode(payload, "bfloat16")
            codec.reduce(np.stack([payload[2]] * 2))
            codec.compare_all()
