"""Tests that failures are a status and a message, and that no memory is lost by them."""

import ctypes

import pytest

import capi
import driver
import gpu
from capi import AXIS_NONE, BIG, CUDA_MANAGED, Managed, Status, byref, check, last_error, lib, says
from gpu import Prepared

pytestmark = pytest.mark.gpu

GIB = 2**30


def refused(status, expected, *words):
    assert status == expected, f"{lib.gc_status_name(status).decode()}: {last_error()}"
    assert says(last_error(), *words), f"{last_error()!r} does not say {words}"


@pytest.mark.parametrize("kind", [capi.CUDA, CUDA_MANAGED])
@pytest.mark.parametrize("index", [97, -1, 2**31 - 1])
def test_a_missing_device_is_refused(index, kind):
    where, out = gpu.device(index, kind), Managed()
    source = gpu.at(0x10000, (64,), "bool", index=index, kind=kind)
    rows = gpu.at(0x20000, (1, 8), index=index, kind=kind)
    words = [abs(index)]
    refused(lib.gc_pack_chunks(source.managed, 1, byref(out)), Status.UNSUPPORTED_DEVICE, *words)
    refused(lib.gc_pack_bits(source.managed, 0, BIG, byref(out)), Status.UNSUPPORTED_DEVICE, *words)
    refused(lib.gc_pack_chunks_into(source.view, BIG, rows.view, None), Status.UNSUPPORTED_DEVICE, *words)
    refused(lib.gc_unpack_chunks_into(rows.view, BIG, source.view, None), Status.UNSUPPORTED_DEVICE, *words)
    status = lib.gc_tensor_empty(where, capi.dldtype("uint8"), 1, capi.int64s([8]), byref(out))
    refused(status, Status.UNSUPPORTED_DEVICE, *words)
    refused(lib.gc_prepare(where), Status.UNSUPPORTED_DEVICE, *words)
    refused(lib.gc_trim(where), Status.UNSUPPORTED_DEVICE, *words)
    assert not out


def test_memory_of_a_missing_device_is_described_but_not_used():
    released, out, chunk = [], Managed(), Managed()
    release = capi.RELEASE(released.append)
    arguments = 0x7000_0000, gpu.device(97), capi.dldtype("uint8"), 1, capi.int64s([4]), None, release, 42
    capi.check(lib.gc_tensor_from_pointer(*arguments, byref(out)))
    refused(lib.gc_pack_chunks(out, 1, byref(chunk)), Status.UNSUPPORTED_DEVICE, 97)
    lib.gc_tensor_free(out)
    assert released == [42]


def test_an_empty_tensor_of_a_missing_device_is_refused():
    out = Managed()
    status = lib.gc_pack_chunks(gpu.at(None, (0,), "bool", index=97).managed, 1, byref(out))
    refused(status, Status.UNSUPPORTED_DEVICE, 97)


def test_an_allocation_beyond_the_memory_is_refused_without_a_leak():
    out, before = Managed(), driver.free_bytes()
    for size in (driver.total_bytes() + GIB, 2**50, 2**62):
        status = lib.gc_tensor_empty(gpu.device(), capi.dldtype("uint8"), 1, capi.int64s([size]), byref(out))
        refused(status, Status.OUT_OF_MEMORY, size)
        assert "cuMem" in last_error() and "CUDA_ERROR_" in last_error(), last_error()
        assert not out
    assert driver.free_bytes() >= before  # the library has freed the memory that it kept
    with Prepared("pack_chunks") as work:
        check(work.call(None))
        work.check()
        gpu.take(capi.empty(1000, device=gpu.device()))


def test_the_simple_tier_works_after_an_out_of_memory_error():
    check(lib.gc_trim(gpu.device()))
    before = driver.free_bytes()
    with driver.Memory(GIB // 8) as packed:
        driver.fill(packed.address, 0xFF, packed.size)
        source, out = gpu.at(packed.address, (packed.size,)), Managed()
        with driver.Memory(driver.free_bytes() - GIB // 2):  # half a GiB is left; the output takes one
            for _ in range(3):
                status = lib.gc_unpack_bits(source.managed, AXIS_NONE, capi.COUNT_ALL, BIG, byref(out))
                refused(status, Status.OUT_OF_MEMORY, GIB)
                assert "cuMem" in last_error() and not out
            small = gpu.at(packed.address, (1000,))
            check(lib.gc_unpack_bits(small.managed, AXIS_NONE, capi.COUNT_ALL, BIG, byref(out)))
            assert (gpu.take(out) == 1).all()
        out = Managed()
        check(lib.gc_unpack_bits(source.managed, AXIS_NONE, capi.COUNT_ALL, BIG, byref(out)))
        found = gpu.take(out)
        assert found.size == GIB and found.min() == 1 and found.max() == 1
    check(lib.gc_trim(gpu.device()))
    assert before - driver.free_bytes() <= 16 * 2**20


def test_a_pending_error_of_the_caller_is_not_reported_as_ours():
    # A failed driver call of the caller leaves no error that a call of the library would report.
    assert driver.raw("cuMemFree_v2", ctypes.c_uint64(0x1234)) != 0
    with Prepared("pack_chunks") as work:
        check(work.call(None))
        work.check()


def test_after_a_device_fault_every_call_fails_and_deleters_return():
    gpu.run_child("fault")


def test_without_devices_cuda_is_refused_and_the_cpu_works():
    gpu.run_child("no_devices", environment={"CUDA_VISIBLE_DEVICES": ""})
