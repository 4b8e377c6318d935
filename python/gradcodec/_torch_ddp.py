"""DistributedDataParallel's gradients, compressed."""

import datetime
import math
import warnings
import weakref
from ctypes import c_void_p, cast
from types import ModuleType
from typing import Any, Iterable, NamedTuple, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import _torch_native
from ._arguments import _said
from ._errors import GradCodecError, Status
from ._torch_eager import eager
from ._torch_groups import (
    Group, Handle, agree, await_all, check_tensor, check_transport, library, process_group,
)  # fmt: skip
from ._torch_steps import Compression, Raw, Unit, named, raws, settings, warn_of_onebit

MIB = 1 << 20
ON_ONE_NODE = 100  # MiB of an exchange between GPUs of one node, where the CPU's time counts


class _Waiting(NamedTuple):
    """A bucket of DDP that the hook was called for and that was not exchanged yet."""

    number: int  # in its pass
    buffer: torch.Tensor
    parameters: tuple[int, ...]  # by id()
    done: torch.futures.Future[torch.Tensor]


class _Exchange(Unit):
    """The parameters of the buckets that one handle takes: gradients lie one after the other in each bucket's buffer."""

    def __init__(
        self, names: Sequence[str], handle: Handle, parameters: Sequence[tuple[int, ...]], layouts: Any, record: Any
    ) -> None:  # fmt: skip
        self._record = record  # the hook in C++ reads and writes it
        super().__init__(names, handle)
        self.layouts = layouts
        self.parameters = list(parameters)  # of each bucket, by id()
        self.numbers = [len(each) for each in parameters]
        sizes = iter(handle.sizes)
        self._elements = [sum(next(sizes) for _ in each) for each in parameters]
        self.is_final = False  # DDP rebuilds its buckets once

    @property
    def in_step(self) -> bool:
        return bool(self._record.in_step)

    @in_step.setter
    def in_step(self, value: bool) -> None:
        self._record.in_step = value

    def has(self, place: int, buffer: torch.Tensor) -> bool:
        """Returns whether a bucket in this place is as long as the handle needs, which reads only its address."""
        known = place < len(self._elements) and buffer.numel() == self._elements[place]
        return known and buffer.dtype is self.handle.dtype


def _layouts(parameters: Iterable[tuple[str, torch.Tensor | None]]) -> dict[str, Any]:
    """Returns shape and strides of the parameters whose gradients DDP keeps in a bucket in another order than that of
    elements, such as channels_last. DDP keeps the strides of each that is dense."""
    found = {}
    for name, one in parameters:
        if one is not None and not one.is_contiguous():
            elements = 1
            for stride, size in sorted(zip(one.stride(), one.shape)):
                if size != 1 and stride == elements:
                    elements *= size
            if elements == one.numel():
                found[name] = one.shape, one.stride()
    return found


class _Record:
    """State of an exchange in a step. The hook in C++ has its own object for it."""

    in_step = False


class _State:
    """State of a Compression's step. The hook in C++ has its own object for it."""

    pending = complete = closed = False
    measure = True
    errors_scale: torch.Tensor | None = None
    bytes_sent = 0


class _Slot:
    """State of DDP's hook, which DDP keeps for good. The hook in C++ calls the methods. A copy of the model, whose new
    reducer has no hook, has an `_Unused` for it."""

    native: Any = None

    def __init__(self, compression: "_Buckets") -> None:
        self.compression = compression

    def __reduce__(self) -> Any:
        return _Unused, ()

    @eager
    def exchange(
        self, first: int, buffers: list[torch.Tensor], parameters: list[list[torch.Tensor]], is_last: bool
    ) -> None:
        self.compression._exchange(first, buffers, [tuple(map(id, each)) for each in parameters], is_last)

    @eager
    def begin(self) -> None:
        self.compression._begin()

    @eager
    def check_direct(self) -> None:
        self.compression._group.check_direct()

    @eager
    def enqueued(self, first: int) -> None:
        handle = self.compression._exchanges[first].handle
        handle.enqueued()
        handle.steps._run_ended(0)  # raises what a signal handler has raised in an exchange that runs in Python

    @eager
    def failed(self, first: int, status: int) -> None:
        self.compression._exchanges[first].handle.steps._failed(status)


class _Unused:
    """See _Slot."""


@eager
def compressed(
    slot: _Slot, bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:  # fmt: skip
    """Exchanges a bucket, as DDP's hook."""
    return slot.compression._reduced(bucket)


def _plain(group: Any, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(buffer.div_(group.size()), group=group, async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: buffer)


def _of_state(name: str) -> Any:
    """Returns a property for an attribute of the state, which the hook in C++ reads and writes."""
    return property(lambda self: getattr(self._state, name), lambda self, value: setattr(self._state, name, value))


class _Buckets(Compression):
    """The hook of a DistributedDataParallel. `native`: the module of the hook in C++; None: the hook is in Python."""

    _pending, _complete, _closed = map(_of_state, ("pending", "complete", "closed"))
    _measure, _errors_scale = map(_of_state, ("measure", "errors_scale"))

    def __init__(
        self, model: DistributedDataParallel, parameters: dict[str, torch.Tensor], training: Iterable[str],
        group: Group, codec: str, error: str, raw: Any, scaler: Any, least_bytes: int, native: ModuleType | None,
    ) -> None:  # fmt: skip
        self._state: Any = _State()
        super().__init__(group, codec, error, {name: one.numel() for name, one in parameters.items()}, raw, scaler)
        self._ddp_group, self._names = model.process_group, {id(one): name for name, one in parameters.items()}
        self._model = weakref.ref(model)  # the model owns this object
        self._parameter = {name: weakref.ref(one) for name, one in parameters.items()}
        self._training = list(training)
        self._exchanges: dict[int, _Exchange] = {}  # by the index of the first bucket
        self._least_bytes, self._native = least_bytes, native
        # DDP drops the result of a parameter that no rank has used, so its errors must not be sent then.
        self.keeps_unused = bool(model.find_unused_parameters) and error != "none"
        self._devices: list[int | str | torch.device] | None = None if self._stream is None else [group.device]
        self._waiting: list[_Waiting] = []
        # The current pass: its buckets and tensors so far, the id() of its first parameter, and whether it is over.
        self._buckets, self._tensors, self._first, self._is_over = 0, 0, 0, True
        logger: Any = model.logger
        self._all_tensors = int(logger._get_ddp_logging_data().ints_map["num_parameter_tensors"])  # in DDP's buckets
        if native is not None:
            lib = library().lib
            functions = lib.gc_allreduce_run, lib.gc_allreduce_flags, lib.gc_allreduce_commit, lib.gc_comm_async_error
            addresses = [cast(function, c_void_p).value for function in functions]
            self._state = native.State(*addresses, least_bytes, self._all_tensors, self._stream, self._taken_back)
            self._state.scales = scaler is not None

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent, in all steps."""
        return self._group.bytes_sent + int(self._state.bytes_sent)

    def _units(self) -> Iterable[Unit]:
        return self._exchanges.values()

    def _trained(self) -> Iterable[str]:
        return self._training

    def _forget(self) -> None:
        self._drop(list(self._exchanges))

    def _drop(self, exchanges: Iterable[int]) -> None:
        for first in exchanges:
            if self._native is not None:
                try:
                    self._state.remove(first)
                except RuntimeError as busy:
                    raise GradCodecError(str(busy), Status.BUSY) from None
            del self._exchanges[first]

    def _reduced(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer, number = bucket.buffer(), int(bucket.index())
        if self._closed:
            return _plain(self._ddp_group, buffer)
        parameters = self._parameters(bucket, buffer, number)
        # In the first pass of a static graph DDP gives all buckets the index 0, one after the other, and none is the last.
        if number == 0 and self._buckets > 0 and not self._is_over and parameters[0] != self._first:
            number = self._buckets
        if number == 0:  # the waiting buckets are of a pass that broke off
            self._waiting, self._tensors, self._first = [], 0, parameters[0]
        self._buckets = number + 1
        self._tensors += len(parameters)
        self._is_over = bucket.is_last() or self._tensors == self._all_tensors
        with self._on_stream(joined=False):
            if self._waiting and self._waiting[0].buffer.dtype is not buffer.dtype:
                self._exchange_waiting(False)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=self._devices)
            self._waiting.append(_Waiting(number, buffer, parameters, done))
            if self._is_over or sum(each.buffer.nbytes for each in self._waiting) >= self._least_bytes:
                self._exchange_waiting(self._is_over)
        return done

    def _exchange_waiting(self, is_last: bool) -> None:
        waiting, self._waiting = self._waiting, []
        buffers, parameters = [each.buffer for each in waiting], [each.parameters for each in waiting]
        self._exchange(waiting[0].number, buffers, parameters, is_last)
        for each in waiting:
            each.done.set_result(each.buffer)  # on a GPU it covers the work on the stream so far

    def _parameters(self, bucket: Any, buffer: torch.Tensor, number: int) -> tuple[int, ...]:
        """Returns the id() of each parameter. Reading a list of many parameters is slow, and a final list is known."""
        first = max((first for first in self._exchanges if first <= number), default=number)
        known = self._exchanges.get(first)
        if known is not None and known.is_final and self._is_final() and known.has(number - first, buffer):
            return known.parameters[number - first]
        return tuple(map(id, bucket.parameters()))

    def _is_final(self) -> bool:
        return bool(getattr(self._model(), "_has_rebuilt_buckets", False))

    def _exchange(
        self, first: int, buffers: list[torch.Tensor], parameters: list[tuple[int, ...]], is_last: bool
    ) -> None:
        """Enqueues the exchange of these buckets. `first`: index of the first one."""
        if first == 0:
            self._begin()
        own = self._exchange_of(first, buffers, parameters, is_last)
        own.in_step = True
        if self.keeps_unused and own.handle.has_errors:
            own.set_aside(self._unused(own, buffers), self._worker, self._server)
        if self._measure and self.codec != "sign":
            self._measured.update(self._losses(own, _gradients(own, buffers)))
        if len(buffers) == 1:
            own.handle.run_within(buffers[0], self._stream_number)
        else:
            own.handle.run_within_each(buffers, own.numbers, self._stream_number)
        if is_last:
            self._complete, self._measure = True, False

    def _unused(self, own: _Exchange, buffers: list[torch.Tensor]) -> list[str]:
        """Returns the parameters whose gradients are 0 on all ranks. Every rank calls this."""
        are_used = torch.stack([gradient.any() for gradient in _gradients(own, buffers)]).int()
        used = self._group.over_all(are_used, dist.ReduceOp.MAX).tolist()
        return [name for name, is_used in zip(own.names, used) if not is_used]

    def _exchange_of(
        self, first: int, buffers: list[torch.Tensor], parameters: list[tuple[int, ...]], is_last: bool
    ) -> _Exchange:
        """Returns the all-reduce of these parameters. Buckets are alike on all ranks; DDP rebuilds them after the first
        pass."""
        known = self._exchanges.get(first)
        # PyTorch must track the last exchange, so that it finds a rank that does not take part.
        if (
            known is not None and known.parameters == parameters and not (is_last and known.handle.is_direct)
            and all(known.has(place, buffer) for place, buffer in enumerate(buffers))
        ):  # fmt: skip
            known.is_final = self._is_final()
            return known
        for buffer in buffers:
            check_tensor("gradient", buffer)
        others = [old for old, one in self._exchanges.items() if not one.in_step]
        for old in others:
            self._exchanges[old].read(self._worker, self._server)
        self._wait()
        self._drop(others)
        for buffer, own in zip(buffers, parameters):
            elements = sum(self._sizes[self._names[each]] for each in own)
            if buffer.numel() != elements or not buffer.is_contiguous():
                raise ValueError(f"gradient: {elements} contiguous elements expected, got shape {list(buffer.shape)}")
        names = [self._names[each] for own in parameters for each in own]
        handle = Handle(
            self._group, self.codec, [self._sizes[name] for name in names], buffers[0].dtype, error=self.error,
            raw=[self._raw[name] for name in names], transactional=True, direct=not is_last,
        )  # fmt: skip
        record: Any = _Record()
        if self._native is not None:
            # These exchanges run in Python, or have a watch there.
            is_reported = self._group.levels is not None or handle.sent == 0
            about = handle.sizes, handle.pends, handle.is_direct, is_reported, handle.sent
            record = self._native.Exchange(handle.steps._open(), *about, self._stream, self._stream_number)
        layouts = _layouts((name, self._parameter[name]()) for name in names)
        made = _Exchange(names, handle, parameters, layouts, record)
        made.give(self._worker, self._server)
        if self._native is not None:
            self._state.put(first, record)
            over = self._group.levels or self._group.peers  # communicators that _begin() checks
            self._state.checked = [] if over is None else over.handles()
        self._exchanges[first] = made
        return made


def _gradients(own: _Exchange, buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the gradient of each parameter, as it lies in its bucket."""
    sizes, gradients = iter(own.handle.sizes), list[torch.Tensor]()
    for buffer, number in zip(buffers, own.numbers):
        gradients += torch.split_with_sizes(buffer, [next(sizes) for _ in range(number)])
    return gradients


def _unwrapped(model: Any) -> DistributedDataParallel:
    ddp = getattr(model, "_orig_mod", model)  # torch.compile()'s
    if not isinstance(ddp, DistributedDataParallel):
        kind = type(ddp).__name__
        raise TypeError(f"model: a DistributedDataParallel expected, got {kind}; wrap it in one first")
    return ddp


def compress(
    model: torch.nn.Module, codec: str = "int8", *, error: str | None = None, raw: Raw = None, momentum: bool = False,
    scaler: Any = None, group: Any = None, transport: str = "auto", timeout: float | datetime.timedelta | None = None,
    exchange_mib: float | None = None, native: bool | None = None,
) -> Compression:  # fmt: skip
    """Lets DistributedDataParallel exchange its gradients compressed: registers its communication hook.

    `codec`: "int8", "mxfp8" and "bf16" under every optimizer; "int4" and "mxfp4" with the error feedback that is their
    default; "onebit" for SGD without momentum, or with OneBitSGD and OneBitAdam for the rest. `error`: "float32",
    "bfloat16" or "none": how this rank keeps what a step loses, to add it to the next. None: "none" for bf16, mxfp8 and
    int8, "float32" for the others. `raw`: the gradients that are sent in float32 instead: a function of name and
    parameter, or names; None: those with fewer than two dimensions or fewer than 1,024 elements. `momentum`: onebit
    gets momenta instead of gradients, so no warning is needed. `scaler`: the torch.amp.GradScaler, so that errors
    follow its scale. `group`: of the model's ranks; None: the model's own.

    `transport`: "auto": if several nodes have the same number of ranks, at least two, gradients are summed within each
    node first, and codes are exchanged between nodes. Ranks of a node write into each other's memory if NVLink links
    all of their GPUs; all other exchanges use the group's own backend. "flat": one level, whatever nodes there are.
    "peers": all ranks on GPUs of one node, over each other's memory. "nccl" and "gloo" (through host memory): both
    levels over it. Ranks with the same host name and boot id share a node; the variable GRADCODEC_NODE names the node
    instead. `Compression.topology` describes the result. "sign" has one level. `timeout`: of an exchange, in seconds or
    as a timedelta; None: the group's own.

    `exchange_mib`: buckets are exchanged together, in the order of their indices, once they have this many MiB; the
    last exchange takes the rest. 0: each bucket alone. None: 100 on the GPUs of one node, otherwise 0. The same on
    every rank. Fewer exchanges take less CPU time; the first of them begins later.

    `native`: whether the hook runs in C++, without Python in a step that is like the one before. The results are the
    same, and ranks may differ. None: in C++ on a GPU; if it cannot be compiled it runs in Python, with a warning. True:
    also on a CPU; if it cannot be compiled, every rank raises a RuntimeError. False: in Python. The first call on a
    machine compiles it and keeps it in the cache folder of GradCodec; `python -m gradcodec.torch build` does so ahead
    of time.
    """
    ddp = _unwrapped(model)
    if getattr(ddp, "_use_python_reducer", False):
        raise RuntimeError("model: made under optimize_ddp = 'python_reducer', which has no buckets to be compressed")
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise RuntimeError("model: made with skip_all_reduce_unused_params=True, which leaves the hook out for some buckets")
    error = settings(codec, error, scaler)
    over = process_group(ddp.process_group if group is None else group)
    ranks, its = (sorted(dist.get_process_group_ranks(each)) for each in (over, ddp.process_group))
    if ranks != its:
        raise ValueError(f"group: the ranks of the model expected, {_said(its)}, got {_said(ranks)}")
    parameters = named(ddp.module)
    ignored = {id(one) for name, one in ddp.module.named_parameters() if name in ddp.parameters_to_ignore}
    for name, module in ddp.module.named_modules():
        kind = torch.nn.Embedding, torch.nn.EmbeddingBag
        if isinstance(module, kind) and module.sparse and id(module.weight) not in ignored:
            raise TypeError(f"model: {name} has sparse gradients, which compress() does not send; sparse=False makes them dense")
    training = {name: one for name, one in parameters.items() if one.requires_grad and id(one) not in ignored}
    if not training:
        raise ValueError("model: one parameter that is a tensor and requires grad expected at least, got none")
    for name, one in training.items():
        check_tensor(name, one)
    devices = {one.device for one in training.values()}
    if len(devices) != 1:
        raise ValueError(f"model: parameters on one device expected, got {', '.join(sorted(map(str, devices)))}")
    of_raw, device = raws(parameters, codec, raw), devices.pop()
    own = Group(over, device, timeout, through_host=transport == "gloo")
    check_transport(transport, own)
    hooks: list[Any] = ddp._comm_hooks
    hooks[:] = [each for each in hooks if not isinstance(each[1], _Unused)]
    slot = hooks[0][1] if len(hooks) == 1 and hooks[0][0] is compressed else None
    if hooks and (slot is None or not slot.compression._closed):
        raise RuntimeError("model: it has a communication hook already, and DistributedDataParallel takes one")
    if native is not None and not isinstance(native, bool):
        raise TypeError(f"native: True, False or None expected, got {_said(native)}")
    least_mib = _mib(exchange_mib)
    warn_of_onebit(codec, momentum)
    await_all("compress()", own)
    module, missing = None, None
    if slot is not None and slot.native is None and native is not False:
        missing = "the model's first hook runs in Python, and DistributedDataParallel keeps it"
    elif native or (native is None and device.type == "cuda") or (slot is not None and slot.native is not None):
        try:
            module = _torch_native.load()
            module.check(ddp.reducer, ddp.process_group)
        except (_torch_native.Unavailable, RuntimeError) as failure:
            module, missing = None, str(failure)
    same = {
        "codec": codec, "error": error, "transport": transport, "exchange_mib": exchange_mib,
        "has a scaler": scaler is not None,
    }  # fmt: skip
    for rank, lacking in enumerate(agree("compress()", own, same, missing if native else None)):
        if lacking:
            raise RuntimeError(f"native: there is no hook in C++ on rank {rank}: {lacking}")
    if missing and native is None:
        warnings.warn(f"the hook runs in Python, which takes more of the host's time: {missing}", stacklevel=2)
    own.take_topology(transport, codec)
    if least_mib is None:
        least_mib = ON_ONE_NODE if device.type == "cuda" and len(own.nodes or ()) == 1 else 0
    made = _Buckets(ddp, parameters, training, own, codec, error, of_raw, scaler, int(least_mib * MIB), module)
    if slot is not None:
        slot.compression = made
    else:
        slot = _Slot(made)
        if module is not None:
            slot.native = module.Slot(slot, ddp.process_group)
            module.register(ddp.reducer, slot.native)
            logger: Any = ddp.logger
            logger._set_comm_hook_name(compressed.__qualname__)
            hooks.append((compressed, slot))
        else:
            ddp.register_comm_hook(slot, compressed)
    if slot.native is not None:
        made._state.in_python = native is False or made.keeps_unused
        slot.native.take(made._state)
    return made


def _mib(given: Any) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < math.inf:
        raise ValueError(f"exchange_mib: MiB from 0 up, or None, expected, got {_said(given)}")
    return float(given)
