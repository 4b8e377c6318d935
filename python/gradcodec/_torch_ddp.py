"""DistributedDataParallel's gradients, compressed."""

import datetime
import weakref
from typing import Any, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ._arguments import _said
from ._torch_groups import Group, Handle, check_tensor, check_transport, eager, process_group
from ._torch_steps import Compression, Raw, Unit, named, raws, settings, warn_of_onebit


class _Bucket(Unit):
    """The parameters that are in one bucket of DDP, whose gradients lie one after the other in its buffer."""

    def __init__(self, parameters: list[int], names: Sequence[str], handle: Handle) -> None:
        super().__init__(names, handle)
        self.parameters = parameters  # by id()
        self.is_final = False  # DDP arranges its buckets anew once
        self._elements = sum(handle.sizes)

    def is_of(self, buffer: torch.Tensor) -> bool:
        """Whether the handle, which looks at no more than the address, stays within the buffer."""
        return buffer.dtype is self.handle.dtype and buffer.numel() == self._elements


class _Slot:
    """What DDP keeps as the state of its hook, which it has for good."""

    def __init__(self, compression: "_Buckets") -> None:
        self.compression = compression


@eager
def compressed(
    slot: _Slot, bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:  # fmt: skip
    """DDP's hook."""
    return slot.compression._reduced(bucket)


def _plain(group: Any, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(buffer.div_(group.size()), group=group, async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: buffer)


class _Buckets(Compression):
    """The hook of a DistributedDataParallel."""

    def __init__(
        self, model: DistributedDataParallel, parameters: dict[str, torch.Tensor], group: Group, codec: str, error: str,
        raw: Any, scaler: Any,
    ) -> None:  # fmt: skip
        super().__init__(group, codec, error, {name: one.numel() for name, one in parameters.items()}, raw, scaler)
        self._ddp_group, self._names = model.process_group, {id(one): name for name, one in parameters.items()}
        self._model = weakref.ref(model)  # which keeps this
        self._buckets: dict[int, _Bucket] = {}
        self._devices: list[int | str | torch.device] | None = None if self._stream is None else [group.device]

    def _units(self) -> Iterable[Unit]:
        return self._buckets.values()

    def _forget(self) -> None:
        self._buckets.clear()

    def _reduced(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if self._closed:
            return _plain(self._ddp_group, buffer)
        with self._on_stream(joined=False):
            if bucket.index() == 0:
                self._begin()
            own = self._bucket(bucket, buffer)
            own.in_step = True
            if self._measure and self.codec != "sign":
                self._measured.update(self._losses(own, buffer))
            own.handle.run_within(buffer, self._error_factor, self._stream_number)
            if bucket.is_last():
                self._complete, self._measure = True, False
            # On a GPU it stands for what is on the stream by now.
            done: Any = torch.futures.Future(devices=self._devices)
            done.set_result(buffer)
        future: torch.futures.Future[torch.Tensor] = done
        return future

    def _bucket(self, bucket: Any, buffer: torch.Tensor) -> _Bucket:
        """The all-reduce of these parameters. Buckets are alike on all ranks; DDP arranges them anew after the first
        pass."""
        index, is_final = bucket.index(), getattr(self._model(), "_has_rebuilt_buckets", False)
        known = self._buckets.get(index)
        must_be_seen = bucket.is_last()  # by PyTorch, which finds a rank that does not come
        if known is not None and (not known.is_of(buffer) or (must_be_seen and known.handle.is_direct)):
            known = None
        if known is not None and is_final and known.is_final:  # a list of many parameters takes its time
            return known
        parameters = [*map(id, bucket.parameters())]
        if known is not None and known.parameters == parameters:
            known.is_final = is_final
            return known
        check_tensor("gradient", buffer)
        others = [old for old, one in self._buckets.items() if not one.in_step]
        for old in others:
            self._buckets[old].read(self._worker, self._server)
        self._wait()
        for old in others:
            del self._buckets[old]
        names = [self._names[each] for each in parameters]
        raw = [self._raw[name] for name in names]
        sizes, error = [self._sizes[name] for name in names], self.error
        if buffer.numel() != sum(sizes) or not buffer.is_contiguous():
            raise ValueError(f"gradient: {sum(sizes)} contiguous elements expected, got shape {list(buffer.shape)}")
        handle = Handle(
            self._group, self.codec, sizes, buffer.dtype, error=error, raw=raw, transactional=True,
            direct=not must_be_seen,
        )  # fmt: skip
        self._buckets[index] = made = _Bucket(parameters, names, handle)
        made.give(self._worker, self._server)
        return made


def _unwrapped(model: Any) -> DistributedDataParallel:
    ddp = getattr(model, "_orig_mod", model)  # torch.compile()'s
    if not isinstance(ddp, DistributedDataParallel):
        kind = type(ddp).__name__
        raise TypeError(f"model: a DistributedDataParallel expected, got {kind}; wrap it in one first")
    return ddp


def compress(
    model: torch.nn.Module, codec: str = "int8", *, error: str | None = None, raw: Raw = None, momentum: bool = False,
    scaler: Any = None, group: Any = None, transport: str = "auto", timeout: float | datetime.timedelta | None = None,
) -> Compression:  # fmt: skip
    """Lets DistributedDataParallel exchange its gradients compressed: registers its communication hook.

    `codec`: "int8", "mxfp8" and "bf16" under every optimizer; "int4" and "mxfp4" with the error feedback that is their
    default; "onebit" for SGD without momentum, or with OneBitSGD and OneBitAdam for the rest. `error`: "float32",
    "bfloat16" or "none": how this rank keeps what a step loses, to add it to the next. None: "none" for bf16, mxfp8 and
    int8, "float32" for the others. `raw`: which gradients travel in float32 instead: a function of name and parameter,
    or names; None: those with fewer than two dimensions or fewer than 1,024 elements. `momentum`: what is given to
    onebit is a momentum already, so there is nothing to warn of. `scaler`: the torch.amp.GradScaler, so that errors
    follow its scale. `group`: of the model's ranks; None: the model's own.

    `transport`: "auto": where several nodes have the same number of ranks, at least two, gradients are summed within each
    node first, and codes are exchanged between nodes. Ranks of a node write into each other's memory where NVLink
    joins all of them; all else goes over the group's own backend. "flat": one level, whatever nodes there are. "peers": all ranks
    on GPUs of one node, over each other's memory. "nccl" and "gloo" (through host memory): both levels over it. Which ranks
    share a node is found by the host's name and boot id; the variable GRADCODEC_NODE names the node instead.
    `Compression.topology` says what was found. "sign" has one level. `timeout`: of an exchange, in seconds or as a
    timedelta; None: the group's own.
    """
    ddp = _unwrapped(model)
    if getattr(ddp, "_use_python_reducer", False):
        raise RuntimeError("model: made under optimize_ddp = 'python_reducer', which has no buckets to be compressed")
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
            raise TypeError(f"model: {name} has sparse gradients, which are not sent so; sparse=False makes them dense")
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
    slot = hooks[0][1] if len(hooks) == 1 and hooks[0][0] is compressed else None
    if hooks and (slot is None or not slot.compression._closed):
        raise RuntimeError("model: it has a communication hook already, and DistributedDataParallel takes one")
    warn_of_onebit(codec, momentum)
    own.take_topology(transport, codec)
    made = _Buckets(ddp, parameters, own, codec, error, of_raw, scaler)
    if slot is not None:
        slot.compression = made
    else:
        ddp.register_comm_hook(_Slot(made), compressed)
    return made
