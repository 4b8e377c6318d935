"""All-reduces over NCCL, on an NCCL among threads and a driver without a GPU (tests/fakes): the bytes of the model, and
an NCCL that fails, is missing, is there twice, does not block."""

import itertools
import os
import pathlib
import shutil

import pytest

from stand_in import DRIVERS, run
from test_codec_driver import PLACE
from tiers import both

RANKS = """
import shutil, threading
from ctypes import POINTER, c_int, c_uint8, c_void_p

from capi import AllReduce, CodecOptions, Comm, NcclOptions
from comms import CheckedRanks, World, handle_on, run_on

fake.fake_leave()  # all threads use the primary contexts
assert fake.cuInit(0) == 0
SPLIT = 1

class Id(ctypes.Structure):
    _fields_ = [("bytes", c_uint8 * 128)]

def library(name="libnccl.so.2", mode=0):
    nccl = ctypes.CDLL(name, mode=mode)
    nccl.fake_nccl_failed_call.restype = ctypes.c_char_p
    nccl.fake_nccl_fail_call.argtypes = ctypes.c_long, c_int
    nccl.ncclCommInitRank.argtypes = POINTER(c_void_p), c_int, Id, c_int
    return nccl

def options(**fields):
    return NcclOptions(struct_size=ctypes.sizeof(NcclOptions), **fields)

def communicator(nccl, size, rank, id):
    # Returns a communicator that the caller made, in a thread with the rank's GPU.
    enter_primary(fake, rank)
    comm = c_void_p()
    state = nccl.ncclCommInitRank(byref(comm), size, id, rank)
    assert state in (0, 7), state
    return comm

class Threads:
    each = World.each
    __enter__ = World.__enter__
    __exit__ = World.__exit__

class Own(Threads):
    # Makes a world of an id, with a GPU for each rank.
    def __init__(self, size, **fields):
        self.size, self.comms = size, [POINTER(Comm)() for _ in range(size)]
        id = (c_uint8 * 128)()
        call("gc_comm_nccl_id", byref(options(**fields)), id)
        self.each(lambda rank: call("gc_comm_from_nccl_id", byref(options(**fields)), id, rank, size,
                                    DLDevice(CUDA, rank), byref(self.comms[rank])))

class Borrowed(Threads):
    # Makes a world of communicators of the caller.
    def __init__(self, nccl, size, flags=0, **fields):
        self.size, self.comms = size, [POINTER(Comm)() for _ in range(size)]
        id = Id()
        assert nccl.ncclGetUniqueId(byref(id)) == 0
        self.mine = self.each(lambda rank: communicator(nccl, size, rank, id))
        self.each(lambda rank: call("gc_comm_from_nccl", byref(options(comm=self.mine[rank], flags=flags, **fields)),
                                    byref(self.comms[rank])))

def same_as_the_model(world, **options):
    # Returns values and errors of all ranks, each on its GPU.
    rng, places = np.random.default_rng(0), [Place(rank) for rank in range(world.size)]
    for segments in [1], [9001], [3000, 0, 5]:
        with CheckedRanks(world, places, **dict(codec=ONEBIT) | options, segments=segments) as ranks:
            for _ in range(3):
                ranks.run([[rng.standard_normal(n).astype("f4") for n in segments] for _ in range(world.size)])
            ranks.errors()
"""


def run_ranks(script, **environment):
    return run(f"exec({PLACE + RANKS!r})\n" + script, **{"FAKE_DEVICES": 5, **environment})


@pytest.mark.parametrize("size, polls", both(quick=[(1, 0), (3, 5)], all=itertools.product([1, 2, 3, 5], [0, 5])))
def test_a_world_of_an_id_computes_the_bytes_of_the_model(size, polls):
    run_ranks(f"""
with Own({size}) as world:
    same_as_the_model(world)
    nccl = library()
    assert nccl.fake_nccl_communicators() == {size}
assert (nccl.fake_nccl_communicators(), nccl.fake_nccl_destroyed(), nccl.fake_nccl_aborted()) == (0, {size}, 0)
""", FAKE_NCCL_POLLS=polls)


@pytest.mark.parametrize("flags, polls", [(0, 5), (1, 0), (1, 5)])
def test_a_borrowed_communicator_stays_and_a_split_one_is_freed(flags, polls):
    run_ranks(f"""
nccl = library()
with Borrowed(nccl, 3, flags={flags}) as world:
    same_as_the_model(world)
    assert nccl.fake_nccl_communicators() == 3 + 3 * {flags}
assert (nccl.fake_nccl_communicators(), nccl.fake_nccl_destroyed(), nccl.fake_nccl_aborted()) == (3, 3 * {flags}, 0)
""", FAKE_NCCL_POLLS=polls)


def test_a_release_does_not_wait_for_the_other_ranks():
    """Releases one rank first: NCCL destroys with all ranks of the node, Python's garbage collection at any time."""
    run_ranks("""
nccl, world = library(), Own(2)
lib.gc_comm_free(world.comms[0])
assert (nccl.fake_nccl_communicators(), nccl.fake_nccl_destroyed()) == (2, 0)
lib.gc_comm_free(world.comms[1])
while nccl.fake_nccl_communicators():
    pass
assert (nccl.fake_nccl_destroyed(), nccl.fake_nccl_aborted()) == (2, 0)
""", FAKE_NCCL_WAITS=1)


def test_no_run_allocates_or_frees():
    run_ranks("""
with Own(2) as world:
    n = 5000
    tensors = [Place(rank).put(np.zeros(n, "f4")) for rank in range(2)]
    made = world.each(lambda rank: handle_on(world.comms[rank], n, DLDevice(CUDA, rank)))
    before = fake.fake_allocations(), fake.fake_frees()
    for _ in range(3):
        assert world.each(lambda rank: run_on(made[rank], tensors[rank])) == [(0, "")] * 2
    assert (fake.fake_allocations(), fake.fake_frees()) == before
""")


def test_memory_that_nccl_cannot_use_is_refused():
    run_ranks("""
with Own(1) as world:
    def create(device):
        handle = POINTER(AllReduce)()
        what = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=1, device=device, n_elements=8)
        status = lib.gc_allreduce_create(world.comms[0], byref(what), byref(handle))
        lib.gc_allreduce_free(handle)
        return status
    expect(create(DLDevice(1, 0)), Status.UNSUPPORTED_DEVICE, "NCCL", "cpu", "cuda:0")
    expect(create(DLDevice(CUDA, 1)), Status.INVALID_ARGUMENT, "cuda:1", "cuda:0")
    assert create(DLDevice(CUDA, 0)) == 0, last_error()
    # The legacy stream of another context is another stream.
    fake.fake_enter(0, 100)
    expect(create(DLDevice(CUDA, 0)), Status.INVALID_ARGUMENT, "primary", "cuda:0")
    fake.fake_leave()
    assert lib.gc_comm_async_error(world.comms[0]) == 0

# If a rank's options are refused, creation fails on all ranks.
with Own(3) as world:
    def create(rank):
        handle = POINTER(AllReduce)()
        device = DLDevice(1, 0) if rank == 1 else DLDevice(CUDA, rank)
        what = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=1, device=device, n_elements=9)
        return lib.gc_allreduce_create(world.comms[rank], byref(what), byref(handle)), last_error()
    statuses = world.each(create)
    other, own = Status.INVALID_ARGUMENT, Status.UNSUPPORTED_DEVICE
    assert [s for s, _ in statuses] == [other, own, other], statuses
    assert "rank 1" in statuses[0][1] and "NCCL" in statuses[1][1], statuses
""")


def test_the_callers_context_is_current_again():
    run_ranks("""
def current():
    context = c_void_p()
    assert fake.cuCtxGetCurrent(byref(context)) == 0
    return context.value
own = fake.fake_enter(0, 100)
depth = fake.fake_depth()
id, comm = (c_uint8 * 128)(), POINTER(Comm)()
call("gc_comm_nccl_id", byref(options()), id)
call("gc_comm_from_nccl_id", byref(options()), id, 0, 1, DLDevice(CUDA, 0), byref(comm))
assert (current(), fake.fake_depth()) == (own, depth)
lib.gc_comm_free(comm)
assert (current(), fake.fake_depth()) == (own, depth)

def work(rank):
    enter_primary(fake, rank)
    before = current()
    handle = handle_on(world.comms[rank], 100, DLDevice(CUDA, rank))
    assert run_on(handle, Place(rank).put(np.ones(100, "f4"))) == (0, "")
    lib.gc_allreduce_free(handle)
    assert (current(), fake.fake_depth()) == (before, 1)
with Own(2) as world:
    world.each(work)
""")


# Calls of a rank, and the calls of NCCL of each on the rank's thread: a thread of the library destroys communicators.
MADE = "ncclGetVersion ncclCommGetAsyncError"
BORROWED = f"{MADE} ncclCommUserRank ncclCommCount ncclCommCuDevice"
ASKED = {
    "an id": "ncclGetVersion ncclGetUniqueId",
    "a world": f"{MADE} ncclCommInitRankConfig ncclCommGetAsyncError",
    "borrowing": BORROWED,
    "splitting": f"{BORROWED} ncclCommSplit",
    "an all-reduce": "ncclCommGetAsyncError ncclGroupStart ncclSend ncclRecv ncclGroupEnd ncclAllGather",
    "a handle": "ncclCommGetAsyncError ncclAllGather",
}
CALLS = {
    "an id": 'call("gc_comm_nccl_id", byref(options()), (c_uint8 * 128)())',
    "a world": 'made_once(Comm, "gc_comm_from_nccl_id", byref(options()), ids[rank], rank, 2, DLDevice(CUDA, rank))',
    "borrowing": 'made_once(Comm, "gc_comm_from_nccl", byref(options(comm=mine.mine[rank])))',
    "splitting": 'made_once(Comm, "gc_comm_from_nccl", byref(options(comm=mine.mine[rank], flags=SPLIT)))',
    "an all-reduce": """
call("gc_allreduce_reset", made[rank], None)
call("gc_allreduce_run", made[rank], views([tensors[rank]]), 1, None, None, None)
""",
    "a handle": """
what = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=1, device=DLDevice(CUDA, rank), n_elements=100)
made_once(AllReduce, "gc_allreduce_create", mine.comms[rank], byref(what))
""",
}


@pytest.mark.parametrize("polls", [0, 3])
@pytest.mark.parametrize("what", CALLS)
def test_every_call_of_nccl_may_fail(what, polls):
    run_ranks(f"""
nccl = library()
mine = Borrowed(nccl, 2)
n = 1000
tensors = [Place(rank).put(np.full(n, 3, "f4")) for rank in range(2)]
made = mine.each(lambda rank: handle_on(mine.comms[rank], n, DLDevice(CUDA, rank)))

def made_once(kind, name, *arguments):
    one = POINTER(kind)()
    try:
        call(name, *arguments, byref(one))
    finally:
        free_all([one])

def work(rank):
    status, sentence = 0, ""
    try:
        exec({CALLS[what]!r}, {{**globals(), "rank": rank}})
    except Refused as refusal:
        status, sentence = refusal.status, str(refusal)
    assert nccl.fake_nccl_depth() == 0 and fake.fake_depth() == 0 and fake.fake_capture_mode() == 0
    return status, sentence

def all_of_it(at, code):
    nccl.fake_nccl_fail_call(-1, 0)
    id = Id()
    assert nccl.ncclGetUniqueId(byref(id)) == 0
    globals()["ids"] = [id.bytes] * 2
    nccl.fake_nccl_fail_call(at, code)
    results = mine.each(work)
    failed = nccl.fake_nccl_failed_call().decode()
    nccl.fake_nccl_fail_call(-1, 0)
    return failed, results

in_use = [fake.fake_in_use(k) for k in range(2)]
seen = set()
for code in {both(quick=[77], all=[1, 2, 4, 6, 8, 77])}:
    for at in range(100):
        communicators = nccl.fake_nccl_communicators()
        failed, results = all_of_it(at, code)
        left = nccl.fake_nccl_communicators() - communicators
        assert [fake.fake_in_use(k) for k in range(2)] == in_use, failed
        if not failed:
            assert results == [(0, "")] * 2, results
            break
        seen.add(failed)
        # NCCL owns a communicator that is being split off until the split is complete.
        assert left == 0 or (failed == "ncclCommGetAsyncError" and {what == "splitting" and polls > 0}), (failed, left)
        of_free = failed == "ncclCommGetAsyncError" and [s for s, _ in results] == [0, 0]
        for status, sentence in results:
            expected = Status.COMM_UNAVAILABLE if failed == "ncclGetVersion" else Status.COMM
            named = failed in sentence and f"({{code}})" in sentence
            assert of_free or (status == expected and named), (failed, results)
            assert of_free or failed == "ncclGetVersion" or "stand-in" in sentence, results
    else:
        raise AssertionError("it never ends")
assert seen == set({ASKED[what]!r}.split()), seen
""", FAKE_NCCL_POLLS=polls)


def test_every_call_of_the_driver_may_fail_when_a_communicator_is_made():
    run_ranks("""
id, nccl = (c_uint8 * 128)(), library()
def make():
    comm = POINTER(Comm)()
    call("gc_comm_nccl_id", byref(options()), id)
    status = lib.gc_comm_from_nccl_id(byref(options()), id, 0, 1, DLDevice(CUDA, 0), byref(comm))
    return status, comm
status, comm = make()
lib.gc_comm_free(comm)
in_use = fake.fake_in_use(0)
for at in range(100):
    (status, comm), failed = failing(fake, at, 999, make)
    make_good(fake, failed)
    assert status in (0, Status.CUDA, Status.COMM) and bool(comm) == (status == 0), (failed, status, last_error())
    assert status != Status.CUDA or failed.split("_v2")[0] in last_error(), (failed, last_error())
    lib.gc_comm_free(comm)
    assert (nccl.fake_nccl_communicators(), fake.fake_in_use(0)) == (0, in_use), failed
    if not failed:
        assert status == 0
        break
    while fake.fake_depth():  # what could not be left
        fake.cuCtxPopCurrent_v2(byref(c_void_p()))
else:
    raise AssertionError("it never ends")
""")


def test_an_asynchronous_error_is_reported_at_once_and_aborts_the_communicator():
    run_ranks("""
with Own(2) as world:
    nccl = library()
    assert lib.gc_comm_async_error(world.comms[0]) == 0
    nccl.fake_nccl_async_error(7)
    assert lib.gc_comm_async_error(world.comms[0]) == 0  # a busy communicator is no error
    nccl.fake_nccl_async_error(6)
    expect(lib.gc_comm_async_error(world.comms[1]), Status.COMM, "rank 1", "remote process", 6)
assert (nccl.fake_nccl_communicators(), nccl.fake_nccl_destroyed(), nccl.fake_nccl_aborted()) == (0, 0, 2)
""")


def test_a_communicator_is_aborted_before_memory_of_its_kernels_is_freed():
    """Checks the order of both: cuMemFree waits for a kernel of NCCL's that waits for a lost rank."""
    run_ranks("""
nccl, world = library(), Own(2)
made = [POINTER(AllReduce)() for _ in range(2)]
def make(rank):
    what = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=1, device=DLDevice(CUDA, rank), n_elements=100)
    call("gc_allreduce_create", world.comms[rank], byref(what), byref(made[rank]))
world.each(make)
freed = []
seen = ctypes.CFUNCTYPE(None)(lambda: freed.append(fake.fake_frees()))
nccl.fake_nccl_at_abort(seen)
nccl.fake_nccl_async_error(6)
for rank in range(2):
    lib.gc_comm_free(world.comms[rank])
    assert len(freed) == rank
    now = fake.fake_frees()
    lib.gc_allreduce_free(made[rank])
    assert freed[rank] == now < fake.fake_frees(), (freed, now)
assert nccl.fake_nccl_aborted() == 2
""")


def test_a_communicator_that_could_not_be_aborted_can_be_later():
    run_ranks("""
nccl, world = library(), Own(1)
fake.fake_fail_call(0, 999)  # the aborting thread makes the next driver call, to enter the context
for _ in range(10**6):  # the thread of the first abort may not have ended yet
    assert lib.gc_comm_abort(world.comms[0]) == 0, last_error()
    if fake.fake_failed_call():
        fake.fake_fail_call(-1, 0)
    if nccl.fake_nccl_aborted():
        break
    os.sched_yield()
lib.gc_comm_free(world.comms[0])
assert (nccl.fake_nccl_communicators(), nccl.fake_nccl_aborted()) == (0, 1)
""")


def test_memory_of_kernels_that_may_never_end_is_not_freed():
    run_ranks("""
world = Own(2)
made = world.each(lambda rank: handle_on(world.comms[rank], 100, DLDevice(CUDA, rank)))
pinned = fake.fake_pinned()
assert pinned > 0
for rank in range(2):
    assert lib.gc_comm_abort(world.comms[rank]) == 0, last_error()
    lib.gc_comm_free(world.comms[rank])
    lib.gc_allreduce_free(made[rank])
assert fake.fake_pinned() == pinned
""")


def test_after_a_failed_exchange_an_owned_communicator_is_aborted():
    run_ranks("""
with Own(2) as world:
    nccl = library()
    places = [Place(rank) for rank in range(2)]
    tensors = [place.put(np.ones(100, "f4")) for place in places]
    made = world.each(lambda rank: handle_on(world.comms[rank], 100, DLDevice(CUDA, rank)))
    os.environ["FAKE_NCCL_FAILURES"] = "ncclRecv=3"
    def work(rank):
        return *run_on(made[rank], tensors[rank]), lib.gc_comm_async_error(world.comms[rank])
    for status, sentence, later in world.each(work):
        assert status == later == Status.COMM, sentence
        assert "ncclRecv of" in sentence and "from rank 0" in sentence and "internal error (3)" in sentence, sentence
    for rank in range(2):
        same(places[rank].get(tensors[rank]), tensors[rank].what, "the values of a run that failed")
        lib.gc_allreduce_free(made[rank])
    os.environ["FAKE_NCCL_FAILURES"] = ""
assert (nccl.fake_nccl_communicators(), nccl.fake_nccl_aborted()) == (0, 2)
""")


# --- search for NCCL --------------------------------------------------------------------------------------------------

BORROW = """
def borrow(nccl, **fields):
    id, comm = Id(), POINTER(Comm)()
    assert nccl.ncclGetUniqueId(byref(id)) == 0
    mine = communicator(nccl, 1, 0, id)
    status = lib.gc_comm_from_nccl(byref(options(comm=mine, **fields)), byref(comm))
    lib.gc_comm_free(comm)
    return status

def is_loaded():
    return "libnccl" in open("/proc/self/maps").read()
"""


def run_borrow(script, **environment):
    run_ranks(f"exec({BORROW!r})\n" + script, **environment)


@pytest.mark.parametrize("mode", [os.RTLD_LOCAL, os.RTLD_GLOBAL])
def test_a_loaded_library_is_found(mode):
    run_borrow(f"""
assert borrow(library(mode={int(mode)})) == 0, last_error()
""")


def test_several_libraries_need_a_handle(tmp_path):
    other = tmp_path / "libwith_nccl_within.so"
    shutil.copy(pathlib.Path(DRIVERS) / "driver" / "libnccl.so.2", other)
    run_borrow(f"""
nccl, other = library(), library({str(other)!r})
for one in nccl, other:
    expect(borrow(one), Status.COMM_UNAVAILABLE, "dl_handle", "libnccl.so.2", "libwith_nccl_within.so")
    assert borrow(one, dl_handle=one._handle) == 0, last_error()
with Own(2) as world:  # whichever it is
    same_as_the_model(world)
""")


def test_a_library_of_another_name_needs_a_handle(tmp_path):
    other = tmp_path / "libwith_nccl_within.so"
    nccl = (pathlib.Path(DRIVERS) / "driver" / "libnccl.so.2").read_bytes()
    other.write_bytes(nccl.replace(b"libnccl.so.2\0", b"libwithin.so\0"))  # its SONAME
    run_borrow(f"""
other = library({str(other)!r})
expect(borrow(other), Status.COMM_UNAVAILABLE, "dl_handle", "libwith_nccl_within.so")
assert borrow(other, dl_handle=other._handle) == 0, last_error()
assert "libnccl.so.2" not in open("/proc/self/maps").read()
with Own(2, dl_handle=other._handle) as world:
    same_as_the_model(world)
assert "libnccl.so.2" not in open("/proc/self/maps").read()
""")


def test_only_a_world_of_an_id_loads_nccl():
    run_borrow("""
status = lib.gc_comm_from_nccl(byref(options(comm=1 << 20)), byref(POINTER(Comm)()))
expect(status, Status.COMM_UNAVAILABLE, "dl_handle")
assert not is_loaded()
call("gc_comm_nccl_id", byref(options()), (c_uint8 * 128)())
assert is_loaded()
""")


def test_a_missing_library_is_named():
    run_borrow("""
expect(lib.gc_comm_nccl_id(byref(options()), (c_uint8 * 128)()), Status.COMM_UNAVAILABLE, "libnccl.so.2")
""", LD_LIBRARY_PATH=f"{DRIVERS}/old_driver")


@pytest.mark.parametrize("version, text", [(2804, "2.8.4"), (21705, "2.17.5")])
def test_an_old_version_is_refused_with_its_number(version, text):
    run_borrow(f"""
expect(lib.gc_comm_nccl_id(byref(options()), (c_uint8 * 128)()), Status.COMM_UNAVAILABLE, {text!r}, "2.19.1")
expect(borrow(library()), Status.COMM_UNAVAILABLE, {text!r}, "2.18")
""", FAKE_NCCL_VERSION=version)


def test_a_function_that_is_missing_is_named():
    run_borrow("""
expect(lib.gc_comm_nccl_id(byref(options()), (c_uint8 * 128)()), Status.COMM_UNAVAILABLE, "ncclCommSplit", "2.19.1")
expect(lib.gc_comm_nccl_id(byref(options(dl_handle=ctypes.CDLL("libm.so.6")._handle)), (c_uint8 * 128)()),
       Status.COMM_UNAVAILABLE, "ncclGetVersion")
""", LD_LIBRARY_PATH=f"{DRIVERS}/old_nccl:{DRIVERS}/driver")


def test_arguments_are_refused():
    run_borrow("""
id, comm = (c_uint8 * 128)(), POINTER(Comm)()
def new(rank, size, device, **fields):
    return lib.gc_comm_from_nccl_id(byref(options(**fields)), id, rank, size, device, byref(comm))
cuda = DLDevice(CUDA, 0)
for rank, size in (-1, 2), (2, 2), (0, 0), (0, -1):
    expect(new(rank, size, cuda), Status.INVALID_ARGUMENT, rank, size)
expect(new(0, 1, DLDevice(1, 0)), Status.UNSUPPORTED_DEVICE, "cpu")
expect(new(0, 1, DLDevice(10, 0)), Status.UNSUPPORTED_DEVICE, 10)
expect(new(0, 1, DLDevice(CUDA, 9)), Status.UNSUPPORTED_DEVICE, "cuda:9")
expect(new(0, 1, cuda, flags=1), Status.INVALID_ARGUMENT, "0x1")
expect(new(0, 1, cuda, comm=8), Status.INVALID_ARGUMENT, "0x8")
expect(lib.gc_comm_nccl_id(byref(options(flags=1)), id), Status.INVALID_ARGUMENT, "0x1")
expect(lib.gc_comm_nccl_id(byref(options()), None), Status.INVALID_ARGUMENT, "id: NULL")
expect(lib.gc_comm_nccl_id(None, id), Status.INVALID_ARGUMENT, "options: NULL")
expect(lib.gc_comm_from_nccl(byref(options()), byref(comm)), Status.INVALID_ARGUMENT, "comm is NULL")
expect(lib.gc_comm_from_nccl(byref(options(comm=8, flags=2)), byref(comm)), Status.INVALID_ARGUMENT, "0x2")
small = options()
small.struct_size -= 1
expect(lib.gc_comm_nccl_id(byref(small), id), Status.INVALID_ARGUMENT, 32, 31)
assert not comm
""")


def test_the_wait_for_a_busy_communicator_ends_at_its_timeout():
    """Uses an NCCL that stays at work longer than any test runs: TIMEOUT comes from the options' timeout_ms."""
    run_ranks("""
nccl = library()
id = Id()
assert nccl.ncclGetUniqueId(byref(id)) == 0
comm, out = communicator(nccl, 1, 0, id), POINTER(Comm)()
for flags in 0, SPLIT:
    given = options(comm=comm, flags=flags, timeout_ms=30)
    assert lib.gc_comm_from_nccl(byref(given), byref(out)) == Status.TIMEOUT and not out, last_error()
    assert "30 ms" in last_error(), last_error()
made = options(timeout_ms=20)
ours = (c_uint8 * 128)()
assert lib.gc_comm_nccl_id(byref(made), ours) == 0
assert lib.gc_comm_from_nccl_id(byref(made), ours, 0, 1, DLDevice(CUDA, 0), byref(out)) == Status.TIMEOUT and not out
assert "ncclCommInitRank" in last_error() and "20 ms" in last_error(), last_error()
""", FAKE_NCCL_POLLS=2**31)


def test_memory_of_a_call_that_timed_out_is_not_freed():
    """Frees nothing: freeing would wait for the missing rank."""
    run_ranks("""
world = Own(2, timeout_ms=1000)
what = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=1, device=DLDevice(CUDA, 0), n_elements=100)
before = fake.fake_frees()
status = lib.gc_allreduce_create(world.comms[0], byref(what), byref(POINTER(AllReduce)()))
assert status == Status.TIMEOUT, last_error()
assert fake.fake_frees() == before
os._exit(0)
""")
