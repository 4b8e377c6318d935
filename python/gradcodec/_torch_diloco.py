"""DiLoCo: ranks train apart and, every `sync_every` steps, exchange the movement of their parameters, compressed."""

import copy
import threading
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from ._arguments import _said
from ._errors import GradCodecError, Status
from ._torch_allreduce import AllReduce
from ._torch_eager import eager
from ._torch_groups import Group, check_tensor, process_group
from ._torch_optimizers import _number
from ._torch_states import objects_of_all
from ._torch_steps import named, settings

Tensors = list[torch.Tensor]
Outer = Callable[[Tensors], torch.optim.Optimizer]
FORMAT = 1  # of a state_dict()
PLACE = "rank", "world_size", "nodes", "ranks_per_node", "place"  # in the state of an AllReduce


class DiLoCo:
    """Distributed low-communication training (DiLoCo, arXiv 2311.08105; with fragments and a delay: Streaming DiLoCo,
    arXiv 2501.18512), whose exchange is compressed and keeps its errors.

    Every rank trains `model` by itself, with any optimizer and without DistributedDataParallel, and calls step() after
    each inner step. All ranks have the same global copy of the parameters, in float32, on the parameters' device. With
    t inner steps done, fragment p of `fragments` is exchanged when t mod sync_every = floor(p sync_every / fragments):

        gradient = global - local                         of this rank
        mean     = all-reduce of gradient                 with codec and error
        global   = one step of the outer optimizer with mean as its gradient
        local    = alpha local + (1 - alpha) global       after delay more inner steps

    `model`: its parameters that require grad now, in float32, float16 or bfloat16, on one device; all take the values
    of the group's rank 0. Buffers stay each rank's own. `outer`: a function that makes an optimizer of a list of
    tensors, called once per fragment; None: SGD with lr 0.7 and Nesterov momentum of 0.9. `fragments`: at most as many
    as parameters and as `sync_every`; parameters are divided in their order, in parts of about equal size. `delay`:
    inner steps, below sync_every / fragments, that run beside the exchange. `alpha`: 0 to 1. `codec`, `error`: as in
    AllReduce. `group`: None: the default one. For FSDP2's sharded parameters it is required: the ranks that have the
    same shard. They decide on a round for that shard alone, so one shard may take back a round that another applies. A
    wrong argument on one rank is refused on all.

    *Rounds.* A round is the exchange of one fragment. `steps`, `rounds` and `taken_back` count inner steps, rounds that
    were applied, and rounds that were taken back. A round is taken back on all ranks alike, so that copies, momentum
    and errors are those before it, and local parameters stay:

    - if a parameter is not finite on one rank. That rank takes the global copy of all parameters, with a warning;
    - if the mean is not finite;
    - if the exchange fails on one rank. Then step() raises GradCodecError on all ranks, and training can go on;
    - if ranks are not at the same inner step. Then step() raises on all ranks.

    If ranks cannot agree on how a round has ended, because one is lost, step() raises what torch.distributed raises.
    The round is then *unsettled*: it may be applied on some ranks only. Before the next round, and in
    load_state_dict(), ranks compare `rounds`. Those behind take the global copy and the momentum of one that is ahead,
    and keep the errors that this round left; what they have moved since then is lost. If no rank is ahead, the round is
    taken back.

    *Threads.* With `delay` a thread of this object exchanges, over a communicator that nothing else uses, and on CUDA
    on a stream of its own. Without `delay`, step() exchanges and waits. All methods are for one thread, and every rank
    calls them after the same inner step. Memory per element: 8 bytes for the global copy and its momentum, the errors
    of an AllReduce, and 4 bytes during a round, besides a copy of the errors of that fragment.
    """

    def __init__(
        self, model: torch.nn.Module, *, outer: Outer | None = None, sync_every: int = 100, fragments: int = 1,
        delay: int = 0, alpha: float = 0.0, codec: str = "int4", error: str | None = "float32", group: Any = None,
    ) -> None:  # fmt: skip
        self._over = process_group(group)
        self._tell: Callable[[Any], list[Any]] = partial(objects_of_all, self._over)
        self._parameters: dict[str, torch.Tensor] = {}
        kept_as, refused = "", None
        try:
            error = kept_as = settings(codec, error, None)
            self._parameters = _parameters_of(model, group)
            _check(sync_every, fragments, delay, alpha, len(self._parameters), outer)
        except (TypeError, ValueError) as failure:
            refused = failure
        locals_ = [_local(one) for one in self._parameters.values()]
        self._about = [(name, tuple(one.shape), one.dtype) for name, one in zip(self._parameters, locals_)]
        own = {"sync_every": sync_every, "fragments": fragments, "delay": delay, "alpha": alpha, "codec": codec}
        self._agree({**own, "error": error, "parameters": self._about}, refused)

        self._sync_every, self._delay, self._alpha, self._closed = sync_every, delay, float(alpha), False
        self.steps = self.rounds = self.taken_back = 0
        self._device = locals_[0].device
        with torch.no_grad(), torch.inference_mode(False):
            self._copies = [one.float().clone(memory_format=torch.contiguous_format) for one in locals_]
        self._parts = _parts([one.numel() for one in self._copies], fragments)
        make = outer or (lambda copies: torch.optim.SGD(copies, lr=0.7, momentum=0.9, nesterov=True))
        self.outer = [make(self._copies[part]) for part in self._parts]
        self._group = Group(self._over, self._device, in_turns=True)
        self._group.take_own(codec)
        self._tell = self._group.told
        self._reducers = [
            AllReduce._of(self._group, self._copies[part], codec, "mean", kept_as) for part in self._parts
        ]  # fmt: skip
        for reducer in self._reducers:
            reducer._prepare()
        self._stream: Any = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore
        self._exchange: _Exchange | None = None  # under way
        # The fragment of a round that other ranks may have applied, and its errors before the round.
        self._unsettled: tuple[int, Any] | None = None
        self._take_copies(0)
        self._merge(None, 0.0)

    # --- the caller's side

    @eager
    @torch.no_grad()
    def step(self) -> None:
        """Ends an exchange that is due, and begins the next one. Every rank calls this after each inner step."""
        self._open()
        self.steps += 1
        if self._exchange is not None and self.steps >= self._exchange.due:
            self._end()
        for number in range(len(self._parts)):
            if self.steps % self._sync_every == number * self._sync_every // len(self._parts):
                self._begin(number)
                if not self._delay:
                    self._end()

    @eager
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns parameters, global copy, outer optimizers, errors and counts, for load_state_dict(), but not the
        inner optimizer. Every rank saves its own. Applies an exchange that is under way, for which every rank calls
        this. If a round is unsettled, this needs no other rank, and closes this object.
        """
        self._open()
        self._end()
        unsettled = self._unsettled
        if unsettled is not None:
            with self._reducers[unsettled[0]]._on_stream():
                self._reducers[unsettled[0]]._keep()
        state = {
            "format": FORMAT, "rank": self._group.rank, "world_size": self._group.size, "about": self._about,
            "steps": self.steps, "rounds": self.rounds, "taken_back": self.taken_back, "unsettled": unsettled,
            "local": [local.clone() for local, _ in self._pairs()], "global": [one.clone() for one in self._copies],
            "outer": [copy.deepcopy(one.state_dict()) for one in self.outer],
            "errors": [reducer.state_dict() for reducer in self._reducers],
        }  # fmt: skip
        if unsettled is not None:
            self.close()
        return state

    @eager
    @torch.no_grad()
    def load_state_dict(self, state: Any) -> None:
        """Continues with a result of state_dict(), in a world of any size. Every rank calls this.

        `state`: this rank's state in the previous world, also if other ranks are lost; None on a rank that joins; or,
        on every rank, a list of the states of all ranks of a world, which keeps all of their errors. Ranks that are
        behind or join take the global copy of one that is ahead.
        """
        self._open()
        self._end()
        refused: Exception | None = None
        states: list[Any] = []
        try:
            states = self._checked(state)
            for one in states:
                for reducer, errors in zip(self._reducers, one["errors"]):
                    reducer._well_formed(errors)
        except (TypeError, ValueError) as failure:
            refused = failure
        rank, is_list = self._group.rank, isinstance(state, (list, tuple))
        own = None if not states else states[0] if not is_list else states[rank] if rank < len(states) else None
        everywhere = self._agree({"list": is_list}, refused, -1 if own is None else own["rounds"])
        newest = max(everywhere)
        if newest < 0:
            raise ValueError("state: one of one rank at least expected, got None on all ranks")
        if own is not None:
            self.steps, self.rounds, self.taken_back = own["steps"], own["rounds"], own["taken_back"]
            if own["unsettled"] is not None and own["rounds"] == newest:
                self.taken_back += 1
            for number, one in enumerate(self.outer):
                one.load_state_dict(copy.deepcopy(own["outer"][number]))
            for (local, copied), its, its_copy in zip(self._pairs(), own["local"], own["global"]):
                local.copy_(its)
                copied.copy_(its_copy)
        for number, reducer in enumerate(self._reducers):
            errors = [_errors_of(one, number, newest) for one in states]
            now = reducer.state_dict()
            before = errors[0] if errors else {**now, "worker": {}, "server": {}}
            reducer.load_state_dict(errors if is_list else {**before, **{name: now[name] for name in PLACE}})
            reducer._prepare()
        self._unsettled = None
        if min(everywhere) < newest:
            self._take_copies(everywhere.index(newest))
        if own is None or own["rounds"] < newest:
            only = own["unsettled"] if own is not None and own["rounds"] == newest - 1 else None
            self._merge(only[0], self._alpha) if only else self._merge(None, 0.0)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent, in all exchanges of fragments."""
        return self._group.bytes_sent

    @property
    def topology(self) -> str:
        """A sentence: which ranks share nodes, and the transports that they use."""
        return self._group.topology

    def close(self) -> None:
        """Frees the errors. Waits for an exchange that is under way, without applying it. May be called twice."""
        if not self._closed:
            self._closed = True
            if self._exchange is not None:
                self._exchange.wait()
            for reducer in self._reducers:
                reducer.close()

    def __repr__(self) -> str:
        about = f"sync_every={self._sync_every}, fragments={len(self._parts)}, codec={self._reducers[0].codec!r}"
        return f"DiLoCo({about}{', closed' if self._closed else ''})"

    def __reduce__(self) -> Any:
        raise TypeError("DiLoCo belongs to its process: state_dict() has what can be saved or copied")

    def _open(self) -> None:
        if self._closed:
            raise ValueError("the DiLoCo is closed")

    # --- a round

    def _begin(self, number: int) -> None:
        """Compares the ranks' steps and rounds, and begins to exchange a fragment."""
        refused, wrong = self._looked()
        everywhere = self._agree({"inner steps": self.steps}, refused, (self.rounds, wrong))
        self._settle([rounds for rounds, _ in everywhere])
        if any(wrong for _, wrong in everywhere):
            self.taken_back += 1
            if wrong:
                warnings.warn(f"after {self.steps} inner steps {wrong} is not finite: this rank takes the global copy")
                self._merge(None, 0.0)
            return
        reducer, gradients = self._reducers[number], [one - local.float() for local, one in self._pairs(number)]
        self._unsettled = number, reducer.state_dict()
        self._exchange = _Exchange(reducer, gradients, number, self.steps + self._delay, self._stream)
        self._exchange.start() if self._delay else self._exchange.run()

    def _end(self) -> None:
        """Applies the exchange that is under way, or takes it back, as all ranks agree."""
        under_way = self._exchange
        if under_way is None:
            return
        under_way.wait()
        self._exchange, failure = None, under_way.failure
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        reducer, before = self._reducers[under_way.number], self._reducers[under_way.number].taken_back
        everywhere = self._tell((self.steps, said))
        failed = [f"rank {rank}: {said}" for rank, (_, said) in enumerate(everywhere) if said]
        steps = [steps for steps, _ in everywhere]
        if failed or min(steps) < max(steps):
            reducer.rollback()
            self.taken_back, self._unsettled = self.taken_back + 1, None
            why = "; ".join(failed) or f"inner steps: {steps} on the ranks, not the same"
            where = f"fragment {under_way.number} after {under_way.due - self._delay} inner steps"
            raise GradCodecError(f"{where}: taken back on all ranks: {why}", Status.COMM) from failure
        reducer.commit()
        if reducer.taken_back > before:
            self.taken_back, self._unsettled = self.taken_back + 1, None
            return
        copies = self._copies[self._parts[under_way.number]]
        for one, mean in zip(copies, under_way.tensors):
            one.grad = mean
        self.outer[under_way.number].step()
        for one in copies:
            one.grad = None
        self.rounds, self._unsettled = self.rounds + 1, None
        self._merge(under_way.number, self._alpha)

    def _settle(self, rounds: list[int]) -> None:
        """Ends, on all ranks, a round that was applied on some ranks only. `rounds`: rounds of each rank."""
        newest = max(rounds)
        if min(rounds) < newest:
            self._take_copies(rounds.index(newest))
        if self._unsettled is not None:
            number, self._unsettled = self._unsettled[0], None
            if rounds[self._group.rank] < newest:
                with self._reducers[number]._on_stream():
                    self._reducers[number]._keep()
                self._merge(number, self._alpha)
            else:
                self._reducers[number].rollback()
                self.taken_back += 1

    def _take_copies(self, source: int) -> None:
        """Sets the global copy, the outer optimizers and the counts of all ranks to those of one."""
        for one in self._copies:
            dist.broadcast(one, group=self._over, group_src=source)
        states = [one.state_dict() for one in self.outer] if self._group.rank == source else None
        box = [(self.steps, self.rounds, self.taken_back, tree_map(_on_cpu, states))]
        dist.broadcast_object_list(box, group=self._over, group_src=source)
        self.steps, self.rounds, self.taken_back, states = box[0]
        if self._group.rank != source:
            for optimizer, its in zip(self.outer, states):
                optimizer.load_state_dict(its)

    def _merge(self, number: int | None, alpha: float) -> None:
        """Sets the local parameters of a fragment, or of all, to alpha local + (1 - alpha) global."""
        for local, one in self._pairs(number):
            local.copy_(torch.lerp(one, local.float(), alpha) if alpha else one)  # 0 times NaN is NaN

    # --- the ranks' parameters, and agreement

    def _pairs(self, number: int | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the local and the global copy of each parameter of a fragment; None: of all."""
        of_fragment = slice(None) if number is None else self._parts[number]
        return list(zip([_local(one) for one in self._parameters.values()][of_fragment], self._copies[of_fragment]))

    def _looked(self) -> tuple[Exception | None, str | None]:
        """Returns what is wrong with the parameters, and the name of the first one that is not finite."""
        locals_ = [_local(one) for one in self._parameters.values()]
        for local, (name, shape, dtype) in zip(locals_, self._about):
            if (tuple(local.shape), local.dtype, local.device) != (shape, dtype, self._device):
                of = f"shape {list(shape)} in {dtype} on {self._device}"
                got = f"{list(local.shape)} in {local.dtype} on {local.device}"
                return ValueError(f"{name}: {of} expected, got {got}"), None
        # A sum is not finite if a value is not, and seldom otherwise; it takes an eighth of isfinite()'s time on a CPU.
        sums = torch.stack([local.sum(dtype=torch.float32) for local in locals_]).isfinite().tolist()
        given = zip(self._parameters, locals_, sums)
        return None, next((name for name, local, fine in given if not fine and not local.isfinite().all()), None)

    def _agree(self, same: dict[str, Any], refused: Exception | None, own: Any = None) -> list[Any]:
        """Raises on every rank, if one of them refuses, or if `same` differs between ranks. Returns `own` of every
        rank. Every rank calls this."""
        everywhere = self._tell((same, refused and f"{type(refused).__name__}: {refused}", own))
        if refused is not None:
            raise refused
        for rank, (its, words, _) in enumerate(everywhere):
            if words:
                raise ValueError(f"rank {rank}: {words}")
            for name, value in its.items():
                first = everywhere[0][0][name]
                if value != first:
                    if isinstance(value, list):  # the first that differs
                        first, value = next(((a, b) for a, b in zip(first, value) if a != b), (len(first), len(value)))
                    raise ValueError(f"{name}: {first} on rank 0 and {value} on rank {rank}, not the same")
        return [own for *_, own in everywhere]

    def _checked(self, state: Any) -> list[Any]:
        """Checks a state. Returns the states of all ranks of a world in order, or the one, or none."""
        states = [] if state is None else list(state) if isinstance(state, (list, tuple)) else [state]
        wanted = {"rank", "about", "steps", "rounds", "taken_back", "unsettled", "local", "global", "outer", "errors"}
        if not all(isinstance(one, dict) and one.get("format") == FORMAT and wanted <= one.keys() for one in states):
            raise TypeError("state: what state_dict() gives, a list of it for all ranks, or None expected")
        for one in states:
            if one["about"] != self._about or len(one["errors"]) != len(self._parts):
                mine = f"{len(self._about)} parameters in {len(self._parts)} fragments, of the same names and shapes,"
                its = f"{len(one['about'])} in {len(one['errors'])}"
                raise ValueError(f"state: of other parameters: {mine} expected, got {its}")
        if isinstance(state, (list, tuple)):
            states.sort(key=lambda one: int(one["rank"]))
        return states


class _Exchange(threading.Thread):
    """An all-reduce of tensors, in place, by run(), or on a thread of its own after start()."""

    def __init__(self, reducer: AllReduce, tensors: Tensors, number: int, due: int, stream: Any) -> None:
        super().__init__(name="gradcodec exchange", daemon=True)
        self._reducer, self._stream, self.tensors, self.number, self.due = reducer, stream, tensors, number, due
        self.failure: Exception | None = None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def run(self) -> None:
        group = self._reducer._group
        if group.pairs is not None:
            group.pairs.begun = 0
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._reducer.run(self.tensors)
            if self._stream is not None:
                self._stream.synchronize()
            group.check()
        except Exception as failure:
            self.failure = failure
            for unit in self._reducer._units():
                group.complete(unit.handle.steps)

    def wait(self) -> None:
        """Waits until the exchange has ended."""
        if self.ident is not None:
            self.join()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a parameter's values on this rank."""
    sharded: Any = parameter
    return parameter.detach() if not hasattr(parameter, "device_mesh") else sharded.to_local().detach()


def _parameters_of(model: torch.nn.Module, group: Any) -> dict[str, torch.Tensor]:
    """Returns the parameters that are exchanged, by name."""
    found = {name: one for name, one in named(model).items() if one.requires_grad}
    if not found:
        raise ValueError("model: one parameter that requires grad expected at least, got none")
    device = _local(next(iter(found.values()))).device
    for name, one in found.items():
        if hasattr(one, "device_mesh") and group is None:
            raise ValueError(f"group: the ranks that have the same shard of {name}, a DTensor, expected, got None")
        check_tensor(name, _local(one))
        if _local(one).device != device:
            raise ValueError(f"{name}: on {device}, as the first, expected, got {_local(one).device}")
    return found


def _check(sync_every: Any, fragments: Any, delay: Any, alpha: Any, parameters: int, outer: Any) -> None:
    """Raises if a number is out of range."""
    for name, number, least in ("sync_every", sync_every, 1), ("fragments", fragments, 1), ("delay", delay, 0):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name}: a whole number expected, got {_said(number)}")
        if number < least:
            raise ValueError(f"{name}: at least {least} expected, got {number}")
    for most, what in (parameters, "parameters"), (sync_every, "inner steps of a round"):
        if fragments > most:
            raise ValueError(f"fragments: at most {most}, the number of {what}, expected, got {fragments}")
    if delay * fragments >= sync_every:
        raise ValueError(f"delay: below {sync_every} / {fragments} inner steps expected, got {delay}")
    if _number("alpha", alpha, 0) > 1:
        raise ValueError(f"alpha: 0 to 1 expected, got {alpha}")
    if outer is not None and not callable(outer):
        raise TypeError(f"outer: a function of a list of tensors expected, got {_said(outer)}")


def _parts(sizes: list[int], fragments: int) -> list[slice]:
    """Returns the tensors of each fragment: at least one, in order, of about as many elements."""
    total, ends, done = max(1, sum(sizes)), [0], 0
    for number, size in enumerate(sizes):
        left, missing = len(sizes) - number, fragments - len(ends)  # tensors from here; fragments after this one
        if number > ends[-1] and missing and (2 * done + size > 2 * total * len(ends) / fragments or left == missing):
            ends.append(number)
        done += size
    return [slice(first, last) for first, last in zip(ends, [*ends[1:], len(sizes)])]


def _errors_of(state: Any, number: int, newest: int) -> Any:
    """Returns the errors of a fragment: those before a round that no rank has applied."""
    of_round = state["unsettled"]
    if of_round is not None and of_round[0] == number and state["rounds"] == newest:
        return of_round[1]
    return state["errors"][number]


def _on_cpu(given: Any) -> Any:
    return given.cpu() if isinstance(given, torch.Tensor) else given
