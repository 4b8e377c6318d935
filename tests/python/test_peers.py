"""Communicators over peer memory, on a driver without hardware: how ranks find each other, and failures of that."""

import pytest

from test_codec_driver import run_codec

RANKS = """
import re, threading
from ctypes import POINTER
from capi import CPU, Comm
from comms import handle_on, run_on

fake.fake_leave()  # all threads use the primary contexts

def each(function, ranks=2):
    return capi.in_threads(ranks, function)

def opened(devices, sizes=(8192, 8192), timeout=60_000):
    # Returns the status, the last error and the communicator of each rank.
    group = (POINTER(Comm) * 2)()
    assert lib.gc_comm_group(2, group) == 0

    def open(rank):
        comm = POINTER(Comm)()
        status = lib.gc_comm_open_peers(group[rank], devices[rank], sizes[rank], timeout, byref(comm))
        assert bool(comm) == (status == 0)
        return status, last_error() if status else "", comm

    found = each(open)
    free_all(group)
    return found

def nothing_is_left():
    assert [fake.fake_in_use(k) for k in range(2)] == [0, 0], "device memory"
    assert (fake.fake_pinned(), fake.fake_events()) == (0, 0), "pinned memory or events"

def gpus(*numbers):
    return [DLDevice(CUDA, number) for number in numbers]

def handles_on(comms, numbers, n):
    # Returns a handle for each of the two ranks.
    return each(lambda rank: handle_on(comms[rank], n, gpus(*numbers)[rank]))
"""


def run_ranks(script, **environment):
    run_codec(f"exec({RANKS!r})\n" + script, **environment)


def test_too_many_ranks_are_refused_and_the_bootstrap_still_works():
    run_ranks("""
group = (POINTER(Comm) * 65)()
assert lib.gc_comm_group(65, group) == 0
def open(rank):
    comm = POINTER(Comm)()
    return lib.gc_comm_open_peers(group[rank], DLDevice(CUDA, 0), 1 << 20, 0, byref(comm)), last_error()
for _ in range(2):
    assert set(each(open, 65)) == {(Status.INVALID_ARGUMENT, "world_size: 65; 1 to 64 expected")}
nothing_is_left()
""")


@pytest.mark.parametrize("numbers", [(0, 0), (0, 1)], ids=["one GPU", "two GPUs"])
def test_a_failed_driver_call_fails_all_ranks_and_leaks_nothing(numbers):
    run_ranks(f"""
for rank in range(2):  # makes contexts, and loads kernels
    assert lib.gc_prepare(DLDevice(CUDA, rank)) == 0
failures = 0
for calls in range(1000):
    found, name = failing(fake, calls, 999, lambda: opened(gpus(*{numbers})))
    statuses = [status for status, _, _ in found]
    free_all(comm for _, _, comm in found)
    nothing_is_left()
    if not name:
        break
    if any(statuses):
        assert all(statuses), (name, found)
        failures += 1
assert failures > 10 and statuses == [0, 0], (failures, found)
""")


def test_gpus_without_peer_access_are_refused_on_all_ranks():
    run_ranks("""
for status, sentence, _ in opened(gpus(0, 1)):
    assert status == Status.UNSUPPORTED_DEVICE, sentence
nothing_is_left()
for status, sentence, comm in opened(gpus(1, 1)):
    assert status == 0, sentence
    lib.gc_comm_free(comm)
nothing_is_left()
""", FAKE_PEERS=0)


def test_ranks_with_different_arguments_are_refused():
    run_ranks("""
for status, sentence, _ in opened(gpus(0, 1), (8192, 200_000)):
    assert status == Status.INVALID_ARGUMENT and "bytes expected, got" in sentence, sentence
(_, why, _), _ = opened(gpus(0, 1), (-1, 8192))  # what gc_allreduce_peers_bytes() returns after a failure
least = int(re.search("at least ([0-9]+) expected for 2 ranks", why)[1])
for few in -1, least - 1, -2**63:
    (own, why, _), (other, told, _) = opened(gpus(0, 1), (few, 8192))
    assert own == Status.INVALID_ARGUMENT and f"{few} bytes; at least {least} expected" in why, why
    assert "gc_allreduce_peers_bytes" in why, why
    assert other == Status.INVALID_ARGUMENT and "rank 0: could not allocate its buffer" in told, told
for status, sentence, comm in opened(gpus(0, 1), (least, least)):
    assert status == 0, sentence
    lib.gc_comm_free(comm)
(own, why, _), (other, told, _) = opened([DLDevice(CPU, 0), DLDevice(CUDA, 1)])
assert own == Status.UNSUPPORTED_DEVICE and "cpu" in why, why
assert other == Status.INVALID_ARGUMENT and "rank 0: could not allocate its buffer" in told, told
(own, why, _), (other, told, _) = opened(gpus(7, 1))
assert own == Status.UNSUPPORTED_DEVICE and "cuda:7" in why, why
assert other == Status.INVALID_ARGUMENT, told
nothing_is_left()
""")


def test_after_a_failed_reset_nothing_is_sent_until_a_reset_succeeds():
    run_ranks("""
from comms import CheckedRanks, World

with World(2, "peers") as world, CheckedRanks(world, place := Place(), codec=ONEBIT, segments=[1000]) as ranks:
    assert lib.gc_prepare(place.device) == 0
    for calls in range(10):
        status, name = failing(fake, calls, 999, lambda: lib.gc_allreduce_reset(ranks.handles[0], None))
        if "Memset" in name or "Launch" in name:  # calls before it leave the codec as it was
            break
    assert status == Status.CUDA and b"999" in lib.gc_last_error(), (status, name)
    values = views([place.put(np.ones(1000, "f4"))])
    expect(lib.gc_allreduce_run(ranks.handles[0], values, 1, None, None, None), Status.CUDA, "gc_codec_reset")
    assert lib.gc_comm_async_error(world.comms[0]) == 0
    ranks.reset()
    ranks.run([[np.ones(1000, "f4")]] * 2)
""")


def test_on_two_levels_a_late_rank_of_the_node_is_a_timeout():
    run_ranks(f"""
from comms import Nodes
# Waits on the host use the host's clock, which no test stops. The ranks must connect within the timeout.
with Nodes([3], "peers", "group", timeout=1000) as world:
    place = Place()
    handles = world.each(lambda rank: handle_on(world.comms[rank], 1000, place.device))
    values = place.put(np.ones(1000, "f4"))
    # Rank 2 never calls, and rank 1 calls after the timeout of rank 0.
    for rank, (status, words) in enumerate(((Status.TIMEOUT, "1 of 3 ranks"), (Status.COMM, "given up"))):
        expect(run_on(handles[rank], values)[0], status, words)
        expect(lib.gc_comm_async_error(world.comms[rank]), Status.TIMEOUT, f"rank {{rank}}", "1000 ms")
    assert lib.gc_comm_async_error(world.comms[2]) == 0
    free_all(handles)
""")


def test_buffers_without_room_for_a_handle_are_refused_on_every_rank():
    run_ranks("""
from block_model import INT8
from capi import AllReduce

options = capi.CodecOptions(struct_size=ctypes.sizeof(capi.CodecOptions), codec=INT8, n_elements=100_000)
needed = lib.gc_allreduce_peers_bytes(byref(options), 2, 1)
for size in needed, needed - 1024:  # areas have multiples of 256 bytes
    found = opened(gpus(0, 1), (size, size))
    assert all(status == 0 for status, *_ in found), found

    def create(rank):
        handle, mine = POINTER(AllReduce)(), capi.CodecOptions.from_buffer_copy(options)
        mine.device = DLDevice(CUDA, rank)
        status = lib.gc_allreduce_create(found[rank][2], byref(mine), byref(handle))
        sentence = last_error() if status else ""
        lib.gc_allreduce_free(handle)
        return status, sentence

    for status, sentence in each(create):
        assert status == (0 if size == needed else Status.INVALID_ARGUMENT), sentence
        assert size == needed or "gc_allreduce_peers_bytes" in sentence, sentence
    free_all(comm for _, _, comm in found)
""")


# Without errors the ranks use one-shot.
@pytest.mark.parametrize("half, levels, codec, raw, error", [
    (half, 1 + (half == (codec == "INT8")), codec, raw, error) for half in (False, True) for codec, raw, error in [
        ("ONEBIT", None, "float32"), ("INT8", [0, 0], "float32"), ("MXFP4", [1, 0], "bfloat16"), ("INT8", [0, 1], None)]
])  # fmt: skip
def test_a_missing_rank_gives_non_finite_but_not_corrupt_values(half, levels, codec, raw, error):
    run_ranks(f"""
from block_model import INT8, MXFP4
from capi import AllReduce
from codec_model import NONFINITE, PROPAGATE
from codecs_c import model_of, options_of
from comms import Nodes, World
fake.fake_hold_clock(1)  # stops the clock until rank 1 is late
peers = dict(devices=(0, 1), timeout=200)
world = World(2, "peers", **peers) if {levels} == 1 else Nodes([2], "peers", "group", **peers)
with world:
    place, handles = Place(), [POINTER(AllReduce)() for _ in range(2)]
    options = dict(codec={codec}, segments=[1000, 70], values="float32", results="float32", error={error!r},
                   nonfinite=PROPAGATE, beta=1.0, n_chunks=2)
    options |= dict(raw={raw}) if {raw} else dict(scale=RMS)
    models = [model_of(**options, server=rank) for rank in range(2)]
    each = [options_of(model, DLDevice(CUDA, rank)) for rank, model in enumerate(models)]
    for one in each:
        one.server = 0
    world.each(lambda rank: call("gc_allreduce_create", world.comms[rank], byref(each[rank]), byref(handles[rank])))
    values, flags = [place.put(np.ones(n, "f4")) for n in (1000, 70)], place.put(np.zeros(1, np.uint32))
    fake.fake_hold_clock(0)
    if {half}:
        shard = place.put(np.ones(models[0].shard_elements(), "f4"))
        call("gc_allreduce_reduce_scatter", handles[0], views(values), 2, None, None, shard.view, None)
        written = [shard]
    else:
        call("gc_allreduce_run", handles[0], views(values), 2, None, None, None)
        written = values
    assert all(np.isnan(place.get(one)).all() for one in written)
    # Errors of data that did not arrive are not kept.
    server = place.put(np.ones(models[0].shard_elements(), "f4"))
    call("gc_allreduce_errors_out", handles[0], None, server.view, None)
    assert not place.get(server).any()
    call("gc_allreduce_flags", handles[0], flags.view, None)
    assert place.get(flags)[0] == NONFINITE, place.get(flags)
    expect(lib.gc_comm_async_error(world.comms[0]), Status.TIMEOUT, "200 ms")
    free_all(handles)
""")


# INT8 has too many tiles for one launch.
@pytest.mark.parametrize("codec, n", [("ONEBIT", 1000), ("INT8", 30_000)])
def test_a_call_that_fails_between_its_launches_ends_the_communicator(codec, n):
    """Breaks a call off: other ranks have a part of its data, or count one barrier more."""
    run_ranks(f"""
from block_model import INT8
from capi import AllReduce

for gpu in range(2):
    assert lib.gc_prepare(DLDevice(CUDA, gpu)) == 0
place, broken_off = Place(), set()
for calls in range(100):
    fake.fake_hold_clock(1)
    comms = [comm for _, _, comm in opened(gpus(0, 1), (1 << 18, 1 << 18), timeout=20)]
    handles = [POINTER(AllReduce)() for _ in comms]
    options = [capi.CodecOptions(struct_size=ctypes.sizeof(capi.CodecOptions), codec={codec}, n_elements={n},
                                 device=DLDevice(CUDA, rank)) for rank in range(2)]
    each(lambda rank: call("gc_allreduce_create", comms[rank], byref(options[rank]), byref(handles[rank])))
    values = views([place.put(np.ones({n}, "f4"))])
    before = fake.fake_launches()
    fake.fake_hold_clock(0)
    status, name = failing(fake, calls, 999, lambda: lib.gc_allreduce_run(handles[0], values, 1, None, None, None))
    launched = fake.fake_launches() - before
    if status and launched:
        broken_off.add(name)
        assert lib.gc_allreduce_run(handles[0], values, 1, None, None, None) in (Status.COMM, Status.CUDA), name
        assert lib.gc_comm_async_error(comms[0]) in (Status.COMM, Status.TIMEOUT), name
        lib.gc_allreduce_reset(handles[0], None)
        expect(lib.gc_allreduce_run(handles[0], values, 1, None, None, None), Status.COMM, "broken off")
    free_all(handles)
    free_all(comms)
    if not name:
        break
assert not name and any("Launch" in one for one in broken_off), (name, broken_off)
""")


@pytest.mark.parametrize("numbers", [(0, 0), (0, 1)], ids=["one GPU", "two GPUs"])
def test_a_wait_for_a_missing_rank_times_out_and_keeps_its_memory(numbers):
    run_ranks(f"""
numbers = {numbers}
for gpu in numbers:
    assert lib.gc_prepare(DLDevice(CUDA, gpu)) == 0
place = Place()
values = place.put(np.ones(1000, "f4"))
own = fake.fake_in_use(0)
comms = [comm for _, _, comm in opened(gpus(*numbers), timeout=200)]
handles = handles_on(comms, numbers, 1000)
status, _ = run_on(handles[0], values)
if numbers == (0, 0):  # ranks of one GPU wait on the host
    expect(status, Status.TIMEOUT, "1 of 2 ranks", "200 ms")
else:
    assert status == 0
    assert np.isnan(place.get(values)).all()
expect(lib.gc_comm_async_error(comms[0]), Status.TIMEOUT, "rank 0", "200 ms")
expect(run_on(handles[0], values)[0], Status.COMM, "broken off")
expect(lib.gc_comm_async_error(comms[0]), Status.TIMEOUT)
free_all(handles)
free_all(comms)
assert lib.gc_trim(place.device) == 0
kept = fake.fake_in_use(0) - own
assert 8192 <= kept < 2 * 8192, kept
assert fake.fake_in_use(1) == 0
""")


@pytest.mark.parametrize("numbers", [(0, 0), (0, 1)], ids=["one GPU", "two GPUs"])
def test_a_bootstrap_that_fails_on_one_rank_keeps_its_memory_and_ends(numbers):
    run_ranks(f"""
from capi import AllReduce
from comms import World, status_of
for gpu in 0, 1:
    assert lib.gc_prepare(DLDevice(CUDA, gpu)) == 0
devices, own = gpus(*{numbers}), [fake.fake_in_use(gpu) for gpu in range(2)]
with World(2, "board") as world:
    # Rank 1 fails at its last exchange, when rank 0 has mapped its buffer.
    world.board.answer = lambda name, rank: 99 * (rank == 1 and sum(call[1] == 1 for call in world.board.calls) == 2)
    comms = [POINTER(Comm)() for _ in range(2)]
    def open(rank):
        return status_of(lib.gc_comm_open_peers, world.comms[rank], devices[rank], 8192, 0, byref(comms[rank]))
    (status, sentence), (failed, why) = world.each(open)
    assert status == 0, sentence
    assert failed == Status.COMM and not comms[1], why
if {numbers} == (0, 0):  # ranks of one GPU wait on the host
    options = capi.CodecOptions(struct_size=ctypes.sizeof(capi.CodecOptions), codec=1, device=devices[0], n_elements=100)
    expect(lib.gc_allreduce_create(comms[0], byref(options), byref(POINTER(AllReduce)())), Status.COMM, "given up")
assert lib.gc_comm_abort(comms[0]) == 0  # writes to the buffer of rank 1
lib.gc_comm_free(comms[0])
assert lib.gc_trim(devices[0]) == 0
kept = [fake.fake_in_use(gpu) - before for gpu, before in enumerate(own)]
# Rank 0 has aborted, so its buffer is kept, too.
assert kept == [2 * 8192, 0] if {numbers} == (0, 0) else kept == [8192, 8192], kept
""")


def test_a_rank_that_calls_after_an_abort_gets_an_error():
    run_ranks("""
from capi import PeersOptions
for _, _, comm in opened(gpus(0, 1)):  # gives the GPUs access to each other
    lib.gc_comm_free(comm)
room = 65536
owners = [held(room + 256, gpu) for gpu in range(2)]
buffers = [-(-owner.contents.dl_tensor.data // 256) * 256 for owner in owners]
for buffer in buffers:
    ctypes.memset(buffer, 0, room)
comms = [POINTER(Comm)() for _ in range(2)]
def make(rank):
    options = PeersOptions(struct_size=ctypes.sizeof(PeersOptions), rank=rank, world_size=2, timeout_ms=60_000,
                           device=DLDevice(CUDA, rank), bytes=room, buffers=(ctypes.c_void_p * 2)(*buffers))
    return lib.gc_comm_from_peers(byref(options), byref(comms[rank]))
assert make(0) == 0
assert lib.gc_comm_abort(comms[0]) == 0
expect(make(1), Status.COMM, "has aborted")
lib.gc_comm_free(comms[0])
""")
