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
from ._abi import CODECS, CPU, CUDA, CUDA_HOST, G, Transport
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

ERRORS = {"float32": 0, "bfloat16": 1, "none": 2}
DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
HOST_MEMORY, TRANSACTIONAL = 1, 2
BAD = 1 | 2  # GC_FLAG_CORRUPT and GC_FLAG_NONFINITE
KEPT = 64
BY_PAIRS = 1 << 19  # bytes of a rank from which on each two exchange theirs over gloo
TAG = 0x67726164  # of messages between two ranks, so that they are not taken for the caller's own
DEFAULT_TIMEOUT = 600.0  # seconds, as for NCCL in the library
SHORTEST, LONGEST = 1e-3, 4e6  # seconds, to which a timeout is bounded: PyTorch's clock overflows after some centuries
HINT_AFTER = 30.0  # seconds until a rank says which others it waits for
MOST_PEERS, FIRST_ROOM = 64, 1 << 24  # ranks; bytes, enough for a payload of 4 MiB less headers

library = functools.cache(GradCodec)
_c10d: Any = dist.distributed_c10d  # whose options are not all public


def known_codec(codec: Any) -> str:
    if not isinstance(codec, str) or codec not in CODECS:
        hint = _near(codec, CODECS) if isinstance(codec, str) else ""
        raise ValueError(f"codec: one of {', '.join(CODECS)} expected, got {_said(codec)}{hint}")
    return codec


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuses what no codec takes."""
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
    """The group itself: with None the default one."""
    if not dist.is_initialized():
        raise RuntimeError("group: torch.distributed.init_process_group() has to come first")
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: a process group that this rank belongs to expected, got {_said(group)}")
    if group.size() < 2:
        raise ValueError(f"group: at least 2 ranks expected, got {group.size()}; a single rank has nobody to send to")
    return group


def number_of(stream: Any) -> int:
    """Of a stream of PyTorch's, for C; None: of the CPU."""
    return 1 if stream is None else int(stream.cuda_stream) or 1


def seconds(timeout: Any) -> datetime.timedelta | None:
    if timeout is None:
        return None
    given = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < math.inf:
        raise TypeError(f"timeout: seconds or a timedelta above 0 expected, got {_said(timeout)}")
    return datetime.timedelta(seconds=min(max(given, SHORTEST), LONGEST))


class _Memory:
    """Memory of a GPU that is not PyTorch's, for torch.as_tensor(), which does not copy it."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": (size,), "typestr": "|u1", "version": 2}


@torch.inference_mode(False)  # what is made in that mode cannot be written to outside of it
def _at(pointer: int, size: int, device: Any) -> torch.Tensor:
    """The bytes at a pointer, as a tensor."""
    if device.device_type in (CPU, CUDA_HOST):
        return torch.frombuffer((c_uint8 * size).from_address(pointer), dtype=torch.uint8)
    return torch.as_tensor(_Memory(pointer, size), device=torch.device("cuda", device.device_id))


class Turns:
    """Orders the work of several streams of a GPU that use the same memory. On a CPU there is nothing to order. Captured
    work has no turn: whoever launches the graph orders it."""

    _last: Any = None  # the stream of end(), and what is recorded on it
    _done: Any = None

    def begin(self, device: torch.device) -> Any:
        """The current stream, None on a CPU, behind the work that another stream has had since end()."""
        if device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(device)
        if self._done is None:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        elif stream != self._last and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._done)
        return stream

    def end(self, stream: Any) -> None:
        """After the calls on that stream."""
        if stream is not None and not torch.cuda.is_current_stream_capturing():
            self._last = stream
            self._done.record(stream)


class Turn:
    """The calls of one `with`, for which it gives the number of the current stream."""

    def __init__(self, turns: Turns, device: torch.device) -> None:
        self._turns, self._stream = turns, turns.begin(device)
        self.stream_number = number_of(self._stream)

    def __enter__(self) -> int:
        return self.stream_number

    def __exit__(self, *_: Any) -> None:
        self._turns.end(self._stream)


class Peers:
    """Memory that the GPUs of one node reach, for all handles over a process group, which use it one after the other.

    Communicators over it, each with more room than the one before. They stay as long as the group: other ranks write to
    this rank's memory until they make no call any more.
    """

    def __init__(self, bootstrap: Communicator, device: int, timeout_ms: int) -> None:
        self._bootstrap, self._about, self._room, self.turns = bootstrap, (device, timeout_ms), 0, Turns()
        self.comms: list[Communicator] = []
        self.comm(FIRST_ROOM)

    def comm(self, size: int) -> Communicator:
        """One with so many bytes. Every rank calls this, with the same number."""
        if size > self._room:
            device, timeout_ms = self._about
            room = max(size, 2 * self._room)
            self.comms.append(library().open_peers(self._bootstrap, device, room, timeout_ms))
            self._room = room
        return self.comms[-1]

    def handles(self) -> list[int]:
        """The addresses of all communicators, whose failures check() raises."""
        return [comm._open() for comm in self.comms]

    def check(self) -> None:
        """Raises what went wrong in work that was enqueued, such as a rank that did not come."""
        for comm in self.comms:
            comm.async_error()


def _done(work: Any) -> None:
    """Of a collective, None where it is on the current stream already."""
    if work is not None:
        work.wait()


class Group:
    """A process group, and a communicator over its all_to_all and all_gather.

    Tensors on a GPU travel from GPU to GPU over NCCL, on the current stream, and through host memory over anything
    else; with `peers` over these. `direct`: a communicator over PyTorch's own of NCCL, whose exchanges PyTorch does not
    see. `bytes_sent`: by this rank so far.
    """

    peers: Peers | None = None
    direct: Communicator | None = None
    levels: "Levels | None" = None
    own: Communicator | None = None  # that take_own() has made, and what watches it over NCCL
    watch: Watch | None = None
    pairs: Pairs | None = None  # below `own`, over gloo
    nodes: list[list[int]] | None = None  # the ranks of each, once take_topology() has found them
    topology = ""

    def __init__(
        self, group: Any, device: torch.device, timeout: Any = None, through_host: bool = False, in_turns: bool = False
    ) -> None:  # fmt: skip
        """`in_turns`: handles run on the caller's streams, in turns, so their peer memory is not that of the hooks."""
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
        self._tensors: dict[tuple[int, int, int, int], torch.Tensor] = {}  # over memory of the library's
        raised = Raised()
        functions = [server(perform, raised, resumes=True) for perform in (self._all_to_all, self._all_gather)]
        flags = 0 if self.over_gpus else HOST_MEMORY
        transport, made = Transport(ctypes.sizeof(Transport), self.rank, self.size, flags, None, *functions), G()
        library().lib.gc_comm_from_transport(byref(transport), byref(made))
        self.comm = Communicator._of(library(), made, raised)
        self.comm._transport = transport  # which handles keep with the communicator

    def _find_nodes(self) -> list[list[int]]:
        """The ranks of each node, which every rank tells the others."""
        names = torch.zeros(self.size, 32, dtype=torch.int32, device=self.device)
        names[self.rank] = torch.tensor(digest(own_node()), dtype=torch.int32)
        return nodes_of([tuple(name) for name in self.over_all(names).tolist()])

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_topology(
        self, transport: str, codec: str, nodes: list[list[int]] | None = None, direct: bool = True
    ) -> None:  # fmt: skip
        """Finds which ranks share a node, and chooses what handles go over. Every rank calls this.

        `nodes`: what was found before; None: it is found now. `direct`: offers that, where it can.
        """
        self.nodes = nodes or self._find_nodes()
        levels = are_levels(self.nodes) and transport in ("auto", "nccl", "gloo") and codec != "sign"
        if levels:
            self.levels = Levels(self, self.nodes, transport)
        else:
            if transport == "auto" and codec != "sign" and nodes is None:
                warn_of_uneven(self.nodes)
            # Peer memory is within a node. Of several nodes it is tried only if that is asked for.
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
        """Handles go over communicators that nothing else uses, so they may run on another thread, beside other work of
        the process group. Every rank calls this, in place of take_topology()."""
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
        """After a run that has failed on this rank, of which take_own()'s communicator knows how far it has come."""
        if self.pairs is not None:
            self.pairs.complete(steps.exchanges, steps.sent_bytes // (steps.exchanges * (self.size - 1)))

    def told(self, own: Any) -> list[Any]:
        """What every rank gives, by rank: any small object. If a rank is lost, this raises on all others. Every rank
        calls this after take_own()."""
        if self.over_gpus:
            return objects_of_all(self.group, own)
        given = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        sizes = self._each_to_all(torch.tensor([given.numel()], device="cpu")).flatten().tolist()
        room = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        room[: given.numel()] = given
        rows = self._each_to_all(room)
        return [pickle.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes)]

    def _each_to_all(self, own: torch.Tensor) -> torch.Tensor:
        """A row of each rank, by messages with a tag that nothing else uses."""
        call, to, given = Call(), own.new_empty(self.size, own.numel()), own.expand(self.size, -1)
        call.started, call.ended = [], []
        by_pairs(call, self.group, range(self.size), self.rank, to, given, self._tag + 3, self.timeout, to_the_end=True)
        return to

    def shard_numbers(self) -> list[int]:
        """By rank: which shard of a handle is its own, in the order of elements."""
        if self.levels is None or self.nodes is None:
            return [*range(self.size)]
        nodes = self.nodes
        numbers = {rank: at * len(nodes) + node for node, its in enumerate(nodes) for at, rank in enumerate(its)}
        return [numbers[rank] for rank in range(self.size)]

    def over_node(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of this node, where handles sum within nodes first."""
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
        """Raises what went wrong in exchanges that were enqueued, such as a rank that did not take part."""
        over = self.levels or self.watch or self.peers
        if over is not None:
            over.check()

    def take_peers(self, transport: str) -> None:
        """Handles go over peer memory from now on, where `transport` is "peers", or where it is "auto" and every rank
        reaches the memory of all others. Every rank calls this."""
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
        """Whether every two GPUs of a node are one or have NVLink between them, on all nodes. Every rank calls this."""
        uuids = torch.zeros(self.size, 16, dtype=torch.int32, device=self.device)
        uuids[self.rank] = torch.tensor(list(_torch_nvlink.uuid_of(self.place[1])), dtype=torch.int32)
        found = [bytes(row) for row in self.over_all(uuids).tolist()]
        own = next(its for its in nodes if self.rank in its)
        answer = _torch_nvlink.are_linked([found[rank] for rank in own], self.place[1])
        agreed = self.over_all(torch.tensor([int(answer)], device=self.device), dist.ReduceOp.MIN)
        return bool(agreed.item())

    def take_direct(self) -> None:
        """Offers `direct` from now on, where every rank can. Every rank calls this."""
        if not self.over_gpus or self.peers is not None:
            return
        own = torch.ones(1, device=self.device)
        self.over_all(own)  # PyTorch makes its communicator with the first collective
        made = None
        with torch.cuda.device(self.device), contextlib.suppress(AttributeError, OSError, RuntimeError):
            self._address = self.group._get_backend(self.device)._comm_ptr  # from PyTorch 2.9; of the current device
            # NCCL is where PyTorch's own library has it, whatever else is loaded.
            with_nccl = ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libtorch_cuda.so"))
            self._direct_at = self._address()
            made = library().nccl(self._direct_at, dl_handle=with_nccl._handle, timeout_ms=self._milliseconds())
        own.fill_(made is not None)
        if self.over_all(own, dist.ReduceOp.MIN).item():
            self.direct = made

    def check_direct(self) -> None:
        """Refuses `direct` where PyTorch's communicator is gone, which PyTorch itself would say of its collectives."""
        if self._address() != self._direct_at:
            raise RuntimeError("group: its communicator of NCCL, over which gradients were exchanged, is gone")

    def _milliseconds(self) -> int:
        """Of the timeout; 0 where PyTorch does not tell the group's own."""
        timeout = self.timeout
        if timeout is None:
            try:
                timeout = self.group._get_backend(self.device).options._timeout
            except (AttributeError, RuntimeError):  # an older one, or a group for host memory alone
                return 0
        return min(2**32 - 1, max(1, int(timeout.total_seconds() * 1000)))

    def comm_for(self, codec: str, sizes: Sequence[int], options: dict[str, Any], direct: bool) -> Communicator:
        """What an all-reduce with these options goes over. Every rank calls this."""
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
        if hasattr(options, "asyncOp"):  # otherwise NCCL has a stream of its own, which waits and is waited for
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
        """The bytes at a pointer: the library exchanges the same memory in every call, and owns it."""
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
            # gloo's collectives leave a slow link idle for up to a quarter of their time, one after the other. Of small
            # rows they take less of the CPU.
            rows, ranks = given.view(-1, size).expand(self.size, size), range(self.size)
            by_pairs(call, self.group, ranks, self.rank, to.view(-1, size), rows, TAG, self.timeout)
        elif to.is_cuda or self._takes_host:
            run(call, [collective(to, given)], None)
        else:  # the few bytes that make a handle, by NCCL alone
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
        """For calls of handles on the current stream, from now on: a handle, and the memory that handles share, are for
        one stream at a time."""
        return Turn(self._turns, self.device)

    def on_one(self, here: bool) -> bool:
        """Whether this is so on one rank at least."""
        return bool(self.over_all(torch.tensor([int(here)], device=self.device), dist.ReduceOp.MAX).item())

    def over_all(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """The plain all-reduce, in place."""
        options = self._options(dist.AllreduceOptions)
        options.reduceOp = op
        _done(self.group.allreduce([tensor], options))
        return tensor


def check_transport(transport: Any, group: Group) -> None:
    """Refuses one that this group does not have."""
    if transport not in ("auto", "flat", "peers", "nccl", "gloo"):
        raise ValueError(f"transport: one of auto, flat, peers, nccl, gloo expected, got {_said(transport)}")
    if transport == "peers" and group.device.type != "cuda":
        raise ValueError(f"transport: peers is for tensors on the GPUs of one node; this is on {group.device}")
    if transport == "nccl" and not group.over_gpus:
        raise ValueError(f"transport: nccl is for tensors on a GPU and a group over NCCL; this is on {group.device}")


def agree(call: str, group: Group, settings: dict[str, Any], own: Any = None) -> list[Any]:
    """Refuses, on every rank, settings that must be the same on all of them and are not. Returns `own` of every rank.
    Every rank calls this, in the same `call`."""
    everywhere = objects_of_all(group.group, ({"call": call, **settings}, own))
    first = everywhere[0][0]
    for rank, (its, _) in enumerate(everywhere):
        for name in {**first, **its}:
            one, other = first.get(name), its.get(name)
            if one != other:
                raise ValueError(f"{name}: {one!r} on rank 0 and {other!r} on rank {rank}, not the same")
    return [own for _, own in everywhere]


def await_all(call: str, group: Group) -> None:
    """Waits until every rank has made this call, and names those that have not. It comes before the first collective, in
    which a rank alone would wait without a word, and before what takes a rank long."""
    known = kept(group.group)
    try:
        store = _c10d._get_process_group_store(group.group)
    except (AttributeError, KeyError):  # of another PyTorch
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
    """The ranks that have not set their keys within so many seconds; "": none."""
    try:
        store.wait(keys, datetime.timedelta(seconds=wait))
        return ""
    except RuntimeError:  # a check says whether it was the time or the store
        ranks = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    return f"ranks {', '.join(ranks[:8])}{' and others' if len(ranks) > 8 else ''} of the group" if ranks else ""


class Levels:
    """Communicators within the node and between nodes, and the hierarchical one over both.

    `ranks`: those of this node, of the group. `peers`: the memory that they reach, if they do.
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
            # On all nodes or on none, so that all ranks make the same communicators.
            everywhere = group.over_all(torch.tensor([reached], device=group.device), dist.ReduceOp.MIN).item()
            if not everywhere:
                self.peers = None

    def __del__(self) -> None:
        watch: Watch | None = getattr(self, "watch", None)  # None where a communicator could not be made
        if watch is not None:
            watch.stop()

    def handles(self) -> list[int]:
        """The addresses of all communicators, whose failures check() raises."""
        over = self.watch or self.peers
        return [] if over is None else over.handles()

    def check(self) -> None:
        """Raises what went wrong in exchanges that were enqueued, such as a rank that did not take part."""
        over = self.watch or self.peers  # a watch has the communicators over peer memory, too
        if over is not None:
            over.check()

    def comm_for(self, codec: str, sizes: Sequence[int], options: dict[str, Any]) -> Communicator:
        """What an all-reduce with these options goes over. Every rank calls this."""
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

    `sizes`: their element counts. `raw`: for each, whether it travels as it is; empty for none. `direct`: PyTorch,
    which ends the process where a rank does not come, need not see it: some other work that it sees comes after it.
    `in_memory`: the numbers of the tensors in the order in which they lie in the buffers of run_within() and of the
    halves, and in which their errors are given and taken; empty: their own.
    """

    def __init__(
        self, group: Group, codec: str, sizes: Sequence[int], dtype: torch.dtype, *, error: str = "none",
        raw: Sequence[bool] = (), op: str = "mean", transactional: bool = False, direct: bool = False,
        in_memory: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.group, self.codec, self.sizes, self.dtype, self.raw = group, codec, list(sizes), dtype, list(raw)
        self.watch = group.watch if group.levels is None else group.levels.watch
        self.has_errors, device = error != "none" and codec != "sign", group.device
        self.carries = False  # errors that may not be 0
        self._factor = float(group.size) if (op, codec) == ("sum", "sign") else None  # the majority, as many times
        self._in_memory = list(in_memory) or [*range(len(self.sizes))]
        self._within = _Parts(self.sizes, DTYPES[dtype], group.place, self._in_memory)
        self._each = [1] * len(self.sizes)
        self._value_factor = _Parts([1], "float32", group.place)
        self.options: dict[str, Any] = {"values": DTYPES[dtype]}
        if device.type == "cuda":
            self.options["device"] = group.place
        if any(self.raw):
            self.options["raw"] = self.raw
        # Without errors there is nothing that a step could take back, and the flags are the same.
        self.pends = transactional and self.has_errors
        more: dict[str, Any] = {"nonfinite": TRANSACTIONAL} if self.pends else {}
        if codec != "sign":
            more["error"] = ERRORS[error]
        if op == "sum" and codec != "sign":
            more["reduction"] = "sum"
        # A flat sum divides a single row of errors by the ranks; to multiply by a power of two before loses nothing.
        self._factor_of_errors = group.size if "reduction" in more and group.levels is None else 1
        all_options = {**self.options, **more}
        comm = group.comm_for(codec, self.sizes, all_options, direct)
        self.is_direct = comm is group.direct
        self.steps = comm.allreduce(codec, self.sizes, **all_options)
        self._shard = _Parts([self.steps.shard_elements], "float32", group.place)
        # What goes through this group's functions, the group counts itself.
        self.sent = 0 if comm is group.comm else self.steps.sent_bytes
        self._sent_by_halves = self._sent_by_each_half()

    def _sent_by_each_half(self) -> tuple[int, int]:
        """A half sends a chunk to each rank: a run of two exchanges does so twice, one of one exchange sends all chunks.
        Over nodes the first half sends values within the node besides, with a header, a part to each rank; the second
        one all chunks of a part."""
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
        """On the current stream, which has this number."""
        flat = [tensor.contiguous() for tensor in tensors]
        self.run_within_each(flat, self._each, stream)
        torch.autograd.graph.increment_version(flat)  # a tensor that autograd has saved is refused by backward() then
        for tensor, reduced in zip(tensors, flat):
            if reduced is not tensor:
                tensor.copy_(reduced)

    def run_within(self, buffer: torch.Tensor, stream: int) -> None:
        """run() on a contiguous tensor, in which they lie one after the other. Only its address is looked at."""
        self._run_at(self._within.at(buffer.data_ptr()), [buffer], stream)

    def run_within_each(self, buffers: Sequence[torch.Tensor], numbers: Sequence[int], stream: int) -> None:
        """The same on several: in each lie as many of the handle's tensors as `numbers` says."""
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
        """The first half: the mean or sum of this rank's part, in float32, to a contiguous tensor. `value_factor`: one
        float32, by which `buffer` is multiplied first."""
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
        """The second half: the parts of all ranks to a contiguous tensor. `shard`: this rank's part, in float32,
        contiguous."""
        steps, parts, place = self.steps, self._within.at(buffer.data_ptr()), self._shard.at(shard.data_ptr()).places[0]
        steps._run(steps._raw.gc_allreduce_all_gather, place, parts.list, parts.count, stream)
        self.enqueued()
        self.group.bytes_sent += self._sent_by_halves[1]

    def enqueued(self) -> None:
        """After a run on the current stream."""
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
        """Those of this rank, one for each tensor; and of the parts that it reduces: the number of the tensor, the
        first element, the errors."""
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
        """Of all elements; None: those stay as they are."""
        self.carries = True
        if worker is not None:
            worker = self._in_own_order(worker)
            if self._factor_of_errors > 1:
                worker = worker * self._factor_of_errors
            self.steps.errors_in(worker.view(1, -1), None, stream=self.stream())
        if server is not None:
            self.steps.errors_in(None, self._in_own_order(server), stream=self.stream())

    def multiply_errors(self, factor: torch.Tensor | float) -> None:
        """Multiplies the errors by one float32. No other rank is needed."""
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
    """Whether a step of several handles is taken back, which it is if one of them met what is not finite: on the
    device, which nothing waits for."""

    @torch.inference_mode(False)
    def __init__(self, group: Group, handles: int) -> None:
        self.handles = handles
        self._flags, self._bad = (torch.zeros(handles, dtype=torch.int32, device=group.device) for _ in range(2))
        self.undone = torch.zeros(1, dtype=torch.bool, device=group.device)  # may be changed until carry_out()
        self._of_flags = _Parts([1] * handles, "uint32", group.place).at(self._flags.data_ptr())
        self._of_undone = _Parts([1], "bool", group.place).at(self.undone.data_ptr())
        # On a CPU also without PyTorch, whose smallest operation takes longer than all of this.
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


# --- what stays for a process group -----------------------------------------------------------------------------------


class _Kept:
    """What stays for a process group: `peers`, None where memory is not reached, and what all_reduce() has made, at
    most KEPT of them: the one that was used least recently goes, on all ranks alike, as all of them come to the same
    calls on this group."""

    def __init__(self, group: Any) -> None:
        self._group = group
        # With the last handle over it a group goes.
        self._groups: weakref.WeakValueDictionary[Any, Group] = weakref.WeakValueDictionary()
        self._nodes: list[list[int]] | None = None
        self.handles: OrderedDict[Any, Any] = OrderedDict()
        self.peers: dict[Any, Peers | None] = {}
        self.agreed = 0  # how often its ranks have compared settings
        self._tag = TAG

    def new_tag(self) -> int:
        """Of messages: this one and the next three are no other's. Every rank calls this."""
        self._tag += 4
        return self._tag

    def group(self, device: torch.device, timeout: datetime.timedelta | None, transport: str, codec: str) -> Group:
        """A group of this codec. Every rank calls this."""
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
                torch.cuda.synchronize(device)  # it may be at work
        self.handles[key] = made = make()
        return made


_kept: dict[Any, _Kept] = {}


def _is_there(group: Any) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except Exception:  # it was destroyed
        return False


def kept(group: Any) -> _Kept:
    known = _kept.get(group)
    if known is None:
        for gone in [each for each in list(_kept) if not _is_there(each)]:  # another thread may add one meanwhile
            _kept.pop(gone, None)
        _kept[group] = known = _Kept(group)
    return known
