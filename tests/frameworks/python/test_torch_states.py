"""Tests of saved states: a damaged one is refused on all ranks before anything has changed, or does no harm. Errors are
in the order of elements, for any strides of parameters."""

import copy
import os
import random
import warnings

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from ranks import gathered, in_turn, kept_by_all, on_ranks, same  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from gradcodec.torch import AllReduce, OneBitAdam, OneBitSGD, compress, shard  # noqa: E402

CASES = 100 if os.environ.get("GRADCODEC_TESTS") == "all" else 20  # cases of each kind of state
JUNK = None, -1, 0, 1, 2**33, 0.5, 1e-30, float("nan"), float("inf"), "abc", [], {}, [None], torch.ones(2), True
ELEMENTS = float("nan"), float("inf"), -float("inf"), 3e38, -1e37
TENSORS = [
    lambda one: one[:-1], lambda one: one.double(), lambda one: one.to_sparse(), lambda one: one.to("meta"),
    lambda one: one.numpy(), lambda one: one.to(torch.complex64), lambda one: torch.cat([one, one]),
    lambda one: one.int(), lambda one: None, lambda one: one.tolist(), lambda one: one.expand(2, *one.shape),
    lambda one: torch.nested.nested_tensor([one]),
]  # fmt: skip


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 10), torch.nn.Linear(10, 5))


def of_model(hook):
    """Returns a function that makes a step, whose result must be the same on all ranks, and a model's hook."""

    def made():
        model, compression = hook()

        def step(number):
            torch.manual_seed(10 * number + dist.get_rank())
            model.zero_grad()
            model(torch.randn(6, 12)).square().mean().backward()
            gradients = [one.grad for one in model.parameters()]
            return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in gradients]

        return step, compression

    return made


def hooked(codec, **named):
    model = DistributedDataParallel(network(), bucket_cap_mb=0.0004)
    return model, compress(model, codec, **named)


def sharded():
    model = network()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, shard(model, "int4", raw=())


def reduced():
    reducer = AllReduce([torch.empty(12, 10), torch.empty(5)], "int4")

    def step(number):
        torch.manual_seed(10 * number + dist.get_rank())
        tensors = [torch.randn(12, 10), torch.randn(5)]
        reducer.run(tensors)
        return tensors

    return step, reducer


def optimized(kind, **named):
    def made():
        model = network()
        optimizer = kind(model.parameters(), lr=1e-3, **named)

        def step(number):
            torch.manual_seed(10 * number + dist.get_rank())
            model.zero_grad()
            model(torch.randn(6, 12)).square().mean().backward()
            optimizer.step()
            return [one.detach().clone() for one in model.parameters()]

        return step, optimizer

    return made


KINDS = {
    "compress": of_model(lambda: hooked("int4", raw=())),
    "compress onebit": of_model(lambda: hooked("onebit", error="bfloat16", momentum=True)),
    "shard": of_model(sharded),
    "AllReduce": reduced,
    "OneBitSGD": optimized(OneBitSGD),
    "OneBitAdam": optimized(OneBitAdam, warmup_steps=2),
}


def leaves(thing, path=()):
    if isinstance(thing, (dict, list, tuple)) and thing:
        for key, one in thing.items() if isinstance(thing, dict) else enumerate(thing):
            yield from leaves(one, (*path, key))
    else:
        yield path, thing


def put(thing, path, change):
    if not path:
        return change(thing)
    if isinstance(thing, dict):
        return {key: put(one, path[1:], change) if key == path[0] else one for key, one in thing.items()}
    return type(thing)(put(one, path[1:], change) if number == path[0] else one for number, one in enumerate(thing))


def damaged(state, other, draw):
    """Returns a state in which one byte, element, tensor, field or key has changed, or another rank's state."""
    kind = draw.choice(["byte"] * 3 + ["element"] * 3 + ["tensor"] * 3 + ["field"] * 4 + ["key", "rank"])
    found = [(path, one) for path, one in leaves(state) if isinstance(one, torch.Tensor) and one.numel() > 1]
    fields = [path for path, one in leaves(state) if not isinstance(one, torch.Tensor)]
    if kind == "rank":
        return kind, other
    if kind == "field":
        path, junk = draw.choice(fields), draw.choice(JUNK)
        return f"{path} {junk}", put(state, path, lambda one: junk)
    path, tensor = draw.choice(found)
    if kind == "key":
        return f"no {path}", put(state, path[:-1], lambda one: type(one)() if isinstance(one, tuple) else type(one)())
    if kind == "tensor":
        number = draw.randrange(len(TENSORS))
        return f"{path} {number}", put(state, path, TENSORS[number])
    tensor = tensor.clone()
    at = draw.randrange(tensor.numel())
    if kind == "element":
        tensor.view(-1)[at] = element = draw.choice(ELEMENTS)
        return f"{path} {element}", put(state, path, lambda one: tensor)
    bit = draw.randrange(32)
    tensor.view(-1).view(torch.int32)[at] ^= 1 << bit if bit < 31 else -(2**31)
    return f"{path} bit {bit}", put(state, path, lambda one: tensor)


def damage(kind):
    """Checks that a damaged state is refused before anything has changed, or does no harm."""
    warnings.simplefilter("ignore")
    (step, keeper), draw, refused = KINDS[kind](), random.Random(kind), 0
    is_optimizer = kind.startswith("OneBit")
    for number in range(4):
        step(number)
    good = copy.deepcopy(keeper.state_dict())
    others, rank = gathered(good)[::-1], dist.get_rank()
    for case in range(CASES):
        keeper.load_state_dict(copy.deepcopy(good))
        before, taken_back = copy.deepcopy(keeper.state_dict()), int(keeper.taken_back)
        on = draw.choice([(0,), (1,), (0, 1)])
        what, bad = damaged(good, others[rank], draw)
        what = kind, case, on, what
        failure = None
        try:
            keeper.load_state_dict(bad if rank in on else copy.deepcopy(good))
        except (TypeError, ValueError, KeyError) as caught:
            failure = caught
        outcomes = gathered(failure is not None)
        assert outcomes[0] == outcomes[1], (what, failure)
        if failure is not None:
            refused += 1
            assert same(before, keeper.state_dict()), what
        for number in range(2):
            here, there = gathered(step(10 + number))
            assert same(here, there) and all(one.isfinite().all() for one in here), (what, failure)
            if not is_optimizer:
                keeper.commit()
        # A momentum of another magnitude moves the weights by any amount, but alike on all ranks.
        assert is_optimizer or int(keeper.taken_back) == taken_back, what
        assert len(set(gathered(int(keeper.taken_back)))) == 1, what
    assert CASES / 4 < refused < CASES
    print(f"{kind}: {refused} of {CASES} refused", flush=True)


def a_mixture_of_all_ranks_errors_is_refused(folder):
    """Saves every rank's own state under one name."""
    step, compression = KINDS["compress"]()
    for number in range(3):
        step(number)
    state = copy.deepcopy(compression.state_dict())
    dcp.save({"errors": state}, checkpoint_id=f"{folder}/mixture")
    loaded = {"errors": put_zeros(state)}
    dcp.load(loaded, checkpoint_id=f"{folder}/mixture")
    with pytest.raises(ValueError, match="of rank . of 2, and this is rank|refused on rank"):
        compression.load_state_dict(loaded["errors"])
    assert same(compression.state_dict(), state)


def goes_on_from_a_checkpoint(folder):
    name = f"errors of rank {dist.get_rank()}"
    for kind in "compress", "compress onebit", "shard", "AllReduce":
        step, compression = KINDS[kind]()
        for number in range(3):
            step(number)
        state = copy.deepcopy(compression.state_dict())
        dcp.save({name: state}, checkpoint_id=f"{folder}/{kind}")
        for steps in range(3):  # DistributedDataParallel arranges its buckets anew after the first step
            step, new = KINDS[kind]()
            for number in range(steps):
                step(number)
            loaded = {name: new.state_dict()}  # only the entries that it has are loaded
            dcp.load(loaded, checkpoint_id=f"{folder}/{kind}")
            new.load_state_dict(loaded[name])
            assert same(new.state_dict(), state), (kind, steps)


def a_step_that_fails_at_once_leaves_the_loaded_errors():
    for kind in "compress", "compress onebit", "shard", "AllReduce":
        step, compression = KINDS[kind]()
        for number in range(2):
            step(number)
        state = copy.deepcopy(compression.state_dict())
        for at in range(1 if kind == "shard" else 2):  # the first collective checks for errors, the next adds them
            step, compression = KINDS[kind]()
            compression.load_state_dict(copy.deepcopy(state))
            group, calls = compression._group, []
            over_all = group.over_all

            def fail(*arguments, calls=calls, at=at, over_all=over_all):
                calls.append(None)
                if len(calls) > at:
                    raise OSError("a rank is gone")
                return over_all(*arguments)

            group.over_all = fail
            with pytest.raises(OSError, match="a rank is gone"):
                step(2)
            group.over_all = over_all
            assert same(compression.state_dict(), state), (kind, at)


def optimizers_go_on_from_a_checkpoint(folder):
    for kind, named in (OneBitSGD, {}), (OneBitAdam, {"warmup_steps": 2}):
        model, other = network(), network()
        optimizer, new = (kind(one.parameters(), lr=1e-3, **named) for one in (model, other))
        for number in range(4):
            torch.manual_seed(10 * number + dist.get_rank())
            model.zero_grad()
            model(torch.randn(6, 12)).square().mean().backward()
            optimizer.step()
        dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=f"{folder}/{kind.__name__}")
        before = [one.detach().clone() for one in other.parameters()]
        loaded = get_optimizer_state_dict(other, new)  # keyed by the names of parameters
        dcp.load(loaded, checkpoint_id=f"{folder}/{kind.__name__}")
        set_optimizer_state_dict(other, new, loaded)
        assert same(new.state_dict()["state"], optimizer.state_dict()["state"])
        assert all(map(torch.equal, before, other.parameters()))


def put_zeros(state):
    for path, one in leaves(state):
        if isinstance(one, torch.Tensor):
            state = put(state, path, torch.zeros_like)
    return state


def errors_that_are_not_kept_are_dropped_with_a_warning():
    step, compression = KINDS["compress"]()
    for number in range(3):
        step(number)
    state = compression.state_dict()
    _, plain = hooked("int8")
    with pytest.warns(UserWarning, match="errors of 4 parameters, such as '0.bias', are dropped, as none are kept"):
        plain.load_state_dict(state)
    assert not plain.state_dict()["worker"] and not plain.state_dict()["server"]
    _, partly = hooked("int4", raw=["0.weight"])
    with pytest.warns(UserWarning, match="errors of 1 parameters, such as '0.weight', are dropped"):
        partly.load_state_dict(state)
    assert partly.state_dict()["worker"].keys() == {"0.bias", "1.weight", "1.bias"}


class Turned(torch.nn.Module):
    def __init__(self, turned):
        super().__init__()
        weight = torch.randn(64, 40)
        self.weight = torch.nn.Parameter(weight.t().contiguous().t() if turned else weight)

    def forward(self, given):
        return given @ self.weight.t()


def convolutions(is_last):
    kind = torch.channels_last if is_last else torch.contiguous_format
    return torch.nn.Sequential(torch.nn.Conv2d(8, 32, 3), torch.nn.Conv2d(32, 16, 3)).to(memory_format=kind)


def layouts(make, shape):
    """Checks that errors are in the order of elements, for any strides of parameters."""

    def made(kind, hook=True):
        torch.manual_seed(0)
        model = DistributedDataParallel(make(kind))
        return model, compress(model, "int4") if hook else None

    def gradients(model, steps):
        for step in steps:
            torch.manual_seed(10 * step + dist.get_rank())
            model.zero_grad()
            model(torch.randn(shape)).square().mean().backward()
        return {name: one.grad.reshape(-1) for name, one in model.module.named_parameters()}

    exact = gradients(made(False, hook=False)[0], [3])
    for saved in True, False:
        model, compression = made(saved)
        gradients(model, range(3))
        state = copy.deepcopy(compression.state_dict())
        before, on = kept_by_all(state), gradients(model, [3])
        for kind in True, False:
            for given in state, gathered(state):
                resumed, its = made(kind)
                its.load_state_dict(given)
                arrived = gradients(resumed, [3])
                after = kept_by_all(its.state_dict())
                assert after.keys() == before.keys() == {name for name, one in exact.items() if one.numel() > 100}
                for name, errors in before.items():
                    torch.testing.assert_close(arrived[name] + after[name], exact[name] + errors, rtol=0, atol=1e-6)
                    assert kind != saved or torch.equal(arrived[name], on[name])


def everything(folder):
    a_mixture_of_all_ranks_errors_is_refused(folder)
    goes_on_from_a_checkpoint(folder)
    optimizers_go_on_from_a_checkpoint(folder)
    in_turn(a_step_that_fails_at_once_leaves_the_loaded_errors, errors_that_are_not_kept_are_dropped_with_a_warning)
    layouts(convolutions, (2, 8, 8, 8))
    layouts(Turned, (8, 40))
    for kind in KINDS:
        damage(kind)


def test_states(tmp_path):
    on_ranks(("gloo", "cpu", 2), everything, tmp_path, str(tmp_path))
