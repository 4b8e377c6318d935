"""Ranks of a group that share a device, in one process, over its memory: random handles of other sizes, one after the other
on the same communicators, give the bytes of the model."""

import numpy as np
import pytest

import driver
import gpu
import layouts
from block_model import FORMATS, model_of
from capi import byref, lib
from codecs_c import Host, options_of
from comms import BITS, CheckedRanks, World, random_handle, steps

# Most elements of a case in total; number of cases by the size of the world.
MOST = gpu.sized(gpu=100_000, quick=6000, all=6000)
CASES = [
    (2, gpu.sized(gpu=80, quick=6, all=20)), (4, gpu.sized(gpu=70, quick=4, all=16)), (8, gpu.sized(gpu=50, quick=2, all=8)),
]  # fmt: skip
SIZES = [0, 1, 2, 7, 8, 9, 63, 65, 1023, 1024, 1025, 4097, 8193]


def random_segments(rng, most):
    count = int(rng.choice([1, 1, 1, 2, 5, 20]))
    odd = lambda: int(rng.integers(0, 1 + most // count))  # noqa: E731
    return [odd() if rng.random() < 0.5 else min(int(rng.choice(SIZES)), most // count) for _ in range(count)]


def options_for(seed, size, most):
    """Returns options, half of them of ONEBIT or SIGN, whose kernels write to the other ranks' memory."""
    rng = np.random.default_rng([seed, size])
    return random_handle(rng, BITS if rng.random() < 0.5 else list(FORMATS), random_segments(rng, most))


# A new communicator for every 10 cases.
@pytest.mark.parametrize("size, seeds", [(size, range(first, min(count, first + 10))) for size, count in CASES
                                         for first in range(0, count, 10)], ids=str)  # fmt: skip
def test_the_bytes_match_the_model(memory, size, seeds):
    streams = [driver.Stream() for _ in range(size)]
    cases = [options_for(seed, size, MOST if seeds[0] % 20 else 5_000) for seed in seeds]
    each = [options_of(model_of(**options, n_chunks=size), Host.device) for options in cases]
    room = max(lib.gc_allreduce_peers_bytes(byref(one), size, 1) for one in each)
    with World(size, "peers", room=room) as world:
        for seed, options in zip(seeds, cases):
            memory.start_again()
            handles = [stream.handle for stream in streams]
            with layouts.case(seed=seed, options=options), CheckedRanks(world, memory, handles, **options) as ranks:
                steps(np.random.default_rng([seed, size]), ranks, options, 3)
        assert [lib.gc_comm_async_error(comm) for comm in world.comms] == [0] * size
    for stream in streams:
        stream.destroy()
