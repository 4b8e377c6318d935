"""The reduce-scatter of FSDP2 (torch.distributed.fsdp.fully_shard), compressed."""

import datetime
import weakref
from typing import Any, Iterator, cast

import torch
import torch.distributed as dist

from ._torch_ddp import check_transport
from ._torch_groups import Group, Handle, check_tensor, process_group
from ._torch_steps import Compression, Errors, Parts, Raw, Unit, plain_name, raws, settings, warn_of_onebit

OPS = {"AVG": "mean", "SUM": "sum"}
_hooked: "weakref.WeakKeyDictionary[torch.nn.Module, _Shards]" = weakref.WeakKeyDictionary()


class _Rows(Unit):
    """The parameters of a module, of which FSDP cuts each into a part for every rank: a row of parts per rank.

    Each part is a tensor of its own of the handle, whose shards are then the rows. `names`: of the tensors of a row;
    "" for one that is not known.
    """

    def __init__(self, names: list[str], handle: Handle, sizes: dict[str, int]) -> None:
        super().__init__(names * handle.group.size, handle)
        self._row, self._sizes = names, sizes

    def read(self, worker: Errors, server: Parts) -> None:
        """A rank's own: the first half of an all-reduce has no errors of reducers."""
        if not self.handle.has_errors or "" in self._row:
            return
        pieces, _ = self.handle.errors()
        for number, name in enumerate(self._row):
            if not self.handle.raw or not self.handle.raw[number]:  # the last part is filled up
                worker[name] = torch.cat(pieces[number :: len(self._row)])[: self._sizes[name]]

    def give(self, worker: Errors, server: Parts) -> None:
        if not self.handle.has_errors or not any(name in worker for name in self._row):
            return
        size, device = self.handle.group.size, self.handle.group.device
        rows = torch.zeros(size, sum(self.handle.sizes) // size, dtype=torch.float32, device=device)
        first = 0
        for name, part in zip(self._row, self.handle.sizes):
            if name in worker:
                errors = worker.pop(name)
                whole = torch.zeros(size * part, dtype=torch.float32, device=device)
                whole[: errors.numel()] = errors
                rows[:, first : first + part] = whole.view(size, part)
            first += part
        self.handle.take_errors(rows.view(-1), torch.zeros_like(rows).view(-1))


class _ReduceScatter:
    """For FSDPModule.set_custom_reduce_scatter(): one for each module."""

    def __init__(self, shards: "_Shards", parameters: list[tuple[str, torch.Tensor]]) -> None:
        self._shards, self._parameters = shards, parameters
        self.units: dict[Any, _Rows] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What FSDP asks for its buffers."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Writes this rank's row of the mean, or of the sum, of [ranks, row] to `output_tensor`."""
        if self._shards._closed:
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)
            return
        kinds: Any = dist.ReduceOp.RedOpType
        name = next((name for name, kind in kinds.__members__.items() if op == kind), str(op))
        if name not in OPS:
            raise ValueError(f"op: AVG or SUM expected, got {name}")
        self._shards._reduced(self, output_tensor, input_tensor, group, OPS[name])

    def unit(self, row: int, dtype: torch.dtype, op: str) -> _Rows:
        """Of these rows; made where one first comes, on all ranks alike."""
        if (row, dtype, op) not in self.units:
            shards, world = self._shards, self._shards._group.size
            # Those without a gradient have no part; then, or where they are cut in another dimension, a row is one.
            shapes = [one.shape for _, one in self._parameters]
            parts = [-(-shape[0] // world) * shape[1:].numel() for shape in shapes]
            names, raw = [name for name, _ in self._parameters], [shards._raw[name] for name, _ in self._parameters]
            if sum(parts) != row:
                parts, names, raw = [row], [""], [False]
            shards._wait()  # a handle over peer memory begins when the work of others is done
            handle = Handle(
                shards._group, shards.codec, parts * world, dtype, error=shards.error, raw=raw * world, op=op,
                transactional=True,
            )  # fmt: skip
            self.units[row, dtype, op] = made = _Rows(names, handle, shards._sizes)
            made.give(shards._worker, shards._server)
        return self.units[row, dtype, op]


class _Shards(Compression):
    """The hooks of a model's modules for which fully_shard() was called."""

    def __init__(self, group: Group, codec: str, error: str, sizes: dict[str, int], raw: Any, scaler: Any) -> None:
        super().__init__(group, codec, error, sizes, raw, scaler)
        self.comms: list[_ReduceScatter] = []
        self._pass = -1  # of autograd, to which the pending step belongs

    def _units(self) -> Iterator[Unit]:
        for comm in self.comms:
            yield from comm.units.values()

    def _forget(self) -> None:
        for comm in self.comms:
            comm.units.clear()

    def _reduced(
        self, comm: _ReduceScatter, output: torch.Tensor, given: torch.Tensor, group: Any, op: str
    ) -> None:  # fmt: skip
        check_tensor("gradient", given)
        if group.size() != self._group.size or given.device != self._group.device:
            of = f"{group.size()} ranks on {given.device}"
            raise ValueError(f"group: {self._group.size} ranks on {self._group.device} expected, got {of}")
        with self._on_stream():
            unit, its_pass = comm.unit(output.numel(), given.dtype, op), torch._C._current_graph_task_id()
            # A pass that broke off has never come to its end, and another one comes to the same module.
            if not self._pending or self._complete or (unit.in_step and its_pass != self._pass):
                self._begin()
                self._pass, engine = its_pass, cast(Any, torch.autograd.Variable._execution_engine)
                engine.queue_callback(self._over)  # at the end of this backward pass
            unit.in_step = True
            if self._measure and self.codec != "sign":
                self._measured.update(self._losses(unit, given))
            shard = output
            if output.dtype != torch.float32 or not output.is_contiguous():
                shard = torch.empty_like(output, dtype=torch.float32, memory_format=torch.contiguous_format)
            unit.handle.reduce_scatter_within(given, shard, self._error_factor, self._stream_number)
            if shard is not output:
                output.copy_(shard)

    def _over(self) -> None:
        self._complete, self._measure = True, False


def _parameters_of(module: torch.nn.Module, sharded: Any) -> Iterator[torch.Tensor]:
    """Those that are sharded with this module, in FSDP's order: not those of modules within that are sharded by
    themselves."""
    for child in module.children():
        if not isinstance(child, sharded):
            yield from _parameters_of(child, sharded)
    yield from module.parameters(recurse=False)


def shard(
    model: torch.nn.Module, codec: str = "int8", *, error: str | None = None, raw: Raw = None, momentum: bool = False,
    scaler: Any = None, group: Any = None, transport: str = "auto", timeout: float | datetime.timedelta | None = None,
) -> Compression:  # fmt: skip
    """Lets FSDP2 reduce its gradients compressed, in a model for which fully_shard() was called: to be called after the
    last of these calls. PyTorch 2.9 or newer.

    The arguments are those of compress(). Parameters travel uncompressed. FSDP's AVG and SUM are known; `group`: None:
    that of the parameters' mesh. With errors a rank keeps those of all that it sends, not of its shard alone.
    """
    from torch.distributed.fsdp import FSDPModule

    modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise TypeError(f"model: one that fully_shard() was called for expected, got {type(model).__name__}")
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(f"PyTorch 2.9 or newer expected, got {torch.__version__}")
    error = settings(codec, error, scaler)
    named = {id(one): plain_name(name) for name, one in model.named_parameters() if one.requires_grad}
    parameters: dict[str, Any] = {plain_name(name): one for name, one in model.named_parameters() if one.requires_grad}
    sharded = [(name, one) for name, one in parameters.items() if hasattr(one, "device_mesh")]
    if not sharded:
        raise ValueError("model: one parameter that is sharded and requires grad expected at least, got none")
    for name, one in sharded:
        check_tensor(name, one.to_local())
    mesh, placements = sharded[0][1].device_mesh, sharded[0][1].placements
    if group is None:
        cut = next(number for number, placement in enumerate(placements) if placement.is_shard())
        group = mesh.get_group(cut)
    device = torch.device("cpu")
    if mesh.device_type != "cpu":
        device = torch.device(mesh.device_type, torch.cuda.current_device())
    of_raw, over = raws(parameters, codec, raw), process_group(group)
    own = Group(over, device, timeout, through_host=transport == "gloo")
    check_transport(transport, own)
    for module in modules:
        if module in _hooked and not _hooked[module]._closed:
            raise RuntimeError("model: its gradients are compressed already; close() ends that")
    warn_of_onebit(codec, momentum)
    own.take_peers(transport)
    made = _Shards(own, codec, error, {name: one.numel() for name, one in parameters.items()}, of_raw, scaler)
    for module in modules:
        its = dict.fromkeys(_parameters_of(module, FSDPModule))
        comm = _ReduceScatter(made, [(named[id(one)], one) for one in its if id(one) in named])
        made.comms.append(comm)
        module.set_custom_reduce_scatter(comm)
        _hooked[module] = made
    return made
