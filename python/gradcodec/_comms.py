"""Communicators, and the all-reduces over them."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_uint8
from typing import TYPE_CHECKING, Any, Callable, Sequence

from ._abi import C, CPU, G, R, Exchange, Transport
from ._arguments import _arrays, _device, _int32, _whole
from ._codecs import _Steps, _options
from ._errors import GradCodecError
from ._tensors import Array, _Views

if TYPE_CHECKING:
    from ._library import GradCodec

Exchanger = Callable[[memoryview, memoryview], Any]


def _exchange(function: Exchanger, world_size: int, blocks: int, failures: list[BaseException]) -> Any:
    def exchange(_: Any, send: int, recv: int, size: int, device: Any, stream: Any) -> int:
        try:
            given = (c_uint8 * (blocks * size)).from_address(send)
            room = (c_uint8 * (world_size * size)).from_address(recv)
            function(memoryview(given).cast("B"), memoryview(room).cast("B"))
            return 0
        except BaseException as failure:  # C knows no exceptions
            failures.append(failure)
            return 1

    return Exchange(exchange)


class Communicator:
    """A rank's way to the others (gc_comm_t), released with this object. `all_to_all` and `all_gather` take what to
    send and room to receive, host memory both, as mpi4py's comm.Alltoall and comm.Allgather do. What they raise is the
    cause of the exception that a call raises then."""

    def __init__(
        self, library: GradCodec, rank: int, world_size: int, all_to_all: Exchanger, all_gather: Exchanger
    ) -> None:
        self._keep(library, G())
        rank, world_size = _int32("rank", rank), _int32("world_size", world_size)
        to_all = _exchange(all_to_all, world_size, world_size, self._failures)
        gather, host = _exchange(all_gather, world_size, 1, self._failures), 1
        self._transport = Transport(ctypes.sizeof(Transport), rank, world_size, host, None, to_all, gather)
        library.lib.gc_comm_from_transport(byref(self._transport), byref(self._comm))

    def _keep(self, library: GradCodec, comm: Any) -> None:
        self._library, self._comm, self._failures = library, comm, list[BaseException]()
        self._parts: list[Communicator] = []

    @classmethod
    def _of(cls, library: GradCodec, comm: Any) -> Communicator:
        made = cls.__new__(cls)
        made._keep(library, comm)
        return made

    def __del__(self) -> None:
        if getattr(self, "_comm", None):
            self._library.lib.gc_comm_free(self._comm)

    def _raised(self) -> list[list[BaseException]]:
        """What functions of Python have raised, of this communicator and of those that it is made of."""
        return [self._failures, *(raised for part in self._parts for raised in part._raised())]

    def _run(self, function: Any, *arguments: Any) -> None:
        for raised in self._raised():
            raised.clear()
        try:
            function(*arguments)
        except GradCodecError as error:
            raise error from next((failure for raised in self._raised() for failure in raised), None)

    def reserve(self, n_elements: int, device: tuple[int, int] = (CPU, 0)) -> None:
        """Allocates the memory for all-reduces of `n_elements` now, so that they allocate nothing."""
        self._library.lib.gc_comm_reserve(self._comm, _device(device), _whole("n_elements", n_elements))

    def async_error(self) -> None:
        """Raises what went wrong in work that was enqueued."""
        self._library.lib.gc_comm_async_error(self._comm)

    def compressed_allreduce(self, buffer: Array, worker_error: Array, server_error: Array, stream: Any = 1) -> None:
        """The mean of `buffer` over all ranks, in place, at one bit per element: DeepSpeed's compressed_allreduce.

        All float32 and contiguous. `worker_error`: as many elements as `buffer`; `server_error`: shard_elements() of
        them. Both begin as zeros and are kept by you. Every rank calls this.
        """
        handle = self._library._handle(stream)
        tensors = _Views([buffer, worker_error, server_error], handle, written=True)
        self._run(self._library.lib.gc_compressed_allreduce, self._comm, *tensors.pointers, handle)

    def allreduce(self, kind: int | str, segments: Sequence[int], **options: Any) -> AllReduce:
        """An all-reduce of tensors with these element counts, which keeps its errors; `options` as for a Codec."""
        return AllReduce(self, kind, segments, **options)


class AllReduce(_Steps):
    """An all-reduce that keeps its errors (gc_allreduce_t), made on every rank with what makes a Codec; released with
    this object."""

    _prefix = "gc_allreduce"

    def __init__(self, comm: Communicator, kind: int | str, segments: Sequence[int], **options: Any) -> None:
        self._library, self._lib, self._comm, self._handle = comm._library, comm._library.lib, comm, R()
        all_of_them = _options(kind, segments, options)
        comm._run(self._lib.gc_allreduce_create, comm._comm, byref(all_of_them), byref(self._handle))

    def run(
        self, values: Sequence[Array], value_factor: Array | None = None, error_factor: Array | None = None,
        stream: Any = 1,
    ) -> None:  # fmt: skip
        """The mean (sum, vote) of `values` over all ranks, in place: one array per segment. The factors: as for Codec.encode()."""
        outputs = self._views(stream, *_arrays("values", values), written=True, name="values")
        factors, handle = self._views(stream, value_factor, error_factor), self._library._handle(stream)
        given = outputs.pointers, len(outputs.pointers), *factors.pointers
        self._comm._run(self._lib.gc_allreduce_run, self._handle, *given, handle)

    def reduce_scatter(
        self, values: Sequence[Array], shard: Array, value_factor: Array | None = None,
        error_factor: Array | None = None, stream: Any = 1,
    ) -> None:  # fmt: skip
        """The first half of run(): the mean of this rank's part to `shard`, shard_elements() long; `values` stay."""
        inputs = self._views(stream, *_arrays("values", values), name="values")
        factors, handle = self._views(stream, value_factor, error_factor), self._library._handle(stream)
        to = self._views(stream, shard, written=True, name="shard")
        given = inputs.pointers, len(inputs.pointers), *factors.pointers, *to.pointers
        self._comm._run(self._lib.gc_allreduce_reduce_scatter, self._handle, *given, handle)

    def all_gather(self, shard: Array, values: Sequence[Array], stream: Any = 1) -> None:
        """The second half of run(): the shards of all ranks, compressed, to `values`."""
        given, handle = self._views(stream, shard, name="shard"), self._library._handle(stream)
        outputs = self._views(stream, *_arrays("values", values), written=True, name="values")
        to = outputs.pointers, len(outputs.pointers)
        self._comm._run(self._lib.gc_allreduce_all_gather, self._handle, *given.pointers, *to, handle)

    def errors_in(self, workers: Array | None = None, server: Array | None = None, stream: Any = 1) -> None:
        """Takes errors that errors_out() gave, float32, also in a world of another size: `workers` has a row for each
        rank, `server` the shards one after the other."""
        self._read("errors_in", stream, workers, server)
