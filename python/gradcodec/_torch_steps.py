"""Steps that are taken back on all ranks alike, and errors by parameter names, for the hooks of DistributedDataParallel
and of FSDP2."""

import operator
import warnings
from collections import Counter
from contextlib import nullcontext
from typing import Any, Callable, Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from ._abi import ERRORS, SIGNS
from ._arguments import _said
from ._codecs import Codec
from ._torch_eager import eager
from ._torch_groups import Group, Handle, Verdict, known_codec, library, number_of
from ._torch_states import FORMAT, LARGEST, LARGEST_OF_SIGNS, check_all, on_all_ranks

ALONE = "bf16", "mxfp8", "int8"  # precise enough without errors
Raw = Callable[[str, torch.Tensor], bool] | Collection[str] | None
Errors = dict[str, torch.Tensor]
Parts = dict[str, list[tuple[int, torch.Tensor]]]


class Unit:
    """Parameters that are reduced together, by one handle, a tensor each.

    `layouts`: shape and strides of parameters whose elements lie in another order in the handle's tensors. Errors that
    are read and given are in the order of elements. `aside`: parameters whose errors wait outside of the handle.
    `holds`: true if the handle has the errors of these parameters; otherwise they wait, or another unit has them.
    """

    holds = False

    layouts: dict[str, tuple[Sequence[int], Sequence[int]]] = {}

    def __init__(self, names: Sequence[str], handle: Handle) -> None:
        self.names, self.handle, self.in_step, self.aside = tuple(names), handle, False, frozenset[str]()

    def read(self, worker: Errors, server: Parts) -> None:
        """Adds the unit's errors to `worker` and `server`, by parameter names, except those of raw segments."""
        if self.handle.has_errors and self.holds:
            of_worker, of_server = self.handle.errors()
            raw = self.handle.raw or [False] * len(self.names)
            for name, one, is_raw in zip(self.names, of_worker, raw):
                if not is_raw and name not in self.aside:
                    worker[name] = self._in_memory(name, one).reshape(-1)
            for number, first, part in of_server:
                name = self.names[number]
                if raw[number] or name in self.aside:
                    continue
                if name in self.layouts:  # its elements are in another order
                    whole = part.new_zeros(self.handle.sizes[number])
                    whole[first : first + part.numel()] = part
                    first, part = 0, self._in_memory(name, whole).reshape(-1)
                server.setdefault(name, []).append((first, part))

    def _in_memory(self, name: str, errors: torch.Tensor) -> torch.Tensor:
        """Returns one tensor of the handle, in the parameter's shape if it has a layout."""
        if name not in self.layouts:
            return errors
        shape, strides = self.layouts[name]
        return errors.as_strided(shape, strides, errors.storage_offset())

    def give(self, worker: Errors, server: Parts) -> None:
        """Takes the errors that wait for these parameters. Each rank has server errors of some parts; all ranks
        together have all parts."""
        if self.handle.has_errors:
            self._give(worker, server)
        self.holds = True

    def _give(self, worker: Errors, server: Parts) -> None:
        group = self.handle.group
        if group.on_one(any(name in worker or name in server for name in self.names)):
            # A node's worker errors are summed and divided anew among its ranks. Server errors are 0 on all other
            # ranks.
            self._take(worker, server, group.over_node, group.over_all)

    def take_over(self, former: "Unit | None", worker: Errors, server: Parts) -> None:
        """Takes the errors that another unit has, or that wait. Every rank calls this."""
        if former is not None:
            former.read(worker, server)
            former.holds = False
        self.give(worker, server)

    def set_aside(self, names: Iterable[str], worker: Errors, server: Parts) -> None:
        """Makes the errors of these parameters wait in `worker` and `server`; the handle keeps the errors of all
        others. Needs no other rank."""
        aside = frozenset(names)
        if aside != self.aside:
            self.read(worker, server)
            self.aside = aside
            self._take(worker, server)

    def _take(
        self, worker: Errors, server: Parts, over_node: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
        over_all: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    ) -> None:  # fmt: skip
        """Moves the waiting errors of these parameters to the handle, except those set aside. If a collective fails
        before, they still wait. Makes one row of all elements after the other, so that memory for one is enough."""

        def of_worker(name: str, own: torch.Tensor) -> None:
            if name in worker:
                own.copy_(worker[name])

        def of_server(name: str, own: torch.Tensor) -> None:
            for first, part in server.get(name, []):
                own[first : first + part.numel()] += part

        self.handle.take_errors(worker=over_node(self._row(of_worker)))
        self.handle.take_errors(server=over_all(self._row(of_server)))
        self._no_longer_wait(worker, server)

    def _no_longer_wait(self, worker: Errors, server: Parts) -> None:
        for name in {*self.names} - self.aside:
            worker.pop(name, None)
            server.pop(name, None)

    def _row(self, fill: Callable[[str, torch.Tensor], None]) -> torch.Tensor:
        """Returns the errors of all elements in the order of the handle's tensors."""
        sizes = self.handle.sizes
        row = torch.zeros(sum(sizes), dtype=torch.float32, device=self.handle.group.device)
        for name, own in zip(self.names, torch.split_with_sizes(row, sizes)):
            if name in self.aside:
                continue
            fill(name, own)
            if name in self.layouts:
                at = self._in_memory(name, own)
                at.copy_(own.clone().view(at.shape))
        return row


def eager_name(name: str) -> str:
    """Returns the name without the `_orig_mod` that torch.compile() inserts."""
    return ".".join(word for word in name.split(".") if word != "_orig_mod")


def plain_name(name: str) -> str:
    """Returns the name without DDP's `module` in front, too."""
    words = eager_name(name).split(".")
    while len(words) > 1 and words[0] == "module":
        words = words[1:]
    return ".".join(words)


def named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns all parameters by their plain names: one that requires no gradient may get one later, or be in an older
    bucket of DDP. If several have one plain name, such as `weight` and `module.weight`, they keep `module`."""
    given = [(eager_name(name), one) for name, one in model.named_parameters()]
    numbers = Counter(plain_name(name) for name, _ in given)
    found: dict[str, torch.Tensor]
    found = {name if numbers[plain_name(name)] > 1 else plain_name(name): one for name, one in given}
    if len(found) != len(given):
        raise ValueError("model: two parameters have one name without `_orig_mod`")
    return found


class Compression:
    """The hook of a model, which compress() or shard() registers, and the errors that it keeps.

    A *step* is one backward pass that synchronizes. It is pending until the next one begins, or until commit(),
    rollback(), state_dict() or close(). Then all buckets end alike. If any bucket on any rank has a non-finite value,
    the step is taken back: the errors are those before it. So is a pass that broke off. Gradients stay as they are,
    then non-finite on every rank, so that all ranks can skip the optimizer's step.
    """

    _kind = "Compression"

    def __init__(
        self, group: Group, codec: str, error: str, sizes: dict[str, int], raw: dict[str, bool], scaler: Any
    ) -> None:
        self.codec, self.error = codec, error
        self._has_errors = error != "none" and codec != "sign"
        self._group, self._sizes, self._raw, self._scaler = group, sizes, raw, scaler
        # Errors that wait, of parameters without a handle: worker errors, and server errors of this rank's parts.
        self._worker: Errors = {}
        self._server: Parts = {}
        self._stream: Any = None
        self._behind: Any = None
        if group.device.type == "cuda" and not group.in_turns:
            self._stream = torch.cuda.Stream(group.device)  # type: ignore[no-untyped-call]
            self._behind = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream_number = number_of(self._stream)
        self._taken_back = torch.zeros(1, dtype=torch.int64, device=group.device)
        self._pending = self._complete = self._closed = False
        self._verdict: Verdict | None = None
        self._errors_scale: torch.Tensor | None = None  # factor that is in the errors; None: 1
        self._measure, self._measured = True, Errors()
        self._agreed: Verdict | None = None  # on the pending step, if ranks had to agree on it

    def _units(self) -> Iterable[Unit]:
        raise NotImplementedError

    def _forget(self) -> None:
        """Releases all units."""
        raise NotImplementedError

    # --- the caller's side

    @eager
    def commit(self, skip: Any = None) -> None:
        """Ends the pending step. `skip`: takes it back if this is not 0: a number, or a tensor of one element, the same
        on every rank."""
        self._open()
        if isinstance(skip, torch.Tensor):
            if skip.numel() != 1:
                raise ValueError(f"skip: a tensor of one element expected, got shape {list(skip.shape)}")
        elif skip is not None:
            skip = operator.truth(skip)
        with self._on_stream():
            self._end(skip)

    @eager
    def rollback(self) -> None:
        """Takes the pending step back: the errors are those before it."""
        self._open()
        with self._on_stream():
            self._take_back()

    @property
    def taken_back(self) -> int:
        """Number of steps that were taken back. A pending step does not count yet. Waits for the GPU."""
        return int(self._taken_back.item())

    @property
    def topology(self) -> str:
        """A sentence: which ranks share nodes, and the transports that they use."""
        return self._group.topology

    @property
    def topology_ranks(self) -> list[list[int]]:
        """The ranks of each node."""
        return [list(ranks) for ranks in self._group.nodes or [[*range(self._group.size)]]]

    def _place(self) -> tuple[int, int, int, int]:
        """Returns the numbers of nodes and of ranks per node in handles, this rank's node, and its number there."""
        group = self._group
        ranks = group.size if group.levels is None else len(group.levels.ranks)
        if group.levels is None:
            return 1, ranks, 0, group.rank
        node = next(number for number, its in enumerate(self.topology_ranks) if group.rank in its)
        return group.size // ranks, ranks, node, group.levels.ranks.index(group.rank)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent, in all steps."""
        return self._group.bytes_sent

    @eager
    def stats(self) -> dict[str, float]:
        """Returns how much of each parameter's gradient this rank's encoding lost: the norm of the loss over the norm
        of gradient plus error. Describes the last measured step. Measuring takes one more encoding, in the first step
        and in the step after each call of this."""
        self._open()
        self._measure = True
        return {name: float(lost) for name, lost in self._measured.items()}

    @eager
    def state_dict(self) -> dict[str, Any]:
        """Returns the errors of this rank, by parameter names, for load_state_dict(): every rank saves its own. Ends
        the pending step. Needs no other rank."""
        self._open()
        with self._on_stream():
            self._end()
            worker = {name: errors.clone() for name, errors in self._worker.items()}
            server = {name: [(at, part.clone()) for at, part in parts] for name, parts in self._server.items()}
            for unit in self._units():
                unit.read(worker, server)
            if self._has_errors:
                self._complete_errors(worker, server)
        scale = None if self._errors_scale is None else float(self._errors_scale)
        about = {"format": FORMAT, "rank": self._group.rank, "world_size": self._group.size, "codec": self.codec}
        nodes, ranks, *place = self._place()
        about |= {"nodes": nodes, "ranks_per_node": ranks, "place": tuple(place)}
        return {**about, "error": self.error, "scale": scale, "worker": worker, "server": server}

    @eager
    def load_state_dict(self, state: Any) -> None:
        """Continues with errors of state_dict(). Every rank calls this between two steps.

        `state`: the state of this rank in a world of this size; or a list of the states of all ranks of a world of any
        size. If the sizes differ, worker errors become their mean. A parameter that the state lacks begins with 0.
        Errors that are not kept here, such as a raw segment's, are dropped with a warning. A state that is refused on
        one rank is refused on all, and changes nothing.
        """
        self._open()
        states = self._agreed_states(state)
        rank, size, dropped = self._group.rank, self._group.size, set[str]()
        errors_of = [self._kept_of(one, dropped) for one in states]
        with self._on_stream():
            self._end()
            self._wait()
            self._forget()
            if isinstance(state, dict) or len(states) == size:
                mine = errors_of[0 if isinstance(state, dict) else rank]
                worker, servers = {name: self._own(errors) for name, errors in mine[0].items()}, [mine[1]]
            else:
                worker, servers = {}, [server for _, server in errors_of[rank::size]]  # each rank takes some
                for name in dict.fromkeys(name for its, _ in errors_of for name in its):
                    total = torch.zeros(self._sizes[name], dtype=torch.float32, device=self._group.device)
                    for its, _ in errors_of:
                        if name in its:
                            total += self._own(its[name]) / len(states)
                    worker[name] = total
            self._worker, self._server = worker, {}
            for server in servers:
                for name, parts in server.items():
                    self._server.setdefault(name, []).extend((first, self._own(part)) for first, part in parts)
            scale = states[0]["scale"]
            self._errors_scale = None
            if scale is not None:
                self._errors_scale = torch.full((1,), scale, dtype=torch.float32, device=self._group.device)
        if dropped:
            of = f"errors of {len(dropped)} parameters, such as {min(dropped)!r}, are dropped"
            warnings.warn(f"state: {of}, as none are kept here", stacklevel=3)

    @eager
    def close(self) -> None:
        """Frees the errors. From now on the hook averages uncompressed. May be called twice."""
        if not self._closed:
            with self._on_stream():
                self._end()
            self._wait()
            self._closed = True
            self._forget()
            self._worker, self._server, self._measured = {}, {}, {}

    def __enter__(self) -> "Compression":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{self._kind}(codec={self.codec!r}, error={self.error!r}{', closed' if self._closed else ''})"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self._kind} belongs to its process: state_dict() has its errors, to be saved or copied")

    def _on_stream(self, joined: bool = True) -> Any:
        return nullcontext() if self._stream is None else _Beside(self._stream, self._behind, joined)

    def _wait(self) -> None:
        """Waits for all enqueued work: a handle must have no pending work when it is released."""
        if self._stream is not None:
            self._stream.synchronize()

    def _open(self) -> None:
        if self._closed:
            raise ValueError(f"the {self._kind} is closed")

    def _complete_errors(self, worker: Errors, server: Parts) -> None:
        """Adds zeros for parameters without errors, as before the first step or on a rank that reduces no part of them:
        torch.distributed.checkpoint loads only the keys of the state that it gets."""
        for name in self._trained():
            if name not in worker and self._keeps(name, of_server=False):
                worker[name] = torch.zeros(self._sizes[name], dtype=torch.float32, device=self._group.device)
            if self._keeps(name, of_server=True):
                server.setdefault(name, [])

    def _trained(self) -> Iterable[str]:
        """Returns the names of the parameters that get errors."""
        return self._sizes

    def _own(self, errors: torch.Tensor) -> torch.Tensor:
        return errors.detach().to(self._group.device, torch.float32, copy=True).reshape(-1)

    # --- steps

    def _begin(self) -> None:
        self._end()
        self._group.check()
        self._pending, self._complete = True, False
        scale = getattr(self._scaler, "_scale", None)  # None before its first step, missing if it is not enabled
        scale = None if scale is None else scale.detach().to(self._group.device).reshape(1).clone()
        factor = 1.0 if scale is None else scale
        if self._errors_scale is not None:
            factor = factor / self._errors_scale
        if self._has_errors:
            self._multiply_errors(factor)
        self._errors_scale = scale

    def _multiply_errors(self, factor: torch.Tensor | float) -> None:
        """Multiplies worker and server errors, unless the factor is 1. The host waits for the factor."""
        if float(factor) == 1:
            return
        for unit in self._units():
            unit.handle.multiply_errors(factor)
        self._worker = {name: errors * factor for name, errors in self._worker.items()}
        for parts in self._server.values():
            parts[:] = [(first, part * factor) for first, part in parts]

    def _ended(self) -> Iterator[Handle]:
        """Yields the handles of the pending step, and ends it."""
        for unit in self._units():
            if unit.in_step:
                unit.in_step = False
                yield unit.handle
        self._pending, self._agreed = False, None

    def _keep(self) -> None:
        """Commits the pending step, which other ranks have committed, also if its exchange has failed on this rank."""
        handles = list(self._ended()) if self._pending else []
        if handles:
            verdict = self._asked(handles)
            verdict.undone.fill_(False)
            verdict.carry_out(handles, self._stream_number)

    def _asked(self, handles: Sequence[Handle]) -> Verdict:
        """Returns the verdict on a step of these handles."""
        if self._verdict is None or self._verdict.handles != len(handles):
            self._verdict = Verdict(self._group, len(handles))
        self._verdict.ask(handles, self._stream_number)
        return self._verdict

    def _take_back(self) -> None:
        if self._pending:
            handles = list(self._ended())
            if handles:
                self._asked(handles)  # so that a non-finite value of this step does not count in the next one
            for handle in handles:
                handle.rollback()
            self._taken_back += 1

    def _end(self, skip: torch.Tensor | bool | None = None) -> None:
        if not self._complete:
            self._take_back()  # the pass broke off
        if not self._pending:
            return
        agreed, handles = self._agreed, list(self._ended())
        verdict, stream = agreed or self._asked(handles), self._stream_number
        if isinstance(skip, torch.Tensor):
            verdict.undone |= skip.to(self._group.device).reshape(1) != 0
        elif skip:
            verdict.undone.fill_(True)
        verdict.carry_out(handles, stream)
        verdict.count(self._taken_back)

    def _checked(self, state: Any) -> list[Any]:
        """Checks a state, and returns the states of a list by rank, or the one."""
        states, rank, size = self._well_formed(state), self._group.rank, self._group.size
        if isinstance(state, dict):
            if (state["rank"], state["world_size"]) != (rank, size):
                of = f"of rank {state['rank']} of {state['world_size']}, and this is rank {rank} of {size}"
                raise ValueError(f"state: {of}; a list of all ranks' is taken in a world of any size")
            its = state.get("nodes", 1), state.get("ranks_per_node", size)
            if its != self._place()[:2]:
                of = f"of {its[0]} nodes of {its[1]} ranks, and this is of {self._place()[0]} of {self._place()[1]}"
                raise ValueError(f"state: {of}; a list of all ranks' is taken whatever the nodes are")
        return states

    def _well_formed(self, state: Any) -> list[Any]:
        """Checks a state of any rank, and returns like _checked()."""
        most = LARGEST_OF_SIGNS if self.codec in SIGNS else LARGEST
        return check_all(state, self._sizes, self._group.size, most)

    def _agreed_states(self, state: Any) -> list[Any]:
        """Runs _checked(), and raises on all ranks or on none."""

        def check() -> tuple[list[Any], Any]:
            states = self._checked(state)
            return states, (isinstance(state, dict), states[0]["scale"])

        return on_all_ranks("state", self._group.group, check)

    def _kept_of(self, state: Any, dropped: set[str]) -> tuple[Errors, Parts]:
        """Returns the errors of a state that this object keeps. `dropped` gets the names of the others."""
        worker, server = (
            {name: its for name, its in state[each].items() if self._has_errors and self._keeps(name, each == "server")}
            for each in ("worker", "server")
        )
        dropped |= state["worker"].keys() - worker.keys()
        dropped |= {name for name, parts in state["server"].items() if parts} - server.keys()
        return worker, server

    def _keeps(self, name: str, of_server: bool) -> bool:
        """Returns whether there may be errors of this parameter, of the server or of the workers."""
        return not self._raw[name]

    # --- what is lost

    def _losses(self, unit: Unit, gradients: Iterable[torch.Tensor]) -> Errors:
        """Returns the losses by name. `gradients`: one for each tensor of the handle, one in memory at a time."""
        handle = unit.handle
        carried = handle.errors()[0] if handle.carries else None
        options = {**handle.options, "values": "float32", "error": ERRORS["none"], "raw": None}
        codecs: dict[int, Codec] = {}
        norms: dict[str, list[torch.Tensor]] = {}  # of the loss, and of what was to be sent
        for number, (name, gradient) in enumerate(zip(unit.names, gradients)):
            given = gradient.float() if carried is None else gradient + carried[number]
            size, decoded = given.numel(), torch.empty_like(given)
            if size not in codecs:
                codecs[size] = library().codec(self.codec, [size], **options)
            codec = codecs[size]
            payload = torch.empty(codec.payload_bytes, dtype=torch.uint8, device=self._group.device)
            codec.encode([given], payload, stream=handle.stream())
            codec.decode(payload, [decoded], stream=handle.stream())
            if handle.raw and handle.raw[number]:
                decoded = given
            norms.setdefault(name, []).append(torch.stack([(given - decoded).norm(), given.norm()]))
        self._wait()  # the codecs are released on return
        lost = Errors()
        for name, each in norms.items():
            left, whole = torch.stack(each).norm(dim=0)
            lost[name] = torch.nan_to_num(left / whole.clamp_min(1e-30), nan=torch.inf)
        return lost


class _Beside:
    """Work on a stream, after the present work of the current stream. `joined`: later work of the current stream waits
    for it; in a hook DDP waits for the Future instead. `event`: one of the stream, for all buckets."""

    def __init__(self, stream: Any, event: Any, joined: bool) -> None:
        self._stream, self._event, self._joined = stream, event, joined

    def __enter__(self) -> None:
        stream, self._device = self._stream, torch.cuda.current_device()
        self._outer = torch.cuda.current_stream(stream.device)
        self._event.record(self._outer)
        stream.wait_event(self._event)
        torch.cuda.set_stream(stream)  # sets its device, too, and takes a fraction of the time of torch.cuda.stream()

    def __exit__(self, *_: Any) -> None:
        torch.cuda.set_stream(self._outer)
        torch.cuda.set_device(self._device)
        if self._joined:
            self._event.record(self._stream)
            self._outer.wait_event(self._event)


def settings(codec: Any, error: Any, scaler: Any) -> str:
    """Checks these settings, and returns how errors are kept."""
    known_codec(codec)
    if error is None:
        error = "none" if codec in (*ALONE, "sign") else "float32"
    if not isinstance(error, str) or error not in ERRORS or (codec == "sign" and error != "none"):
        choice = "'none' expected with sign" if codec == "sign" else f"one of {', '.join(ERRORS)} expected"
        raise ValueError(f"error: {choice}, got {_said(error)}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler: a torch.amp.GradScaler expected, got {_said(scaler)}")
    return str(error)


def raws(parameters: dict[str, torch.Tensor], codec: str, raw: Raw) -> dict[str, bool]:
    """Returns for each parameter whether its gradient is a raw segment."""
    if codec in SIGNS:
        if raw is not None:
            raise ValueError(f"raw: nothing travels as it is with {codec}, so None expected")
        return dict.fromkeys(parameters, False)
    if raw is None:
        return {name: one.dim() < 2 or one.numel() < 1024 for name, one in parameters.items()}
    if callable(raw):
        return {name: bool(raw(name, one)) for name, one in parameters.items()}
    if isinstance(raw, (str, bytes)) or not isinstance(raw, Collection):
        raise TypeError(f"raw: a function of name and parameter, or names, expected, got {_said(raw)}")
    chosen = {name if name in parameters else plain_name(name) for name in map(eager_name, map(str, raw))}
    for name in sorted(chosen - parameters.keys()):
        raise ValueError(f"raw: {name!r} is no parameter of this model")
    return {name: name in chosen for name in parameters}


def warn_of_onebit(codec: str, momentum: bool) -> None:
    if codec == "onebit" and not momentum:
        warnings.warn(
            "onebit is for SGD without momentum: under another optimizer use int8 or int4, or compress the momentum "
            "with OneBitSGD or OneBitAdam (momentum=True says that it is one)", stacklevel=3,
        )  # fmt: skip
