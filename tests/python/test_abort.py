"""Tests of gc_comm_abort from another thread: every wait ends though nothing else would end it, and calls without other
ranks still work. Over callbacks, a group, two levels, and, on a driver without hardware, NCCL and peer memory."""

import os
import threading
import time
from ctypes import POINTER, byref

import numpy as np
import pytest

from capi import AllReduce, CodecOptions, Comm, DLDevice, Status, Tensor, lib, says
from codec_model import ONEBIT, TRANSACTIONAL, f32
from codecs_c import Host, same, views
from comms import CheckedRanks, Nodes, World, is_asleep, run_on, status_of
from tiers import both
from test_nccl import run_ranks as run_nccl
from test_peers import run_ranks as run_peers

place, CPU = Host(), DLDevice(1, 0)
OPTIONS = dict(codec=ONEBIT, segments=[100], nonfinite=TRANSACTIONAL)


def waiting(work):
    """Starts a call that waits for other ranks, in a thread, and returns once it waits; join() returns the result."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    asleep = 0
    while asleep < 100 and thread.is_alive():  # it may also sleep until it gets Python's lock
        asleep = asleep + 1 if is_asleep(thread) else 0
        os.sched_yield()

    def join():
        thread.join(60)
        assert not thread.is_alive(), "the call waits for ever"
        return found[0]

    return join


def gradients(size, seed=0):
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal(100).astype(f32)] for _ in range(size)]


def creation(comm):
    options = CodecOptions(112, codec=ONEBIT, device=CPU, n_elements=100)
    return lambda: status_of(lib.gc_allreduce_create, comm, byref(options), byref(POINTER(AllReduce)()))


def expect_aborted(outcome, *words):
    status, sentence = outcome
    assert status == Status.COMM and (not words or any(says(sentence, word) for word in words)), outcome


def check_what_goes_on(ranks, rank):
    """Checks that calls without other ranks work as before, and that the interrupted step is taken back."""
    handle, worker, server = ranks.handles[rank], np.zeros(100, f32), np.zeros(ranks.models[rank].shard_elements(), f32)
    flags = np.zeros(1, np.uint32)
    assert lib.gc_allreduce_rollback(handle, None) == 0
    assert lib.gc_allreduce_errors_out(handle, Tensor(worker).view, Tensor(server).view, None) == 0
    same(worker, ranks.models[rank].errors(0), "the worker's errors")
    same(server, ranks.models[rank].errors(1), "the server's errors")
    assert lib.gc_allreduce_flags(handle, Tensor(flags).view, None) == 0
    assert lib.gc_allreduce_commit(handle, None, None) == 0
    assert lib.gc_allreduce_reset(handle, None) == 0
    assert lib.gc_allreduce_errors_out(handle, Tensor(worker).view, None, None) == 0 and not worker.any()


def refused_from_now_on(ranks, rank):
    comm, values = ranks.world.comms[rank], Tensor(np.ones(100, f32))
    shard = Tensor(np.ones(ranks.models[rank].shard_elements(), f32))
    expect_aborted(status_of(lib.gc_comm_async_error, comm), "aborted")
    for call in (
        lambda: lib.gc_allreduce_run(ranks.handles[rank], views([values]), 1, None, None, None),
        lambda: lib.gc_allreduce_reduce_scatter(ranks.handles[rank], views([values]), 1, None, None, shard.view, None),
        lambda: lib.gc_allreduce_all_gather(ranks.handles[rank], shard.view, views([values]), 1, None),
        creation(comm),
        lambda: lib.gc_comm_hierarchical(comm, None, byref(POINTER(Comm)())),
        lambda: lib.gc_comm_open_peers(comm, DLDevice(2, 0), 8192, 0, byref(POINTER(Comm)())),
    ):
        outcome = call()
        expect_aborted(outcome if isinstance(outcome, tuple) else (outcome, "aborted"))
    same(values.array, np.ones(100, f32), "values of calls that were refused")


def test_a_run_over_a_group_ends_on_every_rank_that_waits():
    with World(3) as world, CheckedRanks(world, place, **OPTIONS) as ranks:
        ranks.run(gradients(3))
        ranks.commit()
        values = [Tensor(np.ones(100, f32)) for _ in range(2)]
        joins = [waiting(lambda rank=rank: run_on(ranks.handles[rank], values[rank])) for rank in range(2)]  # without rank 2
        assert [lib.gc_comm_abort(world.comms[0]) for _ in "12"] == [0, 0]
        for join in joins:
            expect_aborted(join(), "rank 0", "aborted")
        for rank in range(2):
            check_what_goes_on(ranks, rank)
        refused_from_now_on(ranks, 0)
        expect_aborted(status_of(lib.gc_comm_async_error, world.comms[1]))  # a call of this rank has failed


@pytest.mark.parametrize("what", ["create", "hierarchical"])
def test_an_abort_ends_creations_over_a_group(what):
    with World(2) as world:
        comm, made = world.comms[0], POINTER(Comm)()
        create = {
            "create": creation(comm),
            "hierarchical": lambda: status_of(lib.gc_comm_hierarchical, comm, None, byref(made)),
        }[what]
        join = waiting(create)
        assert lib.gc_comm_abort(comm) == 0
        expect_aborted(join(), "rank 0", "aborted")
        assert not made


@pytest.mark.parametrize("part", ["whole", "intra", "inter"])
def test_an_abort_of_two_levels_ends_both(part):
    """Checks that an abort of a part aborts the whole, and that a wait in that part ends."""
    nodes = Nodes([2, 2], inter="group")
    with nodes as world, CheckedRanks(world, place, **OPTIONS) as ranks:
        intra, inter = world.parts(0)
        join = waiting(lambda: run_on(ranks.handles[0], Tensor(np.ones(100, f32))))
        # Rank 0 runs alone, so it waits for its node first.
        assert lib.gc_comm_abort({"whole": world.comms[0], "intra": intra, "inter": inter}[part]) == 0
        if part == "inter":
            assert lib.gc_comm_abort(intra) == 0
        expect_aborted(join(), "rank 0", "aborted")
        check_what_goes_on(ranks, 0)
        refused_from_now_on(ranks, 0)
        aborted = [lib.gc_comm_async_error(comm) for comm in (intra, inter)]
        assert aborted == [Status.COMM] * 2, aborted


def test_after_an_abort_no_further_callback_runs():
    with World(2, "board") as world, CheckedRanks(world, place, **OPTIONS) as ranks:
        within, go_on, inside = threading.Event(), threading.Event(), []

        def hold(name, rank, sent):
            if rank == 0:
                inside.append(status_of(lib.gc_comm_abort, world.comms[0]))
                within.set()
                assert go_on.wait(60)
            return sent

        world.board.before, world.board.calls[:] = hold, []
        values = [Tensor(np.ones(100, f32)) for _ in range(2)]
        joins = [waiting(lambda rank=rank: run_on(ranks.handles[rank], values[rank])) for rank in range(2)]
        assert within.wait(60)
        assert lib.gc_comm_abort(world.comms[0]) == 0
        go_on.set()
        expect_aborted(joins[0](), "aborted")
        world.board.barrier.abort()  # the other rank waits for its second exchange, which its owner ends
        expect_aborted(joins[1](), "99")
        ((status, sentence),) = inside  # a function of a transport may not abort
        assert status == Status.INVALID_ARGUMENT and says(sentence, "transport"), sentence
        assert [name for name, rank, *_ in world.board.calls if rank == 0] == ["all_to_all"]
        for rank in range(2):
            check_what_goes_on(ranks, rank)
        refused_from_now_on(ranks, 0)
        assert lib.gc_comm_async_error(world.comms[1]) == Status.COMM  # its exchange has failed


def test_a_single_rank_is_aborted():
    with World(1) as world, CheckedRanks(world, place, **OPTIONS) as ranks:
        assert lib.gc_comm_abort(world.comms[0]) == 0
        refused_from_now_on(ranks, 0)
        check_what_goes_on(ranks, 0)


def test_an_abort_during_the_release_of_all_handles():
    """Aborts while a handle and another rank's communicator are released; the header forbids that for its own."""
    for _ in range(both(quick=100, all=1000)):
        with World(2) as world:
            ranks, together = CheckedRanks(world, place, **OPTIONS), threading.Barrier(3)
            other, handle = world.comms[1], ranks.handles[0]
            world.comms[1], ranks.handles[0] = POINTER(Comm)(), POINTER(AllReduce)()
            frees = [(lib.gc_comm_free, other), (lib.gc_allreduce_free, handle)]
            threads = [threading.Thread(target=lambda f=f, x=x: (together.wait(), f(x))) for f, x in frees]
            for thread in threads:
                thread.start()
            together.wait()
            assert lib.gc_comm_abort(world.comms[0]) == 0
            for thread in threads:
                thread.join()
            expect_aborted(status_of(lib.gc_comm_async_error, world.comms[0]), "aborted")
            ranks.__exit__()


# --- leaks ------------------------------------------------------------------------------------------------------------


def left():
    """Returns resident bytes and numbers of mappings, descriptors and shared mappings, once joined threads ended."""
    end = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > threading.active_count() + left.of_the_library:
        assert time.monotonic() < end, "threads have not ended"
    with open("/proc/self/statm") as statm, open("/proc/self/maps") as maps:
        resident, lines = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"), maps.readlines()
    shared = sum("/dev/shm" in line or "memfd:" in line for line in lines)
    return resident, len(lines), len(os.listdir("/proc/self/fd")), shared


def aborted_once(over):
    with Nodes([2, 2], inter="group") if over == "two levels" else World(2, over) as world:
        with CheckedRanks(world, place, **OPTIONS) as ranks:
            join = waiting(lambda: run_on(ranks.handles[0], Tensor(np.ones(100, f32))))
            assert lib.gc_comm_abort(world.comms[0]) == 0
            if over == "board":
                world.board.barrier.abort()
            expect_aborted(join())


@pytest.mark.parametrize("over", ["group", "board", "two levels"])
def test_a_thousand_aborts_leak_nothing(over):
    for _ in range(20):
        aborted_once(over)
    left.of_the_library = len(os.listdir("/proc/self/task")) - threading.active_count()  # the library's pool
    resident, *before = left()
    for _ in range(both(quick=30, all=1000)):
        aborted_once(over)
    resident_after, *after = left()
    # A state and a payload of 1 KiB each, if kept, would be more. New mappings are stacks that are kept for threads.
    assert resident_after - resident < 2 << 20
    mappings, mappings_after = before.pop(0), after.pop(0)
    assert after == before and mappings_after <= mappings + 20


# Runs a call of a single rank. Another thread aborts it once it waits.
ALONE = """
from comms import is_asleep

def aborted(work, abort, within):
    found = []
    thread = threading.Thread(target=lambda: found.append((work(), last_error())))
    thread.start()
    while not within(thread) and thread.is_alive():
        os.sched_yield()
    assert abort() == 0, last_error()
    thread.join(60)
    assert not thread.is_alive(), "the call waits for ever"
    return found[0]
"""


@pytest.mark.parametrize("what", ["an exchange", "a creation"])
@pytest.mark.parametrize("owner", ["ours", "split", "borrowed"])
def test_over_nccl_an_abort_ends_the_host_wait_and_our_communicator(owner, what):
    run_nccl(f"""
exec({ALONE!r})
nccl = library()
if {owner == "ours"}:
    world = Own(2)
else:
    world = Borrowed(nccl, 2, flags={int(owner == "split")})
before = nccl.fake_nccl_communicators()
comm, n = world.comms[0], 100
made, what = POINTER(AllReduce)(), CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=1, device=DLDevice(CUDA, 0), n_elements=n)
values, handles = Place().put(np.ones(n, "f4")), world.each(lambda rank: handle_on(world.comms[rank], n, DLDevice(CUDA, rank)))
run = lambda: run_on(handles[0], values)[0]
if {what == "a creation"}:
    work = lambda: lib.gc_allreduce_create(comm, byref(what), byref(made))
else:
    work = run
if {owner == "borrowed"}:
    # A call blocks in the stand-in. The owner of the communicator ends the call by aborting the communicator.
    expect(lib.gc_comm_abort(comm), 0)
    status, sentence = work(), last_error()
    assert nccl.fake_nccl_aborted() == 0
else:
    calls = nccl.fake_nccl_calls()
    status, sentence = aborted(work, lambda: lib.gc_comm_abort(comm), lambda thread: nccl.fake_nccl_calls() > calls)
    while nccl.fake_nccl_aborted() == 0:
        pass
assert status == Status.COMM and "aborted" in sentence, (status, sentence)
assert lib.gc_comm_abort(comm) == 0 and not made
expect(run(), Status.COMM, "aborted")
expect(lib.gc_comm_async_error(comm), Status.COMM, "aborted")
free_all(handles)
world.__exit__()
assert nccl.fake_nccl_aborted() + nccl.fake_nccl_destroyed() == {0 if owner == "borrowed" else 2}
assert nccl.fake_nccl_communicators() == before - {0 if owner == "borrowed" else 2}
""")


@pytest.mark.parametrize("devices", [(0, 0, 0), (0, 1, 2)], ids=["one GPU", "three GPUs"])
def test_over_peer_memory_barriers_end_on_every_rank(devices):
    """Lets two ranks wait for a lost third one, with a timeout of 10 minutes: in a kernel, or, where ranks share a GPU,
    on the host. What ranks send to each other stays in memory that is never freed."""
    run_peers(f"""
exec({ALONE!r})
from capi import AllReduce, CodecOptions
from comms import World
with World(3, "peers", devices={devices}, timeout=0) as world:
    def run(rank):
        options = CodecOptions(struct_size=112, codec=1, device=DLDevice(CUDA, {devices}[rank]), n_elements=1000)
        return lib.gc_allreduce_create(world.comms[rank], byref(options), byref(POINTER(AllReduce)()))
    def abort():
        while {len(set(devices))} > 1 and fake.fake_running() < 2:
            pass  # waits until both ranks are at a barrier
        return lib.gc_comm_abort(world.comms[0])
    second = threading.Thread(target=run, args=(1,))
    second.start()
    status, sentence = aborted(lambda: run(0), abort, {"is_asleep" if len(set(devices)) == 1 else "lambda thread: True"})
    second.join(60)
    assert not second.is_alive(), "the other rank waits for ever"
    assert status == Status.COMM, (status, sentence)
    expect(lib.gc_comm_async_error(world.comms[0]), Status.COMM, "aborted")
    assert lib.gc_comm_async_error(world.comms[1]) == Status.COMM, last_error()
    assert run(2) == Status.COMM, last_error()  # a rank whose call is later fails at once
    assert [lib.gc_comm_abort(comm) for comm in world.comms] == [0, 0, 0]
    expect(run(0), Status.COMM, "aborted")
""", FAKE_DEVICES=3)


def test_over_peer_memory_a_kernel_launched_after_the_abort_ends():
    """Checks that no barrier completes: the exchange of records finds memory that no rank has written."""
    run_peers(f"""
exec({ALONE!r})
from capi import AllReduce, CodecOptions
from comms import World
with World(2, "peers", devices=(0, 1), timeout=0) as world:
    options = CodecOptions(struct_size=112, codec=1, device=DLDevice(CUDA, 0), n_elements=1000)
    create = lambda: lib.gc_allreduce_create(world.comms[0], byref(options), byref(POINTER(AllReduce)()))
    def abort():
        while fake.fake_running() < 1:
            pass  # not before it is launched
        status = lib.gc_comm_abort(world.comms[0])
        fake.fake_hold_kernels(0)
        return status
    fake.fake_hold_kernels(1)
    status, sentence = aborted(create, abort, lambda thread: True)
    assert status == Status.COMM and "aborted" in sentence, (status, sentence)
""", FAKE_DEVICES=2)


def test_over_nccl_aborts_keep_only_memory_that_the_gpu_may_use():
    """Checks that memory is kept until the process ends, but no communicators, threads, descriptors and events."""
    run_nccl(f"""
exec({ALONE!r})
nccl = library()

def numbers():
    while nccl.fake_nccl_communicators() or len(os.listdir("/proc/self/task")) > 1 + pool:
        pass  # the thread that aborts is not waited for
    return len(os.listdir("/proc/self/fd")), fake.fake_events(), fake.fake_in_use(0)

def once():
    with Own(2) as world:
        place = Place()
        values, handles = place.put(np.ones(100, "f4")), world.each(
            lambda rank: handle_on(world.comms[rank], 100, DLDevice(CUDA, rank)))
        work = lambda: run_on(handles[0], values)[0]
        calls = nccl.fake_nccl_calls()
        status, sentence = aborted(
            work, lambda: lib.gc_comm_abort(world.comms[0]), lambda thread: nccl.fake_nccl_calls() > calls)
        assert status == Status.COMM, sentence
        assert lib.gc_comm_abort(world.comms[1]) == 0
        free_all(handles)
        place.release()

once()
pool = len(os.listdir("/proc/self/task")) - 1 - nccl.fake_nccl_communicators()
found = []
for _ in range({both(quick=10, all=100)}):
    once()
    found.append(numbers())
files, events, memory = zip(*found)
assert len(set(files)) == 1 and len(set(events)) == 1, (files, events)
kept = np.diff(memory)
assert (kept < 16 << 10).all(), kept  # the call's working memory, whose size varies with its progress
""")


def test_over_peer_memory_aborts_keep_only_memory_that_peers_may_write():
    run_peers(f"""
exec({ALONE!r})
from capi import AllReduce, CodecOptions
from comms import World

def once():
    with World(2, "peers", devices=(0, 1), timeout=0) as world:
        options = CodecOptions(struct_size=112, codec=1, device=DLDevice(CUDA, 0), n_elements=1000)
        create = lambda: lib.gc_allreduce_create(world.comms[0], byref(options), byref(POINTER(AllReduce)()))
        def abort():
            while fake.fake_running() < 1:
                pass  # waits until the rank is at the barrier
            return lib.gc_comm_abort(world.comms[0])
        status, sentence = aborted(create, abort, lambda thread: True)
        assert status == Status.COMM, sentence

def numbers():
    while len(os.listdir("/proc/self/task")) > threads:
        pass  # the joined Python thread may still be ending
    return len(os.listdir("/proc/self/fd")), fake.fake_in_use(0), fake.fake_in_use(1)

for _ in range(2):
    once()
threads = len(os.listdir("/proc/self/task"))
found = []
for _ in range({both(quick=10, all=100)}):
    once()
    found.append(numbers())
files, *memory = zip(*found)
assert len(set(files)) == 1, files
assert all(len(set(np.diff(one))) == 1 for one in memory), memory
""", FAKE_DEVICES=2)
