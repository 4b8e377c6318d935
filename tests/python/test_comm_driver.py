"""Tests of the compressed all-reduces on CUDA, on a stand-in driver that runs the kernels on the host, lane by lane:
ranks that share a GPU, and calls of the driver that fail."""

import pytest

from test_codec_driver import run_codec
from tiers import TIER, both

WORLD = """
from ctypes import POINTER
from capi import AllReduce, CodecOptions
from comms import World, handle_on, run_on
"""


def run_comm(script, **environment):
    run_codec(f"exec({WORLD!r})\n" + script, **environment)


HALVES = """
from comms import CheckedRanks, Nodes, random_handle

home = ctypes.c_void_p()
assert fake.cuInit(0) == 0 and fake.cuCtxGetCurrent(byref(home)) == 0

class Entered(World):
    # All ranks run in the context of the tensors.
    def each(self, function):
        def run(rank):
            assert fake.cuCtxPushCurrent_v2(home) == 0
            return function(rank)
        return World.each(self, run)

class EnteredNodes(Nodes):
    each, level = Entered.each, Entered
"""


@pytest.mark.parametrize("kind", ["ONEBIT", "SIGN"])
def test_a_gpu_replaces_a_corrupt_payload_by_a_shard_of_zeros(kind):
    run_comm(f"""
exec({HALVES!r})
place, rng, segments = Place(), np.random.default_rng(1), [9000, 3, 2000]
options = dict(codec={kind}, segments=segments, error=None if {kind} == SIGN else "float32", nonfinite=TRANSACTIONAL)
with Entered(3, "board", 1) as world, CheckedRanks(world, place, **options) as ranks:

    def before(name, sender, sent):
        # Damages the chunk for rank 0.
        return bytes([sent[0] ^ 1]) + sent[1:] if name == "all_to_all" and sender == 1 else sent

    gradients = [[rng.standard_normal(n).astype("f4") for n in segments] for _ in range(3)]
    shards = ranks.reduce_scatter(gradients)
    world.board.before = before
    put = [[place.put(g) for g in each] for each in gradients]
    to = [place.put(np.full(shard.size, 7, "f4")) for shard in shards]
    ranks.rollback()
    ranks.all("gc_allreduce_reduce_scatter", lambda rank: (
        ranks.handles[rank], views(put[rank]), 3, None, None, to[rank].view, None))
    same(place.get(to[0]), np.zeros(shards[0].size, "f4"), "shard of rank 0")
    for rank in 1, 2:
        same(place.get(to[rank]), shards[rank], f"shard of rank {{rank}}")
    for rank, model in enumerate(ranks.models):
        assert lib.gc_comm_async_error(world.comms[rank]) == (Status.CORRUPT if rank == 0 else Status.OK)
        model.flags |= CORRUPT if rank == 0 else 0
        model.pending[0] = model.worker
    ranks.rollback()
    ranks.flags()
    ranks.errors()
    world.board.before = lambda name, sender, sent: sent
    ranks.all_gather(ranks.reduce_scatter(gradients))
    ranks.commit()
    ranks.errors()
""")


# Transports within a node and between nodes, and the ranks of each node.
@pytest.mark.parametrize("ways, ranks", [("'peers', 'group'", [2, 2]), ("'peers', 'board'", [3, 3]), ("'peers', 'peers'", [2, 2])])
def test_two_levels_need_no_more_peer_memory_than_the_header_says(ways, ranks):
    flags = tuple(int("board" in way) for way in ways.split(", "))  # a board takes host memory
    run_comm(f"""
exec({HALVES!r})
from comms import KEEP_NOTHING, steps

place, ranks = Place(), {ranks}

def room_of(options):
    # The first size is for the ranks of a node, the second for one level. Parts between nodes need less.
    given = codecs_c.options_of(codecs_c.model_of(**options), place.device)
    worlds = (ranks[0], len(ranks)), (sum(ranks), 1), (len(ranks), 1)
    return max(lib.gc_allreduce_peers_bytes(byref(given), each, nodes) for each, nodes in worlds)

for seed in range(2):
    rng = np.random.default_rng([seed, *ranks])
    options = random_handle(rng, KEEP_NOTHING)
    with EnteredNodes(ranks, {ways}, {flags}, room_of(options)) as world, CheckedRanks(world, place, **options) as checked:
        steps(rng, checked, options)
        assert [lib.gc_comm_async_error(comm) for comm in world.comms] == [0] * sum(ranks)
    place.release()
assert not fake.fake_events() and not fake.fake_pinned(), (fake.fake_events(), fake.fake_pinned())
""")


def test_two_levels_are_captured_if_both_can_be():
    run_comm(f"exec({HALVES!r})" + """
place, n = Place(), 500

# Callbacks for GPU memory only enqueue. Transports on the host wait, and so do ranks of a process on one GPU.
for ways, flags, can_be in (
    (("board", "board"), (0, 0), True), (("board", "board"), (0, 1), False), (("board", "board"), (1, 0), False),
    (("group", "board"), (0, 0), False), (("board", "group"), (0, 0), False), (("peers", "board"), (0, 0), False),
):
    with EnteredNodes([2, 2], *ways, flags) as world:
        handles = world.each(lambda rank: handle_on(world.comms[rank], n, place.device))
        put = [place.put(np.ones(n, "f4")) for _ in range(4)]
        run = lambda rank: run_on(handles[rank], put[rank])

        for captures in True, False:
            fake.fake_capture(int(captures))
            before = fake.fake_launches()
            found = world.each(run)
            launched = fake.fake_launches() - before
            fake.fake_capture(0)
            if captures and not can_be:
                assert [status for status, _ in found] == [Status.INVALID_ARGUMENT] * 4, (ways, flags, found)
                assert all("captured" in sentence for _, sentence in found) and launched == 0, (ways, flags, found)
            else:
                assert found == [(0, "")] * 4, (ways, flags, captures, found)
        free_all(handles)
    place.release()
""")


@pytest.mark.parametrize("ranks", [[2, 2], [2], [1, 1]], ids=str)
def test_two_levels_neither_free_nor_wait_between_launches(ranks):
    run_comm(f"""
exec({HALVES!r})

place, n, size = Place(), 3000, sum({ranks})
with EnteredNodes({ranks}, "board", "board") as world:
    handles = world.each(lambda rank: handle_on(world.comms[rank], n, place.device))
    put = [place.put(np.ones(n, "f4")) for _ in range(size)]
    run = lambda rank: call("gc_allreduce_run", handles[rank], views([put[rank]]), 1, None, None, None)
    world.each(run)  # loads all kernels
    free_all([held(1 << 30) for _ in range(4)])
    counts = lambda: (fake.fake_frees(), fake.fake_waits(), fake.fake_in_use(0))
    before, launches = counts(), fake.fake_launches()
    world.each(run)
    assert counts() == before and fake.fake_launches() > launches, (before, counts())
    # The bound for 64 GiB is 2 GiB. A call that makes a tensor frees blocks beyond the bound.
    lib.gc_tensor_free(held(1000))
    assert fake.fake_in_use(0) <= before[2] - (2 << 30) + 1024, (before, counts())
    free_all(handles)
""")


# Transports of host memory, or of the GPU's; two nodes that use two-shot, or, without errors, one-shot.
@pytest.mark.parametrize("flags, codec, error", [((1, 1), 1, 0), ((0, 0), 5, 2)])
def test_two_levels_leak_nothing_when_a_driver_call_fails(flags, codec, error):
    run_comm(f"""
from comms import Nodes

assert lib.gc_prepare(DLDevice(CUDA, 0)) == 0
failures = 0
with Nodes([2, 2], "board", "board", {flags}) as world:
    before = fake.fake_in_use(0), fake.fake_pinned()
    def create(rank):
        options = CodecOptions(112, codec={codec}, device=DLDevice(CUDA, 0), n_elements=1000, error={error})
        handle = POINTER(AllReduce)()
        return lib.gc_allreduce_create(world.comms[rank], byref(options), byref(handle)), handle

    for calls in range(0, 1000, {3 if TIER == 'quick' else 1}):  # the order varies, because four threads make the calls
        made, name = failing(fake, calls, 2, lambda: world.each(create))
        statuses, handles = zip(*made)
        free_all(handles)
        if not name:
            break
        # Each communicator keeps the memory to which its GPU writes a status.
        assert fake.fake_in_use(0) == before[0] and fake.fake_pinned() - before[1] <= 4, name
        if any(statuses):
            assert all(statuses) and Status.OUT_OF_MEMORY in statuses, (name, statuses)
            failures += 1
assert failures >= 4, failures
assert (fake.fake_in_use(0), fake.fake_pinned(), fake.fake_events()) == (0, 0, 0)
""")


@pytest.mark.parametrize("half", ["reduce_scatter", "all_gather", "run"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_on_separate_streams_read_the_data_of_their_call(half, size):
    # The driver works only when it is waited for: a rank that continues too early has sent other data by then.
    run_comm(f"""
exec({HALVES!r})
place, rng, size, n = Place(), np.random.default_rng(4), {size}, 3000
streams = [ctypes.c_void_p(fake.fake_stream_here()) for _ in range(size)]
with Entered(size, "group") as world, CheckedRanks(world, place, streams, codec=ONEBIT, segments=[n]) as ranks:
    gradients = [[[rng.standard_normal(n).astype("f4")] for _ in range(size)] for _ in range(3)]
    shards = [[rng.standard_normal(model.shard_elements()).astype("f4") for model in ranks.models] for _ in range(3)]
    values = [[place.put(g[0]) for g in of_step] for of_step in gradients]
    parts = [[place.put(shard) for shard in of_step] for of_step in shards]

    def steps(rank):
        # Each rank makes three calls in its own thread.
        for of_values, of_parts in zip(values, parts):
            given, handle, part = views([of_values[rank]]), ranks.handles[rank], of_parts[rank].view
            if {half!r} == "run":
                call("gc_allreduce_run", handle, given, 1, None, None, streams[rank])
            elif {half!r} == "reduce_scatter":
                call("gc_allreduce_reduce_scatter", handle, given, 1, None, None, part, streams[rank])
            else:
                call("gc_allreduce_all_gather", handle, part, given, 1, streams[rank])

    fake.fake_late(1)
    world.each(steps)
    fake.fake_late(0)
    for number in range(3):
        if {half!r} == "reduce_scatter":
            for rank, expected in enumerate(ranks.model.reduce_scatter(gradients[number])):
                same(place.get(parts[number][rank]), expected, f"step {{number}}, shard of rank {{rank}}")
            continue
        model, given = ranks.model, gradients[number] if {half!r} == "run" else shards[number]
        for rank, (expected,) in enumerate((model.run if {half!r} == "run" else model.all_gather)(given)):
            same(place.get(values[number][rank]), expected, f"step {{number}}, rank {{rank}}")
""")


GPUS = """
import threading
from ctypes import POINTER
from capi import Comm

fake.fake_leave()  # all threads use the primary contexts
rng = np.random.default_rng(5)

def gpus(count):
    # Gives each GPU access to the memory of the others.
    found, contexts = [Place(gpu) for gpu in range(count)], [ctypes.c_void_p() for _ in range(count)]
    for place in found:
        assert lib.gc_prepare(place.device) == 0
    for gpu, context in enumerate(contexts):
        assert fake.cuDevicePrimaryCtxRetain(byref(context), 70 + gpu) == 0
    for context in contexts:
        fake.cuCtxPushCurrent_v2(context)
        for other in contexts:
            assert other is context or fake.cuCtxEnablePeerAccess(other, 0) in (0, 704)
        fake.cuCtxPopCurrent_v2(byref(ctypes.c_void_p()))
    return found

def free(world, rank, handles):
    free_all(handles)
    lib.gc_comm_free(world.comms[rank])
    world.comms[rank] = POINTER(Comm)()
"""


@pytest.mark.parametrize("then", ["frees", "goes_on"])
def test_events_stay_until_every_rank_has_waited_for_them(then):
    # Rank 1 has signalled that it has copied everything, and is about to wait for an event of rank 0. Rank 0 destroys
    # the event when it frees its communicator, or continues on another GPU.
    run_comm(f"""
exec({GPUS!r})
from comms import is_asleep

first, second = gpus(2)
tensors = [[gpu.put(np.ones(1000, "f4")) for gpu in (first, second)] for _ in range(2)]
found, has_left, is_over = [[], []], threading.Event(), threading.Event()
with World(2) as world:
    handles = world.each(lambda rank: [handle_on(world.comms[rank], 1000, gpu.device) for gpu in (first, second)])

    def leader():
        found[0].append(run_on(handles[0][0], tensors[0][0]))
        has_left.set()
        if {then!r} == "frees":
            free(world, 0, handles[0])
        else:
            found[0].append(run_on(handles[0][1], tensors[0][1]))
        is_over.wait()

    def preempted():
        # In each of two exchanges a rank waits until both have data, and until the other has copied it.
        fake.fake_hold_wait(5)
        found[1].append(run_on(handles[1][0], tensors[1][0]))
        if {then!r} != "frees":
            found[1].append(run_on(handles[1][1], tensors[1][1]))

    threads = [threading.Thread(target=target) for target in (leader, preempted)]
    for thread in threads:
        thread.start()
    while not (fake.fake_held_wait() and has_left.is_set() and is_asleep(threads[0])):
        os.sched_yield()
    fake.fake_go_on()
    is_over.set()
    for thread in threads:
        thread.join()
    assert found == [[(0, "")] * len(each) for each in found], found
    for rank in range({then!r} == "frees", 2):
        free(world, rank, handles[rank])
assert not fake.fake_events(), fake.fake_events()
""")


def test_ranks_that_disagree_free_no_memory_that_another_gpu_copies():
    # The first two ranks have copied from each other before they read the third's call.
    run_comm(f"""
exec({GPUS!r})

of_ranks = gpus(3)
for order in (0, 1, 2), (1, 0, 2), (2, 1, 0):
    with World(3) as world:
        sizes = 1000, 1000, 2000
        handles = world.each(lambda rank: [handle_on(world.comms[rank], n, of_ranks[rank].device) for n in (1000, 2000)])
        each = [gpu.put(np.ones(n, "f4")) for gpu, n in zip(of_ranks, sizes)]
        found = world.each(lambda rank: run_on(handles[rank][rank == 2], each[rank]))
        assert all(status == Status.COMM and "where rank" in sentence for status, sentence in found), found
        for rank in order:
            free(world, rank, handles[rank])
    for gpu in of_ranks:
        gpu.release()
        lib.gc_trim(gpu.device)
    assert [fake.fake_in_use(gpu) for gpu in range(3)] == [0, 0, 0], order
""", FAKE_DEVICES=3)


# With three ranks, the third may make the driver finish work for which one of the others forgets to wait.
@pytest.mark.parametrize("size", both(quick=[2], all=[2, 3]))
def test_a_failed_driver_call_frees_no_memory_that_another_gpu_copies(size):
    # The driver reports what is freed while it is in use, or waited for after its release.
    run_comm(f"""
exec({GPUS!r})

of_ranks = gpus({size})
each, failures = [gpu.put(np.ones(1000, "f4")) for gpu in of_ranks], set()
for calls in range(10_000):
    with World({size}) as world:
        handles = world.each(lambda rank: handle_on(world.comms[rank], 1000, of_ranks[rank].device))

        def run_or_abort(rank):
            status, sentence = run_on(handles[rank], each[rank])
            if status:
                lib.gc_comm_abort(world.comms[rank])
            return status

        found, failed = failing(fake, calls, 719, lambda: world.each(run_or_abort))
        free_all(handles)
    if not failed:
        break
    if any(found):
        failures.add(failed)
assert {{"cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync", "cuLaunchKernel"}} <= failures, failures
""", FAKE_DEVICES=3)
