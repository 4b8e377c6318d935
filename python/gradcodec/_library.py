"""Where the library is found, and its functions as methods."""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys
from ctypes import byref, c_float, c_int32, c_int64, c_size_t, c_uint8, c_void_p
from typing import TYPE_CHECKING, Any, Sequence

from ._abi import (
    AXIS_NONE,
    BIG,
    COUNT_ALL,
    CPU,
    CUDA,
    FUNCTIONS,
    G,
    LITTLE,
    NAME,
    RMS,
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
    _count,
    _device,
    _dtype,
    _float32,
    _int32,
    _said,
    _socket,
    _text,
    _whole,
    _wholes,
)
from ._codecs import Codec, _options
from ._comms import Communicator, Exchanger
from ._errors import GradCodecError, _cut
from ._kernels import Kernel
from ._share import Share
from ._reading import _frame, _Note
from ._tensors import Array, Tensor

def _installed() -> ctypes.CDLL:
    """The library of this package: in the wheel, in the sources, or in the prefix to which `make install` has put both.
    Otherwise the one that the system finds, and then one in the usual prefixes."""
    here = pathlib.Path(__file__).resolve().parent
    tree, prefix = here.parents[1], here.parents[3] if len(here.parents) > 3 else here
    folders = here, here / "lib", tree / "target" / "release", tree / "lib", prefix / "lib"
    beside = [str(folder / NAME) for folder in folders]
    prefixes = sys.prefix, os.path.expanduser("~/.local"), "/usr/local"
    places = [os.path.join(prefix, "lib", NAME) for prefix in prefixes]
    for place in filter(os.path.exists, beside):
        return ctypes.CDLL(place)
    try:
        return ctypes.CDLL(NAME)
    except OSError as error:
        for place in filter(os.path.exists, places):
            return ctypes.CDLL(place)
        raise OSError(
            f"{error}; nor is it one of {', '.join(beside + places)}. Install GradCodec with `make install "
            "PREFIX=$HOME/.local`, or name the file: GradCodec(path), or GRADCODEC_LIBRARY in the environment"
        ) from None


def _tail(path: str) -> str:
    return path if len(path) <= 150 else f"...{path[-147:]}"


def _loaded(path: str | os.PathLike[str] | None) -> ctypes.CDLL:
    named = path or os.environ.get("GRADCODEC_LIBRARY")
    if not named:
        return _installed()
    try:
        return ctypes.CDLL(os.fspath(named))
    except OSError as error:
        raise OSError(
            f"{'path' if path else 'GRADCODEC_LIBRARY'} names {_tail(os.fspath(named))!r}: {_cut(str(error), 250)}"
        ) from None


class _Raw:
    """The functions of the library."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


_SRC = (_Note("src"),)
_SRC_DST = *_SRC, _Note("dst", True)
_SRC_DST_SCALES = *_SRC_DST, _Note("scales", optional=True)
_ONEBIT = (
    _Note("grad"), _Note("error", True, optional=True), _Note("dst", True), _Note("scale", True),
    _Note("workspace", True),
)  # fmt: skip
_ORDERS = BIG, LITTLE


class GradCodec:
    """The library: the file at `path`, or that GRADCODEC_LIBRARY names, or the libgradcodec.so.0 that is installed.

    Functions have their names from gradcodec.h, which says in full what they do. Arrays are borrowed for the call; what
    is called `dst` is written to. New tensors are yours, on the device of the input. What is refused is a
    GradCodecError with the library's sentence; what cannot be an argument at all is a TypeError or a ValueError.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.lib, self._raw = _loaded(path), _Raw()
        for name, (result, arguments) in FUNCTIONS.items():
            if not hasattr(self.lib, name):
                raise OSError(f"{_tail(self.lib._name)}: no function {name}: older than this client, or not GradCodec")
            function = getattr(self.lib, name)
            function.argtypes, function.restype = arguments, self._check if result is c_int32 else result
            # Once more for the calls here, which give addresses, and look at the status themselves.
            raw = self.lib[name]
            raw.argtypes = [c_void_p if hasattr(of, "contents") else of for of in arguments]
            raw.restype = result
            setattr(self._raw, name, raw)

    def __repr__(self) -> str:
        return f"GradCodec({self.lib._name!r}), version {self.version}"

    def _check(self, status: int) -> None:
        if status != 0:
            raise GradCodecError(self._last_error(), status)

    def _last_error(self) -> str:
        return bytes(self.lib.gc_last_error()).decode(errors="replace")

    def make(self, function: Any, *arguments: Any) -> Tensor:
        """The tensor that a function of `lib` gives through its last argument, `out`; for those without a method."""
        out = T()
        self._check(function(*arguments, byref(out)) or 0)
        return Tensor(self, out)

    def _number(self, function: Any, *arguments: Any) -> int:
        number = int(function(*arguments))
        self._check(int(number < 0))
        return number

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

    # Functions that are complete when they return work on the legacy stream.

    def _made(self, function: Any, src: Array, *numbers: Any) -> Tensor:
        frame = _frame()
        try:
            frame.read(1, (src,), _SRC)
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
        """The library's, "0.1.0" for example."""
        return bytes(self.lib.gc_version_string()).decode()

    def build_info(self) -> str:
        """What a bug report should include: version, commit, compiler, processor, and which libraries are loaded."""
        return bytes(self.lib.gc_build_info()).decode()

    def set_threads(self, n: int) -> None:
        """How many threads large tensors of the CPU are worked on by; 0: as many as the process may use CPUs."""
        self.lib.gc_set_threads(_whole("n", n, 0, 2**32 - 1))

    def prepare(self, device: tuple[int, int]) -> None:
        """Loads what a device needs, (CUDA, 0) for example, so that calls on streams allocate and wait for nothing."""
        self.lib.gc_prepare(_device(device))

    def trim(self, device: tuple[int, int]) -> None:
        """Gives a device the memory back that is kept for new tensors."""
        self.lib.gc_trim(_device(device))

    # --- bits: non-zero is 1

    def chunk_bytes(self, n_elements: int, n_chunks: int) -> int:
        """Bytes of one chunk: ceil(ceil(n_elements / 8) / n_chunks)."""
        given = _whole("n_elements", n_elements), _count("n_chunks", n_chunks)
        return self._number(self.lib.gc_chunk_bytes, *given)

    def pack_chunks(self, src: Array, n_chunks: int) -> list[Tensor]:
        """Bools or integers of any shape to bits, a byte's highest first: n_chunks tensors, uint8 [chunk_bytes]."""
        return self._pack(self._raw.gc_pack_chunks, src, n_chunks)

    def unpack_chunks(self, chunks: Sequence[Array], n_elements: int) -> Tensor:
        """The inverse: bool [n_elements] of chunks, uint8 [chunk_bytes] each."""
        return self._unpack(self._raw.gc_unpack_chunks, chunks, _whole("n_elements", n_elements))

    def pack_bits(self, src: Array, axis: int | None = AXIS_NONE, order: int = BIG) -> Tensor:
        """numpy.packbits: bools or integers along an axis, or flattened, to a uint8 tensor."""
        return self._made(self._raw.gc_pack_bits, src, self._along(axis), self._order(order))

    def unpack_bits(
        self, src: Array, axis: int | None = AXIS_NONE, count: int | None = COUNT_ALL, order: int = BIG
    ) -> Tensor:
        """numpy.unpackbits: uint8 to 0 and 1, `count` of them along the axis; a negative count leaves some off."""
        bits = COUNT_ALL if count is None else _whole("count", count)
        return self._made(self._raw.gc_unpack_bits, src, self._along(axis), bits, self._order(order))

    def pack_chunks_into(self, src: Array, dst: Array, order: int = BIG, stream: Any = None) -> None:
        """pack_chunks() to `dst`: uint8 [n_chunks, chunk_bytes], C-contiguous; a row is a chunk."""
        self._into(self._raw.gc_pack_chunks_into, src, dst, stream, self._order(order))

    def unpack_chunks_into(self, src: Array, dst: Array, order: int = BIG, stream: Any = None) -> None:
        """Chunks, uint8 [n_chunks, chunk_bytes], to 0 and 1 in `dst`: any shape; bool, integers or floats."""
        self._into(self._raw.gc_unpack_chunks_into, src, dst, stream, self._order(order))

    def pack_bits_into(
        self, src: Array, dst: Array, axis: int | None = AXIS_NONE, order: int = BIG, stream: Any = None
    ) -> None:
        """pack_bits() to `dst`, uint8 of the shape that it would give."""
        self._into(self._raw.gc_pack_bits_into, src, dst, stream, self._along(axis), self._order(order))

    def unpack_bits_into(
        self, src: Array, dst: Array, axis: int | None = AXIS_NONE, order: int = BIG, stream: Any = None
    ) -> None:
        """unpack_bits() to `dst`: its length along the axis is the count; bool, integers or floats."""
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
        """The signs of floats of any shape to bits, in n_chunks tensors of uint8 [chunk_bytes]."""
        return self._pack(self._raw.gc_pack_signs, src, n_chunks)

    def unpack_signs(self, chunks: Sequence[Array], n_elements: int, dtype: Any = "float32") -> Tensor:
        """The inverse: +1 and -1, [n_elements] of `dtype`, a float or a signed integer."""
        return self._unpack(self._raw.gc_unpack_signs, chunks, _whole("n_elements", n_elements), _dtype(dtype))

    def pack_signs_into(self, src: Array, dst: Array, order: int = BIG, stream: Any = None) -> None:
        """pack_signs() to `dst`: uint8 [n_chunks, chunk_bytes], C-contiguous; a row is a chunk."""
        self._into(self._raw.gc_pack_signs_into, src, dst, stream, self._order(order))

    def unpack_signs_into(
        self, src: Array, dst: Array, scales: Array | None = None, order: int = BIG, stream: Any = None
    ) -> None:
        """Chunks, uint8 [n_chunks, chunk_bytes], to +scale and -scale in `dst`, floats of any shape.

        `scales`: none for +1 and -1 (a signed integer `dst` will do, then); or float32, one for all or one per chunk.
        """
        about, sources, frame = self._order(order), (src, dst, scales), _frame()
        try:
            handle = frame.read(stream, sources, _SRC_DST_SCALES)
            source, target, factors = frame.addresses(sources)
            self._check(self._raw.gc_unpack_signs_into(source, factors, about, target, handle))
        finally:
            frame.release()

    def vote_signs_into(self, src: Array, dst: Array, turn: int, stream: Any = None) -> None:
        """What most rows of `src`, uint8 [voters, bytes], have in each bit, to `dst`, uint8 [bytes].

        `turn`, the number of the step for example, says whose bit counts in a tie.
        """
        self._into(self._raw.gc_vote_signs_into, src, dst, stream, _whole("turn", turn, 0, 2**64 - 1))

    # --- tensors and copies

    def tensor_empty(self, shape: Sequence[int], dtype: Any, device: tuple[int, int] = (CPU, 0)) -> Tensor:
        """A new C-contiguous tensor, aligned to 256 bytes; what is in it is undefined."""
        lengths = _wholes("shape", shape)
        about = _device(device), _dtype(dtype), len(lengths), (c_int64 * len(lengths))(*lengths)
        return self.make(self.lib.gc_tensor_empty, *about)

    def tensor_to_device(self, src: Array, device: tuple[int, int]) -> Tensor:
        """A compact copy on that device, of any dtype, also where `src` is there already."""
        return self._made(self._raw.gc_tensor_to_device, src, _device(device))

    def copy_into(self, src: Array, dst: Array, stream: Any = None) -> None:
        """Copies `src`, broadcast as by NumPy and cast, to `dst`, of any strides, also between devices."""
        self._into(self._raw.gc_copy_into, src, dst, stream)

    # --- kernels

    def builtin_kernels(self, family: str) -> bytes:
        """The fatbin of a family, "bits" for example, to be loaded by cuModuleLoadData or cupy.RawModule."""
        fatbin, size = c_void_p(), c_size_t()
        self.lib.gc_builtin_kernels(_text("family", family), byref(fatbin), byref(size))
        return ctypes.string_at(fatbin, size.value)

    def builtin_kernel_shape(self, kernel: str, compute_capability: int) -> Any:
        """How to launch one of them on a GPU of 90, for example: a struct with threads, items_per_block and so on."""
        shape = KernelShape(ctypes.sizeof(KernelShape))
        capability = _int32("compute_capability", compute_capability)
        self.lib.gc_builtin_kernel_shape(_text("kernel", kernel), capability, byref(shape))
        return shape

    # fmt: off
    def elementwise(self, inputs: str, outputs: str, operation: str, name: str = "kernel", **more: Any) -> Kernel:
        """A kernel of CUDA code for each element, as CuPy's ElementwiseKernel takes it; see Kernel."""
        texts = {"inputs": inputs, "outputs": outputs, "operation": operation, "name": name, **more}
        return Kernel(self, self.lib.gc_elementwise_create, ElementwiseOptions, texts)
    def reduction(
        self, inputs: str, outputs: str, map: str, reduce: str, post_map: str, identity: str | None = None,
        name: str = "kernel", **more: Any,
    ) -> Kernel:
        """A reduction in CUDA code, as CuPy's ReductionKernel takes it; see Kernel."""
        texts = {"inputs": inputs, "outputs": outputs, "map": map, "reduce": reduce, "post_map": post_map, **more}
        texts.update(identity=identity, name=name)
        return Kernel(self, self.lib.gc_reduction_create, ReductionOptions, texts)
    # fmt: on

    # --- error feedback

    def onebit_workspace_bytes(self, n_elements: int) -> int:
        """Bytes of the workspace that onebit_compress_into() wants."""
        return self._number(self.lib.gc_onebit_workspace_bytes, _whole("n_elements", n_elements))

    def onebit_compress(self, grad: Array, error: Array | None, n_chunks: int) -> tuple[list[Tensor], float]:
        """Signs of gradient plus error, in n_chunks tensors of uint8 [chunk_bytes], and their scale.

        `grad`: float32, float16 or bfloat16. `error`: float32 or bfloat16, as many elements; what is lost now is
        written to it. None: it is not kept.
        """
        out, scale, frame = (T * _count("n_chunks", n_chunks))(), c_float(), _frame()
        try:
            frame.read(1, (grad, error), _ONEBIT)
            given = frame.addresses((grad, error))
            self._check(self._raw.gc_onebit_compress(*given, len(out), out, byref(scale)))
        finally:
            frame.release()
        return [Tensor(self, tensor) for tensor in out], scale.value

    def onebit_decompress(
        self, chunks: Sequence[Array], scales: Sequence[float], n_elements: int, dtype: Any = "float32"
    ) -> Tensor:
        """The inverse, less what was lost: [n_elements] of `dtype`; `scales`: numbers, one per chunk."""
        chunks, factors = _arrays("chunks", chunks), _arrays("scales", scales)
        if len(factors) != len(chunks):
            raise ValueError(f"scales: {len(chunks)} expected, one per chunk, got {len(factors)}")
        numbers = [_float32(f"scales[{k}]", factor) for k, factor in enumerate(factors)]
        of_chunks, about = (c_float * len(numbers))(*numbers), _dtype(dtype)
        elements = _whole("n_elements", n_elements)
        return self._unpack(self._raw.gc_onebit_decompress, chunks, of_chunks, elements, about)

    def onebit_compress_into(
        self, grad: Array, error: Array | None, dst: Array, scale: Array, workspace: Array, rule: int = RMS,
        stream: Any = None,
    ) -> None:  # fmt: skip
        """onebit_compress() to `dst`, uint8 [n_chunks, chunk_bytes], and `scale`, float32 [1].

        `workspace`: uint8, onebit_workspace_bytes() long, aligned to 16. `rule`: RMS or MEAN.
        """
        about, sources, frame = _int32("rule", rule), (grad, error, dst, scale, workspace), _frame()
        try:
            handle = frame.read(stream, sources, _ONEBIT)
            source, carried, *to = frame.addresses(sources)
            self._check(self._raw.gc_onebit_compress_into(source, carried, about, *to, handle))
        finally:
            frame.release()

    def codec(self, kind: int | str, segments: Sequence[int], **options: Any) -> Codec:
        """A codec, as "int8" or ONEBIT, for tensors of so many elements each; see Codec."""
        return Codec(self, kind, segments, **options)

    # --- other processes, and all-reduces

    def share_send(self, tensor: Array, socket: Any, flags: int = 0, timeout_ms: int = -1) -> Share:
        """Sends a tensor over a connected Unix socket (or its fileno()) to share_receive() in another process."""
        return Share(self, tensor, socket, flags, timeout_ms)

    def share_receive(self, socket: Any, device: tuple[int, int] = (CPU, 0), timeout_ms: int = -1) -> Tensor:
        """The tensor that comes next over a socket. Its release is what the sender waits for."""
        given = _socket(socket), _device(device), _int32("timeout_ms", timeout_ms)
        return self.make(self.lib.gc_share_receive, *given)

    def shard_elements(self, n_elements: int, world_size: int) -> int:
        """Elements of a rank's part in an all-reduce of n_elements."""
        given = _whole("n_elements", n_elements), _int32("world_size", world_size)
        return self._number(self.lib.gc_shard_elements, *given)

    def communicator(
        self, rank: int, world_size: int, all_to_all: Exchanger, all_gather: Exchanger
    ) -> Communicator:
        """A communicator over two functions of yours; see Communicator."""
        return Communicator(self, rank, world_size, all_to_all, all_gather)

    def group(self, world_size: int) -> list[Communicator]:
        """Communicators among threads of this process, by rank: one for each thread."""
        ranks = _int32("world_size", world_size)
        comms = (G * max(0, ranks))()
        self.lib.gc_comm_group(ranks, comms)
        return [Communicator._of(self, comm) for comm in comms]

    def nccl(
        self, comm: int, split: bool = False, dl_handle: int | None = None, timeout_ms: int = 0
    ) -> Communicator:
        """A communicator over an ncclComm_t, by its address, which must outlive it unless it is split."""
        wait = _whole("timeout_ms", timeout_ms, 0, 2**32 - 1)
        about = _address("comm", comm), _address("dl_handle", dl_handle), wait
        made, options = G(), NcclOptions(ctypes.sizeof(NcclOptions), int(bool(split)), *about)
        self.lib.gc_comm_from_nccl(byref(options), byref(made))
        return Communicator._of(self, made)

    def nccl_id(self, dl_handle: int | None = None) -> bytes:
        """The 128 bytes by which ranks find each other: made on one of them, for nccl_world() on all."""
        made, handle = (c_uint8 * 128)(), _address("dl_handle", dl_handle)
        options = NcclOptions(ctypes.sizeof(NcclOptions), 0, None, handle)
        self.lib.gc_comm_nccl_id(byref(options), made)
        return bytes(made)

    def nccl_world(
        self, of_all: bytes, rank: int, world_size: int, device: int, dl_handle: int | None = None, timeout_ms: int = 0
    ) -> Communicator:
        """A communicator over NCCL, made anew; `of_all`: what nccl_id() gave on one rank. Every rank calls this."""
        shown = _bytes("of_all", of_all)
        if len(shown) != 128:
            raise ValueError(f"of_all: the 128 bytes of nccl_id() expected, got {len(shown)}")
        about = _address("dl_handle", dl_handle), _whole("timeout_ms", timeout_ms, 0, 2**32 - 1)
        made, options = G(), NcclOptions(ctypes.sizeof(NcclOptions), 0, None, *about)
        given, numbers = (c_uint8 * 128)(*shown), (_int32("rank", rank), _int32("world_size", world_size))
        self.lib.gc_comm_from_nccl_id(byref(options), given, *numbers, _device((CUDA, device)), byref(made))
        return Communicator._of(self, made)

    def peers_bytes(self, n_elements: int, world_size: int) -> int:
        """Bytes of each rank's buffer for compressed_allreduce(), in open_peers() and peers()."""
        given = _whole("n_elements", n_elements), _int32("world_size", world_size)
        return self._number(self.lib.gc_peers_bytes, *given)

    def allreduce_peers_bytes(
        self, kind: int | str, segments: Sequence[int], world_size: int, **options: Any
    ) -> int:  # fmt: skip
        """The same for an all-reduce made with these arguments; for several of them the most counts."""
        given = byref(_options(kind, segments, options)), _int32("world_size", world_size)
        return self._number(self.lib.gc_allreduce_peers_bytes, *given)

    def peers(
        self, rank: int, buffers: Sequence[int], size: int, device: int, timeout_ms: int = 0
    ) -> Communicator:  # fmt: skip
        """A communicator over memory that the GPUs of one machine reach.

        `buffers`: the address of every rank's buffer as it is mapped here, `size` bytes each. Keep them as long.
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
        """The same over memory of the library's own, `size` bytes of each rank (the most of what allreduce_peers_bytes()
        and peers_bytes() say); the ranks find each other over any communicator, `bootstrap`."""
        made, wait = G(), _whole("timeout_ms", timeout_ms, 0, 2**32 - 1)
        about = _device((CUDA, device)), _whole("size", size), wait
        bootstrap._run(self._raw.gc_comm_open_peers, *about, byref(made))
        return Communicator._of(self, made)

    def hierarchical(self, intra_node: Communicator, inter_node: Communicator | None) -> Communicator:
        """A communicator of two levels: among the ranks of a node, and among those of one number on all nodes."""
        made = Communicator._of(self, G())
        made._parts = [part for part in (intra_node, inter_node) if part]  # whose functions are called
        made._raised = [raised for part in made._parts for raised in part._raised]
        out, create = G(), self._raw.gc_comm_hierarchical

        def within(intra: int) -> Any:
            if inter_node is None:
                return create(intra, None, byref(out))
            return inter_node._call_with(lambda inter: create(intra, inter, byref(out)))

        status = intra_node._call_with(within)
        if status:
            made._failed(status)
        made._own(self, out)
        return made
