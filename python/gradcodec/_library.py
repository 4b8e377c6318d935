"""The functions of the library as methods."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64, c_size_t, c_uint8, c_void_p
from typing import Any, Sequence

from ._abi import (
    AXIS_NONE,
    BIG,
    CODECS,
    COUNT_ALL,
    CPU,
    CUDA,
    DTYPES,
    G,
    LITTLE,
    T,
    ElementwiseOptions,
    KernelShape,
    NcclOptions,
    PeersOptions,
    ReductionOptions,
)
from ._arguments import (
    _address,
    _arrays,
    _bytes,
    _choice,
    _count,
    _device,
    _dtype,
    _int32,
    _memory,
    _said,
    _socket,
    _text,
    _whole,
    _wholes,
)
from ._codecs import Codec, _options
from ._comms import Communicator, Exchanger
from ._kernels import Kernel
from ._lib import Library
from ._share import Share
from ._reading import _about, _frame, _Note
from ._tensors import Array, Tensor

_SRC, _VALUES, _PAYLOAD = (_Note("src"),), (_Note("values"),), (_Note("payload"),)
_BYTE = _about(*DTYPES["uint8"])
_SRC_DST = *_SRC, _Note("dst", True)
_SRC_DST_SCALES = *_SRC_DST, _Note("scales", optional=True)
_ORDERS = BIG, LITTLE


class GradCodec(Library):
    """The library: the file at `path`, or GRADCODEC_LIBRARY's, or the installed libgradcodec.so.0.

    Functions have their names from gradcodec.h, which documents them in full. Arrays are borrowed for the call; `dst`
    is written to. New tensors are yours, on the input's device. If the library refuses a call, GradCodecError has its
    message. An unfit argument is a TypeError or a ValueError.
    """

    def __repr__(self) -> str:
        return f"GradCodec({self.lib._name!r}), version {self.version}"

    def make(self, function: Any, *arguments: Any) -> Tensor:
        """Returns the tensor that a function of `lib` writes to its last argument; for those without a method."""
        out = T()
        self._check(function(*arguments, byref(out)) or 0)
        return Tensor(self, out)

    def _into(self, function: Any, src: Array, dst: Array, stream: Any, *numbers: Any) -> None:
        frame = _frame()
        try:
            handle = frame.read(stream, (src, dst), _SRC_DST)
            places = frame.places
            status = function(places[0], *numbers, places[1], handle)
            if status:
                self._check(status)
        finally:
            frame.release()

    # Synchronous functions work on the legacy stream.

    def _made(self, function: Any, src: Array, *numbers: Any, notes: Sequence[_Note] = _SRC) -> Tensor:
        frame = _frame()
        try:
            frame.read(1, (src,), notes)
            return self.make(function, frame.places[0], *numbers)
        finally:
            frame.release()

    def _pack(self, function: Any, src: Array, n_chunks: int) -> list[Tensor]:
        out, frame = (T * _count("n_chunks", n_chunks))(), _frame()
        try:
            frame.read(1, (src,), _SRC)
            self._check(function(frame.places[0], len(out), out))
        finally:
            frame.release()
        return [Tensor(self, tensor) for tensor in out]

    def _unpack(self, function: Any, chunks: Sequence[Array], *arguments: Any) -> Tensor:
        sources = _arrays("chunks", chunks)
        frame = _frame(len(sources))
        try:
            frame.read(1, sources, [_Note(f"chunks[{k}]") for k in range(len(sources))])
            return self.make(function, frame.list, len(sources), *arguments)
        finally:
            frame.release()

    # --- version, workers, devices

    @property
    def version(self) -> str:
        """Version of the library, "0.1.0" for example."""
        return bytes(self.lib.gc_version_string()).decode()

    def build_info(self) -> str:
        """Returns what a bug report should include: version, commit, compiler, processor, and loaded libraries."""
        return bytes(self.lib.gc_build_info()).decode()

    def set_threads(self, n: int) -> None:
        """Sets the number of threads that work on large CPU tensors; 0: the number of CPUs that the process may use."""
        self.lib.gc_set_threads(_whole("n", n, 0, 2**32 - 1))

    def prepare(self, device: tuple[int, int]) -> None:
        """Loads what a device needs, (CUDA, 0) for example, so that calls on streams neither allocate nor wait."""
        self.lib.gc_prepare(_device(device))

    def trim(self, device: tuple[int, int]) -> None:
        """Gives memory that is kept for new tensors back to a device."""
        self.lib.gc_trim(_device(device))

    # --- bits: non-zero is 1

    def chunk_bytes(self, n_elements: int, n_chunks: int) -> int:
        """Returns the bytes of one chunk: ceil(ceil(n_elements / 8) / n_chunks)."""
        given = _whole("n_elements", n_elements), _count("n_chunks", n_chunks)
        return self._number(self.lib.gc_chunk_bytes, *given)

    def pack_chunks(self, src: Array, n_chunks: int) -> list[Tensor]:
        """Packs bools or integers of any shape to bits, highest first: n_chunks tensors, uint8 [chunk_bytes]."""
        return self._pack(self._raw.gc_pack_chunks, src, n_chunks)

    def unpack_chunks(self, chunks: Sequence[Array], n_elements: int) -> Tensor:
        """Unpacks chunks of pack_chunks(), uint8 [chunk_bytes] each, to bool [n_elements]."""
        return self._unpack(self._raw.gc_unpack_chunks, chunks, _whole("n_elements", n_elements))

    def pack_bits(self, src: Array, axis: int | None = AXIS_NONE, order: int = BIG) -> Tensor:
        """Packs like numpy.packbits: bools or integers along an axis, or flattened, to a uint8 tensor."""
        return self._made(self._raw.gc_pack_bits, src, self._along(axis), self._order(order))

    def unpack_bits(
        self, src: Array, axis: int | None = AXIS_NONE, count: int | None = COUNT_ALL, order: int = BIG
    ) -> Tensor:
        """Unpacks like numpy.unpackbits: uint8 to `count` bits along the axis, or all but the last -count."""
        bits = COUNT_ALL if count is None else _whole("count", count)
        return self._made(self._raw.gc_unpack_bits, src, self._along(axis), bits, self._order(order))

    def pack_chunks_into(self, src: Array, dst: Array, order: int = BIG, stream: Any = None) -> None:
        """Packs like pack_chunks() to `dst`: uint8 [n_chunks, chunk_bytes], C-contiguous; a row is a chunk."""
        self._into(self._raw.gc_pack_chunks_into, src, dst, stream, self._order(order))

    def unpack_chunks_into(self, src: Array, dst: Array, order: int = BIG, stream: Any = None) -> None:
        """Unpacks chunks, uint8 [n_chunks, chunk_bytes], to 0 and 1 in `dst`: any shape; bool, integers or floats."""
        self._into(self._raw.gc_unpack_chunks_into, src, dst, stream, self._order(order))

    def pack_bits_into(
        self, src: Array, dst: Array, axis: int | None = AXIS_NONE, order: int = BIG, stream: Any = None
    ) -> None:
        """Packs like pack_bits() to `dst`, uint8 of the shape of pack_bits()'s result."""
        self._into(self._raw.gc_pack_bits_into, src, dst, stream, self._along(axis), self._order(order))

    def unpack_bits_into(
        self, src: Array, dst: Array, axis: int | None = AXIS_NONE, order: int = BIG, stream: Any = None
    ) -> None:
        """Unpacks like unpack_bits() to `dst`: its length along the axis is the count; bool, integers or floats."""
        self._into(self._raw.gc_unpack_bits_into, src, dst, stream, self._along(axis), self._order(order))

    @staticmethod
    def _along(axis: Any) -> int:
        return AXIS_NONE if axis is None else _int32("axis", axis)

    @staticmethod
    def _order(order: Any) -> int:
        if type(order) is int and order in _ORDERS:
            return order
        try:
            return _int32("order", order)
        except TypeError:
            raise TypeError(f"order: BIG or LITTLE expected, got {_said(order)}") from None

    # --- signs: 1 unless below zero

    def pack_signs(self, src: Array, n_chunks: int) -> list[Tensor]:
        """Packs the signs of floats of any shape to bits, in n_chunks tensors of uint8 [chunk_bytes]."""
        return self._pack(self._raw.gc_pack_signs, src, n_chunks)

    def unpack_signs(self, chunks: Sequence[Array], n_elements: int, dtype: Any = "float32") -> Tensor:
        """Unpacks chunks of pack_signs() to +1 and -1, [n_elements] of `dtype`, a float or a signed integer."""
        return self._unpack(self._raw.gc_unpack_signs, chunks, _whole("n_elements", n_elements), _dtype(dtype))

    def pack_signs_into(self, src: Array, dst: Array, order: int = BIG, stream: Any = None) -> None:
        """Packs like pack_signs() to `dst`: uint8 [n_chunks, chunk_bytes], C-contiguous; a row is a chunk."""
        self._into(self._raw.gc_pack_signs_into, src, dst, stream, self._order(order))

    def unpack_signs_into(
        self, src: Array, dst: Array, scales: Array | None = None, order: int = BIG, stream: Any = None
    ) -> None:
        """Unpacks chunks, uint8 [n_chunks, chunk_bytes], to +scale and -scale in `dst`, floats of any shape.

        `scales`: None: +1 and -1, for which `dst` may be signed integers; or float32, one for all or one per chunk.
        """
        about, sources, frame = self._order(order), (src, dst, scales), _frame()
        try:
            handle = frame.read(stream, sources, _SRC_DST_SCALES)
            source, target, factors = frame.addresses(sources)
            self._check(self._raw.gc_unpack_signs_into(source, factors, about, target, handle))
        finally:
            frame.release()

    def vote_signs_into(self, src: Array, dst: Array, turn: int, stream: Any = None) -> None:
        """Writes the majority of each bit over the rows of `src`, uint8 [voters, bytes], to `dst`, uint8 [bytes].

        `turn`, for example the number of the step, chooses the voter whose bit counts in a tie.
        """
        self._into(self._raw.gc_vote_signs_into, src, dst, stream, _whole("turn", turn, 0, 2**64 - 1))

    # --- tensors and copies

    def tensor_empty(self, shape: Sequence[int], dtype: Any, device: tuple[int, int] = (CPU, 0)) -> Tensor:
        """Returns a new C-contiguous tensor, aligned to 256 bytes, with undefined contents."""
        lengths = _wholes("shape", shape)
        about = _device(device), _dtype(dtype), len(lengths), (c_int64 * len(lengths))(*lengths)
        return self.make(self.lib.gc_tensor_empty, *about)

    def tensor_to_device(self, src: Array, device: tuple[int, int]) -> Tensor:
        """Returns a compact copy on that device, of any dtype, also if `src` is there already."""
        return self._made(self._raw.gc_tensor_to_device, src, _device(device))

    def copy_into(self, src: Array, dst: Array, stream: Any = None) -> None:
        """Copies `src`, broadcast as by NumPy and cast, to `dst`, of any strides, also between devices."""
        self._into(self._raw.gc_copy_into, src, dst, stream)

    # --- kernels

    def builtin_kernels(self, family: str) -> bytes:
        """Returns the fatbin of a family, "bits" for example, for cuModuleLoadData or cupy.RawModule."""
        fatbin, size = c_void_p(), c_size_t()
        self.lib.gc_builtin_kernels(_text("family", family), byref(fatbin), byref(size))
        return ctypes.string_at(fatbin, size.value)

    def builtin_kernel_shape(self, kernel: str, compute_capability: int) -> Any:
        """Returns how to launch a built-in kernel on a GPU of 90, for example: threads, items_per_block, etc."""
        shape = KernelShape(ctypes.sizeof(KernelShape))
        capability = _int32("compute_capability", compute_capability)
        self.lib.gc_builtin_kernel_shape(_text("kernel", kernel), capability, byref(shape))
        return shape

    def elementwise(
        self, inputs: str, outputs: str, operation: str, name: str = "kernel", *, preamble: str | None = None,
        loop_prep: str | None = None, after_loop: str | None = None, options: Sequence[str] = (), flags: int = 0,
        nvrtc: int | None = None,
    ) -> Kernel:  # fmt: skip
        """Returns a kernel of CUDA code for each element, like CuPy's ElementwiseKernel; see Kernel."""
        fields = dict(inputs=inputs, outputs=outputs, operation=operation, name=name, preamble=preamble)
        fields.update(loop_prep=loop_prep, after_loop=after_loop)
        return Kernel(self, self.lib.gc_elementwise_create, ElementwiseOptions, fields, options, flags, nvrtc)

    def reduction(
        self, inputs: str, outputs: str, map: str, reduce: str, post_map: str, identity: str | None = None,
        name: str = "kernel", *, reduce_type: str | None = None, preamble: str | None = None,
        options: Sequence[str] = (), flags: int = 0, nvrtc: int | None = None,
    ) -> Kernel:  # fmt: skip
        """Returns a reduction in CUDA code, like CuPy's ReductionKernel; see Kernel."""
        fields = dict(inputs=inputs, outputs=outputs, map=map, reduce=reduce, post_map=post_map, identity=identity)
        fields.update(name=name, reduce_type=reduce_type, preamble=preamble)
        return Kernel(self, self.lib.gc_reduction_create, ReductionOptions, fields, options, flags, nvrtc)

    # --- codecs

    def encode(self, values: Array, codec: int | str) -> Tensor:
        """Returns the payload of one tensor, uint8 on its device. `codec`: such as "int8" or ONEBIT. Keeps no state.

        `values`: float32, float16 or bfloat16, of any shape and strides.
        """
        return self._made(self._raw.gc_encode, values, _choice("codec", codec, CODECS), notes=_VALUES)

    def decode(self, payload: Array | bytes | bytearray | memoryview, dtype: Any = "float32") -> Tensor:
        """Returns the values of a payload of encode(), one-dimensional, in float32, float16 or bfloat16, on its device.

        `payload`: any bytes. If encode() cannot have made them, the GradCodecError has the status CORRUPT.
        """
        about, frame = _dtype(dtype), _frame()
        try:
            if isinstance(payload, (bytes, bytearray, memoryview)):
                memory = _memory("payload", payload)  # kept until the call is over
                frame.describe(0, ctypes.addressof(memory), CPU, _BYTE, (ctypes.sizeof(memory),))
            else:
                frame.read(1, (payload,), _PAYLOAD)
            return self.make(self._raw.gc_decode, frame.places[0], about)
        finally:
            frame.release()

    def codec(
        self, codec: int | str, segments: Sequence[int], *, values: Any = None, results: Any = None,
        error: int | str | None = None, scale: int | None = None, nonfinite: int | str | None = None,
        device: Any = None, beta: float | None = None, n_chunks: int | None = None, server: int | None = None,
        raw: Sequence[bool] | None = None, reduction: str | None = None,
    ) -> Codec:  # fmt: skip
        """Returns a codec, "int8" or ONEBIT for example, for tensors with these element counts. Codec lists the
        keywords, their values and defaults."""
        return Codec(self, _options(
            codec, segments, values=values, results=results, error=error, scale=scale, nonfinite=nonfinite, device=device,
            beta=beta, n_chunks=n_chunks, server=server, raw=raw, reduction=reduction,
        ))  # fmt: skip

    # --- other processes, and all-reduces

    def share_send(self, tensor: Array, socket: Any, flags: int = 0, timeout_ms: int = -1) -> Share:
        """Sends a tensor over a connected Unix socket (or its fileno()) to share_receive() in another process."""
        return Share(self, tensor, socket, flags, timeout_ms)

    def share_receive(self, socket: Any, device: tuple[int, int] = (CPU, 0), timeout_ms: int = -1) -> Tensor:
        """Receives the next tensor from a socket. The sender waits for its release."""
        given = _socket(socket), _device(device), _int32("timeout_ms", timeout_ms)
        return self.make(self.lib.gc_share_receive, *given)

    def communicator(
        self, rank: int, world_size: int, all_to_all: Exchanger, all_gather: Exchanger
    ) -> Communicator:
        """Returns a communicator over two functions of yours; see Communicator."""
        return Communicator(self, rank, world_size, all_to_all, all_gather)

    def group(self, world_size: int) -> list[Communicator]:
        """Returns communicators among threads of this process, by rank: one for each thread."""
        ranks = _int32("world_size", world_size)
        comms = (G * max(0, ranks))()
        self.lib.gc_comm_group(ranks, comms)
        return [Communicator._of(self, comm) for comm in comms]

    def nccl(
        self, comm: int, split: bool = False, dl_handle: int | None = None, timeout_ms: int = 0
    ) -> Communicator:
        """Returns a communicator over an ncclComm_t, given by address, which must outlive it unless it is split."""
        wait = _whole("timeout_ms", timeout_ms, 0, 2**32 - 1)
        about = _address("comm", comm), _address("dl_handle", dl_handle), wait
        made, options = G(), NcclOptions(ctypes.sizeof(NcclOptions), int(bool(split)), *about)
        self.lib.gc_comm_from_nccl(byref(options), byref(made))
        return Communicator._of(self, made)

    def nccl_id(self, dl_handle: int | None = None) -> bytes:
        """Returns the 128 bytes by which ranks find each other: called on one of them, for nccl_world() on all."""
        made, handle = (c_uint8 * 128)(), _address("dl_handle", dl_handle)
        options = NcclOptions(ctypes.sizeof(NcclOptions), 0, None, handle)
        self.lib.gc_comm_nccl_id(byref(options), made)
        return bytes(made)

    def nccl_world(
        self, of_all: bytes, rank: int, world_size: int, device: int, dl_handle: int | None = None, timeout_ms: int = 0
    ) -> Communicator:
        """Returns a new communicator over NCCL. `of_all`: nccl_id() of one rank. Every rank calls this."""
        shown = _bytes("of_all", of_all)
        if len(shown) != 128:
            raise ValueError(f"of_all: the 128 bytes of nccl_id() expected, got {len(shown)}")
        about = _address("dl_handle", dl_handle), _whole("timeout_ms", timeout_ms, 0, 2**32 - 1)
        made, options = G(), NcclOptions(ctypes.sizeof(NcclOptions), 0, None, *about)
        given, numbers = (c_uint8 * 128)(*shown), (_int32("rank", rank), _int32("world_size", world_size))
        self.lib.gc_comm_from_nccl_id(byref(options), given, *numbers, _device((CUDA, device)), byref(made))
        return Communicator._of(self, made)

    def allreduce_peers_bytes(
        self, codec: int | str, segments: Sequence[int], world_size: int, nodes: int = 1, *, values: Any = None,
        results: Any = None, error: int | str | None = None, scale: int | None = None,
        nonfinite: int | str | None = None, device: Any = None, beta: float | None = None, n_chunks: int | None = None,
        server: int | None = None, raw: Sequence[bool] | None = None, reduction: str | None = None,
    ) -> int:  # fmt: skip
        """Returns the bytes of each rank's peer memory for an all-reduce with these arguments; for several, use the
        largest. `nodes`: of a hierarchical communicator, for which `world_size` counts the ranks of one node."""
        options = _options(
            codec, segments, values=values, results=results, error=error, scale=scale, nonfinite=nonfinite, device=device,
            beta=beta, n_chunks=n_chunks, server=server, raw=raw, reduction=reduction,
        )  # fmt: skip
        given = byref(options), _int32("world_size", world_size), _int32("nodes", nodes)
        return self._number(self.lib.gc_allreduce_peers_bytes, *given)

    def peers(
        self, rank: int, buffers: Sequence[int], size: int, device: int, timeout_ms: int = 0
    ) -> Communicator:  # fmt: skip
        """Returns a communicator over memory that the GPUs of one machine can access.

        `buffers`: the address here of every rank's buffer, `size` bytes each. They must outlive the communicator.
        """
        addresses = _wholes("buffers", buffers, 0, 2**64 - 1)
        given, world_size = (c_void_p * len(addresses))(*addresses), len(addresses)
        wait = _whole("timeout_ms", timeout_ms, 0, 2**32 - 1)
        about = _int32("rank", rank), world_size, wait, _device((CUDA, device)), _count("size", size), given
        made, options = G(), PeersOptions(ctypes.sizeof(PeersOptions), *about)
        self.lib.gc_comm_from_peers(byref(options), byref(made))
        return Communicator._of(self, made)

    def open_peers(
        self, bootstrap: Communicator, device: int, size: int, timeout_ms: int = 0
    ) -> Communicator:  # fmt: skip
        """Returns a communicator over peer memory of the library, `size` bytes on each rank (the largest that
        allreduce_peers_bytes() returns). The ranks find each other over any communicator, `bootstrap`."""
        made, wait = G(), _whole("timeout_ms", timeout_ms, 0, 2**32 - 1)
        about = _device((CUDA, device)), _whole("size", size), wait
        bootstrap._run(self._raw.gc_comm_open_peers, *about, byref(made))
        return Communicator._of(self, made)

    def hierarchical(self, intra_node: Communicator, inter_node: Communicator) -> Communicator:
        """Combines two communicators: of the ranks of this node, and of those with this rank's number on all nodes."""
        for name, given in ("intra_node", intra_node), ("inter_node", inter_node):
            if not isinstance(given, Communicator) and (given is not None or name == "intra_node"):
                raise TypeError(f"{name}: a Communicator expected, got {_said(given)}")
        made = Communicator._of(self, G())
        made._parts = [part for part in (intra_node, inter_node) if part]  # the library calls their functions
        made._raised = [raised for part in made._parts for raised in part._raised]
        out, create = G(), self._raw.gc_comm_hierarchical

        def within(intra: int) -> Any:
            if inter_node is None:  # the library refuses it, on the other ranks of the node as well
                return create(intra, None, byref(out))
            return inter_node._call_with(lambda inter: create(intra, inter, byref(out)))

        status = intra_node._call_with(within)
        if not status:
            made._own(self, out)
        made._run_ended(status)
        return made
