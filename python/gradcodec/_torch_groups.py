"""Groups of torch.distributed as communicators, and all-reduce handles over them."""

import contextlib
import ctypes
import datetime
import functools
import math
import os
import pickle
import warnings
import weakref
from collections import OrderedDict
from ctypes import byref, c_bool, c_int32, c_uint8
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist

from . import _torch_nvlink
from ._abi import CODECS, CPU, CUDA, CUDA_HOST, ERRORS, HOST_MEMORY, G, TRANSACTIONAL, Transport
from ._arguments import _near, _said
from ._comms import Call, Communicator, Raised, server
from ._errors import GradCodecError
from ._library import GradCodec
from ._reading import _Parts
from ._torch_eager import eager
from ._torch_nodes import (
    Pairs, Watch, are_levels, by_pairs, describe, digest, nodes_of, over_nccl, own_node, run, warn_of_uneven,
)  # fmt: skip
from ._torch_states import objects_of_all

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
BAD = 1 | 2  # GC_FLAG_CORRUPT and GC_FLAG_NONFINITE
KEPT = 64
BY_PAIRS = 1 << 19  # bytes per rank from which on ranks exchange by messages between pairs over gloo
TAG = 0x67726164  # tag of messages between two ranks, which differs from the caller's tags
DEFAULT_TIMEOUT = 600.0  # seconds, as for NCCL in the library
SHORTEST, LONGEST = 1e-3, 4e6  # seconds, to which a timeout is bounded: PyTorch's clock overflows after some centuries
HINT_AFTER = 30.0  # seconds until a rank warns which ranks it waits for
MOST_PEERS, FIRST_ROOM = 64, 1 << 24  # ranks; bytes, enough for a payload of 4 MiB less headers

library = functools.cache(GradCodec)
_c10d: Any = dist.distributed_c10d  # not all of its options are public


def known_codec(codec: Any) -> str:
    if not isinstance(codec, str) or codec not in CODECS:
        hint = _near(codec, CODECS) if isinstance(codec, str) else ""
        raise ValueError(f"codec: one of {', '.join(CODECS)} expected, got {_said(codec)}{hint}")
    return codec


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raises a TypeError if no codec takes the tensor."""
    if hasattr(tensor, "device_mesh"):
        raise TypeError(f"{name}: a plain tensor expected, got a DTensor; to_local() gives this rank's part")
    if tensor.is_nested:
        raise TypeError(f"{name}: a dense tensor expected, got a nested one")
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").removeprefix("_")
        raise TypeError(f"{name}: a dense tensor expected, got one in {layout}; to_dense() makes one")
    if tensor.dtype not in DTYPES:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{name}: float32, float16 or bfloat16 expected, got {dtype}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{name}: a tensor on the CPU or on a CUDA GPU expected, got one on {tensor.device}")


def process_group(group: Any) -> Any:
    """Returns the group itself; None: the default group."""
    if not dist.is_initialized():
        raise RuntimeError("group: torch.distributed.init_process_group() has to come first")
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: a process group that this rank belongs to expected, got {_said(group)}")
    if group.size() < 2:
        raise ValueError(f"group: at least 2 ranks expected, got {group.size()}")
    return group


def number_of(stream: Any) -> int:
    """Returns the handle of a PyTorch stream for C; None: the CPU."""
    return 1 if stream is None else int(stream.cuda_stream) or 1


def seconds(timeout: Any) -> datetime.timedelta | None:
    if timeout is None:
        return None
    given = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < math.inf:
        raise TypeError(f"timeout: seconds or a timedelta above 0 expected, got {_said(timeout)}")
    return datetime.timedelta(seconds=min(max(given, SHORTEST), LONGEST))


class _Memory:
    """GPU memory that PyTorch does not own, for torch.as_tensor(), which does not copy it."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": (size,), "typestr": "|u1", "version": 2}


@torch.inference_mode(False)  # inference tensors cannot be written to outside inference mode
def _at(pointer: int, size: int, device: Any) -> torch.Tensor:
    """Returns the bytes at a pointer as a tensor."""
    if device.device_type in (CPU, CUDA_HOST):
        return torch.frombuffer((c_uint8 * size).from_address(pointer), dtype=torch.uint8)
    return torch.as_tensor(_Memory(pointer, size), device=torch.device("cuda", device.device_id))


class Turns:
    """Orders the work of several streams of a GPU that use the same memory. Work on a CPU needs no order. The launcher
    of a graph orders captured work."""

    _last: Any = None  # the stream of the last end(), and the event recorded on it
    _done: Any = None

    def begin(self, device: torch.device) -> Any:
        """Returns the current stream, which waits for another stream's work before the last end(); None on a CPU."""
        if device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(device)
        if self._done is None:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        elif stream != self._last and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._done)
        return stream

    def end(self, stream: Any) -> None:
        """Marks the end of the calls on a stream."""
        if stream is not None and not torch.cuda.is_current_stream_capturing():
            self._last = stream
            self._done.record(stream)


class Turn:
    """Calls of one `with`, which gives the number of the current stream."""

    def __init__(self, turns: Turns, device: torch.device) -> None:
        self._turns, self._stream = turns, turns.begin(device)
        self.stream_number = number_of(self._stream)

    def __enter__(self) -> int:
        return self.stream_number

    def __exit__(self, *_: Any) -> None:
        self._turns.end(self._stream)


class Peers:
    """Peer memory of the GPUs of one node, for all handles over a process group, which use it one after the other.

    It consists of communicators, each with more room than the one before. They stay as long as the group: other ranks
    write to this rank's memory until their last call.
    """

    def __init__(self, bootstrap: Communicator, device: int, timeout_ms: int) -> None:
        self._bootstrap, self._about, self._room, self.turns = bootstrap, (device, timeout_ms), 0, Turns()
        self.comms: list[Communicator] = []
        self.comm(FIRST_ROOM)

    def comm(self, size: int) -> Communicator:
        """Returns a communicator with at least `size` bytes. Every rank calls this, with the same number."""
        if size > self._room:
            device, timeout_ms = self._about
            room = max(size, 2 * self._room)
            self.comms.append(library().open_peers(self._bootstrap, device, room, timeout_ms))
            self._room = room
        return self.comms[-1]

    def handles(self) -> list[int]:
        """Returns the addresses of all communicators whose failures check() raises."""
        return [comm._open() for comm in self.comms]

    def check(self) -> None:
        """Raises failures of enqueued work, such as a rank that did not arrive."""
        for comm in self.comms:
            comm.async_error()


def _done(work: Any) -> None:
    """Waits for a collective; None: it is on the current stream already."""
    if work is not None:
        work.wait()


class Group:
    """A process group, and a communicator over its all_to_all and all_gather.

    Over NCCL, tensors on a GPU are sent from GPU to GPU, on the current stream; over other backends through host
    memory; with `peers` through peer memory. `direct`: a communicator over PyTorch's ncclComm_t, whose exchanges
    PyTorch does not see. `bytes_sent`: bytes that this rank has sent.
    """

    peers: Peers | None = None
    direct: Communicator | None = None
    levels: "Levels | None" = None
    own: Communicator | None = None  # set by take_own(); over NCCL `watch` watches it
    watch: Watch | None = None
    pairs: Pairs | None = None  # transport of `own` over gloo
    nodes: list[list[int]] | None = None  # the ranks of each node, once they are found
    topology = ""

    def __init__(
        self, group: Any, device: torch.device, timeout: Any = None, through_host: bool = False, in_turns: bool = False
    ) -> None:  # fmt: skip
        """`in_turns`: handles run on the caller's streams, in turns. They do not share peer memory with the hooks."""
        self.group, self.device, self.timeout, self._tag = group, device, seconds(timeout), TAG
        self.in_turns, self._turns = in_turns, Turns()
        self.rank, self.size, self.bytes_sent = group.rank(), group.size(), 0
        self.place = (CUDA, device.index) if device.type == "cuda" else (CPU, 0)
        kinds = dist.get_backend_config(group)
        self._takes_host = "cpu" in kinds
        self.over_gpus = device.type == "cuda" and "cuda:nccl" in kinds and not through_host
        if not self.over_gpus and not self._takes_host:
            raise ValueError(f"group: its backend, {kinds}, does not exchange tensors on {device}")
        self._to_all = getattr(group, "all_to_all_single", None) or group.alltoall_base
        self._gather = getattr(group, "all_gather_single", None) or group._allgather_base
        self._over_gloo = not self.over_gpus and "cpu:gloo" in kinds
        self._of_all_to_all = self._options(dist.AllToAllOptions)
        self._of_gather = self._options(_c10d.AllgatherOptions)
        self._tensors: dict[tuple[int, int, int, int], torch.Tensor] = {}  # views of memory of the library
        raised = Raised()
        functions = [server(perform, raised, resumes=True) for perform in (self._all_to_all, self._all_gather)]
        flags = 0 if self.over_gpus else HOST_MEMORY
        transport, made = Transport(ctypes.sizeof(Transport), self.rank, self.size, flags, None, *functions), G()
        library().lib.gc_comm_from_transport(byref(transport), byref(made))
        self.comm = Communicator._of(library(), made, raised)
        self.comm._transport = transport  # handles keep it alive with the communicator

    def _find_nodes(self) -> list[list[int]]:
        """Returns the ranks of each node. Every rank calls this."""
        names = torch.zeros(self.size, 32, dtype=torch.int32, device=self.device)
        names[self.rank] = torch.tensor(digest(own_node()), dtype=torch.int32)
        return nodes_of([tuple(name) for name in self.over_all(names).tolist()])

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_topology(
        self, transport: str, codec: str, nodes: list[list[int]] | None = None, direct: bool = True
    ) -> None:  # fmt: skip
        """Finds which ranks share a node, and chooses the communicators of handles. Every rank calls this.

        `nodes`: the result of an earlier search; None: searches now. `direct`: sets `direct`, if possible.
        """
        self.nodes = nodes or self._find_nodes()
        levels = are_levels(self.nodes) and transport in ("auto", "nccl", "gloo") and codec != "sign"
        if levels:
            self.levels = Levels(self, self.nodes, transport)
        else:
            if transport == "auto" and codec != "sign" and nodes is None:
                warn_of_uneven(self.nodes)
            # Peer memory is within a node. With several nodes it is tried only on request.
            if len(self.nodes) == 1 or transport == "peers":
                self.take_peers("auto" if transport == "flat" else transport)
            if direct:
                self.take_direct()
        over = "NCCL" if self.over_gpus else "gloo"
        within = over
        if (self.levels or self).peers is not None:
            within = "peer memory"
        elif transport == "auto" and self.device.type == "cuda" and (levels or len(self.nodes) == 1):
            within += ", because its GPUs do not all reach each other over NVLink"
        self.topology = describe(self.nodes, levels, within, over)

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_own(self, codec: str) -> None:
        """Creates communicators that nothing else uses, so that handles may run on another thread, beside other work of
        the process group. Every rank calls this, instead of take_topology()."""
        over, self._tag = "nccl" if self.over_gpus else "gloo", kept(self.group).new_tag()
        self.nodes, everyone = self._find_nodes(), [*range(self.size)]
        levels = are_levels(self.nodes) and codec != "sign"
        if levels:
            self.levels = Levels(self, self.nodes, over, self._tag)
        elif self.over_gpus:
            self.own = over_nccl(library(), self.group, everyone, self.place[1], self._milliseconds())
            self.watch = Watch([self.own], self._milliseconds() / 1000 or DEFAULT_TIMEOUT)
            weakref.finalize(self, self.watch.stop)
        else:
            self.pairs = Pairs(library(), self.group, everyone, self._tag, self.timeout, self._at, True)
            self.own = self.pairs.comm
        self.topology = describe(self.nodes, levels, *2 * ["NCCL" if self.over_gpus else "gloo"])

    def complete(self, steps: Any) -> None:
        """Completes a run that has failed on this rank. The communicator of take_own() counts its exchanges."""
        if self.pairs is not None:
            self.pairs.complete(steps.exchanges, steps.sent_bytes // (steps.exchanges * (self.size - 1)))

    def told(self, own: Any) -> list[Any]:
        """Returns a small object of every rank, by rank. If a rank is lost, this raises on all others. Every rank calls
        this after take_own()."""
        if self.over_gpus:
            return objects_of_all(self.group, own)
        given = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        sizes = self._each_to_all(torch.tensor([given.numel()], device="cpu")).flatten().tolist()
        room = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        room[: given.numel()] = given
        rows = self._each_to_all(room)
        return [pickle.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes)]

    def _each_to_all(self, own: torch.Tensor) -> torch.Tensor:
        """Returns a row of each rank, sent by messages with a tag that nothing else uses."""
        call, to, given = Call(), own.new_empty(self.size, own.numel()), own.expand(self.size, -1)
        call.started, call.ended = [], []
        by_pairs(call, self.group, range(self.size), self.rank, to, given, self._tag + 3, self.timeout, to_the_end=True)
        return to

    def shard_numbers(self) -> list[int]:
        """Returns, by rank, the number of its shard of a handle, in the order of elements."""
        if self.levels is None or self.nodes is None:
            return [*range(self.size)]
        nodes = self.nodes
        numbers = {rank: at * len(nodes) + node for node, its in enumerate(nodes) for at, rank in enumerate(its)}
        return [numbers[rank] for rank in range(self.size)]

    def over_node(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks of this node if handles sum within nodes first; otherwise `tensor`."""
        if self.levels is None:
            return tensor
        own = tensor if self.over_gpus else tensor.cpu()
        rows = {rank: own if rank == self.rank else torch.empty_like(own) for rank in self.levels.ranks}
        work: list[Any] = []
        for rank, row in rows.items():
            if rank != self.rank:
                peer = dist.get_global_rank(self.group, rank)
                work.append(dist.P2POp(dist.irecv, row, peer, self.group, TAG))
                work.append(dist.P2POp(dist.isend, own, peer, self.group, TAG))
        for each in dist.batch_isend_irecv(work):
            each.wait()
        total = torch.zeros_like(own)
        for row in rows.values():
            total += row
        return total.to(self.device)

    def check(self) -> None:
        """Raises failures of enqueued exchanges, such as a rank that did not take part."""
        over = self.levels or self.watch or self.peers
        if over is not None:
            over.check()

    def take_peers(self, transport: str) -> None:
        """Makes handles use peer memory if `transport` is "peers", or if it is "auto" and every rank can access the
        memory of all others. Every rank calls this."""
        could = transport == "auto" and self.device.type == "cuda" and self.size <= MOST_PEERS
        if transport != "peers" and not could:
            return
        known, key = kept(self.group).peers, (self.device, self.timeout, self.in_turns)
        if known.get(key) is None and (transport == "peers" or key not in known):
            known[key] = None
            if transport == "auto" and not self.linked([[*range(self.size)]]):
                return
            try:
                known[key] = Peers(self.comm, self.place[1], self._milliseconds())
            except GradCodecError:  # on all ranks
                if transport == "peers":
                    raise
        self.peers = known[key]
        if self.peers is not None:
            self._turns = self.peers.turns

    def linked(self, nodes: list[list[int]]) -> bool:
        """Returns whether every two GPUs of a node are the same or have NVLink, on all nodes. Every rank calls this."""
        uuids = torch.zeros(self.size, 16, dtype=torch.int32, device=self.device)
        uuids[self.rank] = torch.tensor(list(_torch_nvlink.uuid_of(self.place[1])), dtype=torch.int32)
        found = [bytes(row) for row in self.over_all(uuids).tolist()]
        own = next(its for its in nodes if self.rank in its)
        answer = _torch_nvlink.are_linked([found[rank] for rank in own], self.place[1])
        agreed = self.over_all(torch.tensor([int(answer)], device=self.device), dist.ReduceOp.MIN)
        return bool(agreed.item())

    def take_direct(self) -> None:
        """Sets `direct` if every rank can. Every rank calls this."""
        if not self.over_gpus or self.peers is not None:
            return
        own = torch.ones(1, device=self.device)
        self.over_all(own)  # PyTorch makes its communicator with the first collective
        made = None
        with torch.cuda.device(self.device), contextlib.suppress(AttributeError, OSError, RuntimeError):
            self._address = self.group._get_backend(self.device)._comm_ptr  # PyTorch >= 2.9; of the current device
            # Uses the NCCL of PyTorch's own library, even if another NCCL is loaded.
            with_nccl = ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libtorch_cuda.so"))
            self._direct_at = self._address()
            made = library().nccl(self._direct_at, dl_handle=with_nccl._handle, timeout_ms=self._milliseconds())
        own.fill_(made is not None)
        if self.over_all(own, dist.ReduceOp.MIN).item():
            self.direct = made

    def check_direct(self) -> None:
        """Raises if PyTorch's communicator is gone, as PyTorch's own collectives would."""
        if self._address() != self._direct_at:
            raise RuntimeError("group: its communicator of NCCL, over which gradients were exchanged, is gone")

    def _milliseconds(self) -> int:
        """Returns the timeout in milliseconds; 0 if PyTorch does not give the group's own."""
        timeout = self.timeout
        if timeout is None:
            try:
                timeout = self.group._get_backend(self.device).options._timeout
            except (AttributeError, RuntimeError):  # an older PyTorch, or a group for host memory alone
                return 0
        return min(2**32 - 1, max(1, int(timeout.total_seconds() * 1000)))

    def comm_for(self, codec: str, sizes: Sequence[int], options: dict[str, Any], direct: bool) -> Communicator:
        """Returns the communicator of an all-reduce with these options. Every rank calls this."""
        if self.levels is not None:
            return self.levels.comm_for(codec, sizes, options)
        if self.own is not None:
            return self.own
        if self.peers is None:
            return self.direct if direct and self.direct is not None else self.comm
        return self.peers.comm(library().allreduce_peers_bytes(codec, sizes, self.size, **options))

    def _options(self, kind: Any) -> Any:
        options = kind()
        if self.timeout is not None:
            options.timeout = self.timeout
        if hasattr(options, "asyncOp"):  # otherwise NCCL uses a stream of its own, which costs two waits
            options.asyncOp = False
        return options

    @eager  # compiled code reaches this function through the hook in C++
    def _all_to_all(self, call: Call) -> None:
        def collective(to: torch.Tensor, given: torch.Tensor) -> Callable[[], Any]:
            return functools.partial(self._to_all, to, given, [], [], self._of_all_to_all)

        self._exchange(collective, self.size * call.size, call)

    @eager
    def _all_gather(self, call: Call) -> None:
        def collective(to: torch.Tensor, given: torch.Tensor) -> Callable[[], Any]:
            return functools.partial(self._gather, to, given, self._of_gather)

        self._exchange(collective, call.size, call)

    def _at(self, pointer: int, size: int, device: Any) -> torch.Tensor:
        """Returns the bytes at a pointer as a tensor, which is kept: every call exchanges the same memory."""
        key = pointer, size, device.device_type, device.device_id
        known = self._tensors.get(key)
        if known is None:
            if len(self._tensors) == 1024:  # far more than the handles of a model have
                self._tensors.clear()
            self._tensors[key] = known = _at(pointer, size, device)
        return known

    def _exchange(self, collective: Callable[..., Any], sent: int, call: Call) -> None:
        size = call.size
        to, given = self._at(call.recv, self.size * size, call.device), self._at(call.send, sent, call.device)
        if self._over_gloo and size >= BY_PAIRS:
            # gloo's collectives, one after the other, leave a slow link idle for up to a quarter of the time. For small
            # rows collectives take less CPU time.
            rows, ranks = given.view(-1, size).expand(self.size, size), range(self.size)
            by_pairs(call, self.group, ranks, self.rank, to.view(-1, size), rows, TAG, self.timeout)
        elif to.is_cuda or self._takes_host:
            run(call, [collective(to, given)], None)
        else:  # the few bytes that create a handle, over NCCL alone
            if call.started:
                call.is_broken = True
                raise RuntimeError("the exchange was interrupted")
            on_gpu = torch.empty_like(to, device=self.device)
            call.started.append(None)
            _done(collective(on_gpu, given.to(self.device))())
            to.copy_(on_gpu)
            call.ended.append(None)
        self.bytes_sent += (self.size - 1) * size

    def turn(self) -> Turn:
        """Returns a context for calls of handles on the current stream. A handle, and the memory that handles share,
        serve one stream at a time."""
        return Turn(self._turns, self.device)

    def on_one(self, here: bool) -> bool:
        """Returns whether `here` is true on at least one rank."""
        return bool(self.over_all(torch.tensor([int(here)], device=self.device), dist.ReduceOp.MAX).item())

    def over_all(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Runs an all-reduce without a codec, in place."""
        options = self._options(dist.AllreduceOptions)
        options.reduceOp = op
        _done(self.group.allreduce([tensor], options))
        return tensor


def check_transport(transport: Any, group: Group) -> None:
    """Raises a ValueError if the group does not have this transport."""
    if transport not in ("auto", "flat", "peers", "nccl", "gloo"):
        raise ValueError(f"transport: one of auto, flat, peers, nccl, gloo expected, got {_said(transport)}")
    if transport == "peers" and group.device.type != "cuda":
        raise ValueError(f"transport: peers is for tensors on the GPUs of one node; this is on {group.device}")
    if transport == "nccl" and not group.over_gpus:
        kinds = dist.get_backend_config(group.group)
        raise ValueError(f"transport: nccl is for tensors on a GPU over NCCL; these are on {group.device} over {kinds}")


def agree(call: str, group: Group, settings: dict[str, Any], own: Any = None) -> list[Any]:
    """Raises a ValueError, on every rank, if settings differ between ranks. Returns `own` of every rank. Every rank
    calls this, in the same `call`."""
    everywhere = objects_of_all(group.group, ({"call": call, **settings}, own))
    first = everywhere[0][0]
    for rank, (its, _) in enumerate(everywhere):
        for name in {**first, **its}:
            one, other = first.get(name), its.get(name)
            if one != other:
                raise ValueError(f"{name}: {one!r} on rank 0 and {other!r} on rank {rank}, not the same")
    return [own for _, own in everywhere]


def await_all(call: str, group: Group) -> None:
    """Waits until every rank has made this call, and names the ranks that have not. It must precede the first
    collective, in which a single rank would block silently, and work that takes a rank long."""
    known = kept(group.group)
    try:
        store = _c10d._get_process_group_store(group.group)
    except (AttributeError, KeyError):  # another version of PyTorch
        return
    keys = [f"gradcodec/{known.agreed}/{rank}" for rank in range(group.size)]
    store.set(keys[group.rank], call)
    limit = (group._milliseconds() or 1000 * DEFAULT_TIMEOUT) / 1000
    who = _absent(store, keys, min(HINT_AFTER, limit))
    if who and limit > HINT_AFTER:
        warnings.warn(f"{call} waits for {who}, and every rank has to call it", stacklevel=3)
        who = _absent(store, keys, limit - HINT_AFTER)
    if who:
        raise RuntimeError(f"{call}: every rank has to call it, and within {limit:g} s it was not called on {who}")
    known.agreed += 1


def _absent(store: Any, keys: Sequence[str], wait: float) -> str:
    """Returns the ranks that have not set their keys within `wait` seconds; "": none."""
    try:
        store.wait(keys, datetime.timedelta(seconds=wait))
        return ""
    except RuntimeError:  # a timeout, unless the store has failed, which check() raises
        ranks = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    return f"ranks {', '.join(ranks[:8])}{' and others' if len(ranks) > 8 else ''} of the group" if ranks else ""


class Levels:
    """Communicators within the node and between nodes, and the hierarchical one over both.

    `ranks`: ranks of the group on this node. `peers`: their peer memory, if they have it.
    """

    def __init__(self, group: Group, nodes: list[list[int]], transport: str, tag: int = TAG) -> None:
        node = next(number for number, ranks in enumerate(nodes) if group.rank in ranks)
        self.ranks, place = nodes[node], nodes[node].index(group.rank)
        across = [ranks[place] for ranks in nodes]
        self.peers: Peers | None = None
        self._nodes, self._timeout_ms = len(nodes), group._milliseconds()
        self._within: Communicator | None = None
        self._over: Communicator | None = None
        self._kept: list[Any] = []
        self.watch: Watch | None = None
        if group.over_gpus:
            device = group.place[1]
            self._own = over_nccl(library(), group.group, self.ranks, device, self._timeout_ms)
            self._between = over_nccl(library(), group.group, across, device, self._timeout_ms)
            self.watch = Watch([self._own, self._between], self._timeout_ms / 1000 or DEFAULT_TIMEOUT)
        else:
            own, between = (
                Pairs(library(), group.group, each, tag, group.timeout, group._at)
                for each, tag in ((self.ranks, tag + 1), (across, tag + 2))
            )
            self._kept, self._own, self._between = [own, between], own.comm, between.comm
        if transport == "auto" and group.device.type == "cuda" and group.linked(nodes):
            reached = 1
            try:
                self.peers = Peers(self._own, group.place[1], self._timeout_ms)
            except GradCodecError:  # on all ranks of this node
                reached = 0
            # All nodes use peer memory or none does, so that all ranks create the same communicators.
            everywhere = group.over_all(torch.tensor([reached], device=group.device), dist.ReduceOp.MIN).item()
            if not everywhere:
                self.peers = None

    def __del__(self) -> None:
        watch: Watch | None = getattr(self, "watch", None)  # None where a communicator could not be made
        if watch is not None:
            watch.stop()

    def handles(self) -> list[int]:
        """Returns the addresses of all communicators whose failures check() raises."""
        over = self.watch or self.peers
        return [] if over is None else over.handles()

    def check(self) -> None:
        """Raises failures of enqueued exchanges, such as a rank that did not take part."""
        over = self.watch or self.peers  # a watch covers the communicators over peer memory, too
        if over is not None:
            over.check()

    def comm_for(self, codec: str, sizes: Sequence[int], options: dict[str, Any]) -> Communicator:
        """Returns the communicator of an all-reduce with these options. Every rank calls this."""
        within = self._own
        if self.peers is not None:
            room = library().allreduce_peers_bytes(codec, sizes, len(self.ranks), self._nodes, **options)
            within = self.peers.comm(room)
            if self.watch is not None and within is not self._within:
                self.watch.add(within)
        if self._over is None or within is not self._within:
            self._within, self._over = within, library().hierarchical(within, self._between)
        return self._over


class Handle:
    """An all-reduce of tensors of one dtype on the device of its group, in place.

    `sizes`: their element counts. `raw`: for each, whether it is a raw segment; empty: none. `direct`: PyTorch need not
    track this all-reduce, because it tracks later work, and ends the process if a rank is lost. `in_memory`: the
    numbers of the tensors in the order in which they lie in the buffers of run_within() and of the halves, which is
    also the order of their errors; empty: their own order.
    """

    def __init__(
        self, group: Group, codec: str, sizes: Sequence[int], dtype: torch.dtype, *, error: str = "none",
        raw: Sequence[bool] = (), op: str = "mean", transactional: bool = False, direct: bool = False,
        in_memory: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.group, self.codec, self.sizes, self.dtype, self.raw = group, codec, list(sizes), dtype, list(raw)
        self.watch = group.watch if group.levels is None else group.levels.watch
        self.has_errors, device = error != "none" and codec != "sign", group.device
        self.carries = False  # true if errors may not be 0
        self._factor = float(group.size) if (op, codec) == ("sum", "sign") else None  # the majority times the ranks
        self._in_memory = list(in_memory) or [*range(len(self.sizes))]
        self._within = _Parts(self.sizes, DTYPES[dtype], group.place, self._in_memory)
        self._each = [1] * len(self.sizes)
        self._value_factor = _Parts([1], "float32", group.place)
        self.options: dict[str, Any] = {"values": DTYPES[dtype]}
        if device.type == "cuda":
            self.options["device"] = group.place
        if any(self.raw):
            self.options["raw"] = self.raw
        # Without errors there is nothing to roll back, and the flags are the same.
        self.pends = transactional and self.has_errors
        more: dict[str, Any] = {"nonfinite": TRANSACTIONAL} if self.pends else {}
        if codec != "sign":
            more["error"] = ERRORS[error]
        if op == "sum" and codec != "sign":
            more["reduction"] = "sum"
        # A flat sum divides a single row of errors by the ranks; multiplying by a power of two first is exact.
        self._factor_of_errors = group.size if "reduction" in more and group.levels is None else 1
        all_options = {**self.options, **more}
        comm = group.comm_for(codec, self.sizes, all_options, direct)
        self.is_direct = comm is group.direct
        self.steps = comm.allreduce(codec, self.sizes, **all_options)
        self._shard = _Parts([self.steps.shard_elements], "float32", group.place)
        # The group counts the bytes of its own functions.
        self.sent = 0 if comm is group.comm else self.steps.sent_bytes
        self._sent_by_halves = self._sent_by_each_half()

    def _sent_by_each_half(self) -> tuple[int, int]:
        """Returns the bytes of each half. A half sends a chunk to each rank: a two-shot run does so twice, a one-shot
        run sends all chunks. Over nodes the first half also sends values within the node: a part to each rank, with a
        header. The second half sends all chunks of a part there."""
        levels, between = self.group.levels, self.steps.sent_between_nodes
        if levels is None or between is None:
            return 2 * (self.sent // (2 if self.steps.exchanges == 2 else self.group.size),)
        ranks = len(levels.ranks)
        part = max(sum(its[2] for its in self.steps.parts(rank, "worker")) for rank in range(ranks))
        values = (ranks - 1) * (-(-(64 + part * self.dtype.itemsize) // 16) * 16)
        chunks = between // (2 if self.steps.exchanges == 2 else self.group.size // ranks)
        return values + chunks, self.sent - between - values + chunks

    def stream(self) -> Any:
        device = self.group.device
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run(self, tensors: Sequence[torch.Tensor], stream: int) -> None:
        """Runs on the current stream, which has this number."""
        flat = [tensor.contiguous() for tensor in tensors]
        self.run_within_each(flat, self._each, stream)
        torch.autograd.graph.increment_version(flat)  # backward() then refuses a tensor that autograd has saved
        for tensor, reduced in zip(tensors, flat):
            if reduced is not tensor:
                tensor.copy_(reduced)

    def run_within(self, buffer: torch.Tensor, stream: int) -> None:
        """Runs on a contiguous tensor that holds the tensors one after the other. Reads only its address."""
        self._run_at(self._within.at(buffer.data_ptr()), [buffer], stream)

    def run_within_each(self, buffers: Sequence[torch.Tensor], numbers: Sequence[int], stream: int) -> None:
        """Runs on several buffers. Each holds as many of the handle's tensors as `numbers` has."""
        addresses = [each.data_ptr() for each in buffers]
        self._run_at(self._within.at_each(addresses, numbers), buffers, stream)

    def _run_at(self, parts: _Parts, buffers: Sequence[torch.Tensor], stream: int) -> None:
        if self.is_direct:
            self.group.check_direct()
        steps = self.steps
        steps._run(steps._raw.gc_allreduce_run, parts.list, parts.count, None, None, stream)
        self.carries = self.has_errors
        self.enqueued()
        self.group.bytes_sent += self.sent
        if self._factor is not None:
            torch._foreach_mul_(list(buffers), self._factor)

    def reduce_scatter_within(
        self, buffer: torch.Tensor, shard: torch.Tensor, stream: int, value_factor: torch.Tensor | None = None
    ) -> None:
        """Runs the first half: writes the mean or sum of this rank's part, in float32, to a contiguous tensor.
        `value_factor`: one float32, by which `buffer` is multiplied first."""
        steps, parts = self.steps, self._within.at(buffer.data_ptr())
        factor = None if value_factor is None else self._value_factor.at(value_factor.data_ptr()).places[0]
        others = factor, None, self._shard.at(shard.data_ptr()).places[0]
        steps._run(steps._raw.gc_allreduce_reduce_scatter, parts.list, parts.count, *others, stream)
        self.carries = self.has_errors
        self.enqueued()
        self.group.bytes_sent += self._sent_by_halves[0]
        if self._factor is not None:
            shard.mul_(self._factor)

    def all_gather_within(self, shard: torch.Tensor, buffer: torch.Tensor, stream: int) -> None:
        """Runs the second half: writes the parts of all ranks to a contiguous tensor. `shard`: this rank's part,
        contiguous float32."""
        steps, parts, place = self.steps, self._within.at(buffer.data_ptr()), self._shard.at(shard.data_ptr()).places[0]
        steps._run(steps._raw.gc_allreduce_all_gather, place, parts.list, parts.count, stream)
        self.enqueued()
        self.group.bytes_sent += self._sent_by_halves[1]

    def enqueued(self) -> None:
        """Makes the watch expect the run that was enqueued on the current stream."""
        if self.watch is not None:
            self.watch.expect()

    def rollback(self) -> None:
        if self.pends:
            self.steps.rollback(stream=self.stream())

    def commit(self, skip: int, stream: int) -> None:
        """`skip`: the address of the DLTensor of a bool."""
        if self.pends:
            self.steps._run(self.steps._raw.gc_allreduce_commit, skip, stream)

    def errors(self) -> tuple[list[torch.Tensor], list[tuple[int, int, torch.Tensor]]]:
        """Returns the worker errors of each tensor, and the server errors of each part that this rank reduces: the
        number of the tensor, the first element, the errors."""
        mine = self.steps.parts(self.group.rank)
        worker = torch.empty(sum(self.sizes), dtype=torch.float32, device=self.group.device)
        server = torch.empty(sum(count for *_, count in mine), dtype=torch.float32, device=self.group.device)
        self.steps.errors_out(worker, server, stream=self.stream())
        pieces = torch.split_with_sizes(server, [count for *_, count in mine])
        places = dict(zip(self._in_memory, range(len(self.sizes))))
        parts = [(places[tensor], first, piece) for (tensor, first, _), piece in zip(mine, pieces)]
        workers = torch.split_with_sizes(worker, self.sizes)
        return [workers[number] for number in self._in_memory], parts

    def take_errors(self, worker: torch.Tensor | None = None, server: torch.Tensor | None = None) -> None:
        """Sets the errors of all elements; None: keeps them."""
        self.carries = True
        if worker is not None:
            worker = self._in_own_order(worker)
            if self._factor_of_errors > 1:
                worker = worker * self._factor_of_errors
            self.steps.errors_in(worker.view(1, -1), None, stream=self.stream())
        if server is not None:
            self.steps.errors_in(None, self._in_own_order(server), stream=self.stream())

    def multiply_errors(self, factor: torch.Tensor | float) -> None:
        """Multiplies the errors by one float32, without communication."""
        if not self.carries:
            return
        workers, parts = self.errors()
        server = torch.zeros(sum(self.sizes), dtype=torch.float32, device=self.group.device)
        reduced = torch.split_with_sizes(server, [each.numel() for each in workers])
        for number, first, part in parts:
            reduced[number][first : first + part.numel()] = part * factor
        self.take_errors(torch.cat(workers) * factor, server)

    def _in_own_order(self, errors: torch.Tensor) -> torch.Tensor:
        if self._in_memory == [*range(len(self.sizes))]:
            return errors
        pieces = torch.split_with_sizes(errors, [self.sizes[number] for number in self._in_memory])
        return torch.cat([piece for _, piece in sorted(zip(self._in_memory, pieces), key=lambda one: one[0])])


class Verdict:
    """Decision, on the device, whether to roll back a step of several handles: if one of them found a non-finite value
    or a corrupt payload. The host does not wait for it."""

    @torch.inference_mode(False)
    def __init__(self, group: Group, handles: int) -> None:
        self.handles = handles
        self._flags, self._bad = (torch.zeros(handles, dtype=torch.int32, device=group.device) for _ in range(2))
        self.undone = torch.zeros(1, dtype=torch.bool, device=group.device)  # may be changed until carry_out()
        self._of_flags = _Parts([1] * handles, "uint32", group.place).at(self._flags.data_ptr())
        self._of_undone = _Parts([1], "bool", group.place).at(self.undone.data_ptr())
        # On a CPU ctypes reads the flags: the smallest operation of PyTorch takes longer than all of this.
        self._here: tuple[Any, c_bool] | None = None
        if group.device.type == "cpu":
            flags = (c_int32 * handles).from_address(self._flags.data_ptr())
            self._here = flags, c_bool.from_address(self.undone.data_ptr())

    def ask(self, handles: Sequence[Handle], stream: int) -> None:
        for handle, place in zip(handles, self._of_flags.places):
            steps = handle.steps
            steps._run(steps._raw.gc_allreduce_flags, place, stream)
        if self._here:
            flags, undone = self._here
            undone.value = any([flag & BAD for flag in flags])
        else:
            torch.bitwise_and(self._flags, BAD, out=self._bad)
            torch.any(self._bad, 0, True, out=self.undone)

    def carry_out(self, handles: Sequence[Handle], stream: int) -> None:
        for handle in handles:
            handle.commit(self._of_undone.places[0], stream)

    def count(self, taken_back: torch.Tensor) -> None:
        if not self._here or self._here[1].value:
            taken_back += self.undone


# --- state of a process group ----------------------------------------------------------------------------------------


class _Kept:
    """State of a process group: `peers`, None if the ranks cannot access each other's memory, and at most KEPT objects
    of all_reduce(). The least recently used object goes first, on all ranks alike, because all ranks make the same
    calls."""

    def __init__(self, group: Any) -> None:
        self._group = group
        # A group is freed with its last handle.
        self._groups: weakref.WeakValueDictionary[Any, Group] = weakref.WeakValueDictionary()
        self._nodes: list[list[int]] | None = None
        self.handles: OrderedDict[Any, Any] = OrderedDict()
        self.peers: dict[Any, Peers | None] = {}
        self.agreed = 0  # number of times that its ranks have compared settings
        self._tag = TAG

    def new_tag(self) -> int:
        """Returns a tag of messages; nothing else uses this tag and the next three. Every rank calls this."""
        self._tag += 4
        return self._tag

    def group(self, device: torch.device, timeout: datetime.timedelta | None, transport: str, codec: str) -> Group:
        """Returns the group for a codec. Every rank calls this."""
        key = device, timeout, str(transport), codec == "sign"
        known = self._groups.get(key)
        if known is None:
            known = Group(self._group, device, timeout, transport == "gloo", in_turns=True)
            check_transport(transport, known)
            known.take_topology(transport, codec, self._nodes, direct=False)
            self._groups[key], self._nodes = known, known.nodes
        return known

    def handle(self, key: Any, make: Callable[[], Any]) -> Any:
        if key in self.handles:
            self.handles.move_to_end(key)
            return self.handles[key]
        if len(self.handles) == KEPT:
            (device, *_), _ = self.handles.popitem(last=False)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the object may be in use
        self.handles[key] = made = make()
        return made


_kept: dict[Any, _Kept] = {}


def _is_there(group: Any) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except Exception:  # the group was destroyed
        return False


def kept(group: Any) -> _Kept:
    known = _kept.get(group)
    if known is None:
        for gone in [each for each in list(_kept) if not _is_there(each)]:  # another thread may add one meanwhile
            _kept.pop(gone, None)
        _kept[group] = known = _Kept(group)
    return known
