"""The compressed all-reduce of a list of tensors: once, or repeatedly with the errors that it keeps."""

import datetime
from typing import Any, Iterable, Sequence

import torch
import torch.distributed as dist

from ._arguments import _arrays, _said
from ._torch_eager import eager
from ._torch_groups import (
    DTYPES, Group, Handle, Turn, check_tensor, check_transport, kept, known_codec, process_group, seconds,
)  # fmt: skip
from ._torch_steps import Compression, Unit, settings


def _tensors(name: str, given: Any, written: bool = True) -> Sequence[torch.Tensor]:
    """Checks and returns one tensor or several, of one device. `written`: results are written to them."""
    tensors = [given] if isinstance(given, torch.Tensor) else _arrays(name, given, "tensors")
    recording = torch.is_grad_enabled()
    device: Any = getattr(tensors[0], "device", None) if tensors else None
    for number, tensor in enumerate(tensors):
        if not (
            isinstance(tensor, torch.Tensor) and tensor.device == device and tensor.dtype in DTYPES
            and tensor.layout is torch.strided and not tensor.is_nested and not (recording and tensor.requires_grad)
            and not hasattr(tensor, "device_mesh")
            and (not written or tensor.is_contiguous() or not _shares_elements(tensor))
        ):  # fmt: skip
            _refuse(name, tensors, number)
    if tensors and device.type not in ("cpu", "cuda"):
        check_tensor(f"{name}[0]", tensors[0])
    return tensors


def _refuse(name: str, given: Sequence[Any], number: int) -> None:
    """Raises what is wrong with one of the tensors."""
    name, tensor = f"{name}[{number}]", given[number]
    if not isinstance(tensor, torch.Tensor):
        hint = "; leave out what has no gradient" if tensor is None else ""
        raise TypeError(f"{name}: a tensor of PyTorch expected, got {_said(tensor)}{hint}")
    check_tensor(name, tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: requires grad, so write to it within torch.no_grad()")
    if tensor.device == given[0].device:
        raise ValueError(f"{name}: several elements are one in memory, as after expand(); clone() gives each its own")
    raise ValueError(f"{name}: on {given[0].device}, as the first, expected, got {tensor.device}")


def _shares_elements(tensor: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))


def _check_op(op: Any, codec: str) -> None:
    if op not in ("mean", "sum") or (op, codec) == ("sum", "sign"):
        raise ValueError(f"op: {'mean' if codec == 'sign' else 'mean or sum'} expected, got {_said(op)}")


class AllReduce(Compression):
    """An all-reduce of tensors like the given ones, which keeps its errors from one call to the next.

    `like`: one tensor, or several of one device, in float32, float16 or bfloat16, with the same shapes and dtypes on
    every rank; only shapes and dtypes are used. `codec`, `error`, `transport`, `timeout`: as in compress(). `op`:
    "mean" or "sum"; "sign" has only "mean", which is the sign of the majority. `group`: of torch.distributed; None: the
    default one. Every rank of it makes an AllReduce, and calls run() and load_state_dict().

    Each run() is a step. It is pending until the next one, or until commit(), rollback(), state_dict() or close(). It
    is then taken back, so that the errors are those before it, if a value was not finite on any rank or run() failed.
    Without errors there is nothing to take back, and `taken_back` counts the runs up to a commit() as one step.
    state_dict() and stats() name each tensor by its number in `like`, as a string. A call works on the current stream,
    after the last call.
    """

    _kind = "AllReduce"

    def __init__(
        self, like: torch.Tensor | Sequence[torch.Tensor], codec: str = "int8", *, error: str | None = None,
        op: str = "mean", group: Any = None, timeout: float | datetime.timedelta | None = None, transport: str = "auto",
    ) -> None:  # fmt: skip
        error = settings(codec, error, None)
        _check_op(op, codec)
        with torch.no_grad():
            tensors = _tensors("like", like, written=False)
        if not tensors:
            raise ValueError("like: one tensor expected at least, got none")
        own = Group(process_group(group), tensors[0].device, timeout, transport == "gloo", in_turns=True)
        check_transport(transport, own)
        own.take_topology(transport, codec, direct=False)
        self._make(own, tensors, codec, error, op)
        self._prepare()

    @torch.inference_mode(False)  # inference tensors cannot be written to outside inference mode
    def _make(self, group: Group, like: Sequence[torch.Tensor], codec: str, error: str, op: str) -> None:
        sizes = {str(number): one.numel() for number, one in enumerate(like)}
        super().__init__(group, codec, error, sizes, dict.fromkeys(sizes, False), None)
        self._op, self._about = op, [(one.shape, one.dtype) for one in like]
        self._by_dtype = dict[torch.dtype, tuple[Unit, list[int]]]()

    @classmethod
    def _of(
        cls, group: Group, like: Sequence[torch.Tensor], codec: str, op: str, error: str = "none"
    ) -> "AllReduce":  # fmt: skip
        """Returns one over a group that others use, too. It measures no losses."""
        made = cls.__new__(cls)
        made._make(group, like, codec, error, op)
        made._measure = False
        return made

    @eager
    def run(self, tensors: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Replaces tensors on every rank by their mean or sum over the ranks. All ranks end with the same bytes. Ends
        the pending step, and begins one."""
        self._open()
        given = _tensors("tensors", tensors)
        if len(given) != len(self._about):
            raise ValueError(f"tensors: {len(self._about)} expected, got {len(given)}")
        for number, (one, (shape, dtype)) in enumerate(zip(given, self._about)):
            if (one.shape, one.dtype, one.device) != (shape, dtype, self._group.device):
                of = f"shape {list(shape)} in {dtype} on {self._group.device}"
                got = f"{list(one.shape)} in {one.dtype} on {one.device}"
                raise ValueError(f"tensors[{number}]: {of} expected, got {got}")
        with self._on_stream() as stream:
            self._begin()
            self._exchange(given, stream)
            self._complete, self._measure = True, False

    def _on_stream(self, joined: bool = True) -> Turn:
        """Returns a context for the current stream, in turns with the other calls of the group."""
        turn = self._group.turn()
        self._stream_number = turn.stream_number
        return turn

    def _wait(self) -> None:
        if self._group.device.type == "cuda":
            torch.cuda.current_stream(self._group.device).synchronize()

    def _begin(self) -> None:
        """Begins a step. Without errors no run has to end before the next one: flags add up until commit()."""
        if self._has_errors or not self._complete:
            super()._begin()
        else:
            self._group.check()
            self._pending, self._complete = True, False

    def _exchange(self, given: Sequence[torch.Tensor], stream: int) -> None:
        self._prepare()
        for unit, numbers in self._by_dtype.values():
            own = [given[number] for number in numbers]
            unit.in_step = True
            if self._measure and self.codec != "sign":
                self._measured.update(self._losses(unit, (tensor.reshape(-1) for tensor in own)))
            unit.handle.run(own, stream)

    def _prepare(self) -> None:
        """Makes the handles, unless they exist. Every rank calls this."""
        if not self._by_dtype:
            self._by_dtype.update(self._units_made())

    def _units_made(self) -> dict[torch.dtype, tuple[Unit, list[int]]]:
        """Returns a unit for each dtype, and the numbers of its tensors. Every rank calls this."""
        made: dict[torch.dtype, tuple[Unit, list[int]]] = {}
        for dtype in dict.fromkeys(dtype for _, dtype in self._about):
            numbers = [number for number, (_, its) in enumerate(self._about) if its is dtype]
            names = [str(number) for number in numbers]
            sizes, error = [self._sizes[name] for name in names], self.error
            handle = Handle(self._group, self.codec, sizes, dtype, error=error, op=self._op, transactional=True)
            made[dtype] = Unit(names, handle), numbers
            made[dtype][0].give(self._worker, self._server)
        return made

    def _units(self) -> Iterable[Unit]:
        return [unit for unit, _ in self._by_dtype.values()]

    def _forget(self) -> None:
        self._by_dtype.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns the errors of this rank, by the numbers of tensors, for load_state_dict(): every rank saves its own.
        Ends the pending step. Needs no other rank."""
        return {**super().state_dict(), **self._shapes()}

    def _shapes(self) -> dict[str, Any]:
        return {"op": self._op, "shapes": [tuple(shape) for shape, _ in self._about]}

    def _checked(self, state: Any) -> list[Any]:
        states, own = super()._checked(state), self._shapes()
        for one in states:
            for name, expected in own.items():
                if one.get(name) != expected:
                    raise ValueError(f"state: {name} {expected} expected, got {one.get(name)}")
        factor = len(states) / self._group.size
        if self._op == "mean" or isinstance(state, dict) or factor == 1:
            return states
        # load_state_dict() takes the mean of them. For a sum in a world of another size the total must stay.
        return [
            {**one, "worker": {name: errors * factor for name, errors in one["worker"].items()}} for one in states
        ]


@eager
def all_reduce(
    tensors: torch.Tensor | Sequence[torch.Tensor], codec: str = "int8", *, op: str = "mean", group: Any = None,
    timeout: float | datetime.timedelta | None = None, transport: str = "auto",
) -> None:  # fmt: skip
    """Replaces tensors on every rank by their mean or sum over the ranks, compressed on the way. All ranks end with the
    same bytes. The errors of a call are lost; AllReduce carries them from one call to the next.

    `tensors`: one, or several of one device, in float32, float16 or bfloat16, with the same shapes and dtypes on every
    rank. `codec`: "int8", "mxfp8", "bf16", "int4", "mxfp4", "onebit" or "sign". `op`: "mean" or "sum"; "sign" has only
    "mean", which is the sign of the majority. `group`: of torch.distributed, whose ranks all call this; None: the
    default one. `timeout`: seconds, or a timedelta; None: the group's own. `transport`: as in compress().

    A rank that refuses its tensors, for example because two of them share memory, sends nothing: the other ranks wait
    for its next call, or until the timeout.

    The setup of a call is kept for the next with the same shapes, dtypes, device and options: at most 64 of a group.
    """
    known_codec(codec)
    _check_op(op, codec)
    given = _tensors("tensors", tensors)
    known, wait = kept(process_group(group)), seconds(timeout)
    if not given:
        return
    device, about = given[0].device, tuple([(tensor.shape, tensor.dtype) for tensor in given])
    made = known.handle(
        (device, about, codec, op, wait, str(transport)),
        lambda: AllReduce._of(known.group(device, wait, transport, codec), given, codec, op),
    )
    with made._on_stream() as stream:
        made._exchange(given, stream)
