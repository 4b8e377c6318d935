"""The compressed all-reduces, on the CPU, against DeepSpeed's formula in NumPy."""

import numpy as np
import pytest

import codec_model
from capi import Status, Tensor, last_error, lib
from codecs_c import Host, same
from comms import World, reference, shards

place = Host()


def status_of(function, *arguments):
    """The status, and the last error of this thread."""
    status = function(*arguments)
    return status, last_error() if status else ""


def allreduce(world, buffers, workers, servers):
    """One call on every rank, on arrays that are written to. Gives statuses and sentences by rank."""

    def run(rank):
        views = [Tensor(x[rank]).view for x in (buffers, workers, servers)]
        return status_of(lib.gc_compressed_allreduce, world.comms[rank], *views, None)

    return world.each(run)


def padded(servers, n, world):
    """Server errors as the call takes them: filled up to a shard each, with what it must leave alone."""
    whole = lib.gc_shard_elements(n, world)
    return [np.concatenate([s, np.full(whole - s.size, 7, np.float32)]) for s in servers]


@pytest.mark.parametrize("over", ["group", "board"])
@pytest.mark.parametrize("size", range(1, 10))
def test_fifty_steps_are_deepspeeds_formula_to_the_bit(size, over):
    rng = np.random.default_rng(size)
    with World(size, over) as world:
        for n in (0, 1, 7, 1023, 1025, 40_003):
            workers = [np.zeros(n, np.float32) for _ in range(size)]
            servers = [np.zeros(s.stop - s.start, np.float32) for s in shards(n, size)]
            expected_workers, expected_servers = workers, servers
            workers, servers = [w.copy() for w in workers], padded(servers, n, size)
            for step in range(50 if n == 1025 else 3):
                buffers = [rng.standard_normal(n).astype(np.float32) for _ in range(size)]
                out, expected_workers, expected_servers = reference(buffers, expected_workers, expected_servers)
                assert allreduce(world, buffers, workers, servers) == [(Status.OK, "")] * size
                for rank in range(size):
                    same(buffers[rank], out, f"{n} elements, step {step}: buffer of rank {rank}")
                    same(workers[rank], expected_workers[rank], f"{n} elements, step {step}: worker error of rank {rank}")
                for rank, server in enumerate(padded(expected_servers, n, size)):
                    same(servers[rank], server, f"{n} elements, step {step}: server error of rank {rank}")
