"""Random steps of ranks that exchange over the memory of a GPU, beside the same steps over callbacks on the host: every byte
that they give is the same. The bytes over callbacks are those of NumPy's models in test_comm.py.

tests/spec/test_peers_cases.py runs this."""

from ctypes import POINTER, byref

import numpy as np

from block_model import FORMATS
from capi import AllReduce, lib
from codec_model import PROPAGATE, SIGN, TRANSACTIONAL, ZERO, f32
from codecs_c import Host, call, dtype_name, gradient, model_of, options_of, or_null, same, views
from comms import BITS, World, of_family

SIZES = [0, 1, 2, 7, 8, 9, 63, 65, 1023, 1024, 1025, 4097, 8193]


def random_segments(rng, most):
    count = int(rng.choice([1, 1, 1, 2, 5, 20]))
    odd = lambda: int(rng.integers(0, 1 + most // count))  # noqa: E731
    return [odd() if rng.random() < 0.5 else min(int(rng.choice(SIZES)), most // count) for _ in range(count)]


def random_options(rng, most):
    # Half of them bits, whose kernels write to the other ranks' memory.
    codec, segments = int(rng.choice(BITS if rng.random() < 0.5 else list(FORMATS))), random_segments(rng, most)
    dtype = str(rng.choice(["float32", "float16", "bfloat16"]))
    return dict(
        codec=codec, segments=segments, values=dtype, results=dtype,
        error=None if codec == SIGN else [None, "float32", "bfloat16"][rng.integers(0, 3)],
        **of_family(rng, codec, segments), nonfinite=int(rng.choice([PROPAGATE, ZERO, TRANSACTIONAL])),
        beta=float(f32(rng.choice([1.0, 0.95]))),
    )  # fmt: skip


class Side:
    """A handle on every rank of a world, and what its calls give, by rank."""

    def __init__(self, world, place, options, streams=None):
        self.world, self.place, self.dtype = world, place, options["values"]
        self.streams = streams or [None] * world.size
        self.models = [model_of(**options, n_chunks=world.size, server=rank) for rank in range(world.size)]
        self.handles = [POINTER(AllReduce)() for _ in self.models]
        each = [options_of(model, place.device) for model in self.models]
        for one in each:
            one.server = 0
        self.all("gc_allreduce_create", lambda rank: (world.comms[rank], byref(each[rank]), byref(self.handles[rank])))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            lib.gc_allreduce_free(handle)

    def all(self, name, arguments):
        self.world.each(lambda rank: call(name, *arguments(rank)))

    def put(self, arrays, aligned=True):
        return [self.place.put(array, dtype_name(array, self.dtype), aligned) for array in arrays]

    def run(self, gradients, factors, aligned):
        put = [self.put(each, aligned) for each in gradients]
        factors = [None if number is None else self.place.put(np.array([number], f32)) for number in factors]
        self.all("gc_allreduce_run", lambda rank: (
            self.handles[rank], views(put[rank]), len(put[rank]), *map(or_null, factors), self.streams[rank]
        ))  # fmt: skip
        return [self.place.get(value) for each in put for value in each]

    def halves(self, gradients, change, aligned):
        put = [self.put(each, aligned) for each in gradients]
        shards = [self.place.put(np.full(model.shard_elements(), 7, f32), None, aligned) for model in self.models]
        self.all("gc_allreduce_reduce_scatter", lambda rank: (
            self.handles[rank], views(put[rank]), len(put[rank]), None, None, shards[rank].view, self.streams[rank]
        ))  # fmt: skip
        found = [self.place.get(shard) for shard in shards]
        with np.errstate(all="ignore"):
            steps = [self.place.put(change(shard), None, aligned) for shard in found]
        self.all("gc_allreduce_all_gather", lambda rank: (
            self.handles[rank], steps[rank].view, views(put[rank]), len(put[rank]), self.streams[rank]
        ))  # fmt: skip
        return found + [self.place.get(value) for each in put for value in each]

    def end(self, takes_back):
        skip = self.place.put(np.array([takes_back]))
        self.all("gc_allreduce_commit", lambda rank: (self.handles[rank], skip.view, self.streams[rank]))
        return []

    def rest(self):
        """Errors of workers and servers, and flags."""
        each = [[self.place.put(np.full(m.errors(k).size, 7, f32)) for k in (0, 1)] for m in self.models]
        flags = [self.place.put(np.zeros(1, np.uint32)) for _ in self.models]
        for name, arguments in (("errors_out", each), ("flags", [[flag] for flag in flags])):
            self.all(f"gc_allreduce_{name}", lambda rank: (
                self.handles[rank], *(tensor.view for tensor in arguments[rank]), self.streams[rank]
            ))  # fmt: skip
        return [self.place.get(tensor) for one in (*each, flags) for tensor in one]


def both(step, one, other, what):
    for number, (got, expected) in enumerate(zip(step(one), step(other), strict=True)):
        same(got, expected, f"{what}, array {number}")


def handle_case(rng, over_peers, over_callbacks, place, most, streams):
    options, world = random_options(rng, most), over_peers.size
    with Side(over_peers, place, options, streams) as one, Side(over_callbacks, Host(), options) as other:
        for step in range(int(rng.integers(1, 4))):
            special, aligned, what = rng.random() < 0.3, rng.random() < 0.7, f"{options}, step {step}"
            gradients = [[gradient(rng, n, options["values"], special) for n in options["segments"]] for _ in range(world)]
            factors = [float(f32(rng.choice([0.5, 3.0]))) if rng.random() < 0.3 else None for _ in "ge"]
            if rng.random() < 0.6:
                both(lambda side: side.run(gradients, factors, aligned), one, other, what)
            else:
                change = f32(rng.choice([1, -0.1]))
                both(lambda side: side.halves(gradients, lambda shard: change * shard, aligned), one, other, f"{what}, halves")
            if options["nonfinite"] == TRANSACTIONAL:
                takes_back = rng.random() < 0.3
                both(lambda side: side.end(takes_back), one, other, what)
            both(Side.rest, one, other, f"{what}, errors and flags")


def room_of(seed, size, most):
    """What the library says that the buffers of a case need."""
    rng = np.random.default_rng([seed, size])
    model = model_of(**random_options(rng, most), n_chunks=size)
    return lib.gc_allreduce_peers_bytes(byref(options_of(model, Host().device)), size, 1)


def cases(seeds, size, place, most, level=World, streams=None, clear=lambda: None):
    """Random cases of a world of so many ranks on one GPU, with one communicator, whose buffers are no larger than the
    largest case needs."""
    room = max(room_of(seed, size, most) for seed in seeds)
    with level(size, "peers", room=room) as over_peers, World(size, "board") as over_callbacks:
        for seed in seeds:
            rng = np.random.default_rng([seed, size])
            try:
                handle_case(rng, over_peers, over_callbacks, place, most, streams)
            except Exception as error:
                raise AssertionError(f"seed {seed}, {size} ranks: {error}") from error
            clear()
        assert [lib.gc_comm_async_error(comm) for comm in over_peers.comms] == [0] * size
