"""Which ranks of a process group share a node, and the communicator that sums within nodes first."""

import contextlib
import ctypes
import functools
import hashlib
import operator
import os
import socket
import sys
import threading
import time
import warnings
from ctypes import byref
from typing import Any, Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from ._abi import HOST_MEMORY, G, Transport
from ._comms import Call, Communicator, Raised, server
from ._errors import GradCodecError
from ._library import GradCodec
from ._torch_eager import eager

BOOT_ID = "/proc/sys/kernel/random/boot_id"


def own_node() -> str:
    """Returns a name that the ranks of a node share: GRADCODEC_NODE, or the host's name and its kernel's boot id."""
    if named := os.environ.get("GRADCODEC_NODE"):
        return named
    try:
        with open(BOOT_ID, encoding="ascii") as file:
            started = file.read().strip()
    except OSError:  # /proc may be missing
        started = ""
    return f"{socket.gethostname()} {started}"


def digest(node: str) -> list[int]:
    """Returns 32 bytes that name a node."""
    return list(hashlib.sha256(node.encode()).digest())


def nodes_of(names: Sequence[Any]) -> list[list[int]]:
    """Returns the ranks of each node, from a name for each rank: nodes by their lowest rank, ranks in order."""
    nodes: dict[Any, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return list(nodes.values())


def are_levels(nodes: list[list[int]]) -> bool:
    """Returns whether there are several nodes, each with the same number of ranks, more than one."""
    return len(nodes) > 1 and len(nodes[0]) > 1 and all(len(ranks) == len(nodes[0]) for ranks in nodes)


def describe(nodes: list[list[int]], levels: bool, within: str, between: str) -> str:
    """Returns a sentence about the topology."""
    if levels:
        shape = f"{len(nodes)} nodes of {len(nodes[0])} ranks"
        return f"{shape}: sums within a node over {within}, codes between nodes over {between}"
    if len(nodes) == 1:
        return f"1 node of {len(nodes[0])} ranks, over {within}"
    sizes = sorted({len(ranks) for ranks in nodes})
    of = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return f"{len(nodes)} nodes of {of} ranks: one level, over {between}"


def warn_of_uneven(nodes: list[list[int]]) -> None:
    if len(nodes) > 1 and len({len(ranks) for ranks in nodes}) > 1:
        sizes = ", ".join(str(len(ranks)) for ranks in nodes)
        warnings.warn(f"nodes of {sizes} ranks: as many on every node are needed to sum within nodes first", stacklevel=4)


class Pairs:
    """A communicator among some ranks of a process group, over messages between each two of them within the group.

    `ranks`: their ranks in the group. `tag`: tag of the messages. `at`: returns the bytes at a host address as a
    tensor. `to_the_end`: an exchange that fails ends only when all of its messages have ended. So when a rank is lost
    all others notice it, and none waits for a rank that has given up.
    """

    def __init__(
        self, library: GradCodec, group: Any, ranks: Sequence[int], tag: int, timeout: Any, at: Callable[..., Any],
        to_the_end: bool = False,
    ) -> None:  # fmt: skip
        self._to_the_end, self.begun = to_the_end, 0  # number of exchanges
        self._group, self._ranks, self._tag, self._timeout, self._at = group, list(ranks), tag, timeout, at
        self._own, size = self._ranks.index(group.rank()), len(self._ranks)
        made, raised = G(), Raised()
        functions = [server(perform, raised, resumes=True) for perform in (self._all_to_all, self._all_gather)]
        transport = Transport(ctypes.sizeof(Transport), self._own, size, HOST_MEMORY, None, *functions)
        library.lib.gc_comm_from_transport(byref(transport), byref(made))
        self.comm = Communicator._of(library, made, raised)
        self.comm._transport = transport

    @eager  # compiled code reaches this function through the hook in C++
    def _all_to_all(self, call: Call) -> None:
        self._exchange(self._at(call.send, len(self._ranks) * call.size, call.device).view(-1, call.size), call)

    @eager
    def _all_gather(self, call: Call) -> None:
        given = self._at(call.send, call.size, call.device).view(-1, call.size)
        self._exchange(given.expand(len(self._ranks), call.size), call)

    def complete(self, exchanges: int, size: int) -> None:
        """Completes a call that has failed on this rank: sends zeros in its remaining exchanges, which all other ranks
        refuse. Otherwise they would wait for this rank."""
        while self.begun < exchanges:
            self.begun += 1
            call, rows = Call(), torch.zeros(2, len(self._ranks), size, dtype=torch.uint8, device="cpu")
            call.started, call.ended = [], []
            with contextlib.suppress(RuntimeError):
                own = self._own, rows[0], rows[1], self._tag, self._timeout
                by_pairs(call, self._group, self._ranks, *own, to_the_end=True)

    def _exchange(self, given: torch.Tensor, call: Call) -> None:
        self.begun += not call.started  # a call with started parts resumes an exchange
        to = self._at(call.recv, len(self._ranks) * call.size, call.device).view(-1, call.size)
        by_pairs(call, self._group, self._ranks, self._own, to, given, self._tag, self._timeout, self._to_the_end)


class _Part:
    """A message, whose failure is kept until all other messages have ended."""

    def __init__(self, failures: list[Exception], begin: Any, *arguments: Any) -> None:
        self._failures, self._work = failures, None
        try:
            self._work = begin(*arguments)
        except Exception as failure:
            failures.append(failure)

    def wait(self, *timeout: Any) -> None:
        try:
            if self._work is not None:
                self._work.wait(*timeout)
        except Exception as failure:
            self._failures.append(failure)


class _Last:
    """The last part of an exchange, which raises the first failure of the others."""

    def __init__(self, failures: list[Exception]) -> None:
        self._failures = failures

    def wait(self, *_: Any) -> None:
        if self._failures:
            raise self._failures[0]


def by_pairs(
    call: Call, group: Any, ranks: Sequence[int], own: int, to: torch.Tensor, given: torch.Tensor, tag: int,
    timeout: Any, to_the_end: bool = False,
) -> None:  # fmt: skip
    """Sends a row to each rank and receives one from each, all at once. `own`: this rank's number among `ranks`."""
    parts: list[functools.partial[Any]] = []
    failures: list[Exception] = []
    for k in range(1, len(ranks)):
        source, target = (own - k) % len(ranks), (own + k) % len(ranks)
        parts.append(functools.partial(group.recv, [to[source]], ranks[source], tag))
        parts.append(functools.partial(group.send, [given[target]], ranks[target], tag))
    if to_the_end:
        last = functools.partial(_Last, failures)
        parts = [*(functools.partial(_Part, failures, one.func, *one.args) for one in parts), last]
    to[own].copy_(given[own])
    run(call, parts, timeout)


def run(call: Call, parts: Sequence[Callable[[], Any]], timeout: Any) -> None:
    """Begins the parts of an exchange that have not begun, and waits for all that have not ended. C functions record
    both: if a record is missing, a part has raised the exception, otherwise a signal handler has."""
    call_it: Any = functools.partial.__call__
    _extend(call, call.started, map(call_it, parts[len(call.started) :]), len(parts))
    works = call.started[len(call.ended) :]
    wait: Any = operator.methodcaller("wait") if timeout is None else operator.methodcaller("wait", timeout)
    if works and works[0] is None:  # it is on the current stream already
        wait = type
    _extend(call, call.ended, map(wait, works), len(parts))


def _extend(call: Call, noted: list[Any], some: Iterator[Any], count: int) -> None:
    """Extends a list to `count` elements. If it has fewer afterwards, the exchange cannot go on."""
    try:
        noted.extend(some)
    except BaseException:
        if len(noted) < count:
            call.is_broken = True
            call.started.clear()  # gloo uses the memory as long as these exist, and an exception keeps its frames
        raise


def over_nccl(library: GradCodec, group: Any, ranks: Sequence[int], device: int, timeout_ms: int) -> Communicator:
    """Creates a communicator of this library over NCCL among some ranks of a process group. Every rank of the group
    calls this, with ranks that include its own."""
    handle = ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libtorch_cuda.so"))._handle  # PyTorch's NCCL
    own = group.rank()
    made: Any = None
    if own == ranks[0]:
        try:
            made = library.nccl_id(dl_handle=handle)
        except GradCodecError as failure:
            made = failure
    ids: list[Any] = [None] * group.size()
    dist.all_gather_object(ids, made, group=group)
    for each in ids:
        if isinstance(each, Exception):
            raise each
    return library.nccl_world(ids[ranks[0]], ranks.index(own), len(ranks), device, dl_handle=handle, timeout_ms=timeout_ms)


class Watch:
    """A thread that aborts this library's communicators over NCCL, which PyTorch's watchdog does not cover: if NCCL
    reports an error, or the exchange enqueued last does not end within the timeout. The next exchange then raises.

    `comms`: communicators on a GPU, checked and aborted in this order. `timeout`: in seconds.
    """

    INTERVAL = 0.5  # seconds

    def __init__(self, comms: Sequence[Communicator], timeout: float) -> None:
        self._comms, self._timeout, self._stopped = list(comms), timeout, threading.Event()
        self._last: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._enqueued_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="gradcodec watch", daemon=True)
        self._thread.start()

    def add(self, comm: Communicator) -> None:
        """Adds a communicator to watch."""
        self._comms = [*self._comms, comm]

    def expect(self) -> None:
        """Records that an exchange was enqueued on the current stream. A captured exchange is not watched."""
        if not torch.cuda.is_current_stream_capturing():
            self._enqueued_at = time.monotonic()
            self._last.record()

    def handles(self) -> list[int]:
        """Returns the addresses of all communicators whose failures check() raises."""
        return [comm._open() for comm in self._comms]

    def check(self) -> None:
        """Raises failures of enqueued exchanges, such as a rank that did not take part."""
        for comm in self._comms:
            comm.async_error()

    def stop(self) -> None:
        """Ends the thread, so that the calling thread is the one that releases the communicators."""
        self._stopped.set()
        # The thread no longer runs while the interpreter shuts down.
        if threading.current_thread() is not self._thread and not sys.is_finalizing():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self.INTERVAL):
            try:
                self.check()
                at = self._enqueued_at
                if at is None or time.monotonic() - at <= self._timeout or self._last.query():
                    continue
                if self._enqueued_at != at:  # the event may be of an exchange that was enqueued meanwhile
                    continue
            except (GradCodecError, RuntimeError):  # of a communicator; of the GPU
                pass
            for comm in self._comms:
                with contextlib.suppress(GradCodecError):
                    comm.abort()
            return
