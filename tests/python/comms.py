"""Worlds of ranks, a thread each, and DeepSpeed's compressed all-reduce in NumPy, which they are held to."""

import ctypes
import itertools
import threading
from ctypes import POINTER, byref, c_int64

import numpy as np

import capi
import codec_model
from capi import EXCHANGE, Comm, Transport, lib
from codec_model import RMS, bit, canonical, f32, scale_of, sigma
from codecs_c import call


def shards(n, world):
    """The elements of each rank's shard, as slices."""
    s = 8 * -(-(-(-n // 8)) // world)
    return [slice(min(n, k * s), min(n, (k + 1) * s)) for k in range(world)]


def reference(buffers, workers, servers):
    """CONTRACT: buffers and worker errors of all ranks, server errors of the shards' elements. Gives the new ones.

    One array for all buffers, which end the same; errors are as they were if anything is not finite."""
    world, n = len(buffers), buffers[0].size
    with np.errstate(all="ignore"):
        c = [b + e for b, e in zip(buffers, workers)]
        s = [scale_of(x, RMS) for x in c]
        q = [f32(x / f32(world)) for x in s]
        d, t = [], []
        for k, shard in enumerate(shards(n, world)):
            total = np.zeros(shard.stop - shard.start, f32)
            for r in range(world):
                total = total + q[r] * sigma(c[r][shard])
            d.append(total + servers[k])
            t.append(scale_of(d[k], RMS))
        if not np.isfinite(s + t).all():
            return np.full(n, np.uint32(0x7FC00000).view(f32)), workers, servers
        out = np.concatenate([t[k] * sigma(d[k]) for k in range(world)]) if n else np.zeros(0, f32)
        return out, [x - y * sigma(x) for x, y in zip(c, s)], [x - y * sigma(x) for x, y in zip(d, t)]


class Board:
    """Exchanges between threads, by Python: what a transport is to do, said plainly."""

    def __init__(self, world):
        self.world = world
        self.barrier = threading.Barrier(world)
        self.sent = [None] * world
        self.calls = []
        self.answers = itertools.repeat(0)

    def transport(self, rank, flags=0):
        def exchange(name):
            def run(_, send, recv, size, device, stream):
                self.calls.append((name, rank, size, device.device_type, stream))
                blocks = self.world if name == "all_to_all" else 1
                self.sent[rank] = ctypes.string_at(send, blocks * size)
                self.barrier.wait()
                for other in range(self.world):
                    first = rank * size if name == "all_to_all" else 0
                    ctypes.memmove(recv + other * size, self.sent[other][first : first + size], size)
                self.barrier.wait()
                return next(self.answers)

            return EXCHANGE(run)

        transport = Transport(ctypes.sizeof(Transport), rank, self.world, flags, None, exchange("all_to_all"), exchange("all_gather"))
        return transport


class World:
    """`world` communicators: of a group in this process, or over `Board`, with the flags of a transport."""

    def __init__(self, world, over="group", flags=0):
        self.size = world
        self.comms = (POINTER(Comm) * world)()
        if over == "group":
            call("gc_comm_group", world, self.comms)
        else:
            self.board = Board(world)
            self.transports = [self.board.transport(rank, flags) for rank in range(world)]
            for rank, transport in enumerate(self.transports):
                comm = POINTER(Comm)()
                call("gc_comm_from_transport", byref(transport), byref(comm))
                self.comms[rank] = comm

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for comm in self.comms:
            lib.gc_comm_free(comm)

    def each(self, function):
        """Calls function(rank) in a thread for each rank; the results by rank. What one raises is raised."""
        results, failures = [None] * self.size, []

        def run(rank):
            try:
                results[rank] = function(rank)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results
