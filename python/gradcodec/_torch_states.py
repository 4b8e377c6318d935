"""Checks of saved errors and momenta: all of a state is checked, on every rank, before anything is changed."""

import math
from typing import Any, Callable, Iterator, Sequence, TypeVar

import torch
import torch.distributed as dist

from ._arguments import _said

FORMAT = 2  # of a state; format 1 is of a world of one level
# The sum of errors over all ranks must be finite, for ONEBIT also the sum of the squares of 2^34 elements, or no step
# would be committed. A loss scale multiplies them by at most LARGEST_SCALE.
LARGEST, LARGEST_OF_SIGNS, LARGEST_SCALE = 2.0**126, 2.0**46, 2.0**24
State = dict[str, Any]
Checked = TypeVar("Checked")


def objects_of_all(group: Any, own: Any) -> list[Any]:
    """Returns `own` of every rank, by rank. Every rank calls this."""
    everywhere: list[Any] = [None] * group.size()
    dist.all_gather_object(everywhere, own, group=group)
    return everywhere


def on_all_ranks(what: str, group: Any, check: Callable[[], tuple[Checked, Any]]) -> Checked:
    """Returns the first result of a check on this rank; the second one must be the same on all ranks. If one rank
    refuses, all do. Every rank of the process group calls this."""
    refusal: Exception | None = None
    checked, same = None, None
    try:
        checked, same = check()
    except Exception as failure:
        refusal = failure
    found = objects_of_all(group, (None if refusal is None else str(refusal), same))
    if refusal is not None:
        raise refusal
    for rank, (words, its) in enumerate(found):
        if words is not None:
            raise ValueError(f"{what}: refused on rank {rank}: {words}")
        if its != found[0][1]:
            raise ValueError(f"{what}: {_said(found[0][1])} on rank 0 and {_said(its)} on rank {rank}, not the same")
    return checked  # type: ignore[return-value]


def largest_of(what: str, given: Any, elements: int | None = None) -> float:
    """Returns the largest magnitude of a dense tensor of `elements` finite floats. Refuses anything else."""
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"state: {what}: a tensor expected, got {_said(given)}")
    is_plain = given.layout == torch.strided and not given.is_nested and not hasattr(given, "device_mesh")
    if not is_plain or not given.is_floating_point() or given.is_meta:
        about = f"{given.dtype}, {given.layout}, on {given.device}"
        raise TypeError(f"state: {what}: a dense tensor of floats expected, got {about}".replace("torch.", ""))
    if elements is not None and given.numel() != elements:
        raise ValueError(f"state: {elements} elements of {what} expected, got {given.numel()}")
    largest = float(given.detach().float().abs().max()) if given.numel() else 0.0
    if not math.isfinite(largest):
        raise ValueError(f"state: {what}: finite numbers expected, got {largest}")
    return largest


def check_all(given: Any, sizes: dict[str, int], ranks: int, most: float) -> list[State]:
    """Checks states. Returns those of a list, in the order of ranks, or the only one. `sizes`: elements of the
    parameters. `ranks`: ranks of this world. `most`: the largest sum of errors over the ranks."""
    states = [given] if isinstance(given, dict) else list(given) if isinstance(given, (list, tuple)) else []
    wanted = {"format", "rank", "world_size", "scale", "worker", "server"}
    if not states or not all(isinstance(one, dict) and wanted <= one.keys() for one in states):
        raise TypeError("state: what state_dict() gives, or a list of it for all ranks, expected")
    for one in states:
        for name in "format", "rank", "world_size":
            if type(one[name]) is not int:
                raise TypeError(f"state: {name}: a whole number expected, got {_said(one[name])}")
        if one["format"] not in (1, FORMAT):
            raise ValueError(f"state: of format {one['format']}, and formats 1 and {FORMAT} are known here")
        _check_errors(one, sizes, most / max(ranks, len(states)))
    if not isinstance(given, dict):
        states.sort(key=lambda one: int(one["rank"]))
        world = states[0]["world_size"]
        if [one["rank"] for one in states] != [*range(len(states))] or len(states) != world:
            found = ", ".join(str(one["rank"]) for one in states[:16])
            raise ValueError(f"state: one of each of {world} ranks expected, got ranks {found}")
        for name in "world_size", "scale":
            for one in states:
                if one[name] != states[0][name]:
                    raise ValueError(f"state: {name} {states[0][name]} of rank 0 and {one[name]} of rank {one['rank']}")
    return states


def _check_errors(state: State, sizes: dict[str, int], most: float) -> None:
    scale = state["scale"]
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"state: scale: None or a number expected, got {_said(scale)}")
        if not 0 < float(torch.tensor(float(scale), dtype=torch.float32)) < math.inf:
            raise ValueError(f"state: scale: a finite float32 above 0 expected, got {scale}")
        most *= min(1.0, scale / LARGEST_SCALE)
    for name in "worker", "server":
        if not isinstance(state[name], dict):
            raise TypeError(f"state: {name}: a dict by names of parameters expected, got {_said(state[name])}")
        for parameter in state[name]:
            if parameter not in sizes:
                raise ValueError(f"state: {parameter!r} is no parameter of this model")
    for what, given, elements in _tensors(state, sizes):
        largest = largest_of(what, given, elements)
        if largest > most:
            raise ValueError(f"state: {what}: errors up to {most:.3g} expected, got {largest:.3g}")


def _tensors(state: State, sizes: dict[str, int]) -> Iterator[tuple[str, Any, int | None]]:
    """Yields all errors: the parameter's name, a tensor, and the number of elements that it must have."""
    for name, errors in state["worker"].items():
        yield repr(name), errors, sizes[name]
    for name, parts in state["server"].items():
        pairs = isinstance(parts, (list, tuple)) and [isinstance(one, (list, tuple)) and len(one) == 2 for one in parts]
        if pairs is False or not all(pairs):
            raise TypeError(f"state: {name!r}: pairs of a first element and errors expected, got {_said(parts)}")
        spans = []
        for first, part in parts:
            yield repr(name), part, None
            if type(first) is not int:
                raise TypeError(f"state: {name!r}: the number of an element expected, got {_said(first)}")
            spans.append((first, first + part.numel()))
        end = 0
        for first, behind in sorted(spans):
            if not end <= first <= behind <= sizes[name]:
                of = f"state: {name!r}: parts of its {sizes[name]} elements that do not overlap expected"
                raise ValueError(f"{of}, got elements {first} to {behind - 1}")
            end = behind


def check_optimizer(given: Any, groups: Sequence[dict[str, Any]], defaults: dict[str, Any]) -> list[float]:
    """Checks an optimizer's state. Returns what must be the same on all ranks: settings, steps, and sums of its
    tensors' bits. `groups`: its own groups of parameters. `defaults`: its settings."""
    if not isinstance(given, dict) or not isinstance(given.get("state"), dict):
        raise TypeError(f"state: what state_dict() gives expected, got {_said(given)}")
    same, its_groups = list[float](), given["param_groups"]
    numbers = [number for each in its_groups for number in each["params"]]
    if {type(number) for number in numbers} not in ({int}, {str}):  # names: of get_optimizer_state_dict()
        raise TypeError(f"state: numbers or names of parameters expected, got {_said(numbers)}")
    lengths, its = ([len(each["params"]) for each in several] for several in (groups, its_groups))
    if lengths != its:
        raise ValueError(f"state: groups of {lengths} parameters expected, got {its}")
    for each in its_groups:
        for name, default in defaults.items():
            several = isinstance(default, tuple)
            if isinstance(default, bool) or not (several or isinstance(default, (int, float))):
                continue  # a setting of torch.optim
            values = list(each[name]) if several else [each[name]]
            if several and len(values) != len(default):
                raise ValueError(f"state: {name}: {len(default)} numbers expected, got {len(values)}")
            same += [_number(name, value) for value in values]
    for number, shape in zip(numbers, (one.shape for each in groups for one in each["params"])):
        for name, kept in sorted(given["state"].get(number, {}).items()):
            what = f"{name} of parameter {number}"
            if name == "step":
                same.append(_number(what, kept))
                continue
            largest, is_variance = largest_of(what, kept), name == "exp_avg_sq"
            if kept.shape != shape:
                raise ValueError(f"state: {what}: shape {list(shape)} expected, got {list(kept.shape)}")
            if largest > LARGEST_OF_SIGNS and not is_variance:
                raise ValueError(f"state: {what}: numbers up to {LARGEST_OF_SIGNS:.3g} expected, got {largest:.3g}")
            if is_variance and (kept < 0).any():
                raise ValueError(f"state: {what}: a variance is at least 0, got {float(kept.min())}")
            bits = kept.detach().to(torch.float32, memory_format=torch.contiguous_format).view(torch.int32)
            same.append(int(bits.sum(dtype=torch.int64)))
    return same


def _number(what: str, given: Any) -> float:
    is_number = isinstance(given, (int, float)) or (isinstance(given, torch.Tensor) and given.numel() == 1)
    if isinstance(given, bool) or not is_number:
        raise TypeError(f"state: {what}: a number expected, got {_said(given)}")
    number = float(given)
    if not 0 <= number < math.inf:
        raise ValueError(f"state: {what}: a finite number from 0 up expected, got {number}")
    return number
