"""Tests of gradcodec.torch.compress: the gradients of DistributedDataParallel, errors that stay with their parameters,
steps that are taken back, checkpoints, and what is refused."""

import copy
import io
import os
import pathlib
import pickle
import re
import tempfile
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ranks import gathered, in_turn, kept_by_all, on_groups, on_ranks, same, same_on_all  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402

from gradcodec import GradCodecError, Status, _torch_ddp  # noqa: E402
from gradcodec import torch as gradcodec_torch  # noqa: E402
from gradcodec.torch import Compression  # noqa: E402

# True if the hook runs in C++, and the MiB that are exchanged together: one or two of the buckets here.
HOOKS = {
    "python": {"native": False, "exchange_mib": 0}, "c++": {"native": True, "exchange_mib": 0},
    "python, larger": {"native": False, "exchange_mib": 0.008}, "c++, larger": {"native": True, "exchange_mib": 0.008},
}  # fmt: skip
HOOK = dict(HOOKS["python"])


def compress(*given, **named):
    return gradcodec_torch.compress(*given, **HOOK, **named)


# Parameters of odd sizes, each with a magnitude of its own; a bucket holds some of them.
SHAPES = [(7,), (33, 5), (1, 1, 3), (1000,), (64, 64)]


class Linear(torch.nn.Module):
    """A model whose gradient is the argument of its forward pass."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        zeros = (torch.zeros(shape, dtype=dtype) for shape in SHAPES)
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(zero) for zero in zeros)

    def forward(self, gradients):
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, gradients))


# Codecs that carry errors: with no raw parameter, or with raw ones, by name or by a function.
CARRYING = {
    "onebit": {}, "mxfp4": {"raw": ["weights.1", "weights.3"], "error": "bfloat16"},
    "int8": {"raw": lambda name, parameter: parameter.dim() == 3, "error": "float32"},
}  # fmt: skip


def hooked(codec="onebit", dtype=torch.float32, gradient_as_bucket_view=False, **options):
    model = DistributedDataParallel(
        Linear(dtype), bucket_cap_mb=0.002, gradient_as_bucket_view=gradient_as_bucket_view
    )  # fmt: skip
    return model, compress(model, codec, momentum=True, **CARRYING.get(codec, {}), **options)


def backward(model, gradients):
    model.zero_grad()
    model(gradients).backward()
    return [weight.grad.clone() for weight in model.module.weights]


def of_one_magnitude(step, dtype=torch.float32):
    """Returns gradients with one magnitude per parameter, which ONEBIT sends without loss."""
    torch.manual_seed(step)
    signs = [torch.randint(2, shape) * 2 - 1 for shape in SHAPES]
    return [(sign * 2.0 ** (k - 2)).to(dtype) for k, sign in enumerate(signs)]


def random(step, rank):
    torch.manual_seed(100 * step + rank)
    return [torch.randn(shape) for shape in SHAPES]


def mine(step):
    return random(step, dist.get_rank())


def tolerance(codec):
    return 2e-2 if CARRYING[codec].get("error") == "bfloat16" else 1e-4


def carried(states):
    """Returns the errors still to be sent, by parameter, on the CPU: the mean of workers' errors, and the reducers'."""
    total = [torch.zeros(torch.Size(shape).numel(), device="cpu") for shape in SHAPES]
    for state in states:
        for k, errors in enumerate(total):
            if f"weights.{k}" in state["worker"]:  # a raw parameter has no errors
                errors += state["worker"][f"weights.{k}"].cpu() / len(states)
            for first, part in state["server"].get(f"weights.{k}", []):
                errors[first : first + part.numel()] += part.cpu()
    return total


def what_is_of_one_magnitude_comes_back():
    for dtype in torch.float32, torch.float16, torch.bfloat16:
        model, compression = hooked(dtype=dtype)
        for step in range(3):
            expected = of_one_magnitude(step, dtype)
            torch.testing.assert_close(backward(model, expected), expected, rtol=0, atol=0)
        assert len(compression._exchanges) > 1
        assert compression.taken_back == 0 and compression.bytes_sent > 0
        stats = compression.stats()
        assert sorted(stats) == [f"weights.{k}" for k in range(len(SHAPES))] and max(stats.values()) == 0
        backward(model, mine(1))
        assert 0.1 < min(compression.stats().values())
        compression.close()


def nothing_is_lost_when_buckets_are_arranged_anew(codec):
    model, compression = hooked(codec)
    given, received = ([torch.zeros(shape) for shape in SHAPES] for _ in range(2))
    arrangements = set()
    for step in range(4):
        for sum_of, gradients in (received, backward(model, mine(step))), *((given, random(step, r)) for r in (0, 1)):
            for total, gradient in zip(sum_of, gradients):
                total += gradient / (1 if sum_of is received else 2)
        arrangements.add(tuple(bucket.names for bucket in compression._exchanges.values()))
    assert len(arrangements) > 1
    for one, other, left in zip(given, received, carried(gathered(compression.state_dict()))):
        torch.testing.assert_close(other.cpu() + left.view_as(other), one.cpu(), rtol=0, atol=tolerance(codec))
    assert max(left.abs().max() for left in carried(gathered(compression.state_dict()))) > 0.005


def one_inf_takes_the_step_back_in_every_bucket_on_every_rank(codec):
    model, compression = hooked(codec)
    for step in range(3):
        backward(model, mine(step))
    before = copy.deepcopy(compression.state_dict())
    for step, (number, value) in enumerate([(0, torch.inf), (4, torch.nan)]):
        gradients = mine(3)
        if dist.get_rank() == 1:
            gradients[number].view(-1)[2] = value
        arrived = backward(model, gradients)
        assert not arrived[number].isfinite().all()  # so that every rank skips the optimizer's step
        assert compression.taken_back == step  # the step is still pending
        assert same(compression.state_dict(), before)
        assert compression.taken_back == step + 1
    backward(model, mine(3))
    compression.commit(skip=torch.tensor(True))
    assert compression.taken_back == 3 and same(compression.state_dict(), before)
    backward(model, mine(3))
    for skip in torch.zeros(2), np.zeros(2):
        with pytest.raises(ValueError):
            compression.commit(skip)  # the step stays pending
    compression.rollback()
    compression.rollback()  # no step is pending
    assert compression.taken_back == 4 and same(compression.state_dict(), before)
    first = backward(model, mine(3))
    compression.rollback()
    assert same(first, backward(model, mine(3)))  # sends the same bytes again
    compression.commit()
    assert compression.taken_back == 5 and not same(compression.state_dict(), before)


def a_pass_that_broke_off_is_taken_back():
    model, compression = hooked()
    for step in range(3):
        backward(model, mine(step))
    before, sent = copy.deepcopy(compression.state_dict()), compression.bytes_sent
    gradients, last_to_come = mine(3), next(iter(model.module.weights)) * 1.0

    def fail(_):
        raise OSError("the disk is full")

    last_to_come.register_hook(fail)
    model.module.forward = lambda given: (last_to_come * given[0]).sum() + sum(
        (weight * gradient).sum() for weight, gradient in zip([*model.module.weights][1:], given[1:])
    )
    with pytest.raises((OSError, RuntimeError), match="the disk is full"):
        model(gradients).backward()
    assert compression.bytes_sent > sent  # a part was sent
    assert same(compression.state_dict(), before) and compression.taken_back == 1


def what_is_saved_goes_on(codec):
    model, compression = hooked(codec)
    for step in range(3):
        backward(model, mine(step))
    state = copy.deepcopy(compression.state_dict())
    assert (state["rank"], state["world_size"]) == (dist.get_rank(), dist.get_world_size())
    expected = [backward(model, mine(step)) for step in (3, 4)]
    given = copy.deepcopy(state)
    compression.load_state_dict(given)
    assert same(compression.state_dict(), state)  # before any bucket has the state
    for each in given, compression.state_dict():  # neither shares the kept state's memory
        for errors in *each["worker"].values(), *(part for parts in each["server"].values() for _, part in parts):
            errors.zero_()
    assert same(expected, [backward(model, mine(step)) for step in (3, 4)])
    compression.load_state_dict(gathered(state))
    assert same(expected, [backward(model, mine(step)) for step in (3, 4)])
    # Another model begins with other buckets: no error is lost, but other ranks reduce some elements.
    other, again = hooked(codec)
    again.load_state_dict(state)
    zeros = backward(other, [torch.zeros(shape) for shape in SHAPES])
    left, total = carried(gathered(again.state_dict())), carried(gathered(state))
    for sent, now, then in zip(zeros, left, total):
        torch.testing.assert_close(sent.view(-1).cpu() + now, then, rtol=0, atol=tolerance(codec))


def the_errors_of_another_world_are_taken(codec):
    model, compression = hooked(codec)
    backward(model, mine(0))
    states = gathered(compression.state_dict())
    three = [{**copy.deepcopy(states[rank % 2]), "rank": rank, "world_size": 3} for rank in range(3)]
    three[2]["server"] = {}
    total = carried(three)
    compression.load_state_dict(three[::-1])
    sent = backward(model, [torch.zeros(shape) for shape in SHAPES])
    for one, now, then in zip(sent, carried(gathered(compression.state_dict())), total):
        torch.testing.assert_close(one.view(-1).cpu() + now, then, rtol=0, atol=tolerance(codec))


def passes_without_synchronization_only_add_up():
    model, compression = hooked()
    backward(model, of_one_magnitude(0))
    for step in 1, 2:
        sent, gradients = compression.bytes_sent, of_one_magnitude(step)
        model.zero_grad()
        with model.no_sync():
            model(gradients).backward()
        assert compression.bytes_sent == sent
        model(gradients).backward()
        for weight, gradient in zip(model.module.weights, gradients):
            torch.testing.assert_close(weight.grad, 2 * gradient, rtol=0, atol=0)
    assert compression.taken_back == 0


def join_divides_by_the_ranks_of_the_start():
    """Checks that, as with a hook of PyTorch's, divide_by_initial_world_size has no effect."""
    for hook, factor in [
        (lambda model: None, 1.0), (lambda model: model.register_comm_hook(None, allreduce_hook), 0.5),
        (lambda model: compress(model, "bf16"), 0.5),
    ]:  # fmt: skip
        model = DistributedDataParallel(Linear(), bucket_cap_mb=0.002)
        hook(model)
        with model.join(divide_by_initial_world_size=False):
            for step in range(1 + dist.get_rank()):
                arrived = backward(model, of_one_magnitude(step))
        if dist.get_rank() == 1:  # rank 1 takes its second step alone
            for gradient, given in zip(arrived, of_one_magnitude(1)):
                assert torch.equal(gradient, factor * given)


def parameters_that_are_ignored_may_be_of_any_kind():
    plain = Linear()
    plain.weights[0] = torch.nn.Parameter(plain.weights[0].detach().double())
    plain.table = torch.nn.Embedding(3, 2, sparse=True)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, ["weights.0", "table.weight"])
    model = DistributedDataParallel(plain, bucket_cap_mb=0.002)
    compression = compress(model, "onebit", momentum=True)
    for step in range(3):
        gradients = of_one_magnitude(step)
        for gradient, one in zip(backward(model, gradients), gradients):
            torch.testing.assert_close(gradient, one.to(gradient.dtype), rtol=0, atol=0)
    assert sorted(compression.state_dict()["worker"]) == [f"weights.{k}" for k in range(1, len(SHAPES))]


def parameters_may_be_frozen_in_between():
    model = DistributedDataParallel(Linear(), bucket_cap_mb=0.002, find_unused_parameters=True)
    weights = model.module.weights
    weights[1].requires_grad_(False)  # DistributedDataParallel has it in a bucket by now
    compression = compress(model, "onebit", momentum=True)
    for step in range(4):
        if step == 3:
            weights[1].requires_grad_(True)
            weights[4].requires_grad_(False)
        gradients = of_one_magnitude(step)
        model.zero_grad()
        model(gradients).backward()
        for weight, gradient in zip(weights, gradients):
            if weight.requires_grad:
                torch.testing.assert_close(weight.grad, gradient, rtol=0, atol=0)
    assert sorted(compression.state_dict()["worker"]) == [f"weights.{k}" for k in range(5)]


def what_began_in_inference_mode_goes_on():
    model, compression = hooked()
    for inference in False, True, True, False:
        backward(model, mine(0))
        before = compression.taken_back
        with torch.inference_mode(inference):
            compression.commit(skip=torch.tensor(1))
            state = compression.state_dict()
            compression.load_state_dict(state)
        assert compression.taken_back == before + 1


def what_arrived_is_clipped_alike_on_all_ranks():
    model, _ = hooked("int8")
    for step in range(2):
        backward(model, mine(step))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        clipped = [weight.grad for weight in model.module.weights]
        assert norm > 0.5 and torch.stack([one.norm() for one in clipped]).norm().item() == pytest.approx(0.5, rel=1e-3)
        assert same_on_all([norm, *clipped])


def errors_follow_the_scale_of_a_scaler(codec):
    """Checks the errors of workers and of reducers, also for a state that is used without a scaler."""
    runs = []
    for scales in None, (), (1.0, 4.0, 4.0, 2.0, 8.0), (None, 4.0, 4.0, 2.0, 8.0):  # (): a scaler that is not enabled
        device = torch.get_default_device().type
        scaler = None if scales is None else torch.amp.GradScaler(device, enabled=bool(scales))
        model, compression = hooked(codec, scaler=scaler)
        arrived = []
        for step in range(5):
            scale = 1.0
            if scales and scales[step]:  # otherwise the scaler is not used yet
                scale = scales[step]
                scaler.scale(torch.ones(()))  # creates the scale
                scaler.update(scale)
            gradients = [scale * gradient for gradient in mine(step)]
            if step == 3:
                gradients[0][0] = torch.inf  # errors never get this step's scale
            arrived.append([gradient / scale for gradient in backward(model, gradients)])
        del arrived[3]  # has a NaN
        state = compression.state_dict()
        assert compression.taken_back == 1 and state["scale"] == (8.0 if scales else None)
        worker = {name: errors / scale for name, errors in state["worker"].items()}
        server = {name: [(first, part / scale) for first, part in its] for name, its in state["server"].items()}
        other, again = hooked(codec)
        again.load_state_dict(copy.deepcopy(state))
        arrived.append(backward(other, mine(5)))
        assert again.state_dict()["scale"] is None
        runs.append((arrived, worker, server))
    assert all(same(runs[0], one) for one in runs[1:])


def once_closed_it_averages_plainly_and_makes_room():
    model, compression = hooked()
    backward(model, mine(0))
    with compression as entered:
        assert entered is compression
    compression.close()
    for call in compression.commit, compression.state_dict, compression.stats, lambda: compression.load_state_dict({}):
        with pytest.raises(ValueError, match="is closed"):
            call()
    expected = [(one + other) / 2 for one, other in zip(random(1, 0), random(1, 1))]
    torch.testing.assert_close(backward(model, mine(1)), expected)
    again = compress(model, "onebit", momentum=True)
    assert not same(backward(model, mine(1)), expected) and again.bytes_sent > 0


def names_are_those_of_the_module_itself():
    model = DistributedDataParallel(torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 3)), backend="eager"))
    compression = compress(torch.compile(model, backend="eager"), "onebit", momentum=True)
    assert sorted(compression._sizes) == ["0.bias", "0.weight"]
    both = torch.nn.Module()
    both.weight, both.module = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Linear(4, 4)
    compression = compress(DistributedDataParallel(both), "onebit", momentum=True)
    assert sorted(compression._sizes) == ["bias", "module.weight", "weight"]


def a_step_may_be_compiled_as_a_whole():
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    compression, optimizer = compress(model, "int4"), torch.optim.SGD(model.parameters(), 0.1)

    @torch.compile(backend="eager")
    def step(given):
        optimizer.zero_grad()
        model(given).square().sum().backward()
        optimizer.step()
        compression.commit()

    for number in range(3):
        sent = compression.bytes_sent
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of PyTorch's own tracing
            step(torch.ones(2, 64))
        assert compression.bytes_sent > sent, number
    assert compression.state_dict()["worker"].keys() == {"weight"} and compression.taken_back == 0


def refusals():
    plain, (model, compression) = torch.nn.Linear(3, 3), hooked()
    fresh = lambda module=None: DistributedDataParallel(module or torch.nn.Linear(3, 3))  # noqa: E731
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    state = compression.state_dict()
    frozen = fresh()
    frozen.requires_grad_(False)
    for call, kind, words in [
        (lambda: compress(plain), TypeError, "model: a DistributedDataParallel expected, got Linear"),
        (lambda: compress(model), RuntimeError, "has a communication hook already"),
        (lambda: compress(fresh(), "zip"), ValueError, "codec: one of onebit, .* got str 'zip'"),
        (lambda: compress(fresh(), 1), ValueError, "codec: one of"),
        (lambda: compress(fresh(), "onebit", error="float64"), ValueError, "error: one of float32, .*'float64'"),
        (lambda: compress(fresh(), error=["none"]), ValueError, "error: one of float32, .* got list"),
        (lambda: compress(fresh(), "onebit", raw=()), ValueError, "raw: nothing travels as it is with onebit"),
        (lambda: compress(fresh(), "int8", raw=["0"]), ValueError, "raw: '0' is no parameter"),
        (lambda: compress(fresh(), "int8", raw="weight"), TypeError, "raw: a function of name and parameter"),
        (lambda: compress(fresh(), transport="carrier pigeon"), ValueError, "transport: one of auto"),
        (lambda: compress(fresh(), transport=5), ValueError, "transport: one of auto, .* got int 5"),
        (lambda: compress(fresh(), scaler=2.0), TypeError, "scaler: a torch.amp.GradScaler expected"),
        (lambda: compress(fresh(), timeout="soon"), TypeError, "timeout: seconds"),
        (lambda: compress(fresh(), group=alone), ValueError, "group: at least 2 ranks expected, got 1"),
        (lambda: compress(fresh(plain.double())), TypeError, "weight: float32, .* got float64"),
        (lambda: compress(frozen), ValueError, "one parameter that is a tensor and requires grad expected at least"),
        (lambda: compress(fresh(torch.nn.Embedding(5, 3, sparse=True))), TypeError, "sparse gradients"),
        (lambda: pickle.dumps(compression), TypeError, "state_dict"),
        (lambda: compression.load_state_dict(5), TypeError, "state: what state_dict"),
        (lambda: compression.load_state_dict({**state, "format": 3}), ValueError, "of format 3"),
        (lambda: compression.load_state_dict({**state, "rank": 7}), ValueError, "of rank 7 of 2, and this is rank"),
        (lambda: compression.load_state_dict([state]), ValueError, "one of each of 2 ranks expected, got ranks"),
        (lambda: compression.load_state_dict({**state, "worker": {"w": torch.ones(2)}}), ValueError, "'w' is no par"),
        (lambda: compression.load_state_dict({**state, "worker": {"weights.0": torch.ones(2)}}), ValueError,
         "7 elements of 'weights.0' expected, got 2"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=words):
            call()
    leaves_out = fresh()
    leaves_out.skip_all_reduce_unused_params = True
    with pytest.raises(RuntimeError, match="skip_all_reduce_unused_params=True, which leaves the hook out"):
        compress(leaves_out)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        with pytest.raises(RuntimeError, match="model: made under optimize_ddp = 'python_reducer'"):
            compress(fresh())
    if dist.get_backend() == "gloo":
        with pytest.raises(ValueError, match="transport: nccl is for tensors on a GPU"):
            compress(fresh(), transport="nccl")
    if torch.get_default_device().type == "cpu":
        with pytest.raises(ValueError, match="transport: peers is for tensors on the GPUs of one node; .* on cpu"):
            compress(fresh(), transport="peers")
    with pytest.warns(UserWarning, match="onebit is for SGD without momentum") as said:
        compress(fresh(torch.nn.Linear(3, 3)), "onebit")
    assert len(said) == 1


def errors_of_a_parameter_that_no_rank_uses_are_kept(codec):
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = torch.nn.Linear(40, 32), torch.nn.Linear(40, 32)

        def forward(self, given, chosen):
            return sum(one(given) for one, is_used in zip((self.a, self.b), chosen) if is_used)

    def made(hook):
        model = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=0.006)
        options = {} if codec == "onebit" else {"raw": (), "error": "float32"}
        return model, compress(model, codec, momentum=True, **options) if hook else None

    (plain, _), (model, compression), rank = made(False), made(True), dist.get_rank()
    wanted, got = ({name: torch.zeros(one.numel()) for name, one in plain.module.named_parameters()} for _ in range(2))
    for step in range(12):
        chosen = [(1, 0), (0, 1), (1, 1), (rank, 1 - rank)][step % 4]  # in the last case one rank uses each
        broken = step in (4, 7)
        for one, total in (plain, wanted), (model, got):
            one.zero_grad(set_to_none=True)
            torch.manual_seed(step)
            given = torch.randn(8, 40) + rank
            if broken and one is model:  # taken back, with the errors that were set aside
                one((given * torch.inf), chosen).sum().backward()
                one.zero_grad(set_to_none=True)
            one(given, chosen).square().mean().backward()
            for name, parameter in one.module.named_parameters():
                if parameter.grad is not None:
                    total[name] += parameter.grad.view(-1)
        if step == 9:  # also with errors that are set aside
            compression.load_state_dict(copy.deepcopy(compression.state_dict()))
    assert compression.taken_back == 2
    for name, errors in kept_by_all(compression.state_dict()).items():
        torch.testing.assert_close(got[name] + errors, wanted[name], rtol=0, atol=1e-4)


def copies_of_a_model_have_no_hook_and_may_get_one():
    model, compression = hooked("int8")
    for when in "open", "closed":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = copy.deepcopy(model), AveragedModel(model).module, torch.load(file, weights_only=False)
        for one in copies:
            assert same(one.state_dict(), model.state_dict())
            of_ranks = [random(1, rank) for rank in range(dist.get_world_size())]
            expected = [sum(each) / len(of_ranks) for each in zip(*of_ranks)]
            torch.testing.assert_close(backward(one, mine(1)), expected)
            with compress(one, "bf16") as its:
                backward(one, mine(1))
                assert its.bytes_sent > 0
        if when == "open":
            sent = compression.bytes_sent
            backward(model, mine(1))
            assert compression.bytes_sent > sent
            compression.close()


def a_failed_exchange_is_raised():
    model, compression = hooked(transport=dist.get_backend())
    backward(model, mine(0))

    def fail(*_):
        raise OSError("the network is down")

    gather, compression._group._gather = compression._group._gather, fail
    with pytest.raises(GradCodecError, match="the network is down|returned 1") as raised:
        backward(model, mine(1))
    assert raised.value.status == Status.COMM
    compression._group._gather = gather
    assert compression.taken_back == 0
    compression.commit()
    assert compression.taken_back == 1


def transports_give_the_same_bytes():
    if torch.get_default_device().type == "cpu":
        return  # a CPU has one transport
    found = []
    for transport in dist.get_backend(), "peers", "auto":
        model, compression = hooked("mxfp4", transport=transport)
        found.append([backward(model, mine(step)) for step in range(3)])
        assert compression.bytes_sent > 0 and bool(compression._group.peers) == (transport != dist.get_backend())
    assert same(found[0], found[1]) and same(found[0], found[2])


def what_pytorch_has_ended_is_not_used():
    if dist.get_backend() != "nccl":
        return
    group = dist.new_group()
    model = DistributedDataParallel(Linear(), bucket_cap_mb=0.002, process_group=group)
    compression = compress(model, "int8", raw=(), transport="nccl")
    for step in range(3):
        backward(model, mine(step))
    direct = [unit.handle.is_direct for unit in compression._units()]
    assert direct == [True] * (len(direct) - 1) + [False] and len(direct) > 1
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="communicator"):
        backward(model, mine(3))
    compression.close()


def gradients_are_those_of_plain_training_but_for_rounding():
    for codec, most in ("bf16", 0.003), ("int8", 0.01), ("mxfp8", 0.05), ("int4", 0.15), ("mxfp4", 0.2):
        model = DistributedDataParallel(Linear(), bucket_cap_mb=0.002)
        compression = compress(model, codec)
        assert compression.error == ("float32" if "4" in codec else "none")
        arrived = backward(model, mine(0))
        for k, (gradient, one, other) in enumerate(zip(arrived, random(0, 0), random(0, 1))):
            mean = (one + other) / 2
            lost = (gradient - mean).norm() / mean.norm()
            # Parameters of fewer than 1,024 elements, or of one dimension, travel raw.
            assert 0 < lost < 2 * most if k == 4 else lost == 0, (codec, k, lost)
        stats = compression.stats()
        assert 0 < stats["weights.4"] < most and sum(stats.values()) == stats["weights.4"], (codec, stats)


def the_programs_of_documents_run_as_printed():
    root, images = pathlib.Path(__file__).resolve().parents[3], torch.randn(4, 3)
    for document in "README.md", "docs/ALLREDUCE.md", "docs/START.md":
        blocks = re.findall(r"```python\n(.*?)```", (root / document).read_text(), re.S)
        (program,) = [block for block in blocks if "gradcodec.torch" in block]
        model = torch.nn.Linear(3, 2)
        names = {
            "DistributedDataParallel": DistributedDataParallel, "model": model, "torch": torch, "rank": dist.get_rank(),
            "optimizer": torch.optim.SGD(model.parameters(), 0.1), "batches": [(images, torch.ones(4, 2))] * 2,
            "loss": torch.nn.functional.mse_loss,
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            here = os.getcwd()
            os.chdir(folder)
            exec(program, names)
            assert os.listdir() == ([f"errors-{dist.get_rank()}.pt"] if "save" in program else [])
            os.chdir(here)
        assert isinstance(names["compression"], Compression)


def errors_are_float32_where_that_is_not_the_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        model, compression = hooked("int4", torch.bfloat16)
        backward(model, mine(0))
        state = compression.state_dict()
        assert state["worker"] and {errors.dtype for errors in state["worker"].values()} == {torch.float32}
        for taken in state, [{**state, "rank": 0, "world_size": 1}]:
            compression.load_state_dict(taken)
            backward(model, mine(1))
    finally:
        torch.set_default_dtype(torch.float32)


def a_step_like_the_one_before_takes_one_way():
    """Checks that repeated steps run in C++ or in Python only, and which buckets are exchanged together."""
    calls = []
    for name in "exchange", "begin", "check_direct", "failed":  # enqueued() follows exchanges that run in Python
        method = getattr(_torch_ddp._Slot, name)
        setattr(_torch_ddp._Slot, name, lambda *given, name=name, method=method: calls.append(name) or method(*given))
    model, compression = hooked("int8", gradient_as_bucket_view=True)
    assert [kind for kind, _ in model._comm_hooks] == [_torch_ddp.compressed]
    seen = []
    for step in range(5):
        seen.append(len(calls))
        backward(model, mine(step))
    # The C++ hook calls Python in the first pass and in the first pass with other buckets, and never afterwards.
    assert HOOK["native"] == (seen[2] > 0) and seen[2] == seen[4] == len(calls), seen
    sizes = [sum(one.handle.sizes) for one in compression._exchanges.values()]
    assert [*compression._exchanges] == ([0, 1] if HOOK["exchange_mib"] else [0, 1, 2]), sizes
    assert sizes == ([4096, 1175] if HOOK["exchange_mib"] else [4096, 1000, 175]), sizes


def a_static_graph_and_dtypes_that_differ():
    for named in {"static_graph": True}, {}:
        plain = Linear()
        for k in (1, 3):
            plain.weights[k] = torch.nn.Parameter(plain.weights[k].detach().bfloat16())
        model = DistributedDataParallel(plain, bucket_cap_mb=0.002, **named)
        compression = compress(model, "onebit", momentum=True)
        for step in range(4):
            gradients = of_one_magnitude(step)
            for gradient, one in zip(backward(model, gradients), gradients):
                torch.testing.assert_close(gradient, one.to(gradient.dtype), rtol=0, atol=0)
        assert {one.handle.dtype for one in compression._exchanges.values()} == {torch.float32, torch.bfloat16}
        assert compression.taken_back == 0


def hooks_of_ranks_may_differ():
    both = []
    for native in HOOK["native"], dist.get_rank() == 0:
        outer, HOOK["native"] = HOOK["native"], native
        model, compression = hooked("mxfp4")
        HOOK["native"] = outer
        found = [backward(model, mine(step)) for step in range(3)]
        found.append(backward(model, [gradient * torch.inf for gradient in mine(3)])[:0])
        both.append([*found, backward(model, mine(4)), copy.deepcopy(compression.state_dict()), compression.taken_back])
    assert same(*both)


def a_model_keeps_its_first_hook():
    model, compression = hooked("int8")
    before = backward(model, mine(1))
    compression.close()
    outer, HOOK["native"] = HOOK["native"], not HOOK["native"]
    if outer:
        again = compress(model, "int8", **CARRYING["int8"])
    else:
        with pytest.raises(RuntimeError, match="on rank 0: the model's first hook runs in Python"):
            compress(model, "int8", **CARRYING["int8"])
        HOOK["native"] = None
        with pytest.warns(UserWarning, match="the hook runs in Python, .* the model's first hook"):
            again = compress(model, "int8", **CARRYING["int8"])
    HOOK["native"] = outer
    assert same(before, backward(model, mine(1))) and again.bytes_sent > 0 and len(model._comm_hooks) == 1


def what_ranks_must_agree_on_is_compared():
    outer = dict(HOOK)
    HOOK["exchange_mib"] = 3.5 + dist.get_rank()
    with pytest.raises(ValueError, match="exchange_mib: 3.5 on rank 0 and 4.5 on rank 1"):
        hooked("int8")
    scaler = torch.amp.GradScaler(torch.get_default_device().type) if dist.get_rank() else None
    HOOK["exchange_mib"] = 0
    with pytest.raises(ValueError, match="has a scaler: False on rank 0 and True on rank 1"):
        hooked("int8", scaler=scaler)
    for wrong in -1, True, "all", torch.inf:
        HOOK["exchange_mib"] = wrong
        with pytest.raises(ValueError, match="exchange_mib: MiB from 0 up, or None, expected"):
            hooked("int8")
    HOOK.clear()
    HOOK["native"] = 1
    with pytest.raises(TypeError, match="native: True, False or None expected, got int 1"):
        hooked("int8")
    HOOK.update(outer)


# Checks with each kind of codec, and checks with one.
OF_CODECS = [
    nothing_is_lost_when_buckets_are_arranged_anew, one_inf_takes_the_step_back_in_every_bucket_on_every_rank,
    what_is_saved_goes_on, the_errors_of_another_world_are_taken, errors_follow_the_scale_of_a_scaler,
    errors_of_a_parameter_that_no_rank_uses_are_kept,
]  # fmt: skip
OF_ONE = [
    the_programs_of_documents_run_as_printed, gradients_are_those_of_plain_training_but_for_rounding,
    what_is_of_one_magnitude_comes_back, a_pass_that_broke_off_is_taken_back,
    passes_without_synchronization_only_add_up, join_divides_by_the_ranks_of_the_start,
    parameters_that_are_ignored_may_be_of_any_kind, parameters_may_be_frozen_in_between,
    what_began_in_inference_mode_goes_on, what_arrived_is_clipped_alike_on_all_ranks,
    once_closed_it_averages_plainly_and_makes_room, errors_are_float32_where_that_is_not_the_default,
    a_step_may_be_compiled_as_a_whole, names_are_those_of_the_module_itself,
    copies_of_a_model_have_no_hook_and_may_get_one, refusals, a_failed_exchange_is_raised,
    transports_give_the_same_bytes, what_pytorch_has_ended_is_not_used, a_static_graph_and_dtypes_that_differ,
    hooks_of_ranks_may_differ, a_model_keeps_its_first_hook, what_ranks_must_agree_on_is_compared,
]  # fmt: skip


def everything():
    """Checks all with the hook in Python per bucket and in C++ for several buckets, and a part with the other two."""
    warnings.simplefilter("error", UserWarning)
    for hook, is_whole in ("python", True), ("c++, larger", True), ("c++", False), ("python, larger", False):
        HOOK.clear()
        HOOK.update(HOOKS[hook])
        codecs = CARRYING if is_whole else ["mxfp4"]
        for function in OF_CODECS if is_whole else OF_CODECS[:2]:
            for codec in codecs:
                print(hook, function.__name__, codec, flush=True)  # pytest shows this if the check fails
                function(codec)
        in_turn(*(OF_ONE if is_whole else []), a_step_like_the_one_before_takes_one_way)


@on_groups(2)
def test_compress(group, tmp_path):
    on_ranks(group, everything, tmp_path)
