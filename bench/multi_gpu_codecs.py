"""What one rank of bench/multi_gpu.py measures of every codec, beside ncclAllReduce(): each call from Python, by the
package's public functions on tensors of torch; from C, for which a prepared list of arguments stands that ctypes hands
over; and in a CUDA graph. And, of two libraries with different limits, one exchange beside two.
"""

import ctypes
import time
from ctypes import c_void_p

import torch

import gpu
from capi import DLTensor
from gradcodec import Communicator, GradCodec
from multi_gpu_rank import (
    BYTES_AN_ELEMENT, DTYPES, Contender, NcclSum, agreed, calls_for, in_turn, machine_of, many, view,
)  # fmt: skip

BLOCKS = "bf16", "mxfp8", "int8", "int4", "mxfp4"
# The name, the codec, whether it keeps errors (in the gradient's dtype), and what it goes over.
CODECS = [
    *((codec, codec, False, "peers") for codec in BLOCKS),
    ("int8 errors", "int8", True, "peers"),
    ("int4 errors", "int4", True, "peers"),
    ("onebit", "onebit", True, "peers"),
    ("int8 over NCCL", "int8", False, "nccl"),
]
# Python's own time is the same for all: one without errors, one with, and one over NCCL tell it where time is short.
FROM_PYTHON = "int8", "int4", "onebit", "int8 over NCCL"
EXCHANGED = "bf16", "int8", "int4"
# Of the mean of normal numbers, in the norm of the difference: some twice what two roundings by the codec lose.
MOST_LOST = {"bf16": 0.01, "mxfp8": 0.1, "int8": 0.03, "int4": 0.35, "mxfp4": 0.4, "onebit": 1.2}
HOST_CALLS, LARGE_CALLS = 64, 8  # enqueued without waiting, fewer than a stream has room for
TIMEOUT_MS = 20_000


class Libraries:
    """A library, and its communicators on this machine."""

    def __init__(self, machine, path, most):
        self.machine, self.own, self.comms = machine, GradCodec(path), {}
        # Once more, without what the client does.
        self.run = ctypes.CDLL(path).gc_allreduce_run
        self.run.argtypes = [c_void_p, c_void_p, ctypes.c_size_t, c_void_p, c_void_p, c_void_p]
        here = machine.here
        if not machine.has_peers:
            def exchange(is_all_to_all):
                def run(send, recv):
                    size = len(recv) // here.world
                    blocks, first = here.gather(bytes(send)), here.rank * size if is_all_to_all else 0
                    recv[:] = b"".join(block[first : first + size] for block in blocks)

                return run

            comm = Communicator(self.own, here.rank, here.world, exchange(True), exchange(False))
            self.comms = {"peers": comm, "nccl": comm}
            return
        id = here.gather(self.own.nccl_id() if here.rank == 0 else None)[0]
        self.comms["nccl"] = self.own.nccl_world(id, here.rank, here.world, here.rank, timeout_ms=TIMEOUT_MS)
        room = max(
            self.own.allreduce_peers_bytes(codec, [elements], here.world, **options(machine, dtype, errors))
            for _, codec, errors, _ in CODECS
            for dtype in DTYPES
            for elements in (most, *(2**k for k in range(10, 31) if 2**k < most))  # one exchange may need more than two
        )
        self.comms["peers"] = self.own.open_peers(self.comms["nccl"], here.rank, room, TIMEOUT_MS)


def options(machine, dtype, errors):
    device = machine.device.device_type, machine.device.device_id
    return dict(values=dtype, results=dtype, error=dtype if errors else "none", device=device)


def library_of(machine, path, most):
    key = "library", path
    if key not in machine.here.kept:
        machine.here.kept[key] = Libraries(machine, path, most)
    return machine.here.kept[key]


class Ours(Contender):
    """An all-reduce by a codec, on values that all contenders share: `again` restores them."""

    def __init__(self, machine, inputs, values, library, dtype, codec, errors, over):
        super().__init__(machine, inputs)
        self.values, self.library, self.what = values, library, (dtype, codec, errors, over)
        self.allreduce = None

    def connect(self):
        dtype, codec, errors, over = self.what
        comm = self.library.comms[over]
        self.allreduce = comm.allreduce(codec, [self.n], **options(self.machine, dtype, errors))
        self.view = view(self.values, self.machine.device)
        self.views = (ctypes.POINTER(DLTensor) * 1)(ctypes.pointer(self.view))
        handle = self.machine.handle
        self.arguments = self.allreduce._handle, ctypes.addressof(self.views), 1, None, None, handle

    def again(self):
        self.values.copy_(self.inputs[self.what[0]])

    def from_python(self):
        self.allreduce.run([self.values])

    def run(self):
        status = self.library.run(*self.arguments)
        if status:
            raise RuntimeError(f"gc_allreduce_run: {status}: {self.library.own._last_error()}")

    def verify(self, sum):
        """All ranks end with the same bytes, close to the mean, both ways."""
        dtype, codec, *_ = self.what
        for run in self.run, self.from_python:
            self.allreduce.reset(stream=getattr(self.machine, "stream", None))
            self.again()
            run()
            self.machine.wait()
            mine = self.values[: 2**24]
            checks = self.machine.here.gather(int(mine.view(torch.int16).to(torch.int64).sum()))
            assert len(set(checks)) == 1, "ranks end with different bytes"
            mean = sum[: 2**24].float() / self.machine.world
            lost = float((mine.float() - mean).norm() / mean.norm())
            assert lost <= MOST_LOST[codec], f"{lost:.3g} of the mean is lost, at most {MOST_LOST[codec]} expected"

    def free(self):
        if self.allreduce is not None:
            self.allreduce.close()


class Sum(NcclSum):
    def verify(self, sum):
        pass


def of_dtype(machine, dtype, libraries, has_all, is_exchange):
    """The contenders by name, each with how it is called, the sum that NCCL forms first."""
    elements, device = machine.elements, machine.torch_device
    torch.manual_seed(machine.here.rank)
    values = torch.randn(elements, device=device).to(DTYPES[dtype])
    inputs = {dtype: values.clone()}
    inputs.setdefault("float32", inputs[dtype])  # of which a contender takes the number
    contenders = {"nccl": Sum(machine, inputs, dtype)}
    ways = {"nccl": ("C", "graph")}
    for name, codec, errors, over in CODECS:
        if is_exchange and (errors or over != "peers" or codec not in EXCHANGED):
            continue
        for which, library in libraries.items():
            own = f"{name}{which}"
            contenders[own] = Ours(machine, inputs, values, library, dtype, codec, errors, over)
            eager = ("Python",) if not is_exchange and (has_all or name in FROM_PYTHON) else ()
            ways[own] = (*eager, "C", "graph")
    return contenders, ways


def measure(here, on, elements, rounds, dtype, paths, most, has_all, left_out):
    """Seconds a call of every sample, by contender and way; seconds of the host a call; why some did not take part.

    `paths`: the libraries; of two, the second is `against` the first, and one exchange stands beside two.
    """
    machine = machine_of(here, on)
    machine.elements = elements
    needed, free = elements * BYTES_AN_ELEMENT, min(here.gather(machine.free_bytes()))
    if needed > free:
        return {"seconds": {}, "host": {}, "left out": f"{needed / 2**30:.0f} GiB needed, {free / 2**30:.0f} free"}
    failures, ready, runs, calls, made = {}, {}, {}, calls_for(elements), []
    try:
        names = [""] if len(paths) == 1 else ["", ", against"]
        libraries = {name: library_of(machine, path, most) for name, path in zip(names, paths)}
        contenders, ways = of_dtype(machine, dtype, libraries, has_all, len(paths) > 1)
        made += contenders.values()
        for name, contender in contenders.items():
            own = f"{name} {dtype}"
            if own in left_out:
                continue

            def warm():
                contender.connect()
                contender.run()
                machine.wait()

            why = agreed(here, own, contender.allocate) or agreed(here, own, warm)
            why = why or agreed(here, own, lambda: contender.verify(contenders["nccl"].sum))
            if why:
                failures[own] = why
                if name == "nccl":
                    break  # there is nothing to hold ours to
                continue
            ready[own] = contender
            for way in ways[name]:
                key = f"{own} {way}"
                if key in left_out or (way == "graph" and not machine.has_graphs):
                    continue
                run = many(contender.from_python if way == "Python" else contender.run, calls)
                if way == "graph":
                    captured = []
                    here.gather(at=key)

                    def capture():
                        captured.append(machine.captured(run))
                        captured[0]()
                        machine.wait()

                    if why := agreed(here, key, capture):
                        failures[key] = why
                        continue
                    run = captured[0]
                runs[key] = contender, run
        seconds = in_turn(machine, runs, rounds, calls)
        host = {key: host_seconds(machine, key, runs[key][0]) for key in runs if is_timed(key, left_out)}
        return {"seconds": seconds, "host": host, "calls": calls, "failures": failures}
    finally:
        machine.wait()
        for contender in made:
            contender.free()
        runs.clear(), ready.clear(), made.clear()
        contenders = contender = warm = capture = run = None  # noqa: F841 they hold memory
        machine.release()


def is_timed(key, left_out):
    return not key.endswith("graph") and f"{key}, host" not in left_out


def host_seconds(machine, key, contender):
    """What the host takes for a call that it only enqueues: the least of three loops."""
    run, found = contender.from_python if key.endswith("Python") else contender.run, []
    calls = (HOST_CALLS if contender.n <= 2**22 else LARGE_CALLS) if machine.has_graphs else 2
    for _ in range(3):
        contender.again()
        machine.wait()
        machine.here.gather(at=f"{key}, host")
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - begin) / calls)
        machine.wait()
    return gpu.significant(min(found))
