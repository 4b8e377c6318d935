"""Tests of OneBitSGD and OneBitAdam: they train as well as SGD with momentum and Adam, and all ranks leave out a step
with a value that is not finite."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ranks import digits, in_turn, on_groups, on_ranks  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from gradcodec.torch import OneBitAdam, OneBitSGD  # noqa: E402

def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def averaged(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(make, steps, *, plain=False, scaler=None, overflow=-1, left_out=-1):
    """Returns the loss at the end, and the optimizer."""
    images, labels = digits()
    model = network()
    optimizer = make(model.parameters())
    batches = torch.Generator(torch.get_default_device()).manual_seed(dist.get_rank())
    for step in range(steps):
        batch = torch.randint(len(images), (32,), generator=batches)
        optimizer.zero_grad()
        loss = cross_entropy(model(images[batch]), labels[batch])
        if step == overflow and dist.get_rank() == 1:
            loss = loss * torch.inf
        (loss if scaler is None else scaler.scale(loss)).backward()
        if plain:
            averaged(model)
        if step == left_out:
            continue
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    same_everywhere([*model.parameters()])
    with torch.no_grad():
        return cross_entropy(model(images), labels).item(), optimizer


def same_everywhere(tensors):
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    largest = flat.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert torch.equal(flat, largest) and flat.isfinite().all()


def sgd_trains_as_well_as_with_float32():
    plain, _ = train(lambda p: torch.optim.SGD(p, 0.1, 0.9), 150, plain=True)
    one_bit, optimizer = train(lambda p: OneBitSGD([{"params": []}, {"params": [*p]}], 0.1, 0.9), 150)
    assert one_bit < 1.2 * plain + 0.01, (one_bit, plain)
    ring = 150 * 4 * sum(parameter.numel() for parameter in network().parameters())
    assert 0 < optimizer.bytes_sent < ring / 12  # 1/32, and headers
    assert optimizer.taken_back == 0


def adam_trains_as_well_as_with_float32():
    plain, _ = train(lambda p: torch.optim.AdamW(p, 2e-3, weight_decay=0.01), 200, plain=True)
    groups = lambda p: [{"params": one} for one in ([], [*p], [])]  # noqa: E731
    one_bit, _ = train(lambda p: OneBitAdam(groups(p), 2e-3, weight_decay=0.01, warmup_steps=80), 200)
    assert one_bit < 1.2 * plain + 0.01, (one_bit, plain)


def the_warm_up_is_adamw():
    losses = [train(lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1), 20, plain=True)[0]]
    losses.append(train(lambda p: OneBitAdam(p, 1e-2, weight_decay=0.1, warmup_steps=20), 20)[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def one_inf_leaves_one_step_out_on_all_ranks():
    """Checks OneBitSGD, and OneBitAdam in the warm-up and after it."""
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=256.0)
    adam = lambda p: OneBitAdam(p, 2e-3, warmup_steps=30)  # noqa: E731
    for make, at, scaled_by in (lambda p: OneBitSGD(p, 0.1), 25, scaler), (adam, 25, None), (adam, 50, None):
        without, _ = train(make, 80, left_out=at)
        loss, optimizer = train(make, 80, scaler=scaled_by, overflow=at)
        assert optimizer.taken_back == 1 and loss == pytest.approx(without, rel=1e-5), (loss, without)


def the_state_is_float32_where_that_is_not_the_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        for make, name in (lambda p: OneBitSGD(p), "momentum_buffer"), (lambda p: OneBitAdam(p, warmup_steps=1), "exp_avg"):
            model = torch.nn.Linear(3, 3)
            optimizer = make(model.parameters())
            for _ in range(2):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
            assert {optimizer.state[one][name].dtype for one in model.parameters()} == {torch.float32}
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = OneBitAdam([weight], warmup_steps=1)
        optimizer.step()
        optimizer.state[weight]["step"].fill_(256)  # bfloat16 cannot represent 257
        optimizer.step()
        assert optimizer.state[weight]["step"].item() == 257
    finally:
        torch.set_default_dtype(torch.float32)


def a_saved_variance_that_float16_does_not_have_goes_on():
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.float16))
    optimizer = OneBitAdam([weight], 0.1, warmup_steps=1)
    for step in range(3):
        weight.grad = torch.full_like(weight, 1e-4)
        before = weight.detach().clone()
        optimizer.step()
        assert (weight < before).all(), step  # an element with a variance of 0 would stay as it is
        state = optimizer.state_dict()
        optimizer.load_state_dict(copy.deepcopy(state))
        assert optimizer.state[weight]["exp_avg_sq"].dtype == torch.float32


def frozen_parameters_stay_as_they_are():
    for make in lambda p: OneBitSGD(p, 0.1, weight_decay=0.5), lambda p: OneBitAdam(
        p, 0.1, weight_decay=0.5, warmup_steps=3
    ):  # fmt: skip
        frozen, later, trained = (torch.nn.Parameter(torch.ones(8)) for _ in range(3))
        frozen.requires_grad_(False)
        optimizer = make([frozen, later, trained])
        for step in range(6):
            optimizer.zero_grad()
            if step in (2, 4):  # it has a momentum by then
                later.requires_grad_(step == 4)
            before = later.detach().clone()
            sum(one.sum() for one in (later, trained) if one.requires_grad).backward()
            optimizer.step()
            assert torch.equal(later, before) == (step in (2, 3)), step
        assert torch.equal(frozen, torch.ones(8)) and (trained < 1).all()


def what_was_saved_goes_on():
    model = network()
    optimizer = OneBitAdam(model.parameters(), 1e-3, warmup_steps=2)
    images, labels = digits()
    for _ in range(4):
        optimizer.zero_grad()
        cross_entropy(model(images[:64]), labels[:64]).backward()
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = network()
    other.load_state_dict(model.state_dict())
    again = OneBitAdam(other.parameters(), 1e-3, warmup_steps=2)
    again.load_state_dict(saved)
    optimizer.load_state_dict(saved)  # its errors begin anew, too
    for one, its in (model, optimizer), (other, again):
        its.zero_grad()
        cross_entropy(one(images[:64]), labels[:64]).backward()
        its.step()
    for one, same in zip(model.parameters(), other.parameters()):
        assert torch.equal(one, same)


def a_state_of_another_shape_is_refused_on_all_ranks():
    for make, names in (OneBitSGD, ["momentum_buffer"]), (OneBitAdam, ["exp_avg", "exp_avg_sq"]):
        weight = torch.nn.Parameter(torch.ones(2, 3))
        optimizer = make([weight])
        weight.grad = torch.ones(2, 3)
        optimizer.step()
        good = copy.deepcopy(optimizer.state_dict())
        for name in names:
            bad = copy.deepcopy(good)
            bad["state"][0][name] = torch.ones(3, 2)
            bad["param_groups"][0]["lr"] = 7.0
            shapes = rf"state: .*{name} of parameter 0: shape \[2, 3\] expected, got \[3, 2\]"
            with pytest.raises(ValueError, match=shapes):
                optimizer.load_state_dict(bad if dist.get_rank() else good)
            assert torch.equal(optimizer.state[weight][name], good["state"][0][name])
            assert optimizer.param_groups[0]["lr"] != 7.0
        optimizer.step()
        same_everywhere([weight])


def a_step_may_be_compiled():
    for make in OneBitSGD, lambda p: OneBitAdam(p, warmup_steps=2):
        weight = torch.nn.Parameter(torch.ones(8))
        optimizer = make([weight])
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(4):
            weight.grad, before = torch.ones(8), weight.detach().clone()
            step()
            assert (weight < before).all()


def elements_without_a_variance_are_left_alone():
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = OneBitAdam([weight], 0.1, weight_decay=0.5, warmup_steps=2)
    for step in range(5):
        if step == 2:
            then = weight.detach().clone()
        weight.grad = torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0])
        if step >= 2:
            weight.grad += torch.tensor([0.0, 1, 0, 1, 0, 1, 0, 1])
        optimizer.step()
    assert torch.equal(weight[1::2], then[1::2]) and (weight[::2] < then[::2]).all()


def no_element_moves_by_more_than_the_rate():
    """Checks a step after the warm-up: one magnitude, divided by a root of the variance of 1 or 1e-6, plus eps."""
    momentum = (0.9 * 0.19 + 0.1) / 2**0.5  # the root of the mean of their squares in the third step
    for eps, of_large, of_tiny in (1e-8, momentum, 1), (0.5, momentum / 1.5, momentum / 0.5):
        weight = torch.nn.Parameter(torch.ones(8))
        optimizer = OneBitAdam([weight], 0.1, eps=eps, weight_decay=0.2, warmup_steps=2)
        for _ in range(3):
            then = weight.detach().clone()
            weight.grad = torch.tensor([1.0, 1e-6, -1.0, -1e-6] * 2)
            optimizer.step()
        step = torch.tensor([of_large, of_tiny, -of_large, -of_tiny] * 2) + 0.2 * then
        torch.testing.assert_close(weight.detach() - then, -0.1 * step, rtol=1e-4, atol=1e-6)


def parameters_without_a_gradient_count_as_zero():
    weights = [torch.nn.Parameter(torch.ones(16)) for _ in range(2)]
    optimizer = OneBitSGD(weights, 0.5, 0.0)
    weights[dist.get_rank()].grad = torch.ones(16)  # each rank has a gradient for another weight
    optimizer.step()
    same_everywhere(weights)
    for weight in weights:
        torch.testing.assert_close(weight.detach(), torch.full((16,), 0.75))


def refusals():
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = OneBitSGD([weight], 0.1)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    mesh = dist.init_device_mesh(weight.device.type, (dist.get_world_size(),))
    of_a_mesh = torch.nn.Parameter(DTensor.from_local(torch.ones(8), mesh, [Shard(0)]))
    doubles = torch.nn.Parameter(torch.ones(2).double())
    elsewhere = torch.nn.Parameter(torch.ones(2, device="cpu" if weight.is_cuda else "meta"))
    for call, kind, words in [
        (lambda: OneBitSGD([weight, of_a_mesh]), TypeError, r"params\[1\]: a plain tensor expected, got a DTensor"),
        (lambda: OneBitSGD([weight], -1.0), ValueError, "lr: at least 0"),
        (lambda: OneBitSGD([weight], 0.1, 1.0), ValueError, "momentum: at least 0 and below 1"),
        (lambda: OneBitSGD([weight], "fast"), TypeError, "lr: a number expected, got str 'fast'"),
        (lambda: OneBitAdam([weight], betas=0.9), TypeError, "betas: a pair"),
        (lambda: OneBitAdam([weight], warmup_steps=0), ValueError, "warmup_steps: at least 1"),
        (lambda: OneBitAdam([{"params": [weight], "warmup_steps": 0}]), ValueError, "warmup_steps: 1000, as for all groups"),
        (lambda: OneBitAdam([weight], warmup_steps=1.5), TypeError, "warmup_steps: a whole number"),
        (lambda: OneBitSGD([weight], 0.1, group=alone), ValueError, "at least 2 ranks expected, got 1"),
        (lambda: OneBitSGD([doubles], 0.1), TypeError, "got float64"),
        (lambda: OneBitSGD([{"params": []}], 0.1), ValueError, "one parameter expected"),
        (lambda: OneBitSGD([weight], transport="carrier"), ValueError, "transport: one of auto, .* got str 'carrier'"),
        (lambda: optimizer.add_param_group({"params": [doubles]}), TypeError, r"params\[1\]: .* got float64"),
        (lambda: optimizer.add_param_group({"params": [elsewhere]}), (TypeError, ValueError), r"params\[1\]: .*on .* expected, got"),
        (lambda: pickle.dumps(optimizer), TypeError, "state_dict"),
    ]:
        with pytest.raises(kind, match=words):
            call()
    assert len(optimizer.param_groups) == 1
    weight.grad = torch.ones(8)
    optimizer.step()
    with pytest.raises(RuntimeError, match="before the first step"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


@on_groups(2)
def test_optimizers(group, tmp_path):
    on_ranks(
        group, in_turn, tmp_path, refusals, parameters_without_a_gradient_count_as_zero,
        elements_without_a_variance_are_left_alone, what_was_saved_goes_on,
        a_saved_variance_that_float16_does_not_have_goes_on, frozen_parameters_stay_as_they_are,
        the_state_is_float32_where_that_is_not_the_default, the_warm_up_is_adamw, sgd_trains_as_well_as_with_float32,
        adam_trains_as_well_as_with_float32, one_inf_leaves_one_step_out_on_all_ranks,
        no_element_moves_by_more_than_the_rate, a_step_may_be_compiled,
        a_state_of_another_shape_is_refused_on_all_ranks,
    )  # fmt: skip
