"""Tests of block codecs on the CPU: threads, options, and memory as on the pages. tests/spec tests their results."""

import ctypes
import os
import pathlib
import re

import numpy as np
import pytest

import capi
from block_cases import NAMES
from block_model import INT4, INT8
from capi import lib
from codecs_c import Checked, Host, same
from codec_model import ONEBIT, PROPAGATE, SIGN, TRANSACTIONAL, f32

HOST = Host()


@pytest.mark.parametrize("byte", (0, 1, 0x80, 0xFF))
def test_raw_is_any_byte_but_0(byte):
    """Checks `raw` with segments NULL, where it is one byte."""
    options = capi.CodecOptions(
        struct_size=ctypes.sizeof(capi.CodecOptions), codec=INT8, error=2, n_elements=100, raw=(ctypes.c_uint8 * 1)(byte)
    )
    handle = ctypes.POINTER(capi.Codec)()
    capi.check(lib.gc_codec_create(ctypes.byref(options), ctypes.byref(handle)))
    assert lib.gc_codec_payload_bytes(handle) == (64 + 400 if byte else 64 + 16 + 128)
    lib.gc_codec_free(handle)


def test_without_an_option_errors_are_float32():
    """Checks that the default is GC_ERROR_FLOAT32, 0: a block codec without state is made with GC_ERROR_NONE."""
    options = capi.CodecOptions(struct_size=ctypes.sizeof(capi.CodecOptions), codec=INT4, n_elements=100)
    handle = ctypes.POINTER(capi.Codec)()
    capi.check(lib.gc_codec_create(ctypes.byref(options), ctypes.byref(handle)))
    assert lib.gc_codec_state_bytes(handle) == 256 + 4096
    lib.gc_codec_free(handle)


DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
# Codec, and bytes of a payload per element.
MEMORY = re.findall(r"(?m)^\| `GC_CODEC_(\w+)` \|[^|]*\| ([\d.]+) \|", (DOCS / "CODECS.md").read_text(encoding="utf-8"))
NUMBERS = {"ONEBIT": ONEBIT, "SIGN": SIGN, **{name.upper(): number for number, name in NAMES.items()}}


def test_the_pages_have_the_memory_of_every_codec():
    assert sorted(name for name, _ in MEMORY) == sorted(NUMBERS)
    page = " ".join((DOCS / "CHOOSING.md").read_text(encoding="utf-8").split())
    assert "That is 4 (1 + 1/W) bytes per element" in page and "SIGN never does" in page


@pytest.mark.parametrize("name, payload", MEMORY, ids=[name for name, _ in MEMORY])
def test_the_pages_have_the_memory_of_a_rank_of_eight(name, payload):
    n, errors = 2**20, {None: 0, "float32": 4 * (1 + 1 / 8)}
    for error, said in errors.items() if name != "SIGN" else [(None, 0)]:
        with Checked(HOST, codec=NUMBERS[name], error=error, segments=[n], n_chunks=8, server=1) as handle:
            sizes = lib.gc_codec_payload_bytes(handle.handle) / n, lib.gc_codec_state_bytes(handle.handle) / n
            assert sizes == pytest.approx((float(payload), said), abs=1e-3)  # except for headers


def test_a_codec_whose_steps_can_be_taken_back_has_its_state_twice():
    n, taken, statm = 2**24, [], pathlib.Path("/proc/self/statm")
    for nonfinite in (PROPAGATE, TRANSACTIONAL):
        options = capi.CodecOptions(
            struct_size=ctypes.sizeof(capi.CodecOptions), codec=INT4, n_elements=n, nonfinite=nonfinite
        )
        handle, before = ctypes.POINTER(capi.Codec)(), int(statm.read_text().split()[0])
        capi.check(lib.gc_codec_create(ctypes.byref(options), ctypes.byref(handle)))
        taken.append((int(statm.read_text().split()[0]) - before) * os.sysconf("SC_PAGE_SIZE") / n)
        lib.gc_codec_free(handle)
    assert taken == pytest.approx([4, 8], rel=0.05)  # bytes of addresses per element


def test_a_raw_segment_is_sent_unchanged():
    with Checked(HOST, codec=INT4, segments=[5, 3], raw=[0, 1]) as handle:
        g = [np.ones(5, f32), f32([1e-45, -np.pi, 3e38])]
        same(handle.decode(handle.encode(g))[1], g[1], "raw values")
        handle.errors()
