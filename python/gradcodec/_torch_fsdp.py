"""The reduce-scatter and the all-gather of FSDP2 (torch.distributed.fsdp.fully_shard), compressed."""

import datetime
import math
import warnings
import weakref
from typing import Any, Iterator, cast

import torch
import torch.distributed as dist

from ._abi import CODECS, SIGNS
from ._arguments import _said
from ._torch_eager import eager
from ._torch_groups import (
    Group, Handle, agree, await_all, check_tensor, check_transport, number_of, process_group,
)  # fmt: skip
from ._torch_states import on_all_ranks
from ._torch_steps import Compression, Errors, Parts, Raw, Unit, named, raws, settings, warn_of_onebit

OPS = {"AVG": "mean", "SUM": "sum", "PREMUL_SUM": "sum"}
OF_REPLICAS = "@replicas"  # suffix of a parameter's name in a state: errors of the all-reduce over replicas
BLOCKS = tuple(name for name in CODECS if name not in SIGNS)
_hooked: "weakref.WeakKeyDictionary[torch.nn.Module, _Shards]" = weakref.WeakKeyDictionary()


class _Cut:
    """A parameter that FSDP cuts into a part for every rank: in one dimension, the last part padded."""

    def __init__(self, name: str, parameter: Any, record: Any, world: int) -> None:
        """`record`: FSDP's record of the parameter, or None. A strong reference to it would keep the model alive."""
        self.name, self._parameter = name, parameter
        self._record = None if record is None else weakref.ref(record)
        cut = dimension_of_mesh(parameter)
        self._dim = dim = parameter.placements[cut].dim
        size = parameter.shape[dim]
        for number, placement in enumerate(parameter.placements):  # tensor parallelism may cut it, too
            if number != cut and getattr(placement, "dim", None) == dim:
                size = -(-size // parameter.device_mesh.size(number))
        self._whole, self._part = [*parameter.to_local().shape], [*parameter.to_local().shape]
        self._whole[dim], self._part[dim] = size, -(-size // world)
        self.size, self.size_of_part = math.prod(self._whole), math.prod(self._part)

    @property
    def is_trained(self) -> bool:
        """Returns whether the parameter requires a gradient, also after load_state_dict(assign=True) has replaced it."""
        record = None if self._record is None else self._record()
        return bool((self._parameter if record is None else record.sharded_param).requires_grad)

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Returns the elements of all parts, in their order."""
        whole = torch.cat([part.view(self._part) for part in parts], self._dim)
        return whole.narrow(self._dim, 0, self._whole[self._dim]).reshape(-1)

    def apart(self, elements: torch.Tensor, world: int) -> torch.Tensor:
        """Returns the parts of elements that are in their order, a row each."""
        size, filled = self._part[self._dim], [*self._whole]
        filled[self._dim] = world * size
        whole = torch.zeros(filled, dtype=torch.float32, device=elements.device)
        whole.narrow(self._dim, 0, self._whole[self._dim]).copy_(elements.view(self._whole))
        return torch.stack([whole.narrow(self._dim, k * size, size).reshape(-1) for k in range(world)])


def dimension_of_mesh(parameter: Any) -> int:
    """Returns the mesh dimension that FSDP cuts over: behind that of replicas, before those of tensor parallelism."""
    cut = [number for number, placement in enumerate(parameter.placements) if hasattr(placement, "dim")]
    if not cut:
        raise TypeError("model: parameters that fully_shard() cuts expected, got replicated ones")
    return cut[0]


class _Rows(Unit):
    """The parameters of a module. FSDP cuts each into a part for every rank; a row has the parts of one rank.

    Each part is a tensor of the handle, so the rows are its shards, over nodes in another order than that of ranks.
    `cuts`: the cuts of a row's parts; empty if they are not known.
    """

    def __init__(self, cuts: list[_Cut], handle: Handle) -> None:
        super().__init__(([cut.name for cut in cuts] or [""]) * handle.group.size, handle)
        self.cuts = cuts

    def read(self, worker: Errors, server: Parts) -> None:
        """Reads this rank's worker errors: the first half of an all-reduce has no server errors."""
        if not self.handle.has_errors or not self.holds:
            return
        pieces, _ = self.handle.errors()
        for number, cut in enumerate(self.cuts):
            if not self.handle.raw or not self.handle.raw[number]:
                worker[cut.name] = cut.joined(pieces[number :: len(self.cuts)])

    def _give(self, worker: Errors, server: Parts) -> None:
        group = self.handle.group
        if not group.on_one(any(cut.name in worker for cut in self.cuts)):
            return
        size, device = group.size, group.device
        rows = torch.zeros(size, sum(self.handle.sizes) // size, dtype=torch.float32, device=device)
        first = 0
        for cut in self.cuts:
            if cut.name in worker:
                rows[:, first : first + cut.size_of_part] = cut.apart(worker[cut.name], size)
            first += cut.size_of_part
        self.handle.take_errors(worker=group.over_node(rows.view(-1)))
        self._no_longer_wait(worker, server)


class _OfModule:
    """A function that FSDP calls for a module, and that allocates its buffers."""

    def __init__(self, shards: "_Shards", name: str, cuts: list[_Cut]) -> None:
        self._shards, self._name, self._cuts = shards, name, cuts

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a buffer."""
        return torch.empty(size, dtype=dtype, device=device)


class _AllGather(_OfModule):
    """For FSDPModule.set_custom_all_gather()."""

    @eager
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Writes the parts of all ranks to `output_tensor`, [ranks, row], each after it was encoded and decoded."""
        shards = self._shards
        # Fewer ranks are those of a node, over which reshard_after_forward splits parameters that were decoded before.
        if shards._closed or group.size() != shards._group.size:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        of = f"gather: the parameters of {self._name}"
        if input_tensor.dtype is torch.uint8:
            raise TypeError(f"{of}: one dtype in a module expected, got several, which FSDP gathers as bytes")
        check_tensor(of, input_tensor)
        elements = sum(cut.size_of_part for cut in self._cuts)
        if input_tensor.numel() != elements:
            raise ValueError(f"{of}: {elements} elements per rank expected, got {input_tensor.numel()}")
        shards._gathered(self._cuts, output_tensor, input_tensor)


class _ReduceScatter(_OfModule):
    """For FSDPModule.set_custom_reduce_scatter() and set_all_reduce_hook()."""

    def __init__(self, shards: "_Shards", name: str, cuts: list[_Cut], module: Any) -> None:
        super().__init__(shards, name, cuts)
        self._module = weakref.ref(module)
        self._last: Any = None  # the key of the unit that was reduced last
        self.units: dict[Any, _Rows] = {}
        self.units_of_replicas: dict[Any, Unit] = {}
        # The units that hold the errors. Frozen parameters, or another dtype, need other units.
        self._holder: _Rows | None = None
        self._holder_of_replicas: Unit | None = None

    def forget(self) -> None:
        self.units.clear()
        self.units_of_replicas.clear()
        self._holder = self._holder_of_replicas = None

    @eager
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
            raise ValueError(f"op: AVG, SUM or PREMUL_SUM expected, got {name}")
        factor = _factor_of(op) if name == "PREMUL_SUM" else None
        self._shards._reduced(self, output_tensor, input_tensor, OPS[name], factor)

    @eager
    def over_replicas(self, reduced: torch.Tensor) -> None:
        """Replaces the result of __call__() by its mean over the replicas, or by the sum if FSDP has a factor to divide
        by, which covers all ranks."""
        shards = self._shards
        op = "mean" if all(each.gradient_divide_factor is None for each in _groups(self._module())) else "sum"
        if not shards._closed:
            shards._reduced_over_replicas(self, reduced, op)
            return
        group = cast(Group, shards._replicas).group
        dist.all_reduce(reduced, group=group)
        if op == "mean":
            reduced.div_(group.size())

    def unit_of_replicas(self, dtype: torch.dtype, op: str) -> Unit:
        """Returns the unit of this rank's parts of the parameters reduced last; creates it on all replicas alike."""
        key = self._last, op
        if key not in self.units_of_replicas:
            rows, shards = self.units[self._last], self._shards
            cuts, row = rows.cuts, rows.handle.steps.shard_elements
            parts = [cut.size_of_part for cut in cuts] or [row]
            raw = [shards._raw[cut.name] for cut in cuts] or rows.handle.raw[:1]
            handle = shards._handle_of_replicas(parts, dtype, raw, op, shards.error if cuts else "none")
            names = [cut.name + OF_REPLICAS for cut in cuts] or [""]
            self.units_of_replicas[key] = Unit(names, handle)
        unit = self.units_of_replicas[key]
        if unit.handle.has_errors and unit is not self._holder_of_replicas:
            with self._shards._on_stream():  # errors that wait are memory of that stream
                unit.take_over(self._holder_of_replicas, self._shards._worker, self._shards._server)
            self._holder_of_replicas = unit
        return unit

    def unit(self, row: int, dtype: torch.dtype, op: str) -> _Rows:
        """Returns the unit of these rows; creates it when it is first needed, on all ranks alike."""
        cuts = [cut for cut in self._cuts if cut.is_trained]
        key = row, dtype, op, *[cut.name for cut in cuts]
        if key not in self.units:
            shards = self._shards
            parts, error = [cut.size_of_part for cut in cuts], shards.error
            raw = [shards._raw[cut.name] for cut in cuts]
            if sum(parts) != row:
                # Some parameters have no gradient, and may differ the next time, so no errors can be carried.
                cuts, parts, raw, error = [], [row], [error != "none" and shards.codec not in SIGNS], "none"
            handle = shards._handle(shards.codec, parts, dtype, raw, op, error)
            self.units[key] = _Rows(cuts, handle)
        self._last, unit = key, self.units[key]
        if unit.handle.has_errors and unit is not self._holder:
            unit.take_over(self._holder, self._shards._worker, self._shards._server)
            self._holder = unit
        return unit


class _Shards(Compression):
    """The hooks of a model's modules for which fully_shard() was called."""

    def __init__(
        self, group: Group, codec: str, error: str, sizes: dict[str, int], raw: Any, scaler: Any, gather: str | None,
        raw_of_gather: dict[str, bool], replicas: Group | None,
    ) -> None:  # fmt: skip
        super().__init__(group, codec, error, sizes, raw, scaler)
        self._replicas = replicas
        # Replicas are reduced on FSDP's own stream, beside the work of this one.
        self._replicated: Any = None
        if replicas is not None and self._stream is not None:
            self._replicated = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._gather, self._raw_of_gather = gather, raw_of_gather
        self._alike: dict[Any, Handle] = {}
        self.comms: list[_ReduceScatter] = []
        self._pass = -1  # the autograd pass of the pending step
        self._factor: tuple[float, torch.Tensor] | None = None  # of PREMUL_SUM, as a number and on the device

    def _units(self) -> Iterator[Unit]:
        for comm in self.comms:
            yield from comm.units.values()
            yield from comm.units_of_replicas.values()

    def _trained(self) -> Iterator[str]:
        for comm in self.comms:
            for cut in comm._cuts:
                if cut.is_trained:
                    yield cut.name
                    if self._replicas is not None:
                        yield cut.name + OF_REPLICAS

    def _forget(self) -> None:
        for comm in self.comms:
            comm.forget()
        self._alike.clear()

    def _handle(
        self, codec: str, parts: list[int], dtype: torch.dtype, raw: list[bool], op: str, error: str
    ) -> Handle:
        """Returns a handle of rows of such parts, one row for each rank."""
        world, numbers = self._group.size, self._group.shard_numbers()
        in_memory = [number * len(parts) + part for number in numbers for part in range(len(parts))]
        options = dict(error=error, raw=raw * world, op=op, transactional=True, in_memory=in_memory)
        return self._made(self._group, codec, parts * world, dtype, options)

    def _handle_of_replicas(
        self, parts: list[int], dtype: torch.dtype, raw: list[bool], op: str, error: str
    ) -> Handle:
        options = dict(error=error, raw=raw, op=op, transactional=True)
        return self._made(cast(Group, self._replicas), self.codec, parts, dtype, options)

    def _made(self, group: Group, codec: str, sizes: list[int], dtype: torch.dtype, options: dict[str, Any]) -> Handle:
        """Returns a handle. Modules that are alike share one if it has no errors."""
        hashable = (tuple(one) if isinstance(one, list) else one for one in options.values())
        key = group.group, codec, tuple(sizes), dtype, *hashable
        if key in self._alike:
            return self._alike[key]
        self._wait()  # other handles' work must be done before a handle over peer memory is created
        if self._replicated is not None:
            self._replicated.synchronize()
        made = Handle(group, codec, sizes, dtype, **options)
        if not made.has_errors:
            self._alike[key] = made
        return made

    def _gathered(self, cuts: list[_Cut], output: torch.Tensor, given: torch.Tensor) -> None:
        parts, raw = [cut.size_of_part for cut in cuts], [self._raw_of_gather[cut.name] for cut in cuts]
        with self._on_stream():
            handle = self._handle(str(self._gather), parts, given.dtype, raw, "mean", "none")
            handle.all_gather_within(given.to(torch.float32, copy=True), output, self._stream_number)  # not in place

    def _reduced(
        self, comm: _ReduceScatter, output: torch.Tensor, given: torch.Tensor, op: str, factor: float | None
    ) -> None:  # fmt: skip
        check_tensor("gradient", given)
        if given.device != self._group.device:
            raise ValueError(f"gradient: one on {self._group.device} expected, got one on {given.device}")
        with self._on_stream():
            its_pass = torch._C._current_graph_task_id()
            if its_pass < 0:
                raise RuntimeError("shard: finalize_backward() is not supported; gradients are reduced in backward()")
            if not self._pending or self._complete or (its_pass != self._pass and self._has_broken_off(comm)):
                self._begin()
                self._pass, engine = its_pass, cast(Any, torch.autograd.Variable._execution_engine)
                engine.queue_callback(self._over)  # at the end of this backward pass
            unit = comm.unit(output.numel(), given.dtype, op)
            unit.in_step = True
            if self._measure and self.codec != "sign" and unit.names[0]:
                pieces = torch.split_with_sizes(given.reshape(-1), unit.handle.sizes)
                self._measured.update(self._losses(unit, (one if factor is None else one * factor for one in pieces)))
            shard = output
            if output.dtype != torch.float32 or not output.is_contiguous():
                shard = torch.empty_like(output, dtype=torch.float32, memory_format=torch.contiguous_format)
            of_values = None
            if factor is not None and self.codec != "sign":  # signs have no magnitude
                of_values = self._on_device(factor)
            unit.handle.reduce_scatter_within(given, shard, self._stream_number, of_values)
            if factor is not None and self.codec == "sign":
                shard.mul_(factor)
            if shard is not output:
                output.copy_(shard)

    def _has_broken_off(self, comm: _ReduceScatter) -> bool:
        """Returns whether the pass of the pending step has failed, when another pass reduces this module: the step has
        this module already, or it has no module. Otherwise the other pass may be one within the pass."""
        return any(each.in_step for each in comm.units.values()) or not any(each.in_step for each in self._units())

    def _checked(self, state: Any) -> list[Any]:
        if isinstance(state, (list, tuple)) and len(state) != self._group.size:
            # Another world has other parts: errors over replicas begin at 0.
            state = [_without_replicas(one) for one in state]
        return super()._checked(state)

    def _agreed_states(self, state: Any) -> list[Any]:
        if self._replicas is None:
            return super()._agreed_states(state)
        agreed = super()._agreed_states

        def check() -> tuple[list[Any], Any]:
            states = agreed(state)
            return states, states[0]["scale"]

        return on_all_ranks("state", self._replicas.group, check)

    def _keeps(self, name: str, of_server: bool) -> bool:
        """Returns like its parent, but only an all-reduce over replicas has server errors, the first half has none."""
        plain = name.removesuffix(OF_REPLICAS)
        return super()._keeps(plain, of_server) and not (of_server and plain == name)

    def _reduced_over_replicas(self, comm: _ReduceScatter, reduced: torch.Tensor, op: str) -> None:
        """Runs on the current stream, which waits for the stream of _reduced()."""
        unit = comm.unit_of_replicas(reduced.dtype, op)
        unit.in_step = True
        stream = unit.handle.stream()
        unit.handle.run_within(reduced, number_of(stream))
        if self._replicated is not None:
            self._replicated.record(stream)

    def _begin(self) -> None:
        super()._begin()
        if self._replicas is not None:
            self._replicas.check()

    def _ended(self) -> Iterator[Handle]:
        self._await_replicas()
        yield from super()._ended()

    def _await_replicas(self) -> None:
        if self._replicated is not None:
            self._stream.wait_event(self._replicated)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent, in all steps."""
        return self._group.bytes_sent + (0 if self._replicas is None else self._replicas.bytes_sent)

    @property
    def topology(self) -> str:
        """A sentence: which ranks share nodes, and the transports that they use."""
        return self._group.topology + ("" if self._replicas is None else f"; replicas: {self._replicas.topology}")

    @torch.inference_mode(False)
    def _on_device(self, factor: float) -> torch.Tensor:
        if self._factor is None or self._factor[0] != factor:
            self._factor = factor, torch.full((1,), factor, dtype=torch.float32, device=self._group.device)
        return self._factor[1]

    @eager
    def _over(self) -> None:
        self._complete, self._measure = True, False
        # Over nodes, the first half of an all-reduce flags a non-finite value only on the ranks of its part; over
        # replicas, only on the ranks with the same part.
        groups = [] if self._group.levels is None and self._replicas is None else [self._group]
        groups += [] if self._replicas is None else [self._replicas]
        if not groups:
            return
        with self._on_stream(joined=False):
            self._await_replicas()
            verdict = self._asked([unit.handle for unit in self._units() if unit.in_step])
            undone = verdict.undone.to(torch.int32)
            for group in groups:
                group.over_all(undone, dist.ReduceOp.MAX)
            verdict.undone.copy_(undone)
            self._agreed = verdict


def _factor_of(op: Any) -> float:
    """Returns the factor by which PREMUL_SUM multiplies each rank's input."""
    try:
        factor = float(op.__getstate__()[1])
    except (AttributeError, IndexError, TypeError, ValueError):
        raise ValueError(
            "op: the factor of PREMUL_SUM expected, which this PyTorch does not return; "
            "set_gradient_divide_factor() has to come before shard()"
        ) from None
    if not math.isfinite(factor) or factor == 0:
        raise ValueError(f"op: a finite factor of PREMUL_SUM other than 0 expected, got {factor}")
    return factor


def _tells_factors() -> bool:
    """Returns whether _factor_of() works."""
    try:
        return _factor_of(cast(Any, dist)._make_nccl_premul_sum(0.5)) == 0.5
    except (AttributeError, ValueError):
        return False


def _groups(module: Any) -> list[Any]:
    """Returns FSDP's parameter groups of a module, one for each mesh."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [each for each in ([state._fsdp_param_group] if groups is None else groups) if each is not None]


def _check_module(name: str, module: Any) -> None:
    """Raises unless FSDP shards a module over one mesh, and divides its gradients by None or a finite factor."""
    of = f"model: {name or type(module).__name__}"
    groups = _groups(module)
    if len(groups) > 1:
        raise ValueError(f"{of}: parameters on one mesh expected, got {len(groups)} meshes in one fully_shard()")
    for group in groups:
        if not hasattr(group.mesh_info, "shard_process_group"):
            raise TypeError(
                f"{of}: parameters that fully_shard() cuts expected; replicate() keeps them whole on every rank, "
                "as DistributedDataParallel does, whose hook is compress()"
            )
        factor = group.gradient_divide_factor
        if factor is not None and (not math.isfinite(factor) or factor == 0):
            raise ValueError(f"{of}: a finite gradient divide factor other than 0 expected, got {factor}")


def _without_replicas(state: Any) -> Any:
    """Returns the state of a rank without the errors of an all-reduce over replicas."""
    if not isinstance(state, dict):
        return state
    errors = {key: state[key] for key in ("worker", "server") if isinstance(state.get(key), dict)}
    return {
        **state,
        **{key: {name: one for name, one in its.items() if not name.endswith(OF_REPLICAS)} for key, its in errors.items()},
    }


def _parameters_of(module: torch.nn.Module, sharded: Any) -> Iterator[torch.Tensor]:
    """Yields the parameters that are sharded with this module, in FSDP's order, without those of inner modules that are
    sharded by themselves."""
    for child in module.children():
        if not isinstance(child, sharded):
            yield from _parameters_of(child, sharded)
    yield from module.parameters(recurse=False)


def _group_of(modules: Any) -> Any:
    """Returns the group over which FSDP reduces gradients."""
    info = next(group for module in modules for group in _groups(module)).mesh_info
    return getattr(info, "reduce_scatter_process_group", None) or info.shard_process_group


def _check_replicas(names: dict[Any, str], own: Group, replicas: Group) -> None:
    """Raises if a group is not one of replicas, or if a module has replicas already."""
    ranks, others = (dist.get_process_group_ranks(each.group) for each in (own, replicas))
    if len({*ranks} & {*others}) != 1:
        raise ValueError(
            f"replicate_group: ranks of other replicas, one of each, expected, as {_said(ranks)} are one replica, "
            f"got {_said(others)}"
        )
    for module, name in names.items():
        of = f"model: {name or type(module).__name__}"
        for group in _groups(module):
            if hasattr(group.mesh_info, "replicate_process_group"):
                raise ValueError(
                    f"{of}: fully_shard() on a mesh of one dimension expected with replicate_group, got one with replicas, "
                    "over which FSDP itself averages uncompressed"
                )
            hook = group._all_reduce_hook
            if hook is not None and not isinstance(getattr(hook, "__self__", None), _ReduceScatter):
                raise RuntimeError(f"{of}: it has an all-reduce hook already, and FSDP takes one")


def _check_ranks(names: dict[Any, str], over: Any) -> None:
    """Raises if a module is sharded over other ranks than those of a group."""
    expected = dist.get_process_group_ranks(over)
    for module, name in names.items():
        for group in _groups(module):
            ranks = dist.get_process_group_ranks(group.mesh_info.shard_process_group)
            if ranks != expected:
                of = name or type(module).__name__
                raise ValueError(f"group: the ranks of {of}, {_said(ranks)}, expected, got {_said(expected)}")


def shard(
    model: torch.nn.Module, codec: str = "int8", *, error: str | None = None, raw: Raw = None, momentum: bool = False,
    scaler: Any = None, group: Any = None, transport: str = "auto", timeout: float | datetime.timedelta | None = None,
    gather: str | None = None, replicate_group: Any = None,
) -> Compression:  # fmt: skip
    """Makes FSDP2 reduce its gradients compressed, in a model for which fully_shard() was called: call this after the
    last of these calls. PyTorch 2.9 or newer. Gradients must be reduced within backward(): finalize_backward() of FSDP,
    which PyTorch's pipeline stages call, raises a RuntimeError.

    The arguments are those of compress(). `group`: None: the group of the parameters' mesh, or the one that
    set_separate_reduce_scatter_group() has made before. With errors a rank keeps those of all elements that it encodes,
    not of its shard alone.

    `gather`: "int8", "mxfp8" or another block codec, in which FSDP also gathers parameters, forward and backward; None:
    uncompressed. Every rank computes with the same decoded parameters; the shards, which the optimizer steps, stay
    exact. Parameters that `raw` names are sent in float32; if `codec` is "onebit" or "sign", those with fewer than two
    dimensions or fewer than 1,024 elements are.

    `replicate_group`: the ranks that have the same shard, one of each replica of the model (HSDP). fully_shard() must
    have a mesh of one dimension, the ranks of one replica. Gradients are averaged over the group compressed, with errors
    of their own. A step is taken back on all replicas alike.
    """
    from torch.distributed.fsdp import FSDPModule

    names: dict[Any, str] = {one: name for name, one in model.named_modules() if isinstance(one, FSDPModule)}
    modules = list(names)
    if not modules:
        raise TypeError(f"model: one that fully_shard() was called for expected, got {type(model).__name__}")
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(f"PyTorch 2.9 or newer expected, got {torch.__version__}")
    for module, name in names.items():
        _check_module(name, module)
    error = settings(codec, error, scaler)
    if gather is not None and gather not in BLOCKS:
        raise ValueError(f"gather: one of {', '.join(BLOCKS)}, or None, expected, got {_said(gather)}")
    parameters: dict[str, Any] = named(model)
    cut_ones = {name: one for name, one in parameters.items() if hasattr(one, "device_mesh")}
    sharded = [(name, one) for name, one in cut_ones.items() if one.requires_grad]
    if not sharded:
        raise ValueError("model: one parameter that is sharded and requires grad expected at least, got none")
    for name, one in sharded:
        check_tensor(name, one.to_local())
    kind = sharded[0][1].device_mesh.device_type
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.cuda.current_device())
    of_raw, over = raws(parameters, codec, raw), process_group(_group_of(names) if group is None else group)
    _check_ranks(names, over)
    own = Group(over, device, timeout, through_host=transport == "gloo")
    check_transport(transport, own)
    replicas = None
    if replicate_group is not None:
        replicas = Group(process_group(replicate_group), device, timeout, through_host=transport == "gloo")
        _check_replicas(names, own, replicas)
    for module in modules:
        if module in _hooked and not _hooked[module]._closed:
            raise RuntimeError("model: its gradients are compressed already; close() ends that")
    warn_of_onebit(codec, momentum)
    if not _tells_factors():
        divided = [one for one in modules if any(each.gradient_divide_factor is not None for each in _groups(one))]
        if divided:
            warnings.warn(
                "the ranks add gradients up and FSDP divides the sum, because this PyTorch does not return the factor "
                "of PREMUL_SUM", stacklevel=2,
            )  # fmt: skip
        for module in divided:
            module.set_force_sum_reduction_for_comms(True)
    count = None if replicas is None else replicas.size
    same = {
        "codec": codec, "error": error, "transport": transport, "gather": gather, "replicas": count,
        "has a scaler": scaler is not None,
    }  # fmt: skip
    await_all("shard()", own)
    agree("shard()", own, same)
    if replicas is not None:
        shapes = {name: tuple(one.to_local().shape) for name, one in cut_ones.items()}
        await_all("shard()", replicas)
        agree("shard()", replicas, {**same, "rank in its replica": own.rank, **shapes})
    own.take_topology(transport, codec, direct=False)
    if replicas is not None:
        replicas.take_topology("flat" if transport in ("auto", "peers") else transport, codec, direct=False)
    records = {id(one.sharded_param): one for module in modules for each in _groups(module) for one in each.fsdp_params}
    cuts = {id(one): _Cut(name, one, records.get(id(one)), own.size) for name, one in cut_ones.items()}
    raw_of_gather = raws(parameters, gather, None if codec in SIGNS else raw) if gather else {}
    sizes = {cut.name: cut.size for cut in cuts.values()}
    if replicas is not None:
        sizes |= {cut.name + OF_REPLICAS: cut.size_of_part for cut in cuts.values()}
    made = _Shards(own, codec, error, sizes, of_raw, scaler, gather, raw_of_gather, replicas)
    # Modules of one call of fully_shard() form one unit, in its order.
    for several in dict.fromkeys(tuple(getattr(one._get_fsdp_state(), "_modules", [one])) for one in modules):
        its = dict.fromkeys(id(each) for one in several for each in _parameters_of(one, FSDPModule))
        about = made, names[several[0]] or type(several[0]).__name__, [cuts[each] for each in its if each in cuts]
        made.comms.append(_ReduceScatter(*about, several[0]))
        several[0].set_custom_reduce_scatter(made.comms[-1])
        if gather:
            several[0].set_custom_all_gather(_AllGather(*about))
        if replicas is not None:
            several[0].set_all_reduce_hook(made.comms[-1].over_replicas)
        _hooked.update(dict.fromkeys(several, made))
    return made
