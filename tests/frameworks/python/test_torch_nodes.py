"""Tests of compress(), all_reduce(), AllReduce and the optimizers on several nodes with several ranks: the nodes found,
the results, and errors when parts change their owners. GRADCODEC_NODE imitates the nodes."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from gradcodec import GradCodecError, Status, _torch_groups, _torch_nodes
from gradcodec.torch import OneBitAdam, OneBitSGD, all_reduce, compress
from ranks import in_turn, kept_by_all, on_groups, on_ranks, same_on_all, states_of_all


def of_node(per_node):
    """Puts this rank on a node of `per_node` ranks."""
    os.environ["GRADCODEC_NODE"] = f"node {dist.get_rank() // per_node}"


def model_of(bucket_cap_mb=25, group=None):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(96, 160), torch.nn.Tanh(), torch.nn.Linear(160, 96), torch.nn.Linear(96, 7)]
    module = torch.nn.Sequential(*layers)
    devices = [torch.cuda.current_device()] if torch.get_default_device().type == "cuda" else None
    return DDP(module, device_ids=devices, bucket_cap_mb=bucket_cap_mb, process_group=group)


def gradients_of(model, step):
    generator = torch.Generator(torch.get_default_device()).manual_seed(100 * step + dist.get_rank())
    model.zero_grad()
    model(torch.randn(16, 96, generator=generator)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def exact(model, step):
    """Returns the exact mean, without compression."""
    with model.no_sync():
        own = gradients_of(model, step)
    for one in own:
        dist.all_reduce(one)
        one /= dist.get_world_size()
    return own


def apart(some, others):
    return max(float((one - other).norm() / other.norm()) for one, other in zip(some, others))


def a_step_sums_within_nodes_first():
    of_node(2)
    model = model_of()
    expected = exact(copy.deepcopy(model), 0)
    compression = compress(model, "int8")
    assert compression.topology_ranks == [[0, 1], [2, 3]]
    assert compression.topology.startswith("2 nodes of 2 ranks: sums within a node"), compression.topology
    found = gradients_of(model, 0)
    assert same_on_all(found)
    assert apart(found, expected) < 0.02
    handle = next(iter(compression._units())).handle.steps
    assert 0 < handle.sent_between_nodes < handle.sent_bytes
    flat = model_of()
    by_one_level = compress(flat, "int8", transport="flat")
    assert by_one_level.topology == "2 nodes of 2 ranks: one level, over gloo" or torch.cuda.is_available()
    assert next(iter(by_one_level._units()), None) is None
    gradients_of(flat, 0)
    of_flat = next(iter(by_one_level._units())).handle.steps
    assert of_flat.sent_between_nodes is None and handle.sent_between_nodes < of_flat.sent_bytes / 2


def what_arrived_and_what_is_kept_are_the_gradients():
    """Checks across the rebuild of buckets after the first step, a checkpoint, and one level in place of two."""
    of_node(2)
    model, other = model_of(bucket_cap_mb=0.05), model_of(bucket_cap_mb=0.05)
    compression = compress(model, "int4", raw=[])
    sent = [torch.zeros_like(one) for one in model.parameters()]
    arrived = [torch.zeros_like(one) for one in model.parameters()]
    names = [name for name, _ in model.module.named_parameters()]

    def step(number):
        for total, one in zip(sent, exact(other, number)):
            total += one
        for total, one in zip(arrived, gradients_of(model, number)):
            total += one

    def check(what):
        kept = kept_by_all(compression.state_dict())
        for name, total, one in zip(names, sent, arrived):
            assert torch.allclose(total, one + kept[name].view_as(one), rtol=1e-4, atol=1e-4), (what, name)

    for number in range(3):  # buckets are arranged anew after the first step
        step(number)
        check(number)
    for transport in ("auto", "flat", "auto"):
        states = states_of_all(compression.state_dict())
        assert (states[0]["format"], states[0]["world_size"]) == (2, 4)
        compression.close()
        compression = compress(model, "int4", raw=[], transport=transport)
        compression.load_state_dict(states)
        step(10)
        check(transport)


def a_state_of_other_nodes_is_refused_alone():
    of_node(2)
    model = model_of()
    compression = compress(model, "int4")
    gradients_of(model, 0)
    state = compression.state_dict()
    assert (state["nodes"], state["ranks_per_node"], state["place"]) == (2, 2, divmod(dist.get_rank(), 2))
    compression.load_state_dict(state)
    compression.close()
    flat = compress(model, "int4", transport="flat")
    with pytest.raises(ValueError, match="of 2 nodes of 2 ranks, and this is of 1 of 4"):
        flat.load_state_dict(state)
    old = {key: value for key, value in state.items() if key not in ("nodes", "ranks_per_node", "place")}
    flat.load_state_dict({**old, "format": 1})


def a_group_of_other_ranks_is_refused():
    first, second = dist.new_group([0, 1]), dist.new_group([0, 2])
    if dist.get_rank() == 0:
        model = DDP(torch.nn.Linear(3, 3), process_group=first, init_sync=False)
        with pytest.raises(ValueError, match=r"group: the ranks of the model expected, list \[0, 1\], got list \[0, 2\]"):
            compress(model, group=second)


def signs_have_one_level():
    of_node(2)
    model = model_of()
    compression = compress(model, "sign")
    assert "one level" in compression.topology
    assert same_on_all(gradients_of(model, 0))


def four_of_five_compress_and_all_make_a_group():
    """Checks that compress() makes no process group: a group made by some ranks alone would make this one hang."""
    of_node(2)
    group = dist.new_group([0, 1, 2, 3])
    if dist.get_rank() < 4:
        model = model_of(group=group)
        compression = compress(model, "int8")
        assert compression.topology_ranks == [[0, 1], [2, 3]]
        for step in range(3):
            gradients_of(model, step)
        all_reduce(torch.ones(8), group=group)
    one = torch.ones(1)
    dist.all_reduce(one, group=dist.new_group([*range(5)]))
    assert one.item() == 5


def test_a_group_of_all_ranks_can_be_made_after_some_of_them_compressed(tmp_path):
    on_ranks(("gloo", "cpu", 5), four_of_five_compress_and_all_make_a_group, tmp_path)


def tensors_of(step, rank=None):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator(torch.get_default_device()).manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in ((70, 40), (0,), (33,))]


def mean_of(step):
    return [sum(ones) / 4 for ones in zip(*(tensors_of(step, rank) for rank in range(4)))]


def all_reduce_sums_within_nodes_first():
    of_node(2)
    group = dist.new_group([0, 1, 2, 3])
    for codec, op, most in ("int8", "mean", 0.02), ("onebit", "sum", 1):
        tensors, flat = tensors_of(0), tensors_of(0)
        all_reduce(tensors, codec, op=op, group=group)
        all_reduce(flat, codec, op=op, group=group, transport="flat")
        assert same_on_all(tensors)
        for one, other, exact in zip(tensors, flat, mean_of(0)):
            exact = exact * (4 if op == "sum" else 1)
            assert one.numel() == 0 or (one - exact).norm() < most * exact.norm(), (codec, op)
            assert one.numel() == 0 or not torch.equal(one, other)
    kept = _torch_groups.kept(group)
    shapes = {key[-1]: one._group.topology for key, one in kept.handles.items()}
    assert shapes["auto"].startswith("2 nodes of 2 ranks: sums within") and "one level" in shapes["flat"]
    asked = len(kept._groups)
    del os.environ["GRADCODEC_NODE"]  # nodes are found once
    all_reduce(tensors_of(1), group=group, timeout=100)
    assert len(kept._groups) == asked + 1 and all(one.nodes == [[0, 1], [2, 3]] for one in kept._groups.values())
    of_node(2)
    votes = torch.ones(9)
    all_reduce(votes, "sign", group=group)
    assert votes.tolist() == [1] * 9


def all_reduce_warns_once_of_nodes_of_different_sizes():
    os.environ["GRADCODEC_NODE"] = "large" if dist.get_rank() < 3 else "small"
    group, tensor = dist.new_group([0, 1, 2, 3]), torch.full((64,), 1.0 + dist.get_rank())
    with pytest.warns(UserWarning, match="nodes of 3, 1 ranks") as warned:
        for timeout in None, 100:
            all_reduce(tensor, "bf16", group=group, timeout=timeout)
    assert len(warned) == 1 and (tensor == 2.5).all()


def optimizers_sum_within_nodes_first():
    of_node(2)
    for make in lambda p, **how: OneBitSGD(p, 0.1, **how), lambda p, **how: OneBitAdam(p, 0.1, warmup_steps=1, **how):
        weights = {}
        for transport in "auto", "flat":
            weight = torch.nn.Parameter(torch.ones(600))
            optimizer = make([weight], transport=transport)
            for step in range(4):
                weight.grad = tensors_of(step)[0].view(-1)[:600].clone()
                if (step, dist.get_rank()) == (2, 1):
                    weight.grad[5] = torch.inf
                optimizer.step()
            assert optimizer.taken_back == 1
            assert (optimizer._group.levels is not None) == (transport == "auto")
            assert same_on_all([weight.detach()])
            weights[transport] = weight.detach()
        assert not torch.equal(weights["auto"], weights["flat"])  # encoded once for each node, not for each rank


def rank_1_dies(step):
    """Ends rank 1 as it begins exchange number `step` of four: at the end of step 2, or within step 4. The others raise
    within their own timeout: a wait of the process group would last 30 minutes."""
    of_node(2)
    model = model_of()
    compression = compress(model, "int4", raw=[], timeout=30)
    for number in range(3):  # DDP arranges its buckets after the first step
        gradients_of(model, number)
    before, exchange, exchanges = compression.state_dict(), _torch_nodes.Pairs._exchange, []

    def dies(self, *arguments):
        exchanges.append(None)
        if len(exchanges) == step and dist.get_rank() == 1:
            os._exit(0)
        return exchange(self, *arguments)

    _torch_nodes.Pairs._exchange = dies
    try:
        gradients_of(model, 3)
        failed = False
    except (GradCodecError, RuntimeError) as failure:
        assert "all_to_all" in str(failure) or "all_gather" in str(failure), failure
        assert "1800000ms" not in str(failure), failure
        failed = True
    assert dist.get_rank() != 1
    assert failed or (step == 4 and dist.get_rank() in (2, 3))  # these ranks need nothing more of rank 1
    compression.rollback()
    after = compression.state_dict()
    assert compression.taken_back == 1
    for name, errors in before["worker"].items():
        assert torch.equal(errors, after["worker"][name])
        for (first, part), (at, other) in zip(before["server"].get(name, []), after["server"].get(name, [])):
            assert first == at and torch.equal(part, other)
    if failed:  # the communicators are unusable, and fail at once
        handle = next(iter(compression._units())).handle
        with pytest.raises(GradCodecError) as again:
            handle.run_within(torch.zeros(sum(handle.sizes)), 1)
        assert again.value.status == Status.COMM
    os._exit(0)  # a barrier would not end


@pytest.mark.parametrize("step", [2, 4])  # tests/churn/steps.py kills a rank in each step
def test_the_wait_for_a_dead_rank_ends_at_the_timeout(step, tmp_path):
    on_ranks(("gloo", "cpu", 4), rank_1_dies, tmp_path, step)


@on_groups(4)
def test_over_nodes(group, tmp_path):
    on_ranks(
        group, in_turn, tmp_path, a_step_sums_within_nodes_first, what_arrived_and_what_is_kept_are_the_gradients,
        a_state_of_other_nodes_is_refused_alone, a_group_of_other_ranks_is_refused, signs_have_one_level,
        all_reduce_sums_within_nodes_first, optimizers_sum_within_nodes_first,
        all_reduce_warns_once_of_nodes_of_different_sizes,
    )  # fmt: skip


def test_nodes_are_ordered_by_their_lowest_rank(monkeypatch):
    assert _torch_nodes.nodes_of(["b", "a", "b", "a", "c"]) == [[0, 2], [1, 3], [4]]
    assert not _torch_nodes.are_levels([[0, 1]]) and not _torch_nodes.are_levels([[0], [1]])
    assert not _torch_nodes.are_levels([[0, 1], [2]]) and _torch_nodes.are_levels([[0, 2], [1, 3]])
    monkeypatch.setenv("GRADCODEC_NODE", "here")
    assert _torch_nodes.own_node() == "here"
    monkeypatch.delenv("GRADCODEC_NODE")
    assert len(_torch_nodes.own_node().split()) == 2
