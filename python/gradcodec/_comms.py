"""Communicators, and the all-reduces over them."""

from __future__ import annotations

import ctypes
import functools
import itertools
from ctypes import byref, c_int64, c_size_t, c_uint8, c_void_p
from typing import Any, Callable, Iterator, Sequence

from ._abi import CPU, G, PARTS, R, Device, Exchange, Part, Transport
from ._arguments import _device, _int32, _named, _whole
from ._codecs import _FACTORS, _INPUTS, _OUTPUTS, _Steps, _options
from ._errors import GradCodecError, _cut
from ._lib import Library
from ._owned import _Owned
from ._reading import _Note, _frame
from ._tensors import Array

Exchanger = Callable[[memoryview, memoryview], Any]
_SCATTER, _GATHER = [*_FACTORS, _Note("shard", True)], [_Note("shard")]
_ERRORS_IN = _Note("workers", optional=True), _Note("server", optional=True)


class Call(ctypes.Structure):
    """Arguments of an exchange, and its progress."""

    _fields_ = [
        ("context", c_void_p), ("send", c_void_p), ("recv", c_void_p), ("size", c_size_t), ("device", Device),
        ("stream", c_void_p),
    ]  # fmt: skip
    has_begun = False
    started: list[Any]  # its parts that have begun
    ended: list[Any]  # its parts that have ended
    is_broken: bool  # a part has failed
    failures: list[BaseException]  # raised in this exchange, by its parts or by handlers of signals


class Raised(list[BaseException]):
    """Exceptions of Python functions that C has called, until the Python call that called C raises them."""

    is_broken = False  # an interrupted exchange cannot go on


_Store = ctypes.PYFUNCTYPE(None, *(kind for _, kind, *_ in Call._fields_))
_MOST_TRIES = 8  # of an exchange of which no part has begun


class _Server:
    """Performs the exchanges that C requests. C gets a status that is 0 only if the exchange has ended.

    Python runs the handler of a signal between two of its instructions, also at the entry of a function, where no `try`
    of the function catches what the handler raises. ctypes then gives C a status that nothing has set, often 0. So C
    calls no Python function: it stores the arguments in a Call and resumes a generator, which waits within a `try` and
    yields the status. An exchange that a signal has interrupted continues where it was.

    `perform(call)`: performs an exchange, or the rest of it. It adds to `call.started` when a part begins and to
    `call.ended` when it has ended, in one call of a C function such as list.extend(), which no signal interrupts.
    `resumes`: it can be called again after it was interrupted between its parts. `raised` gets all exceptions.
    """

    def __init__(self, perform: Callable[[Call], None], raised: Raised, resumes: bool) -> None:
        self._perform, self._raised, self._resumes, self._call = perform, raised, resumes, Call()
        self._call.failures, self._status = [], 1

    def function(self) -> Any:
        """Returns the function for C."""
        statuses = self._statuses(3)
        next(statuses)  # to its first `yield`
        store: Any = _Store(self._call.__init__)  # type: ignore[misc]
        store.restype = functools.partial(next, itertools.chain(statuses, itertools.repeat(1)))
        return Exchange(store)

    def _statuses(self, outer: int) -> Iterator[int]:
        """Yields a status for each exchange. `outer`: number of `try` around the innermost one. A signal that arrives
        while an exception is caught raises in the next `try`."""
        while True:
            try:
                if outer:
                    yield from self._statuses(outer - 1)
                while True:
                    self._serve()
                    yield self._status
            except GeneratorExit as failure:
                if not self._call.recv:  # the generator is released
                    return
                self._raised += [failure]
                self._call.failures += [failure]
            except BaseException as failure:  # no call here: a signal handler could run at it
                self._raised += [failure]
                self._call.failures += [failure]

    def _serve(self) -> None:
        """Ends the exchange that C has requested, unless it has ended."""
        call, raised = self._call, self._raised
        if not call.recv:
            return
        if not call.has_begun:
            call.started, call.ended, call.is_broken, call.failures, call.has_begun = [], [], False, [], True
        has_ended = 0 < len(call.started) == len(call.ended) and not call.is_broken
        interrupts = [failure for failure in call.failures if not isinstance(failure, Exception)]
        goes_on = not call.is_broken and (self._resumes or not call.started)
        goes_on &= len(call.failures) - len(interrupts) < _MOST_TRIES
        if goes_on and not has_ended:
            if raised.is_broken:
                call.is_broken = True
                raise RuntimeError("an exchange was interrupted before: this communicator cannot be used any more")
            self._perform(call)
            has_ended = True
        raised.is_broken |= not has_ended and len(interrupts) > 0
        self._status = int(not has_ended)
        if not has_ended:
            call.started, call.ended = [], []
        # Otherwise the parts stay until the next exchange. A thread of gloo that releases a part needs the GIL, and if
        # the program ends meanwhile, the thread aborts the process.
        call.has_begun, call.recv = False, None


def server(perform: Callable[[Call], None], raised: Raised, resumes: bool) -> Any:
    """Returns the function for C that performs exchanges; see _Server."""
    return _Server(perform, raised, resumes).function()


def _exchange(function: Exchanger, world_size: int, blocks: int, raised: Raised) -> Any:
    def perform(call: Call) -> None:
        given = (c_uint8 * (blocks * call.size)).from_address(call.send)
        room = (c_uint8 * (world_size * call.size)).from_address(call.recv)
        views = [memoryview(given).cast("B")], [memoryview(room).cast("B")]
        call.started.append(None)
        call.ended.extend(map(function, *views))

    return server(perform, raised, resumes=False)


class Communicator(_Owned):
    """Connection of a rank to the others (gc_comm_t), released by close(), at the end of a `with`, or with this object.

    `all_to_all` and `all_gather` take the bytes to send and room to receive, both in host memory, like mpi4py's
    comm.Alltoall and comm.Allgather; the memory is valid until they return. An exception that they raise is the cause
    of the exception of the call. A KeyboardInterrupt, and any other that is no Exception, is raised as it is.
    """

    def __init__(
        self, library: Library, rank: int, world_size: int, all_to_all: Exchanger, all_gather: Exchanger
    ) -> None:
        self._keep()
        rank, world_size = _int32("rank", rank), _int32("world_size", world_size)
        to_all = _exchange(all_to_all, world_size, world_size, self._failures)
        gather, host = _exchange(all_gather, world_size, 1, self._failures), 1
        self._transport = Transport(ctypes.sizeof(Transport), rank, world_size, host, None, to_all, gather)
        made = G()
        library.lib.gc_comm_from_transport(byref(self._transport), byref(made))
        self._own(library, made)

    _free = "gc_comm_free"

    def _keep(self, raised: Raised | None = None) -> None:
        self._failures = Raised() if raised is None else raised
        self._parts: list[Communicator] = []
        # Exceptions of Python functions, of this communicator and of those that it combines.
        self._raised: list[Raised] = [self._failures]

    @classmethod
    def _of(cls, library: Library, made: Any, raised: Raised | None = None) -> Communicator:
        comm = cls.__new__(cls)
        comm._keep(raised)
        comm._own(library, made)
        return comm

    def _failed(self, status: int) -> None:
        failures = [failure for raised in self._raised for failure in raised]
        for raised in self._raised:
            raised.clear()  # an exception keeps all objects of its frames
        for failure in failures:  # a call that has succeeded raises what a signal's handler raised in it
            if not status or not isinstance(failure, Exception):
                raise failure
        cause = failures[0] if failures else None
        sentence = self._library._last_error()
        if cause is not None:
            sentence = f"{_cut(sentence, 300)}: {type(cause).__name__}: {_cut(str(cause), 150)}"
        raise GradCodecError(sentence, status) from cause

    def async_error(self) -> None:
        """Raises failures of enqueued work."""
        self._run(self._library._raw.gc_comm_async_error)

    def abort(self) -> None:
        """Ends all waits on it, from any thread, for good: calls that exchange give COMM from then on.

        You must end a Python function that does not return.
        """
        self._run(self._library._raw.gc_comm_abort)

    @property
    def rank(self) -> int:
        """Number of this process or thread: 0 to world_size - 1."""
        return int(self._call_with(self._library._raw.gc_comm_rank))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return int(self._call_with(self._library._raw.gc_comm_world_size))

    def allreduce(
        self, codec: int | str, segments: Sequence[int], *, values: Any = None, results: Any = None,
        error: int | str | None = None, scale: int | None = None, nonfinite: int | str | None = None,
        device: Any = None, beta: float | None = None, n_chunks: int | None = None, server: int | None = None,
        raw: Sequence[bool] | None = None, reduction: str | None = None,
    ) -> AllReduce:  # fmt: skip
        """Returns an all-reduce of tensors with these element counts, which keeps its errors. Every rank calls this.

        The keywords are those of a Codec; `n_chunks` and `server` follow from the communicator.
        """
        return AllReduce(self, _options(
            codec, segments, values=values, results=results, error=error, scale=scale, nonfinite=nonfinite, device=device,
            beta=beta, n_chunks=n_chunks, server=server, raw=raw, reduction=reduction,
        ))  # fmt: skip


class AllReduce(_Steps):
    """An all-reduce that keeps its errors (gc_allreduce_t), which Communicator.allreduce() makes on every rank, released
    as a Codec is.

    `shard_elements`: elements of this rank's shard, for reduce_scatter(). `sent_bytes`: bytes that this rank sends to
    other ranks in one run(); `sent_between_nodes`: those that leave the node, None over a communicator that is not
    hierarchical. `exchanges`: 1 if a run() is one-shot, 2 if it is two-shot.
    """

    _prefix, _free = "gc_allreduce", "gc_allreduce_free"

    def __init__(self, comm: Communicator, options: Any) -> None:
        made, self._comm, library, between = R(), comm, comm._library, c_int64()
        self._raised = comm._raised
        status = comm._call_with(library._raw.gc_allreduce_create, byref(options), byref(made))
        if not status:
            self._own(library, made)
        comm._run_ended(status)
        self.shard_elements = library._number(library.lib.gc_allreduce_shard_elements, made)
        self.sent_bytes = library._number(library.lib.gc_allreduce_sent_bytes, made, byref(between))
        self.sent_between_nodes = None if between.value < 0 else between.value
        self.exchanges = library._number(library.lib.gc_allreduce_exchanges, made)

    def parts(self, rank: int, which: str = "shard") -> list[tuple[int, int, int]]:
        """Returns the elements that a rank's worker error ("worker") or its shard ("shard") covers: for each piece the
        number of the segment, the first element and the count, in the order of errors_out()."""
        given = _int32("rank", rank), _named("which", which, PARTS)

        def fill(parts: Any, room: int) -> int:
            pieces = int(self._call_with(self._raw.gc_allreduce_parts, *given, parts, room))
            self._library._check(int(pieces < 0))
            return pieces

        room = fill(None, 0)
        parts = (Part * room)()
        fill(parts, room)
        return [(part.segment, part.first, part.count) for part in parts]

    def _failed(self, status: int) -> None:
        self._comm._failed(status)

    def run(
        self, values: Sequence[Array], value_factor: Array | None = None, error_factor: Array | None = None,
        stream: Any = None,
    ) -> None:  # fmt: skip
        """Replaces `values` by their mean (sum, vote) over all ranks: one array per segment. The factors: see
        Codec.encode()."""
        others = value_factor, error_factor
        self._over(self._raw.gc_allreduce_run, stream, "values", values, _OUTPUTS, others, _FACTORS)

    def reduce_scatter(
        self, values: Sequence[Array], shard: Array, value_factor: Array | None = None,
        error_factor: Array | None = None, stream: Any = None,
    ) -> None:  # fmt: skip
        """Runs the first half of run(): writes the mean of this rank's part to `shard`, `shard_elements` long."""
        others = value_factor, error_factor, shard
        self._over(self._raw.gc_allreduce_reduce_scatter, stream, "values", values, _INPUTS, others, _SCATTER)

    def all_gather(self, shard: Array, values: Sequence[Array], stream: Any = None) -> None:
        """Runs the second half of run(): writes the shards of all ranks, compressed on the way, to `values`."""
        self._over(
            self._raw.gc_allreduce_all_gather, stream, "values", values, _OUTPUTS, (shard,), _GATHER,
            lambda room, n, source: (source, room, n),
        )  # fmt: skip

    def errors_in(self, workers: Array | None = None, server: Array | None = None, stream: Any = None) -> None:
        """Sets errors that errors_out() returned, float32, also in a world of another size: `workers` has a row for
        each rank, `server` the errors of all shards, in the order of elements: without raw segments the shards one
        after the other."""
        self._call("errors_in", stream, (workers, server), _ERRORS_IN)
