"""Tests of block codecs over peer memory, on a driver without hardware: ranks that are lost or write garbage, and
graphs that are replayed."""

import pytest

from test_peers import run_ranks
from tiers import both

# Two ranks, a GPU each, over buffers that the test reads and writes.
SEEN = """
from block_model import BF16, INT4, INT8, MXFP4, MXFP8
from capi import AllReduce, PeersOptions
from codec_model import NONFINITE, PROPAGATE, TRANSACTIONAL, ZERO
from codecs_c import gradient, model_of, options_of
from comms import CheckedRanks, World

FLAG_BYTES, AREA = 1024, 1 << 16
MOST_RANKS = 64

# A buffer has four areas: all-to-all, all-gather, and two that one-shot payloads use alternately.
class Seen:
    size, each = 2, World.each

    def __init__(self, timeout=60_000, area=AREA):
        self.area = area
        for _, _, comm in opened(gpus(0, 1)):  # gives the GPUs access to each other
            lib.gc_comm_free(comm)
        self.places = [Place(gpu) for gpu in range(2)]
        self.bytes = FLAG_BYTES + 4 * area
        tensors = [place.put(np.zeros(self.bytes + 256, "u1")) for place in self.places]
        self.buffers = [-(-tensor.struct.dl_tensor.data // 256) * 256 for tensor in tensors]
        options = [PeersOptions(struct_size=ctypes.sizeof(PeersOptions), rank=rank, world_size=2, timeout_ms=timeout,
                                device=DLDevice(CUDA, rank), bytes=self.bytes,
                                buffers=(ctypes.c_void_p * 2)(*self.buffers)) for rank in range(2)]
        self.comms, self.handles = [POINTER(Comm)() for _ in range(2)], []
        each(lambda rank: call("gc_comm_from_peers", byref(options[rank]), byref(self.comms[rank])))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        free_all(self.handles)
        free_all(self.comms)

    def handle_of(self, options):
        # Returns a handle for each rank.
        made = [POINTER(AllReduce)() for _ in self.comms]
        given = [options_of(model_of(**options, n_chunks=2), place.device) for place in self.places]
        each(lambda rank: call("gc_allreduce_create", self.comms[rank], byref(given[rank]), byref(made[rank])))
        self.handles += made
        return made

    def put(self, rank, arrays):
        return [self.places[rank].put(array) for array in arrays]

    def get(self, rank, tensors):
        return [self.places[rank].get(tensor).copy() for tensor in tensors]

    # Returns the flags that a rank reads: a number by parity and rank.
    def flags_of(self, rank):
        return np.ctypeslib.as_array((ctypes.c_uint64 * (2 * MOST_RANKS)).from_address(self.buffers[rank]))

    def set_flag(self, rank, to, number):
        self.flags_of(to)[number % 2 * MOST_RANKS + rank] = number

    def wait_for(self, rank, at, number):
        slot = number % 2 * MOST_RANKS + rank
        while self.flags_of(at)[slot] != number:
            os.sched_yield()

    def write(self, rank, first, array):
        ctypes.memmove(self.buffers[rank] + first, array.ctypes.data, array.nbytes)

class Begun(Seen):
    # Both ranks have completed a call with ones. The clock stands still until a rank must be late.
    def __init__(self, codec, error, raw):
        fake.fake_hold_clock(1)
        super().__init__(timeout=200)
        handles = self.handle_of(handle(codec, [3000, 70], error, raw))
        self.tensors = [self.put(rank, [np.ones(3000, "f4"), np.ones(70, "f4")]) for rank in range(2)]
        self.run = lambda rank: run(handles[rank], self.tensors[rank])
        assert each(self.run) == [0, 0]

    def values(self, rank):
        return np.concatenate(self.get(rank, self.tensors[rank]))

def started(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread

def noise(count):
    return np.random.default_rng(0).integers(1, 256, count, np.uint8)

def handle(codec, segments, error="float32", raw=None):
    family = dict(scale=RMS) if codec == ONEBIT else dict(raw=raw or [0] * len(segments))
    return dict(codec=codec, segments=segments, values="float32", results="float32", error=error, **family,
                nonfinite=PROPAGATE, beta=1.0)

def run(one, tensors):
    return lib.gc_allreduce_run(one, views(tensors), len(tensors), None, None, None)
"""


def run_seen(script):
    run_ranks(f"import contextlib, os\nexec({SEEN!r})\n" + script)


CODECS = [("ONEBIT", "'float32'", None), ("INT8", "'float32'", [0, 1]), ("MXFP4", "'bfloat16'", [0, 0])]


@pytest.mark.parametrize("where", ["flags", "areas"])
@pytest.mark.parametrize("codec, error, raw", CODECS)
def test_a_buffer_that_is_overwritten_within_a_call(codec, error, raw, where):
    """Checks that invalid flags count as missing ones, and invalid payloads as corrupt, on all ranks."""
    run_seen(f"""
with Begun({codec}, {error}, {raw}) as world:
    last = int(world.flags_of(0).max())
    other = started(lambda: world.run(1))
    world.wait_for(1, 0, last + 1)
    first, end = (0, FLAG_BYTES) if {where!r} == "flags" else (FLAG_BYTES, world.bytes)
    world.write(0, first, noise(end - first))
    fake.fake_hold_clock({where!r} == "areas")
    assert world.run(0) == 0
    other.join()
    values = [world.values(rank) for rank in range(2)]
    statuses = [lib.gc_comm_async_error(comm) for comm in world.comms]
    if {where!r} == "flags":
        assert np.isnan(values).all() and statuses == [Status.TIMEOUT] * 2, (values, statuses)
    else:
        # No values of the first chunk, which rank 0 reduces, remain.
        assert statuses == [Status.CORRUPT] * 2 and not np.isnan(values).any(), statuses
        same(*values, "both ranks")
        assert (values[0] == 0).any() and (values[0] == 1).any()
""")


@pytest.mark.parametrize("codec, raw", [("INT8", [0, 0]), ("BF16", [0, 1])])
@pytest.mark.parametrize("comes", ["dies", "writes garbage"])
def test_one_shot_with_a_rank_lost_during_the_call(comes, codec, raw):
    """Writes the flags of rank 1, which begins a call."""
    run_seen(f"""
with Begun({codec}, None, {raw}) as world:
    number = int(world.flags_of(0).max()) + 1
    if {comes!r} == "dies":
        fake.fake_hold_clock(0)
        assert world.run(0) == 0
    else:
        other = started(lambda: world.run(0))
        world.wait_for(0, 1, number)
        # This is the area of this barrier, after the payload of rank 0.
        payload = 2 * model_of(**handle({codec}, [3000, 70], None, {raw}), n_chunks=2).stride
        world.write(0, FLAG_BYTES + (2 + number % 2) * world.area + payload, noise(payload))
        world.set_flag(1, 0, number)
        other.join()
    values, status = world.values(0), lib.gc_comm_async_error(world.comms[0])
    if {comes!r} == "dies":
        assert np.isnan(values).all() and status == Status.TIMEOUT, (values, status)
        expect(world.run(0), Status.COMM, "broken off")
    else:
        assert not values.any() and status == Status.CORRUPT, (values, status)
""")


@pytest.mark.parametrize("codec, error, raw", CODECS)
def test_a_rank_that_dies_between_two_barriers_of_a_call(codec, error, raw):
    run_seen(f"""
with Begun({codec}, {error}, {raw}) as world:
    flags = world.put(0, [np.zeros(1, np.uint32)])[0]
    world.set_flag(1, 0, int(world.flags_of(0).max()) + 1)
    fake.fake_hold_clock(0)
    assert world.run(0) == 0
    assert np.isnan(world.values(0)).all()
    expect(lib.gc_comm_async_error(world.comms[0]), Status.TIMEOUT, "200 ms")
    call("gc_allreduce_flags", world.handles[0], flags.view, None)
    assert world.get(0, [flags])[0] == NONFINITE
    expect(world.run(0), Status.COMM, "broken off")
""")


@pytest.mark.parametrize("codec, error, raw", CODECS)
def test_a_rank_writes_nothing_after_its_timeout(codec, error, raw):
    """Lets rank 0 give up at the first barrier. It still reduces, but writes nothing to rank 1, which is late."""
    run_seen(f"""
with Begun({codec}, {error}, {raw}) as world:
    gathered = lambda: ctypes.string_at(world.buffers[1] + FLAG_BYTES + world.area, world.area)
    world.write(1, FLAG_BYTES + world.area, noise(world.area))
    before = gathered()
    fake.fake_hold_clock(0)
    assert world.run(0) == 0
    assert np.isnan(world.values(0)).all()
    assert gathered() == before
""")


# Alternates one-shot and two-shot, so that each call writes to the area that was read last.
@pytest.mark.parametrize("codec, error, raw", [*CODECS, ("INT8", "None", [1, 0]), ("INT4", "None", [0, 0])])
def test_graphs_are_captured_once_and_replayed_between_calls_of_other_sizes(codec, error, raw):
    run_seen(f"""
times, rng = {both(quick=12, all=100)}, np.random.default_rng(5)
shapes = [3000, 70], [9, 1025], [500, 2500]
with Seen() as world, contextlib.ExitStack() as stack:
    cases = [handle({codec}, sizes, {error}, {raw}) for sizes in shapes]
    made = [stack.enter_context(CheckedRanks(world, world.places, **case)) for case in cases]
    tensors = [[world.put(rank, [np.zeros(n, "f4") for n in sizes]) for rank in range(2)] for sizes in shapes]
    graphs = []
    for ranks, values in zip(made[:2], tensors):
        graphs.append([])
        for rank in range(2):
            fake.fake_record()
            call("gc_allreduce_run", ranks.handles[rank], views(values[rank]), 2, None, None, None)
            graphs[-1].append(ctypes.c_void_p(fake.fake_recorded()))
    for number in range(times):
        k = number % 3
        given = [[rng.standard_normal(n).astype("f4") for n in shapes[k]] for _ in range(2)]
        if k == len(graphs):
            made[k].run(given)
            continue
        for of_rank, arrays in zip(tensors[k], given):
            for tensor, array in zip(of_rank, arrays):
                ctypes.memmove(tensor.struct.dl_tensor.data, array.ctypes.data, array.nbytes)
        each(lambda rank: fake.fake_replay(graphs[k][rank]))
        made[k].decoded(tensors[k], made[k].reduced(given))
    assert [lib.gc_comm_async_error(comm) for comm in world.comms] == [0, 0]
    for one in (one for each_rank in graphs for one in each_rank):
        fake.fake_forget(one)
""")


@pytest.mark.parametrize("values", ["float32", "bfloat16"])
def test_one_shot_is_one_launch_and_one_barrier(values):
    """Checks also a launch before, for more addresses than one launch takes. The last tensor is larger than two ranks
    without peer memory exchange by one-shot."""
    run_seen(f"""
with Seen(area=1 << 23) as world:
    for segments, launches in (([3000, 70], 1), ([25_000], 1), ([40] * 17, 2), ([0], 1), ([2_100_000], 1)):
        options = dict(handle(INT8, segments, None), values={values!r}, results={values!r})
        handles = world.handle_of(options)
        zeros = [np.zeros(n, dict(float32="f4", bfloat16="u2")[{values!r}]) for n in segments]
        tensors = [[place.put(array, {values!r}) for array in zeros] for place in world.places]
        before, barriers = fake.fake_launches(), int(world.flags_of(0).max())
        assert each(lambda rank: run(handles[rank], tensors[rank])) == [0, 0]
        assert fake.fake_launches() - before == 2 * launches and int(world.flags_of(0).max()) - barriers == 1
""")


@pytest.mark.parametrize("values, codec, error, n, launches", [
    ("float32", "INT8", "float32", 3000, 1), ("bfloat16", "MXFP4", "bfloat16", 3000, 1),
    ("bfloat16", "INT8", "float32", 30_000, 5), ("float32", "ONEBIT", "float32", 3000, 5),
])  # fmt: skip
def test_two_exchanges_are_one_launch_where_each_tile_has_a_block(codec, error, n, launches, values):
    """A tile has 8192 elements, and the driver's GPU has room for three thread blocks. Otherwise: encode, reduce and
    decode, and a barrier behind the first two, which ONEBIT has in the launches that make its scales."""
    run_seen(f"""
with Seen() as world:
    options = dict(handle({codec}, [{n}, 70], {error!r}), values={values!r}, results={values!r})
    handles, dtype = world.handle_of(options), dict(float32="f4", bfloat16="u2")[{values!r}]
    tensors = [[place.put(np.zeros(size, dtype), {values!r}) for size in ({n}, 70)] for place in world.places]
    before, barriers = fake.fake_launches(), int(world.flags_of(0).max())
    assert each(lambda rank: run(handles[rank], tensors[rank])) == [0, 0]
    assert (fake.fake_launches() - before, int(world.flags_of(0).max()) - barriers) == (2 * {launches}, 2)
""")


@pytest.mark.parametrize("codec, nonfinite, values", [
    ("INT8", "TRANSACTIONAL", "float32"), ("MXFP4", "ZERO", "bfloat16"), ("BF16", "PROPAGATE", "float32"),
])  # fmt: skip
def test_two_exchanges_of_one_launch_keep_the_errors_of_the_model(codec, nonfinite, values):
    """Checks that a call sends the errors of the one before, and that a non-finite step is taken back on all ranks."""
    run_seen(f"""
case = dict(handle({codec}, [8000, 70, 4000], "float32", [0, 1, 0]), values={values!r}, results={values!r})
case |= dict(nonfinite={nonfinite})
with Seen() as world, CheckedRanks(world, world.places, **case) as ranks:
    rng = np.random.default_rng(3)
    for number in range(8):
        given = [[gradient(rng, n, {values!r}, False) for n in case["segments"]] for _ in range(2)]
        if number == 5:
            given[1][2][7] = dict(float32=np.inf, bfloat16=0x7f80)[{values!r}]
        ranks.run(given)
        if {nonfinite} == TRANSACTIONAL:
            ranks.commit()
        assert all(ranks.flags()) == (number == 5)
        ranks.errors()
""")


@pytest.mark.parametrize("codec", ["BF16", "INT8", "MXFP4"])
def test_in_a_unit_of_two_chunks_only_the_corrupt_chunk_becomes_zeros(codec):
    """Writes in place of rank 1 what rank 0 sends, but for a byte in the headers of some chunks."""
    run_seen(f"""
from codec_model import CORRUPT
n, rng = 3000, np.random.default_rng(3)  # two chunks of 1504 elements, or 1536; units of 1024
case = handle({codec}, [n], None)
with Seen() as world:
    handles, stride = world.handle_of(case), model_of(**case, n_chunks=2).stride
    per_chunk = 1536 if {codec} == INT8 else 1504
    area_of = lambda number: FLAG_BYTES + (2 + number % 2) * world.area
    x = rng.standard_normal(n).astype("f4")

    def result(corrupt):
        number = int(world.flags_of(0).max()) + 1
        tensors, flags = world.put(0, [x]), world.put(0, [np.zeros(1, np.uint32)])[0]
        other = started(lambda: run(handles[0], tensors))
        world.wait_for(0, 1, number)
        payload = np.frombuffer(ctypes.string_at(world.buffers[1] + area_of(number), 2 * stride), "u1").copy()
        for chunk in corrupt:
            payload[chunk * stride + 4] ^= 0x40
        world.write(0, area_of(number) + 2 * stride, payload)
        world.set_flag(1, 0, number)
        other.join()
        call("gc_allreduce_flags", handles[0], flags.view, None)
        assert world.get(0, [flags])[0] == (CORRUPT if corrupt else 0)
        return world.get(0, tensors)[0]

    sound = result([])
    for corrupt in [0], [1], [0, 1]:
        expected = sound.copy()
        for chunk in corrupt:
            expected[chunk * per_chunk : (chunk + 1) * per_chunk] = 0
        same(result(corrupt), expected, f"values, with {{corrupt}}")
""")


def test_a_fast_rank_does_not_overwrite_data_that_others_read():
    """Writes in place of rank 1, which still reads the data of one barrier while rank 0 is at the next."""
    run_seen("""
with Seen() as world:
    handles = world.handle_of(handle(BF16, [3000, 70], None))
    whole = 2 * model_of(**handle(BF16, [3000, 70], None), n_chunks=2).stride
    area_of = lambda number: FLAG_BYTES + (2 + number % 2) * world.area
    came = lambda number: ctypes.string_at(world.buffers[1] + area_of(number), whole)

    def comes_to(number, value):
        tensors = world.put(0, [np.full(3000, value, "f4"), np.ones(70, "f4")])
        other = started(lambda: run(handles[0], tensors))
        world.wait_for(0, 1, number)
        world.write(0, area_of(number) + whole, np.frombuffer(came(number), "u1"))
        world.set_flag(1, 0, number)
        other.join()
        same(world.get(0, tensors)[0], np.full(3000, value, "f4"), "a mean of equals")

    first = int(world.flags_of(0).max()) + 1
    comes_to(first, 1)
    payload = came(first)
    comes_to(first + 1, 2)
    assert came(first) == payload and came(first + 1) != payload
    comes_to(first + 2, 3)
    assert came(first) != payload
""")


@pytest.mark.parametrize("seed, values", both(
    quick=enumerate(["float32", "bfloat16", "float16"]),
    all=[(seed, dtype) for seed in range(8) for dtype in ("float32", "bfloat16", "float16")],
))  # fmt: skip
def test_one_shot_and_two_shot_calls_alternate(seed, values):
    """Checks that the areas of a call are free after any other call: the bytes are the model's."""
    run_seen(f"""
rng = np.random.default_rng({seed})
segments = [[25_000, 1, 900], [40] * 20, [3000, 70], [8191]]
with Seen() as world, contextlib.ExitStack() as stack:
    cases = [handle(INT8, segments[0], None, [0, 0, 1]), handle(MXFP4, segments[1], None),
             handle(BF16, segments[2], "float32"), handle(ONEBIT, segments[3], None), handle(MXFP8, [20_001], None)]
    cases = [dict(case, values={values!r}, results={values!r}) for case in cases]
    made = [stack.enter_context(CheckedRanks(world, world.places, **case)) for case in cases]
    for number in range(15):
        k, aligned = int(rng.integers(len(cases))), bool(rng.random() < 0.5)
        given = [[gradient(rng, n, {values!r}, number % 5 == 4) for n in cases[k]["segments"]] for _ in range(2)]
        made[k].run(given, aligned=aligned)
    assert [lib.gc_comm_async_error(comm) for comm in world.comms] == [0, 0]
""")
