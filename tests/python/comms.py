"""Worlds of ranks, one thread each, and handles on all ranks with the models that they are compared with."""

import ctypes
import threading
from ctypes import POINTER, byref

import numpy as np

from block_model import FORMATS, INT4, INT8, SUM
from capi import (
    CUDA, EXCHANGE, AllReduce, CodecOptions, Comm, DLDevice, Part, Transport, free_all, in_threads, last_error, lib,
)  # fmt: skip
from codec_model import (
    MEAN, ONEBIT, PROPAGATE, RMS, SIGN, TRANSACTIONAL, ZERO, f32, narrow,
)  # fmt: skip
from codecs_c import call, dtype_name, gradient, model_of, options_of, or_null, same, views
from nodes_model import world_model


class Board:
    """Transport between threads, in Python, with the least that a transport has to do.

    `before(name, rank, sent)` returns what is sent instead of `sent`; `answer(name, rank)` the function's result. A
    function for which `skips(name, rank)` is true writes nothing to the receive memory."""

    def __init__(self, world):
        self.world = world
        self.barrier = threading.Barrier(world, timeout=60)
        self.sent = [None] * world
        self.calls = []
        self.before = lambda name, rank, sent: sent
        self.answer = lambda name, rank: 0
        self.skips = lambda name, rank: False

    def transport(self, rank, flags=0):
        def exchange(name):
            def run(_, send, recv, size, device, stream):
                self.calls.append((name, rank, size, device.device_type, stream))
                blocks = self.world if name == "all_to_all" else 1
                if send < recv + self.world * size and recv < send + blocks * size:
                    return 98  # send and receive memory must not overlap
                self.sent[rank] = self.before(name, rank, ctypes.string_at(send, blocks * size))
                try:
                    self.barrier.wait()
                    for other in [] if self.skips(name, rank) else range(self.world):
                        first = rank * size if name == "all_to_all" else 0
                        ctypes.memmove(recv + other * size, self.sent[other][first : first + size], size)
                    self.barrier.wait()
                except threading.BrokenBarrierError:  # a rank is missing
                    return 99
                return self.answer(name, rank)

            return EXCHANGE(run)

        functions = exchange("all_to_all"), exchange("all_gather")
        return Transport(ctypes.sizeof(Transport), rank, self.world, flags, None, *functions)


class World:
    """`world` communicators: of a group in this process; over `Board`, with the flags of a transport; or over the
    memory of GPUs, which a group finds, with buffers of `room` bytes."""

    def __init__(self, world, over="group", flags=0, room=1 << 20, devices=(0,), timeout=60_000):
        self.size = world
        self.comms = (POINTER(Comm) * world)()
        if over in ("group", "peers"):
            call("gc_comm_group", world, self.comms)
            if over == "peers":
                self.open_peers(room, devices, timeout)
        else:
            self.board = Board(world)
            self.transports = [self.board.transport(rank, flags) for rank in range(world)]
            for rank, transport in enumerate(self.transports):
                comm = POINTER(Comm)()
                call("gc_comm_from_transport", byref(transport), byref(comm))
                self.comms[rank] = comm

    def open_peers(self, room, devices, timeout):
        found = (POINTER(Comm) * self.size)()

        def open(rank):
            device, comm = DLDevice(CUDA, devices[rank % len(devices)]), POINTER(Comm)()
            call("gc_comm_open_peers", self.comms[rank], device, room, timeout, byref(comm))
            found[rank] = comm

        self.each(open)
        group, self.comms = self.comms, found
        free_all(group)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        free_all(self.comms)

    def each(self, function):
        """Calls function(rank) in a thread for each rank; returns the results by rank."""
        return in_threads(self.size, function)


class Nodes(World):
    """A world of two levels: nodes of the given numbers of ranks, over `intra`; and for each number of a rank a world,
    over `inter`, of the ranks with this number. The other arguments are as for `World`."""

    level = World

    def __init__(self, ranks, intra="group", inter="board", flags=(0, 0), room=1 << 20, devices=(0,), timeout=60_000):
        self.size, self.shape = sum(ranks), (len(ranks), ranks[0])
        self.places = [(node, place) for node, count in enumerate(ranks) for place in range(count)]
        self.intra = [self.level(count, intra, flags[0], room, devices, timeout) for count in ranks]
        self.inter = [self.level(len(ranks), inter, flags[1], room, devices, timeout) for _ in range(min(ranks))]
        self.comms = (POINTER(Comm) * self.size)()
        self.each(self.join)

    def parts(self, rank):
        """Returns a rank's communicators, intra-node and inter-node: NULL if some node has no rank with its number."""
        node, place = self.places[rank]
        return self.intra[node].comms[place], self.inter[place].comms[node] if place < len(self.inter) else POINTER(Comm)()

    def join(self, rank):
        comm = POINTER(Comm)()
        call("gc_comm_hierarchical", *self.parts(rank), byref(comm))
        self.comms[rank] = comm

    def __exit__(self, *_):
        for world in self.intra + self.inter:
            world.__exit__()
        super().__exit__()


def is_asleep(thread):
    with open(f"/proc/self/task/{thread.native_id}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "S"


def status_of(function, *arguments):
    """Returns the status, and the last error of this thread."""
    status = function(*arguments)
    return status, last_error() if status else ""


def handle_on(comm, n, device=DLDevice(1, 0), **options):
    """Creates an all-reduce of ONEBIT for one tensor of n elements. Every rank calls this."""
    given = CodecOptions(ctypes.sizeof(CodecOptions), **{"codec": ONEBIT, "device": device, "n_elements": n, **options})
    handle = POINTER(AllReduce)()
    call("gc_allreduce_create", comm, byref(given), byref(handle))
    return handle


def run_on(handle, tensor, stream=None):
    """Runs an all-reduce of handle_on(); returns the status, and the last error of this thread."""
    return status_of(lib.gc_allreduce_run, handle, views([tensor]), 1, None, None, stream)


class CheckedRanks:
    """A handle on every rank of a world, and a model for each. The models exchange in Python; every byte is compared.
    `place`: one for all ranks, or a list with one for each; so are streams. `options`: options of a model, without
    chunks. `model`: the model of the whole world, which is flat or has nodes."""

    def __init__(self, world, place, streams=None, **options):
        self.world, self.streams = world, streams or [None] * world.size
        self.places = place if isinstance(place, list) else [place] * world.size
        self.model = world_model(*getattr(world, "shape", (1, world.size)), **options)
        self.models = self.model.models
        self.handles = [POINTER(AllReduce)() for _ in self.models]
        each = [options_of(model_of(**options), place.device) for place in self.places]
        for rank, one in enumerate(each):
            one.server, one.n_chunks = 0, [0, world.size][rank % 2]
        self.all("gc_allreduce_create", lambda rank: (world.comms[rank], byref(each[rank]), byref(self.handles[rank])))
        shards = [lib.gc_allreduce_shard_elements(handle) for handle in self.handles]
        assert shards == [model.shard_elements() for model in self.models]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        free_all(self.handles)

    def all(self, name, arguments):
        self.world.each(lambda rank: call(name, *arguments(rank)))

    def each(self, name, arguments):
        """Calls a function on the handle and the stream of each rank."""
        self.all(name, lambda rank: (self.handles[rank], *arguments(rank), self.streams[rank]))

    def put(self, arrays, aligned=True):
        """Puts arrays, [rank][segment], in memory's dtype, at each rank's place."""
        dtype = self.models[0].values
        return [
            [place.put(one, dtype_name(one, dtype), aligned) for one in of_rank]
            for place, of_rank in zip(self.places, arrays)
        ]

    def run(self, gradients, value_factor=None, error_factor=None, aligned=True):
        """Runs gradients, [rank][segment], in memory's dtype. A factor: one for all ranks, or a list with one for each.
        Returns the new values on every rank, by segment."""
        put, factors = self.put(gradients, aligned), self.factors(value_factor, error_factor)
        self.each("gc_allreduce_run", lambda rank: (views(put[rank]), len(put[rank]), *factors[rank]))
        return self.decoded(put, self.reduced(gradients, value_factor, error_factor))

    def reduced(self, gradients, *factors):
        """Returns the models' chunks after each rank's reduce."""
        return [m.reduce(of_rank) for m, of_rank in zip(self.models, self.exchanged(gradients, *factors))]

    def factors(self, *given):
        """Returns the factors by rank, as arguments of calls."""
        put = []
        for numbers in given:
            numbers = numbers if isinstance(numbers, list) else [numbers] * self.world.size
            both = zip(self.places, numbers)
            put.append([None if one is None else place.put(np.array([one], f32)) for place, one in both])
        self.kept_factors = put
        return [[or_null(one) for one in of_rank] for of_rank in zip(*put)]

    def exchanged(self, gradients, value_factor=None, error_factor=None):
        """Returns the chunks that each rank reduces, as the models send them."""
        return self.model.encoded(gradients, value_factor, error_factor)

    def decoded(self, put, reduced):
        """Compares values with those that the models decode from reduced chunks; returns the latter."""
        for rank, expected in enumerate(self.model.finished(reduced)):
            for index, (got, e) in enumerate(zip(put[rank], expected)):
                same(self.places[rank].get(got), e, f"rank {rank}, values[{index}]")
        return expected

    def reduce_scatter(self, gradients, value_factor=None, error_factor=None, aligned=True):
        """Runs the first half of `run`. Returns the shard of each rank."""
        put, factors = self.put(gradients, aligned), self.factors(value_factor, error_factor)
        sevens = [np.full(model.shard_elements(), 7, f32) for model in self.models]
        to = [place.put(array, None, aligned) for place, array in zip(self.places, sevens)]
        self.each("gc_allreduce_reduce_scatter", lambda rank: (
            views(put[rank]), len(put[rank]), *factors[rank], to[rank].view
        ))  # fmt: skip
        chunks = self.exchanged(gradients, value_factor, error_factor)
        shards = [model.mean(of_rank, False) for model, of_rank in zip(self.models, chunks)]
        for rank, (place, one, expected) in enumerate(zip(self.places, to, shards)):
            same(place.get(one), expected, f"shard of rank {rank}")
            for index, (value, g) in enumerate(zip(put[rank], gradients[rank])):
                same(place.get(value), g, f"rank {rank}, values[{index}], which are only read")
        return shards

    def all_gather(self, shards, aligned=True):
        """Runs the second half. Returns the new values on every rank, by segment."""
        sevens = [narrow(np.full(n, 7, f32), self.models[0].values) for n in self.models[0].segments]
        put = self.put([sevens] * self.world.size, aligned)
        given = [place.put(shard, None, aligned) for place, shard in zip(self.places, shards)]
        self.each("gc_allreduce_all_gather", lambda rank: (given[rank].view, views(put[rank]), len(put[rank])))
        for rank, (place, one, shard) in enumerate(zip(self.places, given, shards)):
            same(place.get(one), shard, f"shard of rank {rank}, which is only read")
        return self.decoded(put, [model.encode_shard(shard) for model, shard in zip(self.models, shards)])

    def commit(self, skip=None):
        put = [None if skip is None else place.put(np.atleast_1d(skip)) for place in self.places]
        self.each("gc_allreduce_commit", lambda rank: (or_null(put[rank]),))
        for model in self.models:
            model.commit(bool(skip is not None and np.atleast_1d(skip)[0] != 0))

    def rollback(self):
        self.each("gc_allreduce_rollback", lambda _: ())
        for model in self.models:
            model.commit(True)

    def reset(self):
        self.each("gc_allreduce_reset", lambda _: ())
        for model in self.models:
            model.reset()

    def flags(self):
        """Returns the flags of each rank."""
        dsts = [place.put(np.full(1, 0x77, np.uint32)) for place in self.places]
        self.each("gc_allreduce_flags", lambda rank: (dsts[rank].view,))
        got = [int(place.get(dst)[0]) for place, dst in zip(self.places, dsts)]
        assert got == [model.flags for model in self.models]
        for model in self.models:
            model.flags = 0
        return got

    def errors(self):
        """Returns the errors of all workers, [rank, n], and of all reducers, in the order of elements."""
        both = [*zip(self.places, self.models)]
        each = [[place.put(np.full(model.errors(k).size, 7, f32)) for k in (0, 1)] for place, model in both]
        self.each("gc_allreduce_errors_out", lambda rank: [one.view for one in each[rank]])
        workers, reducers = [], np.zeros(sum(self.models[0].segments), f32)
        for rank, ((place, model), (worker, server)) in enumerate(zip(both, each)):
            workers.append(place.get(worker))
            reducers[model.shard_places()] = got = place.get(server)
            same(workers[-1], model.errors(0), f"rank {rank}: worker's errors")
            same(got, model.errors(1), f"rank {rank}: server's errors")
        return np.stack(workers), reducers

    def errors_in(self, workers, server):
        """Sets errors of a world with as many ranks as `workers` has rows; None: not these."""
        put = [[None if one is None else place.put(one) for one in (workers, server)] for place in self.places]
        self.each("gc_allreduce_errors_in", lambda rank: map(or_null, put[rank]))
        self.model.errors_in(workers, server)


def parts_of(handle, rank, which):
    """Returns (segment, first, count) of each piece of gc_allreduce_parts(), which writes as many as fit."""
    count = lib.gc_allreduce_parts(handle, rank, which, None, 0)
    for room in max(0, count - 1), count:
        pieces = (Part * (count + 1))(*[Part(-7, -7, -7)] * (count + 1))
        assert lib.gc_allreduce_parts(handle, rank, which, pieces, room) == count, last_error()
        found = [(piece.segment, piece.first, piece.count) for piece in pieces]
        assert set(found[room:]) == {(-7, -7, -7)}, "a call has written after the end of the memory"
    return found[:count]


BITS = ONEBIT, ONEBIT, SIGN
SEGMENTS = [0], [5], [1025], [0, 7, 0, 3000, 1], [8, 8, 8, 8], [0, 0], [2048, 1023, 65], [20_003], [1] * 20, []


def of_family(rng, codec, segments):
    """Returns options that only some codecs have."""
    if codec in FORMATS:
        return dict(reduction=int(rng.integers(0, 2)), raw=[bool(rng.random() < 0.3) for _ in segments])
    return dict(scale=int(rng.choice([RMS, MEAN])), reduction=int(rng.integers(0, 2)) if codec == ONEBIT else 0)


def random_handle(rng, codecs=(*BITS, *FORMATS), segments=None):
    codec, dtype = int(rng.choice(codecs)), str(rng.choice(["float32", "float16", "bfloat16"]))
    segments = list(SEGMENTS[rng.integers(0, len(SEGMENTS))]) if segments is None else segments
    options = of_family(rng, codec, segments)
    return dict(
        codec=codec, segments=segments, values=dtype, results=dtype,
        error=None if codec == SIGN else [None, "float32", "float32", "bfloat16"][rng.integers(0, 4)],
        nonfinite=int(rng.choice([PROPAGATE, ZERO, TRANSACTIONAL])), beta=float(f32(rng.choice([1.0, 0.95]))),
        **options,
    )  # fmt: skip


KEEP_NOTHING = ONEBIT, *FORMATS
# docs/NUMERICS.md 9: limit of all ranks' payloads together, on the CPU.
MOST_BYTES = 1 << 20


def is_one_shot(size, options):
    """Returns True if the ranks use one-shot, according to the documents."""
    model = model_of(**options, n_chunks=size)
    small = size * size * model.stride <= MOST_BYTES
    return size > 1 and small and options["error"] is None and options["codec"] != SIGN


def steps(rng, ranks, options, count=4):
    """Makes calls of all kinds, each of which is compared with the models."""
    dtype, segments, size = options["values"], options["segments"], ranks.world.size
    transactional = options["nonfinite"] == TRANSACTIONAL
    for step in range(count):
        special, aligned = rng.random() < 0.3, rng.random() < 0.6
        gradients = [[gradient(rng, n, dtype, special) for n in segments] for _ in range(size)]
        factors = [float(f32(rng.choice([0.5, 2.0**-8, 3.0]))) if rng.random() < 0.3 else None for _ in "ge"]
        if step == 2:  # the halves, also of a one-shot handle
            ranks.all_gather(ranks.reduce_scatter(gradients, *factors, aligned=aligned), aligned=aligned)
        else:
            ranks.run(gradients, *factors, aligned=aligned)
        if transactional and rng.random() < 0.7:  # else the next step commits
            ranks.rollback() if rng.random() < 0.2 else ranks.commit([None, np.array([1], np.int32)][rng.integers(0, 2)])
        if rng.random() < 0.7:
            ranks.flags()
    ranks.flags()
    if transactional:
        ranks.commit()
    ranks.errors()


def changed(rank, index, of_chunk=None):
    """Returns a function with which `rank` sends payloads with a changed byte `index`, in all chunks or in one."""

    def before(name, sender, sent):
        chunks = bytearray(sent)
        stride = len(sent) // 3
        if name == "all_gather" and sender == rank:
            for chunk in range(3) if of_chunk is None else [of_chunk]:
                chunks[chunk * stride + index] ^= 0x40
        return bytes(chunks)

    return before


# In the last two cases a shard has several pieces of the elements.
OF_FAMILIES = dict(
    onebit=dict(codec=ONEBIT), int8=dict(codec=INT8), mean=dict(codec=INT4, raw=[1, 0, 0, 1]),
    sum=dict(codec=INT4, raw=[0, 0, 1, 0], reduction=SUM),
)  # fmt: skip
