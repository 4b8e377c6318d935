"""Tests when released memory may be used again, that it is freed, and releases in every place of a deleter."""

import pathlib
import subprocess

import numpy as np
import pytest

import capi
import driver
import gpu
from capi import BIG, COUNT_ALL, Managed, byref, check, free_all, in_threads, lib

pytestmark = pytest.mark.gpu

MIB = 2**20
SLACK = 16 * MIB  # bytes that the driver may keep for itself
ROOT = gpu.HERE.parent.parent


# --- reuse ------------------------------------------------------------------------------------------------------------


class Maker:
    """Outputs of one size by one function, full of a given byte."""

    def __init__(self, name, size=4 * MIB):
        self.name, self.size = name, size
        self.memory = driver.Memory(8 * size)

    def make(self, byte):
        """Makes an output. All functions but the last can only fill with 0xff and 0, or with 1 and 0."""
        out = Managed()
        if self.name == "tensor_empty":
            out = capi.empty(self.size, device=gpu.device())
            driver.fill(gpu.view_of(out).data, byte, self.size)
            return out
        if self.name.startswith("pack"):
            driver.fill(self.memory.address, byte, 8 * self.size)
            source = gpu.at(self.memory.address, (8 * self.size,), "bool")
            if self.name == "pack_chunks":
                check(lib.gc_pack_chunks(source.managed, 1, byref(out)))
            else:
                check(lib.gc_pack_bits(source.managed, 0, BIG, byref(out)))
            return out
        driver.fill(self.memory.address, 255 if byte else 0, self.size // 8)
        source = gpu.at(self.memory.address, (self.size // 8,))
        if self.name == "unpack_chunks":
            check(lib.gc_unpack_chunks((Managed * 1)(source.managed), 1, self.size, byref(out)))
        else:
            check(lib.gc_unpack_bits(source.managed, 0, COUNT_ALL, BIG, byref(out)))
        return out

    def value(self, byte):
        """Returns the byte in the output."""
        if self.name == "tensor_empty":
            return byte
        return (255 if byte else 0) if self.name.startswith("pack") else (1 if byte else 0)

    free = staticmethod(lib.gc_tensor_free)

    @staticmethod
    def address(out):
        return gpu.view_of(out).data


class Careless(Maker):
    """Hands memory out again as soon as it is released, which the library must not do."""

    def __init__(self):
        super().__init__("tensor_empty")
        self.released = []

    def make(self, byte):
        piece = self.released.pop() if self.released else driver.Memory(self.size)
        driver.fill(piece.address, byte, self.size)
        return piece

    @staticmethod
    def address(out):
        return out.address

    def free(self, out):
        self.released.append(out)


def reader_sees_the_old_bytes(maker, gate, count, release=None):
    """Returns True if a stream that reads late still finds the bytes from before the release of `count` outputs."""
    with driver.Stream() as reader, driver.Memory(count * maker.size) as seen:
        old = [maker.make(1) for _ in range(count)]
        # The gate opens by itself too: the library may wait for the device before memory is used again.
        with gate.closed(reader.handle, seconds=0.5):
            for k, out in enumerate(old):
                driver.copy(seen.address + k * maker.size, maker.address(out), maker.size, reader.handle)
            for out in old:
                (release or maker.free)(out)
            new = [maker.make(0) for _ in range(count + 2)]
        found = driver.download(seen.address, seen.size)
        for out in new:
            maker.free(out)
        return bool((found == maker.value(1)).all())


MAKERS = ("pack_chunks", "unpack_chunks", "pack_bits", "unpack_bits", "tensor_empty")


# Tests one output, whose memory is reused soon or never, and enough outputs that some memory must be reused.
@pytest.mark.parametrize(
    "size, count, where",
    [
        (4096, 1, "here"),
        (4096, 100, "here"),
        (4 * MIB, 40, "another thread"),
        (80 * MIB, 1, "here"),
        (80 * MIB, 8, "here"),
    ],
)
@pytest.mark.parametrize("name", MAKERS)
def test_released_memory_is_not_reused_before_the_work_that_was_enqueued(name, size, count, where, gate):
    maker = Maker(name, size)
    for _ in range(3):  # some are kept for reuse by now
        maker.free(maker.make(1))
    release = (lambda out: in_threads(1, lambda _: lib.gc_tensor_free(out))) if where == "another thread" else None
    assert reader_sees_the_old_bytes(maker, gate, count, release)
    maker.memory.free()


def test_the_test_detects_early_reuse(gate):
    careless = Careless()
    assert not reader_sees_the_old_bytes(careless, gate, 2)
    for piece in careless.released:
        piece.free()
    careless.memory.free()


def test_one_chunk_keeps_the_memory_of_all_chunks_from_reuse(gate):
    size = 3 * MIB
    with driver.Memory(24 * MIB) as memory, driver.Stream() as reader, driver.Memory(size) as seen:
        driver.fill(memory.address, 1, memory.size)
        source = gpu.at(memory.address, (memory.size,), "bool")
        chunks = capi.pack_chunks(source, 3)
        with gate.closed(reader.handle, seconds=0.5):
            driver.copy(seen.address, gpu.view_of(chunks[0]).data, size, reader.handle)
            free_all(chunks)
            driver.fill(memory.address, 0, memory.size)
            again = [capi.pack_chunks(source, 3) for _ in range(4)]
        assert (driver.download(seen.address, size) == 255).all()
        free_all(sum(again, []))


@pytest.mark.parametrize("name", MAKERS)
def test_repeated_allocation_uses_no_more_memory_and_trim_frees_it(name):
    maker = Maker(name, 64 * MIB)
    check(lib.gc_trim(gpu.device()))
    before = driver.free_bytes()
    for round in range(100):
        maker.free(maker.make(round % 2))
        assert before - driver.free_bytes() <= 16 * maker.size, f"round {round}"
    check(lib.gc_trim(gpu.device()))
    assert before - driver.free_bytes() <= SLACK
    maker.memory.free()


def test_trim_keeps_memory_in_use(gate):
    maker = Maker("pack_chunks")
    kept = maker.make(1)
    maker.free(maker.make(1))
    check(lib.gc_trim(gpu.device()))
    assert (driver.download(gpu.view_of(kept).data, maker.size) == 255).all()
    with driver.Stream() as reader, driver.Memory(maker.size) as seen:
        with gate.closed(reader.handle, seconds=0.5):  # released, trimmed, and still to be read
            driver.copy(seen.address, gpu.view_of(kept).data, maker.size, reader.handle)
            lib.gc_tensor_free(kept)
            check(lib.gc_trim(gpu.device()))
            new = [maker.make(0) for _ in range(4)]
        assert (driver.download(seen.address, maker.size) == 255).all()
    free_all(new)
    maker.memory.free()


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
def test_a_capture_survives_allocations_and_releases_of_another_thread(mode, stream):
    # Allocate enough for memory to be used again and freed while the capture lasts.
    def make_and_release(_):
        for _ in range(100):
            lib.gc_tensor_free(capi.empty(16 * MIB, device=gpu.device()))
        chunks = capi.pack_chunks(other.src, 3)
        check(lib.gc_trim(gpu.device()))
        return chunks

    with gpu.Prepared("pack_bits") as work, gpu.Prepared("pack_chunks") as other:
        driver.synchronize()
        with driver.Graph(stream, getattr(driver, mode)) as graph:
            check(work.call(stream))
            (made,) = in_threads(1, make_and_release)
            check(work.call(stream))
        np.testing.assert_array_equal(np.stack([gpu.take(chunk) for chunk in made]), other.expected)
        work.poison()
        graph.replay(stream)
        driver.wait_for(stream)
        work.check()
        graph.destroy()


def test_a_release_works_during_a_capture(stream):
    # The thread that captures drops a tensor, as a collector of garbage may at any time.
    maker = Maker("pack_chunks")
    made = [maker.make(1) for _ in range(4)]
    for mode in driver.GLOBAL, driver.THREAD_LOCAL, driver.RELAXED:
        with gpu.Prepared("pack_bits") as work:
            driver.synchronize()
            with driver.Graph(stream, mode) as graph:
                check(work.call(stream))
                lib.gc_tensor_free(made.pop())
                check(work.call(stream))
            work.poison()
            graph.replay(stream)
            driver.wait_for(stream)
            work.check()
            graph.destroy()
    assert (driver.download(gpu.view_of(made[0]).data, maker.size) == 255).all()
    maker.free(made.pop())
    maker.memory.free()


# --- releases ---------------------------------------------------------------------------------------------------------


def test_a_release_needs_no_context_and_changes_none():
    maker = Maker("unpack_bits")
    with driver.using(None):
        with driver.using(driver.primary()):
            out = maker.make(1)
        maker.free(out)
        assert driver.current() is None
    out = maker.make(1)

    def release(_):
        assert driver.current() is None
        lib.gc_tensor_free(out)
        assert driver.current() is None

    in_threads(1, release)
    with driver.own_context() as own:
        with driver.using(driver.primary()):
            out = maker.make(1)
        maker.free(out)
        assert driver.current() == own
    maker.memory.free()


@pytest.mark.parametrize("alive", [False, True], ids=["released before", "released after"])
def test_outputs_of_a_destroyed_context_are_released_without_an_error(alive):
    kept = []
    for _ in range(3):
        with driver.own_context():
            maker = Maker("pack_chunks", MIB)
            kept.append(maker.make(1))
            if not alive:
                maker.free(kept.pop())
        while kept:
            lib.gc_tensor_free(kept.pop())
        with gpu.Prepared("pack_chunks") as work:
            chunks = capi.pack_chunks(work.src, 3)
            np.testing.assert_array_equal(np.stack([gpu.take(chunk) for chunk in chunks]), work.expected)


@pytest.mark.parametrize(
    "name",
    ["exit_with_outputs_alive", "release_after_python", "exit_while_threads_work", "after_fork"],
)  # fmt: skip
def test_a_process_ends_well(name):
    gpu.run_child(name)


@pytest.mark.parametrize("when", ["never", "first", "last", "thread"])
def test_a_program_in_c_ends_well(when, tmp_path):
    library = pathlib.Path(capi.lib._name).resolve()
    program = tmp_path / "exit"
    (tmp_path / "libgradcodec.so.0").symlink_to(library)
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{ROOT / 'include'}"]
    link = [str(tmp_path / "libgradcodec.so.0"), f"-Wl,-rpath,{tmp_path}", "-pthread"]
    subprocess.run([*command, str(gpu.HERE / "exit.c"), "-o", str(program), *link], check=True)
    ended = subprocess.run([str(program), when], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
